"""The command ``train``: fine-tune from a YAML file."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hf_neuron_moe.cli.shared_options import Json, choice
from hf_neuron_moe.errors import ConfigError, counted

if TYPE_CHECKING:
    from hf_neuron_moe.finetune.train_options import Options

COMMAND = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    "options_metavar": "CONFIG [--key value ...] [OPTIONS]",
}
"""How the command is made: options that it does not know are for the configuration."""

NEEDED = ("trl", "peft", "datasets", "jinja2")


def train(
    context: typer.Context,
    list_configs: Annotated[bool, typer.Option("--list-configs", help="List the package's configurations.")] = False,
    show_config: Annotated[str | None, typer.Option("--show-config", metavar="NAME", help="Print one of them.")] = None,
    list_keys: Annotated[
        str | None, choice(("sft", "dpo"), "--list-keys", text="List the keys of a configuration of this method.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Find mistakes, load no model, train nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model: train CONFIG.yaml [--key value ...].

    CONFIG is a YAML file, or the name of one of the package's. Any key of it may follow as an option, which wins:
    model, train_files, output_dir, lora_rank, the fields of TRL's SFTConfig or DPOConfig, and the neuron_* options.
    Data: chat messages, ShareGPT, Alpaca, prompt and completion, or text; for `method: dpo` chosen and rejected.
    Several processes: `torchrun --nproc-per-node 2 -m hf_neuron_moe train CONFIG.yaml`, or `accelerate launch -m`.
    Ctrl-C stops after the step, with a checkpoint.
    """
    from hf_neuron_moe.finetune import configs

    words = list(context.args)
    if list_configs:
        about = {name: configs.summary_of(name) for name in configs.names()}
        text = "\n".join(f"{name:32} {summary}" for name, summary in about.items())
        typer.echo(json.dumps({"ok": True, "configs": about}) if as_json else text)
        return
    if show_config is not None:
        typer.echo(configs.find(show_config).read_text(encoding="utf-8"), nl=False)
        return
    if not words and list_keys is None:
        raise typer.BadParameter("a YAML file or the name of a configuration is needed.", param_hint="CONFIG")
    _prepare()
    from hf_neuron_moe.finetune.reading import parser_of, read_options
    from hf_neuron_moe.finetune.train_options import known_options

    if list_keys is not None:
        text = parser_of(list_keys).format_help()
        typer.echo(json.dumps({"ok": True, "keys": known_options(list_keys)}) if as_json else text)
        return
    options = read_options([*words, *(["--resume_from_checkpoint", "true"] if resume else [])])
    _run(options, words, check, as_json)


def _prepare() -> None:
    """Name the missing packages together; what must be set before torch is imported is set."""
    import importlib.util

    from hf_neuron_moe.backends.neuron.versions import settle_environment

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fix = f"Install what the extra 'train' has: pip install {' '.join(missing)}."
        raise ConfigError.about("the environment", "one with trl, peft and datasets", f"no {', '.join(missing)}", fix)
    settle_environment()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _run(options: Options, words: list[str], check_only: bool, as_json: bool) -> None:
    import torch
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    from hf_neuron_moe.finetune.train_run import TrainingInterrupted, check, finetune

    if as_json or not sys.stderr.isatty():  # bars fill a log with their steps
        disable_progress_bar()
        disable_progress_bars()
        if "disable_tqdm" not in options.places:
            os.environ.setdefault("TQDM_DISABLE", "1")  # read by TRL
            options.training.disable_tqdm = True
    try:
        if check_only:
            _, data = check(options)
            facts = {"kind": data.kind, "rows": len(data.train), "output_dir": options.training.output_dir}
            rows = counted(len(data.train), "row")
            text = f"no mistake found: {rows} of {data.kind}; a run writes to {facts['output_dir']}"
            typer.echo(json.dumps({"ok": True, **facts}) if as_json else text)
            return
        metrics = finetune(options, tell=(lambda text: None) if as_json else typer.echo, quiet=as_json)
        if as_json and options.training.process_index == 0:
            typer.echo(json.dumps({"ok": True, "output_dir": options.training.output_dir, "metrics": metrics}))
    except TrainingInterrupted as interrupted:
        if options.training.process_index == 0:
            begin = _program(options.training.world_size)
            typer.echo(f"{interrupted}\nresume: {begin} train {shlex.join(words)} --resume", err=True)
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _program(processes: int) -> str:
    """Return what started this run, as far as a process can tell."""
    if processes == 1:
        return "hf-neuron-moe"
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "ACCELERATE_MIXED_PRECISION" not in os.environ
    if by_torchrun and os.environ.get("LOCAL_WORLD_SIZE") == str(processes):
        return f"torchrun --nproc-per-node {processes} -m hf_neuron_moe"
    return "(with the same launcher) -m hf_neuron_moe"

#!/usr/bin/env python3
"""Fine-tune a causal language model on text, patched with the Neuron kernels' numbers; see --help and configs/."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interrupts import importing

from hf_neuron_moe.backends.neuron.versions import settle_environment
from hf_neuron_moe.cli.exit_codes import INTERRUPTED
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, NeuronMoEWarning

with importing(__name__):
    try:
        settle_environment()  # before torch is imported, which may load the plugin
        import torch
        from accelerate import DistributedType
        from datasets import Dataset
        from finetune_checks import check_length, check_merging, check_run, check_targets
        from finetune_model import describe_unpatched, load_model, load_tokenizer, patch, save_merged, with_adapters
        from finetune_options import Options, parse
        from finetune_places import read_config
        from finetune_text import blocks
        from huggingface_hub.errors import HfHubHTTPError
        from peft import PeftModel
        from transformers import default_data_collator, set_seed

        from hf_neuron_moe import NeuronMoETrainer
        from hf_neuron_moe.training import find_last_complete
        from hf_neuron_moe.training.cpu_fsdp import CpuFSDP2Mixin
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}. finetune.py needs the packages of the extra 'train': pip install -e '.[train]'")

FINAL = "final"
MERGED = "merged"


class FinetuneTrainer(CpuFSDP2Mixin, NeuronMoETrainer):
    """The package's Trainer, which also shards over CPU processes when asked to."""


def make_trainer(options: Options) -> FinetuneTrainer:
    """Load text and model, patch, attach adapters, and return the Trainer over them.

    Raises:
        NeuronMoEError: an option does not fit the text, the model or another option.
    """
    training = options.training
    set_seed(training.seed)  # adapters are initialized before the Trainer seeds
    tokenizer = load_tokenizer(options.model)
    if not Path(options.model.model).is_dir():  # the hub's models; check_run looks at those here
        config = read_config(options.model, online=True)
        check_length(options, config)
        check_targets(options, config)
    with training.main_process_first(desc="text"):
        train, held_out = blocks(options.data, tokenizer)
    check_evaluation(options, held_out)
    model = load_model(options.model)
    report = patch(model, training, options.lora)
    say(training, str(report) if report else describe_unpatched(model))
    whole = with_adapters(model, options.lora)
    if isinstance(whole, PeftModel) and training.gradient_checkpointing:
        whole.enable_input_require_grads()  # reentrant checkpoints pass no gradient on where no input asks for one
    trained = sum(param.numel() for param in whole.parameters() if param.requires_grad)
    say(training, f"{trained:,} trainable parameters; {len(train)} training blocks of {options.data.block_length}")
    trainer = FinetuneTrainer(
        model=whole,
        args=training,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    check_merging(options.lora, sharded=trainer.is_fsdp_enabled)
    state = trainer.accelerator.state
    say(training, describe_processes(state.num_processes, state.distributed_type, state.device))
    return trainer


def describe_processes(count: int, kind: DistributedType, device: torch.device) -> str:
    """Say in words on how many processes, and how, a run is spread."""
    if count == 1 and kind is DistributedType.NO:
        return f"one process on {device}"
    return f"{count} process{'es' if count > 1 else ''} ({kind.value}) on {device}"


def check_evaluation(options: Options, held_out: Dataset | None) -> None:
    """Refuse evaluation during training that has no text, before the model is loaded."""
    if options.training.eval_strategy != "no" and held_out is None:
        raise ConfigError.about(
            "eval_strategy",
            "used with eval_files, eval_split or eval_share",
            "none of them",
            "Name evaluation text, or set eval_strategy: 'no'.",
        ).named("finetune")


def checkpoint_to_resume(options: Options) -> str | bool | None:
    """Return what ``Trainer.train`` resumes from: ``"auto"`` is the newest complete checkpoint, if there is one.

    What a kill left half written does not count, and a checkpoint that waits under another name does.
    """
    wish = options.training.resume_from_checkpoint
    if wish in (True, "true", "True"):
        return True
    if wish == "auto":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NeuronMoEWarning)  # given once more by train(), where there is a checkpoint
            found = find_last_complete(options.training.output_dir)
        return True if found is not None else None
    return wish or None


def finetune(options: Options) -> dict[str, Any]:
    """Train, evaluate and save; return the metrics.

    Written to ``output_dir``: ``final`` (the model, or the adapter), ``merged`` if asked for, ``trainer_state.json``
    with the loss of every logging step, ``*_results.json``, and what the Trainer itself writes.
    """
    check_run(options)
    trainer = make_trainer(options)
    out = Path(options.training.output_dir)
    metrics = trainer.train(resume_from_checkpoint=checkpoint_to_resume(options)).metrics
    trainer.save_metrics("train", metrics)
    if trainer.eval_dataset is not None:
        measured = trainer.evaluate()
        measured["eval_perplexity"] = math.exp(min(measured["eval_loss"], 700.0))
        trainer.save_metrics("eval", measured)
        metrics |= measured
    trainer.save_state()
    trainer.save_model(str(out / FINAL))
    if options.lora.lora_merge and trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        save_merged(model, trainer.processing_class, out / MERGED)
    shown = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items() if isinstance(value, float))
    say(options.training, f"{shown}\nsaved to {out / FINAL}")
    trainer.accelerator.wait_for_everyone()  # the first process may still write
    return metrics


def say(training: Any, text: str) -> None:
    """Print once per run, not once per process."""
    if training.process_index == 0:
        print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 2 for what cannot be run, 130 after Ctrl-C."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    code = 0
    try:
        finetune(parse(sys.argv[1:] if argv is None else argv))
    except NeuronMoEError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except ImportError as error:  # of an optimizer or another option of the Trainer, which asks for it late
        message = " ".join(str(error).split()).rstrip(".")
        print(f"error: an option needs a package: {message}. Install it, or change the option.", file=sys.stderr)
        code = 2
    except HfHubHTTPError as error:
        message = " ".join(str(error).split()).rstrip(".")
        print(f"error: the hub refused: {message}. Check the name, and `hf auth whoami`.", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; --resume_from_checkpoint auto continues from the newest checkpoint", file=sys.stderr)
        code = INTERRUPTED.code
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads may abort the process if Python ends under them
    return code


if __name__ == "__main__":
    sys.exit(main())

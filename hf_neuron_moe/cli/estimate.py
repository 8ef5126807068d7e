"""The command ``estimate``: what a training step will need, from ``config.json`` alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_neuron_moe.activation_policy import PRESETS, activations_from_text
from hf_neuron_moe.backends.neuron.versions import PLATFORMS
from hf_neuron_moe.cli.error_handling import interrupts_deferred
from hf_neuron_moe.cli.model_folder import model_folder, quiet_transformers
from hf_neuron_moe.cli.precision_options import Recipe, precision_asked
from hf_neuron_moe.cli.roofline_text import gibibytes, show_roofline
from hf_neuron_moe.cli.shared_options import BlockSize, Json, check_size, choice, size_in_bytes
from hf_neuron_moe.config import MOST_RANK, MOST_TOKENS, OPTIMIZERS, PRECISIONS, NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, ConversionError, NothingToPatchError, counted
from hf_neuron_moe.precision_map import as_precision, spelled

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn
    from transformers import PreTrainedModel

    from hf_neuron_moe.training.memory_estimate import PolicyEstimate, TrainingEstimate

_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


MOST_DEVICES = 4096
GPU_NAMES = ("h100", "b200")
"""Those of ``device/roofline.toml``, which is read when it is needed."""


def _size(text: str) -> Any:
    return typer.Option(min=1, max=MOST_DEVICES, help=text)


def estimate(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder with config.json, such a file, or a Hub id org/name.")
    ],
    tokens: Annotated[int | None, typer.Option(min=1, max=MOST_TOKENS, help="Tokens per step and device.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=MOST_TOKENS, help="Sequences per step and device.")] = None,
    length: Annotated[int | None, typer.Option(min=1, max=MOST_TOKENS, help="Tokens per sequence.")] = None,
    activations: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="Preset, budget such as 512KiB/token, or a policy as a JSON object; repeatable. Default: all presets.",
        ),
    ] = None,
    precision: Annotated[str | None, choice(PRECISIONS, text="Precision of the blocks. Default: bf16.")] = None,
    recipe: Recipe = None,
    dtype: Annotated[str | None, choice(tuple(_TORCH_NAMES), text="Of the parameters. Default: config.json's.")] = None,
    optimizer: Annotated[str, choice(OPTIMIZERS, text="Optimizer whose states are counted.")] = "adamw",
    lora_rank: Annotated[
        int,
        typer.Option(min=0, max=MOST_RANK, help="Rank of LoRA adapters outside of the blocks; 0: train everything."),
    ] = 0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Keep the layers' inputs and recompute each layer.")
    ] = False,
    device: Annotated[
        str | None,
        choice((*PLATFORMS, *GPU_NAMES), text="Also the blocks' least time on a logical core or GPU, as published."),
    ] = None,
    block_size: BlockSize = 512,
    tp: Annotated[int, _size("Ranks that split each layer (tensor parallelism) and share a batch.")] = 1,
    ep: Annotated[int, _size("Ranks that hold different experts.")] = 1,
    fsdp: Annotated[int, _size("Ranks that shard parameters, each with a batch of its own.")] = 1,
    pp: Annotated[int, _size("Pipeline stages, with which transformers only runs inference.")] = 1,
    dp_replicate: Annotated[int, _size("Replicas of all that.")] = 1,
    fit: Annotated[
        str | None, typer.Option(metavar="SIZE", callback=_checked, help="Search a layout that fits, e.g. 24GiB.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, max=MOST_DEVICES, help="Number of devices for --fit.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate a training step's memory and least time.

    Parameters, gradients, optimizer states and the activations that each policy saves, next to stock transformers.
    --tp, --ep, --fsdp, --pp and --dp-replicate are those of transformers' DistributedConfig: then it is one rank's.
    With --device also the least time that the step's blocks take. Attention is counted as SDPA saves it.
    Needs no weights and no memory. Temporaries and the device's own needs come on top.
    """
    sizes = {"tp": tp, "ep": ep, "fsdp": fsdp, "pp": pp, "dp_replicate": dp_replicate}
    _check_layout(sizes, fit, devices, device)
    configs, asked = {}, precision_asked(precision, recipe)
    for text in activations or PRESETS:
        policy = activations_from_text(text, "--activations")
        configs[text] = NeuronMoEConfig(precision=asked, activations=policy, block_size=block_size)
    import torch

    from hf_neuron_moe.training.fit import fit_layout
    from hf_neuron_moe.training.memory_estimate import estimate_training
    from hf_neuron_moe.training.one_rank import Layout

    model = _original_model(model_dir)
    wanted = getattr(torch, _TORCH_NAMES[dtype]) if dtype else model.config.dtype
    model.to(wanted or torch.float32)  # type: ignore[arg-type]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    batch, length = batch_of(tokens, batch, length, context)
    if device is not None:  # before adapters are put on the model
        from hf_neuron_moe.device.kernel_support import block_groups

        kept, groups = _kept_by_policies(model, configs), block_groups(model)
        own = _own_precisions(model, configs)
    with interrupts_deferred(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's calls of what transformers will rename
        options: dict[str, Any] = {
            "batch": batch,
            "length": length,
            "optimizer": optimizer,
            "lora_rank": lora_rank,
            "gradient_checkpointing": gradient_checkpointing,
        }
        found = None
        if fit is not None and devices is not None:
            found = fit_layout(model, configs, memory=size_in_bytes(fit), devices=devices, **options)
            result = found.estimate
        else:
            layout = Layout(**sizes) if any(size > 1 for size in sizes.values()) else None
            result = estimate_training(model, configs, layout=layout, **options)
    floor = None
    if device is not None:
        from hf_neuron_moe.device.roofline import Step, roofline

        step = Step(result.tokens, block_size, trained=not lora_rank, checkpointing=gradient_checkpointing)
        floor = roofline(groups, device, as_precision(asked, PRECISIONS), step, kept, own)
        floor = replace(floor, memory={policy.name: policy.total for policy in result.policies})
    named = str(model.dtype).removeprefix("torch.")
    if as_json:
        facts = {"ok": True, "model": str(model_dir), "dtype": named, "precision": asked} | result.to_dict()
        if found is not None:
            chosen = {"policy": found.policy.name, "layouts": found.layouts, "refused": dict(found.refused)}
            facts |= {"fit": asdict(found.layout) | chosen}
        typer.echo(json.dumps(facts if floor is None else facts | {"roofline": floor.to_dict()}))
        return
    if found is not None:
        typer.echo(
            f"Fits {fit} on {devices} devices: {found.layout}, activations {found.policy.name}. Of the layouts that"
        )
        typer.echo(f"fit it sends the fewest bytes. transformers has {found.layouts} for these devices; without:")
        typer.echo("".join(f"  {count:>4}  {reason}\n" for reason, count in found.refused.items()))
    _show(result, f"{type(model).__name__}, {named}, blocks in {spelled(asked)}")
    if context is not None and length > context:
        typer.echo(f"The sequences are longer than the {context} positions that config.json gives the model.")
    if floor is not None:
        show_roofline(floor)


def _checked(size: str | None) -> str | None:
    return None if size is None else check_size(size)


def _check_layout(sizes: dict[str, int], fit: str | None, devices: int | None, device: str | None) -> None:
    given = [f"--{name.replace('_', '-')}" for name, size in sizes.items() if size > 1]
    if (fit is None) is not (devices is None):
        raise typer.BadParameter("--fit needs --devices, and --devices needs --fit.")
    if fit is not None and given:
        raise typer.BadParameter(f"--fit searches the layout: leave out {', '.join(given)}.")
    if device is not None and (fit or given):
        raise typer.BadParameter("--device counts one device that holds the whole model: leave out the layout.")


def _original_model(model_dir: Path) -> PreTrainedModel:
    """The model; what a step of a loaded conversion holds depends on its stored layouts, which are not estimated."""
    from hf_neuron_moe.convert.assign import build_meta_model
    from hf_neuron_moe.convert.io.folder import is_conversion

    quiet_transformers()
    with model_folder(model_dir) as folder:
        if is_conversion(folder):
            fix = (
                "The config.json of the checkpoint it was made of is enough. `hf-neuron-moe doctor` judges the blocks "
                "of a conversion itself, and `hf-neuron-moe inspect` tells their bytes."
            )
            raise ConversionError.about(str(folder), "an original checkpoint", "a conversion", fix)
        return build_meta_model(folder, attention=None)


def _kept_by_policies(model: nn.Module, configs: dict[str, NeuronMoEConfig]) -> dict[str, dict[str, str]] | None:
    """By policy what each block keeps; None if no policy can be had, for which the memory's estimate says why."""
    from hf_neuron_moe.device.roofline import saved_by_blocks

    kept: dict[str, dict[str, str]] = {}
    for name, config in configs.items():
        with suppress(ConfigError, NothingToPatchError):
            kept[name] = saved_by_blocks(model, config)
    return kept or None


def _own_precisions(model: nn.Module, configs: dict[str, NeuronMoEConfig]) -> dict[str, str]:
    """Each block's precision, which no policy changes; nothing if no policy can be had."""
    from hf_neuron_moe.device.roofline import precisions_by_blocks

    for config in configs.values():
        with suppress(ConfigError, NothingToPatchError):
            return precisions_by_blocks(model, config)
    return {}


def batch_of(tokens: int | None, batch: int | None, length: int | None, context: int | None) -> tuple[int, int]:
    """Return batch and length for what was given.

    With `tokens` alone, sequences are as long as the model's context allows and divides them.
    """
    if tokens is None:
        if length is None:
            raise typer.BadParameter("give --tokens, or --length (and --batch).")
        batch = batch or 1
        if batch * length > MOST_TOKENS:
            raise typer.BadParameter(f"--batch {batch} times --length {length} is more than {MOST_TOKENS:,} tokens.")
        return batch, length
    if batch is not None and length is not None and batch * length != tokens:
        raise typer.BadParameter(f"--batch {batch} times --length {length} is not --tokens {tokens}.")
    part = batch or length
    if part is not None:
        if tokens % part:
            raise typer.BadParameter(f"--tokens {tokens} is not a multiple of {part}.")
        length = length or tokens // part
        return tokens // length, length
    longest = min(tokens, context or tokens)
    pairs = ((size, tokens // size) for size in range(1, isqrt(tokens) + 1) if tokens % size == 0)
    length = max(size for pair in pairs for size in pair if size <= longest)
    if length * 8 < longest:
        raise typer.BadParameter(f"--tokens {tokens} has no divisor near {longest}: give --length too.")
    return tokens // length, length


def _show(result: TrainingEstimate, title: str) -> None:
    from rich.console import Console

    def line(text: str) -> None:
        console.print(text, soft_wrap=True)

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has no edge
    share = "" if result.trainable == result.parameters else f" ({result.trainable:,} trained)"
    line(f"{title}: {result.parameters:,} parameters{share}, {counted(result.patched, 'block')} patched")
    checkpointing = ", gradient checkpointing" if result.gradient_checkpointing else ""
    line(f"{result.batch} x {result.length} = {result.tokens:,} tokens per step{checkpointing}")
    rank = result.rank
    if rank is not None:
        named = ", ".join(f"{name} {size}" for name, size in rank.layout.items() if name != "rank" and size)
        line(f"On each of {rank.devices} devices ({named}); the tokens are those of the ranks that share a batch.")
    fixed = {
        "parameters and buffers": result.parameter_bytes,
        "gradients": result.gradient_bytes,
        f"{result.optimizer} states": result.optimizer_bytes,
    }
    if rank is not None:
        fixed |= {"gathered by FSDP": rank.gathered_bytes, "all-to-all buffers": rank.exchanged_bytes}
    for name, size in fixed.items():
        line(f"  {name:<24}{gibibytes(size):>12}")
    console.print(policies_table(result.policies, result.refused))
    if result.gradient_checkpointing and any(policy.saved_blocks == 0 for policy in result.policies):
        line("Blocks at 0: the peak is the head's and the loss's, before a layer is recomputed.")
    if not result.patched:
        line("No block can be patched; `hf-neuron-moe plan` says why.")
    if result.policies[0].worst_total is not None:
        line("Every rank gets its even share of tokens; at worst all choose experts of this one.")
    if rank is not None and rank.layout["pp"] != 1:
        line("transformers only runs inference with pipeline stages: parameters of the largest stage, nothing saved.")
    elif rank is not None:
        sent = rank.sent_bytes * (rank.layout["tp"] or 1) / result.tokens / 1024
        line(f"The ranks send {sent:,.1f} KiB per token and step.")
    line("Total: all of the above. Temporaries and the device's own needs come on top.")


def policies_table(policies: Sequence[PolicyEstimate], refused: Mapping[str, str]) -> Table:
    """Return the table of the policies; in a narrow terminal its headings wrap, and no size is cut."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("activations", overflow="fold", min_width=9)
    headings = ["KiB/token in blocks", "saved: blocks", "saved: rest", "total"]
    if policies[0].worst_total is not None:
        headings.append("at worst")
    rows = []
    for policy in policies:
        sizes = [policy.saved_blocks, policy.saved_rest, policy.total]
        sizes += [policy.worst_total] if policy.worst_total is not None else []
        rows.append([policy.name, f"{policy.blocks_bytes_per_token / 1024:,.1f}", *map(gibibytes, sizes)])
    for column, heading in enumerate(headings, 1):
        table.add_column(heading, justify="right", min_width=max(len(row[column]) for row in rows))
    for row in rows:
        table.add_row(*row)
    for name, reason in refused.items():
        table.add_row(escape(f"{name}: refused: {reason}"), *["-"] * len(headings))
    return table

"""Compares a model on several processes with the same model on one: losses of some steps and every gradient.

    torchrun --nproc-per-node 4 -m hf_neuron_moe.parity MODEL_DIR --layout ep=2,fsdp=4 --precision mxfp8

Both start from the same checkpoint and see the same global batches. Without ``--precision`` the model is not patched,
and ``--experts-implementation`` names what transformers computes experts with: so the script finds out, too, whether a
fault is transformers' own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SIZES = ("tp", "ep", "fsdp", "dp_replicate")
"""Names of a layout's sizes, each that of ``DistributedConfig`` without ``_size``."""


@dataclass(frozen=True)
class Trial:
    """What is compared: a model, its layout over processes, and how its blocks compute."""

    folder: str
    layout: Mapping[str, int] = field(default_factory=dict)
    patch: Mapping[str, Any] | None = None  # options of ``patch_model``; None leaves the model stock
    experts_implementation: str | None = None
    ep_implementation: str = "auto"
    tp_plan: Mapping[str, str] | None = None  # rules in the place of the model's own
    steps: int = 8
    rows: int = 4
    tokens: int = 16
    learning_rate: float = 1e-3
    checkpointing: bool = False
    prepare: Callable[[nn.Module], nn.Module] | None = None  # what is done to the patched model, adapters for example

    @property
    def batches(self) -> int:
        """Number of processes with batches of their own."""
        return self.layout.get("fsdp", 1) * self.layout.get("dp_replicate", 1)


@dataclass
class Run:
    """What one run came to."""

    losses: list[float]  # one per step, of the global batch
    gradients: dict[str, Tensor]  # of the first step, whole, in fp32


@dataclass
class Comparison:
    """How far several processes are from one, relative to one."""

    loss: float  # the largest difference of all steps
    gradients: dict[str, float]  # by parameter: norm of the difference over norm of the gradient
    losses: list[float]

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter whose gradient is farthest away."""
        return max(self.gradients.items(), key=lambda item: item[1])


def load(trial: Trial, *, distributed: bool) -> Any:
    """Return the trial's model from its folder, patched as it says."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if trial.experts_implementation is not None:
        options["experts_implementation"] = trial.experts_implementation
    if distributed:
        from transformers.distributed import DistributedConfig

        sizes: Any = {f"{name}_size": size for name, size in trial.layout.items()}
        plan = None if trial.tp_plan is None else dict(trial.tp_plan)
        config = DistributedConfig(**sizes, tp_plan=plan, ep_implementation=trial.ep_implementation)
        options["distributed_config"] = config
    model: Any = AutoModelForCausalLM.from_pretrained(trial.folder, **options)
    if trial.patch is not None:
        from hf_neuron_moe.patching import patch_model

        patch_model(model, trial.patch)
    if trial.prepare is not None:
        model = trial.prepare(model)
    if trial.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch_of(trial: Trial, vocabulary: int, step: int, part: int, parts: int) -> Tensor:
    """Return the token ids of a step, those of one of `parts` processes in the order of ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, vocabulary, (trial.rows, trial.tokens), generator=generator)
    return ids.chunk(parts)[part]


def train(trial: Trial, model: Any, part: int = 0, parts: int = 1) -> Run:
    """Train for the trial's steps on one part of each batch."""
    learned = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(learned.values(), lr=trial.learning_rate, foreach=False)
    run = Run([], {})
    vocabulary = model.config.get_text_config().vocab_size
    for step in range(trial.steps):
        ids = batch_of(trial, vocabulary, step, part, parts)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if step == 0:
            run.gradients = {name: whole(param.grad) for name, param in learned.items() if param.grad is not None}
        run.losses.append(mean_of_ranks(loss.detach(), parts))
        optimizer.step()
        optimizer.zero_grad()
    return run


def whole(gradient: Tensor) -> Tensor:
    """Return a gradient of all processes in fp32."""
    full: Any = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.float()


def mean_of_ranks(loss: Tensor, parts: int) -> float:
    """Return the mean of all processes' losses; processes with the same batch have the same."""
    if parts > 1:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def compare(expected: Run, actual: Run) -> Comparison:
    """Return how far `actual` is from `expected`; a gradient that only one has counts as infinitely far."""
    apart = dict.fromkeys((*expected.gradients, *actual.gradients), torch.inf)
    for name in expected.gradients.keys() & actual.gradients.keys():
        gradient, other = expected.gradients[name], actual.gradients[name]
        if gradient.shape == other.shape:
            distance = ((other - gradient).norm() / gradient.norm().clamp(min=1e-30)).item()
            apart[name] = distance if math.isfinite(distance) else torch.inf
    losses = max(abs(one - other) / abs(one) for one, other in zip(expected.losses, actual.losses, strict=True))
    return Comparison(losses, apart, actual.losses)


def tried(trial: Trial, expected: Run | None = None) -> Comparison | None:
    """Run a trial on all processes and compare; on the first process the result, on the others None.

    `expected` is the run on one process, on the first one; without it it is made there.
    """
    rank, parts = dist.get_rank(), trial.batches
    if expected is None and rank == 0:
        expected = train(trial, load(trial, distributed=False))
    dist.barrier()
    tensor_parallel = trial.layout.get("tp", 1)
    actual = train(trial, load(trial, distributed=True), rank // tensor_parallel, parts)
    return None if expected is None or rank else compare(expected, actual)


def _layout(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in SIZES or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is no size such as tp=2; names are {', '.join(SIZES)}")
        sizes[name] = int(size)
    return sizes


def _rows(result: Comparison) -> Iterator[str]:
    yield f"largest difference of a loss: {result.loss:.1e}"
    yield "largest differences of gradients (norm of the difference over the norm):"
    ordered = sorted(result.gradients.items(), key=lambda item: -item[1])
    for name, distance in ordered[:10]:
        yield f"  {distance:.1e}  {name}"


def main(arguments: list[str] | None = None) -> int:
    """Compare as asked for on the command line; exit status 1 where the tolerance is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m hf_neuron_moe.parity", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="folder of a checkpoint; small ones are enough")
    parser.add_argument("--layout", type=_layout, required=True, help="sizes, for example tp=2,ep=4,fsdp=2")
    parser.add_argument("--precision", choices=("fp32", "bf16", "mxfp8"), help="patch the model; without it is stock")
    parser.add_argument("--experts-implementation", help="transformers' own: grouped_mm, batched_mm, eager")
    parser.add_argument("--ep-implementation", default="auto", help="auto, all_to_all, all_reduce")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="rows of a global batch")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a row")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference allowed")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    asked = parser.parse_args(arguments)
    patch = None if asked.precision is None else {"precision": asked.precision}
    trial = Trial(
        asked.model,
        asked.layout,
        patch,
        asked.experts_implementation,
        asked.ep_implementation,
        steps=asked.steps,
        rows=asked.rows,
        tokens=asked.tokens,
    )
    needed, started = trial.batches * trial.layout.get("tp", 1), int(os.environ.get("WORLD_SIZE", "1"))
    if needed % (ep := trial.layout.get("ep", 1)):
        parser.error(f"ep must divide tp x fsdp x dp_replicate = {needed}, got {ep}: it adds no processes")
    if started != needed:
        parser.error(f"this --layout takes {needed} processes, got {started}: use torchrun --nproc-per-node {needed}")
    if trial.rows % trial.batches:
        parser.error(f"--rows must be a multiple of fsdp x dp_replicate = {trial.batches}, got {trial.rows}")
    dist.init_process_group(timeout=timedelta(seconds=300))
    try:
        result = tried(trial)
    finally:
        dist.destroy_process_group()
    if result is None:
        return 0
    lines = [json.dumps(asdict(result))] if asked.json else list(_rows(result))
    sys.stdout.write("\n".join(lines) + "\n")
    if max(result.loss, result.worst[1]) <= asked.tolerance:
        return 0
    sys.stderr.write(f"More than --tolerance {asked.tolerance}. Precisions that round need a larger one.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())

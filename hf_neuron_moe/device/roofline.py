"""The least time that a training step of a model's blocks takes on a chip, by published figures: an estimate.

Counted are matmuls and what must pass through the device's memory in the documented scheme; what the chip overlaps,
launches and synchronizes is not. Nothing here was measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from hf_neuron_moe.backends.neuron.backend import weight_copy_bytes
from hf_neuron_moe.backends.neuron.limits import (
    Block,
    Device,
    block_sizes,
    most_tokens,
    unsupported_reason,
    unsupported_reason_tokens,
)
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.device.kernel_support import DOCUMENTED_LNC, BlockGroup, DocumentedAdapter
from hf_neuron_moe.device.roofline_math import (
    GPUS,
    Chip,
    Floor,
    GPUBlock,
    Step,
    assumptions_of,
    chip_of,
    floor_of,
    needed_flops,
    source_of,
)
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.patching import patch_model, unpatch_model
from hf_neuron_moe.precision_map import Precision, precision_of

WEIGHT_LAYOUTS = ("kernel", "stock")
"""``NeuronMoEConfig(weights=...)``; the first is what ``"auto"`` takes where Neuron kernels compute."""


class Copies(NamedTuple):
    """Bytes of weight copies, kept from a step's first training forward to its optimizer's step."""

    total: int  # of all blocks
    largest_block: int  # of the block with most; under FSDP, where none are kept, what exists at a time


@dataclass(frozen=True)
class GroupFloor:
    """Blocks that are alike and keep the same, on one chip."""

    group: BlockGroup
    keep: str  # canonical keep string; empty where the block cannot be patched
    policies: Mapping[str, int]  # by name of a policy, how many of the blocks keep this under it
    flops: float = 0.0  # operations of one block without padding and recomputation
    floor: Floor | None = None  # of one block at the block size that was asked for; None where nothing can be said
    choices: tuple[Floor, ...] = ()  # the same at every block size that the kernels take
    discarded_seconds: float = 0.0  # what the documented backward adds for gradients of frozen weights
    reason: str | None = None
    """Why no Neuron kernel computes these blocks; the floor is then that of PyTorch in their place, padded to multiples
    of 128. On a GPU, and for blocks that PyTorch's own modules compute, why they are not patched: there is no floor."""
    copy_bytes: Mapping[str, int] = field(default_factory=dict)  # of one block's weights, by :data:`WEIGHT_LAYOUTS`
    precision: str = ""  # what the blocks compute with

    @property
    def padding_overhead_percent(self) -> float | None:
        """Operations on padding, in percent of those that are needed."""
        if self.floor is None:
            return None
        return 100 * ((self.floor.padded_flops - self.floor.recomputed_flops) / self.flops - 1)

    @property
    def best_block_size(self) -> int | None:
        """The block size with the least time; None for dense blocks."""
        return min(self.choices, key=lambda choice: choice.seconds).block_size if self.choices else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **self.group.to_dict(),
            "top_k": self.group.top_k,
            "precision": self.precision,
            "keep": self.keep,
            "policies": dict(self.policies),
            "kernel": {"usable": self.reason is None, "reason": self.reason},
            "flops": self.flops,
            "padding_overhead_percent": self.padding_overhead_percent,
            "floor": self.floor and self.floor.to_dict(),
            "discarded_seconds": self.discarded_seconds,
            "weight_copy_bytes": dict(self.copy_bytes),
            "best_block_size": self.best_block_size,
            "block_sizes": [choice.to_dict() for choice in self.choices],
        }


@dataclass(frozen=True)
class Roofline:
    """Result of :func:`roofline`."""

    core: Chip  # figures of one logical core, or of a GPU
    precision: Precision  # as asked for
    step: Step
    policies: tuple[str, ...]  # names of the activation policies
    groups: tuple[GroupFloor, ...]  # the model's blocks, those that the kernels compute first
    memory: Mapping[str, int] = field(default_factory=dict)  # by policy, the bytes of a step; empty if not given

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, on which PyTorch or Triton computes, and no Neuron kernel."""
        return self.core.name in GPUS

    @property
    def computed(self) -> tuple[GroupFloor, ...]:
        """The blocks that the kernels compute, or on a GPU all that are patched."""
        return tuple(part for part in self.groups if part.reason is None)

    @property
    def left_out(self) -> dict[str, str]:
        """By label, the blocks that no kernel computes and why."""
        return {part.group.label: part.reason for part in self.groups if part.reason is not None}

    @property
    def seconds(self) -> dict[str, float]:
        """By policy, of all blocks that the kernels compute."""
        return self._sums(lambda part: part.floor.seconds if part.floor is not None else 0.0)

    @property
    def discarded_seconds(self) -> dict[str, float]:
        """By policy, what the kernels add for gradients of frozen weights."""
        return self._sums(lambda part: part.discarded_seconds)

    def _sums(self, seconds: Callable[[GroupFloor], float]) -> dict[str, float]:
        parts = self.computed
        return {name: sum(part.policies.get(name, 0) * seconds(part) for part in parts) for name in self.policies}

    @property
    def copies(self) -> dict[str, Copies]:
        """By weight layout, the copies of all blocks that the kernels compute; empty where they compute none."""
        parts = {part.group: part for part in self.computed if part.copy_bytes}.values()
        sizes = {home: [(part.copy_bytes[home], len(part.group.names)) for part in parts] for home in WEIGHT_LAYOUTS}
        return {
            home: Copies(sum(size * count for size, count in blocks), max(blocks)[0])
            for home, blocks in sizes.items()
            if blocks
        }

    def held(self, policy: str, home: str = WEIGHT_LAYOUTS[0]) -> int:
        """Return the bytes that a step holds, copies included; the stock model has none."""
        copies = self.copies.get(home) if policy in self.policies else None
        return self.memory[policy] + (copies.total if copies else 0)

    def too_large(self, home: str = WEIGHT_LAYOUTS[0]) -> dict[str, int]:
        """By policy, the bytes by which a step exceeds a logical core's memory."""
        excess = {name: self.held(name, home) - self.core.memory for name in self.memory}
        return {name: size for name, size in excess.items() if size > 0}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        core = asdict(self.core)
        place = {"gpu": core} if self.on_gpu else {"logical_core": {"lnc": DOCUMENTED_LNC} | core}
        return {
            "kind": "estimate from published figures; nothing was measured",
            "source": source_of(self.core.name),
            "assumptions": assumptions_of(self.core.name),
            "device": self.core.name,
            **place,
            "precision": self.precision,
            **asdict(self.step),
            "blocks": [part.to_dict() for part in self.groups],
            "seconds": self.seconds,
            "discarded_seconds": self.discarded_seconds,
            "left_out": self.left_out,
            "memory": {
                "of_a_gpu" if self.on_gpu else "of_a_logical_core": self.core.memory,
                "weight_copies": {home: copies._asdict() for home, copies in self.copies.items()},
                "policies": {name: self._memory_of(name, size) for name, size in self.memory.items()},
            },
        }

    def _memory_of(self, policy: str, size: int) -> dict[str, Any]:
        with_copies = {home: self.held(policy, home) for home in WEIGHT_LAYOUTS}
        return {"bytes": size, "with_copies": with_copies, "fits": with_copies[WEIGHT_LAYOUTS[0]] <= self.core.memory}


@dataclass(frozen=True)
class TorchBlock(Block):
    """A block as the torch backend pads it, in place of a kernel."""

    @property
    def blockwise(self) -> bool:
        """Whether tokens are sorted into blocks of experts."""
        return self.kind == "experts"

    @property
    def padded(self) -> tuple[int, int]:
        """H and I in multiples of 128."""
        return padded_size(self.hidden), padded_size(self.inner)


def saved_by_blocks(model: nn.Module, config: NeuronMoEConfig) -> dict[str, str]:
    """Return each block's canonical keep string, budgets and exceptions resolved; `model` is unpatched afterwards."""
    patch_model(model, config, strict=False)
    try:
        return {block.neuron_name: block.neuron_keep for block in model.modules() if isinstance(block, NeuronBlock)}
    finally:
        unpatch_model(model)


def precisions_by_blocks(model: nn.Module, config: NeuronMoEConfig) -> dict[str, str]:
    """Return each block's precision; `model` is unpatched afterwards."""
    entries = patch_model(model, config, strict=False).patched
    unpatch_model(model)
    return {entry.name: entry.precision for entry in entries if entry.precision is not None}


def roofline(
    groups: Iterable[BlockGroup],
    chip: str,
    precision: Precision,
    step: Step,
    kept: Mapping[str, Mapping[str, str]] | None = None,
    own: Mapping[str, str] | None = None,
) -> Roofline:
    """Estimate the least time of forward and backward of a model's blocks on one logical core, or on one GPU.

    `groups` are those of :func:`~hf_neuron_moe.device.kernel_support.block_groups`, `chip` is ``"trn2"``, ``"trn3"``,
    ``"h100"`` or ``"b200"``.
    `kept` has by policy what :func:`saved_by_blocks` returns; without it every block keeps gate and up. `own` is what
    :func:`precisions_by_blocks` returns; without it, a map of precisions is matched with the blocks' first names.
    """
    core = chip_of(chip)
    kept, own = {"minimal": {}} if kept is None else kept, own or {}
    parts = []
    for whole in groups:
        names: dict[str, list[str]] = defaultdict(list)
        for name in whole.names:
            names[own.get(name) or precision_of(precision, (name,))].append(name)
        for each, alike in names.items():
            group = whole if len(names) == 1 else replace(whole, names=tuple(alike))
            by_keep: dict[str, Counter[str]] = defaultdict(Counter)
            for policy, keeps in kept.items():
                for name in group.names:
                    by_keep[keeps.get(name, "minimal")][policy] += 1
            parts += [_group_floor(group, keep, counts, core, each, step) for keep, counts in by_keep.items()]
    parts.sort(key=lambda part: part.reason is not None)
    return Roofline(core, precision, step, tuple(kept), tuple(parts))


def _group_floor(
    group: BlockGroup, keep: str, policies: Mapping[str, int], core: Chip, precision: str, step: Step
) -> GroupFloor:
    if group.hidden is None or group.inner is None:
        return GroupFloor(group, "", policies, reason=group.reason or "its sizes are not known", precision=precision)
    result = partial(GroupFloor, group, keep, policies, precision=precision)
    block, adapter = group.block(precision, step.block_size), DocumentedAdapter()
    pairs = step.tokens * (1 if group.top_k is None else min(group.top_k, group.experts or 0))
    if not pairs:
        return result(reason=group.reason or "the model does not say how many experts a token has")
    on_gpu, reason = core.name in GPUS, group.reason
    if not on_gpu:
        reason = reason or unsupported_reason(block, Device(core.name, DOCUMENTED_LNC), adapter)
    if reason is None and not on_gpu:
        reason = unsupported_reason_tokens(most_tokens(block), step.tokens)
        if reason is not None:
            reason += f", and a step has {step.tokens:,}: take smaller micro-batches and accumulate gradients"
    step = replace(step, trained=step.trained and not group.codes)
    flops = needed_flops(pairs, block, trained=step.trained)
    if precision not in core.flops or (group.reason is not None and not group.codes):
        return result(flops, reason=reason or f"{core.name} has no {precision}")

    def floor(block: Block, step: Step = step) -> Floor:
        return floor_of(block, core, step, keep, group.top_k, group.experts)

    if on_gpu or reason is not None:
        # PyTorch in a kernel's place takes every block size, so there is none to recommend.
        in_place = GPUBlock if on_gpu else TorchBlock
        return result(flops, floor(in_place(**vars(block))), reason=reason)
    sizes = block_sizes(block, adapter) if group.experts is not None else ()
    least, trained = floor(block), floor(block, replace(step, trained=True))
    copies = partial(weight_copy_bytes, adapter, block, group.experts)
    return result(
        flops,
        least,
        choices=tuple(floor(group.block(precision, size)) for size in sizes),
        discarded_seconds=trained.seconds - least.seconds,
        copy_bytes={home: copies(there, group.dtype) for home, there in zip(WEIGHT_LAYOUTS, group.ordered)},
    )

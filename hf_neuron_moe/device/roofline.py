"""The least time that a training step of a model's blocks takes on a chip, by published figures: an estimate.

Counted are the matmuls of forward and backward and what must pass through the device's memory in the scheme that the
kernels' documents describe; what the chip overlaps, launches and synchronizes is not. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from hf_neuron_moe.backends.neuron.copies import weight_copy_bytes
from hf_neuron_moe.backends.neuron.limits import Block, Device, block_sizes, most_tokens, why_not, why_not_tokens
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.device.figures import CHIPS, SOURCE, Chip
from hf_neuron_moe.device.passes import ASSUMPTIONS, Floor, Work, dense_floor, needed_flops, routed_floor
from hf_neuron_moe.device.usable import DOCUMENTED_LNC, BlockGroup, DocumentedAdapter
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.patching import patch_model, unpatch_model

HOMES = ("kernel", "stock")
"""``NeuronMoEConfig(weights=...)``; the first is what ``"auto"`` takes where Neuron kernels compute."""


@dataclass(frozen=True)
class Copies:
    """Bytes of weight copies, kept from a step's first training forward to its optimizer's step.

    Attributes:
        total: of all blocks.
        largest_block: of the block with most; under FSDP, where none are kept, what exists at a time.
    """

    total: int
    largest_block: int


@dataclass(frozen=True)
class TorchBlock(Block):
    """A block as the torch backend pads it, in place of a kernel."""

    @property
    def padded(self) -> tuple[int, int]:
        """H and I in multiples of 128."""
        return padded_size(self.hidden), padded_size(self.inner)


@dataclass(frozen=True)
class Step:
    """What a training step asks of all blocks.

    Attributes:
        tokens: T per step and device.
        block_size: B of experts.
        trained: whether the blocks' weights are trained; False for LoRA outside of them.
        checkpointing: gradient checkpointing of the layers.
    """

    tokens: int
    block_size: int = 512
    trained: bool = True
    checkpointing: bool = False


@dataclass(frozen=True)
class GroupFloor:
    """Blocks that are alike and keep the same, on one chip.

    Attributes:
        group: the blocks.
        keep: canonical keep string; empty where the block cannot be patched.
        policies: by name of a policy, how many of the blocks keep this under it.
        flops: floating-point operations of one block without padding and recomputation.
        floor: of one block at the block size that was asked for; None where nothing can be said.
        choices: the same at every block size that the kernels take.
        discarded_seconds: what the documented backward adds for gradients of frozen weights, which nobody reads.
        reason: why no Neuron kernel computes these blocks; the floor is then that of PyTorch in their place, padded
            to multiples of 128; None of blocks that PyTorch's own modules compute too.
        copy_bytes: of the copies of one block's weights that the kernels read, by the home of the weights
            (:data:`HOMES`); empty where no kernel computes it.
    """

    group: BlockGroup
    keep: str
    policies: Mapping[str, int]
    flops: float
    floor: Floor | None
    choices: tuple[Floor, ...]
    discarded_seconds: float
    reason: str | None
    copy_bytes: Mapping[str, int] = field(default_factory=dict)

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
        group, floor = self.group, self.floor
        return {
            "kind": group.kind,
            "names": list(group.names),
            "experts": group.experts,
            "top_k": group.top_k,
            "hidden_size": group.hidden,
            "intermediate_size": group.inner,
            "keep": self.keep,
            "policies": dict(self.policies),
            "kernel": {"usable": self.reason is None, "reason": self.reason},
            "flops": self.flops,
            "padding_overhead_percent": self.padding_overhead_percent,
            "floor": None if floor is None else asdict(floor) | {"bound": floor.bound},
            "discarded_seconds": self.discarded_seconds,
            "weight_copy_bytes": dict(self.copy_bytes),
            "best_block_size": self.best_block_size,
            "block_sizes": [asdict(choice) | {"bound": choice.bound} for choice in self.choices],
        }


@dataclass(frozen=True)
class Roofline:
    """Result of :func:`roofline`.

    Attributes:
        core: figures of one logical core.
        precision: of the blocks.
        step: what was asked.
        policies: names of the activation policies.
        groups: the model's blocks, those that the kernels compute first.
        memory: by policy, the bytes that a step holds; empty where they were not given.
    """

    core: Chip
    precision: str
    step: Step
    policies: tuple[str, ...]
    groups: tuple[GroupFloor, ...]
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def computed(self) -> tuple[GroupFloor, ...]:
        """Those that the kernels compute."""
        return tuple(part for part in self.groups if part.reason is None)

    @property
    def left_out(self) -> dict[str, str]:
        """By label, the blocks that no kernel computes and why."""
        return {part.group.label: part.reason for part in self.groups if part.reason is not None}

    @property
    def seconds(self) -> dict[str, float]:
        """By policy, of all blocks that the kernels compute."""
        return {name: self._sum(name, discarded=False) for name in self.policies}

    @property
    def discarded_seconds(self) -> dict[str, float]:
        """By policy, what the kernels add for gradients of frozen weights."""
        return {name: self._sum(name, discarded=True) for name in self.policies}

    def _sum(self, policy: str, *, discarded: bool) -> float:
        return sum(
            part.policies.get(policy, 0) * (part.discarded_seconds if discarded else part.floor.seconds)
            for part in self.computed
            if part.floor is not None
        )

    @property
    def copies(self) -> dict[str, Copies]:
        """By home of the weights, the copies of all blocks that the kernels compute; empty where they compute none."""
        by_home: dict[str, Copies] = {}
        for group in {part.group: part for part in self.computed}.values():
            for home, size in group.copy_bytes.items():
                before = by_home.get(home, Copies(0, 0))
                total = before.total + size * len(group.group.names)
                by_home[home] = Copies(total, max(before.largest_block, size))
        return by_home

    def held(self, policy: str, home: str = HOMES[0]) -> int:
        """Return the bytes that a step holds, copies included; the stock model has none."""
        copies = self.copies.get(home, Copies(0, 0)).total if policy in self.policies else 0
        return self.memory[policy] + copies

    def too_large(self, home: str = HOMES[0]) -> dict[str, int]:
        """By policy, the bytes by which a step exceeds a logical core's memory."""
        excess = {name: self.held(name, home) - self.core.memory for name in self.memory}
        return {name: size for name, size in excess.items() if size > 0}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        return {
            "kind": "estimate from published figures; nothing was measured",
            "source": SOURCE,
            "assumptions": list(ASSUMPTIONS),
            "device": self.core.name,
            "logical_core": {"lnc": DOCUMENTED_LNC, **asdict(self.core)},
            "precision": self.precision,
            **asdict(self.step),
            "blocks": [part.to_dict() for part in self.groups],
            "seconds": self.seconds,
            "discarded_seconds": self.discarded_seconds,
            "left_out": self.left_out,
            "memory": {
                "of_a_logical_core": self.core.memory,
                "weight_copies": {home: asdict(copies) for home, copies in self.copies.items()},
                "policies": {
                    name: {
                        "bytes": size,
                        "with_copies": {home: self.held(name, home) for home in HOMES},
                        "fits": name not in self.too_large(),
                    }
                    for name, size in self.memory.items()
                },
            },
        }


def kept_by_blocks(model: nn.Module, configs: Mapping[str, NeuronMoEConfig]) -> dict[str, dict[str, str]]:
    """Return by policy and block what the block keeps, as a canonical string; budgets and exceptions are resolved.

    Args:
        model: unpatched, and unpatched afterwards; at least one block can be patched.
        configs: by name of the policy.
    """
    kept = {}
    for name, config in configs.items():
        patch_model(model, config, strict=False)
        try:
            kept[name] = {
                block.neuron_name: block.neuron_keep for block in model.modules() if isinstance(block, NeuronBlock)
            }
        finally:
            unpatch_model(model)
    return kept


def roofline(
    groups: Iterable[BlockGroup],
    chip: str,
    precision: str,
    step: Step,
    kept: Mapping[str, Mapping[str, str]] | None = None,
) -> Roofline:
    """Estimate the least time of forward and backward of a model's blocks on one logical core.

    Args:
        groups: of :func:`~hf_neuron_moe.device.usable.block_groups`.
        chip: ``"trn2"`` or ``"trn3"``.
        precision: ``"bf16"``, ``"mxfp8"`` or ``"fp32"``.
        step: tokens and options.
        kept: of :func:`kept_by_blocks`; None: every block keeps gate and up.
    """
    core = CHIPS[chip].core(DOCUMENTED_LNC)
    kept = {"minimal": {}} if kept is None else kept
    parts = []
    for group in groups:
        by_keep: dict[str, dict[str, int]] = {}
        for policy, keeps in kept.items():
            for name in group.names:
                counts = by_keep.setdefault(keeps.get(name, "minimal"), {})
                counts[policy] = counts.get(policy, 0) + 1
        parts += [_group_floor(group, keep, counts, core, precision, step) for keep, counts in by_keep.items()]
    parts.sort(key=lambda part: part.reason is not None)
    return Roofline(core, precision, step, tuple(kept), tuple(parts))


def _group_floor(
    group: BlockGroup, keep: str, policies: Mapping[str, int], core: Chip, precision: str, step: Step
) -> GroupFloor:
    if group.hidden is None or group.inner is None:
        return GroupFloor(group, "", policies, 0.0, None, (), 0.0, group.reason or "its sizes are not known")
    block, adapter = group.block(precision, step.block_size), DocumentedAdapter()
    pairs = step.tokens * (1 if group.top_k is None else min(group.top_k, group.experts or 0))
    if not pairs:
        unknown = group.reason or "the model does not say how many experts a token has"
        return GroupFloor(group, keep, policies, 0.0, None, (), 0.0, unknown)
    reason = group.reason or why_not(block, Device(core.name, DOCUMENTED_LNC), adapter)
    if reason is None:
        reason = why_not_tokens(most_tokens(block), step.tokens)
        if reason is not None:
            reason += f", and a step has {step.tokens:,}: take smaller micro-batches and accumulate gradients"
    work = Work(step.tokens, keep, step.trained and not group.codes, step.checkpointing)
    flops = needed_flops(pairs, block, trained=work.trained)
    if precision not in core.flops or (group.reason is not None and not group.codes):
        reason = reason or f"{core.name} has no {precision}"
        return GroupFloor(group, keep, policies, flops, None, (), 0.0, reason)
    if reason is not None:
        return _in_place_of_a_kernel(group, keep, policies, core, block, work, flops, reason)
    floor = _floor_of(group, block, core, work)
    sizes = block_sizes(block, adapter) if group.experts is not None else ()
    choices = tuple(_floor_of(group, group.block(precision, size), core, work) for size in sizes)
    whole = floor if work.trained else _floor_of(group, block, core, replace(work, trained=True))
    copies = {
        home: weight_copy_bytes(adapter, block, group.experts, home == "kernel" or group.ordered, group.dtype)
        for home in HOMES
    }
    return GroupFloor(group, keep, policies, flops, floor, choices, whole.seconds - floor.seconds, None, copies)


def _in_place_of_a_kernel(
    group: BlockGroup,
    keep: str,
    policies: Mapping[str, int],
    core: Chip,
    block: Block,
    work: Work,
    flops: float,
    reason: str,
) -> GroupFloor:
    """The floor of PyTorch's own computation; it takes every block size, so there is none to recommend."""
    padded = TorchBlock(**vars(block))
    floor = _floor_of(group, padded, core, work)
    return GroupFloor(group, keep, policies, flops, floor, (), 0.0, reason)


def _floor_of(group: BlockGroup, block: Block, core: Chip, work: Work) -> Floor:
    if group.experts is None or group.top_k is None:
        return dense_floor(block, core, work)
    return routed_floor(block, core, work, group.top_k, group.experts)

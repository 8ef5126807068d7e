"""The least time that a training step of a model's blocks takes on a chip, by published figures: an estimate.

Counted are the matmuls of forward and backward and what must pass through the device's memory in the scheme that the
kernels' documents describe; what the chip overlaps, launches and synchronizes is not. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from hf_neuron_moe.backends.neuron.limits import Block, Device, block_sizes, most_tokens, why_not, why_not_tokens
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.device.figures import CHIPS, SOURCE, Chip
from hf_neuron_moe.device.passes import Floor, Work, dense_floor, needed_flops, routed_floor
from hf_neuron_moe.device.usable import DOCUMENTED_LNC, BlockGroup, DocumentedAdapter
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.patching import patch_model, unpatch_model

ASSUMPTIONS = (
    "one logical core of two physical ones (LNC 2) computes the tokens; a process of a run has one",
    "matmuls at the published dense peak, memory at the published bandwidth, each pass the longer of the two",
    "a dense block reads its weights once per pass; experts read theirs once per block of tokens, and add to the "
    "weights' gradients once per block",
    "the number of blocks is the static worst case, which the kernels are compiled for",
    "what a policy does not keep is computed again: gate and up of a dense block, the whole forward of experts",
    "gradient checkpointing computes every forward twice; elementwise work is free, its memory is not",
    "frozen weights get no gradient; the documented backward kernels compute it all the same, which is told apart",
    "blocks that no kernel computes are listed, and not in the sum",
)


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
        reason: why no Neuron kernel computes these blocks; the floor is then one for any other way.
    """

    group: BlockGroup
    keep: str
    policies: Mapping[str, int]
    flops: float
    floor: Floor | None
    choices: tuple[Floor, ...]
    discarded_seconds: float
    reason: str | None

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
    def too_large(self) -> dict[str, int]:
        """By policy, the bytes by which a step exceeds a logical core's memory."""
        return {name: size - self.core.memory for name, size in self.memory.items() if size > self.core.memory}

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
                "policies": {
                    name: {"bytes": size, "fits": size <= self.core.memory} for name, size in self.memory.items()
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
    if precision not in core.flops:
        return GroupFloor(group, keep, policies, flops, None, (), 0.0, reason or f"{core.name} has no {precision}")
    floor = _floor_of(group, block, core, work)
    sizes = block_sizes(block, adapter) if group.experts is not None and block.needs else ()
    choices = tuple(_floor_of(group, group.block(precision, size), core, work) for size in sizes)
    whole = floor if work.trained else _floor_of(group, block, core, replace(work, trained=True))
    return GroupFloor(group, keep, policies, flops, floor, choices, whole.seconds - floor.seconds, reason)


def _floor_of(group: BlockGroup, block: Block, core: Chip, work: Work) -> Floor:
    if group.experts is None or group.top_k is None:
        return dense_floor(block, core, work)
    return routed_floor(block, core, work, group.top_k, group.experts)

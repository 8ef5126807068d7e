"""The least time that a training step of a model's blocks takes on a chip, by published figures: an estimate.

Counted are the matmuls of forward and backward and what must pass through the device's memory in the scheme that the
kernels' documents describe; what the chip overlaps, launches and synchronizes is not. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from hf_neuron_moe.backends.neuron.copies import weight_copy_bytes
from hf_neuron_moe.backends.neuron.limits import Block, Device, block_sizes, most_tokens, why_not, why_not_tokens
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.device.figures import CHIPS, Chip
from hf_neuron_moe.device.passes import Floor, Work, dense_floor, needed_flops, routed_floor
from hf_neuron_moe.device.roofline_result import HOMES, GroupFloor, Roofline, Step
from hf_neuron_moe.device.usable import DOCUMENTED_LNC, BlockGroup, DocumentedAdapter
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.patching import patch_model, unpatch_model


@dataclass(frozen=True)
class TorchBlock(Block):
    """A block as the torch backend pads it, in place of a kernel."""

    @property
    def padded(self) -> tuple[int, int]:
        """H and I in multiples of 128."""
        return padded_size(self.hidden), padded_size(self.inner)


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
        # PyTorch in a kernel's place takes every block size, so there is none to recommend.
        in_place = _floor_of(group, TorchBlock(**vars(block)), core, work)
        return GroupFloor(group, keep, policies, flops, in_place, (), 0.0, reason)
    floor = _floor_of(group, block, core, work)
    sizes = block_sizes(block, adapter) if group.experts is not None else ()
    choices = tuple(_floor_of(group, group.block(precision, size), core, work) for size in sizes)
    whole = floor if work.trained else _floor_of(group, block, core, replace(work, trained=True))
    copies = {
        home: weight_copy_bytes(adapter, block, group.experts, home == "kernel" or group.ordered, group.dtype)
        for home in HOMES
    }
    return GroupFloor(group, keep, policies, flops, floor, choices, whole.seconds - floor.seconds, None, copies)


def _floor_of(group: BlockGroup, block: Block, core: Chip, work: Work) -> Floor:
    if group.experts is None or group.top_k is None:
        return dense_floor(block, core, work)
    return routed_floor(block, core, work, group.top_k, group.experts)

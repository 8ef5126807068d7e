"""The least time that a training step of a model's blocks takes on a chip, by published figures: an estimate.

Counted are the matmuls of forward and backward and what must pass through the device's memory in the scheme that the
kernels' documents describe; what the chip overlaps, launches and synchronizes is not. Nothing here was measured.

T tokens, K experts per token, E experts, H hidden, I intermediate (both as the kernels get them, padded), N blocks of B
slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hf_neuron_moe.backends.neuron.limits import Block, Device, block_sizes, why_not
from hf_neuron_moe.backends.neuron.routing import block_count
from hf_neuron_moe.device.figures import CHIPS, SOURCE, Chip
from hf_neuron_moe.device.usable import DOCUMENTED_LNC, BlockGroup, DocumentedAdapter
from hf_neuron_moe.formats.padding import padded_size

BYTES = 2
"""Activations, weights, checkpoints and gradients pass in bf16; MXFP8 operands are quantized on the chip."""

ASSUMPTIONS = (
    "one logical core of two physical ones (LNC 2) computes the tokens; a process of a run has one",
    "matmuls at the published dense peak, memory at the published bandwidth, each pass the longer of the two",
    "a dense block reads its weights once per pass; experts read theirs once per block of tokens, and add to the "
    "weights' gradients once per block",
    "the number of blocks is the static worst case, which the kernels are compiled for",
    "gate and up are kept for the backward, nothing is computed twice, elementwise work is free",
)


@dataclass(frozen=True)
class Floor:
    """One pass over the tokens, forward and backward, of one block at one block size.

    Attributes:
        block_size: B; None for a dense MLP.
        padded_flops: floating-point operations with all padding.
        bytes: through the device's memory.
        compute_seconds: operations at the peak.
        memory_seconds: bytes at the bandwidth.
        seconds: the sum of forward and backward, each the longer of the two.
    """

    block_size: int | None
    padded_flops: float
    bytes: float
    compute_seconds: float
    memory_seconds: float
    seconds: float

    @property
    def bound(self) -> str:
        """``"compute"`` or ``"memory"``: which takes longer."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


@dataclass(frozen=True)
class GroupFloor:
    """Blocks that are alike, on one chip.

    Attributes:
        group: the blocks.
        flops: floating-point operations of one block without padding, forward and backward.
        floor: of one block at the block size that was asked for; None where there is a reason.
        choices: the same at every block size that the kernels take.
        reason: why no Neuron kernel computes these blocks; the floor is then one for any other way.
    """

    group: BlockGroup
    flops: float
    floor: Floor | None
    choices: tuple[Floor, ...]
    reason: str | None

    @property
    def padding_overhead_percent(self) -> float | None:
        """Operations on padding, in percent of those that are needed."""
        return None if self.floor is None else 100 * (self.floor.padded_flops / self.flops - 1)

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
            "kernel": {"usable": self.reason is None, "reason": self.reason},
            "flops": self.flops,
            "padding_overhead_percent": self.padding_overhead_percent,
            "floor": None if floor is None else asdict(floor) | {"bound": floor.bound},
            "best_block_size": self.best_block_size,
            "block_sizes": [asdict(choice) | {"bound": choice.bound} for choice in self.choices],
        }


@dataclass(frozen=True)
class Roofline:
    """Result of :func:`roofline`.

    Attributes:
        core: figures of one logical core.
        precision: of the blocks.
        tokens: T.
        block_size: B that was asked for.
        groups: the model's blocks.
    """

    core: Chip
    precision: str
    tokens: int
    block_size: int
    groups: tuple[GroupFloor, ...]

    @property
    def seconds(self) -> float:
        """Of all blocks of the model that have a floor."""
        return sum(len(part.group.names) * part.floor.seconds for part in self.groups if part.floor is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        return {
            "kind": "estimate from published figures; nothing was measured",
            "source": SOURCE,
            "assumptions": list(ASSUMPTIONS),
            "device": self.core.name,
            "logical_core": {"lnc": DOCUMENTED_LNC, **asdict(self.core)},
            "precision": self.precision,
            "tokens": self.tokens,
            "block_size": self.block_size,
            "blocks": [part.to_dict() for part in self.groups],
            "seconds": self.seconds,
        }


def roofline(groups: Iterable[BlockGroup], chip: str, precision: str, tokens: int, block_size: int = 512) -> Roofline:
    """Estimate the least time of forward and backward of a model's blocks on one logical core.

    Args:
        groups: of :func:`~hf_neuron_moe.device.usable.block_groups`.
        chip: ``"trn2"`` or ``"trn3"``.
        precision: ``"bf16"``, ``"mxfp8"`` or ``"fp32"``.
        tokens: T per step and device.
        block_size: B of experts.
    """
    core = CHIPS[chip].core(DOCUMENTED_LNC)
    parts = tuple(_group_floor(group, core, precision, tokens, block_size) for group in groups)
    return Roofline(core, precision, tokens, block_size, parts)


def _group_floor(group: BlockGroup, core: Chip, precision: str, tokens: int, block_size: int) -> GroupFloor:
    if group.reason is not None:
        return GroupFloor(group, 0.0, None, (), group.reason)
    block, adapter = group.block(precision, block_size), DocumentedAdapter()
    reason = why_not(block, Device(core.name, DOCUMENTED_LNC), adapter)
    pairs = tokens * (1 if group.top_k is None else min(group.top_k, group.experts or 0))
    flops = 18.0 * pairs * block.hidden * block.inner
    if not pairs:
        return GroupFloor(group, 0.0, None, (), "the model does not say how many experts a token has")
    if precision not in core.flops:
        return GroupFloor(group, flops, None, (), reason or f"{core.name} has no {precision}")
    if group.experts is None:
        return GroupFloor(group, flops, _dense(block, core, tokens), (), reason)
    sizes = block_sizes(block, adapter) if block.needs else ()
    choices = tuple(_routed(group.block(precision, size), core, pairs, group.experts) for size in sizes)
    return GroupFloor(group, flops, _routed(block, core, pairs, group.experts), choices, reason)


def _dense(block: Block, core: Chip, tokens: int) -> Floor:
    (hidden, inner), rows = block.padded, padded_size(tokens)
    row, wide, weights = rows * hidden, rows * inner, 3 * hidden * inner
    # Forward: x and y, the intermediate out and in, gate and up out. Backward: dout, x, dx, gate and up in.
    forward = BYTES * (2 * row + weights + 4 * wide)
    backward = BYTES * (3 * row + 2 * weights + 2 * wide)
    return _floor(None, core, block.precision, 6.0 * rows * hidden * inner, forward, backward)


def _routed(block: Block, core: Chip, pairs: int, experts: int) -> Floor:
    (hidden, inner), size = block.padded, block.block_size
    blocks = block_count(pairs, experts, size, 2 if block.precision == "mxfp8" else 1)
    slots, row, weights = blocks * size, pairs * hidden, blocks * 3 * hidden * inner
    # Forward: x in, y added to; gate and up out, as [N, 2, I, B]. Backward: dout and x in, dx and gradients added to.
    forward = BYTES * (3 * row + weights + 2 * slots * inner)
    backward = BYTES * (4 * row + 3 * weights + 2 * slots * inner)
    return _floor(size, core, block.precision, 6.0 * slots * hidden * inner, forward, backward)


def _floor(size: int | None, core: Chip, precision: str, forward_flops: float, *passes: float) -> Floor:
    """Forward has three matmuls, backward six of the same size."""
    compute = [flops / core.flops[precision] for flops in (forward_flops, 2 * forward_flops)]
    memory = [nbytes / core.bandwidth for nbytes in passes]
    return Floor(size, 3 * forward_flops, sum(passes), sum(compute), sum(memory), sum(map(max, compute, memory)))

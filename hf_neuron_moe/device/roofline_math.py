"""Operations and bytes of a block's forward and backward on a logical core, and the least time: an estimate.

Counted is the scheme that the kernels' documents describe. T tokens, K experts per token, E experts, H hidden,
I intermediate (both as the kernels get them, padded), N blocks of B slots. Bytes are those of bf16 values: MXFP8
operands are quantized on the chip.

Sources: nki-library 2.29 to 2.33 ``mlp_mxfp8`` (phases of the backward, what is computed again where no checkpoint is
given), ``moe_cte`` and ``blockwise_mm_bwd``. Chips: AWS Neuron documentation, "Trainium2 architecture" and "Trainium3
architecture" (about-neuron/arch), figures per chip; the pages of the cores give about 5 % less for bf16 on Trn2.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_neuron_moe.activation_policy import BF16_CHECKPOINTS, Keep, parse_keep
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.neuron.static_plan import block_count
from hf_neuron_moe.formats.padding import padded_size

_DATA = tomllib.loads(Path(__file__).with_name("roofline.toml").read_text(encoding="utf-8"))
PHYSICAL_CORES = 8
BYTES = 2
_FP8 = (1 + 2 / 64) / 2
"""A value in FP8 groups, a byte and a share of a bf16 scale for 64, in bf16 values."""


@dataclass(frozen=True)
class Chip:
    """Published figures of a chip, or of a part of one."""

    name: str
    flops: dict[str, float]  # dense peak in FLOP/s by precision; what the chip cannot do is missing
    bandwidth: float  # of its memory, in bytes per second
    memory: int  # in bytes

    def core(self, lnc: int = 2) -> Chip:
        """Return a logical core of `lnc` physical ones, as one process of a run has it."""
        share = lnc / PHYSICAL_CORES
        flops = {precision: peak * share for precision, peak in self.flops.items()}
        return Chip(self.name, flops, self.bandwidth * share, int(self.memory * share))


CHIPS = {name: Chip(name, **figures) for name, figures in _DATA["chip"].items()}
GPUS = {name: Chip(name, **figures) for name, figures in _DATA["gpu"].items()}


def chip_of(device: str) -> Chip:
    """Return a GPU, or one logical core of a Neuron chip, which a process of a run has."""
    return GPUS[device] if device in GPUS else CHIPS[device].core()


def source_of(device: str) -> str:
    """Return where a device's figures were published."""
    source: str = _DATA["gpu_source" if device in GPUS else "source"]
    return source


def assumptions_of(device: str) -> list[str]:
    """Return what :func:`floor_of` counts, to check a figure by hand."""
    return list(_DATA["gpu_assumptions" if device in GPUS else "assumptions"])


@dataclass(frozen=True)
class Step:
    """What a training step asks of all blocks."""

    tokens: int  # T per step and device
    block_size: int = 512  # B of experts
    trained: bool = True  # whether the blocks' weights have gradients; False for LoRA outside of them
    checkpointing: bool = False  # gradient checkpointing: every forward runs again before the backward


@dataclass(frozen=True)
class Floor:
    """One training step of one block at one block size."""

    block_size: int | None  # B; None for a dense MLP
    padded_flops: float  # with all padding, recomputation included
    recomputed_flops: float  # those of them that compute again what was computed before
    bytes: float  # through the device's memory
    compute_seconds: float  # operations at the peak
    memory_seconds: float  # bytes at the bandwidth
    seconds: float  # sum over the passes (forward, forward again, backward), each the longer of the two

    @property
    def bound(self) -> str:
        """``"compute"`` or ``"memory"``: which takes longer."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"bound": self.bound}


class GPUBlock(Block):
    """A block on a GPU: its backends sort tokens by expert, and pad neither rows nor H and I in bf16."""

    @property
    def padded(self) -> tuple[int, int]:
        """H and I as they are."""
        return self.hidden, self.inner


def needed_flops(pairs: int, block: Block, *, trained: bool) -> float:
    """Return the operations of forward and backward on T (or T * K) rows without padding: 3 matmuls, and 3 or 6."""
    return (18.0 if trained else 12.0) * pairs * block.hidden * block.inner


def floor_of(
    block: Block, core: Chip, step: Step, keep: str, top_k: int | None = None, experts: int | None = None
) -> Floor:
    """Return the floor of a dense MLP, or of experts of which a token has `top_k`; `keep` is a canonical string."""
    on_gpu, kept = isinstance(block, GPUBlock), parse_keep(keep)
    if on_gpu and block.kind == "experts":
        pairs = step.tokens * min(top_k or 1, experts or 1)
        three, again, *moved = _plain(block, pairs, min(experts or 1, pairs), step, kept)
    elif block.blockwise and not on_gpu:
        three, again, *moved = _routed(block, step, kept, top_k or 1, experts or 1)
    else:
        three, again, *moved = _plain(block, step.tokens if on_gpu else padded_size(step.tokens), 1, step, kept)
    # Three matmuls forward; backward three for the input and three for the weights, and what is made again.
    flops = [three] * (2 if step.checkpointing else 1) + [three * (2 if step.trained else 1) + again]
    values = [moved[0]] * (2 if step.checkpointing else 1) + [moved[1]]
    compute = [each / core.flops[block.precision] for each in flops]
    memory = [BYTES * each / core.bandwidth for each in values]
    return Floor(
        block_size=None if on_gpu or top_k is None or experts is None else block.block_size,
        padded_flops=sum(flops),
        recomputed_flops=again + (three if step.checkpointing else 0.0),
        bytes=sum(BYTES * each for each in values),
        compute_seconds=sum(compute),
        memory_seconds=sum(memory),
        seconds=sum(map(max, compute, memory)),
    )


_Counts = tuple[float, float, float, float]
"""Operations of a forward's three matmuls and of what the backward makes again; values moved forward and backward."""


def _plain(block: Block, rows: int, copies: int, step: Step, kept: Keep) -> _Counts:
    """Count a dense MLP, or `copies` experts whose `rows` are sorted."""
    hidden, inner = block.padded
    row, wide, weights = rows * hidden, rows * inner, copies * 3 * hidden * inner
    matmul = 2.0 * rows * hidden * inner
    # On Neuron read and written by torch operations, elsewhere written where they are made.
    each = 2 if isinstance(block, GPUBlock) else 5
    products = each * wide if kept.names & {"gate_act", "intermediate"} else 0
    # x and y, weights, the intermediate out and in; gate and up out if any checkpoint is kept.
    forward: float = 2 * row + weights + 2 * wide + (2 * wide if kept.names else 0) + products
    # dout and dx, weights, checkpoints in; the weights' gradients out, and x in for them.
    backward: float = 2 * row + weights + (weights + row if step.trained else 0)
    again = 0.0
    if kept.fp8:
        forward += 2 * wide + 2 * _FP8 * wide + row + _FP8 * row
        backward += 2 * _FP8 * wide + 8 * wide + _FP8 * row + row
    else:
        backward += len(kept.names) * wide
        if not kept.names.issuperset(BF16_CHECKPOINTS):  # both are made again: x and two weights in, gate and up out
            again = 2 * matmul
            backward += row + 2 * weights / 3 + 4 * wide
    return 3 * matmul, again, forward, backward


def _routed(block: Block, step: Step, kept: Keep, top_k: int, experts: int) -> _Counts:
    (hidden, inner), size, pairs = block.padded, block.block_size, step.tokens * min(top_k, experts)
    blocks = block_count(pairs, experts, size, 2 if block.precision == "mxfp8" else 1)
    slots, row, weights, x = blocks * size, pairs * hidden, blocks * 3 * hidden * inner, step.tokens * hidden
    checkpoint, keeps = 2 * slots * inner, kept.names.issuperset(BF16_CHECKPOINTS)
    three, again = 6.0 * slots * hidden * inner, 0.0
    # x in, y added to, weights once per block; gate and up out, as [N, 2, I, B].
    plain = 3 * row + weights
    forward: float = plain + (checkpoint if keeps else 0)
    # dout in, dx added to, weights and checkpoint in; x in and the weights' gradients added to once per block.
    backward: float = 3 * row + weights + checkpoint + (row + 2 * weights if step.trained else 0)
    if kept.fp8:
        forward += checkpoint + _FP8 * checkpoint + x + _FP8 * x
        backward += _FP8 * checkpoint + checkpoint + _FP8 * x + x
    elif not keeps:  # there is no other way to the checkpoint than the forward kernel
        again = three
        backward += plain + checkpoint
    return three, again, forward, backward

"""The gradients of the blockwise experts from their checkpoints, expert by expert.

Letters: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots, R real
(token, expert) pairs in expert order. Nothing of size ``[N * B, I]`` or ``[N * B, H]`` is made for all experts at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.backends.torch.experts import (
    ExpertGrads,
    ExpertStack,
    RowSums,
    ScaledRows,
    run_experts_backward,
)
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.tiles import tile_loader
from hf_neuron_moe.reference.block_rows import BlockRows
from hf_neuron_moe.reference.blockwise_buffers import GradBuffers
from hf_neuron_moe.reference.blockwise_checks import Operands

_ROW_CHUNK = 1024


@dataclass(frozen=True)
class BlockedRows:
    """Half of the pre-activations in the kernels' layout ``[N, 2, I, B]``, read as rows, tile by tile."""

    values: Tensor  # the checkpoint
    half: int  # 0 gate, 1 up
    slot_R: Tensor  # the rows' slots
    first: int  # the slot of the first row if the rows lie in consecutive slots, else -1
    scratch: Scratch  # holds the tile in fp32

    @property
    def shape(self) -> torch.Size:
        """``[R, I]``."""
        return torch.Size((len(self.slot_R), self.values.shape[2]))

    def rows(self, start: int, end: int) -> BlockedRows:
        """Return the rows ``start..end``."""
        first = -1 if self.first < 0 else self.first + start
        return BlockedRows(self.values, self.half, self.slot_R[start:end], first, self.scratch)

    def take(self, rows: slice, columns: slice) -> Tensor:
        """Return a tile in fp32, valid until the next call."""
        size = self.values.shape[3]
        if self.first < 0:
            slot_R = self.slot_R[rows]
            return self.values[
                torch.div(slot_R, size, rounding_mode="floor"), self.half, columns, slot_R % size
            ].float()
        start, stop = self.first + rows.start, self.first + rows.stop
        begin, end = start // size, -(-stop // size)
        part = self.values[begin:end, self.half, columns].transpose(1, 2)
        tile = self.scratch.get(f"checkpoint_{self.half}", ((end - begin) * size, part.shape[2]), torch.float32)
        tile.view(part.shape).copy_(part)
        return tile[start - begin * size : stop - begin * size]


@dataclass(frozen=True)
class BlockedCheckpoints(Checkpoints):
    """Pre-activations in the kernels' layout ``[N, 2, I, B]``, handed out one expert at a time."""

    values: Tensor | None = None
    plan: BlockRows | None = None
    scratch: Scratch | None = None

    def rows(self, start: int, end: int) -> Checkpoints:
        """Return the rows ``start..end``, which are one expert's run."""
        assert self.plan is not None and self.values is not None and self.scratch is not None
        number = next(index for index, run in enumerate(self.plan.runs) if run[1:] == (start, end))
        slot_R, first = self.plan.slot_R[start:end], self.plan.first_slots[number]
        gate, up = (BlockedRows(self.values, half, slot_R, first, self.scratch) for half in range(2))
        return Checkpoints(gate, up)


@dataclass(frozen=True)
class OutputSide:
    """What only needs the output gradient: the affinity's gradient (where it sits on H) and the down bias's."""

    plan: BlockRows  # the real slots
    grad: Tensor  # dL/d output [T', H]
    scale_R: Tensor  # each pair's affinity, fp32
    down_checkpoint: Tensor | None  # [N, B, H]; None where the affinity's gradient comes from the intermediate
    down_bias: Tensor | None  # [E, H], to add to the checkpoint

    def add_to_affinity(self, d_scale_R: Tensor) -> None:
        """Add ``sum_H dO * (down checkpoint + down bias)`` to every pair's entry."""
        if self.down_checkpoint is None and self.down_bias is None:
            return
        for expert, rows, grad_RH in self._chunks(by_expert=self.down_bias is not None):
            if self.down_checkpoint is not None:
                flat = self.down_checkpoint.reshape(-1, grad_RH.shape[1])
                down_RH = flat.index_select(0, self.plan.slot_R[rows])
                d_scale_R[rows].add_(torch.linalg.vecdot(grad_RH, down_RH.float()))
            if self.down_bias is not None:
                d_scale_R[rows].addmv_(grad_RH, self.down_bias[expert].float())

    def bias_grad(self, experts: int) -> Tensor:
        """Return ``sum_rows dO * a`` per expert, fp32 ``[E, H]``."""
        total_EH = torch.zeros((experts, self.grad.shape[1]), dtype=torch.float32, device=self.grad.device)
        for expert, rows, grad_RH in self._chunks(by_expert=True):
            total_EH[expert].addmv_(grad_RH.t(), self.scale_R[rows])
        return total_EH

    def _chunks(self, *, by_expert: bool) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield expert (0 unless `by_expert`), rows and the output gradient's rows in fp32."""
        for expert, start, end in self.plan.runs if by_expert else [(0, 0, len(self.plan.token_R))]:
            for first in range(start, end, _ROW_CHUNK):
                rows = slice(first, min(first + _ROW_CHUNK, end))
                yield expert, rows, self.grad.index_select(0, self.plan.token_R[rows]).float()


@dataclass(frozen=True)
class BackwardCall:
    """One checked call of a backward kernel."""

    operands: Operands  # the down checkpoint is None where it is not used
    rows: BlockRows  # the plan's real slots
    precision: str  # "bf16", "fp32" or "mxfp8"
    on_hidden: bool  # whether the affinity sits on the output
    gating: Gating | None  # activation and masks; None is plain SiLU
    bias: bool  # whether bias gradients are wanted
    affinity_bias: Tensor | None  # the down bias where the affinity's gradient lacks it


@torch.no_grad()
def run_backward(call: BackwardCall, buffers: GradBuffers) -> tuple[Tensor, ...]:
    """Return hidden, affinity, gate-up and down gradients, then, where wanted, those of the biases."""
    operands, rows, mx = call.operands, call.rows, call.precision == "mxfp8"
    experts, _, _, inner = operands.gate_up_proj_weight.shape
    hidden_states = operands.hidden_states
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device=hidden_states.device)
    loader = tile_loader(call.precision, hidden_states.device)
    scale_R = rows.affinity(operands.expert_affinities_masked, experts)
    d_hidden, d_scale_R = zeros(hidden_states.shape), zeros(len(rows.token_R))
    d_bias = zeros((experts, 2 * inner)) if call.bias else None
    weights = buffers.weights(operands)
    d_out = RowSource(operands.output_hidden_states_grad, rows.token_R)
    if call.on_hidden:
        d_out = ScaledRows(d_out.values, rows.token_R, scale_R, loader.compute.rounded)
    run_experts_backward(
        d_out,
        RowSource(hidden_states, rows.token_R),
        rows.runs,
        ExpertStack(operands.gate_up_proj_weight.flatten(2), operands.down_proj_weight, transposed=True),
        loader,
        ExpertGrads(
            weights,
            RowSums(d_hidden, rows.token_R),
            None if call.on_hidden else d_scale_R,
            rounded=torch.bfloat16 if mx else torch.float32,
            add=buffers.add,
            bias_E2I=d_bias,
        ),
        saved=BlockedCheckpoints(None, None, None, None, operands.gate_up_proj_act_checkpoint_T, rows, loader.scratch),
        scale_R=None if call.on_hidden else scale_R,
        block_size=rows.block_size,
        gating=call.gating,
    )
    side = OutputSide(
        rows, operands.output_hidden_states_grad, scale_R, operands.down_proj_act_checkpoint, call.affinity_bias
    )
    side.add_to_affinity(d_scale_R)
    results = (
        buffers.store_hidden(d_hidden, rows, hidden_states.dtype),
        buffers.store_affinity(d_scale_R, rows, operands.expert_affinities_masked, experts),
        weights.gate_up.view(operands.gate_up_proj_weight.shape),
        weights.down,
    )
    if d_bias is None:
        return results
    d_bias_E2I = d_bias.view(experts, 2, inner).to(weights.gate_up.dtype)
    return (*results, d_bias_E2I, side.bias_grad(experts).to(weights.down.dtype))

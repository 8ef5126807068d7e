"""The gradients of the blockwise experts from their checkpoints, expert by expert.

Letters: T' rows of the token tensors, H hidden, I intermediate, E experts, N blocks of B slots, R real
(token, expert) pairs in expert order. Nothing of size ``[N * B, I]`` or ``[N * B, H]`` is made for all experts at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.backends.torch.experts import ExpertGrads, RowSums, ScaledRows, run_experts_backward, stacked
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.tiles import tile_loader
from hf_neuron_moe.reference.block_rows import BlockRows
from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments

_ROW_CHUNK = 1024


@dataclass(frozen=True)
class BlockedRows:
    """Half of the pre-activations in the kernels' layout ``[N, 2, I, B]``, read as one expert's rows, tile by tile."""

    values: Tensor  # the checkpoint
    half: int  # 0 gate, 1 up
    plan: BlockRows
    scratch: Scratch  # holds the tile in fp32
    run: int = -1  # number of the expert's run; -1 is all of them, from which nothing can be taken

    @property
    def shape(self) -> torch.Size:
        """``[R, I]``."""
        _, start, end = self.plan.runs[self.run]
        return torch.Size((end - start, self.values.shape[2]))

    def rows(self, start: int, end: int) -> BlockedRows:
        """Return the rows ``start..end``, which are one expert's run."""
        return replace(self, run=next(number for number, run in enumerate(self.plan.runs) if run[1:] == (start, end)))

    def take(self, rows: slice, columns: slice) -> Tensor:
        """Return a tile in fp32, valid until the next call."""
        size, first = self.plan.block_size, self.plan.first_slots[self.run]
        if first < 0:
            block_R, place_R = self.plan.places(self.run)
            return self.values[block_R[rows], self.half, columns, place_R[rows]].float()
        start, stop = first + rows.start, first + rows.stop
        begin, end = start // size, -(-stop // size)
        part = self.values[begin:end, self.half, columns].transpose(1, 2)
        tile = self.scratch.get(f"checkpoint_{self.half}", ((end - begin) * size, part.shape[2]), torch.float32)
        tile.view(part.shape).copy_(part)
        return tile[start - begin * size : stop - begin * size]


@dataclass(frozen=True)
class BackwardCall:
    """One checked call of a backward kernel."""

    given: BackwardArguments  # the down checkpoint is None where it is not used
    rows: BlockRows  # the plan's real slots
    precision: str  # "bf16", "fp32" or "mxfp8"
    on_hidden: bool  # whether the affinity sits on the output
    gating: Gating | None  # activation and masks; None is plain SiLU
    affinity_bias: Tensor | None  # the down bias where the affinity's gradient lacks it

    def output_grad_rows(self, *, by_expert: bool) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield expert (0 unless `by_expert`), rows and the output gradient's rows in fp32, a chunk at a time."""
        for expert, start, end in self.rows.runs if by_expert else [(0, 0, len(self.rows.token_R))]:
            for first in range(start, end, _ROW_CHUNK):
                rows = slice(first, min(first + _ROW_CHUNK, end))
                index_R = self.rows.token_R[rows]
                yield expert, rows, self.given.output_hidden_states_grad.index_select(0, index_R).float()

    def add_to_affinity(self, d_scale_R: Tensor) -> None:
        """Add ``sum_H dO * (down checkpoint + down bias)`` to every pair's entry."""
        checkpoint, bias = self.given.down_proj_act_checkpoint, self.affinity_bias
        if checkpoint is None and bias is None:
            return
        for expert, rows, grad_RH in self.output_grad_rows(by_expert=bias is not None):
            if checkpoint is not None:
                flat = checkpoint.reshape(-1, grad_RH.shape[1])
                down_RH = flat.index_select(0, self.rows.slot_R[rows])
                d_scale_R[rows].add_(torch.linalg.vecdot(grad_RH, down_RH.float()))
            if bias is not None:
                d_scale_R[rows].addmv_(grad_RH, bias[expert].float())

    def down_bias_grad(self, scale_R: Tensor) -> Tensor:
        """Return ``sum_rows dO * a`` per expert, fp32 ``[E, H]``."""
        experts, _, hidden = self.given.down_proj_weight.shape
        total_EH = torch.zeros((experts, hidden), dtype=torch.float32, device=scale_R.device)
        for expert, rows, grad_RH in self.output_grad_rows(by_expert=True):
            total_EH[expert].addmv_(grad_RH.t(), scale_R[rows])
        return total_EH


@torch.no_grad()
def run_backward(call: BackwardCall) -> tuple[Tensor, ...]:
    """Return hidden, affinity, gate-up and down gradients, then, where wanted, those of the biases."""
    given, rows = call.given, call.rows
    experts, _, _, inner = given.gate_up_proj_weight.shape
    hidden_states, checkpoint = given.hidden_states, given.gate_up_proj_act_checkpoint_T
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device=hidden_states.device)
    loader = tile_loader(call.precision, hidden_states.device)
    gate, up = (BlockedRows(checkpoint, half, rows, loader.scratch) for half in range(2))
    scale_R = rows.affinity(given.expert_affinities_masked, experts)
    d_hidden, d_scale_R = zeros(hidden_states.shape), zeros(len(rows.token_R))
    d_bias = zeros((experts, 2 * inner)) if given.bias else None
    gate_up, down = grad_memory(given)
    weights = stacked(gate_up.flatten(2), down, transposed=True)
    d_out = RowSource(given.output_hidden_states_grad, rows.token_R)
    if call.on_hidden:
        d_out = ScaledRows(d_out.values, rows.token_R, scale_R, loader.compute.rounded)
    run_experts_backward(
        d_out,
        RowSource(hidden_states, rows.token_R),
        rows.runs,
        stacked(given.gate_up_proj_weight.flatten(2), given.down_proj_weight, transposed=True),
        loader,
        ExpertGrads(
            weights,
            RowSums(d_hidden, rows.token_R),
            None if call.on_hidden else d_scale_R,
            rounded=torch.bfloat16 if call.precision == "mxfp8" else torch.float32,
            add=given.skip_grad_initialization,
            bias_E2I=d_bias,
        ),
        saved=Checkpoints(gate, up),
        scale_R=None if call.on_hidden else scale_R,
        block_size=rows.block_size,
        gating=call.gating or SILU,
    )
    call.add_to_affinity(d_scale_R)
    results = (store_hidden(given, d_hidden, rows), store_affinity(given, d_scale_R, rows), gate_up, down)
    if d_bias is None:
        return results
    d_bias_E2I = d_bias.view(experts, 2, inner).to(gate_up.dtype)
    return (*results, d_bias_E2I, call.down_bias_grad(scale_R).to(down.dtype))


def grad_memory(given: BackwardArguments) -> tuple[Tensor, Tensor]:
    """Return where the weight gradients are written: ``[E, H, 2, I]`` and ``[E, I, H]``."""
    gate_up, down = given.gate_up_proj_weight_grad_out, given.down_proj_weight_grad_out
    new = functools.partial(torch.empty_like, dtype=given.accumulation_dtype, memory_format=torch.contiguous_format)
    return (
        new(given.gate_up_proj_weight) if gate_up is None else gate_up,
        new(given.down_proj_weight) if down is None else down,
    )


def store_hidden(given: BackwardArguments, d_hidden: Tensor, rows: BlockRows) -> Tensor:
    """Return the fp32 hidden gradient in the operand's dtype, or write it to the buffer and return that."""
    out = given.hidden_states_grad_out
    if out is None:
        return d_hidden.to(given.hidden_states.dtype)
    if not given.skip_grad_initialization:
        return out.copy_(d_hidden)
    if not given.is_tensor_update_accumulating:
        out[rows.token_R] = d_hidden[rows.token_R].to(out.dtype)
        return out
    return out.add_(d_hidden)


def store_affinity(given: BackwardArguments, d_scale_R: Tensor, rows: BlockRows) -> Tensor:
    """Assign the pairs' gradients to a dense zero ``[T' * E, 1]``, or to the buffer, and return it."""
    out = given.expert_affinities_masked_grad_out
    if out is None:
        out = torch.zeros_like(given.expert_affinities_masked, memory_format=torch.contiguous_format)
    elif not given.skip_grad_initialization:
        out.zero_()
    out[rows.token_R * len(given.down_proj_weight) + rows.expert_R, 0] = d_scale_R.to(out.dtype)
    return out

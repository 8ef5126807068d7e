"""The loops of ``blockwise_mm_bwd`` as the kernels run them: block after block, core by core, tile by tile.

Letters: T' rows of the token tensors, B slots of a block, N blocks, H hidden, I intermediate, E experts.

Every block, with its expert's weights (the formulas are those of ``blockwise_mm_bwd``)::

    gather the B rows of x and dO, zeros for a slot without a token; read g and u
    dY = dO * a, rounded             (AFFINITY_ON_H)
    dh = dY Wd^T                     sums over H in tiles of 128
    dg, du, h (* a), rounded         (backends.torch.swiglu_grad)
    dWd += h^T dY, dWgu += x^T [dg, du], bias gradients += sums over the slots, in tiles of 128 slots
    dX = dg Wg^T + du Wu^T           sums over I in tiles of 128; added to the rows of the running hidden gradient
    da                               assigned: a pair is in one block

What two cores share is `shard_option`: halves of H, of the block's slots (SHARD_ON_FREE), of I, or the blocks in turn
(SHARD_ON_BLOCK). Sums over an axis that they share are added in fp32. AUTO is halves of H here.

With ``accumulation="device"`` dh is rounded too, and the gradients of weights, biases and hidden states are read,
added to, rounded to their dtype and written after every block. With SHARD_ON_BLOCK each core has gradients of its own,
which are added at the end; documents do not say how the kernel joins them, nor which blocks a core takes.

Sources: nki-library 2.29 ``experimental.moe.bwd.blockwise_mm_backward``; 2.31 for SHARD_ON_FREE and SHARD_ON_BLOCK.
Nothing here has run on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.gating import SILU
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad
from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments
from hf_neuron_moe.reference.blockwise_grads import BackwardCall, grad_memory, store_affinity, store_hidden
from hf_neuron_moe.reference.moe_types import ShardOption, ShardOption229
from hf_neuron_moe.reference.tiled_product import BANK, PARTITIONS, cut, tiled_product

CORES = 2


class Share(NamedTuple):
    """What one core has of a block."""

    slots: slice
    hidden: slice
    inner: slice


def shares(shard: ShardOption | ShardOption229, slots: int, hidden: int, inner: int) -> list[Share]:
    """Return what each core has of a block, one share where a single core has all of it."""
    axis = {"SHARD_ON_FREE": 0, "SHARD_ON_HIDDEN": 1, "AUTO": 1, "SHARD_ON_INTERMEDIATE": 2}.get(shard.name)
    whole = Share(slice(0, slots), slice(0, hidden), slice(0, inner))
    if axis is None:
        return [whole]
    size = (slots, hidden, inner)[axis]
    return [Share._make([*whole[:axis], half, *whole[axis + 1 :]]) for half in cut(size, -(-size // CORES))]


class Sums(NamedTuple):
    """One core's running gradients; one expert's of a block are added to them."""

    hidden: Tensor  # [T', H]
    gate_up: Tensor  # [E, H, 2, I]
    down: Tensor  # [E, I, H]
    gate_up_bias: Tensor  # [E, 2, I]
    down_bias: Tensor  # [E, H]


@torch.no_grad()
def walk_backward(call: BackwardCall, shard: ShardOption | ShardOption229) -> tuple[Tensor, ...]:
    """Return what :func:`~hf_neuron_moe.reference.blockwise_grads.run_backward` returns."""
    given, rows = call.given, call.rows
    cores = CORES if shard.name == "SHARD_ON_BLOCK" else 1
    memory = grad_memory(given)
    all_sums = [_running(given, memory, first=core == 0) for core in range(cores)]
    stores = not given.is_tensor_update_accumulating
    if stores:  # each row is written once, by either core
        all_sums = [sums._replace(hidden=all_sums[0].hidden) for sums in all_sums]
    d_scale_NB = torch.zeros((rows.blocks, rows.block_size), dtype=torch.float32, device=given.hidden_states.device)
    loop = BackwardWalk(call, shard, d_scale_NB)
    for number in range(rows.blocks):
        loop.run(loop.block(number), all_sums[number % cores])
    total = Sums(*(torch.stack([part.float() for part in parts]).sum(0) for parts in zip(*all_sums)))
    if given.accumulation == "device":  # the sums began with what the buffers held
        given = replace(given, skip_grad_initialization=False)
    for target, values in zip(memory, (total.gate_up, total.down), strict=True):
        target.add_(values) if given.skip_grad_initialization else target.copy_(values)
    affinity = store_affinity(call.given, d_scale_NB.view(-1)[rows.slot_R], rows)
    hidden = all_sums[0].hidden.float() if stores else total.hidden
    results = (store_hidden(given, hidden, rows), affinity, *memory)
    return (*results, total.gate_up_bias.to(memory[0].dtype), total.down_bias.to(memory[1].dtype))


def _running(given: BackwardArguments, memory: tuple[Tensor, Tensor], *, first: bool) -> Sums:
    """Return where a core's gradients are summed: fp32 zeros, or by device accumulation what the kernel has in HBM."""
    gate_up, down = memory
    hidden = given.hidden_states if given.hidden_states_grad_out is None else given.hidden_states_grad_out
    shapes = gate_up[:, 0], down[:, 0]
    starts = Sums(hidden, gate_up, down, *shapes)
    if given.accumulation != "device":
        return Sums(*(torch.zeros_like(start, dtype=torch.float32) for start in starts))
    keep = first and given.skip_grad_initialization
    zeros = Sums(*map(torch.zeros_like, starts))
    return zeros._replace(hidden=hidden.clone(), gate_up=gate_up.clone(), down=down.clone()) if keep else zeros


class Block(NamedTuple):
    """The gathered slots of one block; those without a token are zero."""

    number: int
    expert: int
    token_B: Tensor
    real_B: Tensor  # which slots have a token
    x_BH: Tensor  # operand
    dout_BH: Tensor  # fp32
    affinity_B1: Tensor  # fp32
    parts: list[Share]


@dataclass(frozen=True)
class BackwardWalk:
    """One call, block by block."""

    call: BackwardCall
    shard: ShardOption | ShardOption229
    d_scale_NB: Tensor  # fp32, the affinity's gradient of every slot

    def round_(self, values: Tensor) -> Tensor:
        """Round fp32 values in place, as a matmul's operands are."""
        return values if self.call.precision == "fp32" else values.copy_(values.bfloat16())

    def run(self, block: Block, sums: Sums) -> None:
        """Compute one block and add its gradients."""
        on_hidden, device = self.call.on_hidden, self.call.given.accumulation == "device"
        scaled_BH = block.dout_BH * block.affinity_B1
        dy_BH = self.round_(scaled_BH.clone() if on_hidden else block.dout_BH.clone())
        inner_3BI = self.inner_grads(block, dy_BH)
        self.add_weight_grads(block, dy_BH, inner_3BI, sums)
        sums.gate_up_bias[block.expert].add_(inner_3BI[:2].sum(1))
        sums.down_bias[block.expert].add_((dy_BH if on_hidden and device else scaled_BH).sum(0))
        token_R, dx_RH = block.token_B[block.real_B], self.hidden_grad(block, inner_3BI)[block.real_B]
        if self.call.given.is_tensor_update_accumulating:
            dx_RH += sums.hidden[token_R]
        sums.hidden[token_R] = dx_RH.to(sums.hidden.dtype)
        self.add_affinity_grad(block)

    def block(self, number: int) -> Block:
        """Gather the slots of a block."""
        given = self.call.given
        token_B = given.token_position_to_id.reshape(-1, given.block_size)[number].long()
        real_B = (token_B >= 0) & (token_B < given.tokens)
        expert = min(int(given.block_to_expert.reshape(-1)[number]), len(given.down_proj_weight) - 1)
        affinities = given.expert_affinities_masked.reshape(len(given.hidden_states), -1)[:, expert, None]
        x_BH, dout_BH, affinity_B1 = (
            rows[token_B.where(real_B, 0)].float().masked_fill_(~real_B[:, None], 0)
            for rows in (given.hidden_states, given.output_hidden_states_grad, affinities)
        )
        parts = shares(self.shard, len(x_BH), x_BH.shape[1], given.down_proj_weight.shape[1])
        return Block(number, expert, token_B, real_B, self.round_(x_BH), dout_BH, affinity_B1, parts)

    def inner_grads(self, block: Block, dy_BH: Tensor) -> Tensor:
        """Return dg, du and the scaled intermediate, rounded: ``[3, B, I]``; set the affinity's gradient on I."""
        given, on_hidden = self.call.given, self.call.on_hidden
        gate_BI, up_BI = (
            half_IB.t().float().masked_fill(~block.real_B[:, None], 0).contiguous()
            for half_IB in given.gate_up_proj_act_checkpoint_T[block.number]
        )
        down_IH, dh_BI = self.round_(given.down_proj_weight[block.expert].float().clone()), torch.zeros_like(gate_BI)
        for slots, h, i in block.parts:
            dh_BI[slots, i] += tiled_product(dy_BH[slots, h], down_IH[i, h].t(), rows=PARTITIONS, columns=BANK)
        if given.accumulation == "device":
            self.round_(dh_BI)
        results = gate_BI.new_empty((3, *gate_BI.shape))
        SwiGLUGrad(self.call.gating or SILU, False, self.round_).fill(
            results,
            dh_BI,
            gate_BI,
            up_BI,
            torch.empty_like(gate_BI),
            scale_R1=None if on_hidden else block.affinity_B1,
            d_scale_R=None if on_hidden else self.d_scale_NB[block.number],
        )
        return self.round_(results)

    def add_weight_grads(self, block: Block, dy_BH: Tensor, inner_3BI: Tensor, sums: Sums) -> None:
        """Add the products over the block's slots to the running gradients, once."""
        gate_up_H2I, down_IH = (part[block.expert].new_zeros(part.shape[1:], dtype=torch.float32) for part in sums[1:3])
        for slots, h, i in block.parts:
            down_IH[i, h] += tiled_product(inner_3BI[2, slots, i].t(), dy_BH[slots, h], rows=PARTITIONS, columns=BANK)
            for half in range(2):
                left_HB, right_BI = block.x_BH[slots, h].t(), inner_3BI[half, slots, i]
                gate_up_H2I[h, half, i] += tiled_product(left_HB, right_BI, rows=PARTITIONS, columns=BANK)
        sums.gate_up[block.expert].add_(gate_up_H2I)
        sums.down[block.expert].add_(down_IH)

    def hidden_grad(self, block: Block, inner_3BI: Tensor) -> Tensor:
        """Return dX ``[B, H]``, fp32."""
        gate_up_H2I = self.round_(self.call.given.gate_up_proj_weight[block.expert].float().clone())
        dx_BH = torch.zeros_like(block.x_BH)
        for slots, h, i in block.parts:
            for half in range(2):
                left_BI, right_IH = inner_3BI[half, slots, i], gate_up_H2I[h, half, i].t()
                dx_BH[slots, h] += tiled_product(left_BI, right_IH, rows=PARTITIONS, columns=BANK)
        return dx_BH

    def add_affinity_grad(self, block: Block) -> None:
        """Add ``sum_H dO * (down checkpoint + down bias)``, as far as they are wanted."""
        checkpoint, bias = self.call.given.down_proj_act_checkpoint, self.call.affinity_bias
        for slots, h in [part[:2] for part in block.parts if part.inner.start == 0]:  # once for halves of I
            grad_BH, d_scale_B = block.dout_BH[slots, h], self.d_scale_NB[block.number, slots]
            if checkpoint is not None:
                d_scale_B.add_(torch.linalg.vecdot(grad_BH, checkpoint[block.number, slots, h].float()))
            if bias is not None:
                d_scale_B.add_(grad_BH @ bias[block.expert, h].float())

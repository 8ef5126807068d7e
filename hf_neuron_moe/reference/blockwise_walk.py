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

from collections.abc import Callable
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
    loop = BackwardWalk(call, shard, given.output_hidden_states_grad.new_zeros(rows.blocks * rows.block_size).float())
    for block in range(rows.blocks):
        loop.run(block, all_sums[block % cores])
    total = Sums(*(torch.stack([part.float() for part in parts]).sum(0) for parts in zip(*all_sums)))
    if given.accumulation == "device":  # the sums began with what the buffers held
        given = replace(given, skip_grad_initialization=False)
    for target, values in zip(memory, (total.gate_up, total.down), strict=True):
        target.add_(values) if given.skip_grad_initialization else target.copy_(values)
    affinity = store_affinity(call.given, loop.d_scale_S[rows.slot_R], rows)
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


@dataclass(frozen=True)
class BackwardWalk:
    """One call, block by block."""

    call: BackwardCall
    shard: ShardOption | ShardOption229
    d_scale_S: Tensor  # fp32 [N * B], the affinity's gradient of every slot

    @property
    def rounded(self) -> torch.dtype:
        """Dtype of the matmuls' operands."""
        return torch.float32 if self.call.precision == "fp32" else torch.bfloat16

    def round_(self, values: Tensor) -> Tensor:
        """Round fp32 values in place."""
        return values.copy_(values.to(self.rounded))

    def operand(self, values: Tensor) -> Tensor:
        """Return values as a matmul's operand."""
        return values.to(self.rounded).float()

    def run(self, block: int, sums: Sums) -> None:
        """Compute one block and add its gradients."""
        call, given = self.call, self.call.given
        slots = slice(block * given.block_size, (block + 1) * given.block_size)
        token_B = given.token_position_to_id.reshape(-1)[slots].long()
        real_B = (token_B >= 0) & (token_B < given.tokens)
        if not bool(real_B.any()):
            return
        expert = int(given.block_to_expert.reshape(-1)[block])
        gather: Callable[[Tensor], Tensor] = lambda rows: rows[token_B.where(real_B, 0)].float() * real_B[:, None]  # noqa: E731
        x_BH, dout_BH = self.operand(gather(given.hidden_states)), gather(given.output_hidden_states_grad)
        a_B1 = gather(given.expert_affinities_masked.view(len(given.hidden_states), -1))[:, expert, None]
        dy_BH = self.operand(dout_BH * a_B1 if call.on_hidden else dout_BH)
        parts = shares(self.shard, len(x_BH), x_BH.shape[1], given.down_proj_weight.shape[1])
        inner_3BI = self.inner_grads(block, expert, dy_BH, None if call.on_hidden else a_B1, real_B, parts)
        self.add_weight_grads(expert, x_BH, dy_BH, inner_3BI, parts, sums)
        rounds_dy = call.on_hidden and given.accumulation == "device"
        sums.gate_up_bias[expert].add_(inner_3BI[:2].sum(1))
        sums.down_bias[expert].add_((dy_BH if rounds_dy else dout_BH * a_B1).sum(0))
        dx_BH = self.hidden_grad(expert, inner_3BI, x_BH.shape, parts)
        index = token_B[real_B]
        before = sums.hidden[index].float() if given.is_tensor_update_accumulating else 0
        sums.hidden[index] = (before + dx_BH[real_B]).to(sums.hidden.dtype)
        self.add_affinity_grad(block, slots, expert, dout_BH, parts)

    def inner_grads(
        self, block: int, expert: int, dy_BH: Tensor, a_B1: Tensor | None, real_B: Tensor, parts: list[Share]
    ) -> Tensor:
        """Return dg, du and the scaled intermediate, rounded: ``[3, B, I]``; set the affinity's gradient on I."""
        given, call = self.call.given, self.call
        gate_BI, up_BI = (
            half_IB.t().float().masked_fill(~real_B[:, None], 0).contiguous()
            for half_IB in given.gate_up_proj_act_checkpoint_T[block]
        )
        down_IH, dh_BI = self.operand(given.down_proj_weight[expert]), torch.zeros_like(gate_BI)
        for slots, hidden, inner in parts:
            dh_BI[slots, inner] += tiled_product(
                dy_BH[slots, hidden], down_IH[inner, hidden].t(), rows=PARTITIONS, columns=BANK
            )
        if given.accumulation == "device":
            self.round_(dh_BI)
        results = gate_BI.new_empty((3, *gate_BI.shape))
        d_scale_B = self.d_scale_S.view(-1, given.block_size)[block]
        SwiGLUGrad(call.gating or SILU, False, self.round_).fill(
            results,
            dh_BI,
            gate_BI,
            up_BI,
            torch.empty_like(gate_BI),
            scale_R1=a_B1,
            d_scale_R=None if call.on_hidden else d_scale_B,
        )
        return self.round_(results)

    def add_weight_grads(
        self, expert: int, x_BH: Tensor, dy_BH: Tensor, inner_3BI: Tensor, parts: list[Share], sums: Sums
    ) -> None:
        """Add the products over the block's slots to the running gradients, once."""
        hidden, inner = x_BH.shape[1], inner_3BI.shape[2]
        gate_up_H2I, down_IH = x_BH.new_zeros((hidden, 2, inner)), x_BH.new_zeros((inner, hidden))
        for slots, h, i in parts:
            down_IH[i, h] += tiled_product(inner_3BI[2, slots, i].t(), dy_BH[slots, h], rows=PARTITIONS, columns=BANK)
            for half in range(2):
                left_HB, right_BI = x_BH[slots, h].t(), inner_3BI[half, slots, i]
                gate_up_H2I[h, half, i] += tiled_product(left_HB, right_BI, rows=PARTITIONS, columns=BANK)
        sums.gate_up[expert].add_(gate_up_H2I)
        sums.down[expert].add_(down_IH)

    def hidden_grad(self, expert: int, inner_3BI: Tensor, shape: torch.Size, parts: list[Share]) -> Tensor:
        """Return dX ``[B, H]``, fp32."""
        gate_up_H2I, dx_BH = self.operand(self.call.given.gate_up_proj_weight[expert]), inner_3BI.new_zeros(shape)
        for slots, h, i in parts:
            for half in range(2):
                left_BI, right_IH = inner_3BI[half, slots, i], gate_up_H2I[h, half, i].t()
                dx_BH[slots, h] += tiled_product(left_BI, right_IH, rows=PARTITIONS, columns=BANK)
        return dx_BH

    def add_affinity_grad(self, block: int, slots: slice, expert: int, dout_BH: Tensor, parts: list[Share]) -> None:
        """Add ``sum_H dO * (down checkpoint + down bias)``, as far as they are wanted."""
        checkpoint, bias = self.call.given.down_proj_act_checkpoint, self.call.affinity_bias
        d_scale_B = self.d_scale_S[slots]
        for part in {(share.slots.start, share.hidden.start): share for share in parts}.values():
            grad_BH = dout_BH[part.slots, part.hidden]
            if checkpoint is not None:
                down_BH = checkpoint[block, part.slots, part.hidden].float()
                d_scale_B[part.slots] += torch.linalg.vecdot(grad_BH, down_BH)
            if bias is not None:
                d_scale_B[part.slots] += grad_BH @ bias[expert, part.hidden].float()

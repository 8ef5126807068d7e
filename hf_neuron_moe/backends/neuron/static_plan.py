"""The routing as the blockwise kernels read it, with static shapes, and their gradient back in the router's form.

Letters: T tokens, K experts per token, E experts of this rank, N blocks of B slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.spec import Routing
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask


class Routed(NamedTuple):
    """The routing operands of a kernel call, under the kernels' names; T' is T + 1 with a sink row, T without one."""

    expert_affinities_masked: Tensor  # [T' * E, 1], dense, token-major, zero where not selected
    token_position_to_id: Tensor  # int32 [N * B], token of every slot; unused ones hold the sink row T, or -1
    block_to_expert: Tensor  # int32 [N, 1], expert of every block


def block_count(pairs: int, experts: int, block_size: int, per_iteration: int) -> int:
    """Return the worst-case N for `pairs` = T * min(K, E), of which only shapes enter; sizes may be symbolic.

    N is rounded up to a multiple of `per_iteration`: 2 where two cores share the blocks.
    """
    blocks = -(-(pairs - (experts - 1)) // block_size) + experts - 1
    return -(-blocks // per_iteration) * per_iteration


def plan_blocks(index_TK: Tensor, experts: int, block_size: int, per_iteration: int) -> Tensor:
    """Return int32 ``[N, B + 1]``: the tokens of each block, -1 in unused slots, and its expert.

    Ids >= E are other ranks' and take no slot. A sort of all pairs is behind it, so it is made once and saved.
    """
    mask, top_k = expert_mask(index_TK, experts), index_TK.shape[1]
    plan = build_block_plan(mask, block_size, top_k=top_k, n_block_per_iter=per_iteration, skip_token=True)
    return torch.cat([plan.token_position_to_id.view(-1, block_size), plan.block_to_expert[:, None]], 1)


def route(plan_NB1: Tensor, routing: Routing, experts: int, *, sink: bool, dtype: torch.dtype) -> Routed:
    """Lay out a routing for the kernels by its :func:`plan_blocks`, with affinities of `dtype`.

    The kernels have one slot and one affinity per token and expert. A token that names an expert twice gets the sum of
    both weights, which is what two slots would give: the affinity enters the result as a factor. With `sink`, unused
    slots point at a zero row T behind the tokens, as the bf16 forward documents; without, the kernel skips them.
    """
    index, weight_TK = routing.index_TK.long(), routing.weight_TK
    place_TK = torch.where((index >= 0) & (index < experts), index, experts)
    table = weight_TK.new_zeros((index.shape[0], experts + 1), dtype=torch.float32)
    summed_TE = table.scatter_add(1, place_TK, weight_TK.to(torch.float32))[:, :experts]
    affinities = F.pad(summed_TE, (0, 0, 0, int(sink))).reshape(-1, 1).to(dtype)
    ids = plan_NB1[:, :-1].reshape(-1)
    return Routed(affinities, torch.where(ids < 0, index.shape[0], ids) if sink else ids, plan_NB1[:, -1:])


def routing_gradient(d_affinities: Tensor, index_TK: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the routing weights ``[T, K]`` from the kernel's ``[T * E, 1]``.

    Only entries of selected pairs are read: the 2.29 backward leaves others undefined. Pairs of other ranks get zero.
    """
    d_TE = d_affinities.reshape(index_TK.shape[0], experts)
    index = index_TK.long()
    picked = d_TE.gather(1, index.clamp(0, experts - 1))
    return torch.where((index >= 0) & (index < experts), picked, 0).to(dtype)

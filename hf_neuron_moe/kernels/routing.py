"""The block plan of the blockwise MoE kernels: which tokens each block gathers, which expert multiplies them.

Legend: T tokens, E experts, K experts per token, B tokens per block, N blocks.

Blocks are expert-major; an expert without tokens gets no block; within an expert tokens ascend; spare blocks go to the
last expert; unused slots hold the sink id T, or -1 with ``skip_token``. N depends on shapes only, so that a traced
program has static shapes: ``N = ceil((T*K - (E-1)) / B) + E - 1``, rounded up to a multiple of `blocks_multiple`.

Source: nki-library 2.29 ``moe_cte`` test utilities (``get_n_blocks``, token position generation).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.errors import DTypeError, ShapeError, refuse
from hf_neuron_moe.kernels.checks import check_dtype, check_shape

_MAX_TOKEN_ID = 1 << 24
"""Ids pass through fp32 on the chip and are exact only below this."""


class BlockPlan(NamedTuple):
    """The integer inputs of ``moe_cte`` and ``blockwise_mm_bwd``.

    Attributes:
        token_position_to_id: int32 ``[N * B]``, token of every slot.
        block_to_expert: int32 ``[N]``.
        conditions: int32 ``[N + 1]``, 1 for blocks with real tokens, then a final 0.
        block_size: B.
    """

    token_position_to_id: Tensor
    block_to_expert: Tensor
    conditions: Tensor
    block_size: int


def count_blocks(tokens: int, top_k: int, experts: int, block_size: int, *, blocks_multiple: int = 1) -> int:
    """Return the worst-case number of blocks N for any routing of `tokens` to min(K, E) experts each.

    Raises:
        ShapeError: a size is not a positive integer.
    """
    sizes = {"T": tokens, "top_k": top_k, "E": experts, "block_size": block_size, "blocks_multiple": blocks_multiple}
    _check_sizes(sizes, "count_blocks")
    pairs = tokens * min(top_k, experts)
    blocks = -(-(pairs - (experts - 1)) // block_size) + experts - 1
    return -(-blocks // blocks_multiple) * blocks_multiple


def build_block_plan(
    expert_mask: Tensor, block_size: int, *, top_k: int, blocks_multiple: int = 1, skip_token: bool = False
) -> BlockPlan:
    """Lay out a routing in blocks.

    Args:
        expert_mask: ``[T, E]``, nonzero where token t goes to expert e; at most min(K, E) per row.
        block_size: B.
        top_k: K.
        blocks_multiple: round N up to a multiple of this (2 where blocks are shared by two cores).
        skip_token: mark unused slots with -1 instead of the sink row T.

    Returns:
        The plan, on the mask's device; no value is read back to the host.

    Raises:
        ShapeError: the mask is not 2-D or empty, a size is not positive, or T is too large for exact ids.
        DTypeError: the mask is not a tensor of integers or booleans.
    """
    where = "build_block_plan"
    if not isinstance(expert_mask, Tensor) or expert_mask.is_floating_point():
        got = str(expert_mask.dtype) if isinstance(expert_mask, Tensor) else type(expert_mask).__name__
        raise refuse(
            DTypeError,
            where=where,
            argument="expert_mask",
            expected="a bool or integer tensor",
            got=got,
            remedy="Pass expert_mask(top_k_index, experts).",
        )
    check_shape(expert_mask, (None, None), "[T, E]", where=where, argument="expert_mask")
    tokens, experts = expert_mask.shape
    sizes = {"T": tokens, "E": experts, "block_size": block_size, "top_k": top_k, "blocks_multiple": blocks_multiple}
    _check_sizes(sizes, where)
    if expert_mask.device.type == "cpu" and int(expert_mask.bool().sum(1).max()) > top_k:
        raise refuse(
            ShapeError,
            where=where,
            argument="expert_mask",
            expected=f"made of rows with at most top_k = {top_k} experts",
            got=f"a row with {int(expert_mask.bool().sum(1).max())}",
            remedy="Pass the top_k of the routing: it decides how many blocks there are.",
        )
    blocks = count_blocks(tokens, top_k, experts, block_size, blocks_multiple=blocks_multiple)
    device, sink = expert_mask.device, -1 if skip_token else tokens
    chosen = expert_mask.bool()
    rank_TE = chosen.cumsum(0)
    last_block_E = (-(-rank_TE[-1] // block_size)).cumsum(0)
    first_slot_E = torch.nn.functional.pad(last_block_E[:-1], (1, 0)) * block_size
    # Ranks count from one, so slot 0 collects everything that was not chosen and is cut off afterwards.
    slot_TE = torch.where(chosen, first_slot_E + rank_TE, 0)
    ids_TE = torch.arange(tokens, device=device, dtype=torch.int32)[:, None].expand(tokens, experts)
    slots = torch.full((blocks * block_size + 1,), sink, dtype=torch.int32, device=device)
    slots.scatter_(0, slot_TE.reshape(-1), ids_TE.reshape(-1))
    block_N = torch.arange(blocks, device=device)
    block_to_expert = (last_block_E[None, :-1] <= block_N[:, None]).sum(1).to(torch.int32)
    conditions = torch.nn.functional.pad((block_N < last_block_E[-1]).to(torch.int32), (0, 1))
    return BlockPlan(slots[1:], block_to_expert, conditions, block_size)


def _check_sizes(sizes: dict[str, int], where: str) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value <= 0 or (name == "T" and value >= _MAX_TOKEN_ID):
            raise refuse(
                ShapeError,
                where=where,
                argument=name,
                expected=f"positive{f' and below {_MAX_TOKEN_ID}' if name == 'T' else ''}, an int",
                got=repr(value),
                remedy="Ids are exact below 2**24; split longer inputs." if name == "T" else "Pass a positive size.",
            )


def _check_routing(top_k_index: Tensor, where: str) -> None:
    check_dtype(top_k_index, (torch.int64, torch.int32), where=where, argument="top_k_index")
    check_shape(top_k_index, (None, None), "[T, K]", where=where, argument="top_k_index")
    if top_k_index.device.type == "cpu" and top_k_index.numel() and int(top_k_index.min()) < 0:
        raise refuse(
            ShapeError,
            where=where,
            argument="top_k_index",
            expected="made of expert ids of 0 and above",
            got=f"the id {int(top_k_index.min())}",
            remedy="Mark pairs without an expert with an id of at least the number of experts.",
        )


def expert_mask(top_k_index: Tensor, experts: int) -> Tensor:
    """Return the bool mask ``[T, E]`` of a top-k routing ``[T, K]``; ids >= E select nothing.

    Raises:
        DTypeError, ShapeError: the routing is not a 2-D tensor of integers of 0 and above.
    """
    _check_routing(top_k_index, "expert_mask")
    mask = torch.zeros((top_k_index.shape[0], experts + 1), dtype=torch.bool, device=top_k_index.device)
    return mask.scatter_(1, top_k_index.clamp(max=experts).long(), True)[:, :experts]


def masked_affinities(top_k_index: Tensor, top_k_weights: Tensor, experts: int, *, skip_token: bool = False) -> Tensor:
    """Return ``expert_affinities_masked``: dense ``[T', E]`` flattened token-major to ``[T' * E, 1]``.

    T' is T + 1 with a zero sink row, or T with `skip_token`. Entries of experts that were not chosen are zero.

    Raises:
        DTypeError, ShapeError: the routing is not a 2-D tensor of ids of 0 and above, or the weights do not fit it.
    """
    _check_routing(top_k_index, "masked_affinities")
    shape = tuple(top_k_index.shape)
    check_shape(top_k_weights, shape, "[T, K]", where="masked_affinities", argument="top_k_weights")
    tokens = top_k_index.shape[0]
    rows = tokens if skip_token else tokens + 1
    dense = torch.zeros((rows, experts + 1), dtype=top_k_weights.dtype, device=top_k_weights.device)
    dense[:tokens].scatter_(1, top_k_index.clamp(max=experts).long(), top_k_weights)
    return dense[:, :experts].reshape(-1, 1)

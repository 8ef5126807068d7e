"""The block plan of the blockwise MoE kernels: which tokens each block gathers, which expert multiplies them.

Legend: T tokens, E experts, K experts per token, B tokens per block, N blocks.

Blocks are expert-major, and an expert without tokens gets no block. Within an expert tokens ascend, and spare blocks go
to the last expert. Unused slots hold the sink id T, or -1 with ``skip_token``. N depends on shapes only, so that a
traced program has static shapes: ``N = ceil((T*K - (E-1)) / B) + E - 1``, rounded up to a multiple of
`n_block_per_iter`. A dropping plan has one block per expert; what exceeds its capacity is dropped.

Source: nki-library 2.29 ``moe_cte`` test utilities (``get_n_blocks``, token position generation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_neuron_moe.checks import Rule, check_dtype, check_flags, check_rules, check_same_device, check_shape
from hf_neuron_moe.config import BLOCK_SIZES
from hf_neuron_moe.errors import DTypeError, ShapeError, not_one_of, public

SPARE_BLOCKS = ("last", "split", "unassigned")
BACKWARD_SIZES = tuple(size for size in BLOCK_SIZES if size <= 1024)  # those of every release's backward
_MAX_TOKEN_ID = 1 << 24  # ids pass through fp32 on the chip and are exact only below this
_INTEGERS = (torch.int64, torch.int32)
_VALUES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, *_INTEGERS)


class BlockPlan(NamedTuple):
    """The integer inputs of ``moe_cte`` and ``blockwise_mm_bwd``."""

    token_position_to_id: Tensor  # int32 [N * B], token of every slot
    block_to_expert: Tensor  # int32 [N]
    conditions: Tensor  # int32 [N + 1], 1 for blocks with real tokens, then a 0; see block_conditions for other forms
    block_size: int  # B


class BlockSizeChoice(NamedTuple):
    """A block size and what it costs."""

    block_size: int  # B
    blocks: int  # N
    padding: float  # share of the N * B slots that no routing of this size fills


@public
def count_blocks(
    tokens: int, top_k: int, experts: int, block_size: int, *, n_block_per_iter: int = 1, tighten: bool = False
) -> int:
    """Return the worst-case number of blocks N for any routing of `tokens` to min(K, E) experts each.

    Under expert parallelism E are the experts of this rank. N is rounded up to a multiple of `n_block_per_iter` (2
    where blocks are shared by two cores). With `tighten` there are no more blocks than pairs, ``N <= T * min(K, E)``,
    as serving frameworks have it. Upstream's plans do without, so leave it False where N has to be theirs.
    """
    _check_sizes(T=tokens, top_k=top_k, E=experts, block_size=block_size, n_block_per_iter=n_block_per_iter)
    pairs = tokens * min(top_k, experts)
    blocks = -(-(pairs - (experts - 1)) // block_size) + experts - 1
    if tighten:
        blocks = min(blocks, pairs)
    return -(-blocks // n_block_per_iter) * n_block_per_iter


@public
def choose_block_size(
    tokens: int,
    top_k: int,
    experts: int,
    *,
    choices: tuple[int, ...] = BACKWARD_SIZES,
    max_padding: float = 0.5,
    n_block_per_iter: int = 1,
) -> BlockSizeChoice:
    """Choose the largest block size whose padding stays within bounds, or else the one with the least padding.

    Larger blocks read each expert's weights less often; smaller ones waste fewer slots. The default `choices` are those
    of every release's backward; `max_padding` is the share of the slots of the static N that may stay empty.
    """
    sizes = tuple(choices) if isinstance(choices, Iterable) else (choices,)
    for size in sizes:
        _check_sizes(choices=size)
    _check_finite(max_padding, "max_padding", "0.5 lets half of the slots stay empty.")
    found = []
    for size in sorted(sizes):
        blocks = count_blocks(tokens, top_k, experts, size, n_block_per_iter=n_block_per_iter)
        found.append(BlockSizeChoice(size, blocks, 1 - tokens * min(top_k, experts) / (blocks * size)))
    fix = "Leave it out to choose from the documented sizes."
    check_rules([Rule(bool(found), "choices", "at least one block size", "none", fix, ShapeError)])
    fitting = [choice for choice in found if choice.padding <= max_padding]
    return fitting[-1] if fitting else min(found, key=lambda choice: choice.padding)


@public
def build_block_plan(
    expert_mask: Tensor,
    block_size: int,
    *,
    top_k: int,
    n_block_per_iter: int = 1,
    skip_token: bool = False,
    spare_blocks: str = "last",
    tighten: bool = False,
) -> BlockPlan:
    """Lay out a routing in blocks.

    `expert_mask` is ``[T, E]``, nonzero where token t goes to expert e; at most min(K, E) per row. `n_block_per_iter`
    and `tighten` as in :func:`count_blocks`. With `skip_token` unused slots are -1 instead of the sink row T. The plan
    is on the mask's device; no value is read back to the host.

    `spare_blocks` says whose the blocks without tokens are: "last", the last expert's; "split", half of them (rounded
    down) the middle expert's (E - 1) // 2, following its own blocks. "unassigned" marks them with the id E, which newer
    references skip and 2.29 kernels take with ``skip_weight`` only. "split" is not for the hybrids: they run as many
    blocks as `conditions` has flags set, and would stop before the last ones.
    """
    if spare_blocks not in SPARE_BLOCKS:
        raise not_one_of("spare_blocks", spare_blocks, SPARE_BLOCKS)
    tokens, experts = _check_mask(expert_mask)
    _check_sizes(T=tokens, E=experts, block_size=block_size, top_k=top_k, n_block_per_iter=n_block_per_iter)
    check_flags({"skip_token": skip_token, "tighten": tighten})
    most = int(expert_mask.bool().sum(1).max()) if _readable(expert_mask) else 0
    expected = f"made of rows with at most top_k = {top_k} experts"
    fix = "Pass the top_k of the routing: it decides how many blocks there are."
    check_rules([Rule(most <= top_k, "expert_mask", expected, f"a row with {most}", fix, ShapeError)])
    blocks = count_blocks(tokens, top_k, experts, block_size, n_block_per_iter=n_block_per_iter, tighten=tighten)
    chosen = expert_mask.bool()
    rank_TE = chosen.cumsum(0)
    blocks_E = -(-rank_TE[-1] // block_size)
    if spare_blocks == "split":
        middle_E = torch.arange(experts, device=chosen.device) == (experts - 1) // 2
        blocks_E = blocks_E + middle_E * ((blocks - blocks_E.sum()) // 2)
    end_E = blocks_E.cumsum(0)
    first_slot_E = pad(end_E[:-1], (1, 0)) * block_size
    # Ranks count from one, so slot 0 collects everything that was not chosen and is cut off afterwards.
    slot_TE = torch.where(chosen, first_slot_E + rank_TE, 0)
    block_N = torch.arange(blocks, device=chosen.device)
    passed_E = end_E if spare_blocks == "unassigned" else end_E[:-1]
    block_to_expert = (passed_E[None] <= block_N[:, None]).sum(1).to(torch.int32)
    return _plan(slot_TE, block_to_expert, block_size, skip_token)


@public
def dropping_capacity(
    tokens: int, top_k: int, experts: int, capacity_factor: float, *, convention: str = "nki-library"
) -> int:
    """Return the slots per expert of a dropping plan, for T over the whole batch and the E of this rank.

    `capacity_factor` is a multiple of the slots that an even routing needs. The capacity is ``T * K * factor // E`` by
    the convention "nki-library", ``ceil(T * K * factor / E)`` by "nxd".
    """
    _check_sizes(T=tokens, top_k=top_k, E=experts)
    known, fix = convention in ("nki-library", "nxd"), "They round the capacity down and up."
    check_rules([Rule(known, "convention", "'nki-library' or 'nxd'", repr(convention), fix)])
    _check_finite(capacity_factor, "capacity_factor", "1 gives every expert its share of an even routing.")
    slots = tokens * top_k * capacity_factor
    capacity = math.ceil(slots / experts) if convention == "nxd" else int(slots // experts)
    _check_sizes(capacity=capacity)
    return capacity


@public
def build_dropping_plan(
    expert_mask: Tensor, capacity: int, *, skip_token: bool = False, priority: Tensor | None = None
) -> BlockPlan:
    """Lay out a routing with one block of `capacity` slots per expert.

    Mask, `skip_token` and result as in :func:`build_block_plan`; `capacity` is B, see :func:`dropping_capacity`. An
    expert keeps its tokens of highest `priority` ``[T, E]``, in that order; without one, its first.
    """
    tokens, experts = _check_mask(expert_mask)
    _check_sizes(T=tokens, E=experts, capacity=capacity)
    check_flags({"skip_token": skip_token})
    chosen = expert_mask.bool()
    rank_TE = chosen.cumsum(0)
    if priority is not None:
        _check_values({"expert_mask": expert_mask, "priority": priority}, "[T, E]")
        order_TE = priority.double().masked_fill(~chosen, -torch.inf).sort(dim=0, descending=True, stable=True).indices
        count_TE = torch.arange(1, tokens + 1, device=chosen.device)[:, None].expand(tokens, experts)
        rank_TE = torch.empty_like(order_TE).scatter_(0, order_TE, count_TE)
    first_slot_E = torch.arange(experts, device=chosen.device) * capacity
    slot_TE = torch.where(chosen & (rank_TE <= capacity), first_slot_E + rank_TE, 0)
    owners = torch.arange(experts, device=chosen.device, dtype=torch.int32)
    return _plan(slot_TE, owners, capacity, skip_token)


def _plan(slot_TE: Tensor, block_to_expert: Tensor, block_size: int, skip_token: bool) -> BlockPlan:
    """Return the plan in which every pair has its slot, counted from 1; slot 0 is thrown away."""
    (tokens, experts), blocks = slot_TE.shape, block_to_expert.shape[0]
    ids_TE = torch.arange(tokens, device=slot_TE.device, dtype=torch.int32)[:, None].expand(tokens, experts)
    sink = -1 if skip_token else tokens
    filled = torch.full((blocks * block_size + 1,), sink, dtype=torch.int32, device=slot_TE.device)
    ids = filled.scatter_(0, slot_TE.reshape(-1), ids_TE.reshape(-1))[1:]
    real_N = ((ids >= 0) & (ids < tokens)).view(blocks, -1).any(1)
    return BlockPlan(ids, block_to_expert, pad(real_N.to(torch.int32), (0, 1)), block_size)


@public
def expert_mask(top_k_index: Tensor, experts: int, *, first_expert: int = 0) -> Tensor:
    """Return the bool mask ``[T, E]`` of a top-k routing ``[T, K]`` of expert ids of 0 and above.

    `first_expert` is the id of this rank's first expert; ids that are not of this rank's E select nothing.
    """
    local_TK = _local_ids(top_k_index, experts, first_expert)
    mask = torch.zeros((local_TK.shape[0], experts + 1), dtype=torch.bool, device=local_TK.device)
    return mask.scatter_(1, local_TK, True)[:, :experts]


@public
def masked_affinities(
    top_k_index: Tensor, top_k_weights: Tensor, experts: int, *, skip_token: bool = False, first_expert: int = 0
) -> Tensor:
    """Return ``expert_affinities_masked``: dense ``[T', E]`` flattened token-major to ``[T' * E, 1]``.

    T' is T + 1 with a zero sink row, or T with `skip_token`. Entries of experts that were not chosen are zero.
    `first_expert` as in :func:`expert_mask`. A row names an expert of this rank once at most, because the table has one
    entry per pair. That is checked where reading values costs nothing (on the CPU, outside of a trace).
    """
    local_TK = _local_ids(top_k_index, experts, first_expert)
    _check_values({"top_k_index": top_k_index, "top_k_weights": top_k_weights}, "[T, K]")
    check_flags({"skip_token": skip_token})
    if _readable(local_TK):
        ordered = local_TK.sort(1).values
        twice_T = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < experts)).any(1)
        if bool(twice_T.any()):
            got = f"row {int(twice_T.nonzero()[0])} with one twice"
            fix = "Add the weights of a repeated expert, and give the other place an id of E or above."
            raise ShapeError.about("top_k_index", "made of rows that name an expert once", got, fix)
    tokens = top_k_index.shape[0]
    rows = tokens if skip_token else tokens + 1
    dense = torch.zeros((rows, experts + 1), dtype=top_k_weights.dtype, device=top_k_weights.device)
    dense[:tokens].scatter_(1, local_TK, top_k_weights)
    return dense[:, :experts].reshape(-1, 1)


def _readable(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing and breaks no trace: an ordinary tensor in host memory."""
    if torch.compiler.is_compiling():  # first: the rest cannot be traced
        return False
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch._is_functional_tensor(tensor)


def _check_mask(mask: Tensor) -> tuple[int, int]:
    """Check a ``[T, E]`` mask of bools or integers; return T and E."""
    fits = isinstance(mask, Tensor) and not mask.is_floating_point()
    got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    fix = "Pass expert_mask(top_k_index, experts)."
    check_rules([Rule(fits, "expert_mask", "a bool or integer tensor", got, fix, DTypeError)])
    check_shape(mask, (None, None), "[T, E]", "expert_mask")
    return mask.shape[0], mask.shape[1]


def _check_sizes(**sizes: int) -> None:
    """Check sizes for positive ints; T has to be exact in fp32 too."""
    for name, value in sizes.items():
        expected, fix, limit = "positive, an int", "Pass a positive size.", math.inf
        if name == "T":
            expected, limit = f"positive and below {_MAX_TOKEN_ID}, an int", _MAX_TOKEN_ID
            fix = "Ids are exact below 2**24; split longer inputs."
        fits = type(value) is int and 0 < value < limit
        check_rules([Rule(fits, name, expected, repr(value), fix, ShapeError)])


def _local_ids(top_k_index: Tensor, experts: int, first_expert: int) -> Tensor:
    """Return checked ids ``[T, K]`` (0 and above) relative to `first_expert`; those of other ranks become E."""
    check_dtype(top_k_index, _INTEGERS, "top_k_index")
    check_shape(top_k_index, (None, None), "[T, K]", "top_k_index")
    least = int(top_k_index.min()) if _readable(top_k_index) and top_k_index.numel() else 0
    expected = "made of expert ids of 0 and above"
    fix = "Mark pairs without an expert with an id of at least the number of experts."
    check_rules([Rule(least >= 0, "top_k_index", expected, f"the id {least}", fix, ShapeError)])
    _check_sizes(experts=experts)
    fits, fix = type(first_expert) is int and first_expert >= 0, "It is the id of this rank's first expert."
    check_rules([Rule(fits, "first_expert", "an int of at least 0", repr(first_expert), fix)])
    local = top_k_index.long() - first_expert
    return torch.where((local >= 0) & (local < experts), local, experts)


def _check_values(tensors: dict[str, Tensor], names: str) -> None:
    """Check that the second tensor, by argument name, has the shape and the device of the first, in any dtype."""
    (_, like), (argument, values) = tensors.items()
    check_dtype(values, _VALUES, argument)
    check_shape(values, tuple(like.shape), names, argument)
    check_same_device(tensors)


def _check_finite(number: object, argument: str, fix: str) -> None:
    """Check for a finite number of at least 0."""
    fits = isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < math.inf
    check_rules([Rule(fits, argument, "a finite number of at least 0", repr(number), fix)])

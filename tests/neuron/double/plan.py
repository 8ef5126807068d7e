"""The block plan as the blockwise kernels require it. Letters: T' token rows, H hidden, E experts, N blocks of B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.neuron.double.checks import BF16, FP32, INT32, check_operand, check_read
from tests.neuron.double.contract import need
from tests.neuron.double.memory import DType, KernelTensor, Launch

MAX_ID = 1 << 24
"""Ids pass through fp32 on chip."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; `tokens` are the real ones."""

    rows: int
    tokens: int
    hidden: int
    inner: int
    experts: int
    blocks: int
    block: int


@dataclass(frozen=True)
class Plan:
    """Where the real slots are. Empty under fake tensors."""

    token_R: Tensor
    expert_R: Tensor
    used_NB: Tensor


def check_block_size(value: Any, where: str) -> int:
    """A compile-time constant."""
    need(type(value) is int and value > 0, where, f"block_size is a positive int, got {value!r}")
    return int(value)


def check_tokens(
    call: dict[str, Any], experts: int, launch: Launch, where: str, dtypes: tuple[DType, ...] = (BF16, FP32)
) -> tuple[int, int]:
    """Hidden states and affinities; return T' and H."""
    rows, hidden = check_operand(call["hidden_states"], (None, None), (BF16,), where, "hidden_states")
    name = "expert_affinities_masked"
    check_operand(call[name], (rows * experts, 1), dtypes, where, name)
    for argument in ("hidden_states", name):
        check_read(call[argument], launch, where, argument)
    return rows, hidden


def check_plan(call: dict[str, Any], sizes: Sizes, skip_token: bool, launch: Launch, where: str) -> Plan:
    """Ids, experts, the sink row and the affinities of the pairs."""
    ids, owners = call["token_position_to_id"], call["block_to_expert"]
    check_operand(ids, (sizes.blocks * sizes.block,), (INT32,), where, "token_position_to_id")
    flat = (sizes.blocks,) if owners.ndim == 1 else (sizes.blocks, 1)
    check_operand(owners, flat, (INT32,), where, "block_to_expert")
    need(sizes.tokens < MAX_ID, where, f"T is below 2^24, got {sizes.tokens}")
    empty = torch.empty(0, dtype=torch.int64)
    if launch.fake:
        return Plan(empty, empty, empty)
    owner_N = owners.data.reshape(-1).long()
    in_range = bool(((owner_N >= 0) & (owner_N < sizes.experts)).all())
    need(in_range, where, f"block_to_expert lies in 0..{sizes.experts - 1}, got {owner_N.tolist()}")
    need(bool((owner_N.diff() >= 0).all()), where, f"blocks are in expert order, got {owner_N.tolist()}")
    id_NB = ids.data.view(sizes.blocks, sizes.block).long()
    pad = -1 if skip_token else sizes.tokens
    used_NB = id_NB != pad
    real = id_NB[used_NB]
    fits = bool(((real >= 0) & (real < sizes.tokens)).all())
    need(fits, where, f"token_position_to_id lies in 0..{sizes.tokens - 1}, or {pad} for unused slots")
    expert_R = owner_N[:, None].expand_as(id_NB)[used_NB]
    pairs = real * sizes.experts + expert_R
    need(len(pairs.unique()) == len(pairs), where, "a token has one slot per expert")
    table = call["expert_affinities_masked"].data.view(sizes.rows, sizes.experts)
    unplanned = table.clone()
    unplanned[real, expert_R] = 0
    need(not bool(unplanned[: sizes.tokens].any()), where, "affinities outside of the plan are zero")
    if not skip_token:
        check_sink(call["hidden_states"], where, "hidden_states")
        need(not bool(table[-1].any()), where, "the affinities' sink row is zero")
    return Plan(real, expert_R, used_NB)


def check_sink(value: KernelTensor, where: str, name: str) -> None:
    """Row T is zero: unused slots gather it."""
    need(not bool(value.data[-1].any()), where, f"{name}'s sink row is zero")


def count_blocks(call: dict[str, Any], block: int, where: str) -> int:
    """N, from the length of the ids."""
    ids = call["token_position_to_id"]
    check_operand(ids, (None,), (INT32,), where, "token_position_to_id")
    need(ids.shape[0] % block == 0, where, f"token_position_to_id has N*B ids, got {ids.shape[0]} for B={block}")
    return int(ids.shape[0]) // block

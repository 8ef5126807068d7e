"""From the blockwise kernels' arguments to runs of sorted rows, and back to their checkpoint layouts.

Legend: T' rows of the token tensors, N blocks of B slots, R real (token, expert) pairs in slot order, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.errors import ShapeError, refuse


@dataclass(frozen=True)
class BlockRows:
    """The real slots of a plan.

    Attributes:
        slot_R: position of each pair among the N * B slots.
        token_R: its token.
        expert_R: its expert.
        runs: ``(expert, first row, end row)`` of every expert with rows.
        blocks: N.
        block_size: B.
    """

    slot_R: Tensor
    token_R: Tensor
    expert_R: Tensor
    runs: list[tuple[int, int, int]]
    blocks: int
    block_size: int

    def affinity(self, expert_affinities_masked: Tensor, experts: int) -> Tensor:
        """Return each pair's routing weight, fp32 ``[R]``."""
        return expert_affinities_masked.reshape(-1, experts)[self.token_R, self.expert_R].float()

    def to_blocks(self, values_RC: Tensor) -> Tensor:
        """Scatter rows ``[R, C]`` to ``[N, B, C]``; slots without a token are zero."""
        out = values_RC.new_zeros((self.blocks * self.block_size, values_RC.shape[1]))
        out[self.slot_R] = values_RC
        return out.view(self.blocks, self.block_size, -1)

    def from_blocks(self, values_NBC: Tensor) -> Tensor:
        """Gather rows ``[R, C]`` from ``[N, B, C]``."""
        return values_NBC.reshape(self.blocks * self.block_size, -1)[self.slot_R]


def block_rows(
    token_position_to_id: Tensor, block_to_expert: Tensor, block_size: int, tokens: int, experts: int, *, where: str
) -> BlockRows:
    """Collect the real slots of a plan.

    Args:
        token_position_to_id: int ``[N * B]``; ids outside ``0..tokens-1`` mark unused slots.
        block_to_expert: int ``[N]`` or ``[N, 1]``, ascending.
        block_size: B.
        tokens: number of real tokens T.
        experts: E.
        where: kernel name for errors.

    Raises:
        ShapeError: the sizes do not fit each other, an expert id is out of range, experts do not ascend, or real slots
            follow unused ones within an expert (MX groups are formed by slot, so that would change the numbers).
    """
    block_to_expert = block_to_expert.reshape(-1)
    blocks = block_to_expert.numel()
    _require(
        token_position_to_id.numel() == blocks * block_size,
        where,
        "token_position_to_id",
        f"of size N * block_size = {blocks * block_size}",
        str(list(token_position_to_id.shape)),
    )
    ids = token_position_to_id.reshape(-1).long()
    slot_R = ((ids >= 0) & (ids < tokens)).nonzero().reshape(-1)
    expert_R = block_to_expert.long()[slot_R // block_size]
    in_range = bool(((block_to_expert >= 0) & (block_to_expert < experts)).all())
    _require(in_range, where, "block_to_expert", f"made of ids 0..{experts - 1}", str(block_to_expert.tolist()))
    ascending = bool((block_to_expert.diff() >= 0).all())
    _require(ascending, where, "block_to_expert", "ascending", str(block_to_expert.tolist()))
    counts = torch.bincount(expert_R, minlength=experts).tolist()
    runs, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            runs.append((expert, start, start + count))
            first, last = int(slot_R[start]), int(slot_R[start + count - 1])
            dense = last - first == count - 1 and first % block_size == 0
            _require(dense, where, "token_position_to_id", "filled without gaps per expert", f"gaps at expert {expert}")
            start += count
    return BlockRows(slot_R, ids[slot_R], expert_R, runs, blocks, block_size)


def _require(condition: bool, where: str, argument: str, expected: str, got: str) -> None:
    if not condition:
        raise refuse(
            ShapeError, where=where, argument=argument, expected=expected, got=got, remedy="Use build_block_plan."
        )

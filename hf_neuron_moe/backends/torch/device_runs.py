"""Rows in expert order whose borders only the device knows: nothing here reads a value of a tensor.

Legend: T tokens, K experts per token, R = T * K rows (token-expert pairs), G groups (a layer's experts), C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.formats.constants import MX_BLOCK, PATCH_ROWS

_LARGEST_TILE = 512  # rows of a contraction tile of the MX format


@dataclass(frozen=True)
class DeviceRuns:
    """The counterpart of :data:`~hf_neuron_moe.backends.torch.experts.Runs` in tensors."""

    ends_G: Tensor  # int32, where each group's rows end
    group_R: Tensor  # the group of each row; G for rows of no group, which are the last

    @property
    def of_a_group_R(self) -> Tensor:
        """Whether each row belongs to a group."""
        return self.group_R < len(self.ends_G)

    def of_rows(self, values_GN: Tensor) -> Tensor:
        """Return each row's values ``[R, N]`` of its group; rows of no group get the last one's."""
        return values_GN.index_select(0, self.group_R.clamp(max=len(self.ends_G) - 1))

    def mx_blocks(self, block_size: int) -> MXRowBlocks:
        """Return which MX block of a sum over rows each row belongs to.

        A group's rows are cut into the blocks of the blockwise kernels, these into contraction tiles, from the group's
        first row on. In a tile a block is 8 neighbours in each of 4 lanes.
        """
        tile, rows, groups = min(block_size, _LARGEST_TILE), len(self.group_R), len(self.ends_G) + 1
        bounds = F.pad(self.ends_G, (1, 0))
        counts = F.pad(self.ends_G, (0, 1), value=rows) - bounds
        tiles = (counts + (tile - 1)).div_(tile, rounding_mode="floor")
        place_R = torch.arange(rows, device=bounds.device) - bounds.index_select(0, self.group_R)
        tile_R = (tiles.cumsum(0) - tiles).index_select(0, self.group_R) + place_R.div(tile, rounding_mode="floor")
        block_R = place_R.remainder_(tile // 4).div_(PATCH_ROWS, rounding_mode="floor")
        per_tile = tile // MX_BLOCK
        return MXRowBlocks(block_R.add_(tile_R, alpha=per_tile), (rows // tile + groups) * per_tile)


@dataclass(frozen=True)
class MXRowBlocks:
    """The MX block of each row, the same in all columns, and a bound on their number that no value decides."""

    block_R: Tensor
    count: int


@dataclass(frozen=True)
class DevicePairs:
    """The pairs of a top-k routing in expert order; tokens stay in ascending order within an expert."""

    runs: DeviceRuns
    order_R: Tensor  # position of each sorted pair in the flattened ``[T, K]``
    token_R: Tensor
    slot_TK: Tensor  # the inverse of the sort


def sort_on_device(index_TK: Tensor, experts: int) -> DevicePairs:
    """Sort pairs by expert; those of `experts` and above sort behind the rest. No id may be negative."""
    group_R, order_R = torch.sort(index_TK.reshape(-1).clamp(max=experts), stable=True)
    every_G = torch.arange(experts, device=index_TK.device, dtype=group_R.dtype)
    ends_G = torch.searchsorted(group_R, every_G, right=True, out_int32=True)
    numbers_R = torch.arange(len(order_R), device=index_TK.device)
    slot_R = torch.empty_like(order_R).scatter_(0, order_R, numbers_R)
    token_R = order_R.div(index_TK.shape[1], rounding_mode="floor")
    return DevicePairs(DeviceRuns(ends_G, group_R), order_R, token_R, slot_R.view(index_TK.shape))

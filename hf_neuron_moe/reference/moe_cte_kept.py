"""The activations that ``moe_cte`` returns, written block by block as the experts are computed.

Legend: R rows of one expert, H hidden, I intermediate, E experts, N blocks of B slots.

A slot without a token holds what the kernel computes for the sink row: its expert's activations of a zero input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.reference.block_rows import BlockRows


@dataclass(frozen=True)
class KeptBlocks:
    """Buffers of the returned activations, uninitialized until every run has been put and :meth:`finish` was called."""

    rows: BlockRows
    block_to_expert: Tensor  # int64 [N]
    gate_up: Tensor  # [N, 2, I, B]
    down: Tensor | None  # [N, B, H]
    idle_E2I: Tensor  # content of slots without a token, fp32
    idle_EH: Tensor  # likewise for `down`

    def put_gate_up(self, run: int, gate_RI: Tensor, up_RI: Tensor) -> None:
        """Write the pre-activations of one run, in the buffers' dtype."""
        block, _, _ = self._blocks(run)
        idle_2I = self.idle_E2I[self.rows.runs[run][0]]
        for half, values_RI in enumerate((gate_RI, up_RI)):
            if block >= 0:
                fill_blocks(self.gate_up[:, half], values_RI, block, idle_2I[half])
                continue
            blocks, places = self._slots(run)
            self.gate_up[blocks, half] = idle_2I[half, :, None].to(self.gate_up.dtype)
            self.gate_up[blocks, half, :, places] = values_RI

    def put_down(self, run: int, down_RH: Tensor) -> None:
        """Write the down projections of one run, in any float dtype."""
        if self.down is None:
            return
        block, _, rest = self._blocks(run)
        idle_H = self.idle_EH[self.rows.runs[run][0]].to(self.down.dtype)
        if block < 0:
            blocks, places = self._slots(run)
            self.down[blocks] = idle_H
            self.down[blocks, places] = down_RH.to(self.down.dtype)
            return
        slots_SH = self.down.view(-1, down_RH.shape[1])[block * self.rows.block_size :]
        slots_SH[: len(down_RH)].copy_(down_RH)
        if rest:
            slots_SH[len(down_RH) : len(down_RH) + self.rows.block_size - rest] = idle_H

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Fill the blocks without tokens and return both buffers."""
        spare = (~self.rows.used_blocks()).nonzero().reshape(-1)
        expert = self.block_to_expert[spare]
        self.gate_up[spare] = self.idle_E2I[expert].to(self.gate_up.dtype)[..., None]
        if self.down is not None:
            self.down[spare] = self.idle_EH[expert].to(self.down.dtype)[:, None]
        return self.gate_up, self.down

    def _blocks(self, run: int) -> tuple[int, int, int]:
        """Return a run's first block (-1 if its slots have gaps), its full blocks and the rows of the last one."""
        _, start, end = self.rows.runs[run]
        first, size = self.rows.first_slots[run], self.rows.block_size
        return (-1, 0, 0) if first < 0 else (first // size, (end - start) // size, (end - start) % size)

    def _slots(self, run: int) -> tuple[Tensor, Tensor]:
        """Return block and place of every row of a run."""
        _, start, end = self.rows.runs[run]
        slot_R, size = self.rows.slot_R[start:end], self.rows.block_size
        return torch.div(slot_R, size, rounding_mode="floor"), slot_R % size


def fill_blocks(target_NIB: Tensor, values_RI: Tensor, block: int, idle_I: Tensor) -> None:
    """Write one expert's rows, which start at `block`, tokens innermost; slots after the last row get `idle_I`."""
    size = target_NIB.shape[2]
    full, rest = divmod(len(values_RI), size)
    whole = values_RI[: full * size].view(full, size, values_RI.shape[1])
    target_NIB[block : block + full].copy_(whole.transpose(1, 2))
    if rest:
        last_IB = target_NIB[block + full]
        last_IB[:, :rest].copy_(values_RI[full * size :].t())
        last_IB[:, rest:] = idle_I[:, None]

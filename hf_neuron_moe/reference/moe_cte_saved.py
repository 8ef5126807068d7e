"""The activations that ``moe_cte`` returns, written block by block as the experts are computed.

Legend: R rows of one expert, H hidden, I intermediate, E experts, N blocks of B slots.

A slot without a token holds what the kernel computes for the sink row: its expert's activations of a zero input.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_neuron_moe.reference.activations import BY_TYPE
from hf_neuron_moe.reference.block_rows import BlockRows
from hf_neuron_moe.reference.moe_cte_problem import Place, Problem


@dataclass(frozen=True)
class SavedBlocks:
    """Buffers of the returned activations, uninitialized until every run has been put and :meth:`finish` was called."""

    rows: BlockRows
    block_to_expert: Tensor  # int64 [N], ids below E
    gate_up: Tensor  # [N, 2, I, B]
    down: Tensor | None  # [N, B, H]
    idle_E2I: Tensor  # content of slots without a token, fp32
    idle_EH: Tensor  # likewise for `down`

    def put_gate_up(self, run: int, gate_RI: Tensor, up_RI: Tensor) -> None:
        """Write the pre-activations of one run, in the buffers' dtype."""
        for half, values_RI in enumerate((gate_RI, up_RI)):
            self._put(run, self.gate_up[:, half].transpose(1, 2), values_RI, self.idle_E2I[:, half])

    def put_down(self, run: int, down_RH: Tensor) -> None:
        """Write the down projections of one run, in any float dtype."""
        if self.down is not None:
            self._put(run, self.down, down_RH, self.idle_EH)

    def _put(self, run: int, target_NBX: Tensor, values_RX: Tensor, idle_EX: Tensor) -> None:
        first, idle_X = self.rows.first_slots[run], idle_EX[self.rows.runs[run][0]].to(target_NBX.dtype)
        if first >= 0:
            fill_blocks(target_NBX, values_RX, first // self.rows.block_size, idle_X)
        else:
            blocks, places = self.rows.places(run)
            target_NBX[blocks] = idle_X
            target_NBX[blocks, places] = values_RX.to(target_NBX.dtype)

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Fill the blocks without tokens and return both buffers."""
        spare = (~self.rows.used_blocks()).nonzero().reshape(-1)
        expert = self.block_to_expert[spare]
        self.gate_up[spare] = self.idle_E2I[expert].to(self.gate_up.dtype)[..., None]
        if self.down is not None:
            self.down[spare] = self.idle_EH[expert].to(self.down.dtype)[:, None]
        return self.gate_up, self.down


def fill_blocks(target_NBX: Tensor, values_RX: Tensor, block: int, idle_X: Tensor) -> None:
    """Write one expert's rows, which start at `block`; slots after the last row get `idle_X`."""
    rows, size = values_RX.shape[0], target_NBX.shape[1]
    full, rest = divmod(rows, size)
    target_NBX[block : block + full].copy_(values_RX[: rows - rest].view(full, size, values_RX.shape[1]))
    if rest:
        target_NBX[block + full, :rest] = values_RX[rows - rest :]
        target_NBX[block + full, rest:] = idle_X


def clamp_(values: Tensor, upper: float | None, lower: float | None) -> Tensor:
    """Clamp in place: minimum with `upper`, then maximum with `lower`; None is no limit."""
    if upper is not None:
        values.clamp_(max=upper)
    if lower is not None:
        values.clamp_(min=lower)
    return values


def saved_buffers(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for ``[N, 2, I, B]`` and ``[N, B, H]`` where they are saved; the last is not by affinity on I."""
    if not problem.saves:
        return None, None
    N, B, new = problem.rows.blocks, problem.rows.block_size, problem.hidden.new_empty
    down = (
        None if problem.place is Place.INTERMEDIATE else new((N, B, len(problem.hidden[0])), dtype=problem.saved_dtype)
    )
    return new((N, 2, problem.inner, B), dtype=problem.saved_dtype), down


def saved_blocks(problem: Problem) -> SavedBlocks | None:
    """Return the activations to fill, if they are saved."""
    gate_up, down = saved_buffers(problem)
    if gate_up is None:
        return None
    block_to_expert = problem.given.block_to_expert.reshape(-1).long().clamp(max=problem.experts - 1)
    return SavedBlocks(problem.rows, block_to_expert, gate_up, down, *_idle_slots(problem, block_to_expert))


def _idle_slots(problem: Problem, block_to_expert: Tensor) -> tuple[Tensor, Tensor]:
    """Return each expert's activations of a zero row with affinity zero: ``[E, 2, I]`` and ``[E, H]``."""
    shape = (problem.experts, 2, problem.inner)
    idle_E2I = problem.affinity_R.new_zeros(shape) if problem.bias_E2I is None else problem.bias_E2I.clone()
    for half, limits in enumerate(problem.given.clamps):
        clamp_(idle_E2I[:, half], *limits)
    idle_E2I = idle_E2I.to(problem.rounded).float()
    idle_EH = problem.affinity_R.new_zeros((problem.experts, problem.hidden.shape[1]))
    nonzero = problem.bias_E2I is not None or problem.given.clamped
    if nonzero and problem.place not in (Place.INTERMEDIATE, Place.PRE_ACTIVATIONS):
        act, up_EI = BY_TYPE[problem.given.activation_function].value, idle_E2I[:, 1]
        product_EI = act(up_EI) if problem.given.skip_gate_proj else act(idle_E2I[:, 0]) * up_EI
        product_EI = product_EI.to(problem.rounded).float()
        for expert in block_to_expert.unique().tolist():
            idle_EH[expert] = problem.weights(expert).down_HI.float() @ product_EI[expert]
        if problem.scales.down_EX is not None:
            idle_EH.mul_(problem.scales.down_EX)
        if problem.scales.down_in_T is not None:
            # A slot without a token reads the sink row's scale, or nothing where there is none.
            idle_EH.mul_(0.0 if problem.given.skip_dma.skip_token else problem.scales.down_in_T[-1])
    if problem.golden and problem.down_bias_EH is not None:
        idle_EH.add_(problem.down_bias_EH)
    return idle_E2I, idle_EH

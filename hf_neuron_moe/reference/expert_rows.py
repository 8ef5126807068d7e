"""What the rows of one expert become between the matmuls of ``moe_cte``: the input, the epilogue, the output.

Legend: R rows, H hidden, I intermediate. The fast path has all rows of an expert, ``block_walk`` those of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Compute, Scratch, call_scratch
from hf_neuron_moe.backends.torch.ffn_forward import RowSource
from hf_neuron_moe.backends.torch.tiles import Loader, Span
from hf_neuron_moe.reference.activations import BY_TYPE
from hf_neuron_moe.reference.moe_cte_problem import Place, Problem
from hf_neuron_moe.reference.moe_cte_saved import clamp_
from hf_neuron_moe.reference.mx_experts import ActivationQuantizer, quantize_static_

_ROW_CHUNK = 1024


def epilogue_loader(problem: Problem) -> Loader:
    """Return a loader of fp32 operands for matmuls with an epilogue."""
    # Dequantized weights are fp32 values that must not be rounded again.
    exact = problem.mx or problem.scales.gate_up_block is not None
    rounded = torch.float32 if exact else problem.rounded
    compute = Compute(torch.float32, rounded, mx=False, row_chunk=_ROW_CHUNK)
    return Loader(compute, call_scratch(problem.hidden.device))


def quantized_hidden(problem: Problem, scratch: Scratch) -> Tensor:
    """Return the hidden states as the matmuls see them: for MX rounded once per token, for STATIC_MX per run later."""
    if not problem.mx or problem.scales.static_inputs is not None:
        return problem.hidden
    quantizer = ActivationQuantizer(problem.mx_rule, scratch)
    values_TH = problem.hidden.to(torch.float32, copy=True)
    for chunk in values_TH.split(_ROW_CHUNK):
        quantizer.hidden_(chunk)
    return values_TH


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one expert: its input, an :class:`hf_neuron_moe.backends.torch.ffn_forward.Epilogue`, its output."""

    problem: Problem
    scratch: Scratch
    expert: int
    token_R: Tensor  # rows of the token tensors
    affinity_R1: Tensor  # fp32

    @property
    def needs_gate(self) -> bool:
        """Whether the gate has to be multiplied at all."""
        return self.problem.saves or not self.problem.given.skip_gate_proj

    def part(self, rows: slice) -> ExpertRows:
        """Return some of the rows."""
        return replace(self, token_R=self.token_R[rows], affinity_R1=self.affinity_R1[rows])

    def inputs(self, hidden: Tensor) -> RowSource:
        """Return the rows of the hidden states."""
        problem, static = self.problem, self.problem.scales.static_inputs
        if problem.place is Place.INPUT:
            return RowSource(hidden[self.token_R].float().mul_(self.affinity_R1).to(problem.rounded))
        if static is not None:
            return RowSource(quantize_static_(hidden[self.token_R].float(), static[0][self.expert]))
        return RowSource(hidden, self.token_R)

    def pre_activations_(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> None:
        """Scale, bias, clamp and round the sums in place."""
        problem, part = self.problem, slice(columns.start, columns.stop)
        scales, bias_E2I = problem.scales, problem.bias_E2I
        for half, values in enumerate((gate_RI, up_RI)):
            if half == 0 and not self.needs_gate:
                continue
            if scales.gate_up_E2X is not None:
                scale_X = scales.gate_up_E2X[self.expert, half]
                values.mul_(scale_X[part] if len(scale_X) > 1 else scale_X)
            if scales.gate_up_in_T is not None:
                values.mul_(scales.gate_up_in_T[self.token_R[rows.start : rows.stop]])
            if bias_E2I is not None:
                values.add_(bias_E2I[self.expert, half, part])
            clamp_(values, *problem.given.clamps[half])
            self._round_(values, problem.rounded_pre_activations)

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        """Return the rounded, for MX quantized, product of activation and up."""
        problem, affinity_R1 = self.problem, self.affinity_R1[rows.start : rows.stop]
        act_, skip_gate = BY_TYPE[problem.given.activation_function].value_, problem.given.skip_gate_proj
        if problem.place is Place.PRE_ACTIVATIONS:
            up_RI.mul_(affinity_R1)
            if not skip_gate:
                gate_RI.mul_(affinity_R1)
        product = act_(up_RI) if skip_gate else act_(gate_RI).mul_(up_RI)
        if problem.place is Place.INTERMEDIATE:
            product.mul_(affinity_R1)
        self._round_(product, torch.float32 if problem.mx and problem.golden else problem.rounded)
        if problem.inner < columns.stop:
            product[:, max(problem.inner - columns.start, 0) :].zero_()
        if problem.scales.static_inputs is not None:
            return quantize_static_(product, problem.scales.static_inputs[1][self.expert])
        return ActivationQuantizer(problem.mx_rule, self.scratch).intermediate_(product) if problem.mx else product

    def _round_(self, values: Tensor, dtype: torch.dtype) -> None:
        if dtype != values.dtype:
            values.copy_(self.scratch.get("rounding", tuple(values.shape), dtype).copy_(values))

    def finish_(self, out_RH: Tensor, save: Callable[[Tensor], object] | None) -> None:
        """Scale the down sums, `save` them, add the bias and multiply by the affinity, in place."""
        problem, scales, affinity_R1 = self.problem, self.problem.scales, self.affinity_R1
        if scales.down_EX is not None:
            out_RH.mul_(scales.down_EX[self.expert])
        if scales.down_in_T is not None:
            out_RH.mul_(scales.down_in_T[self.token_R])
        if save is not None and not problem.golden:
            save(out_RH)
        if problem.down_bias_EH is not None:
            bias_H = problem.down_bias_EH[self.expert]
            if problem.place is Place.INTERMEDIATE:
                out_RH.addcmul_(affinity_R1, bias_H)
            else:
                out_RH.add_(bias_H)
        if save is not None and problem.golden:
            save(out_RH)
        if problem.place is Place.OUTPUT:
            out_RH.mul_(affinity_R1)

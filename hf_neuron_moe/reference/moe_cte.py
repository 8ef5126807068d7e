"""``moe_cte``: the forward of the blockwise MoE kernels, all seven implementations, as one function.

Legend: T tokens, T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), R rows of one
expert, H hidden, I intermediate, E experts, N blocks of B slots.

Per block of expert e, with gathered rows X and affinities a, matmuls accumulating in fp32::

    g, u = X Wg, X Wu;  times the FP8 scales;  plus the biases;  min with the upper, then max with the lower limits
    h = act(g) * u;     y = (h Wd) times the FP8 scale, plus the down bias;     out += a * y

Only real rows are computed, expert by expert over tiles. Between the matmuls: dequantization scale, activation scale,
bias, clamp, then the pre-activations are rounded and saved; affinity of PRE_SCALE, activation, product, affinity of
multiply-on-I, rounding, MX quantization. docs/kernels.md has what the devices return, how to read it off the result
here, and what upstream gets wrong.

Sources: nki-library 2.29 ``core.moe.moe_cte``, its torch reference and the shard_on_i kernel; 2.30 direct scales, 2.31
activation scales and MX storage options, 2.33 ``accumulation_dtype``, ``skip_gate_proj`` and SquaredReLU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Compute, call_scratch
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.tiles import Loader, Span, tile_loader
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.activations import act_
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_problem import Place, Problem, check_arguments
from hf_neuron_moe.reference.moe_cte_saved import SavedBlocks, clamp_, saved_blocks
from hf_neuron_moe.reference.moe_types import ActFnType, taking
from hf_neuron_moe.reference.mx_experts import ActivationQuantizer, quantize_static_

_ROW_CHUNK = 1024


class MoEForward(NamedTuple):
    """What the forward returns; the activations are None unless the implementation returns them.

    By the golden convention PRE_SCALE multiplies the input, so that the pre-activations contain the affinity, and the
    down activations contain the down bias.
    """

    output: Tensor  # [T', H], a sink row is zero
    gate_up_activations_T: Tensor | None  # [N, 2, I, B] pre-activations after scale, bias and clamp, before PRE_SCALE
    down_activations: Tensor | None  # [N, B, H] after the scale, before bias and affinity; None with the affinity on I


@public
@taking(Arguments)
def moe_cte(arguments: Arguments) -> MoEForward:
    """Forward of the experts over a block plan: the output, and the activations that the implementation returns.

    The arguments are the fields of :class:`~hf_neuron_moe.reference.moe_cte_arguments.Arguments`, described there and
    in docs/kernels.md.
    """
    return forward(arguments)


@torch.no_grad()
def forward(arguments: Arguments) -> MoEForward:
    """Check and compute a call; :func:`moe_cte` and the direct kernels end here."""
    problem = check_arguments(arguments)
    plain = _is_plain(problem)
    loader, saved = _loader(problem, plain), saved_blocks(problem)
    total_TH = torch.zeros(problem.hidden.shape, dtype=torch.float32, device=problem.hidden.device)
    hidden = _quantized_hidden(problem, loader)
    for number, (expert, start, end) in enumerate(problem.rows.runs):
        rows = ExpertRows(problem, loader, number)
        out_RH = loader.scratch.get("expert_out", (end - start, hidden.shape[1]), torch.float32)
        halves = [
            loader.scratch.get(name, (end - start, problem.inner), problem.saved_dtype)
            for name in ("saved_gate", "saved_up")
            if saved is not None
        ]
        ffn_forward(
            rows.inputs(hidden),
            problem.weights(expert),
            loader,
            out_RH,
            save=Checkpoints(*halves),
            scale_R1=rows.affinity_R1 if problem.place is Place.INTERMEDIATE else None,
            epilogue=None if plain else rows,
        )
        if saved is not None:
            saved.put_gate_up(number, *halves)
        rows.finish_(out_RH, saved)
        total_TH.index_add_(0, rows.token_R, out_RH)
    output = total_TH.to(problem.given.accumulation_dtype or problem.hidden.dtype)
    return MoEForward(output, *((None, None) if saved is None else saved.finish()))


def _is_plain(problem: Problem) -> bool:
    """Whether the experts are ``silu(gate) * up`` with nothing in between, which the tiles do by themselves."""
    return (
        problem.given.activation_function is ActFnType.SiLU
        and not problem.given.skip_gate_proj
        and not problem.mx
        and problem.bias_E2I is None
        and problem.scales.gate_up_E2X is None
        and problem.scales.gate_up_block is None
        and problem.place is not Place.PRE_ACTIVATIONS
        and not problem.given.clamped
    )


def _loader(problem: Problem, plain: bool) -> Loader:
    device = problem.hidden.device
    if plain:
        return tile_loader("fp32" if problem.rounded == torch.float32 else "bf16", device)
    # Dequantized weights are fp32 values that must not be rounded again.
    exact = problem.mx or problem.scales.gate_up_block is not None
    rounded = torch.float32 if exact else problem.rounded
    return Loader(Compute(torch.float32, rounded, mx=False, row_chunk=_ROW_CHUNK), call_scratch(device))


def _quantized_hidden(problem: Problem, loader: Loader) -> Tensor:
    """Return the hidden states as the matmuls see them: for MX rounded once per token, for STATIC_MX per run later."""
    if not problem.mx or problem.scales.static_inputs is not None:
        return problem.hidden
    quantizer = ActivationQuantizer(problem.mx_rule, loader.scratch)
    values_TH = problem.hidden.to(torch.float32, copy=True)
    for chunk in values_TH.split(_ROW_CHUNK):
        quantizer.hidden_(chunk)
    return values_TH


class ExpertRows:
    """One expert's rows: its input, an :class:`hf_neuron_moe.backends.torch.ffn_forward.Epilogue`, its output."""

    def __init__(self, problem: Problem, loader: Loader, number: int) -> None:
        self.problem = problem
        self.scratch = loader.scratch
        self.number = number
        self.expert, start, end = problem.rows.runs[number]
        self.token_R = problem.rows.token_R[start:end]
        self.affinity_R1 = problem.affinity_R[start:end, None]
        self.needs_gate = problem.saves or not problem.given.skip_gate_proj

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
            self._round_(values, torch.float32 if problem.mx else problem.rounded)

    def intermediate(self, gate_RI: Tensor, up_RI: Tensor, rows: Span, columns: Span) -> Tensor:
        """Return the rounded, for MX quantized, product of activation and up."""
        problem, affinity_R1 = self.problem, self.affinity_R1[rows.start : rows.stop]
        kind, skip_gate = problem.given.activation_function, problem.given.skip_gate_proj
        if problem.place is Place.PRE_ACTIVATIONS:
            up_RI.mul_(affinity_R1)
            if not skip_gate:
                gate_RI.mul_(affinity_R1)
        product = act_(up_RI, kind) if skip_gate else act_(gate_RI, kind).mul_(up_RI)
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

    def finish_(self, out_RH: Tensor, saved: SavedBlocks | None) -> None:
        """Scale the down sums, save them, add the bias and multiply by the affinity, in place."""
        problem, scales, affinity_R1 = self.problem, self.problem.scales, self.affinity_R1
        if scales.down_EX is not None:
            out_RH.mul_(scales.down_EX[self.expert])
        if scales.down_in_T is not None:
            out_RH.mul_(scales.down_in_T[self.token_R])
        if saved is not None and not problem.golden:
            saved.put_down(self.number, out_RH)
        if problem.down_bias_EH is not None:
            bias_H = problem.down_bias_EH[self.expert]
            if problem.place is Place.INTERMEDIATE:
                out_RH.addcmul_(affinity_R1, bias_H)
            else:
                out_RH.add_(bias_H)
        if saved is not None and problem.golden:
            saved.put_down(self.number, out_RH)
        if problem.place is Place.OUTPUT:
            out_RH.mul_(affinity_R1)

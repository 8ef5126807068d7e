"""The blockwise MoE forward, expert by expert over tiles.

Legend: T' rows of the token tensors, R real (token, expert) pairs in expert order, H hidden, I intermediate, E experts,
N blocks of B slots, C columns.

Only real rows are computed. What a slot without a token holds in the kept activations is one row per expert (the
activations of a zero input) and filled in at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Compute, call_scratch
from hf_neuron_moe.backends.torch.experts import rows_per_run
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, Epilogue, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.tiling import Loader, make_loader
from hf_neuron_moe.kernels.activations import act_
from hf_neuron_moe.kernels.block_rows import BlockRows
from hf_neuron_moe.kernels.moe_cte_arguments import Place, Problem
from hf_neuron_moe.kernels.moe_cte_epilogue import ExpertEpilogue, clamp_
from hf_neuron_moe.kernels.moe_mx import ActivationQuantizer, quantize_static_
from hf_neuron_moe.kernels.moe_types import ActFnType

_ROW_CHUNK = 1024

Result = tuple[Tensor, Tensor | None, Tensor | None]
"""Output ``[T', H]``, gate/up ``[N, 2, I, B]`` and down ``[N, B, H]``."""


def run(problem: Problem) -> Result:
    """Compute a checked call."""
    rows, device = problem.rows, problem.hidden.device
    kept: list[Tensor] = []
    if problem.keep:
        widths = [problem.inner, problem.inner, problem.hidden.shape[1]]
        widths = widths[: 2 if problem.place is Place.INTERMEDIATE else 3]
        shapes = [(len(rows.token_R), width) for width in widths]
        kept = [torch.empty(shape, dtype=problem.kept_dtype, device=device) for shape in shapes]
    save, down_RH = Checkpoints(*kept[:2]), kept[2] if len(kept) == 3 else None
    loader = _loader(problem)
    total_TH = torch.zeros(problem.hidden.shape, dtype=torch.float32, device=device)
    hidden = _quantized_hidden(problem, loader)
    on_inner_R1 = problem.affinity_R[:, None] if problem.place is Place.INTERMEDIATE else None
    for expert, start, end in rows.runs:
        out_RH = loader.scratch.get("expert_out", (end - start, problem.hidden.shape[1]), torch.float32)
        ffn_forward(
            _run_input(problem, hidden, expert, start, end),
            problem.weights(expert),
            loader,
            out_RH,
            save=save.rows(start, end),
            scale_R1=None if on_inner_R1 is None else on_inner_R1[start:end],
            epilogue=_epilogue(problem, loader, expert, start, end),
        )
        _finish(problem, out_RH, None if down_RH is None else down_RH[start:end], expert, start, end)
        total_TH.index_add_(0, rows.token_R[start:end], out_RH)
    return total_TH.to(problem.output_dtype), *_kept_blocks(problem, kept)


def _is_plain(problem: Problem) -> bool:
    """Whether the experts are ``silu(gate) * up`` with nothing in between, which the tiles do by themselves."""
    return (
        problem.choices.activation is ActFnType.SiLU
        and not problem.choices.skip_gate
        and problem.mx is None
        and problem.bias_E2I is None
        and problem.scales.gate_up_E2X is None
        and problem.scales.gate_up_block is None
        and problem.place is not Place.PRE_ACTIVATIONS
        and not any(limit is not None for limit in problem.limits)
    )


def _loader(problem: Problem) -> Loader:
    device = problem.hidden.device
    if _is_plain(problem):
        precision = "fp32" if problem.rounded == torch.float32 else "bf16"
        weight_dtype = problem.weights(0).gate_IH.dtype
        return make_loader(precision, device, rows_per_run(problem.rows.runs), weight_dtype)
    rounded = torch.float32 if problem.weights_are_exact else problem.rounded
    return Loader(Compute(torch.float32, rounded, mx=False, row_chunk=_ROW_CHUNK), call_scratch(device))


def _quantized_hidden(problem: Problem, loader: Loader) -> Tensor:
    """Return the hidden states as the matmuls see them: for MX rounded once per token, for STATIC_MX per run later."""
    if problem.mx is None or problem.static_inputs is not None:
        return problem.hidden
    quantizer = ActivationQuantizer(problem.mx_rule, loader.scratch)
    values_TH = problem.hidden.to(torch.float32, copy=True)
    for chunk in values_TH.split(_ROW_CHUNK):
        quantizer.hidden_(chunk)
    return values_TH


def _run_input(problem: Problem, hidden: Tensor, expert: int, start: int, end: int) -> RowSource:
    """Return one expert's input rows."""
    token_R = problem.rows.token_R[start:end]
    if problem.place is Place.INPUT:
        scaled = hidden[token_R].float().mul_(problem.affinity_R[start:end, None])
        return RowSource(scaled.to(problem.rounded))
    if problem.static_inputs is not None:
        return RowSource(quantize_static_(hidden[token_R].float(), problem.static_inputs[0][expert]))
    return RowSource(hidden, token_R)


def _epilogue(problem: Problem, loader: Loader, expert: int, start: int, end: int) -> Epilogue | None:
    if _is_plain(problem):
        return None
    scales, affinity_R1 = problem.scales, problem.affinity_R[start:end, None]
    skip_gate = problem.choices.skip_gate
    token_R = problem.rows.token_R[start:end]
    return ExpertEpilogue(
        activation=problem.choices.activation,
        limits=problem.limits,
        rounded=torch.float32 if problem.mx is not None else problem.rounded,
        rounded_product=torch.float32 if problem.mx is not None and problem.golden else problem.rounded,
        needs_gate=problem.keep or not skip_gate,
        skip_gate=skip_gate,
        scale_2X=None if scales.gate_up_E2X is None else scales.gate_up_E2X[expert],
        scale_R1=None if scales.gate_up_in_T is None else scales.gate_up_in_T[token_R],
        bias_2I=None if problem.bias_E2I is None else problem.bias_E2I[expert],
        pre_R1=affinity_R1 if problem.place is Place.PRE_ACTIVATIONS else None,
        post_R1=affinity_R1 if problem.place is Place.INTERMEDIATE else None,
        width=problem.inner,
        quantize=_intermediate_quantizer(problem, loader, expert),
        scratch=loader.scratch,
    )


def _intermediate_quantizer(problem: Problem, loader: Loader, expert: int) -> Callable[[Tensor], Tensor] | None:
    """Return what rounds one expert's intermediate for an MX matmul, in place."""
    if problem.static_inputs is not None:
        return functools.partial(quantize_static_, scale=problem.static_inputs[1][expert])
    if problem.mx is not None:
        return ActivationQuantizer(problem.mx_rule, loader.scratch).intermediate_
    return None


def _finish(problem: Problem, out_RH: Tensor, down_RH: Tensor | None, expert: int, start: int, end: int) -> None:
    """Scale the down sums, keep them, add the bias and multiply by the affinity, in place."""
    scales, affinity_R1 = problem.scales, problem.affinity_R[start:end, None]
    if scales.down_EX is not None:
        out_RH.mul_(scales.down_EX[expert])
    if scales.down_in_T is not None:
        out_RH.mul_(scales.down_in_T[problem.rows.token_R[start:end]])
    if down_RH is not None and not problem.golden:
        down_RH.copy_(out_RH)
    if problem.down_bias_EH is not None:
        bias_H = problem.down_bias_EH[expert]
        if problem.place is Place.INTERMEDIATE:
            out_RH.addcmul_(affinity_R1, bias_H)
        else:
            out_RH.add_(bias_H)
    if down_RH is not None and problem.golden:
        down_RH.copy_(out_RH)
    if problem.place is Place.OUTPUT:
        out_RH.mul_(affinity_R1)


def _kept_blocks(problem: Problem, kept: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the kept rows (gate, up and perhaps down) by block: gate/up ``[N, 2, I, B]`` and down ``[N, B, H]``."""
    if not kept:
        return None, None
    idle_E2I, idle_EH = _idle_slots(problem)
    rows, blocks = problem.rows, problem.block_to_expert
    halves = [
        _to_blocks(rows, values_RI, None if idle_E2I is None else idle_E2I[:, half], blocks)
        for half, values_RI in enumerate(kept[:2])
    ]
    gate_up = torch.stack(halves, 1).transpose(2, 3).contiguous()
    return gate_up, _to_blocks(rows, kept[2], idle_EH, blocks) if len(kept) == 3 else None


def _to_blocks(rows: BlockRows, values_RC: Tensor, idle_EC: Tensor | None, block_to_expert: Tensor) -> Tensor:
    """Scatter rows to ``[N, B, C]``; slots without a token hold their expert's row of `idle_EC`, or zero."""
    if idle_EC is None:
        return rows.to_blocks(values_RC)
    idle_NC = idle_EC.to(values_RC.dtype)[block_to_expert]
    out = idle_NC[:, None].expand(-1, rows.block_size, -1).reshape(rows.blocks * rows.block_size, -1)
    out[rows.slot_R] = values_RC
    return out.view(rows.blocks, rows.block_size, -1)


def _idle_slots(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Return each expert's activations of a zero row with affinity zero: ``[E, 2, I]`` and ``[E, H]``; None is zero."""
    limited = any(limit is not None for limit in problem.limits)
    if problem.bias_E2I is None and not limited:
        return None, None
    shape = (problem.experts, 2, problem.inner)
    idle_E2I = problem.affinity_R.new_zeros(shape) if problem.bias_E2I is None else problem.bias_E2I.clone()
    for half in range(2):
        clamp_(idle_E2I[:, half], *problem.limits.half(half))
    idle_E2I = idle_E2I.to(problem.rounded).float()
    if problem.place is Place.INTERMEDIATE:
        return idle_E2I, None
    idle_EH = problem.affinity_R.new_zeros((problem.experts, problem.hidden.shape[1]))
    if problem.place is not Place.PRE_ACTIVATIONS:
        gate_EI, up_EI = idle_E2I[:, 0].clone(), idle_E2I[:, 1]
        kind = problem.choices.activation
        product_EI = act_(up_EI.clone(), kind) if problem.choices.skip_gate else act_(gate_EI, kind).mul_(up_EI)
        product_EI = product_EI.to(problem.rounded).float()
        for expert in problem.block_to_expert.unique().tolist():
            idle_EH[expert] = problem.weights(expert).down_HI.float() @ product_EI[expert]
        if problem.scales.down_EX is not None:
            idle_EH.mul_(problem.scales.down_EX)
        if problem.scales.down_in_T is not None:
            idle_EH.mul_(problem.scales.down_in_T[-1] if problem.sink else 0.0)
    if problem.golden and problem.down_bias_EH is not None:
        idle_EH.add_(problem.down_bias_EH)
    return idle_E2I, idle_EH

"""The blockwise MoE forward, expert by expert over tiles.

Legend: T' rows of the token tensors, R real (token, expert) pairs in expert order, H hidden, I intermediate, E experts,
N blocks of B slots.

Only real rows are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Compute, call_scratch
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, Epilogue, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.tiles import Loader, tile_loader
from hf_neuron_moe.reference.activations import act
from hf_neuron_moe.reference.moe_cte_epilogue import ExpertEpilogue, clamp_
from hf_neuron_moe.reference.moe_cte_kept import KeptBlocks
from hf_neuron_moe.reference.moe_cte_problem import Place, Problem
from hf_neuron_moe.reference.moe_types import ActFnType
from hf_neuron_moe.reference.mx_experts import ActivationQuantizer, quantize_static_

_ROW_CHUNK = 1024

Result = tuple[Tensor, Tensor | None, Tensor | None]
"""Output ``[T', H]``, gate/up ``[N, 2, I, B]`` and down ``[N, B, H]``."""


def run(problem: Problem) -> Result:
    """Compute a checked call."""
    rows, width = problem.rows, problem.hidden.shape[1]
    loader, kept = _loader(problem), _kept_blocks(problem)
    total_TH = torch.zeros(problem.hidden.shape, dtype=torch.float32, device=problem.hidden.device)
    hidden = _quantized_hidden(problem, loader)
    on_inner_R1 = problem.affinity_R[:, None] if problem.place is Place.INTERMEDIATE else None
    for number, (expert, start, end) in enumerate(rows.runs):
        out_RH = loader.scratch.get("expert_out", (end - start, width), torch.float32)
        halves = [
            loader.scratch.get(name, (end - start, problem.inner), problem.kept_dtype)
            for name in ("kept_gate", "kept_up")
            if kept is not None
        ]
        ffn_forward(
            _run_input(problem, hidden, expert, start, end),
            problem.weights(expert),
            loader,
            out_RH,
            save=Checkpoints(*halves),
            scale_R1=None if on_inner_R1 is None else on_inner_R1[start:end],
            epilogue=_epilogue(problem, loader, expert, start, end),
        )
        if kept is not None:
            kept.put_gate_up(number, *halves)
        _finish(problem, out_RH, kept, number)
        total_TH.index_add_(0, rows.token_R[start:end], out_RH)
    return total_TH.to(problem.output_dtype), *((None, None) if kept is None else kept.finish())


def _is_plain(problem: Problem) -> bool:
    """Whether the experts are ``silu(gate) * up`` with nothing in between, which the tiles do by themselves."""
    return (
        problem.given.activation_function is ActFnType.SiLU
        and not problem.given.skip_gate_proj
        and problem.mx is None
        and problem.bias_E2I is None
        and problem.scales.gate_up_E2X is None
        and problem.scales.gate_up_block is None
        and problem.place is not Place.PRE_ACTIVATIONS
        and not any(limit is not None for limit in problem.given.limits)
    )


def _loader(problem: Problem) -> Loader:
    device = problem.hidden.device
    if _is_plain(problem):
        return tile_loader("fp32" if problem.rounded == torch.float32 else "bf16", device)
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
    skip_gate = problem.given.skip_gate_proj
    token_R = problem.rows.token_R[start:end]
    return ExpertEpilogue(
        activation=problem.given.activation_function,
        limits=problem.given.limits,
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


def _finish(problem: Problem, out_RH: Tensor, kept: KeptBlocks | None, number: int) -> None:
    """Scale one run's down sums, keep them, add the bias and multiply by the affinity, in place."""
    expert, start, end = problem.rows.runs[number]
    scales, affinity_R1 = problem.scales, problem.affinity_R[start:end, None]
    if scales.down_EX is not None:
        out_RH.mul_(scales.down_EX[expert])
    if scales.down_in_T is not None:
        out_RH.mul_(scales.down_in_T[problem.rows.token_R[start:end]])
    if kept is not None and not problem.golden:
        kept.put_down(number, out_RH)
    if problem.down_bias_EH is not None:
        bias_H = problem.down_bias_EH[expert]
        if problem.place is Place.INTERMEDIATE:
            out_RH.addcmul_(affinity_R1, bias_H)
        else:
            out_RH.add_(bias_H)
    if kept is not None and problem.golden:
        kept.put_down(number, out_RH)
    if problem.place is Place.OUTPUT:
        out_RH.mul_(affinity_R1)


def _kept_blocks(problem: Problem) -> KeptBlocks | None:
    """Return buffers for the activations, where they are kept; there is no down activation with the affinity on I."""
    if not problem.keep:
        return None
    rows, dtype, device = problem.rows, problem.kept_dtype, problem.hidden.device
    gate_up = torch.empty((rows.blocks, 2, problem.inner, rows.block_size), dtype=dtype, device=device)
    down = None
    if problem.place is not Place.INTERMEDIATE:
        down = torch.empty((rows.blocks, rows.block_size, problem.hidden.shape[1]), dtype=dtype, device=device)
    return KeptBlocks(rows, problem.block_to_expert, gate_up, down, *_idle_slots(problem))


def _idle_slots(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return each expert's activations of a zero row with affinity zero: ``[E, 2, I]`` and ``[E, H]``."""
    shape = (problem.experts, 2, problem.inner)
    idle_E2I = problem.affinity_R.new_zeros(shape) if problem.bias_E2I is None else problem.bias_E2I.clone()
    for half in range(2):
        clamp_(idle_E2I[:, half], *problem.given.limits.half(half))
    idle_E2I = idle_E2I.to(problem.rounded).float()
    idle_EH = problem.affinity_R.new_zeros((problem.experts, problem.hidden.shape[1]))
    limited = any(limit is not None for limit in problem.given.limits)
    nonzero = problem.bias_E2I is not None or limited
    if nonzero and problem.place not in (Place.INTERMEDIATE, Place.PRE_ACTIVATIONS):
        _project_idle_(problem, idle_E2I, idle_EH)
    if problem.golden and problem.down_bias_EH is not None:
        idle_EH.add_(problem.down_bias_EH)
    return idle_E2I, idle_EH


def _project_idle_(problem: Problem, idle_E2I: Tensor, idle_EH: Tensor) -> None:
    """Write the down projection of the zero row's intermediate into `idle_EH`."""
    kind, up_EI = problem.given.activation_function, idle_E2I[:, 1]
    product_EI = act(up_EI, kind) if problem.given.skip_gate_proj else act(idle_E2I[:, 0], kind) * up_EI
    product_EI = product_EI.to(problem.rounded).float()
    for expert in problem.block_to_expert.unique().tolist():
        idle_EH[expert] = problem.weights(expert).down_HI.float() @ product_EI[expert]
    if problem.scales.down_EX is not None:
        idle_EH.mul_(problem.scales.down_EX)
    if problem.scales.down_in_T is not None:
        # A slot without a token reads the sink row's scale, or nothing where there is none.
        idle_EH.mul_(problem.scales.down_in_T[-1] if problem.sink else 0.0)

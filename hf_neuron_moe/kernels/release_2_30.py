"""The documented functions as the pages of nki-library 2.30 spell them: names, order and defaults of the arguments.

    >>> from hf_neuron_moe.kernels.release_2_30 import compute_phase1_down_proj_mm_grad_mxfp8, moe_cte

``hf_neuron_moe.kernels`` follows the releases 2.31 to 2.33. Calls written from a page of 2.30, by position or by
keyword, are for this module. Its signatures are data (``reference/specification/release_2_30.json``), and it computes
with the functions of :mod:`hf_neuron_moe.reference`, which check shapes and dtypes. Rules of 2.30 that change values:
phase 2 is one product per half along K = I, and a raw contraction axis of exactly 384 is one tile.
:class:`ShardOption` has this release's members; the other records and enums are those of ``hf_neuron_moe.kernels``.
`limits`, by keyword only, is this package's.

Legend: S tokens, H hidden, I intermediate (which this release calls hidden).
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_neuron_moe import kernels
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.launch_record import note_launch, scheduling
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import counted_config, counted_configs
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import check_buffer, check_descriptor
from hf_neuron_moe.reference.moe_types import ShardOption229 as ShardOption, bound
from hf_neuron_moe.reference.specification import signatures

ReturnT = TypeVar("ReturnT")
Call = dict[str, Any]
_DOCUMENTED = signatures("2_30")
__all__ = ["ShardOption", *sorted(_DOCUMENTED)]
_OWN = (
    *("convention", "device_limits", "limits", "mx_scale_rule", "execute", "accumulation", "upstream_bugs"),
    *("down_proj_bias", "upstream_affinity_grad"),
)
"""Arguments of this package, by keyword, that the functions here have where their later forms have them."""
_NAMES = {"nl.bfloat16": torch.bfloat16, "float8_e4m3fn_x4": torch.float8_e4m3fn}


def _default(text: str) -> Any:
    """Return what a default of the documents stands for: a literal, a dtype, a member of an enum, or ``SkipMode()``."""
    if text in _NAMES:
        return _NAMES[text]
    owner, dot, member = text.partition(".")
    if dot:
        return (ShardOption if owner == "ShardOption" else getattr(kernels, owner))[member]
    return kernels.SkipMode(False, False) if text.startswith("SkipMode") else ast.literal_eval(text)


def _documented(compute: Callable[[Call], ReturnT], of: str = "") -> Callable[..., ReturnT]:
    """Give a function of one mapping, its arguments by name, the documented signature of its name.

    Behind it come the arguments of this package that the function `of` of ``kernels`` has, by default that of its name.
    """
    name, parameters = compute.__name__, []
    for argument, *text in _DOCUMENTED[name]["arguments"]:
        default = _default(text[0]) if text else Parameter.empty
        parameters.append(Parameter(argument, Parameter.POSITIONAL_OR_KEYWORD, default=default))
    names = {parameter.name for parameter in parameters}
    later = inspect.signature(getattr(kernels, of or name)).parameters
    parameters += [later[own].replace(kind=Parameter.KEYWORD_ONLY) for own in _OWN if own in later.keys() - names]
    signature = inspect.Signature(parameters)

    @public
    @functools.wraps(compute)
    def call(*args: Any, **kwargs: Any) -> ReturnT:
        return compute(bound(name, signature, args, kwargs))

    call.__dict__["__signature__"] = signature
    return call


@_documented
def moe_cte(call: Call) -> Tensor | kernels.MoEForward:
    """Forward of the experts: the output ``[T', H]``, or a tuple with the activations where these are saved."""
    result = kernels.moe_cte(**call)
    return result.output if result.gate_up_activations_T is None else result


def _same(name: str, of: str = "") -> Callable[..., Any]:
    """Return the documented function `name`, which passes its arguments on to a function of ``kernels``."""

    def compute(call: Call) -> Any:
        return getattr(kernels, of or name)(**call)

    compute.__name__ = compute.__qualname__ = name
    compute.__doc__ = f":func:`hf_neuron_moe.kernels.{of or name}` with the arguments of release 2.30."
    return _documented(compute, of)


blockwise_mm_bwd = _same("blockwise_mm_bwd")
compute_fused_gate_up_down_mxfp8 = _same("compute_fused_gate_up_down_mxfp8")
fp8_mul_backward = _same("fp8_mul_backward")
get_config_for_shape = _same("get_config_for_shape", "get_backward_config_for_shape")
get_program_sharding_info = _same("get_program_sharding_info")
mlp_backward_mxfp8_nki = _same("mlp_backward_mxfp8_nki", "mlp_backward_mxfp8_nki_2_30")
mlp_forward_mxfp8_nki = _same("mlp_forward_mxfp8_nki")


@_documented
def compute_phase1_down_proj_mm_grad_mxfp8(call: Call) -> None:
    """Fill the rows from s_base on of d_gate and d_up ``[S, I]``, and of their transposes ``[2I, S]`` in scratch."""
    options = _step(call, "output_grad_td", "down_weight_td")
    for name in ("output_grad_td", "down_weight_td", *_HALVES):
        check_descriptor(call[name], name)
    shape = tuple(call[name].logical_shape[1] for name in ("output_grad_td", "down_weight_td"))
    halves = [check_buffer(call.pop(name).data, shape, "[S, I]", name) for name in _HALVES]
    both_S2I = torch.cat(halves, dim=1)  # rows of the other core stay as they are
    both = kernels.TensorDescriptor(both_S2I)
    kernels.compute_phase1_down_proj_mm_grad_mxfp8(d_gate_up_td=both, lone_384=True, **call, **options)
    for half, values in zip(halves, both_S2I.chunk(2, dim=1)):
        half.copy_(values)


@_documented
def compute_phase2_hidden_states_grad_mxfp8(call: Call) -> None:
    """Fill the rows from s_base on of dX ``[S, H]``: two products along K = I into one accumulator, gate first."""
    options = _step(call, "d_gate_td", "gate_weight_td")
    kernels.compute_phase2_hidden_states_grad_mxfp8_2_30(**call, **options)


@_documented
def compute_phase3_gate_up_weight_grad_mxfp8(call: Call) -> None:
    """Fill ``[dWg; dWu]`` ``[2I, H]``, for both cores together."""
    options = _step(call, "grad_T_td", "hidden_states_T_td")
    kernels.compute_phase3_gate_up_weight_grad_mxfp8(lone_384=True, **call, **options)


@_documented
def compute_phase4_down_weight_grad_mxfp8(call: Call) -> None:
    """Fill the rows from h_base on of dWd ``[H, I]``."""
    options = _step(call, "output_grad_T_td", "hidden_T_td")
    kernels.compute_phase4_down_weight_grad_mxfp8(
        intermediate_T_td=call.pop("hidden_T_td"), lone_384=True, **call, **options
    )


@_documented
def mlp_backward_mxfp8_base_nki(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Run phases 1 to 4 for both cores together; return dX ``[S, H]``, ``[dWg; dWu]`` ``[2I, H]`` and dWd ``[H, I]``.

    hidden_states_td and hidden_td are not read: the phases take their transposes.
    """
    options: Call = scheduling(call)
    own = {name: call[name] for name in ("mx_scale_rule", "execute")}
    step = {name: options[name] for name in _STEP} | {"run_with_lnc2": False} | own
    bf16 = torch.bfloat16
    for name in ("output_grad_td", "down_weight_T_td"):
        check_descriptor(call[name], name)
    (H, S), inner = call["output_grad_td"].logical_shape, call["down_weight_T_td"].logical_shape[1]
    if min(S, H, inner) > 1:  # otherwise phase 1 refuses the operands
        counted_configs(options, (S, H, inner), call["run_with_lnc2"])
    compute_phase1_down_proj_mm_grad_mxfp8(
        *(call[f"{name}_td"] for name in ("output_grad", "gate_pre", "gate_act", "up", "d_gate", "d_up", "scratch")),
        call["down_weight_T_td"],
        0,
        bf16,
        **step,
    )
    dx, weights = call["hidden_states_grad_td"], (call["gate_weight_T_td"], call["up_weight_T_td"])
    compute_phase2_hidden_states_grad_mxfp8(dx, *weights, call["d_gate_td"], call["d_up_td"], 0, bf16, **step)
    d_weight, d_down = call["weight_grad_td"], call["down_weight_grad_td"]
    hidden_states_T, grad_T = call["hidden_states_T_td"], call["scratch_td"]
    compute_phase3_gate_up_weight_grad_mxfp8(d_weight, hidden_states_T, grad_T, bf16, **step)
    compute_phase4_down_weight_grad_mxfp8(d_down, call["output_grad_T_td"], call["hidden_T_td"], 0, bf16, **step)
    note_launch("mlp_backward_mxfp8_base_nki", options)
    return dx.data, d_weight.data, d_down.data


def __getattr__(name: str) -> Any:
    """Return what this release shares with ``hf_neuron_moe.kernels``: records, enums and the other functions."""
    if name in kernels.__all__:
        return getattr(kernels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_HALVES = ("d_gate_td", "d_up_td")
_STEP = ("fp8_x4_dtype", "spill_reload", "use_scale_packing", "run_with_lnc2")


def _step(call: Call, left: str, right: str) -> Call:
    """Check the options of a step and take them out of `call`; return those that its function has.

    `left` and `right` are the operands of the step's product. The tile counts become a configuration of one core.
    """
    options: Call = scheduling(call)
    for name in options:
        del call[name]
    for name in (left, right):
        check_descriptor(call[name], name)
    (K, M), N = call[left].logical_shape, call[right].logical_shape[1]
    lnc2, counts = options["run_with_lnc2"], tuple(f"TILES_IN_BLOCK_{axis}" for axis in "MNK")
    made: Call = {name: options[name] for name in _STEP if name in options}
    if min(K, M, N) > 1:  # otherwise the step refuses the operands
        m, n, k = (options[name] for name in counts)
        size = (M // 2 if lnc2 else M, K, N)
        made["config"] = counted_config(size, (m, n, k), arguments=counts, lnc2=lnc2)
    return made

"""``mlp_forward_mxfp8_nki`` and ``mlp_backward_mxfp8_nki``. Letters: S tokens, H hidden, I intermediate.

Sources: nki-library 2.30 ``mlp_fwd_mxfp8`` and ``mlp_bwd_mxfp8``; 2.31 ``mlp_bwd_mxfp8``.
"""

from __future__ import annotations

from typing import Any

from hf_neuron_moe import kernels
from tests.neuron.double.checks import (
    BF16,
    FP32,
    check_flag,
    check_multiple,
    check_operand,
    check_read,
    check_target,
    give,
)
from tests.neuron.double.contract import Double, need
from tests.neuron.double.memory import KernelTensor, Launch
from tests.neuron.double.mlp_operands import (
    check_buffer,
    check_distinct,
    check_lnc,
    check_pair,
    check_tiles,
    read_operand,
)
from tests.neuron.double.records import to_package
from tests.neuron.double.signatures import PAIRS_2_30

Arguments = dict[str, Any]


def forward(double: Double, launch: Launch, call: Arguments) -> KernelTensor:
    """Rules and result of ``mlp_forward_mxfp8_nki``."""
    where = "mlp_forward_mxfp8_nki"
    check_target(double, "trn3", where)
    check_lnc(call["run_with_lnc2"], launch, where)
    check_tiles(call, where)
    for name in ("spill_reload", "use_scale_packing"):
        check_flag(call[name], where, name)
    need(call["dtype"] in (BF16, FP32), where, f"dtype is bfloat16 or float32, got {call['dtype']!r}")
    packed = call["use_scale_packing"]
    names = {"hidden": "hidden", "gate_up_weights": "gate_up", "down_weights": "down"}
    hidden, gate_up, down = (
        read_operand(call[name], call[f"{p}_scales"], call[f"{p}_is_swizzled"], packed, launch, where, name)
        for name, p in names.items()
    )
    need(gate_up.F % 2 == 0, where, f"gate_up_weights dim0 is 2*I, got {gate_up.F}")
    tokens, size, inner = hidden.F, hidden.K, gate_up.F // 2
    need(tokens % 2 == 0 or launch.cores == 1, where, f"S is even for LNC2, got {tokens}")
    check_multiple(tokens, 8, where, "S")
    check_multiple(inner, 128, where, "I (the intermediate is loaded raw)")
    check_pair(hidden, gate_up, where)
    need(inner == down.K, where, f"down_weights contract over I={inner}, got {down.K}")
    need(size == down.F, where, f"down_weights give H={size}, got {down.F}")
    need(inner != 384 or down.raw, where, "the raw intermediate and prepared down_weights group an I of 384 apart")
    buffers = {"intermediate_hbm": call["intermediate_hbm"]}
    check_buffer(call["intermediate_hbm"], (tokens, inner), (BF16,), where, "intermediate_hbm")
    for name in ("save_gate_pre", "save_gate_act", "save_up", "save_hidden"):
        if call[name] is not None:
            kinds = (BF16,) if name == "save_hidden" else (BF16, FP32)
            check_buffer(call[name], (tokens, inner), kinds, where, name)
            buffers[name] = call[name]
    check_distinct(buffers, where)
    out = None
    if not launch.fake:
        values = {name: to_package(value) for name, value in call.items() if name != "fp8_x4_dtype"}
        out = kernels.mlp_forward_mxfp8_nki(**values)
    return give(launch, out, (tokens, size), call["dtype"])


def backward_2_31(double: Double, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """Rules and result of ``mlp_backward_mxfp8_nki`` since 2.31."""
    where = "mlp_backward_mxfp8_nki"
    check_target(double, "trn3", where)
    check_lnc(call["run_with_lnc2"], launch, where)
    for name in ("spill_reload", "use_scale_packing"):
        check_flag(call[name], where, name)
    tokens, size = check_operand(call["output_grad"], (None, None), (BF16,), where, "output_grad")
    check_operand(call["hidden_states"], (tokens, size), (BF16,), where, "hidden_states")
    for name in ("output_grad", "hidden_states"):
        check_read(call[name], launch, where, name)
    need(call["gate_up_weights"] is not None, where, "gate_up_weights are always required")
    packed = call["use_scale_packing"]
    found = {}
    for name in ("gate_up_weights", "gate_up_weight_T", "down_weight_T", "output_grad_T", "hidden_states_T"):
        value, scales = call[name], call[f"{name}_scales"]
        need(scales is None or value is not None, where, f"{name}_scales come with {name}")
        if name != "gate_up_weights":
            need(value is None or scales is not None, where, f"{name} without scales is ignored")
        if value is not None:
            found[name] = read_operand(value, scales, False, packed, launch, where, name)
    gate_up = found["gate_up_weights"]
    inner = gate_up.F // 2
    quantized = call["gate_up_weights_scales"] is not None
    need(size == gate_up.K and gate_up.F % 2 == 0, where, f"gate_up_weights are [2I, H={size}]")
    need(not quantized or "gate_up_weight_T" in found, where, "quantized gate_up_weights need gate_up_weight_T")
    for name, K, F in (
        ("gate_up_weight_T", 2 * inner, size), ("down_weight_T", size, inner), ("output_grad_T", tokens, size),
        ("hidden_states_T", tokens, size),
    ):  # fmt: skip
        if name in found:
            same = (found[name].K, found[name].F) == (K, F)
            need(same, where, f"{name} has K={K}, F={F}, got K={found[name].K}, F={found[name].F}")
    if "down_weight_T" not in found:
        check_operand(call["down_proj_weight"], (size, inner), (BF16,), where, "down_proj_weight")
        check_read(call["down_proj_weight"], launch, where, "down_proj_weight")
    for letter, amount in (("S", tokens), ("I", inner), ("H", size)):
        check_multiple(amount, 128, where, letter)
    _check_kept(call, ("gate_pre", "gate_act", "up", "intermediate"), (tokens, inner), launch, where)
    grads: Any = (None, None, None)
    if not launch.fake:
        values = {name: to_package(value) for name, value in call.items() if name != "fp8_x4_dtype"}
        grads = kernels.mlp_backward_mxfp8_nki(**values)
    shapes = ((tokens, size), (2 * inner, size), (size, inner))
    return tuple(give(launch, grad, shape, BF16) for grad, shape in zip(grads, shapes))


def _check_kept(call: Arguments, names: tuple[str, ...], shape: tuple[int, int], launch: Launch, where: str) -> None:
    for name in names:
        if call[name] is not None:
            check_operand(call[name], shape, (BF16,), where, name)
            check_read(call[name], launch, where, name)


def backward_2_30(double: Double, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """Rules and result of ``mlp_backward_mxfp8_nki`` in 2.30."""
    where = "mlp_backward_mxfp8_nki"
    check_target(double, "trn3", where)
    check_lnc(call["run_with_lnc2"], launch, where)
    check_tiles(call, where)
    packed = call["use_scale_packing"]
    found = {
        name: read_operand(call[name], call[f"{p}_scales"], call[f"{p}_is_swizzled"], packed, launch, where, name)
        for name, p in PAIRS_2_30.items()
    }
    tokens, size = found["output_hidden_states_grad"].F, found["output_hidden_states_grad"].K
    inner = found["down_proj_weight_T"].F
    wanted = {
        "output_hidden_states_grad": (size, tokens), "hidden_states": (size, tokens),
        "gate_proj_weight_T": (inner, size), "up_proj_weight_T": (inner, size), "down_proj_weight_T": (size, inner),
        "gate_up_weights": (size, 2 * inner), "hidden_states_T": (tokens, size), "output_grad_T": (tokens, size),
        "hidden_T": (tokens, inner),
    }  # fmt: skip
    for name, (K, F) in wanted.items():
        same = (found[name].K, found[name].F) == (K, F)
        need(same, where, f"{name} has K={K}, F={F}, got K={found[name].K}, F={found[name].F}")
    for letter, amount in (("S", tokens), ("I", inner)):
        check_multiple(amount, 128, where, letter)
    need(launch.cores == 1 or size % 2 == 0, where, "H is even for LNC2")
    pairs = (("output_hidden_states_grad", "down_proj_weight_T"), ("hidden_states", "gate_up_weights"),
             ("output_grad_T", "hidden_T"))  # fmt: skip
    for left, right in pairs:
        check_pair(found[left], found[right], where)
    for name, K in (("gate_proj_weight_T", inner), ("up_proj_weight_T", inner), ("hidden_states_T", tokens)):
        need(K != 384 or found[name].raw, where, f"{name} is raw where its K is 384: its partner always is")
    buffers = {name: value for name, value in call.items() if name.endswith("_scratch")}
    for name, value in buffers.items():
        turned = name == "silu_up_mul_gate_grad_T_scratch"
        check_buffer(value, (2 * inner, tokens) if turned else (tokens, inner), (BF16,), where, name)
    check_distinct(buffers, where)
    _check_kept(call, ("gate_pre", "gate_act", "up", "hidden"), (tokens, inner), launch, where)
    grads: Any = (None, None, None)
    if not launch.fake:
        values = {name: to_package(value) for name, value in call.items() if name != "fp8_x4_dtype"}
        grads = kernels.mlp_backward_mxfp8_nki_2_30(**values)
    shapes = ((tokens, size), (2 * inner, size), (size, inner))
    return tuple(give(launch, grad, shape, BF16) for grad, shape in zip(grads, shapes))

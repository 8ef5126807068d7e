"""Every input mode of the MXFP8 MLP kernels computes the raw mode's bits, whatever the other operands' modes are."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hf_neuron_moe.formats import pack_x4, quantize_mx, swizzle, to_oversized, to_packed
from hf_neuron_moe.kernels import (
    mlp_backward_mxfp8,
    mlp_backward_mxfp8_nki,
    mlp_backward_mxfp8_nki_2_30,
    mlp_forward_mxfp8,
    mlp_forward_mxfp8_nki,
)

sys.path.insert(0, str(Path(__file__).parent))
import mx_oracle

MODES = ("raw", "swizzled", "x4", "uint32", "fp8")


def rows_of(*shape: int, scale: float = 1.0) -> Tensor:
    """bf16 rows whose magnitudes differ widely within a block, so that other groups would give other values."""
    return (torch.randn(shape) * torch.exp2(torch.randint(-9, 1, shape)) * scale).bfloat16()


def prepare(raw_FK: Tensor, mode: str, packed: bool) -> tuple[Tensor, Tensor | None, bool]:
    """Bring a raw operand into a mode: data, scales, is_swizzled."""
    if mode == "raw":
        return raw_FK, None, False
    if mode == "swizzled":
        return swizzle(raw_FK), None, True
    quantized = quantize_mx(raw_FK)
    scales = (to_packed if packed else to_oversized)(quantized.scales)
    if mode == "fp8":
        return quantized.codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), False
    words = pack_x4(quantized.codes)
    return words if mode == "x4" else words.view(torch.uint32), scales, False


def assert_same(left: Any, right: Any) -> None:
    assert len(left) == len(right) > 0
    for name, value in left._asdict().items():
        other = getattr(right, name)
        assert (value is None) == (other is None)
        assert value is None or torch.equal(value, other), name


def forward_arguments(raw: dict[str, Tensor], modes: tuple[str, ...], packed: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {"use_scale_packing": packed}
    for (name, tensor), mode in zip(raw.items(), modes, strict=True):
        arguments |= forward_argument(name, tensor, mode, packed)
    return arguments


def forward_argument(name: str, raw_FK: Tensor, mode: str, packed: bool) -> dict[str, Any]:
    prefix = name.removesuffix("_weights")
    data, scales, swizzled = prepare(raw_FK, mode, packed)
    return {name: data, f"{prefix}_scales": scales, f"{prefix}_is_swizzled": swizzled}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "packed"),
    [
        (40, 640, 256, True),
        (40, 256, 896, True),
        (8, 2176, 128, True),
        (40, 640, 256, False),
        pytest.param(40, 256, 896, False, marks=pytest.mark.slow),
        pytest.param(8, 2176, 128, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_forward_in_all_modes(tokens: int, hidden: int, inner: int, packed: bool) -> None:
    raw = {
        "hidden": rows_of(tokens, hidden),
        "gate_up_weights": rows_of(2 * inner, hidden, scale=hidden**-0.5),
        "down_weights": rows_of(hidden, inner, scale=inner**-0.5),
    }
    saves = {"save_gate_pre": True, "save_gate_act": True, "save_up": True, "save_hidden": True}
    wanted = mlp_forward_mxfp8(**raw, **saves)
    prepared = ([forward_argument(name, tensor, mode, packed) for mode in MODES] for name, tensor in raw.items())
    for hidden_states, gate_up, down in itertools.product(*prepared):
        arguments = hidden_states | gate_up | down
        assert_same(wanted, mlp_forward_mxfp8(**arguments, use_scale_packing=packed, **saves))


def test_documented_entry_point_fills_the_buffers_of_the_functional_one() -> None:
    raw = {"hidden": rows_of(16, 256), "gate_up_weights": rows_of(512, 256), "down_weights": rows_of(256, 256)}
    saves = {"save_gate_pre": True, "save_gate_act": True, "save_up": True, "save_hidden": True}
    wanted = mlp_forward_mxfp8(**raw, **saves)
    buffers = {name: torch.full((16, 256), 9.0, dtype=torch.bfloat16) for name in saves}
    scratch = torch.full((16, 256), 9.0, dtype=torch.bfloat16)
    output = mlp_forward_mxfp8_nki(**raw, intermediate_hbm=scratch, **buffers)
    assert torch.equal(output, wanted.output)
    assert (scratch == 9).all(), "save_hidden takes the place of intermediate_hbm"
    for name, buffer in buffers.items():
        assert torch.equal(buffer, getattr(wanted, name.removeprefix("save_")))
    assert torch.equal(mlp_forward_mxfp8_nki(*raw.values(), scratch, False, 1, 2, 3, 4, 5, 6), wanted.output)
    assert torch.equal(scratch, wanted.hidden)
    fp32 = torch.empty(16, 256)
    mlp_forward_mxfp8_nki(
        **forward_arguments(raw, ("x4", "raw", "swizzled"), True), intermediate_hbm=scratch, save_up=fp32
    )
    assert torch.equal(fp32.bfloat16(), wanted.up) and not torch.equal(fp32, wanted.up.float())


def test_parameters_that_require_gradients_are_read_as_values() -> None:
    raw = {"hidden": rows_of(128, 128), "gate_up_weights": rows_of(256, 128), "down_weights": rows_of(128, 128)}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in raw.items()}
    forward = mlp_forward_mxfp8(**leaves)
    assert torch.equal(forward.output, mlp_forward_mxfp8(**raw).output) and not forward.output.requires_grad
    for release in ("2.31", "2.30"):
        grads = mlp_backward_mxfp8(raw["hidden"], *leaves.values(), release=release)
        assert_same(grads, mlp_backward_mxfp8(raw["hidden"], *raw.values(), release=release))
        assert not any(grad.requires_grad for grad in grads)


def test_fp32_results_are_the_bf16_ones_before_their_rounding() -> None:
    raw = {"hidden": rows_of(16, 128), "gate_up_weights": rows_of(256, 128), "down_weights": rows_of(128, 128)}
    saves = {"save_gate_pre": True, "save_gate_act": True, "save_up": True, "save_hidden": True}
    wide = mlp_forward_mxfp8(**raw, **saves, dtype=torch.float32)
    for value, rounded in zip(wide, mlp_forward_mxfp8(**raw, **saves), strict=True):
        assert value is not None and rounded is not None and value.dtype == torch.float32
        assert torch.equal(value.bfloat16(), rounded)
        assert not torch.equal(value, rounded.float())


@pytest.mark.parametrize("hidden", [96, 160, 384, 608])
def test_prepared_operands_may_have_sizes_that_raw_ones_may_not(hidden: int) -> None:
    """H only has to be a multiple of 32 then; at 384 both are grouped 256 + 128, unlike two raw operands."""
    x, gate_up, down = rows_of(16, hidden), rows_of(256, hidden), rows_of(hidden, 128)
    arguments = forward_arguments(
        {"hidden": x, "gate_up_weights": gate_up, "down_weights": down}, ("x4", "swizzled", "raw"), True
    )
    gate_up_values = mx_oracle.q(x.double(), 1) @ mx_oracle.q(gate_up.double(), 1).T
    gate, up = gate_up_values.chunk(2, dim=1)
    inter = mx_oracle.bf16(torch.nn.functional.silu(gate) * up)
    wanted = mx_oracle.q(inter, 1) @ mx_oracle.q(down.double(), 1).T
    output = mlp_forward_mxfp8(**arguments).output.double()
    # One bf16 rounding (2^-8) of the largest value, and a few flipped roundings of the intermediate.
    assert (output - wanted).abs().max() <= 4e-3 * wanted.abs().max()
    assert (output - wanted).norm() <= 3e-3 * wanted.norm()


def test_fp16_operands_are_quantized_from_their_own_values() -> None:
    x = (torch.randn(16, 128) * 3).half()
    gate_up, down = rows_of(256, 128), rows_of(128, 128)
    gate = mlp_forward_mxfp8(x, gate_up, down, save_gate_pre=True, dtype=torch.float32).gate_pre
    wanted = mx_oracle.q(x.double(), 1) @ mx_oracle.q(gate_up[:128].double(), 1).T
    assert gate is not None
    # fp32 accumulators against float64 ones.
    assert (gate.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def problem(tokens: int, hidden: int, inner: int) -> dict[str, Tensor]:
    return {
        "output_grad": rows_of(tokens, hidden),
        "hidden_states": rows_of(tokens, hidden),
        "gate_up_weights": rows_of(2 * inner, hidden, scale=hidden**-0.5),
        "down_proj_weight": rows_of(hidden, inner, scale=inner**-0.5),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "packed", "mode"),
    [
        # Every pair of shape, packing and mode; the other triples are slow.
        (384, 128, 384, True, "x4"),
        (128, 256, 640, False, "x4"),
        (128, 256, 640, True, "fp8"),
        (384, 128, 384, False, "fp8"),
        pytest.param(128, 256, 640, True, "x4", marks=pytest.mark.slow),
        pytest.param(384, 128, 384, False, "x4", marks=pytest.mark.slow),
        pytest.param(384, 128, 384, True, "fp8", marks=pytest.mark.slow),
        pytest.param(128, 256, 640, False, "fp8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_backward_with_any_of_the_five_quantized_operands(
    tokens: int, hidden: int, inner: int, packed: bool, mode: str
) -> None:
    raw = problem(tokens, hidden, inner)
    wanted = mlp_backward_mxfp8(**raw)
    sources = {
        "gate_up_weight_T": raw["gate_up_weights"].t(), "down_weight_T": raw["down_proj_weight"].t(),
        "output_grad_T": raw["output_grad"].t(), "hidden_states_T": raw["hidden_states"].t(),
        "gate_up_weights": raw["gate_up_weights"],
    }  # fmt: skip
    prepared = {name: prepare(tensor, mode, packed)[:2] for name, tensor in sources.items()}
    for chosen in itertools.product([False, True], repeat=5):
        names = list(itertools.compress(sources, chosen))
        if "gate_up_weights" in names and "gate_up_weight_T" not in names:
            continue
        arguments: dict[str, Any] = dict(raw)
        for name in names:
            arguments[name], arguments[f"{name}_scales"] = prepared[name]
        if "down_weight_T" in names:
            del arguments["down_proj_weight"]
        assert_same(wanted, mlp_backward_mxfp8(**arguments, use_scale_packing=packed))
        assert_same(wanted, mlp_backward_mxfp8_nki(**arguments, use_scale_packing=packed))


OLD_OPERANDS = {
    "output_hidden_states_grad": "output_grad",
    "down_proj_weight_T": "down_weight",
    "gate_proj_weight_T": "gate_weight",
    "up_proj_weight_T": "up_weight",
    "hidden_states_T": "hidden_states_T",
    "hidden_states": "hidden_states",
    "gate_up_weights": "gate_up_weights",
    "output_grad_T": "output_grad_T",
    "hidden_T": "hidden_T",
}


def old_arguments(raw: dict[str, Tensor], intermediate: Tensor) -> dict[str, Any]:
    """Arguments of release 2.30 from parameters: transposes made contiguous, scratch of the documented shapes."""
    tokens, inner = raw["output_grad"].shape[0], raw["down_proj_weight"].shape[1]
    names = ("d_gate", "d_up", "gate_pre", "gate_act", "up", "hidden")
    scratch = {f"{name}_scratch": torch.full((tokens, inner), 7.0, dtype=torch.bfloat16) for name in names}
    return {
        "output_hidden_states_grad": raw["output_grad"],
        "hidden_states": raw["hidden_states"],
        "gate_proj_weight_T": raw["gate_up_weights"][:inner].t().contiguous(),
        "up_proj_weight_T": raw["gate_up_weights"][inner:].t().contiguous(),
        "down_proj_weight_T": raw["down_proj_weight"].t().contiguous(),
        "gate_up_weights": raw["gate_up_weights"],
        "hidden_states_T": raw["hidden_states"].t().contiguous(),
        "output_grad_T": raw["output_grad"].t().contiguous(),
        "hidden_T": intermediate.t().contiguous(),
        "silu_up_mul_gate_grad_T_scratch": torch.full((2 * inner, tokens), 7.0, dtype=torch.bfloat16),
        **scratch,
    }


@settings(max_examples=25)
@given(
    modes=st.tuples(*[st.sampled_from(MODES)] * 9),
    packed=st.booleans(),
    shape=st.sampled_from([(128, 256, 640), (256, 640, 128)]),
)
@pytest.mark.slow
def test_release_2_30_in_any_mixture_of_modes(modes: tuple[str, ...], packed: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(sum(shape))
    raw = problem(*shape)
    inter = mlp_forward_mxfp8(
        raw["hidden_states"], raw["gate_up_weights"], raw["down_proj_weight"], save_hidden=True
    ).hidden
    assert inter is not None
    arguments = old_arguments(raw, inter)
    wanted = mlp_backward_mxfp8(**raw, intermediate=inter, release="2.30")
    assert_same(wanted, mlp_backward_mxfp8_nki_2_30(**arguments))
    for (name, prefix), mode in zip(OLD_OPERANDS.items(), modes, strict=True):
        data, scales, swizzled = prepare(arguments[name], mode, packed)
        arguments |= {name: data, f"{prefix}_scales": scales, f"{prefix}_is_swizzled": swizzled}
    assert_same(wanted, mlp_backward_mxfp8_nki_2_30(**arguments, use_scale_packing=packed))


def test_release_2_30_groups_a_lone_384_as_one_tile() -> None:
    torch.manual_seed(1)
    raw = problem(384, 384, 384)
    inter = rows_of(384, 384)
    old = mlp_backward_mxfp8_nki_2_30(**old_arguments(raw, inter))
    assert_same(old, mlp_backward_mxfp8(**raw, intermediate=inter, release="2.30"))
    new = mlp_backward_mxfp8(**raw, intermediate=inter)
    assert not torch.equal(old.gate_up_weight_grad, new.gate_up_weight_grad)

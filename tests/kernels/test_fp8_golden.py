"""COAT's operators against recorded outputs, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_neuron_moe.kernels import (
    fp8_mul_backward,
    fp8_mul_forward,
    fp8_silu_backward,
    fp8_silu_forward,
)

QB = 16
DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


@pytest.fixture
def golden(golden_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(golden_dir / "coat_mul_silu.safetensors")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.element_size() == 2 else torch.uint8
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


def batched(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(2, tensor.shape[0] // 2, tensor.shape[1])


@pytest.mark.parametrize("three_d", [False, True])
def test_mul_forward_is_bit_equal(golden: dict[str, torch.Tensor], three_d: bool) -> None:
    inputs = [golden[name] for name in ("x1", "s_x1", "x2", "s_x2")]
    if three_d:
        inputs = [batched(tensor) for tensor in inputs]
    codes, scale, transposed = fp8_mul_forward(*inputs, QB, transpose_output_2d=three_d)
    assert codes.shape == inputs[0].shape
    assert same_bits(codes.view(golden["x1"].shape), golden["mulfwd_q"])
    assert same_bits(scale, golden["mulfwd_scale"])
    assert same_bits(transposed, golden["mulfwd_t"])


@pytest.mark.parametrize("three_d", [False, True])
@pytest.mark.parametrize("fp8type", ["E4M3", "E5M2"])
def test_mul_backward_is_bit_equal(golden: dict[str, torch.Tensor], fp8type: str, three_d: bool) -> None:
    inputs = [golden[name] for name in ("x1", "s_x1", "x2", "s_x2", "g")]
    if three_d:
        inputs = [batched(tensor) for tensor in inputs]
    flat = golden["g"].shape
    y1, (y2, s_y2) = fp8_mul_backward(*inputs, QB, fp8type)
    assert y1.shape == y2.shape == inputs[4].shape
    assert s_y2.shape == inputs[1].shape
    prefix = f"mulbwd_{fp8type}_q0"
    assert same_bits(y1.view(flat), golden[f"{prefix}_y1"])
    assert same_bits(y2.view(flat), golden[f"{prefix}_a"])
    assert same_bits(s_y2.view(golden["s_x1"].shape), golden[f"{prefix}_scale"])
    y1, (q, scale, transposed) = fp8_mul_backward(*inputs, QB, DTYPES[fp8type], False, True)
    prefix = f"mulbwd_{fp8type}_q1"
    assert same_bits(y1.view(flat), golden[f"{prefix}_y1"])
    assert q.shape == inputs[4].shape
    assert same_bits(q.view(flat), golden[f"{prefix}_a"])
    assert same_bits(scale, golden[f"{prefix}_scale"])
    assert same_bits(transposed, golden[f"{prefix}_t"])


@pytest.mark.parametrize("three_d", [False, True])
def test_silu_is_bit_equal(golden: dict[str, torch.Tensor], three_d: bool) -> None:
    x, s_x, g = golden["x1"], golden["s_x1"], golden["g"]
    if three_d:
        x, s_x, g = batched(x), batched(s_x), batched(g)
    codes, scales = fp8_silu_forward(x, s_x, QB)
    assert same_bits(codes.view(32, 64), golden["silufwd_q"])
    assert same_bits(scales.view(32, 4), golden["silufwd_scale"])
    for fp8type in ("E4M3", "E5M2"):
        y, s_y = fp8_silu_backward(x, s_x, g, QB, fp8type)
        assert same_bits(y.view(32, 64), golden[f"silubwd_{fp8type}_q0_y"])
        assert same_bits(s_y.view(32, 4), golden[f"silubwd_{fp8type}_q0_scale"])
        q, scale, transposed = fp8_silu_backward(x, s_x, g, QB, fp8type, output_quantized_transpose=True)
        assert same_bits(q.view(32, 64), golden[f"silubwd_{fp8type}_q1_y"])
        assert same_bits(scale, golden[f"silubwd_{fp8type}_q1_scale"])
        assert same_bits(transposed, golden[f"silubwd_{fp8type}_q1_t"])


def test_every_recorded_tensor_is_compared(golden: dict[str, torch.Tensor]) -> None:
    """5 inputs, 3 + 2 forward, and per format 2 * 3 + 1 of the product and 2 + 3 of SiLU."""
    assert len(golden) == 5 + 5 + 2 * (7 + 5)

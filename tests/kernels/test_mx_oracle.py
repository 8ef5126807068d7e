"""The MXFP8 kernels against readable float64 oracles, on shapes the recorded vectors do not have.

Tolerance: quantized operands are the same bits in both, so results agree to fp32 summation order before one bf16
rounding; 4e-3 is one bf16 rounding step (2^-8) of the largest value. A flipped rounding of an intermediate moves a few
elements by one MX step; the Frobenius bound of 2e-3 keeps those rare.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.kernels import mlp_backward_mxfp8, mlp_forward_mxfp8

sys.path.insert(0, str(Path(__file__).parent))
import mx_oracle


def assert_close(actual: Tensor, expected: Tensor) -> None:
    difference = actual.double() - expected
    assert difference.norm() <= 2e-3 * expected.norm()
    assert difference.abs().max() <= 4e-3 * expected.abs().max() + 1e-12


def rows_of(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"),
    [(128, 128, 128), (384, 384, 256), (640, 256, 384), (1152, 128, 640), (128, 640, 1536)],
)
def test_dense(tokens: int, hidden: int, inner: int) -> None:
    torch.manual_seed(tokens + inner)
    x, dout = rows_of(tokens, hidden), rows_of(tokens, hidden)
    gate_up, down = rows_of(2 * inner, hidden, scale=hidden**-0.5), rows_of(hidden, inner, scale=inner**-0.5)
    forward = mlp_forward_mxfp8(x, gate_up, down, save_gate_pre=True, save_up=True)
    wanted = mx_oracle.forward(x.double(), gate_up.double(), down.double())
    assert forward.gate_pre is not None and forward.up is not None
    assert_close(forward.output, wanted["output"])
    assert_close(forward.gate_pre, wanted["gate"])
    assert_close(forward.up, wanted["up"])
    backward = mlp_backward_mxfp8(dout, x, gate_up, down, gate_pre=forward.gate_pre, up=forward.up)
    operands = (dout, x, gate_up, down, forward.gate_pre, forward.up)
    grads = mx_oracle.backward(*(operand.double() for operand in operands))
    assert_close(backward.hidden_states_grad, grads.x)
    assert_close(backward.gate_up_weight_grad, grads.gate_up)
    assert_close(backward.down_proj_weight_grad, grads.down)

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

from hf_neuron_moe.kernels.mlp_mxfp8 import mlp_backward_mxfp8, mlp_forward_mxfp8
from hf_neuron_moe.kernels.moe import blockwise_mm_bwd, moe_cte
from hf_neuron_moe.kernels.routing import build_block_plan, expert_mask, masked_affinities

sys.path.insert(0, str(Path(__file__).parent))
import mx_oracle


def assert_close(actual: Tensor, expected: Tensor) -> None:
    difference = actual.double() - expected
    assert difference.norm() <= 2e-3 * expected.norm()
    assert difference.abs().max() <= 4e-3 * expected.abs().max() + 1e-12


def rows_of(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


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


@pytest.mark.parametrize("block", [128, 256, 512, 1024])
def test_experts(block: int) -> None:
    """Groups along the token axis are formed block by block; a partly filled block is zero padded."""
    torch.manual_seed(block)
    tokens, hidden, inner, experts, top_k = 700, 128, 256, 3, 2
    x, dout = rows_of(tokens + 1, hidden), rows_of(tokens + 1, hidden)
    x[-1] = dout[-1] = 0
    gate_up = rows_of(experts, hidden, 2, inner, scale=hidden**-0.5)
    down = rows_of(experts, inner, hidden, scale=inner**-0.5)
    index = torch.rand(tokens, experts).topk(top_k).indices
    weights = torch.rand(tokens, top_k).softmax(-1)
    affinity = masked_affinities(index, weights, experts)
    plan = build_block_plan(expert_mask(index, experts), block, top_k=top_k)
    shared = (plan.token_position_to_id, plan.block_to_expert)
    forward = moe_cte(
        x, affinity, gate_up, down, *shared, block,
        expert_affinity_multiply_on_I=True, checkpoint_activation=True, precision="mxfp8",
    )  # fmt: skip
    assert forward.gate_up_activations_T is not None
    backward = blockwise_mm_bwd(
        x, affinity, gate_up, down, forward.gate_up_activations_T, None, *shared, dout, block,
        affinity_option="AFFINITY_ON_I", precision="mxfp8",
    )  # fmt: skip

    output, d_x = torch.zeros(tokens + 1, hidden).double(), torch.zeros(tokens + 1, hidden).double()
    d_gate_up, d_down = torch.zeros(experts, 2 * inner, hidden).double(), torch.zeros(experts, hidden, inner).double()
    d_affinity = torch.zeros(tokens + 1, experts).double()
    table = affinity.view(tokens + 1, experts).double()
    for number, expert in enumerate(plan.block_to_expert.tolist()):
        ids = plan.token_position_to_id[number * block : (number + 1) * block].long()
        scale = table[ids, expert]
        weights_gu, weight_d = (
            gate_up[expert].permute(1, 2, 0).reshape(2 * inner, hidden).double(),
            down[expert].T.double(),
        )
        block_out = mx_oracle.forward(x[ids].double(), weights_gu, weight_d, scale)
        output.index_add_(0, ids, block_out["output"])
        gate, up = forward.gate_up_activations_T[number].transpose(1, 2).double()
        grads = mx_oracle.backward(dout[ids].double(), x[ids].double(), weights_gu, weight_d, gate, up, scale)
        d_x.index_add_(0, ids, grads.x)
        d_gate_up[expert] += grads.gate_up
        d_down[expert] += grads.down
        real = ids < tokens
        if not real.any():
            continue
        d_affinity[ids[real], expert] = grads.scale[real]
        assert_close(forward.gate_up_activations_T[number, 0].T[real], block_out["gate"][real])
    assert_close(forward.output, output)
    assert_close(backward.hidden_states_grad, d_x)
    assert_close(backward.gate_up_proj_weight_grad.permute(0, 2, 3, 1).reshape(experts, 2 * inner, hidden), d_gate_up)
    assert_close(backward.down_proj_weight_grad.transpose(1, 2), d_down)
    assert_close(backward.expert_affinities_masked_grad.view(tokens + 1, experts), d_affinity)

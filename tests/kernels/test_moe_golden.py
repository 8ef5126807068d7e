"""Blockwise MoE forward, backward and block plans against recorded upstream references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_neuron_moe.kernels.moe import blockwise_mm_bwd, moe_cte
from hf_neuron_moe.kernels.routing import build_block_plan

GOLDEN = Path(__file__).parents[1] / "golden"
_FILES = json.loads((GOLDEN / "manifest.json").read_text())["files"]
CALLS: dict[str, dict[str, Any]] = (
    {name: entry["call"] for name, entry in _FILES.items()}
    if isinstance(_FILES, dict)
    else {entry["file"]: entry["call"] for entry in _FILES}
)
FORWARD = ["silu_post", "silu_post_top1", "silu_post_skip_token", "silu_post_onI", "bf16_kernel_shape"]
BACKWARD = ["onH_silu", "onH_silu_E1", "onH_silu_top1", "onH_silu_skip_token", "onI_silu", "bf16_kernel_shape"]
FP32 = 2e-6
"""What an independent fp32 implementation reached, relative to the largest golden value (manifest)."""
BF16 = 2e-2
"""Upstream's own device tolerance for bf16, relative to the largest golden value."""
BF16_CONTRIBUTIONS = 4e-3
"""The upstream torch reference rounds every block's contribution to bf16 (manifest)."""


def assert_within(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    actual, expected = actual.double(), expected.double()
    assert (actual - expected).abs().max() <= 1e-5 * tolerance + tolerance * expected.abs().max()


def plan_arguments(vectors: dict[str, Tensor], call: dict[str, Any]) -> dict[str, Any]:
    return {
        "token_position_to_id": vectors["token_position_to_id"],
        "block_to_expert": vectors["block_to_expert"],
        "block_size": call["B"],
        "skip_token": call.get("skip_token", False),
        "precision": "bf16" if vectors["hidden_states"].dtype == torch.bfloat16 else "fp32",
    }


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str) -> None:
    vectors, call = load_file(GOLDEN / f"fwd_{name}.safetensors"), CALLS[f"fwd_{name}.safetensors"]
    on_inner = name.endswith("onI")
    operands = ("hidden_states", "expert_affinities_masked", "gate_up_proj_weight", "down_proj_weight")
    result = moe_cte(
        **{operand: vectors[operand] for operand in operands},
        **plan_arguments(vectors, call),
        expert_affinity_multiply_on_I=on_inner,
        checkpoint_activation=True,
    )
    tolerance = BF16 if vectors["hidden_states"].dtype == torch.bfloat16 else FP32
    compared = 0
    for field, value in result._asdict().items():
        for prefix in ("out", "kernelconv", "tref", "fp32"):
            golden = vectors.get(f"{prefix}_{field}")
            if golden is None or value is None:
                continue
            rows = call["T"] if field == "output" else None
            loose = prefix == "tref" and field == "output"
            assert_within(value[:rows], golden[:rows], BF16_CONTRIBUTIONS if loose else tolerance)
            compared += 1
    assert compared >= 2
    assert (result.down_activations is None) is on_inner


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    vectors, call = load_file(GOLDEN / f"bwd_{name}.safetensors"), CALLS[f"bwd_{name}.safetensors"]
    operands = (
        "hidden_states",
        "expert_affinities_masked",
        "gate_up_proj_weight",
        "down_proj_weight",
        "gate_up_proj_act_checkpoint_T",
        "down_proj_act_checkpoint",
        "output_hidden_states_grad",
    )
    result = blockwise_mm_bwd(
        **{operand: vectors[operand] for operand in operands},
        **plan_arguments(vectors, call),
        affinity_option=call["affinity_option"],
    )
    tolerance = BF16 if vectors["hidden_states"].dtype == torch.bfloat16 else FP32
    for field, value in result._asdict().items():
        assert_within(value, vectors[f"out_{field}"], tolerance)
        assert value.dtype == vectors["hidden_states"].dtype


@pytest.mark.parametrize("number", range(7))
def test_plans_are_identical(number: int) -> None:
    vectors = load_file(GOLDEN / "routing_plans.safetensors")
    call = CALLS["routing_plans.safetensors"]["plans"][number]
    mask, prefix = vectors[f"plan{number}_mask"], f"plan{number}"
    arguments = {"top_k": call["K"], "skip_token": call["skip_token"]}
    plan = build_block_plan(mask, call["B"], **arguments)
    assert torch.equal(plan.token_position_to_id, vectors[f"{prefix}_token_position_to_id"])
    assert torch.equal(plan.block_to_expert, vectors[f"{prefix}_block_to_expert"])
    assert torch.equal(plan.conditions, vectors[f"{prefix}_conditions"])
    assert plan.conditions.sum() == call["real_blocks"]
    paired = build_block_plan(mask, call["B"], blocks_multiple=2, **arguments)
    assert torch.equal(paired.token_position_to_id, vectors[f"{prefix}_lnc2_token_position_to_id"])
    assert torch.equal(paired.block_to_expert, vectors[f"{prefix}_lnc2_block_to_expert"])

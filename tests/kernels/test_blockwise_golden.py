"""``blockwise_mm_bwd`` against recorded upstream references, called with upstream's arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments
from hf_neuron_moe.reference.blockwise_mm_bwd import MoEBackward, MoEBiasBackward, blockwise_mm_bwd
from hf_neuron_moe.reference.moe_types import ActFnType, ClampLimits, SkipMode

GOLDEN = Path(__file__).parents[1] / "golden"
CALLS: dict[str, dict[str, Any]] = {
    Path(entry["file"]).stem: entry["call"] for entry in json.loads((GOLDEN / "manifest.json").read_text())["files"]
}
NAMES = sorted(path.stem for path in GOLDEN.glob("bwd_*.safetensors"))
ACTIVATIONS = {"silu": ActFnType.SiLU, "swish": ActFnType.Swish, "squared_relu": ActFnType.SquaredReLU}
TRUTH = "autograd64_expert_affinities_masked_grad"
WITH_TRUTH = [name for name in NAMES if TRUTH in load_file(GOLDEN / f"{name}.safetensors")]
FP32 = 2e-6
"""What an independent fp32 implementation reached, relative to the largest golden value (manifest)."""
BF16 = 2e-2
"""Upstream's own device tolerance for bf16, relative to the largest golden value."""


@pytest.fixture(params=["fast", "tiles"], autouse=True)
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every vector also through the loops of ``execute="tiles"``."""
    if request.param == "tiles":
        monkeypatch.setattr(BackwardArguments, "walks", True)


def call_of(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the vectors and the arguments of the recorded call."""
    vectors, call = load_file(GOLDEN / f"{name}.safetensors"), CALLS[name]
    operands = (
        "hidden_states",
        "expert_affinities_masked",
        "gate_up_proj_weight",
        "down_proj_weight",
        "gate_up_proj_act_checkpoint_T",
        "down_proj_act_checkpoint",
        "token_position_to_id",
        "block_to_expert",
        "output_hidden_states_grad",
    )
    return vectors, {
        **{operand: vectors[operand] for operand in operands},
        "block_size": call["B"],
        "skip_dma": SkipMode(call["skip_token"], False),
        "affinity_option": call["affinity_option"],
        "clamp_limits": ClampLimits(*call["clamp_limits"]),
        "bias": call["bias"],
        "activation_type": ACTIVATIONS[call["activation"]],
        "skip_gate_proj": call.get("skip_gate_proj", False),
        "upstream_affinity_grad": call["bias"],
    }


def assert_within(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    actual, expected = actual.double(), expected.double()
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_recorded_gradients(name: str) -> None:
    vectors, arguments = call_of(name)
    result = blockwise_mm_bwd(**arguments)
    assert type(result) is (MoEBiasBackward if arguments["bias"] else MoEBackward)
    bf16 = vectors["hidden_states"].dtype == torch.bfloat16
    for field, value in result._asdict().items():
        assert_within(value, vectors[f"out_{field}"], BF16 if bf16 else FP32)
        assert value.dtype == vectors["hidden_states"].dtype


def test_every_vector_of_the_manifest_is_replayed() -> None:
    assert set(NAMES) == {name for name in CALLS if name.startswith("bwd_")}


@pytest.mark.parametrize("name", [name for name in NAMES if not CALLS[name]["bias"] and "bf16" not in name])
def test_both_affinity_places_give_the_same_gradients(name: str) -> None:
    """Without a down bias AFFINITY_ON_H and ON_I are the same function."""
    _, arguments = call_of(name)
    on_h, on_i = (blockwise_mm_bwd(**{**arguments, "affinity_option": f"AFFINITY_ON_{axis}"}) for axis in "HI")
    for left, right in zip(on_h, on_i, strict=True):
        assert_within(left, right, FP32)


@pytest.mark.parametrize("name", WITH_TRUTH)
@pytest.mark.parametrize("option", ["AFFINITY_ON_H", "AFFINITY_ON_I"])
def test_recorded_true_affinity_gradient(name: str, option: str) -> None:
    """The affinity's float64 gradient, from either kind of down checkpoint and from none."""
    vectors, arguments = call_of(name)
    arguments["affinity_option"] = option
    truth = vectors[TRUTH]
    results = []
    if not arguments["bias"]:
        results.append(blockwise_mm_bwd(**arguments))
    else:
        down_bias, checkpoint = vectors["down_proj_bias"], arguments["down_proj_act_checkpoint"]
        arguments |= {"down_proj_bias": down_bias, "upstream_affinity_grad": False}
        results.append(blockwise_mm_bwd(**arguments | {"convention": "golden"}))
        device = checkpoint - down_bias[arguments["block_to_expert"].long()][:, None]
        results.append(blockwise_mm_bwd(**arguments | {"down_proj_act_checkpoint": device}))
    for result in results:
        assert_within(result[1][: len(truth)], truth, FP32)


@pytest.mark.parametrize("name", [name for name in NAMES if CALLS[name]["bias"]])
def test_the_upstream_flag_leaves_the_bias_out(name: str) -> None:
    vectors, arguments = call_of(name)
    with_bias = arguments | {"down_proj_bias": vectors["down_proj_bias"]}
    plain, flagged = blockwise_mm_bwd(**arguments), blockwise_mm_bwd(**with_bias)
    assert all(torch.equal(left, right) for left, right in zip(plain, flagged, strict=True))
    repaired = blockwise_mm_bwd(**with_bias | {"upstream_affinity_grad": False})
    assert not torch.equal(plain[1], repaired[1])

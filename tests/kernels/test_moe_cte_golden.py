"""``moe_cte`` against every recorded upstream reference of the forward, at the manifest's tolerances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_neuron_moe.reference.moe_cte import MoEForward, moe_cte
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    ShardOnBlockConfig,
    ShardOnIConfig,
    SkipMode,
)

GOLDEN = Path(__file__).parents[1] / "golden"
CALLS: dict[str, dict[str, Any]] = {
    entry["file"].removesuffix(".safetensors"): entry["call"]
    for entry in json.loads((GOLDEN / "manifest.json").read_text())["files"]
}
FORWARD = sorted(path.stem for path in GOLDEN.glob("fwd_*.safetensors"))
MX = sorted(path.stem for path in GOLDEN.glob("mx_*.safetensors") if not path.stem.endswith("_weights"))
FP32 = 2e-6
"""What an independent fp32 implementation reached, relative to the largest golden value (manifest)."""
BF16 = 2e-2
"""Upstream's own device tolerance for bf16, relative to the largest golden value."""
BF16_CONTRIBUTIONS = 4e-3
"""The upstream torch reference rounds every block's contribution to bf16 (manifest)."""
ACTIVATIONS = {
    "silu": ActFnType.SiLU,
    "swish": ActFnType.Swish,
    "gelu": ActFnType.GELU,
    "gelu_tanh": ActFnType.GELU_Tanh_Approx,
}
MODES = {
    "post": ExpertAffinityScaleMode.POST_SCALE,
    "pre": ExpertAffinityScaleMode.PRE_SCALE,
    "none": ExpertAffinityScaleMode.NO_SCALE,
}
LIMITS = {
    "gate_hi": "gate_clamp_upper_limit",
    "gate_lo": "gate_clamp_lower_limit",
    "up_hi": "up_clamp_upper_limit",
    "up_lo": "up_clamp_lower_limit",
}
OPTIONAL = ("gate_and_up_proj_bias", "down_proj_bias", "gate_up_proj_scale", "down_proj_scale")
OPERANDS = (
    "hidden_states",
    "expert_affinities_masked",
    "gate_up_proj_weight",
    "down_proj_weight",
    "token_position_to_id",
    "block_to_expert",
)
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": None}


@pytest.fixture(params=["fast", "tiles"], autouse=True)
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every vector also through the loops of ``execute="tiles"``."""
    if request.param == "tiles":
        monkeypatch.setattr(Arguments, "walks", True)


def assert_within(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def arguments(vectors: dict[str, Tensor], call: dict[str, Any]) -> dict[str, Any]:
    """Translate a manifest entry to the documented arguments."""
    given = {name: vectors[name] for name in OPERANDS} | {name: vectors.get(name) for name in OPTIONAL}
    return given | {
        "block_size": call["B"],
        "activation_function": ACTIVATIONS[call["activation"]],
        "expert_affinities_scaling_mode": MODES[call["scaling"]],
        "skip_dma": SkipMode(skip_token=call.get("skip_token", False)),
        **{LIMITS[name]: value for name, value in call.get("clamp", {}).items()},
    }


def run(name: str, *, convention: str) -> tuple[MoEForward, dict[str, Tensor], dict[str, Any]]:
    vectors, call = load_file(GOLDEN / f"{name}.safetensors"), CALLS[name]
    kind = MoECTEImplementation[call.get("implementation", "shard_on_i")]
    on_inner = call.get("expert_affinity_multiply_on_I", False)
    spec = MoECTESpec(kind, shard_on_I=ShardOnIConfig(True, on_inner))
    given = arguments(vectors, call)
    if call.get("conditions_passed"):
        given["conditions"] = vectors["conditions"]
    return moe_cte(**given, spec=spec, convention=convention), vectors, call


def test_every_vector_of_the_manifest_is_replayed() -> None:
    recorded = {name for name in CALLS if name.startswith(("fwd_", "mx_")) and not name.endswith("_weights")}
    assert recorded == {*FORWARD, *MX}


@pytest.mark.parametrize("name", FORWARD)
def test_golden_convention_equals_the_numpy_reference(name: str) -> None:
    result, vectors, call = run(name, convention="golden")
    in_bf16 = vectors["hidden_states"].dtype == torch.bfloat16
    compared = 0
    for field, value in result._asdict().items():
        for prefix in ("out", "fp32"):
            if (golden := vectors.get(f"{prefix}_{field}")) is not None:
                rows = call["T"] if field == "output" else None
                assert_within(value[:rows], golden[:rows], BF16 if in_bf16 else FP32)
                compared += 1
    assert compared >= (1 if name.endswith("onI") else 2)


@pytest.mark.parametrize("name", FORWARD)
def test_device_convention_equals_the_model_of_the_kernel(name: str) -> None:
    result, vectors, call = run(name, convention="device")
    in_bf16 = vectors["hidden_states"].dtype == torch.bfloat16
    assert result.output.dtype == vectors["hidden_states"].dtype
    for field, value in result._asdict().items():
        if (golden := vectors.get(f"kernelconv_{field}")) is not None:
            rows = call["T"] if field == "output" else None
            assert_within(value[:rows], golden[:rows], FP32)
    references = [vectors[key] for key in ("out_output", "tref_output") if key in vectors]
    if call["scaling"] == "pre" and call["bias"]:
        references = []
    for golden in references:
        assert_within(result.output[: call["T"]], golden[: call["T"]], BF16 if in_bf16 else BF16_CONTRIBUTIONS)


@pytest.mark.parametrize("name", ["fwd_silu_post", "fwd_silu_post_top1", "fwd_silu_post_onI"])
def test_bare_matmul_checkpoints_equal_the_torch_reference(name: str) -> None:
    """Without bias, clamp and scale the torch reference's pre-activations have the same meaning."""
    result, vectors, _ = run(name, convention="device")
    assert result.gate_up_activations_T is not None
    assert_within(result.gate_up_activations_T, vectors["tref_gate_up_activations_T"], FP32)
    assert (result.down_activations is None) is name.endswith("onI")


def mx_call(name: str, **changes: Any) -> tuple[MoEForward, dict[str, Tensor], dict[str, Any]]:
    vectors, call = load_file(GOLDEN / f"{name}.safetensors"), CALLS[name]
    weights = GOLDEN / f"{name}_weights.safetensors"
    if weights.exists():
        vectors |= load_file(weights)
    spec = MoECTESpec(
        MoECTEImplementation[call["implementation"]],
        ShardOnBlockConfig(weight_dtype=FORMATS[call["weight_format"]]),
    )
    given = arguments(vectors, call) | {"spec": spec, "accumulation_dtype": torch.float32}
    return moe_cte(**(given | changes)), vectors, call


@pytest.mark.parametrize("name", MX)
def test_mx_equals_the_reference_under_the_earlier_scale_rule(name: str) -> None:
    result, vectors, call = mx_call(name, convention="golden", mx_scale_rule="floor")
    assert result.output.dtype == torch.float32
    assert_within(result.output[: call["T"]], vectors["out_output"][: call["T"]], FP32)


@pytest.mark.parametrize("name", MX)
def test_mx_under_the_default_rule_is_near_but_not_equal(name: str) -> None:
    """The two rules differ by one binade of scale: at most one e4m3 step (1/16) of a value, far less in the sum."""
    result, vectors, call = mx_call(name, device_limits=False)
    golden = vectors["out_output"][: call["T"]]
    assert_within(result.output[: call["T"]], golden, 5e-2)
    assert (result.output[: call["T"]] - golden).abs().max() > 1e-4 * golden.abs().max()

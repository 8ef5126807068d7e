"""The report says how PyTorch multiplies, which gates the blocks have, and what generation in mxfp8 will hold."""

from __future__ import annotations

import json

import pytest
import torch

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch import compute, generation
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("precision", "native", "expected"),
    [
        ("bf16", True, "bf16 products"),
        ("bf16", False, "fp32 products of bf16 values"),
        ("mxfp8", True, "bf16 products"),
        ("fp32", True, "fp32 products"),
    ],
)
def test_the_products_are_named(precision: str, native: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: native)
    report = patch_model(tiny_model("mixtral"), {"precision": precision})
    assert {entry.products for entry in report.patched} == {expected}
    assert f"PyTorch multiplies by {expected} ({len(report.patched)} blocks)." in str(report)
    assert json.loads(json.dumps(report.to_dict()))["entries"][0]["products"] == expected


GATES = {
    "mixtral": "silu",
    "gpt_oss": "swish(1.702, limit 0.75, up + 1)",
    "gemma4": "gelu_tanh",
    "nemotron_h": "squared_relu(no gate)",
}


@pytest.mark.parametrize("family", GATES)
def test_gates_are_a_column_where_one_is_not_silu(family: str) -> None:
    model = tiny_model(family)
    for module in model.modules() if family == "gpt_oss" else ():
        if hasattr(module, "limit"):
            module.limit = 0.75  # no option of the configuration in transformers 5.17
    report = patch_model(model, strict=False)
    plain = json.loads(json.dumps(report.to_dict()))["entries"]
    assert GATES[family] in {entry["gate"] for entry in plain if entry["status"] == "patched"}
    header, *rows = str(report).splitlines()[1:]
    assert ("  gate  " in header) is (GATES[family] != "silu")
    shown = [row for row in rows if f"  {GATES[family]}  " in row]
    assert bool(shown) is (GATES[family] != "silu")


@pytest.mark.parametrize(
    ("gate", "short"),
    [
        (Gate(), "silu"),
        (Gate(gate_max=10.0, up_max=10.0, up_min=-10.0), "silu(limit 10)"),
        (Gate(act_max=7.0, up_max=7.0, up_min=-7.0), "silu(limit 7 afterwards)"),
        (Gate(gate_max=7.0), "silu(limits)"),
        (Gate(gate_softcap=4.0, up_softcap=25.0), "silu(softcap 4, up softcap 25)"),
    ],
)
def test_a_gate_has_a_short_name(gate: Gate, short: str) -> None:
    assert gate.short == short


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_memory_of_generation_is_what_it_takes(family: str) -> None:
    model = tiny_model(family, hidden_size=128, intermediate_size=384).to(torch.bfloat16).eval()
    report = patch_model(model, {"precision": "mxfp8"})
    generation.generation_copies().clear()
    with torch.inference_mode():
        model(torch.arange(2)[None])
    held = generation.generation_copies().nbytes
    generation.generation_copies().clear()
    assert held > 0 and f"quantized copies of the weights: {held / 2**20:.1f} MiB" in str(report)
    assert "quantized copies" not in str(patch_model(tiny_model(family), {"precision": "bf16"}))

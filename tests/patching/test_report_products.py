"""The report says how PyTorch multiplies, and what generation in mxfp8 will hold."""

from __future__ import annotations

import json

import pytest
import torch

from hf_neuron_moe import patch_model
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

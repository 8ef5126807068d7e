"""torch.compile sees patched models as one graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_neuron_moe import patch_model
from hf_neuron_moe.modules.experts import register_experts_implementation
from tests.tiny_models import SOME_SLOW_LAYOUTS, tiny_model, tokens


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No compiled code from other tests, none left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", pytest.param("phi3", marks=pytest.mark.slow), "mixtral"])
def test_a_patched_model_is_one_graph(family: str, home: str) -> None:
    model = tiny_model(family).eval()
    patch_model(model, {"weights": home})
    expected = model(tokens()).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens()).logits, expected)


def test_the_registered_implementation_is_one_graph() -> None:
    model = tiny_model("mixtral").eval()
    name = "neuron_moe_compiled"
    register_experts_implementation(name=name)
    try:
        model.set_experts_implementation(name)
        expected = model(tokens()).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(tokens()).logits, expected)
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop(name, None)
        ALL_EXPERTS_FUNCTIONS._local_mapping.pop(name, None)

"""torch.compile sees patched models as one graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_neuron_moe import backends, patch_model
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "adapters"), [("gpt_oss", False), ("llama", False), ("llama", True)])
def test_dynamic_sizes_are_one_graph(family: str, adapters: bool) -> None:
    """Numbers of the gate are symbols to such a compiler, as are sizes."""
    model = tiny_model(family)
    patch_model(model)
    if adapters:
        get_peft_model(model, LoraConfig(r=2, target_modules=["gate_proj", "down_proj"]))
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for length in (tokens().shape[1], 5):
        ids = tokens()[:, :length]
        assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_the_registered_implementation_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first call of all is the compiled one."""
    monkeypatch.setattr(backends, "_classes", {})
    model = tiny_model("mixtral").eval()
    name = "neuron_moe_compiled"
    register_experts_implementation(name=name)
    try:
        model.set_experts_implementation(name)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(tokens()).logits, model(tokens()).logits)
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop(name, None)
        ALL_EXPERTS_FUNCTIONS._local_mapping.pop(name, None)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_exported_model_takes_texts_of_other_lengths(family: str) -> None:
    model, longer = tiny_model(family).eval(), torch.cat([tokens(), tokens()], dim=1)
    patch_model(model)
    shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=4 * tokens().shape[1])}, "use_cache": None}
    arguments = {"input_ids": tokens(), "use_cache": False}
    exported = torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=False).module()
    assert torch.equal(exported(input_ids=longer, use_cache=False).logits, model(longer, use_cache=False).logits)

"""The experts operator as a transformers experts implementation, for models that are not patched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_neuron_moe import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError
from hf_neuron_moe.modules import experts
from hf_neuron_moe.modules.experts import register_experts_implementation
from tests.refusals import refused
from tests.tiny_models import OTHER_GATES, tiny_model, tokens

NAME = "neuron_moe_under_test"


@pytest.fixture(autouse=True)
def _leave_no_registration() -> Iterator[None]:
    """The registry is process-wide; take the name out again."""
    yield
    for mapping in (type(ALL_EXPERTS_FUNCTIONS)._global_mapping, ALL_EXPERTS_FUNCTIONS._local_mapping):
        mapping.pop(NAME, None)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_registered_implementation_equals_stock(family: str, tmp_path: Path) -> None:
    stock = tiny_model(family)
    model = copy.deepcopy(stock)
    register_experts_implementation({"precision": "fp32"}, NAME)
    model.set_experts_implementation(NAME)
    results = []
    for each in (model, stock):
        logits = each(tokens()).logits
        logits.square().mean().backward()
        results.append((logits.detach(), [param.grad for param in each.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(results[0][1], results[1][1], strict=True):
        # The summation order differs; see tests/modules/test_equals_stock.py.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6 * theirs.abs().max().item())
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME)
    assert torch.equal(again.eval()(tokens()).logits, model.eval()(tokens()).logits)


def test_the_precision_is_that_of_the_registration() -> None:
    model = tiny_model("mixtral").eval()
    register_experts_implementation({"precision": "fp32"}, NAME)
    model.set_experts_implementation(NAME)
    exact = model(tokens()).logits
    register_experts_implementation(NeuronMoEConfig(precision="bf16"), NAME)
    assert not torch.equal(model(tokens()).logits, exact)


@pytest.mark.parametrize("family", OTHER_GATES)
def test_experts_with_other_gates_give_what_eager_gives(family: str) -> None:
    model = tiny_model(family)
    expected = model(tokens()).logits
    register_experts_implementation({"precision": "fp32"}, name=NAME)
    model.set_experts_implementation(NAME)
    found = model(tokens()).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert not torch.equal(found, expected)  # another order of sums


def test_unsupported_experts_are_refused_at_the_call() -> None:
    model = tiny_model("mixtral")
    model.model.layers[0].mlp.experts.act_fn = nn.Mish()
    register_experts_implementation(name=NAME)
    model.set_experts_implementation(NAME)
    with refused(UnsupportedModelError, "MixtralExperts", "activation is Mish"):
        model(tokens())


def test_a_gate_that_triton_kernels_lack_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_functions = pytest.importorskip("hf_neuron_moe.backends.triton.gate_functions")
    monkeypatch.setattr(gate_functions, "ACTIVATIONS", ("gelu",))
    model = tiny_model("mixtral").bfloat16()
    register_experts_implementation({"backend": "triton"}, NAME)
    model.set_experts_implementation(NAME)
    with refused(ConfigError, "backend", "its activation is silu, and the Triton kernels have gelu"):
        model(tokens())


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_names_of_others_are_not_taken(name: str) -> None:
    before = ALL_EXPERTS_FUNCTIONS.get(name)
    with refused(ConfigError, "name", got=f"'{name}'"):
        register_experts_implementation(name=name)
    assert ALL_EXPERTS_FUNCTIONS.get(name) is before


def test_the_kernel_home_needs_patching() -> None:
    with refused(ConfigError, "config.weights", "patch_model"):
        register_experts_implementation({"weights": "kernel"}, NAME)
    assert NAME not in ALL_EXPERTS_FUNCTIONS


def test_a_backend_is_asked_about_the_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def torch_after_asking(config, device, what, support, warned):  # type: ignore[no-untyped-def]
        support(SimpleNamespace(support=lambda shape, spec, tokens: asked.append(shape.biased)))
        return "torch"

    monkeypatch.setattr(experts, "usable_backend", torch_after_asking)
    register_experts_implementation({"precision": "fp32"}, NAME)
    for family in ("gpt_oss", "mixtral"):
        model = tiny_model(family)
        model.set_experts_implementation(NAME)
        model(tokens())
    assert list(dict.fromkeys(asked)) == [(True, True), (False, False)]

"""A new activation policy is a row in ``activation_policy.PRESETS``: everything reads its ``Keep``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import NeuronMoEConfig, activation_policy, patch_model, unpatch_model
from hf_neuron_moe.activation_policy import ActivationBudget, Keep
from hf_neuron_moe.errors import ConfigError
from tests.refusals import refused
from tests.tiny_models import tiny_model


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only up, and of it seven eighths: no list of checkpoints says that."""
    monkeypatch.setitem(activation_policy.PRESETS, "most_of_up", Keep(frozenset({"up"}), whole_up=False))


def wide(family: str) -> Any:
    inner = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    return tiny_model(family, hidden_size=64, **{inner: 640})


def trained(family: str, precision: str, activations: str) -> tuple[list[Tensor], list[Any]]:
    torch.manual_seed(3)
    model = wide(family).bfloat16().train()
    report = patch_model(model, NeuronMoEConfig(precision=precision, activations=activations))
    ids = torch.arange(3, 35).view(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    return [loss.detach(), *gradients], [entry.saved_bytes_per_token for entry in report.patched]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("row")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
def test_a_row_is_enough_to_train_with_it(family: str, precision: str) -> None:
    found, expected = (trained(family, precision, policy) for policy in ("most_of_up", "full"))
    assert len(found[0]) == len(expected[0]) and all(map(torch.equal, found[0], expected[0]))
    nothing, up = (trained(family, precision, policy)[1] for policy in ("recompute", "up"))
    # 512 of 640 columns are kept
    assert found[1] == [least + 0.8 * (most - least) for least, most in zip(nothing, up, strict=True)]


@pytest.mark.usefixtures("row")
def test_a_budget_can_choose_it() -> None:
    model = wide("llama")
    report = patch_model(model, {"activations": "most_of_up"})
    assert {entry.activations for entry in report.patched} == {"most_of_up"}
    least = report.saved_bytes_per_token
    assert least is not None
    unpatch_model(model)
    by_budget = patch_model(model, {"activations": ActivationBudget(bytes_per_token=least)})
    assert by_budget.saved_bytes_per_token == least
    assert {entry.activations for entry in by_budget.patched} == {"most_of_up"}


def test_without_the_row_the_name_is_unknown() -> None:
    with refused(ConfigError, "activations", "got 'most_of_up'"):
        NeuronMoEConfig(activations="most_of_up")

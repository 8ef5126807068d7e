"""A patch must prove itself: blocks of the right structure and wrong values are refused by the probe alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from tests.tiny_models import assert_same_snapshot, snapshot, tiny_config, tiny_model

_GATE = r"(?:silu\(gate\) \* up|the gate of its source)"
DIFFERS = rf"on a small example its result differs from {_GATE} by (.+?)% of the largest value"


def disagreement(model: nn.Module) -> str:
    """Patch in vain, with the model untouched; return the message."""
    before = snapshot(model)
    with pytest.raises((UnsupportedModelError, NothingToPatchError)) as caught:
        patch_model(model)
    assert_same_snapshot(snapshot(model), before)
    return str(caught.value)


def deviation(message: str) -> float:
    """The deviation that a message of the probe gives, in per cent."""
    found = re.search(DIFFERS, message)
    assert found, message
    return float(found[1])


def llama_with(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    """A model with one SiLU that computes something else: no structural rule looks into it."""
    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn.forward = activation
    return model


@pytest.mark.parametrize(
    ("activation", "least", "most"),
    [
        (F.gelu, 1, 30),
        (F.relu, 1, 60),
        (lambda x: x * torch.sigmoid(1.702 * x), 1, 30),
        (lambda x: 1.001 * F.silu(x), 0.1, 0.1),
        (lambda x: F.silu(x).bfloat16().float(), 0.05, 0.5),
    ],
    ids=["gelu", "relu", "quick gelu", "a thousandth more", "rounded to bfloat16"],
)
def test_a_dense_block_that_only_looks_right_is_refused(
    activation: Callable[[Tensor], Tensor], least: float, most: float
) -> None:
    message = disagreement(llama_with(activation))
    assert "model.layers.1.mlp (LlamaMLP): " in message
    assert least <= deviation(message) <= most


def test_a_dense_block_that_makes_nan_is_refused() -> None:
    assert math.isnan(deviation(disagreement(llama_with(lambda x: F.silu(x) * math.nan))))


def test_a_dense_block_that_computes_silu_in_other_words_is_patched() -> None:
    """What differs by roundings of fp32 only: the tolerance may not be so tight that it refuses these."""
    assert len(patch_model(llama_with(lambda x: x / (1 + torch.exp(-x)))).patched) == 2


def experts_with(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    """A model whose experts carry all the flags and put their output, the index and the weights through `change`."""
    stock = MixtralExperts.forward.__wrapped__

    @use_experts_implementation
    class LookalikeExperts(MixtralExperts):
        def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return change(stock(self, hidden, top_k_index, top_k_weights), top_k_index, top_k_weights)

    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts = LookalikeExperts(tiny_config("mixtral"))
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda out, index, weights: 1.001 * out,
        lambda out, index, weights: out / weights.sum(-1, keepdim=True),
        lambda out, index, weights: out + index.sum(-1, keepdim=True),
        lambda out, index, weights: out * (weights > 0).all(-1, keepdim=True),
        lambda out, index, weights: out * (weights < 1).all(-1, keepdim=True),
    ],
    ids=["a thousandth more", "weights normalized", "expert ids added", "weights below 0", "weights above 1"],
)
def test_experts_that_only_look_right_are_refused(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    message = disagreement(experts_with(change))
    assert "model.layers.1.mlp.experts (LookalikeExperts): " in message
    assert deviation(message) >= 0.1


def test_a_parameter_that_no_forward_reads_is_left_alone() -> None:
    """Its gradient is zero in both, and 0 / 0 is no deviation."""
    model = experts_with(lambda out, index, weights: out)
    model.model.layers[1].mlp.experts.unused = nn.Parameter(torch.ones(1))
    names = [*model.state_dict()]
    assert {entry.name for entry in patch_model(model).patched} >= {"model.layers.1.mlp.experts"}
    assert [*model.state_dict()] == names


def test_experts_that_return_another_shape_or_fail_are_refused() -> None:
    message = disagreement(experts_with(lambda out, index, weights: out[:, :-1]))
    assert "on a small example its result has shape (8, 7), not (8, 8)" in message
    message = disagreement(experts_with(lambda out, index, weights: out @ weights.t()))
    assert "its forward does not run on a small example: RuntimeError" in message


def test_experts_of_another_class_that_compute_the_same_are_patched() -> None:
    assert len(patch_model(experts_with(lambda out, index, weights: out)).patched) == 2

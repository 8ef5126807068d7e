"""A new gate is a row in ``backends/torch/gating.py`` and one in ``modules/structure.py``: blocks compute it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.torch import compute, gating
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.modules import structure
from tests.refusals import refused
from tests.tiny_models import tiny_model

ROUNDING = 2.0**-8
"""One rounding to bf16, relative to the value."""


def _tanh_grad_(values: Tensor) -> Tensor:
    return values.tanh_().square_().neg_().add_(1)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(gating.ACTIVATIONS, "tanh", gating.Activation(torch.tanh, _tanh_grad_))
    row = structure.Recognized("tanh", lambda activation: isinstance(activation, nn.Tanh))
    monkeypatch.setitem(structure.ACTIVATIONS, "tanh", row)
    yield


def loss_and_gradients(model: Any) -> list[Tensor]:
    ids = torch.arange(64).view(4, 16) % 61
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def deviations(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Of each gradient, relative to the size of the whole."""
    pairs = zip(actual, expected, strict=True)
    return [float((one.double() - two.double()).norm() / two.double().norm()) for one, two in pairs]


@pytest.mark.sampled(3)
@pytest.mark.thinned(3, 3)
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("products", ["native", "fp32"])
@pytest.mark.parametrize(
    ("precision", "activations"),
    [
        ("fp32", "minimal"),
        ("fp32", "recompute"),
        ("bf16", "full"),
        ("bf16", "recompute"),
        ("bf16", "fp8"),
        ("mxfp8", "full"),
        ("mxfp8", "minimal"),
        ("mxfp8", "recompute"),
    ],
)
def test_two_rows_are_enough_to_train_with_it(
    family: str, products: str, precision: str, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compute.OPTION, products)

    def gradients(act: str, *, patched: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = tiny_model(family, hidden_act=act).train()
        if patched:
            patch_model(model, NeuronMoEConfig(precision=precision, activations=activations))
        return loss_and_gradients(model)

    stock, found = gradients("tanh", patched=False), gradients("tanh", patched=True)
    by_silu, stock_silu = gradients("silu", patched=True), gradients("silu", patched=False)
    # The precision's own roundings, as SiLU shows them on the same weights; in fp32 the sums' order.
    bound = 1e-5 if precision == "fp32" else 1.5 * max(deviations(by_silu, stock_silu))
    assert max(deviations(found, stock)) < bound
    assert max(deviations(by_silu, stock)) > 1.5 * bound, "a block that ignores its gate would pass"


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("products", ["native", "fp32"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_generation_computes_it(
    family: str, products: str, precision: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compute.OPTION, products)
    ids = torch.arange(3, 3 + tokens).view(1, tokens)

    def logits(act: str, *, recorded: bool) -> Tensor:
        model = tiny_model(family, hidden_act=act).bfloat16().train(recorded)
        patch_model(model, NeuronMoEConfig(precision=precision))
        with torch.set_grad_enabled(recorded):
            return model(input_ids=ids).logits.detach()

    generated, recorded = logits("tanh", recorded=False), logits("tanh", recorded=True)
    # Both ways have the same rounding points; sums of another order may meet another bf16 value. In mxfp8 such a value
    # may take the next code in the second layer, which is up to 2**-3 away; about one value in thirty does.
    bound = 2 * ROUNDING if precision == "bf16" else 8 * ROUNDING
    assert deviations([generated], [recorded])[0] < bound
    assert deviations([logits("silu", recorded=False)], [recorded])[0] > 2 * bound, "it would pass with another gate"


@pytest.mark.usefixtures("rows")
def test_an_activation_that_changes_afterwards_is_an_error() -> None:
    model = tiny_model("mixtral", hidden_act="tanh")
    patch_model(model)
    block = model.model.layers[0].mlp.experts
    block.act_fn = nn.SiLU()
    with refused(UnsupportedModelError, "act_fn", "tanh, as when the block was patched"):
        loss_and_gradients(model)


@pytest.mark.usefixtures("rows")
def test_triton_kernels_leave_it_to_others() -> None:
    pytest.importorskip("triton")
    reason = "its activation is tanh, and the Triton kernels have silu, swish"
    with refused(NothingToPatchError, "model", reason):
        patch_model(tiny_model("mixtral", hidden_act="tanh"), NeuronMoEConfig(backend="triton"))
    for family, config, backend in (
        ("mixtral", {"fallback": "torch"}, "torch"),
        ("mixtral", {"precision": "fp32"}, "triton"),  # these two are torch's operations
        ("llama", {}, "triton"),
    ):
        model = tiny_model(family, hidden_act="tanh").bfloat16()
        report = patch_model(model, NeuronMoEConfig(backend="triton", **config))
        assert {entry.backend for entry in report.patched} == {backend}
        loss_and_gradients(model)
    kernels = get_backend("triton")
    assert not kernels.universal, "a registered implementation asks at its calls"


def test_triton_kernels_have_every_row() -> None:
    gate_functions = pytest.importorskip("hf_neuron_moe.backends.triton.gate_functions")
    assert set(gate_functions.ACTIVATIONS) == set(gating.ACTIVATIONS)


def test_without_the_rows_the_reason_names_the_activation() -> None:
    model = tiny_model("mixtral", hidden_act="tanh")
    with refused(NothingToPatchError, "model", "its activation is Tanh, the kernels have SiLU"):
        patch_model(model)

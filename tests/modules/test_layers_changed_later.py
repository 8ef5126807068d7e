"""What happens to a patched dense block's linear layers after patching is noticed on the very next call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import NeuronMoEWarning
from tests.tiny_models import tiny_model

HIDDEN = 32


class Doubled(nn.Module):
    """An adapter in miniature."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def _wrap(block: nn.Module) -> None:
    block.down_proj = Doubled(block.down_proj)


def _hook(block: nn.Module) -> None:
    block.down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def _override(block: nn.Module) -> None:
    layer = block.down_proj
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)


def _bias(block: nn.Module) -> None:
    weight = block.down_proj.weight
    block.down_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=True)
    block.down_proj.weight = nn.Parameter(2 * weight.detach())
    nn.init.zeros_(block.down_proj.bias)


def _copies(block: nn.Module) -> dict[str, nn.Module]:
    return {"itself": block, "deep copy": copy.deepcopy(block), "pickled": pickle.loads(pickle.dumps(block))}


@pytest.mark.parametrize("change", [_wrap, _hook, _override, _bias])
@pytest.mark.parametrize("kind", ["itself", "deep copy", "pickled"])
def test_a_change_after_many_calls_counts(change: Callable[[nn.Module], None], kind: str) -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32"})
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        before = model.model.layers[0].mlp(x)
        block = _copies(model.model.layers[0].mlp)[kind]
        assert torch.equal(block(x), before)
        change(block)
        with pytest.warns(NeuronMoEWarning, match="down_proj is a"):
            after = block(x)
    # Twice the last product is exact; what may differ is the order of its sums, so 1e-6 of the values' size.
    torch.testing.assert_close(after, 2 * before, rtol=1e-6, atol=1e-7)


def test_new_weights_are_read() -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32"})
    block, x = model.model.layers[0].mlp, torch.randn(3, HIDDEN)
    with torch.no_grad():
        before = block(x)
        block.down_proj.weight = nn.Parameter(2 * block.down_proj.weight.detach())
        torch.testing.assert_close(block(x), 2 * before, rtol=1e-6, atol=1e-7)


class FunctionActivation(nn.Module):
    """A SwiGLU MLP whose activation is a plain function on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, 64, bias=False)
        self.up_proj = nn.Linear(HIDDEN, 64, bias=False)
        self.down_proj = nn.Linear(64, HIDDEN, bias=False)
        self.act_fn = nn.functional.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("called_before", [False, True])
def test_an_activation_that_is_no_module_is_watched_too(called_before: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FunctionActivation()).eval()
    patch_model(model, {"precision": "fp32"})
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        if called_before:
            model(x)
        block = model[0]
        block.act_fn = nn.functional.gelu
        with pytest.warns(NeuronMoEWarning):
            got = model(x)
        expected = block.down_proj(nn.functional.gelu(block.gate_proj(x)) * block.up_proj(x))
    assert torch.equal(got, expected)

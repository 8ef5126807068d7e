"""Whatever becomes of a patched block is computed, or refused; nothing is ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn import functional as F

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.errors import DTypeError, NeuronMoEWarning, ShapeError, UnsupportedModelError
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model, tokens

HIDDEN = 32


def dense_block(home: str = "stock", **options: str) -> nn.Module:
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32", "weights": home, **options})
    return model.model.layers[0].mlp


def experts_block(home: str = "stock") -> nn.Module:
    model = tiny_model("mixtral")
    patch_model(model, {"precision": "fp32", "weights": home})
    return model.model.layers[0].mlp.experts


def with_gelu(block: nn.Module) -> None:
    block.act_fn = nn.GELU()


def with_own_forward(block: nn.Module) -> None:
    block.act_fn.forward = F.gelu


@pytest.mark.parametrize("change", [with_gelu, with_own_forward])
def test_another_activation_is_used_by_a_dense_block(change) -> None:  # type: ignore[no-untyped-def]
    block, x = dense_block(), torch.randn(3, HIDDEN)
    block(x)
    change(block)
    with pytest.warns(NeuronMoEWarning, match="act_fn is"):
        changed = block(x)
    torch.testing.assert_close(changed, block.down_proj(F.gelu(block.gate_proj(x)) * block.up_proj(x)))


@pytest.mark.parametrize("change", [with_gelu, with_own_forward])
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_another_activation_is_refused_where_there_is_no_other_way(change, home: str) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(3, HIDDEN)
    block = experts_block(home)
    change(block)
    with refused(UnsupportedModelError, "act_fn", "unpatch the model"):
        block(x, torch.tensor([[0, 1]] * 3), torch.rand(3, 2))
    block = dense_block("kernel")
    change(block)
    with refused(UnsupportedModelError, "act_fn"):
        block(x)


def test_another_silu_is_as_good() -> None:
    block, x = dense_block("kernel"), torch.randn(3, HIDDEN)
    before = block(x)
    block.act_fn = nn.SiLU()
    assert torch.equal(block(x), before)
    assert torch.equal(copy.deepcopy(block)(x), before)


@pytest.mark.parametrize("activations", ["minimal", "fp8", "recompute"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("shape", [(0, 5, HIDDEN), (2, 0, HIDDEN), (0, HIDDEN)])
def test_empty_batches(activations: str, precision: str, shape: tuple[int, ...]) -> None:
    block = dense_block(activations=activations, precision=precision)
    x = torch.empty(shape, requires_grad=True)
    out = block(x)
    out.sum().backward()
    assert out.shape == shape and x.grad is not None and x.grad.shape == shape
    assert all(p.grad is not None and not p.grad.any() for p in block.parameters())


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("make", [dense_block, experts_block])
def test_hidden_states_that_are_none_are_refused_by_the_blocks_name(
    make: Callable[[str], nn.Module], home: str
) -> None:
    block = make(home)
    routing = () if make is dense_block else (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    with refused(DTypeError, "hidden_states", r"^model\.layers\.0\.mlp", got="NoneType"):
        block(None, *routing)
    with refused(ShapeError, "hidden_states", got="[]"):
        block(torch.tensor(1.0), *routing)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("make", [dense_block, experts_block])
@pytest.mark.parametrize("recorded", [True, False])
def test_inputs_that_do_not_fit_the_weights_are_blamed_under_the_blocks_name(
    make: Callable[[str], nn.Module], home: str, recorded: bool
) -> None:
    block = make(home).train(recorded)
    routing = () if make is dense_block else (torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    name = r"^model\.layers\.0\.mlp"
    with torch.set_grad_enabled(recorded):
        block(torch.randn(3, HIDDEN), *routing)
        with refused(ShapeError, "hidden_states", name, got="[3, 33]"):
            block(torch.randn(3, HIDDEN + 1), *routing)
        with refused(DTypeError, "hidden_states", name, got="torch.int64"):
            block(torch.ones(3, HIDDEN, dtype=torch.int64), *routing)
        block.double()
        with refused(DTypeError, "hidden_states", name + r".*model.to\(torch.bfloat16", got="torch.float64"):
            block(torch.randn(3, HIDDEN, dtype=torch.float64), *routing)
        with refused(DTypeError, "the weights", r"^model\.layers\.0\.mlp.*Cast the model to one of"):
            block(torch.randn(3, HIDDEN), *routing)


def replica(module: nn.Module, weights: dict[int, Tensor]) -> nn.Module:
    """What ``nn.parallel.replicate`` makes of a module for one device."""
    copied = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copied._modules[name] = replica(child, weights) if child is not None else None
    for name, param in module._parameters.items():
        setattr(copied, name, None if param is None else weights.setdefault(id(param), param * 1))
    return copied


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "mxfp8"])
def test_data_parallel_replicas_compute_the_same(home: str, precision: str) -> None:
    block, x = dense_block(home, precision=precision), torch.randn(5, HIDDEN)
    expected = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    out = replica(block, {})(x)
    assert torch.equal(out, block(x))
    for got, grad in zip(torch.autograd.grad(out.square().sum(), list(block.parameters())), expected, strict=True):
        assert torch.equal(got, grad)


@pytest.mark.parametrize(
    ("family", "home"), [("llama", "stock"), ("phi3", "stock"), ("mixtral", "stock"), ("mixtral", "kernel")]
)
def test_distributed_checkpoint_state_dicts(family: str, home: str) -> None:
    stock = tiny_model(family)
    model = copy.deepcopy(stock)
    patch_model(model, {"weights": home})
    state = get_model_state_dict(model)
    assert state.keys() == get_model_state_dict(stock).keys()
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in state.items())
    doubled = {name: 2 * value for name, value in state.items()}
    set_model_state_dict(model, doubled)
    assert all(torch.equal(value, doubled[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])  # shapes of the two layouts that are the same, and others
def test_distributed_state_dicts_of_a_part(family: str) -> None:
    """As accelerate loads shards: torch fills the rest up with the parameters themselves, under their own names."""
    model = tiny_model(family)
    patch_model(model, {"weights": "kernel"})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    name = "model.layers.0.mlp.experts.down_proj"
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, {name: 2 * before[name]}, options=options)
    after = model.state_dict()
    assert torch.equal(after.pop(name), 2 * before.pop(name))
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_patching_in_the_middle_of_something(family: str, home: str) -> None:
    """A default device or inference mode around the call changes neither the probe nor the parameters."""
    ids = tokens()
    for context in (torch.device("meta"), torch.inference_mode(), torch.no_grad()):
        model = tiny_model(family)
        with context:
            report = patch_model(model, {"weights": home})
        assert len(report.patched) == 2
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None and not p.is_inference() for p in model.parameters())
        with context:
            unpatch_model(model)
        assert not any(p.is_inference() for p in model.parameters())
        model(ids, labels=ids).loss.backward()

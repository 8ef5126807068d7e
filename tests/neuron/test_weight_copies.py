"""Copies of weights in the kernels' orientation: never stale, and gone with their weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.prepared import PreparedWeights
from tests.neuron.small_runs import CASES, DENSE, EXPERTS, EXPERTS_MX, SOME_SLOW, Case
from tests.tiny_models import tokens

Start = Callable[..., SimpleNamespace]


def mlp_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "mlp" in name and "gate.weight" not in name]


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in mlp_parameters(model):
            param.mul_(-0.5)


def through_data(model: nn.Module) -> None:
    for param in mlp_parameters(model):
        param.data.mul_(-0.5)


def new_data(model: nn.Module) -> None:
    for param in mlp_parameters(model):
        param.data = param.data * -0.5


def added_to_data(model: nn.Module) -> None:
    """As adapters are merged."""
    for param in mlp_parameters(model):
        param.data += param.data * -1.5


def loaded(model: nn.Module) -> None:
    state = {name: value * -0.5 if "mlp" in name else value for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def stepped(model: nn.Module) -> None:
    params = mlp_parameters(model)
    for param in params:
        param.grad = param.detach() * 1.5
    torch.optim.SGD(params, lr=1.0).step()
    for param in params:
        param.grad = None


CHANGES = {f.__name__: f for f in (in_place, through_data, new_data, added_to_data, loaded, stepped)}


def logits(model: nn.Module, train: bool) -> Tensor:
    """A forward, with a backward where the model trains."""
    with torch.set_grad_enabled(train):
        out: Tensor = model(input_ids=tokens(1, 12)).logits
    if train:
        model.zero_grad()
        out.square().mean().backward()
        grads = [p.grad.flatten() for p in mlp_parameters(model) if p.grad is not None]
        return torch.cat([out.detach().flatten(), *grads])
    return out


def outcome(case: Case, backend: str, change: Callable[[nn.Module], None], train: bool) -> tuple[Tensor, Tensor]:
    model = case.model().to(torch.bfloat16)
    patch_model(model, {**case.options, "backend": backend, "weights": "stock"})
    before = logits(model, train)
    change(model)
    return before, logits(model, train)


BEHIND_AUTOGRAD = ("through_data", "added_to_data")
"""Writes that advance no version counter. Training sees them after the next optimizer step only, inference at once."""

CALLS = [(name, train) for name in CHANGES for train in (False, True) if not (train and name in BEHIND_AUTOGRAD)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [EXPERTS_MX, pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["mxfp8", "bf16"])
@pytest.mark.parametrize(("name", "train"), CALLS)
def test_changed_weights_are_seen(name: str, train: bool, case: Case, machine: Start) -> None:
    _, expected = outcome(case, "torch", CHANGES[name], train)
    machine(target=case.target)
    before, found = outcome(case, "neuron", CHANGES[name], train)
    assert not torch.equal(found, before)
    # The documented tolerance of the bf16 kernels.
    assert (found - expected).abs().max() <= (2e-2 if case.bound else 0.0) * expected.abs().max()


@pytest.mark.parametrize("name", [*SOME_SLOW[1:], "experts-bf16"])
def test_nothing_is_kept_between_calls_in_evaluation_mode(name: str, machine: Start) -> None:
    """Not even where autograd records them, as outside of ``no_grad``."""
    case = CASES[name]

    def halved(backend: str) -> list[Tensor]:
        model = case.model()
        patch_model(model, {**case.options, "backend": backend, "weights": "stock"})
        model.eval()
        first = logits(model, train=True)
        through_data(model)
        return [first, logits(model, train=True)]

    expected = halved("torch")
    machine(target=case.target)
    before, found = halved("neuron")
    assert get_backend("neuron").prepared_bytes == 0 and not torch.equal(before, found)
    # The documented tolerance of the bf16 kernels.
    assert (found - expected[1]).abs().max() <= (2e-2 if case.bound else 0.0) * expected[1].abs().max()


def test_merged_adapters_are_seen(machine: Start) -> None:
    """A forward before the merge makes copies; peft merges through ``.data``."""

    def merged(backend: str) -> list[Tensor]:
        model = EXPERTS_MX.model()
        patch_model(model, {**EXPERTS_MX.options, "backend": backend, "weights": "stock"})
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        torch.manual_seed(5)
        config: Any = LoraConfig(r=4, target_modules=[], target_parameters=targets, init_lora_weights=False)
        wrapped = get_peft_model(model, config)
        with_adapter = logits(wrapped, train=False)
        with wrapped.disable_adapter():
            without = logits(wrapped, train=False)
        whole = wrapped.merge_and_unload()
        return [with_adapter, without, logits(whole, train=False)]

    expected = merged("torch")
    machine()
    found = merged("neuron")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))


@pytest.mark.parametrize("name", SOME_SLOW)
def test_copies_are_reported_and_freed(name: str, machine: Start) -> None:
    case = CASES[name]
    machine(target=case.target)
    model = case.model()
    report = patch_model(model, {**case.options, "backend": "neuron", "weights": "stock"})
    logits(model, train=True)
    kept = get_backend("neuron").prepared_bytes
    assert kept > 0, "fp32 weights are read as bf16 copies"
    assert kept % 2 == 0 and kept <= 8 * sum(p.numel() for p in mlp_parameters(model))
    assert any(str(value) in str(report.to_dict()) for value in (kept, kept // 2))
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, train=False), logits(model, train=False))
    del model, twin, report
    gc.collect()
    other = DENSE.model() if case.target == "trn3" else EXPERTS.model()
    options = DENSE.options if case.target == "trn3" else EXPERTS.options
    patch_model(other, {**options, "backend": "neuron"})
    logits(other, train=False)
    stale = get_backend("neuron").prepared_bytes
    assert stale <= 8 * sum(p.numel() for p in mlp_parameters(other)), "copies of deleted weights are gone"


def test_copies_serve_every_microbatch_of_a_step(machine: Start) -> None:
    machine(target="trn2")
    model = EXPERTS.model()
    patch_model(model, {**EXPERTS.options, "backend": "neuron", "weights": "stock"})
    seen = []
    for _ in range(3):
        model(input_ids=tokens(1, 12)).logits.sum().backward()
        seen.append(get_backend("neuron").prepared_bytes)
    assert len(set(seen)) == 1 and seen[0] > 0


def test_any_optimizer_step_drops_all_copies() -> None:
    """What was written through ``.data`` is seen then at the latest, also where the optimizer has other parameters."""
    weights, weight, other = PreparedWeights(), torch.ones(4, 8), nn.Parameter(torch.ones(2))
    first = weights.get("turned", lambda w: w.t().contiguous(), weight)
    weight.data.mul_(2)
    assert weights.get("turned", lambda w: w.t().contiguous(), weight) is first
    assert weights.nbytes == first.nbytes
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=1.0).step()
    assert weights.nbytes == 0
    assert torch.equal(weights.get("turned", lambda w: w.t().contiguous(), weight), 2 * first)


def test_a_copy_of_several_weights_goes_with_any_of_them() -> None:
    one, two, other = torch.ones(4), torch.ones(4), torch.ones(4)
    copies = PreparedWeights()
    copies.get("sum", torch.add, one, two)
    assert copies.drop([other]) == 0 and copies.nbytes == 16
    assert copies.drop([two[1:]]) == 16 and copies.nbytes == 0

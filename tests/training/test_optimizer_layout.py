"""Optimizer states saved with another home of the weights are refused before they touch a parameter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.patching.optimizer_layout import GROUP_KEY
from tests.refusals import refused
from tests.tiny_models import tiny_model, tokens
from tests.training.test_trainer import prepared, train

OTHER = {"stock": "kernel", "kernel": "stock", None: "kernel"}


_made: list[nn.Module] = []


@pytest.fixture(autouse=True)
def unpatch_what_was_made() -> Iterator[None]:
    """The hook is there while a patched model is; one test's models are not to be another's."""
    yield
    while _made:
        unpatch_model(_made.pop())


def patched(home: str, family: str = "mixtral", **changes: Any) -> nn.Module:
    model = tiny_model(family, **changes)
    patch_model(model, {"precision": "fp32", "weights": home})
    _made.append(model)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("saved", [*(pytest.param(home, marks=pytest.mark.slow) for home in ("stock", "kernel")), None])
def test_the_trainer_refuses_to_resume_experts_with_another_home(saved: str | None, tmp_path: Path) -> None:
    train(prepared("mixtral", saved), tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    resumed = prepared("mixtral", OTHER[saved])
    shown = rf"experts.* in {saved or 'stock'} layout.*weights='{saved or 'stock'}'.*optimizer.pt"
    with refused(UnsupportedModelError, "optimizer state of model.layers.0.mlp.experts.gate_up_proj", shown):
        train(resumed, tmp_path / "again", resume=str(tmp_path / "checkpoint-2"))
    restored = prepared("mixtral", saved)
    train(restored, tmp_path / "right", resume=str(tmp_path / "checkpoint-2"), max_steps=2)
    for name, value in restored.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name  # loaded, and no step was taken


def test_torch_refuses_dense_states_of_another_home_itself(tmp_path: Path) -> None:
    train(prepared("llama", "stock"), tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match="a parameter group that doesn't match the size of optimizer's group"):
        train(prepared("llama", "kernel"), tmp_path / "again", resume=str(tmp_path / "checkpoint-2"))


# With I = H the down projection, and with H = 2I the gate and up projection, have one shape in both layouts.
@pytest.mark.parametrize(("trained", "sizes"), [("down_proj", (32, 32)), ("gate_up_proj", (32, 16))])
@pytest.mark.parametrize("saved", ["stock", "kernel"])
def test_equal_shapes_do_not_hide_another_layout(saved: str, trained: str, sizes: tuple[int, int]) -> None:
    states = {}
    for home in (saved, OTHER[saved]):
        model = patched(home, hidden_size=sizes[0], intermediate_size=sizes[1])
        params = [param for name, param in model.named_parameters() if trained in name]
        assert all(param.shape[-1] == param.shape[-2] for param in params)
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        if states:
            optimizer.load_state_dict(states["saved"])
            before = [param.clone() for param in params]
            with refused(
                UnsupportedModelError, f"optimizer state of model.layers.0.mlp.experts.{trained}", f"in {saved} layout"
            ):
                step(model, optimizer)
            assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
        else:
            step(model, optimizer)
            states["saved"] = copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("saved", ["stock", "kernel", None])
def test_columns_in_another_order_do_not_hide_another_layout(saved: str | None) -> None:
    """Experts whose gate and up alternate have one shape in both layouts, whatever the sizes are."""
    model = tiny_model("gpt_oss") if saved is None else patched(saved, "gpt_oss")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    again = patched(OTHER[saved], "gpt_oss")
    resumed = torch.optim.AdamW(again.parameters(), lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    where = "optimizer state of model.layers.0.mlp.experts.gate_up_proj"
    with refused(UnsupportedModelError, where, f"in {saved or 'stock'} layout"):
        step(again, resumed)
    same = patched(saved, "gpt_oss") if saved else again
    resumed = torch.optim.AdamW(same.parameters(), lr=1e-3)
    if saved:
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(same, resumed)


def test_the_same_home_resumes_and_stock_states_hold_nothing_foreign(tmp_path: Path) -> None:
    for home in ("stock", "kernel"):
        model = patched(home)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        torch.save(optimizer.state_dict(), tmp_path / home)
        loaded = torch.load(tmp_path / home, weights_only=True)
        marks = [GROUP_KEY in group for group in loaded["param_groups"]]
        assert marks == [home == "kernel"]
        again = torch.optim.AdamW(model.parameters())
        again.load_state_dict(loaded)
        step(model, again)
        assert again.state[model.model.layers[0].mlp.experts.down_proj]["step"] == 2


@pytest.mark.parametrize("saved", ["stock", "kernel"])
def test_weights_with_one_layout_resume_in_either_home(saved: str) -> None:
    """gpt_oss has its down projections as the kernels take them."""
    state: dict[str, Any] = {}
    for home in (saved, OTHER[saved]):
        model = patched(home, "gpt_oss")
        trained = [param for name, param in model.named_parameters() if name.endswith("experts.down_proj")]
        optimizer = torch.optim.AdamW(trained)
        if state:
            optimizer.load_state_dict(state)
        step(model, optimizer)
        assert GROUP_KEY not in optimizer.param_groups[0]
        state = copy.deepcopy(optimizer.state_dict())
    assert optimizer.state[trained[0]]["step"] == 2


def test_optimizers_without_moments_may_change_their_home() -> None:
    model, other = patched("kernel"), patched("stock")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step(model, optimizer)
    again = torch.optim.SGD(other.parameters(), lr=1e-3)
    again.load_state_dict(optimizer.state_dict())
    step(other, again)
    assert GROUP_KEY not in again.param_groups[0]


def test_moments_that_exist_before_the_first_step_are_nobodys() -> None:
    model = patched("kernel", hidden_size=32, intermediate_size=16)  # square gate_up: the shape tells nothing
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
    assert optimizer.state[model.model.layers[0].mlp.experts.gate_up_proj]["sum"].numel() == 4 * 32 * 32
    step(model, optimizer)
    assert optimizer.param_groups[0][GROUP_KEY]


def test_states_without_a_mark_are_judged_by_their_shapes() -> None:
    model = patched("kernel")  # H = 32, I = 48: no matrix is square
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group[GROUP_KEY]
    optimizer.load_state_dict(state)
    step(model, optimizer)
    assert optimizer.param_groups[0][GROUP_KEY]


def test_other_models_optimizers_are_left_alone() -> None:
    patched("kernel")
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert GROUP_KEY not in optimizer.param_groups[0]


def test_the_hook_comes_with_the_first_patch_and_goes_with_the_last() -> None:
    def ours() -> int:
        hooks = _global_optimizer_pre_hooks.values()
        return sum(hook.__module__ == "hf_neuron_moe.patching.optimizer_layout" for hook in hooks)

    first, second = tiny_model("llama"), tiny_model("mixtral")
    others = ours()  # 1 if a model of another test is still patched
    patch_model(first)
    patch_model(second, {"weights": "kernel"})
    assert ours() == 1
    pickle.dumps(first.state_dict())
    copy.deepcopy(second)
    unpatch_model(first)
    assert ours() == 1
    unpatch_model(second)
    assert ours() == others


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_resumes_from_its_originals_state(duplicate: Any) -> None:
    model = patched("kernel")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    other = duplicate(model)
    resumed = torch.optim.AdamW(other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((model, optimizer), (other, resumed)):
        step(*pair)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_optimizer_made_before_the_patch_is_refused(family: str) -> None:
    model = tiny_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patch_model(model, {"precision": "fp32", "weights": "kernel"})
    _made.append(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refused(UnsupportedModelError, "the optimizer", r"model\.layers\.0\.mlp\.(experts\.)?gate"):
        step(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    unpatch_model(_made.pop())
    step(model, optimizer)  # holds the model's parameters again


def test_frozen_weights_do_not_ask_for_a_new_optimizer() -> None:
    model = tiny_model("mixtral")
    for name, param in model.named_parameters():
        param.requires_grad_("experts" not in name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patch_model(model, {"precision": "fp32", "weights": "kernel"})
    _made.append(model)
    before = model.state_dict()["model.norm.weight"].clone()
    step(model, optimizer)
    assert not torch.equal(model.state_dict()["model.norm.weight"], before)

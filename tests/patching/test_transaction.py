"""An exception at any step of patching leaves the model exactly as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.modules import block
from hf_neuron_moe.patching import (
    api,
    apply,
    checkpoint_names,
    discovery,
    model_methods,
    optimizer_layout,
    planning,
)
from tests.tiny_models import WEIGHT_LAYOUTS, assert_same_snapshot, snapshot, tiny_model, tokens


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not: cleaning up must not depend on the class."""


STEPS: dict[str, tuple[Any, str]] = {
    "discover": (api, "discover"),
    "judge": (discovery, "_judge"),
    "probe": (discovery, "probe_experts"),
    "backend": (planning, "resolve_backend"),
    "build": (apply, "build"),
    "kernel parameter of experts and mlp": (block, "make_kernel_parameter"),
    "put in": (apply, "put_in"),
    "release": (apply, "release_layout"),
    "release one weight": (block, "stock_slot"),
    "resume hook": (checkpoint_names, "install"),
    "methods": (model_methods, "cover"),
    "methods of one model": (model_methods, "_is_covered"),
    "routing replay of one model": (model_methods, "_wrap"),
    "optimizer hook": (optimizer_layout, "watch"),
}


class FailingCall:
    """Raises at call number `at` (from 0), either before or after doing the work."""

    def __init__(self, function: Callable[..., Any], at: int, after: bool) -> None:
        self.function, self.at, self.after = function, at, after
        self.calls = 0
        self.armed = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hit = self.armed and self.calls == self.at
        self.calls += 1
        if hit:
            self.armed = False
            if self.after:
                self.function(*args, **kwargs)
            raise Interrupted
        return self.function(*args, **kwargs)


@pytest.mark.sampled(4)
@pytest.mark.thinned(3)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_anywhere_leaves_the_model_as_it_was(
    step: str, home: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2_moe")
    model(tokens()).logits.sum().backward()
    model.model.layers[0].mlp.experts.register_forward_hook(lambda module, args, out: None)
    before = snapshot(model)
    owner, name = STEPS[step]
    failures = 0
    while True:
        with monkeypatch.context() as patched:
            failing = FailingCall(getattr(owner, name), failures, after)
            patched.setattr(owner, name, failing)
            if not failing_patch(model, home):
                break
        failures += 1
        assert_same_snapshot(snapshot(model), before)
        assert model not in optimizer_layout._watched
    if home == "kernel" or not step.startswith(("kernel parameter", "release one")):
        assert failures > 0, "the step never ran"
    unpatch_model(model)
    assert_same_snapshot(snapshot(model), before)


def failing_patch(model: Any, home: str) -> bool:
    """Patch; return whether the injected failure came through."""
    try:
        patch_model(model, {"weights": home})
    except Interrupted:
        return True
    return False


def test_a_failure_while_the_state_is_attached_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    before = snapshot(model)
    monkeypatch.setattr(apply, "STATE", 3)  # object.__setattr__ raises TypeError for a name that is no string
    with pytest.raises(TypeError):
        patch_model(model, {"weights": "kernel"})
    assert_same_snapshot(snapshot(model), before)


def test_a_failure_in_inference_mode_leaves_parameters_that_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2_moe")
    before = snapshot(model)
    monkeypatch.setattr(optimizer_layout, "watch", FailingCall(optimizer_layout.watch, 0, after=False))
    with torch.inference_mode():
        assert failing_patch(model, "kernel")
    assert_same_snapshot(snapshot(model), before)
    assert not any(param.is_inference() for param in model.parameters())


def test_an_interrupted_unpatch_is_finished_by_calling_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2_moe")
    before = snapshot(model)
    patch_model(model, {"weights": "kernel"})
    with monkeypatch.context() as patched:
        patched.setattr(apply, "take_out", FailingCall(apply.take_out, 2, after=True))
        with pytest.raises(Interrupted):
            unpatch_model(model)
    unpatch_model(model)
    assert_same_snapshot(snapshot(model), before)

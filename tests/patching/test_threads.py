"""Threads that patch, unpatch or change the same model wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from hf_neuron_moe import patch_model, set_activations, set_backend, unpatch_model
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.patching import api, apply, lock
from hf_neuron_moe.patching.report import PatchReport
from hf_neuron_moe.training.prepare import patch_for_training
from tests.tiny_models import WEIGHT_LAYOUTS, assert_same_snapshot, snapshot, tiny_model

PRECISIONS = ("bf16", "fp32", "mxfp8", "bf16")


@pytest.fixture(autouse=True)
def _slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every thread stop where another one can come between."""

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            time.sleep(0.05)
            return result

        return called

    monkeypatch.setattr(api, "discover", slowly(api.discover))
    monkeypatch.setattr(apply, "put_in", slowly(apply.put_in))
    monkeypatch.setattr(apply, "take_out", slowly(apply.take_out))


def outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results, or the errors that are refusals, of calls that run at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UnsupportedModelError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def block_count(model: nn.Module) -> int:
    return sum(isinstance(module, NeuronBlock) for module in model.modules())


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_of_four_threads_with_different_options_one_patches(home: str) -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    options = [
        {"weights": home, "precision": precision, "block_size": 128 * 2**number}
        for number, precision in enumerate(PRECISIONS)
    ]
    got = outcomes([lambda each=each: patch_model(model, each) for each in options])
    reports = [each for each in got if isinstance(each, PatchReport)]
    errors = [str(each) for each in got if isinstance(each, UnsupportedModelError)]
    assert (len(reports), len(errors), block_count(model)) == (1, 3, 2)
    assert all("instead of" in error and "unpatch_model" in error for error in errors)
    assert patch_model(model, reports[0].config) is reports[0]
    assert unpatch_model(model) is reports[0]
    assert_same_snapshot(snapshot(model), before)


def test_threads_with_the_same_options_get_the_same_report() -> None:
    model = tiny_model("mixtral")
    before = snapshot(model)
    got = outcomes([lambda: patch_model(model)] * 4)
    assert all(each is got[0] for each in got) and isinstance(got[0], PatchReport)
    unpatch_model(model)
    assert_same_snapshot(snapshot(model), before)


def test_of_four_threads_one_unpatches() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    report = patch_model(model, {"weights": "kernel"})
    got = outcomes([lambda: unpatch_model(model)] * 4)
    assert sorted(each is report for each in got) == [False, False, False, True]
    assert all("Nothing needs to be undone" in str(each) for each in got if each is not report)
    assert_same_snapshot(snapshot(model), before)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "patch_model": patch_model,
    "unpatch_model": unpatch_model,
    "set_activations": lambda model: set_activations(model, "full"),
    "set_backend": lambda model: set_backend(model, "torch"),
    "patch_for_training": lambda model: patch_for_training(model, {}, None),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_waits(change: str) -> None:
    model = tiny_model("llama")
    patch_model(model)
    with ThreadPoolExecutor(1) as pool:
        with lock._lock:
            waiting = pool.submit(outcomes, [lambda: CHANGES[change](model)])
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
        assert len(waiting.result(timeout=60)) == 1

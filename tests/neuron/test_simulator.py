"""``backend="nki-sim"``: the same calls through ``nki.simulate``, on the double and, where installed, for real."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hf_neuron_moe.backends.neuron.versions import why_unavailable
from hf_neuron_moe.errors import BackendUnavailableError
from tests.neuron.small_runs import CASES, DENSE, close, run
from tests.refusals import refused

Start = Callable[..., SimpleNamespace]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_the_simulator_needs_no_plugin(name: str, machine: Start) -> None:
    case = CASES[name]
    expected = run(case, "torch", steps=2)
    double = machine(target=case.target, plugin=False).double
    with refused(BackendUnavailableError, "backend", "torch-neuronx"):
        run(case, "neuron")
    assert close(run(case, "nki-sim", steps=2), expected, case.bound)
    assert {launch.grid for launch in double.launches} == {(2,)}


def test_without_the_wheel_it_is_refused() -> None:
    with refused(BackendUnavailableError, "backend", "nki"):
        run(DENSE, "nki-sim")


@pytest.mark.simulator
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_real_simulator_gives_the_torch_backends_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    reason = why_unavailable(simulator=True)
    if reason is not None:
        pytest.skip(f"needs the real nki wheel of AWS's Neuron package index: {reason}")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", case.target)
    losses, expected = run(case, "nki-sim", steps=1), run(case, "torch", steps=1)
    # AWS accepts a cosine of 0.99 for the MXFP8 kernels and 2e-2 of the largest value for bf16; a loss averages them.
    assert close(losses, expected, 2e-2)

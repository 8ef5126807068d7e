"""Softcaps by every way to compute tanh, and memory that is oneDNN's and torch's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch import activation_rows
from hf_neuron_moe.backends.torch.compute import release_scratch
from hf_neuron_moe.backends.torch.cpu import tanh
from hf_neuron_moe.backends.torch.gating import gating_of
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad


@pytest.fixture(params=["torch", "oneDNN", "logistic"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes tanh, whatever processor this is."""
    monkeypatch.setattr(activation_rows, "tanh_is_fast", lambda: request.param == "torch")
    monkeypatch.setattr(tanh, "_is_fast", lambda: request.param == "oneDNN")
    if request.param == "oneDNN" and not tanh.shares_memory():
        pytest.skip("oneDNN's tensors are no plain memory")
    return str(request.param)


@pytest.mark.parametrize("cap", [0.5, 4.0, 25.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_softcap_is_exact_over_all_magnitudes(cap: float, rounded: bool, way: str) -> None:
    # A few roundings of fp32, relative to the value itself: small values keep their digits, large ones end at the cap.
    most = 2.0**-14 if rounded and way == "logistic" else 6e-7
    magnitudes = torch.logspace(-36, 37, 20_000, dtype=torch.float64).float()
    values = torch.cat([magnitudes, -magnitudes, torch.tensor([0.0, torch.inf, -torch.inf])])
    exact = cap * torch.tanh(values.double() / cap)
    softcap = gating_of.__wrapped__(Gate(up_softcap=cap), rounded).up_value
    error = (softcap(values).double() - exact).abs()
    assert (error <= most * exact.abs()).all()
    found = softcap(torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38]))
    assert found[0].isnan() and torch.equal(found[1:], cap * torch.tensor([1.0, -1.0, 1.0]))


def test_tanh_by_onednn_is_in_memory_of_its_own(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every size, by name, kept by its result, and of no tensor without values or in another dtype."""
    values, others = torch.linspace(-3, 3, 1001), torch.linspace(-1, 1, 1024)
    if way != "oneDNN":
        assert not tanh.takes_tanh(values)
        return
    assert tanh.takes_tanh(values) and not tanh.takes_tanh(values.double()) and not tanh.takes_tanh(values[:0])
    with FakeTensorMode():
        assert not tanh.takes_tanh(torch.empty(3))
    with torch.inference_mode():
        first, second = tanh.scaled_tanh(values, 0.5, "first"), tanh.scaled_tanh(others.view(4, 256), 2.0, "second")
    release_scratch()
    torch.testing.assert_close(first, torch.tanh(values / 2), rtol=6e-7, atol=0)
    torch.testing.assert_close(second, torch.tanh(others * 2).view(4, 256), rtol=6e-7, atol=0)
    again = tanh.scaled_tanh(values, 0.5, "first")
    assert torch.equal(again, first) and again.data_ptr() != first.data_ptr()
    assert tanh.scaled_tanh(others, 0.5, "first").data_ptr() == again.data_ptr(), "both have a room of 1024"
    large = torch.linspace(-2, 2, 3 * tanh.MOST + 5)
    torch.testing.assert_close(tanh.scaled_tanh(large, 0.5, "large"), torch.tanh(large / 2), rtol=6e-7, atol=0)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not tanh.takes_tanh(values)


class LooksAtMemory(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, Tensor):
                tensor.untyped_storage()
        return result


@pytest.mark.parametrize("setting", ["bfloat16", "float64", "meta", "mode"])
def test_defaults_of_torch_change_no_gate(setting: str, way: str) -> None:
    """What is made once is made as always, whatever is the default when it is."""
    gates = (Gate(gate_softcap=4.0, up_softcap=25.0), Gate("swish", 1.702, gate_max=0.7, up_max=0.7), Gate(act_max=0.5))
    gate_values, up_values = torch.linspace(-9, 9, 301), torch.linspace(9, -9, 301)

    def computed() -> list[Tensor]:
        release_scratch()
        tanh.shares_memory.cache_clear()
        found = []
        for gate in gates:
            gating = gating_of.__wrapped__(gate)
            act, slope = torch.empty_like(gate_values), torch.empty_like(gate_values)
            found.append(gating.intermediate_(gate_values.clone(), up_values))
            if gating.act_and_slope is not None:
                found.append(gating.act_and_slope(gate_values, act, slope)(up_values))
        return found

    expected = computed()
    dtype = getattr(torch, setting, None) if setting in ("bfloat16", "float64") else None
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or before)
        modes = {"meta": torch.device("meta"), "mode": LooksAtMemory()}
        with modes.get(setting, contextlib.nullcontext()):
            found = computed()
    finally:
        torch.set_default_dtype(before)
        release_scratch()
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected) == 5


@pytest.mark.parametrize("cap", [1e-20, 1e-6, 1e30])
def test_softcaps_of_any_size_have_the_slope_of_others(cap: float, way: str) -> None:
    gating = gating_of.__wrapped__(Gate(gate_softcap=4.0, up_softcap=cap))
    gate, up, d_int = torch.randn(3, 40), torch.randn(3, 40) * cap, torch.randn(3, 40)
    results = torch.empty(3, 3, 40)
    SwiGLUGrad(gating, False, lambda values: values).fill(
        results, d_int.clone(), gate.clone(), up.clone(), torch.empty(3, 40)
    )
    leaves = [part.double().requires_grad_() for part in (gate, up)]
    wanted = cap * torch.tanh(leaves[1] / cap) * 4 * torch.tanh(leaves[0] / 4) * torch.sigmoid(leaves[0])
    for found, exact in zip(results, torch.autograd.grad(wanted, leaves, d_int.double()), strict=False):
        torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-6 * exact.abs().max().item())


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("cap", [0.5, 4.0, 25.0])
def test_softcapped_value_and_slope_at_once_are_those_apart(cap: float, rounded: bool, way: str) -> None:
    # A few roundings to fp32, or 2**-14; the slope of large values is a difference from 1 or to 0, so absolute.
    gating = gating_of.__wrapped__(Gate(gate_softcap=cap), rounded)  # what the cache holds is of this processor
    relative, absolute = (2.0**-14, 2.0**-14) if rounded and way == "logistic" else (6e-7, 1e-6)
    assert gating.act_and_slope is not None and gating_of(Gate(gate_softcap=cap, gate_max=1.0)).act_and_slope is None
    values = torch.linspace(-40, 40, 20_001)
    act, slope, apart = (torch.empty_like(values) for _ in range(3))
    gating.act_and_slope(values, act, slope)(torch.ones_like(values))
    exact = values.double().requires_grad_()
    wanted = cap * torch.tanh(exact / cap) * torch.sigmoid(exact)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), exact)
    assert ((act - wanted).abs() <= relative * wanted.abs()).all()
    assert ((slope - wanted_slope).abs() <= absolute * max(cap, 1)).all()
    assert torch.equal(act, gating.activate_(values.clone()))
    assert torch.equal(slope, gating.slope(values, torch.ones_like(values), apart)) and torch.equal(slope, apart)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("cap", [0.7, 4.0, 25.0])
def test_what_a_softcap_holds_gets_no_gradient(cap: float, rounded: bool, way: str) -> None:
    gating = gating_of.__wrapped__(Gate(gate_softcap=cap, up_softcap=cap), rounded)
    held = torch.logspace(3, 30, 40).view(4, 10)
    results = torch.empty(3, 4, 10)
    SwiGLUGrad(gating, False, lambda values: values).fill(
        results, torch.randn(4, 10), held.clone(), -held, torch.empty(4, 10)
    )
    assert not results[:2].any()
    torch.testing.assert_close(results[2], torch.full((4, 10), -(cap**2)), rtol=1e-6, atol=0)

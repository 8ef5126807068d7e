"""``verify-device`` on chips that accumulate as documented, or have a known fault: both are recognized."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hf_neuron_moe import kernels
from hf_neuron_moe.device import device_verification, emulation
from hf_neuron_moe.reference import upstream_bugs
from tests.neuron.small_runs import EXPERTS
from tests.neuron.test_verify_device import verify_device
from tests.tiny_models import tiny_model

Start = Callable[..., SimpleNamespace]


def chip(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Let the machine's bf16 kernels compute with these options of the reference."""
    for name in ("moe_cte", "blockwise_mm_bwd"):
        monkeypatch.setattr(kernels, name, functools.partial(getattr(kernels, name), **options))


def verified(**options: Any) -> Any:
    return verify_device(EXPERTS.model(), tokens=96, block_size=256, **options)


def test_a_chip_that_accumulates_as_documented_is_judged_more_strictly(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(target="trn2")
    with monkeypatch.context() as patch:
        chip(patch, accumulation="device")
        report = verified(accumulation="device")
        assert report.ok and {tensor.verdict for tensor in report.blocks[0].tensors} == {"equal"}
        assert report.blocks[0].explanation == ""
    loose, strict = verified(), verified(accumulation="device")
    worst = min(tensor.sqnr_db for tensor in strict.blocks[0].tensors)
    assert loose.ok and worst < 60, "fp32 sums of the double are another arithmetic, which the two comparisons see"


def test_the_accumulation_explains_a_difference(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(target="trn2")
    chip(monkeypatch, accumulation="device")
    strict = device_verification.BOUNDS["bf16"]._replace(good_db=90.0)
    monkeypatch.setitem(device_verification.BOUNDS, "bf16", strict)
    report = verified()
    assert report.verdict == "close" and report.blocks[0].explanation == emulation.DEVICE_ACCUMULATION
    assert f"Its results agree with {emulation.DEVICE_ACCUMULATION}." in report.summary()
    assert json.loads(json.dumps(report.to_dict()))["blocks"][0]["explanation"] == emulation.DEVICE_ACCUMULATION


def test_a_known_fault_is_named(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """No known fault can change a call of this backend, so a made-up one stands in: output rows of another scale."""
    machine(target="trn2")
    chip(monkeypatch, accumulation="device")
    right = kernels.moe_cte

    def faulty(upstream_bugs: tuple[str, ...] = (), **call: Any) -> Any:
        result = right(**call)
        return result._replace(output=result.output * 1.5) if "made_up" in upstream_bugs else result

    made_up = functools.partial(faulty, upstream_bugs=("made_up",))
    monkeypatch.setattr(kernels, "moe_cte", made_up)
    monkeypatch.setattr(emulation, "moe_cte", faulty)
    faulty.__name__ = "moe_cte"
    monkeypatch.setattr(emulation, "known_bugs", lambda name, **_: ("made_up",) if name == "moe_cte" else ())
    monkeypatch.setitem(upstream_bugs.FORWARD, "made_up", "9.99: the output is 1.5 times as large")
    report = verified()
    assert report.verdict == "fail"
    named = "a known fault of nki-library, made_up: 9.99: the output is 1.5 times as large"
    assert report.blocks[0].explanation == named


def test_another_fault_is_not_explained(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(target="trn2")
    right = kernels.moe_cte

    def wrong(**call: Any) -> Any:
        result = right(**call)
        return result._replace(output=result.output.roll(1, 0))

    monkeypatch.setattr(kernels, "moe_cte", wrong)
    report = verified()
    assert report.verdict == "fail" and report.blocks[0].explanation == ""


def test_dense_blocks_are_not_emulated(machine: Start) -> None:
    machine(target="trn3")
    model = tiny_model("llama", num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    assert verify_device(model, tokens=32, accumulation="device").blocks[0].verdict == "equal"


def test_an_error_of_the_model_leaves_the_verdict(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(target="trn2")
    right = kernels.moe_cte
    monkeypatch.setattr(kernels, "moe_cte", lambda **call: right(**call)._replace(output=right(**call).output * 2))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(emulation, "moe_cte", fails)
    monkeypatch.setattr(fails, "__name__", "moe_cte")
    block = verified().blocks[0]
    assert (block.verdict, block.explanation) == ("fail", "")
    assert block.note == "the reference that rounds like the kernels could not be computed: out of memory"


def test_the_reference_gets_each_limit_in_its_place() -> None:
    names = ("up_clamp_upper_limit", "up_clamp_lower_limit", "gate_clamp_upper_limit", "gate_clamp_lower_limit")
    _, call = emulation.CALLS["moe_backward"](dict(zip(names, (7.0, -6.0, 5.0, -4.0), strict=True)))
    assert (call["clamp_limits"].up, call["clamp_limits"].gate) == ((7.0, -6.0), (5.0, -4.0))

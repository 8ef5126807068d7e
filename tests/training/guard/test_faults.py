"""Every injected fault is named within the one step that it is in, with block and product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch import compute, saved
from hf_neuron_moe.training.blocks import patched_blocks
from hf_neuron_moe.training.guard.bands import LEARNED, Bands
from hf_neuron_moe.training.guard.watch import StepLooked, Watch
from tests.tiny_models import tiny_model, tokens
from tests.training.guard.faults import DENSE, EXPERTS, FAULTS, Fault, injected

FAST = {"one row lost", "carry lost over tiles of rows", "dropped expert", "gradient of the wrong expert"}


class Watched:
    """A tiny model and the bands that it has after some steps."""

    def __init__(self, family: str, precision: str, activations: str | None = None) -> None:
        self.model: nn.Module = tiny_model(family)
        activations = activations or ("full" if precision == "mxfp8" else "minimal")
        patch_model(self.model, {"precision": precision, "activations": activations, "block_size": 128})
        self.watch, self.steps = Watch(self.model, Bands()), 0
        for _ in range(LEARNED):
            looked = self.step()
            assert not looked.alarms, looked.alarms[0]
            self.watch.bands.learn(looked.blocks)
        self.name, self.block = list(patched_blocks(self.model).items())[1]

    def step(self) -> StepLooked:
        self.steps += 1
        self.watch.begin(self.steps)
        ids = tokens(6, 56, seed=self.steps)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.watch.pause()
        self.model.zero_grad()
        assert self.watch.looked is not None
        return self.watch.looked


@pytest.fixture(scope="module")
def watched() -> Any:
    made: dict[tuple[str, str], Watched] = {}

    def get(family: str, precision: str) -> Watched:
        if (family, precision) not in made:
            made[family, precision] = Watched(family, precision)
        return made[family, precision]

    return get


def cases() -> list[Any]:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    return [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in FAST else pytest.mark.slow) for fault in FAULTS
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", cases())
def test_a_fault_is_named_in_its_step(fault: Fault, watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "bf16_matmul_is_fast", lambda *_: False)  # the same kernels on every processor
    run: Watched = watched(fault.family, fault.precision)
    with injected(fault, run.block):
        looked = run.step()
    assert looked.alarms
    first = looked.alarms[0]
    assert (first["block"], first["product"], first["operand"]) == (run.name, fault.product, fault.operand)
    assert first["step"] == run.steps
    if fault.family == DENSE:
        assert first["expert"] == -1
    if fault.expert is not None:
        assert first["expert"] == fault.expert


def _rolled(put: Any) -> Any:
    def broken(rows: saved.FP8Rows, part: slice, columns: slice, values: Tensor) -> Tensor:
        put(rows, part, columns, values.roll(1, 0))
        return values.to(torch.bfloat16)  # which the forward goes on with

    return broken


def _of_other_limits(put: Any) -> Any:
    return lambda rows, *place: put(replace(rows, limits=(0.5, -0.5)), *place)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "family"),
    [
        *(("bf16", EXPERTS), ("mxfp8", DENSE)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bf16", DENSE), ("mxfp8", EXPERTS))),
    ],
)
def test_faults_of_activations_saved_in_fp8_are_named(
    family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "bf16_matmul_is_fast", lambda *_: False)
    run = Watched(family, precision, "fp8")
    for broken, figure in ((_rolled, "worst"), (_of_other_limits, "nonfinite")):
        with monkeypatch.context() as context:
            context.setattr(saved.FP8Rows, "put", broken(saved.FP8Rows.put))
            first = run.step().alarms[0]
        assert (first["block"], first["product"]) == (next(iter(run.watch.blocks)), "gate_up")
        assert first["figure"] == figure and first["result"] in ("gate", "up")
    with monkeypatch.context() as context:
        context.setattr(saved, "_round_groups_", lambda values: values)
        alarms = run.step().alarms
    found = {(alarm["product"], alarm["result"]) for alarm in alarms if alarm["figure"] == "rounding"}
    # The gradients of routing weights read the activation too, so that of experts what is before them is blamed.
    assert {("down.dw", "down"), ("gate" if family == DENSE else "down.dx", "dx")} <= found
    assert not run.step().alarms


def test_what_was_broken_is_whole_again(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "bf16_matmul_is_fast", lambda *_: False)
    assert watched(DENSE, "bf16").step().alarms == []

"""The second computation is what the backend computes, bands hold what they learned, and files stay small."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch import compute
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.training.guard.bands import LEARNED, Bands, Limits
from hf_neuron_moe.training.guard.findings import Evidence, Finding, operand
from hf_neuron_moe.training.guard.guard import described, first_of_all, merged
from hf_neuron_moe.training.guard.reproduction import Reproduction
from hf_neuron_moe.training.guard.second import Product
from hf_neuron_moe.training.guard.watch import StepLooked, Watch, blamed
from tests.tiny_models import tiny_model, tokens


@pytest.mark.sampled(4)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("family", ["llama_biased", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize(
    ("precision", "activations", "most"),
    [
        ("bf16", "full", 8e-3),
        ("mxfp8", "full", 8e-3),
        ("fp32", "full", 1e-5),
        ("bf16", "fp8", 8e-3),
        ("mxfp8", "fp8", 8e-3),
    ],
)
def test_healthy_results_are_those_of_float64(
    precision: str, activations: str, most: float, family: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of experts in bf16 round each part, which is what the bounds of bf16 and mxfp8 are."""
    monkeypatch.setattr(compute, "bf16_matmul_is_fast", lambda *_: native)
    model = tiny_model(family)
    patch_model(model, {"precision": precision, "activations": activations, "block_size": 128})
    watch, ids = Watch(model, Bands()), tokens(4, 40, seed=1)
    watch.begin(1)
    model(input_ids=ids, labels=ids).loss.backward()
    watch.detach()
    assert watch.looked is not None and len(watch.looked.blocks) == 2
    assert watch.looked.alarms == []
    for products in watch.looked.blocks.values():
        assert {"gate_up", "down", "down.dx", "gate_up.dx", "down.dw", "gate_up.dw"} <= products.keys()
        for measured in products.values():
            for figures in measured.values():
                assert figures.get("worst", 0.0) <= most and figures["nonfinite"] == 0


def test_a_band_is_learned_and_widened() -> None:
    bands = Bands()
    key = ("b", "gate_up", "activations")
    figures: dict[str, Any] = {"sqnr_db": 30.0, "amax": 2.0, "rms": 1.0, "flushed": 0.0, "rounding": 1e-4}

    def learn(changed: dict[str, Any]) -> None:
        bands.learn({key[0]: {key[1]: {key[2]: figures | changed}}})

    def limits(figure: str) -> Limits:
        return bands.limits((*key, figure), "bf16")

    for _ in range(LEARNED - 1):
        learn({})
    assert limits("sqnr_db") == limits("amax") == Limits(None, None)
    assert limits("rounding") == Limits(None, 2e-2)
    learn({"amax": math.nan, "sqnr_db": math.inf, "rms": 0.0})  # none of which teaches anything
    assert limits("amax") == limits("sqnr_db") == limits("rms") == Limits(None, None)
    assert limits("rounding") == Limits(None, pytest.approx(6e-4))
    learn({})
    assert limits("sqnr_db") == Limits(22.0, None)
    assert limits("amax") == Limits(2.0 / 64, 128.0)
    assert limits("flushed") == Limits(None, 0.25)
    assert limits("nonfinite") == Limits(None, 0.0)
    learn({"amax": 32.0, "sqnr_db": 26.0})
    assert limits("amax") == Limits(2.0 / 64, 2048.0) and limits("sqnr_db") == Limits(18.0, None)
    learn({"rounding": 1.5e-2})
    assert limits("rounding") == Limits(None, 2e-2), "what is wrong however long it lasts"
    assert not limits("amax").hold(2049.0) and not limits("amax").hold(0.0) and not limits("amax").hold(math.nan)


def test_a_collapsed_expert_and_a_wrong_value_are_seen_in_an_operand() -> None:
    weights = torch.randn(4, 8, 128)
    weights[2] = 0
    assert (operand("down", "weights", weights).expert, operand("down", "weights", weights).figures["rms"]) == (2, 0.0)
    weights[3, 1, 5] = torch.inf
    found = operand("down", "weights", weights)
    assert (found.expert, found.figures["nonfinite"]) == (3, 1.0)
    assert found.evidence is not None
    assert torch.equal(found.evidence().observed_RC[0], weights[3, 1])


def test_what_is_before_both_projections_is_blamed() -> None:
    def names(results: list[tuple[str, str]], routed: bool) -> list[str]:
        wrong = [(Finding(product, name, {}), "worst", None, None) for product, name in results]
        return [product for *_, product in blamed(wrong, routed=routed)]

    dx, gate, up = ("gate_up.dx", "dx"), ("gate_up.dw", "gate"), ("gate_up.dw", "up")
    assert names([dx], False) == ["gate_up.dx"]
    assert names([gate, up], False) == ["gate_up.dw", "gate_up.dw"]
    assert names([dx, gate, up], False) == ["down.dx"]
    assert names([dx, gate], False) == ["gate"]
    assert names([dx, gate, up], True) == ["gate"]
    assert names([("down.dx", "routing"), dx, gate, up], True) == ["down.dx", "down.dx"]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_file_holds_the_worst_columns_in_a_megabyte(precision: str, tmp_path: Path) -> None:
    left, right = torch.randn(1, 6000), torch.randn(2000, 6000)
    product = Product([left], [right], precision)
    observed = product.value()
    observed[0, 1234] += 100
    alarm = {"step": 3, "block": "b", "product": "down", "operand": "result", "result": "y", "expert": 1}
    alarm |= {"figure": "worst", "value": 0.3, "low": None, "high": 0.08}
    path = tmp_path / "guard_step3.safetensors"
    Reproduction.of(alarm, Evidence(observed, product)).save(path, seed=5)
    assert 100_000 < path.stat().st_size <= 1_000_000
    found = Reproduction.load(path)
    assert found.product is not None
    difference = found.observed_RC - found.product.value()
    assert float(difference.abs().max()) == pytest.approx(100) and int((difference.abs() > 1e-6).sum()) == 1
    Reproduction.of(alarm, Evidence(torch.randn(8, 1_000_000))).save(path, seed=5)
    assert path.stat().st_size <= 1_000_000


def test_processes_share_their_worst_figures_and_first_alarms() -> None:
    one = {"b": {"down": {"y": {"amax": 1.0, "sqnr_db": 30.0, "worst": 0.1}}}}
    two = {"b": {"down": {"y": {"amax": 3.0, "sqnr_db": 20.0, "worst": math.nan}}}}
    assert merged([one, two]) == {"b": {"down": {"y": {"amax": 3.0, "sqnr_db": 20.0, "worst": 0.1}}}}
    assert [each["n"] for each in first_of_all([[{"n": 1}, {"n": 3}], [{"n": 2}], []])] == [1, 2, 3]
    alarm = {"step": 9, "block": "b", "product": "down", "result": None, "operand": "weights", "expert": 4}
    alarm |= {"figure": "rms", "value": 0.0, "low": 0.5, "high": 9.0}
    text = "rms 0, expected at least 0.5 and at most 9, in the operand weights of expert 4 of down in b, step 9"
    assert described(alarm, 1) == text
    assert described(alarm | {"process": 0}, 1) == text and described(alarm | {"process": 2}, 1) == f"{text}, process 2"


def experts_watched() -> tuple[Watch, Any]:
    model = tiny_model("mixtral")
    patch_model(model, {"precision": "bf16"})
    return Watch(model, Bands()), model.model.layers[0].mlp.experts


def looked_at(watch: Watch, block: Any, index_TK: Tensor, weight_TK: Tensor, step: int = 1) -> StepLooked:
    """Look at one call of experts."""
    watch.begin(step)
    x_TH = torch.randn(len(index_TK), 32, generator=torch.Generator().manual_seed(step), requires_grad=True)
    block(x_TH, index_TK, weight_TK).sum().backward()
    watch.pause()
    assert watch.looked is not None and watch.looked.blocks
    return watch.looked


def figures_of(looked: StepLooked) -> set[str]:
    """Return which figures there are, but those of weights."""
    measured = [each for products in looked.blocks.values() for each in products.values()]
    return {figure for each in measured for name, figures in each.items() if name != "weights" for figure in figures}


def test_rows_of_other_processes_experts_are_left_out() -> None:
    """Pairs with ids from E on have rows in what is saved, which nobody writes."""
    watch, block = experts_watched()
    index = torch.tensor([[0, 5], [4, 1], [6, 7], [2, 0]])
    with patch.object(TorchBackend, "experts_forward", spoiled(TorchBackend.experts_forward, rows=4)):
        looked = looked_at(watch, block, index, torch.full((4, 2), 0.5))
    assert looked.alarms == []
    # Of a few rows no magnitude is judged, but that of weights, which no row changes.
    assert figures_of(looked) == {"nonfinite", "worst", "rounding", "largest_weight"}
    (products,) = looked.blocks.values()
    assert products["down"]["weights"].keys() == {"nonfinite", "amax", "rms", "sqnr_db", "flushed"}


EVERY_EXPERT = torch.arange(128).reshape(64, 2) % 4


def learned(weight_TK: Tensor) -> tuple[Watch, Any]:
    """Return the experts of a process after the steps in which bands are learned."""
    watch, block = experts_watched()
    for step in range(LEARNED):
        looked = looked_at(watch, block, EVERY_EXPERT, weight_TK, step)
        assert looked.alarms == [] and "amax" in figures_of(looked)
        watch.bands.learn(looked.blocks)
    return watch, block


@pytest.mark.parametrize("heavy", [0, 1, 15])
def test_rows_of_no_weight_are_not_counted(heavy: int) -> None:
    """A router that is sure of other processes' experts sends rows of 1e-6, and perhaps a few that it means."""
    watch, block = learned(torch.full((64, 2), 0.5))
    weight_TK = torch.full((128,), 1e-6)
    weight_TK[:heavy] = 0.5
    looked = looked_at(watch, block, EVERY_EXPERT, weight_TK.reshape(64, 2), LEARNED)
    assert looked.alarms == [] and "amax" not in figures_of(looked)


def test_bands_do_not_depend_on_the_routing_weights_of_sampled_rows() -> None:
    """The first rows of an expert are looked at, and their weights may all be next to nothing."""
    watch, block = learned(torch.full((64, 2), 0.5))
    weight_TK = torch.full((64, 2), 1e-6)
    weight_TK[32:] = 0.5
    looked = looked_at(watch, block, EVERY_EXPERT, weight_TK, LEARNED)
    assert looked.alarms == [] and "amax" in figures_of(looked)


def test_a_collapsed_activation_of_many_rows_is_an_alarm() -> None:
    watch, block = learned(torch.full((64, 2), 0.5))
    with torch.no_grad():
        block.gate_up_proj.mul_(1e-3)
    alarms = looked_at(watch, block, EVERY_EXPERT, torch.full((64, 2), 0.5), LEARNED).alarms
    assert ("down", "activations", "amax") in {(each["product"], each["operand"], each["figure"]) for each in alarms}


def test_a_weight_that_is_not_a_number_is_seen_in_the_operand() -> None:
    watch, block = experts_watched()
    weight_TK = torch.full((64, 2), 0.5)
    weight_TK[0, 1] = math.nan
    first = looked_at(watch, block, EVERY_EXPERT, weight_TK).alarms[0]
    assert (first["product"], first["operand"], first["figure"]) == ("down", "activations", "nonfinite")


def spoiled(real: Any, rows: int) -> Any:
    def forward(*args: Any) -> Any:
        out, saved = real(*args)
        saved[0][rows:], saved[1][rows:] = torch.nan, torch.inf
        return out, saved

    return forward

"""Verdicts of verify-device and figures of the roofline, from numbers made for them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hf_neuron_moe.device.device_report import BlockResult, DeviceReport
from hf_neuron_moe.device.kernel_support import BlockGroup
from hf_neuron_moe.device.roofline import Step, TorchBlock, roofline
from hf_neuron_moe.device.roofline_math import Chip, GPUBlock, chip_of, floor_of
from hf_neuron_moe.device.tolerances import BOUNDS, compare


@pytest.mark.parametrize(("share", "verdict"), [(0.01, "pass"), (0.03, "close")])
def test_one_value_far_off_is_not_explained_by_a_good_ratio(share: float, verdict: str) -> None:
    expected = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[7, 9] += share * expected.abs().max()
    result = compare("output", found, expected, BOUNDS["bf16"])
    assert result.sqnr_db is not None and result.sqnr_db > BOUNDS["bf16"].good_db
    assert result.verdict == verdict


@pytest.mark.parametrize(
    ("tokens", "fault", "words"),
    [
        ([2], "part", "token 2 of 8 off, the others agree"),
        ([7], "last row", "token 7 of 8 off, the others agree (the last row)"),
        ([0, 1, 2, 3], "part", "tokens 0 to 3 of 8 off, the others agree"),
        ([0, 2, 5], "part", "tokens 0, 2, 5 of 8 off, the others agree"),
        ([0, 1, 2, 3, 5], "other function", "below 24 dB everywhere: another function or another layout"),
    ],
)
def test_a_part_that_is_wrong_is_at_most_half(tokens: list[int], fault: str, words: str) -> None:
    expected = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[tokens] = found[tokens].roll(1, 1)
    result = compare("output", found, expected, BOUNDS["bf16"])
    assert (result.verdict, result.fault, result.note) == ("fail", fault, words)


def test_values_that_are_not_finite_are_counted_and_placed() -> None:
    expected = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[::2, 3] = torch.inf
    note = "8 of 128 values not finite: tokens 0, 2, 4, 6 and 4 more"
    assert compare("output", found, expected, BOUNDS["bf16"]).note == note
    note = "1 of 8 values not finite: token 0"
    assert compare("output", found[:1], expected[:1], BOUNDS["bf16"]).note == note


@pytest.mark.parametrize(("rows", "fault"), [(8, ""), (512, "scaled")])
def test_a_factor_counts_when_so_few_values_cannot_have_it_by_chance(rows: int, fault: str) -> None:
    expected = torch.tensor([1.0, -1.0]).repeat(rows, 4)
    noise = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(rows, 2)
    result = compare("output", 1.008 * expected + 0.03 * noise, expected, BOUNDS["mxfp8"])
    assert result.fault == fault


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["pass", "error"], "fail"),
        (["error"], "fail"),
        (["pass", "fail"], "fail"),
        (["equal", "close"], "close"),
        (["equal", "not run"], "pass"),
        (["not run"], "not run"),
    ],
)
def test_the_worst_block_that_ran_decides(verdicts: list[str], whole: str) -> None:
    blocks = tuple(BlockResult(f"layers.{index}.mlp", "mlp", verdict) for index, verdict in enumerate(verdicts))
    report = DeviceReport("neuron", "cpu", "trn3", 2, "mxfp8", 128, 128, 0, "random", blocks)
    assert report.verdict == whole
    assert report.ok == (whole == "pass")


def test_the_time_of_a_step_is_that_of_its_passes_one_after_the_other() -> None:
    """Of a chip whose forward waits for the memory, and whose backward multiplies for longer."""
    block, step, keep = GPUBlock("mlp", "bf16", 1024, 4096, 512), Step(256), "gate_pre+up"
    one = floor_of(block, Chip("x", {"bf16": 1.0}, 1.0, 1), replace(step, trained=False), keep)
    both = floor_of(block, Chip("x", {"bf16": 1.0}, 1.0, 1), replace(step, trained=False, checkpointing=True), keep)
    forward = both.padded_flops - one.padded_flops, both.bytes - one.bytes
    backward = one.padded_flops - forward[0], one.bytes - forward[1]
    low, high = sorted((forward[0] / forward[1], backward[0] / backward[1]))
    assert low < high
    chip = Chip("x", {"bf16": math.sqrt(low * high)}, 1.0, 1)
    passes = [max(flops / chip.flops["bf16"], values) for flops, values in (forward, backward)]
    found = floor_of(block, chip, replace(step, trained=False), keep)
    assert found.seconds == pytest.approx(sum(passes)) and found.seconds > max(
        found.compute_seconds, found.memory_seconds
    )


def test_a_token_has_no_more_experts_than_there_are() -> None:
    few, many = (
        roofline([BlockGroup("experts", ("mlp",), 4, top_k, 1024, 512, None)], "trn2", "bf16", Step(1024)).groups[0]
        for top_k in (4, 8)
    )
    assert few.flops == many.flops > 0
    for kind in (TorchBlock, GPUBlock):
        block = kind("experts", "bf16", 1024, 512, 512)
        floors = {floor_of(block, chip_of("trn2"), Step(1024), "gate_pre+up", top_k, 4) for top_k in (4, 8)}
        assert len(floors) == 1

"""Verdicts of verify-device and figures of the roofline, from numbers made for them."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.device.device_report import BlockResult, DeviceReport
from hf_neuron_moe.device.kernel_support import BlockGroup
from hf_neuron_moe.device.roofline import Step, roofline
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


def test_a_token_has_no_more_experts_than_there_are() -> None:
    few, many = (
        roofline([BlockGroup("experts", ("mlp",), 4, top_k, 1024, 512, None)], "trn2", "bf16", Step(1024)).groups[0]
        for top_k in (4, 8)
    )
    assert few.flops == many.flops > 0

"""``verify-device`` on machines whose kernels are slightly wrong: what is wrong is named, and where.

Letters: T tokens, E experts, B slots of a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.device.device_report import BlockResult, DeviceReport
from hf_neuron_moe.device.tolerances import BOUNDS, compare
from tests.neuron.double import mlp, moe_backward, moe_forward
from tests.neuron.double.memory import KernelTensor
from tests.neuron.small_runs import DENSE, EXPERTS
from tests.neuron.test_verify_device import run_command, verify_device

Start = Callable[..., SimpleNamespace]
Change = Callable[[list[Tensor]], None]
TOKENS = 48


def change_results(monkeypatch: pytest.MonkeyPatch, module: Any, function: str, change: Change) -> None:
    """Let a kernel of the double return something else."""
    right = getattr(module, function)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        change([tensor.data for tensor in (result if isinstance(result, tuple) else (result,))])
        return result

    monkeypatch.setattr(module, function, wrong)


def drop_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward computes the first block of tokens on nothing."""
    right = moe_forward._compute

    def wrong(call: dict[str, Any], where: str) -> Any:
        ids: KernelTensor = call["token_position_to_id"]
        values = ids.data.clone()
        values[: call["block_size"]] = TOKENS
        return right(call | {"token_position_to_id": KernelTensor(values, ids.dtype, ids.buffer)}, where)

    monkeypatch.setattr(moe_forward, "_compute", wrong)


def scale(factor: float, index: int = 0) -> Change:
    def change(results: list[Tensor]) -> None:
        results[index].mul_(factor)

    return change


def fill(value: float, index: int, rows: slice) -> Change:
    def change(results: list[Tensor]) -> None:
        results[index][rows].fill_(value)

    return change


FORWARD, BACKWARD = (moe_forward, "_device_result"), (moe_backward, "_result")
WRONG: dict[str, tuple[Any, Change, str, str, str]] = {
    # kernel, change, tensor, fault, what is told
    "scaled by 1 %": (FORWARD, scale(1.01), "output", "scaled", "1.01 times the reference"),
    "a gradient scaled by 1 %": (BACKWARD, scale(0.99, 3), "grad down_proj", "scaled", "0.99"),
    "NaN in rows that nothing wrote": (
        FORWARD,
        fill(math.nan, 0, slice(5, 8)),
        "output",
        "not finite",
        "1536 of 24576 values not finite: tokens 5 to 7",
    ),
    "NaN in an expert's gradient": (
        BACKWARD,
        fill(math.nan, 2, slice(1, 2)),
        "grad gate_up_proj",
        "not finite",
        "expert 1",
    ),
    "row T lost": (BACKWARD, fill(0.0, 0, slice(TOKENS - 1, TOKENS)), "grad input", "last row", "token 47 of 48 zero"),
    "rows not written": (
        FORWARD,
        fill(0.0, 0, slice(16, 24)),
        "output",
        "part",
        "nothing was written: tokens 16 to 23",
    ),
    "an expert dropped": (BACKWARD, fill(0.0, 3, slice(2, 3)), "grad down_proj", "part", "expert 2 of 4 zero"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRONG)
def test_a_slightly_wrong_kernel_is_named(name: str, machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    (module, function), change, tensor, fault, note = WRONG[name]
    machine(target=EXPERTS.target)
    change_results(monkeypatch, module, function, change)
    report = verify_device(EXPERTS.model(), tokens=TOKENS, block_size=EXPERTS.block_size)
    first = report.blocks[0].first_off
    assert first is not None and (first.name, first.verdict, first.fault) == (tensor, "fail", fault), report.blocks
    assert note in first.note
    assert (report.ok, report.verdict) == (False, "fail")
    summary = report.summary()
    assert "WRONG" in summary and f"First: model.layers.0.mlp.experts: {tensor} fail" in summary
    assert "Looks like: " in summary and "do not train with these kernels" in summary
    off = {result.name for result in report.blocks[0].tensors if result.verdict == "fail"}
    assert off == {tensor}, "the others stay good"


def test_a_dropped_block_of_tokens_is_named(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many blocks: overall the noise is small, and for the tokens in it large."""
    machine(target=EXPERTS.target)
    drop_first_block(monkeypatch)
    report = verify_device(EXPERTS.model(num_local_experts=16), tokens=TOKENS, block_size=256)
    output = report.blocks[0].tensors[0]
    assert (output.name, output.verdict, output.fault) == ("output", "fail", "part")
    assert output.note.startswith("tokens ") and "of 48 off, the others agree" in output.note
    assert "blocks of tokens or experts that were dropped" in report.summary()


def test_a_scaled_dense_kernel_is_named_although_its_noise_is_low(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_results(monkeypatch, mlp, "forward", scale(1.01))
    machine(target=DENSE.target)
    report = verify_device(DENSE.model(layers=2), tokens=TOKENS)
    output = report.blocks[0].tensors[0]
    assert output.sqnr_db is not None and output.sqnr_db > BOUNDS["mxfp8"].good_db
    assert (output.verdict, output.fault) == ("fail", "scaled")
    assert report.first_off is report.blocks[0]


def noise(level_db: float) -> Change:
    def change(results: list[Tensor]) -> None:
        generator = torch.Generator().manual_seed(4)
        relative = torch.randn(results[0].shape, generator=generator) * 10 ** (-level_db / 20)
        results[0].mul_(1 + relative)

    return change


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("level_db", "code"), [(30.0, 7), (18.0, 6)])
def test_close_is_not_fine(
    level_db: float, code: int, machine: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """More noise than rounding makes has its own exit code, and the summary does not call it right."""
    EXPERTS.model(layers=2).save_pretrained(tmp_path)
    machine(target=EXPERTS.target)
    change_results(monkeypatch, *FORWARD, noise(level_db))
    options = [tmp_path, "--tokens", TOKENS, "--block-size", 256]
    found, out, _ = run_command(monkeypatch, capsys, *options)
    assert found == code
    assert "compute what PyTorch does, up to rounding" not in out
    assert "First: model.layers.0.mlp.experts: output" in out and "Next: " in out
    found, out, _ = run_command(monkeypatch, capsys, *options, "--json")
    shown = json.loads(out)
    assert found == code and shown["ok"] is False
    assert shown["verdict"] == ("close" if code == 7 else "fail")
    assert shown["first_off"]["name"] == "model.layers.0.mlp.experts" and shown["advice"]
    assert shown["bounds"]["bf16"]["good_db"] == BOUNDS["bf16"].good_db
    assert ("NOT CONFIRMED" in shown["meaning"]) == (code == 7)


def report_of(*verdicts: str) -> DeviceReport:
    blocks = tuple(BlockResult(f"layers.{number}", "mlp", verdict) for number, verdict in enumerate(verdicts))
    return DeviceReport("neuron", "neuron:0", "trn3", 2, "mxfp8", 8, 512, 0, "random", blocks)


@pytest.mark.parametrize(
    ("verdicts", "whole", "first"),
    [
        (("equal", "pass"), "pass", None),
        (("pass", "not run"), "pass", None),
        (("not run", "not run"), "not run", None),
        (("pass", "close", "equal"), "close", 1),
        (("pass", "close", "fail"), "fail", 1),
        (("error", "not run"), "fail", 0),
    ],
)
def test_the_worst_block_decides(verdicts: tuple[str, ...], whole: str, first: int | None) -> None:
    report = report_of(*verdicts)
    assert (report.verdict, report.ok) == (whole, whole == "pass")
    assert report.first_off is (None if first is None else report.blocks[first])
    assert f"{verdicts.count(verdicts[0])} {verdicts[0]}" in report.summary()
    assert report.advice and report.summary().endswith(report.advice[-1])


def decibels(found: Tensor, expected: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))


def test_the_bounds_are_what_the_documented_roundings_leave() -> None:
    """One bf16 rounding, and one MX quantization of values that are all off by one step of bf16."""
    from hf_neuron_moe.formats.mx import fake_quantize_mx

    values = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    rounded = values.bfloat16()
    # Sums of hundredths: 55.6 dB for one rounding is 36 dB for a hundred of them.
    assert decibels(rounded.float(), values) - 20 == pytest.approx(BOUNDS["bf16"].good_db, abs=0.5)
    up = torch.rand(values.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    steps = torch.where(up, 1, -1).to(torch.int16)
    neighbours = (rounded.view(torch.int16) + steps).view(torch.bfloat16)
    requantized = [fake_quantize_mx(tensor) for tensor in (neighbours, rounded)]
    one_stage = decibels(*(tensor.float() for tensor in requantized))
    assert one_stage - 3 == pytest.approx(BOUNDS["mxfp8"].good_db, abs=1.0)


def test_where_a_difference_is_is_found_along_every_axis() -> None:
    expected = torch.randn(3, 64, 40, generator=torch.Generator().manual_seed(3))
    for index, note in (
        ((slice(None), slice(None), slice(30, 40)), "columns 30 to 39 of 40"),
        ((slice(None), 7), "row 7 of 64"),
        ((2,), "expert 2 of 3"),
    ):
        found = expected.clone()
        found[index] *= -1
        result = compare("grad gate_up_proj", found, expected, BOUNDS["mxfp8"])
        assert (result.verdict, result.fault) == ("fail", "part") and note in result.note
    assert compare("output", expected[0].double(), expected[0], BOUNDS["bf16"]).verdict == "equal"
    broken = torch.full((2, 3), torch.inf)
    assert "reference itself" in compare("output", torch.ones(2, 3), broken, BOUNDS["bf16"]).note

"""The first run of every kernel: each way in which one can fail is told apart, on the mock."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hf_neuron_moe.backends.neuron.versions import LNC_VARIABLE
from hf_neuron_moe.cli.main import main
from hf_neuron_moe.device import smoke
from hf_neuron_moe.device.smoke import CASES, NEFF_CACHE, Ended, KernelResult, SmokeReport, run_smoke
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError
from tests.neuron.double.faults import HungError
from tests.refusals import refused

Start = Callable[..., SimpleNamespace]
HERE = {"experts-bf16": "trn2", "mlp-mxfp8": "trn3", "experts-mxfp8": "trn3"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented sizes take the mock seconds."""
    monkeypatch.setitem(CASES, "experts-bf16", replace(CASES["experts-bf16"], inner=64, experts=(4,)))
    monkeypatch.setattr("hf_neuron_moe.device.installed.device_count", lambda: 4)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in this process, where the mock is: what they raise ends them."""
    from hf_neuron_moe.device import smoke_worker

    def run(job: dict[str, Any], caches: Path, timeout: float) -> Ended:
        printed, code = io.StringIO("Compiler status PASS\n"), 0
        with mock.patch.dict("os.environ", {NEFF_CACHE: str(caches / "neff")}), redirect_stdout(printed):
            try:
                smoke_worker.run(**job)
            except HungError:
                code = None
            except BaseException:  # noqa: BLE001 - as Python itself ends a process
                code = 1
                print(traceback.format_exc())
        return Ended(code, printed.getvalue())

    monkeypatch.setattr(smoke, "run_worker", run)


def results(case: str, **options: Any) -> tuple[KernelResult, ...]:
    return run_smoke(device="cpu", cases=[case], **options).kernels


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("case", HERE)
def test_kernels_that_work_pass_every_stage(case: str, machine: Start) -> None:
    double = machine(target=HERE[case]).double
    for result in results(case):
        assert result.verdict in ("equal", "pass") and result.stages == smoke.STAGES, result
        assert result.stopped_at is None and result.fallback_ops == [], "what was before does not count"
        assert result.run_seconds > 0
        assert f"{result.need} ({case}): {result.verdict}; compiled in" in result.summary
    forward, backward = (result.tensors for result in results(case))
    assert [tensor["name"] for tensor in forward] == ["output"]
    experts = bool(CASES[case].experts)
    assert [tensor["name"] for tensor in backward] == list(smoke.GRADIENTS[experts])
    # Both kernels on fakes and twice on values, in both runs.
    assert len(double.traced) == 4 and len(double.calls) == 8


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    "case", ["frozen-mlp", "frozen-experts", pytest.param("frozen-experts-wide", marks=pytest.mark.slow)]
)
def test_frozen_kernels(case: str, machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.endswith("wide"):
        monkeypatch.setitem(CASES, case, replace(CASES[case], tokens=8))
    double = machine(target="trn3").double
    (result,) = results(case)
    assert result.verdict in ("equal", "pass") and result.stages == smoke.STAGES, result
    assert len(double.calls) == 2


FORWARD, BACKWARD = "blockwise_mm_fwd_mxfp8", "blockwise_mm_bwd_mxfp8"
OUTCOMES: dict[str, tuple[str, str | None, tuple[str, ...], str]] = {
    # fault: verdict, stage at which it stopped, stages that it passed, words of the note
    "trace": ("error", "traced", (), "unexpected keyword argument 'mask'"),
    "compile": ("error", "compiled", ("traced",), "NCC_EVRF066"),
    "run": ("error", "ran", ("traced", "compiled"), "NRT_EXEC"),
    "unclear": ("error", "ran", ("traced", "compiled"), "unknown status"),
    "hang": ("hangs", "ran", ("traced", "compiled"), ""),
    "wrong": ("fail", None, ("traced", "compiled", "ran"), "times the reference"),
    "close": ("close", None, ("traced", "compiled", "ran"), "more than rounding explains"),
    "fake": ("equal", None, ("compiled", "ran", "agrees"), "not traced on fake tensors"),
}


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("in_process")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("fault", OUTCOMES)
@pytest.mark.parametrize("function", [FORWARD, BACKWARD])
def test_each_fault_is_told_apart(function: str, fault: str, machine: Start) -> None:
    verdict, stage, stages, words = OUTCOMES[fault]
    machine(target="trn3", faults={function: fault})
    forward, backward = results("experts-mxfp8")
    found, other = (forward, backward) if function == FORWARD else (backward, forward)
    assert (found.verdict, found.stopped_at, found.stages) == (verdict, stage, stages), found
    assert words in found.note and words in found.summary
    if stage is not None:
        assert found.output and not found.compile_seconds
    if stage is not None and function == FORWARD:
        assert other.verdict == "not run" and "moe_forward_mxfp8 did not" in other.note
    else:
        assert other.verdict == "equal"


@pytest.mark.usefixtures("in_process")
def test_what_ran_on_the_cpu_is_listed(machine: Start) -> None:
    machine(target="trn3", fallback=("aten::sort", "aten::cumsum", "aten::sort"))
    assert [result.fallback_ops for result in results("mlp-mxfp8")] == [["aten::cumsum", "aten::sort"]] * 2


@pytest.mark.usefixtures("in_process")
def test_kernels_of_another_chip_are_not_run(machine: Start) -> None:
    machine(target="trn2")
    report = run_smoke(device="cpu", cases=["mlp-mxfp8", "frozen-experts"])
    assert {result.verdict for result in report.kernels} == {"not run"} and report.verdict == "not run"
    assert "Trn3 only, and this is trn2" in report.kernels[0].summary


def command(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["hf-neuron-moe", "smoke", *map(str, arguments)])
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("fault", "code", "verdict"), [("", 0, "pass"), ("close", 7, "close"), ("wrong", 6, "fail"), ("run", 6, "fail")]
)
def test_the_command_ends_as_the_worst_kernel(
    fault: str, code: int, verdict: str, machine: Start, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    machine(target="trn3", faults={FORWARD: fault} if fault else {}, fallback=("aten::sort",))
    options = ["--device", "cpu", "--case", "experts-mxfp8", "--output", tmp_path / "smoke.json"]
    found, out, err = command(monkeypatch, capsys, *options)
    assert (found, err) == (code, "")
    assert "moe_forward_mxfp8 (experts-mxfp8): " in out and f"Everything is in {tmp_path / 'smoke.json'}" in out
    assert ("ran on the CPU: aten::sort" in out) == (fault != "run")
    written = json.loads((tmp_path / "smoke.json").read_text(encoding="utf-8"))
    assert written["verdict"] == verdict and written["installation"]["packages"]
    assert written["kernels"][0]["case"] == "experts-mxfp8" and written["cases"]["experts-mxfp8"]["hidden"] == 128
    found, out, _ = command(monkeypatch, capsys, *options, "--json")
    assert found == code and json.loads(out)["ok"] == (code == 0)


def test_a_full_disk_leaves_the_last_report(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    def full(self: Path, text: str, **options: Any) -> None:
        self.write_bytes(text[:1].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    report = tmp_path / "smoke.json"
    report.write_bytes(b"{}")
    monkeypatch.setattr("hf_neuron_moe.cli.smoke.run_smoke", lambda **options: SimpleNamespace(to_dict=dict))
    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = command(monkeypatch, capsys, "--output", report)
    assert code not in (0, 70) and "No space left on device" in err
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == [(report, b"{}")]


@pytest.mark.usefixtures("in_process")
def test_without_neuron_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    place = tmp_path / "smoke.json"
    code, out, err = command(monkeypatch, capsys, "--output", place)
    assert (code, out) == (1, "") and not place.exists()
    assert "nki is not installed" in err and "Go to a Trn2 or Trn3 instance" in err
    code, _, err = command(monkeypatch, capsys, "--device", "cuda:0")
    assert code == 2 and "--device must be a device such as neuron:0" in err
    assert command(monkeypatch, capsys, "--case", "other")[0] == 2
    for taken in (tmp_path, tmp_path / "none" / "smoke.json"):
        assert command(monkeypatch, capsys, "--output", taken)[0] == 2, "before hours of work"


@pytest.mark.usefixtures("in_process")
def test_it_follows_the_answer_of_doctor(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(target="trn3")
    monkeypatch.setattr("hf_neuron_moe.device.installed.device_count", lambda: None)
    with refused(BackendUnavailableError, "this machine", "there is no runtime"):
        run_smoke()
    monkeypatch.setattr("hf_neuron_moe.device.installed.COMPILER", "nki")
    with refused(ConfigError, "device"):
        run_smoke(device="meta")


def test_the_processes_inherit_the_logical_core(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(target="trn2")
    seen: list[str | None] = []

    def look(job: dict[str, Any], caches: Path, timeout: float) -> Ended:
        seen.append(os.environ.get(LNC_VARIABLE))
        return Ended(1, "ImportError: libnrt.so")

    monkeypatch.setattr(smoke, "run_worker", look)
    with mock.patch.dict("os.environ"), refused(BackendUnavailableError, "this machine", "ImportError: libnrt.so"):
        del os.environ[LNC_VARIABLE]
        run_smoke()
    assert seen == ["2"]


WORKER = f"""
import json, os, signal, sys, time
job = json.loads(sys.argv[1])
def tell(event, need, **facts):
    print({smoke.MARK!r} + json.dumps(dict(event=event, need=need, **facts)), flush=True)
if job["case"] is None:
    tell("machine", "", refused=None, device="neuron:0", installation=dict())
elif job["case"] == "mlp-mxfp8":
    tell("begin", "mlp_forward", stage="compiled", executables=0)
    print("compiling", flush=True)
    os.fork()
    time.sleep(60)
else:
    tell("begin", "moe_forward", stage="ran", executables=0)
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_process_that_hangs_or_crashes_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "WORKER", (sys.executable, "-c", WORKER))
    shown: list[str] = []
    report = run_smoke(
        cases=["mlp-mxfp8", "experts-bf16"], timeout=2, progress=lambda result: shown.append(result.need)
    )
    hung, after, crashed, last = report.kernels
    assert (hung.verdict, hung.stopped_at, after.verdict) == ("hangs", "compiled", "not run")
    assert "stopped after 2 s" in hung.note and "compiling" in hung.output
    assert "mlp_forward (mlp-mxfp8): hung: did not compile: " in hung.summary
    assert (crashed.verdict, crashed.stopped_at, last.verdict) == ("crashed", "ran", "not run")
    assert "killed by SIGSEGV" in crashed.note and report.verdict == "fail"
    assert shown == ["mlp_forward", "mlp_backward", "moe_forward", "moe_backward"]


def test_an_interrupted_run_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[Any] = []

    def interrupted(process: Any, timeout: float | None = None) -> Any:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(smoke, "WORKER", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr("subprocess.Popen.communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smoke.run_worker({}, tmp_path, 60)
    assert started[0].wait(10) == -9


@pytest.mark.slow
def test_a_worker_is_a_process_that_tells_what_is_missing() -> None:
    with refused(BackendUnavailableError, "this machine", "nki is not installed"):
        run_smoke(cases=["mlp-mxfp8"])


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (("equal", "not run"), "pass"),
        (("pass", "close"), "close"),
        (("close", "hangs"), "fail"),
        (("not run",), "not run"),
    ],
)
def test_the_worst_kernel_decides(verdicts: tuple[str, ...], whole: str) -> None:
    kernels = tuple(KernelResult(str(number), "mlp-mxfp8", verdict) for number, verdict in enumerate(verdicts))
    report = SmokeReport("neuron:0", kernels, {})
    assert report.verdict == whole and report.to_dict()["ok"] == (whole == "pass")
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_process_that_ends_early_by_itself_is_an_error_and_no_crash(tmp_path: Path) -> None:
    found = list(smoke._results("mlp-mxfp8", Ended(0, "bye"), tmp_path))
    assert [(result.verdict, result.stopped_at) for result in found] == [("error", "traced"), ("not run", None)]


def test_a_note_is_a_line_of_at_most_500_characters() -> None:
    raised = f"Traceback (most recent call last):\n  File 'kernel.py'\nValueError: {'long ' * 200}\nand more\n"
    for output in (raised, "early line\n" + "word " * 200):
        note = Ended(1, output).note
        assert len(note) <= 500 and "\n" not in note
        assert note.startswith("ValueError: long long" if output is raised else "word word")


def test_a_process_has_caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace or an executable of an earlier run would leave nothing to compile."""
    names = (NEFF_CACHE, "NKI_COMPILE_CACHE_URL", "NKI_ENABLE_TRACE_CACHE")
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    monkeypatch.setattr(smoke, "WORKER", (sys.executable, "-c", code))
    ended = smoke.run_worker({}, tmp_path, 60)
    assert (ended.code, ended.output.split()) == (0, [str(tmp_path / "neff"), str(tmp_path / "nki"), "0"])

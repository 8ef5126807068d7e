"""The first minutes on a Neuron machine: every kernel once, at a small shape, each block in a process of its own.

A compiler or a runtime can end or block its process. So this one only starts others (``smoke_worker``), reads what they
print, and stops those that take too long. It imports no torch: with the plugin it might hold the cores that they need.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_neuron_moe.backends.neuron.versions import settle_environment
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, public

WORKER = (sys.executable, "-X", "faulthandler", "-m", "hf_neuron_moe.device.smoke_worker")
MARK = "hf-neuron-moe smoke: "  # before an event in what a worker prints
TRACED, COMPILED, RAN, AGREES = STAGES = ("traced", "compiled", "ran", "agrees")
EQUAL, PASS, CLOSE, FAIL, NOT_RUN = "equal", "pass", "close", "fail", "not run"  # as in tolerances.py
ERROR, HANGS, CRASHED = _STOPPED = ("error", "hangs", "crashed")
NEFF_CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"
DEVICE_NAME = re.compile(r"neuron(:\d+)?|cpu")
"""Where kernels run: Neuron's devices, or the CPU where the plugin has no device type, as NKI's simulator."""
GRADIENTS = {
    False: tuple(f"grad {name}" for name in ("input", "gate_proj", "up_proj", "down_proj")),
    True: tuple(f"grad {name}" for name in ("input", "routing weights", "gate_up_proj", "down_proj")),
}
"""Results of a backward, by whether the block has experts."""
_VERBS = {TRACED: "trace", COMPILED: "compile", RAN: "run", AGREES: "be compared"}
_COMPILER, _RUNTIME = re.compile(r"NCC_|neuronx-cc|compil", re.IGNORECASE), re.compile(r"NRT|nrt_|NERR")
_TAIL = 20_000  # characters of a process's output that the report keeps


@dataclass(frozen=True)
class Case:
    """One block, and the kernels that compute it; the smallest sizes that AWS documents, or that its kernels take."""

    needs: tuple[str, ...]  # forward, and backward where there is one
    precision: str  # "bf16" or "mxfp8"
    tokens: int
    hidden: int
    inner: int
    experts: tuple[int, ...] = ()  # their number; empty for a dense MLP
    top_k: int = 1
    block_size: int = 512
    frozen: bool = False  # the weights are MX codes


CASES = {
    "experts-bf16": Case(("moe_forward", "moe_backward"), "bf16", 256, 512, 2048, (8,), 2, 256),
    "mlp-mxfp8": Case(("mlp_forward", "mlp_backward"), "mxfp8", 128, 128, 128),
    "experts-mxfp8": Case(("moe_forward_mxfp8", "moe_backward_mxfp8"), "mxfp8", 128, 128, 128, (8,), 2, 128),
    "frozen-mlp": Case(("mlp_forward_quantized",), "mxfp8", 128, 512, 512, frozen=True),
    "frozen-experts": Case(("moe_forward_mx",), "mxfp8", 128, 512, 512, (8,), 2, frozen=True),
    "frozen-experts-wide": Case(("moe_forward_mx_wide",), "mxfp8", 128, 8704, 1024, (2,), frozen=True),
}


@dataclass(frozen=True)
class KernelResult:
    """What one kernel did."""

    need: str  # this package's name for it, such as "moe_forward"
    case: str  # the block, of :data:`CASES`
    verdict: str  # of the comparison; ERROR, HANGS or CRASHED where there was none; NOT_RUN
    stages: tuple[str, ...] = ()  # those of :data:`STAGES` that it passed
    stopped_at: str | None = None  # the stage of ERROR, HANGS and CRASHED
    compile_seconds: float = 0.0  # first call less the second, with empty caches
    run_seconds: float = 0.0  # of the second call
    fallback_ops: list[str] | None = None  # operations that ran on the CPU; None where the plugin does not say
    tensors: tuple[dict[str, Any], ...] = ()  # outcome of each result, as verify-device has it
    note: str = ""  # what went wrong
    output: str = ""  # the end of what its process printed, where it went wrong

    @property
    def summary(self) -> str:
        """One line."""
        name = f"{self.need} ({self.case})"
        if self.stopped_at is not None:
            how = {HANGS: "hung: ", CRASHED: "ended its process: "}.get(self.verdict, "")
            return f"{name}: {how}did not {_VERBS[self.stopped_at]}: {self.note}"
        if self.verdict == NOT_RUN:
            return f"{name}: not run: {self.note}"
        line = f"{name}: {self.verdict}; compiled in {self.compile_seconds:.1f} s, ran in {self.run_seconds:.3f} s"
        return f"{line}; {self.note}" if self.note else line


@dataclass(frozen=True)
class SmokeReport:
    """Everything that :func:`run_smoke` found, for a bug report."""

    device: str
    kernels: tuple[KernelResult, ...]
    installation: dict[str, Any]  # as `doctor --json` has it

    @property
    def verdict(self) -> str:
        """``"pass"``, ``"close"`` or ``"fail"``, the worst of the kernels that were tried; else ``"not run"``."""
        found = {kernel.verdict for kernel in self.kernels} - {NOT_RUN}
        bad = FAIL if found - {EQUAL, PASS, CLOSE} else CLOSE if CLOSE in found else PASS
        return bad if found else NOT_RUN

    def summary(self) -> str:
        """Return how many kernels passed which stage."""
        tried = [kernel for kernel in self.kernels if kernel.verdict != NOT_RUN]
        *passed, agree = (sum(stage in kernel.stages for kernel in tried) for stage in STAGES)
        stages = ", ".join(f"{number} {stage}" for number, stage in zip(passed, STAGES))
        return f"{agree} of {len(tried)} kernels compute what PyTorch does ({stages})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        cases = {name: asdict(case) for name, case in CASES.items()}
        return {"ok": self.verdict == PASS, "verdict": self.verdict, **asdict(self), "cases": cases}


@dataclass(frozen=True)
class Ended:
    """How a worker process ended."""

    code: int | None  # its exit status; None where it was stopped
    output: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it told."""
        return [
            json.loads(line.removeprefix(MARK)) for line in self.output.splitlines() if line.startswith(f"{MARK}{{")
        ]

    @property
    def note(self) -> str:
        """What it raised, or its last line."""
        _, raised, text = self.output.rpartition("Traceback (most recent call last):")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(MARK)]
        message = [line for line in lines if not line.startswith(" ")] if raised else lines[-1:]
        return " ".join(" ".join(message).split())[:500] or "no message"


@public("smoke")
def run_smoke(
    *,
    device: str | None = None,
    cases: Iterable[str] = CASES,
    timeout: float = 1200.0,
    seed: int = 0,
    progress: Callable[[KernelResult], None] = lambda result: None,
) -> SmokeReport:
    """Run each kernel of `cases` once; a process that takes more than `timeout` seconds is stopped.

    `device` is where tensors are, such as ``"neuron:3"``. `progress` is called with each result.
    """
    if device is not None and DEVICE_NAME.fullmatch(device) is None:
        fix = "`hf-neuron-moe doctor` tells how many there are."
        raise ConfigError.about("device", "a device such as neuron:0", repr(device), fix)
    settle_environment()  # the processes inherit it
    job, results = {"case": None, "device": device, "seed": seed, "trace": True}, []
    with tempfile.TemporaryDirectory(prefix="hf-neuron-moe-smoke-") as folder:
        ended = run_worker(job, Path(folder), timeout)
        if ended.code != 0 or not ended.events:
            fix = "`hf-neuron-moe doctor` looks at the packages one by one."
            raise BackendUnavailableError.about("this machine", "one where the packages load", ended.note, fix)
        machine = ended.events[-1]
        if machine["refused"] is not None:
            error = BackendUnavailableError(machine["refused"])
            error.argument = "this machine"
            raise error
        for name in cases:
            for result in _run_case(name, job | {"case": name}, Path(folder), timeout):
                results.append(result)
                progress(result)
    return SmokeReport(machine["device"], tuple(results), machine["installation"])


def _run_case(name: str, job: dict[str, Any], folder: Path, timeout: float) -> Iterator[KernelResult]:
    """The results of a block's kernels. One that cannot be traced on fake tensors is called nevertheless."""
    caches = folder / name
    found = list(_results(name, run_worker(job, caches, timeout), caches))
    again = found
    if any(result.stopped_at == TRACED for result in found):
        again = list(_results(name, run_worker(job | {"trace": False}, caches, timeout), caches))
    for before, result in zip(found, again):
        if result.verdict in (*_STOPPED, NOT_RUN) or before.verdict not in (*_STOPPED, NOT_RUN):
            yield before
        elif before.stopped_at == TRACED:
            note = f"not traced on fake tensors, as torch.compile does: {before.note}"
            yield replace(result, note=note, output=before.output)
        else:
            yield result


def _results(name: str, ended: Ended, caches: Path) -> Iterator[KernelResult]:
    """Read a worker's events."""
    stopped = None
    for need in CASES[name].needs:
        events = {event.pop("event"): event for event in ended.events if event.pop("need") == need}
        passed = tuple(stage for stage in STAGES if stage in events)
        if stopped is not None:
            yield KernelResult(need, name, NOT_RUN, note=f"{stopped} did not return its operands")
        elif NOT_RUN in events:
            yield KernelResult(need, name, NOT_RUN, **events[NOT_RUN])
        elif AGREES in events:
            agrees = events[AGREES]["verdict"] in (EQUAL, PASS)
            yield KernelResult(need, name, stages=passed if agrees else passed[:-1], **events[AGREES])
        else:
            stopped, begun = need, events.get("begin", {"stage": TRACED, "executables": 0})
            stage = begun["stage"]
            if stage == COMPILED and _was_compiled(ended, caches, begun["executables"]):
                stage, passed = RAN, (*passed, COMPILED)
            verdict = HANGS if ended.code is None else CRASHED if ended.code < 0 else ERROR
            yield KernelResult(need, name, verdict, passed, stage, note=ended.note, output=ended.output[-_TAIL:])


def _was_compiled(ended: Ended, caches: Path, before: int) -> bool:
    """Whether the first call, which compiles and runs, ended behind the compiler: by its message, or by its files."""
    raised = ended.note if ended.code is not None else ""
    made = count_executables(caches) > before
    return bool(_RUNTIME.search(raised)) or (made and _COMPILER.search(raised) is None)


def count_executables(caches: Path) -> int:
    """Return how many files the compiler has finished."""
    return sum(1 for _ in caches.rglob("*.neff"))


def run_worker(job: dict[str, Any], caches: Path, timeout: float) -> Ended:
    """Run a worker with caches of its own; stop it, and what it started, when the time is over."""
    places = {NEFF_CACHE: str(caches / "neff"), "NKI_COMPILE_CACHE_URL": str(caches / "nki")}
    process = subprocess.Popen(
        [*WORKER, json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | places | {"NKI_ENABLE_TRACE_CACHE": "0"},
        start_new_session=True,
    )
    code, end = None, f"\nstopped after {timeout:.0f} s"
    try:
        output, _ = process.communicate(timeout=timeout)
        code = process.returncode
        end = f"\nkilled by {signal.Signals(-code).name}" if code < 0 else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # prints where it hangs
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(code, output.decode(errors="replace") + end)

"""The first minutes on a Neuron machine: every kernel once, at a small shape, each block in a process of its own.

A compiler or a runtime can end or block its process, so this one only starts others, reads what they wrote, and stops
those that take too long. It imports no torch: a process that has the plugin may hold cores that the others need.
:mod:`~hf_neuron_moe.device.smoke_worker` is what they run.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_neuron_moe.backends.neuron.versions import settle_environment
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, public

WHERE = "smoke"
WORKER = (sys.executable, "-m", "hf_neuron_moe.device.smoke_worker")
TRACED, COMPILED, RAN, AGREES = STAGES = ("traced", "compiled", "ran", "agrees")
EQUAL, PASS, CLOSE, FAIL, NOT_RUN = "equal", "pass", "close", "fail", "not run"  # as in tolerances.py
ERROR, HANGS, CRASHED = "error", "hangs", "crashed"
_GOOD = (EQUAL, PASS)
_VERBS = {TRACED: "trace", COMPILED: "compile", RAN: "run", AGREES: "be compared"}
_COMPILER, _RUNTIME = re.compile(r"NCC_|neuronx-cc|compil", re.IGNORECASE), re.compile(r"\bNRT|nrt_|NERR")
_EXECUTABLES = "*.neff"  # what the compiler leaves in its cache
NEFF_CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"
DEVICE_NAME = re.compile(r"neuron(:\d+)?|cpu")
"""Where kernels run: Neuron's devices, or the CPU where the plugin has no device type, as NKI's simulator."""
_TAIL = 20_000  # characters of a process's output that the report keeps


@dataclass(frozen=True)
class Case:
    """One block, and the kernels that compute it; the smallest sizes that AWS documents, or that its kernels take."""

    needs: tuple[str, ...]  # forward, and backward where there is one
    precision: str  # "bf16" or "mxfp8"
    tokens: int
    hidden: int
    inner: int
    experts: int | None = None  # None for a dense MLP
    top_k: int = 1
    block_size: int = 512
    frozen: bool = False  # the weights are MX codes


CASES = {
    "experts-bf16": Case(("moe_forward", "moe_backward"), "bf16", 256, 512, 2048, 8, 2, 256),
    "mlp-mxfp8": Case(("mlp_forward", "mlp_backward"), "mxfp8", 128, 128, 128),
    "experts-mxfp8": Case(("moe_forward_mxfp8", "moe_backward_mxfp8"), "mxfp8", 128, 128, 128, 8, 2, 128),
    "frozen-mlp": Case(("mlp_forward_quantized",), "mxfp8", 128, 512, 512, frozen=True),
    "frozen-experts": Case(("moe_forward_mx",), "mxfp8", 128, 512, 512, 8, 2, frozen=True),
    "frozen-experts-wide": Case(("moe_forward_mx_wide",), "mxfp8", 128, 8704, 1024, 2, 1, frozen=True),
}


GRADIENTS = {
    False: tuple(f"grad {name}" for name in ("input", "gate_proj", "up_proj", "down_proj")),
    True: tuple(f"grad {name}" for name in ("input", "routing weights", "gate_up_proj", "down_proj")),
}
"""Results of a backward, by whether the block has experts."""


@dataclass(frozen=True)
class KernelResult:
    """What one kernel did."""

    need: str  # this package's name for it, such as "moe_forward"
    case: str  # the block, of :data:`CASES`
    verdict: str  # of the comparison; ERROR, HANGS or CRASHED where there was none; NOT_RUN
    stages: tuple[str, ...] = ()  # those of :data:`STAGES` that it passed
    stopped_at: str | None = None  # the stage of ERROR, HANGS and CRASHED
    compile_seconds: float | None = None  # first call less the second, with empty caches
    run_seconds: float | None = None  # of the second call
    fallback_ops: tuple[str, ...] | None = None  # operations that ran on the CPU; None where the plugin does not say
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

    installation: dict[str, Any]  # as `doctor --json` has it
    device: str
    kernels: tuple[KernelResult, ...]

    @property
    def verdict(self) -> str:
        """``"pass"``, ``"close"`` or ``"fail"``, the worst of the kernels that were tried; else ``"not run"``."""
        found = {kernel.verdict for kernel in self.kernels} - {NOT_RUN}
        if not found:
            return NOT_RUN
        return FAIL if found - {*_GOOD, CLOSE} else CLOSE if CLOSE in found else PASS

    def summary(self) -> str:
        """Return how many kernels passed which stage."""
        tried = [kernel for kernel in self.kernels if kernel.verdict != NOT_RUN]
        passed = [f"{sum(stage in kernel.stages for kernel in tried)} {stage}" for stage in STAGES]
        agree = sum(kernel.verdict in _GOOD for kernel in tried)
        return f"{agree} of {len(tried)} kernels compute what PyTorch does ({', '.join(passed[:3])})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        kernels = [asdict(kernel) for kernel in self.kernels]
        return {
            "ok": self.verdict == PASS,
            "verdict": self.verdict,
            "device": self.device,
            "kernels": kernels,
            "cases": {name: asdict(case) for name, case in CASES.items()},
            "installation": self.installation,
        }


@dataclass(frozen=True)
class Job:
    """What a worker process is asked for."""

    case: str | None  # None to look at the machine
    events: str  # file that it appends JSON lines to
    device: str | None = None
    seed: int = 0
    trace: bool = True  # on fake tensors first


@dataclass(frozen=True)
class Ended:
    """How a worker process ended."""

    code: int | None  # its exit status; None where it was stopped
    output: str
    events: list[dict[str, Any]]

    @property
    def verdict(self) -> str:
        """Of a process that did not finish."""
        return HANGS if self.code is None else CRASHED if self.code < 0 else ERROR

    @property
    def note(self) -> str:
        """What it raised, or its last line."""
        _, raised, text = self.output.rpartition("Traceback (most recent call last):")
        lines = [line for line in text.splitlines() if line.strip()]
        message = [line for line in lines if not line.startswith(" ")] if raised else lines[-1:]
        words = " ".join(" ".join(message).split()) or "no message"
        killed = f"killed by {signal.Signals(-self.code).name}; " if self.code is not None and self.code < 0 else ""
        return f"{killed}{words}"[:500]


@public(WHERE)
def run_smoke(
    *,
    device: str | None = None,
    cases: Iterable[str] = (),
    timeout: float = 1200.0,
    seed: int = 0,
    progress: Callable[[KernelResult], None] | None = None,
) -> SmokeReport:
    """Run each kernel once, or those of some `cases`; a process that takes more than `timeout` seconds is stopped.

    `device` is where tensors are, such as ``"neuron:3"``. `progress` is called with each result.
    """
    if device is not None and DEVICE_NAME.fullmatch(device) is None:
        fix = "`hf-neuron-moe doctor` tells how many there are."
        raise ConfigError.about("device", "a device such as neuron:0", repr(device), fix)
    settle_environment()  # the processes inherit it
    with tempfile.TemporaryDirectory(prefix="hf-neuron-moe-smoke-") as folder:
        ended = run_worker(Job(None, f"{folder}/machine", device, seed), Path(folder), timeout)
        if ended.code != 0 or not ended.events:
            got, fix = f"{ended.verdict}: {ended.note}", "`hf-neuron-moe doctor` looks at the packages one by one."
            raise BackendUnavailableError.about("this machine", "one where the packages load", got, fix)
        machine = ended.events[-1]
        if machine["refused"] is not None:
            error = BackendUnavailableError(machine["refused"])
            error.argument = "this machine"
            raise error
        results = []
        for name in cases or CASES:
            for result in _run_case(name, Job(name, f"{folder}/{name}", device, seed), Path(folder), timeout):
                results.append(result)
                if progress is not None:
                    progress(result)
    return SmokeReport(machine["installation"], machine["device"], tuple(results))


def _run_case(name: str, job: Job, folder: Path, timeout: float) -> Iterator[KernelResult]:
    """The results of a block's kernels. One that cannot be traced on fake tensors is called nevertheless."""
    caches = folder / f"{name}-caches"
    ended = run_worker(job, caches, timeout)
    found = list(_results(name, ended, caches))
    if any(result.stopped_at == TRACED for result in found):
        untraced = replace(job, trace=False, events=f"{job.events}-untraced")
        again = run_worker(untraced, caches, timeout)
        for before, result in zip(found, list(_results(name, again, caches)), strict=True):
            stopped = result.stopped_at is not None or result.verdict == NOT_RUN
            if stopped or before.verdict not in (ERROR, HANGS, CRASHED, NOT_RUN):
                yield before
            elif before.stopped_at == TRACED:
                note = f"not traced on fake tensors, as torch.compile does: {before.note}"
                yield replace(result, note=note, output=before.output)
            else:
                yield result
    else:
        yield from found


def _results(name: str, ended: Ended, caches: Path) -> Iterator[KernelResult]:
    """Read a worker's events."""
    stopped = None
    for need in CASES[name].needs:
        events = {event["event"]: event for event in ended.events if event["need"] == need}
        passed = tuple(stage for stage in STAGES if stage in events)
        if stopped is not None or (not events and ended.code == 0):
            yield KernelResult(need, name, NOT_RUN, note=f"{stopped} did not return its operands")
        elif NOT_RUN in events:
            yield KernelResult(need, name, NOT_RUN, note=events[NOT_RUN]["note"])
        elif AGREES in events:
            fields = {key: value for key, value in events[AGREES].items() if key not in ("event", "need")}
            fallback = fields.pop("fallback_ops")
            passed = passed if fields["verdict"] in _GOOD else passed[:-1]
            yield KernelResult(
                need, name, stages=passed, fallback_ops=None if fallback is None else tuple(fallback), **fields
            )
        else:
            stopped, begun = need, events.get("begin", {"stage": TRACED, "executables": 0})
            stage = begun["stage"]
            if stage == COMPILED and _was_compiled(ended, caches, begun["executables"]):
                stage, passed = RAN, (*passed, COMPILED)
            yield KernelResult(need, name, ended.verdict, passed, stage, note=ended.note, output=ended.output)


def _was_compiled(ended: Ended, caches: Path, before: int) -> bool:
    """Whether the first call, which compiles and runs, ended behind the compiler: by its message, or by its files."""
    if ended.code is not None and _RUNTIME.search(ended.note):
        return True
    return not _COMPILER.search(ended.note if ended.code is not None else "") and count_executables(caches) > before


def count_executables(caches: Path) -> int:
    """Return how many files the compiler has finished."""
    return sum(1 for _ in caches.rglob(_EXECUTABLES))


def run_worker(job: Job, caches: Path, timeout: float) -> Ended:
    """Run a worker with caches of its own; stop it, and what it started, when the time is over."""
    caches.mkdir(exist_ok=True)
    places = {NEFF_CACHE: str(caches / "neff"), "NKI_COMPILE_CACHE_URL": str(caches / "nki")}
    environment = os.environ | places | {"NKI_ENABLE_TRACE_CACHE": "0"}
    log = Path(f"{job.events}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*WORKER, json.dumps(asdict(job))],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    if code is None:
        text += f"\nstopped after {timeout:.0f} s"
    events = Path(job.events)
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    return Ended(code, text, [json.loads(line) for line in lines])

"""Kills and fails conversions call by call, and looks at what is left.

    python -m tests.convert.fault_driver FOLDER < LINES

Each line that it reads has sweeps, ``SCENARIO:ACTION:EVERY``. It prints one JSON object per call that was struck, with
``problem`` empty where everything is as it must be, and an empty line at the end. One process imports everything; a
conversion that is killed runs in a fork of it. Nothing waits for the disk, except where the line says ``sync``: a kill
loses nothing that was written, and the layer knows what a power cut takes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_neuron_moe.cli.exit_codes import exit_code_of
from hf_neuron_moe.convert import (
    MANIFEST_FILE,
    ConvertOptions,
    convert_checkpoint,
    export_checkpoint,
    finalize_checkpoint,
)
from hf_neuron_moe.errors import NeuronMoEError
from tests.convert.fault_layer import CALLS, CHANGES, Layer
from tests.convert.remembered import remembered_models
from tests.tiny_models import tiny_model
from tests.unsynced import leave_out_syncs, wait_for_syncs

OPTIONS = ConvertOptions("bf16", "kernel", max_shard_bytes=12_000)
OLD_OPTIONS = ConvertOptions("bf16", "fused")
ACTIONS: dict[str, Any] = {
    "kill": "kill",
    "powercut": "powercut",
    "powercut-names": "powercut-names",
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EACCES": errno.EACCES,
    "full": (errno.ENOSPC,),
}
DISK_EXIT = 5
UNEXPECTED = 99
SCENARIOS = ("fresh", "replace", "resumed", "parts", "finalize", "export")


class Stage:
    """One scenario: what lies there before, what is run, and what must come out."""

    def __init__(self, work: Path, scenario: str) -> None:
        work.mkdir(parents=True)
        self.scenario = scenario
        self.source = work / "source"
        self.place_at(work / "place")
        model = tiny_model("mixtral", num_hidden_layers=1).bfloat16()
        model.save_pretrained(self.source, max_shard_size="30KB")
        self.source_bytes = snapshot(self.source)
        self.before = work / "before"
        self.before.mkdir()
        convert_checkpoint(self.source, work / "expected", OPTIONS)
        self.expected = snapshot(work / "expected")
        self.earlier: dict[str, bytes] | None = None
        self.force = scenario == "replace"
        if scenario == "replace":
            convert_checkpoint(self.source, self.before / "dst", OLD_OPTIONS)
            self.earlier = snapshot(self.before / "dst")
        elif scenario == "resumed":
            self.place_at(self.before)
            run(self.convert, Layer(60, "kill", CHANGES))
        elif scenario in ("parts", "finalize"):
            for index in (1, 2, 3) if scenario == "finalize" else (1, 3):
                convert_checkpoint(self.source, self.before / "dst", OPTIONS, part=(index, 3))
        elif scenario == "export":
            self.converted = work / "expected"
            export_checkpoint(self.converted, work / "exported")
            self.expected = snapshot(work / "exported")
        self.place_at(work / "place")

    def place_at(self, folder: Path) -> None:
        """Choose the folder in which the conversion takes place."""
        self.place, self.target = folder, folder / "dst"

    def reset(self) -> None:
        """Put everything back to how the scenario begins."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.before, self.place)

    def convert(self, *, again: bool = False) -> None:
        """Run the scenario's command, calls in one order; `again` as a user would after it stopped."""
        if self.scenario == "export":
            export_checkpoint(self.converted, self.target)
        elif self.scenario == "finalize":
            finalize_checkpoint(self.source, self.target, workers=1)
        elif self.scenario == "parts":
            convert_checkpoint(self.source, self.target, OPTIONS, part=(2, 3), workers=1)
            if again:
                finalize_checkpoint(self.source, self.target, workers=1)
        else:
            resume = again or self.scenario == "resumed"
            convert_checkpoint(self.source, self.target, OPTIONS, force=self.force, resume=resume, workers=1)

    def problem_of(self, *, killed: bool) -> str:
        """What is wrong with the state that a stopped run left; empty if nothing."""
        if snapshot(self.source) != self.source_bytes:
            return "the source was changed"
        names = {path.name for path in self.place.iterdir()}
        if not names <= {"dst", "dst.partial"}:
            return f"left {sorted(names)}"
        found = snapshot(self.target) if self.target.exists() else None
        if found not in (self.earlier, self.expected):
            return f"destination with {sorted(found or {})} is neither the earlier nor the complete one"
        kept = killed or self.scenario in ("resumed", "parts", "finalize")
        if not kept and "dst.partial" in names:
            return "temporaries left behind"
        return ""


def snapshot(folder: Path) -> dict[str, bytes]:
    """A folder's files."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Ended(NamedTuple):
    """How a run ended: whether it was killed, its exit code, the calls counted, and the files created."""

    killed: bool
    code: int
    count: int
    created: list[str]


def run(command: Callable[[], None], layer: Layer) -> Ended:
    """Run a command under a layer, in a child if the layer kills."""
    return _run_in_child(command, layer) if layer.kills else Ended(False, *_run_here(command, layer))


def _run_here(command: Callable[[], None], layer: Layer) -> tuple[int, int, list[str]]:
    created: list[str] = []
    layer.log = created.append
    code = UNEXPECTED
    try:
        with layer.installed():
            command()
        code = 0
    except (NeuronMoEError, OSError) as error:
        code = exit_code_of(error).code
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    return code, layer.count, created


def _run_in_child(command: Callable[[], None], layer: Layer) -> Ended:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = UNEXPECTED
        try:
            layer.log = lambda name: os.write(writing, f"create {name}\n".encode())
            code, _, _ = _run_here(command, layer)
            os.write(writing, f"count {layer.count}\n".encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as lines:
        words = [line.split() for line in lines]
    _, status = os.waitpid(child, 0)
    count = next((int(value) for kind, value in words if kind == "count"), 0)
    created = [value for kind, value in words if kind == "create"]
    return Ended(os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status), count, created)


def strike(stage: Stage, action: str, number: int) -> dict[str, Any]:
    """Stop one run at one call, look, run again to the end, look."""
    stage.reset()
    calls = CHANGES if isinstance(ACTIONS[action], str) else CALLS
    struck = run(stage.convert, Layer(number, ACTIONS[action], calls))
    killed = struck.killed
    outcome = {"scenario": stage.scenario, "action": action, "call": number, "killed": killed}
    if killed != isinstance(ACTIONS[action], str):
        return {**outcome, "problem": f"unexpected end {struck}"}
    spared = action == "full" and struck.code == 0  # nothing after this call needed space
    if not killed and not spared and struck.code != DISK_EXIT:
        return {**outcome, "problem": f"exit code {struck.code}"}
    problem = stage.problem_of(killed=killed)
    if problem:
        return {**outcome, "problem": problem}
    outcome["state"] = "complete" if (stage.target / MANIFEST_FILE).exists() else "not yet"
    if stage.scenario == "export" and stage.target.exists():
        return {**outcome, "state": "complete", "problem": ""}
    again = run(lambda: stage.convert(again=True), Layer())
    if again.code:
        return {**outcome, "problem": f"running again ended with {again.code}"}
    if snapshot(stage.target) != stage.expected or {path.name for path in stage.place.iterdir()} != {"dst"}:
        return {**outcome, "problem": "running again gave something else"}
    if killed and stage.scenario != "export":
        redone = {name for name in struck.created if name.endswith(".safetensors")} & set(again.created)
        if len(redone) > 1:
            return {**outcome, "problem": f"made again: {sorted(redone)}"}
    return {**outcome, "problem": ""}


def sweep(stage: Stage, action: str, every: int) -> Iterator[dict[str, Any]]:
    """Strike every n-th call of a scenario."""
    stage.reset()
    calls = CHANGES if isinstance(ACTIONS[action], str) else CALLS
    whole = run(stage.convert, Layer(None, ACTIONS[action], calls))
    total = whole.count
    assert whole.code == 0 and total > 0, whole
    for number in range(1 + total % every, total + 1, every):
        yield {**strike(stage, action, number), "of": total}


def serve(home: Path) -> None:
    """Run the sweeps of each line that is read, and end what is printed about them with an empty line."""
    stages: dict[str, Stage] = {}
    for line in sys.stdin:
        wanted = line.split()
        if "sync" in wanted:
            wanted.remove("sync")
            wait_for_syncs()
        else:
            leave_out_syncs()
        for scenario, action, every in (each.split(":") for each in wanted):
            if scenario not in stages:
                stages[scenario] = Stage(home / scenario, scenario)
            for outcome in sweep(stages[scenario], action, int(every)):
                print(json.dumps(outcome), flush=True)
        print(flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked child has no pool of threads
    with remembered_models():
        serve(Path(sys.argv[1]))

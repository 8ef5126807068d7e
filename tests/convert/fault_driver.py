"""Kills and fails conversions call by call, and looks at what is left.

    python -m tests.convert.fault_driver FOLDER SCENARIO:ACTION:EVERY ...

Prints one JSON object per call that was struck, with ``problem`` empty where everything is as it must be. One process
imports everything; each conversion runs in a fork of it.
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
from typing import Any

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
from tests.tiny_models import tiny_model

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


def run(command: Callable[[], None], layer: Layer) -> tuple[int, int, list[str]]:
    """Run a command under a layer in a child; return its wait status, calls counted, and files created."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = UNEXPECTED
        try:
            layer.log = lambda line: os.write(writing, line.encode())
            layer.install()
            command()
            code = 0
        except (NeuronMoEError, OSError) as error:
            code = exit_code_of(error).code
        except (Exception, KeyboardInterrupt):  # noqa: BLE001
            traceback.print_exc()
        os.write(writing, f"count {layer.count}\n".encode())
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as lines:
        words = [line.split() for line in lines]
    _, status = os.waitpid(child, 0)
    count = next((int(value) for kind, value in words if kind == "count"), 0)
    return status, count, [value for kind, value in words if kind == "create"]


def strike(stage: Stage, action: str, number: int) -> dict[str, Any]:
    """Stop one run at one call, look, run again to the end, look."""
    stage.reset()
    calls = CHANGES if isinstance(ACTIONS[action], str) else CALLS
    status, _, first = run(stage.convert, Layer(number, ACTIONS[action], calls))
    killed = os.WIFSIGNALED(status)
    outcome = {"scenario": stage.scenario, "action": action, "call": number, "killed": killed}
    if killed != isinstance(ACTIONS[action], str):
        return {**outcome, "problem": f"unexpected end {status}"}
    spared = action == "full" and status == 0  # nothing after this call needed space
    if not killed and not spared and os.WEXITSTATUS(status) != DISK_EXIT:
        return {**outcome, "problem": f"exit code {os.WEXITSTATUS(status)}"}
    problem = stage.problem_of(killed=killed)
    if problem:
        return {**outcome, "problem": problem}
    outcome["state"] = "complete" if (stage.target / MANIFEST_FILE).exists() else "not yet"
    if stage.scenario == "export" and stage.target.exists():
        return {**outcome, "state": "complete", "problem": ""}
    status, _, second = run(lambda: stage.convert(again=True), Layer())
    if status:
        return {**outcome, "problem": f"running again ended with {status}"}
    if snapshot(stage.target) != stage.expected or {path.name for path in stage.place.iterdir()} != {"dst"}:
        return {**outcome, "problem": "running again gave something else"}
    if killed and stage.scenario != "export":
        redone = {name for name in first if name.endswith(".safetensors")} & set(second)
        if len(redone) > 1:
            return {**outcome, "problem": f"made again: {sorted(redone)}"}
    return {**outcome, "problem": ""}


def sweep(work: Path, scenario: str, action: str, every: int) -> Iterator[dict[str, Any]]:
    """Strike every n-th call of a scenario."""
    stage = Stage(work, scenario)
    stage.reset()
    calls = CHANGES if isinstance(ACTIONS[action], str) else CALLS
    status, total, _ = run(stage.convert, Layer(None, ACTIONS[action], calls))
    assert status == 0 and total > 0, (status, total)
    for number in range(1 + total % every, total + 1, every):
        yield {**strike(stage, action, number), "of": total}


def main() -> None:
    """Run sweeps, each in a folder of its own."""
    torch.set_num_threads(1)  # a forked child has no pool of threads
    for wanted in sys.argv[2:]:
        scenario, action, every = wanted.split(":")
        work = Path(sys.argv[1], wanted.replace(":", "-"))
        work.mkdir(parents=True)
        for outcome in sweep(work, scenario, action, int(every)):
            print(json.dumps(outcome), flush=True)
        shutil.rmtree(work)


if __name__ == "__main__":
    main()

"""Kills one of two processes that train a sharded model, resumes both, and compares with the run that nobody killed.

    python -m tests.training.sharded_kill_driver FOLDER [RANK]

Moments are those of tests/training/kill_driver.py, counted in each process: ends of steps, and calls that change the
disk while the second checkpoint is saved and the first one removed. Each kind of them is taken once. The process that
is left is ended soon, as torchrun would end it. Without RANK both are killed in turn. Prints one JSON object per kill.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_neuron_moe.errors import NeuronMoEWarning
from hf_neuron_moe.training import find_last_complete
from tests.tiny_models import tiny_model
from tests.training.kill_driver import Moments, StepMoments
from tests.training.sharded_driver import SIZES, figures, fingerprint, in_processes, loaded, trainer

LAYOUT, STEPS, EVERY = "ep2_fsdp2", 5, 2


def train(home: Path, output: str, struck: int, at: int) -> None:
    """Train to the end, from the last complete checkpoint if there is one, and write down what came out."""
    warnings.simplefilter("ignore", NeuronMoEWarning)
    folder, rank = home / output, dist.get_rank()
    moments = Moments(at if rank == struck else 0, str(folder))
    options: dict[str, Any] = {"max_steps": STEPS, "save_steps": EVERY, "save_total_limit": 1}
    # Dropout: losses agree only if the random state is restored too.
    options |= {"model": loaded(home / "model", LAYOUT, attention_dropout=0.2), "callbacks": [StepMoments(moments)]}
    run = trainer(home, LAYOUT, output, **options)
    resume = folder.is_dir() and find_last_complete(folder) is not None
    moments.install()
    run.train(resume_from_checkpoint=resume)
    left = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    result = {"losses": figures(run), "weights": fingerprint(run.model), "left": left, "moments": moments.seen}
    dist.barrier()
    (folder / f"rank-{rank}.json").write_text(json.dumps(result | {"resumed": resume}), encoding="utf-8")


def results(folder: Path) -> list[dict[str, Any]]:
    """Return what both processes wrote down."""
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def kinds(moments: list[str]) -> list[int]:
    """Choose the end of a step, and each kind of disk call once while step 4 is saved."""
    chosen, known, saving = [], set(), False
    for number, name in enumerate(moments, start=1):
        saving = (saving or name == "end of step 4") and name != "begin of step 5"
        call, _, path = name.partition(" ")
        kind = (call, Path(path).suffix if call == "open" else "")
        in_checkpoint = saving and path.startswith("checkpoint-") and not path.endswith(".tmp")
        if name == "end of step 3" or (in_checkpoint and kind not in known):
            known.add(kind)
            chosen.append(number)
    return chosen


def strike(home: Path, struck: int, at: int, expected: list[dict[str, Any]]) -> str:
    """Kill a process at a moment, resume both, and say what is wrong; empty if nothing."""
    output = f"kill-{struck}-{at}"
    statuses = in_processes(2, home, train, output, struck, at, grace=0.4)
    if statuses[struck] != -signal.SIGKILL or not all(statuses):
        return f"the run ended with {statuses} instead of being killed"
    before = find_last_complete(home / output)
    if before is None or int(before.name.rpartition("-")[2]) not in (2, 4):
        return f"{before} is what is left"
    statuses = in_processes(2, home, train, output, 0, 0)
    if any(statuses):
        return f"the resumed run ended with {statuses}"
    for found, right in zip(results(home / output), expected, strict=True):
        for key in ("losses", "weights", "left"):
            if found[key] != right[key]:
                return f"other {key}: {found[key]} instead of {right[key]}"
        if not found["resumed"]:
            return "not resumed"
    shutil.rmtree(home / output)
    return ""


def main(home: Path, ranks: list[int]) -> None:
    """Run the reference and all kills of these processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", NeuronMoEWarning)
    tiny_model("mixtral", **SIZES).save_pretrained(home / "model")
    if any(in_processes(2, home, train, "reference", 0, 0)):
        raise SystemExit("the uninterrupted run failed")
    expected = results(home / "reference")
    for struck in ranks:
        moments = expected[struck]["moments"]
        for at in kinds(moments):
            problem = strike(home, struck, at, expected)
            print(json.dumps({"rank": struck, "moment": moments[at - 1], "problem": problem}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(int, sys.argv[2:])] or [0, 1])

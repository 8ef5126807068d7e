"""Kills training runs with SIGKILL at chosen moments, resumes them, and compares with the run that nobody killed.

    python -m tests.training.kill_driver FOLDER all|MOMENT ...

Moments are counted in the uninterrupted run: beginnings and ends of steps, and every call that changes the disk while a
checkpoint is written, marked or removed. ``all`` takes each kind of moment once. Prints one JSON object per kill. One
process imports everything; each run is a fork of it.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils
from transformers import TrainerCallback

from hf_neuron_moe.errors import NeuronMoEWarning
from hf_neuron_moe.training import NeuronMoETrainer, NeuronMoETrainingArguments, find_last_complete
from tests.tiny_models import tiny_model, tokens
from tests.unsynced import leave_out_syncs

STEPS, EVERY, LIMIT = 12, 2, 2
STRUCK_SAVE = 3
"""Save whose calls are struck: the first one that also removes an old checkpoint."""

STRUCK_STEPS = ("begin of step 1", "gradients of step 4", "end of step 4", "begin of step 7", "end of step 12")


@dataclass
class Moments:
    """Counts moments and ends the process at one of them.

    Attributes:
        at: number of the moment, from 1; 0 for none.
        home: only files below it count.
        seen: descriptions of the moments so far.
    """

    at: int
    home: str
    seen: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Put the counter around every call that changes the disk, for the rest of this process."""
        for module, name in (
            (os, "makedirs"),
            (os, "rename"),
            (os, "replace"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "fsync"),
            (builtins, "open"),
            (io, "open"),
        ):
            setattr(module, name, self._before(name, getattr(module, name)))
        torch.save = self._half(torch.save)
        transformers.modeling_utils.safe_save_file = self._half(transformers.modeling_utils.safe_save_file)

    def moment(self, name: str, last_words: Callable[[], None] = lambda: None) -> None:
        """Count one; if it is the last, leave `last_words` on the disk."""
        self.seen.append(name)
        if len(self.seen) == self.at:
            last_words()
            os.kill(os.getpid(), signal.SIGKILL)

    def _before(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = f"/proc/self/fd/{args[0]}" if name == "fsync" else str(args[0])
            path = os.readlink(place) if name == "fsync" else os.path.abspath(place)
            writes = name != "open" or any(letter in str(args[1:2]) + str(kwargs.get("mode")) for letter in "wxa+")
            if path.startswith(self.home) and writes:
                # A file opened for writing is there, and empty, when the process ends.
                empty = (lambda: function(*args, **kwargs).close()) if name == "open" else lambda: None
                self.moment(f"{name} {os.path.relpath(path, self.home)}", empty)
            return function(*args, **kwargs)

        return call

    def _half(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count a call that writes a whole file from C++ or Rust; the last one leaves half of it."""

        def call(what: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            def half() -> None:
                function(what, path, *args, **kwargs)
                os.truncate(path, os.path.getsize(path) // 2)

            if isinstance(path, str | os.PathLike):  # not a buffer
                self.moment(f"write {os.path.relpath(path, self.home)}", half)
            return function(what, path, *args, **kwargs)

        return call


class StepMoments(TrainerCallback):
    """Makes moments of the steps."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.moment(f"begin of step {state.global_step + 1}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.moment(f"gradients of step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moments.moment(f"end of step {state.global_step}")


def train(folder: Path, at: int) -> None:
    """Train to the end, from the last complete checkpoint if there is one, and write down what came out."""
    warnings.simplefilter("ignore", NeuronMoEWarning)
    output = folder / "run"
    moments = Moments(at, str(output))
    # Dropout: losses agree only if the random state is restored too.
    model = tiny_model("mixtral", attention_dropout=0.2)
    rows = [{"input_ids": row, "labels": row} for row in tokens(14, 12, seed=11)]
    arguments = NeuronMoETrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=LIMIT,
        report_to=[],
        use_cpu=True,
        seed=5,
        disable_tqdm=True,
    )
    resume = output.is_dir() and find_last_complete(output) is not None
    trainer = NeuronMoETrainer(model=model, args=arguments, train_dataset=rows, callbacks=[StepMoments(moments)])
    moments.install()
    trainer.train(resume_from_checkpoint=resume)
    lines = (output / "neuron_moe" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    result = {
        "metrics": [(record["step"], record["loss"]) for record in map(json.loads, lines)],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": fingerprint(model),
        "began": STEPS - sum(name.startswith("begin of step") for name in moments.seen),
        "moments": moments.seen,
        "left": sorted(entry.name for entry in output.iterdir() if entry.is_dir()),
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def fingerprint(model: torch.nn.Module) -> str:
    """Hash of all weights."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def forked(function: Callable[..., None], *args: Any) -> int:
    """Run in a child; return its exit status, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            function(*args)
        except Exception:  # noqa: BLE001 # whatever it is, the child must not go on with its parent's work
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kinds(moments: list[str]) -> list[int]:
    """Choose some moments of steps, and each kind of disk call once while the third checkpoint is saved."""
    chosen, kept = [], set()
    saves = 0
    for number, name in enumerate(moments, start=1):
        saves += name == f"end of step {EVERY * (saves + 1)}"
        # One file of each type is enough; the old checkpoint's are removed, the new one's written and synced.
        kind = (name.partition(" ")[0], Path(name).suffix, Path(name).parent)
        if name in STRUCK_STEPS or ("step" not in name and saves == STRUCK_SAVE and kind not in kept):
            kept.add(kind)
            chosen.append(number)
    return chosen


def strike(folder: Path, at: int, expected: dict[str, Any]) -> str:
    """Kill at a moment, resume, and say what is wrong; empty if nothing."""
    status = forked(train, folder, at)
    if status != -signal.SIGKILL:
        return f"the run ended with {status} instead of being killed"
    status = forked(train, folder, 0)
    if status:
        return f"the resumed run ended with {status}"
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    for key in ("losses", "weights", "left", "metrics"):
        if result[key] != expected[key]:
            return f"other {key}: {result[key]} instead of {expected[key]}"
    # What was trained again is at most one interval and the steps of the checkpoint being written.
    done = sum(name.startswith("end of step") for name in expected["moments"][:at])
    if not done - 2 * EVERY <= result["began"] <= done:
        return f"resumed after step {result['began']}, killed after step {done}"
    return ""


def main(arguments: list[str]) -> None:
    """Run the reference and all kills asked for."""
    torch.set_num_threads(1)
    leave_out_syncs()  # a kill loses nothing that was written
    gc.collect()
    gc.freeze()  # the Trainer collects garbage at the end of each run
    work = Path(arguments[0])
    (work / "reference").mkdir(parents=True)
    if forked(train, work / "reference", 0):
        raise SystemExit("the uninterrupted run failed")
    expected = json.loads((work / "reference" / "result.json").read_text(encoding="utf-8"))
    moments = expected["moments"]
    points = kinds(moments) if arguments[1] == "all" else [find(moments, name) for name in arguments[1:]]
    for at in points:
        folder = work / f"kill-{at}"
        folder.mkdir()
        problem = strike(folder, at, expected)
        print(json.dumps({"at": at, "moment": moments[at - 1], "problem": problem}), flush=True)
        if not problem:
            shutil.rmtree(folder)


def find(moments: list[str], name: str) -> int:
    """Return the number of the first moment of that name."""
    return moments.index(name) + 1


if __name__ == "__main__":
    main(sys.argv[1:])

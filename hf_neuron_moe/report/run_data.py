"""The files a report is made from: those of runs in ``neuron_moe/``, and ``parity.json``.

Evaluations of runs of earlier versions stand only in the ``trainer_state.json`` that the Trainer writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hf_neuron_moe.errors import ReportError, public
from hf_neuron_moe.precision_map import spelled
from hf_neuron_moe.report.forms import RECORD, RUN, STUDY, WATCHED

RUN_FOLDER, RUN_FILE = "neuron_moe", "run.json"
METRICS_FILE, EVALUATIONS_FILE, GUARD_FILE = "metrics.jsonl", "evaluations.jsonl", "guard.jsonl"
STUDY_FILE, STATE_FILE = "parity.json", "trainer_state.json"


@dataclass(frozen=True)
class RunData:
    """One training run."""

    name: str  # of its output folder
    run: dict[str, Any]  # content of run.json: patch, config, environment, model
    metrics: list[dict[str, Any]] = field(default_factory=list)  # objects of metrics.jsonl in their order
    evaluations: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Evaluation losses in the order of steps, by name: ``eval_loss``, or one per dataset."""
    guard: list[dict[str, Any]] = field(default_factory=list)  # objects of guard.jsonl: figures and alarms of a step

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Entries of the patch report: one per candidate module."""
        return list(self.run["patch"].get("entries", []))

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.run.get("model", "?"))

    @property
    def policy(self) -> str:
        """Precision and activation policy in a few words."""
        parts = [f"{_policy(each['config'])} to step {each['until']:,}" for each in self.run.get("before", [])]
        return ", then ".join([*parts, _policy(self.run.get("config", {}))])

    @property
    def training(self) -> dict[str, Any]:
        """What was recorded of the training arguments; nothing in the files of earlier versions."""
        found = self.run.get("training")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class StudyData:
    """One parity study: content of its ``parity.json``."""

    name: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """Everything found in a directory."""

    title: str
    runs: list[RunData] = field(default_factory=list)
    studies: list[StudyData] = field(default_factory=list)


@public("report")
def read_runs(directory: Path) -> Contents:
    """Read one run, one study, or all that lie directly in a directory.

    It is a trainer's output folder (or its ``neuron_moe`` folder), a folder with ``parity.json``, or a folder of those.
    """
    if not directory.is_dir():
        got = "a file" if directory.is_file() else "no such directory"
        raise _wrong(directory, got, "Give the output_dir of a run of NeuronMoETrainer.")
    title = directory.resolve().name
    places = [directory, *(path for path in sorted(directory.iterdir()) if path.is_dir())]
    folders = [place / RUN_FOLDER for place in places] if not (directory / RUN_FILE).is_file() else [directory]
    runs = [_run(folder) for folder in folders if (folder / RUN_FILE).is_file()]
    found = [place for place in places if (place / STUDY_FILE).is_file()]
    studies = [StudyData(place.resolve().name, _object(place / STUDY_FILE, STUDY)) for place in found]
    if not runs and not studies:
        listed = ", ".join(sorted(path.name for path in directory.iterdir())[:6]) or "nothing"
        remedy = "Give the folder that `hf-neuron-moe train`, `parity`, NeuronMoETrainer or NeuronMoECallback wrote."
        raise _wrong(directory, f"a directory with {listed}", remedy)
    return Contents(title, runs, studies)


def _run(folder: Path) -> RunData:
    name, run = folder.resolve().parent.name, _object(folder / RUN_FILE, RUN)
    files = ((METRICS_FILE, RECORD), (EVALUATIONS_FILE, RECORD), (GUARD_FILE, WATCHED))
    metrics, evaluations, guard = (list(_lines(folder / file, form)) for file, form in files)
    losses: dict[str, dict[float, float]] = {}  # of a step that was evaluated twice the later one
    for record in evaluations or _history(folder.parent / STATE_FILE):
        for key, value in record.items():
            counts = key.startswith("eval_") and key.endswith("loss") and not key.endswith("aux_loss")
            if counts and (isinstance(value, float) or (type(value) is int and abs(value) < 1 << 53)):
                losses.setdefault(key, {})[float(record["step"])] = float(value)
    return RunData(name, run, metrics, {key: sorted(values.items()) for key, values in losses.items()}, guard)


def _policy(config: dict[str, Any]) -> str:
    activations = config.get("activations", "?")
    policy = activations if isinstance(activations, str) else json.dumps(activations)
    return f"{spelled(config.get('precision', '?'))}, {policy}"


def _history(path: Path) -> list[dict[str, Any]]:
    """What the Trainer logged, by its own file; empty where there is none."""
    if not path.is_file():
        return []
    try:
        history = json.loads(path.read_text(encoding="utf-8")).get("log_history")
        return [record for record in history if isinstance(step := record.get("step"), int) and 0 <= step < 1 << 53]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, "the Trainer's state with its log_history", str(error)) from error


def _object(path: Path, form: TypeAdapter[Any]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "JSON in UTF-8", str(error)) from error
    return _of_form(content, form, path)


def _lines(path: Path, form: TypeAdapter[Any]) -> Iterator[dict[str, Any]]:
    """The records of a file, none where there is none; a last line that was cut off by the run's end is left out."""
    if not path.is_file():
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise _damaged(path, "one JSON object per line, in UTF-8", str(error)) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise _damaged(path, "one JSON object per line", f"line {number}: {error}") from error
        yield _of_form(record, form, path, f"line {number}")


def _of_form(content: Any, form: TypeAdapter[Any], path: Path, where: str = "") -> dict[str, Any]:
    """Return `content`, JSON of `where` in a file, if it has the form of what this package writes."""
    try:
        form.validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ", ".join([*([where] if where else ()), ".".join(map(str, first["loc"]))]).strip(", ")
        got = f"{first['input']!r:.40}" + (f" ({place})" if place else "")
        raise _damaged(path, f"what a run writes: {first['msg'][0].lower()}{first['msg'][1:]}", got) from error
    found: dict[str, Any] = content
    return found


def _wrong(directory: Path, got: str, remedy: str) -> ReportError:
    run = f"a run's output folder (with {RUN_FOLDER}/{RUN_FILE})"
    return ReportError.about(str(directory), f"{run}, one with {STUDY_FILE}, or a folder of such folders", got, remedy)


def _damaged(path: Path, expected: str, got: str) -> ReportError:
    return ReportError.about(str(path), expected, got, "The file was cut off or changed; run again what wrote it.")

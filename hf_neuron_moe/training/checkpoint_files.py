"""Checkpoint folders on the disk: which are complete, which was written last, which may go.

A folder being written holds ``neuron_moe_saving.json``. When all else is on the disk that file gets a list of the
others with their sizes and takes the name ``neuron_moe_complete.json``, in one step. So a folder is

* complete, if it has the mark and every file that the mark names, of that size;
* incomplete, if it has the mark or the other file, but is not complete, or if it is empty: a process was killed while
  writing or removing it;
* unmarked, if it has neither: the stock Trainer wrote it, and nobody can tell whether to its end.

Marks are numbered as they are written: the newest checkpoint is known without clocks, also where an earlier run left
folders with higher steps.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hf_neuron_moe.errors import NeuronMoEWarning

COMPLETE_FILE = "neuron_moe_complete.json"
SAVING_FILE = "neuron_moe_saving.json"
REPLACED = "replaced-"
"""Before the name of a checkpoint whose step is being written anew; it serves until the new one is complete."""

_FOLDER = re.compile(rf"^(?:{REPLACED})?checkpoint-(\d+)$")


class State(Enum):
    """What a checkpoint folder is."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    UNMARKED = "unmarked"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder as found."""

    folder: Path
    step: int  # optimizer steps before it was written, from its name; -1 under a name of another form
    state: State
    sequence: int = 0  # number of its mark; 0 without one
    problem: str = ""  # what is wrong with an incomplete one


def begin(folder: Path) -> None:
    """Make way for a checkpoint that is about to be written, and note in its folder that it is not complete.

    An incomplete folder of that name is removed; any other is set aside until :func:`mark_complete`.
    """
    if folder.exists():
        if inspect(folder).state is State.INCOMPLETE:
            remove(folder)
        else:
            aside = folder.with_name(REPLACED + folder.name)
            if aside.exists():
                remove(aside)
            os.rename(folder, aside)
    os.makedirs(folder)
    _write(folder / SAVING_FILE, "{}\n")
    _sync(folder)


def mark_complete(folder: str | os.PathLike[str]) -> None:
    """Bring a checkpoint to the disk and mark it as complete, as the last thing done to it.

    Call it when all processes have written their files. Returns when files, names and mark are on the disk; after an
    ``OSError`` the folder is not marked. Files added later do not matter; those it has now must not be changed.
    """
    home = Path(folder)
    files: dict[str, int] = {}
    for path in sorted(home.rglob("*")):
        if path.name in (COMPLETE_FILE, SAVING_FILE) and path.parent == home:
            continue
        _sync(path)
        if path.is_file():
            files[path.relative_to(home).as_posix()] = path.stat().st_size
    sequence = 1 + max((found.sequence for found in checkpoints_in(home.parent)), default=0)
    content = {"format": 1, "sequence": sequence, "files": files}
    _write(home / SAVING_FILE, json.dumps(content, indent=1) + "\n")
    _sync(home)
    os.replace(home / SAVING_FILE, home / COMPLETE_FILE)
    _sync(home)
    _sync(home.parent)


def inspect(folder: Path) -> Checkpoint:
    """Say what a checkpoint folder is."""
    match = _FOLDER.match(folder.name)
    step = int(match[1]) if match else -1

    def incomplete(problem: str, sequence: int = 0) -> Checkpoint:
        return Checkpoint(folder, step, State.INCOMPLETE, sequence, problem)

    if not (folder / COMPLETE_FILE).is_file():
        if (folder / SAVING_FILE).exists():
            return incomplete("its writing was interrupted")
        if folder.is_dir() and not any(folder.iterdir()):
            return incomplete("it is empty")
        return Checkpoint(folder, step, State.UNMARKED)
    try:
        mark = json.loads((folder / COMPLETE_FILE).read_text(encoding="utf-8"))
        sequence, files = int(mark["sequence"]), dict(mark["files"])
    except (ValueError, KeyError, TypeError):
        return incomplete(f"{COMPLETE_FILE} cannot be read")
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return incomplete(f"{name} is missing", sequence)
        if path.stat().st_size != size:
            return incomplete(f"{name} has {path.stat().st_size} bytes instead of {size}", sequence)
    return Checkpoint(folder, step, State.COMPLETE, sequence)


def checkpoints_in(output_dir: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the checkpoints of a run, the last written last; unmarked and half-written ones come first, by step."""
    home = Path(output_dir)
    folders = [path for path in home.iterdir() if _FOLDER.match(path.name) and path.is_dir()] if home.is_dir() else []
    return sorted(map(inspect, folders), key=lambda found: (found.sequence, found.step, found.folder.name))


def find_last_complete(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint of a killed run that was written last, or None.

    Incomplete ones are never chosen and are named in a warning. Neither are those of the stock Trainer, which have no
    mark: give the path of one that you know to be whole. They are named where none with a mark has their step.
    """
    found = checkpoints_in(output_dir)
    complete = [each for each in found if each.state is State.COMPLETE]
    last = complete[-1] if complete else None
    passed = [f"{each.folder.name} ({each.problem})" for each in found if each.state is State.INCOMPLETE]
    passed += [
        f"{each.folder.name} (without a mark, as the stock Trainer writes it; give its path to resume from it)"
        for each in found
        if each.state is State.UNMARKED and (last is None or each.step > last.step)
    ]
    if passed:
        chosen = f"{last.folder.name} is the last complete one." if last else "There is no complete one."
        warnings.warn(f"{output_dir}: passed over {', '.join(passed)}. {chosen}", NeuronMoEWarning, stacklevel=2)
    return None if last is None else last.folder


def rotate(output_dir: str | os.PathLike[str], limit: int | None, keep: str | None = None) -> None:
    """Remove what is not needed any more, once a new checkpoint is complete: checkpoints that were set aside.

    With a `limit` (``save_total_limit``; None or 0 keeps all), so are all complete ones but the last `limit`, the best
    one `keep` among them, and incomplete ones. The last complete one never goes, and unmarked ones are left alone.
    """
    found = checkpoints_in(output_dir)
    complete = [each.folder for each in found if each.state is State.COMPLETE]
    if not complete:
        return
    newest, best = complete[-1], None if keep is None else Path(keep).resolve()
    doomed = [each.folder for each in found if each.folder.name.startswith(REPLACED)]
    if limit is not None and limit > 0:
        doomed += [each.folder for each in found if each.state is State.INCOMPLETE]
        standing = [folder for folder in complete if folder not in doomed]
        spare = [folder for folder in standing if folder != newest and folder.resolve() != best]
        doomed += spare[: max(len(standing) - limit, 0)]
    for folder in [each for each in dict.fromkeys(doomed) if each != newest]:
        try:
            remove(folder)
        except OSError as error:
            warnings.warn(f"{folder} cannot be removed: {error}", NeuronMoEWarning, stacklevel=2)


def remove(folder: Path) -> None:
    """Remove a checkpoint such that it is incomplete, not unmarked, wherever that is interrupted."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.name in (COMPLETE_FILE, SAVING_FILE), path.name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
    os.rmdir(folder)


def _write(path: Path, content: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Return when a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

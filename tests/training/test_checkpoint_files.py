"""Checkpoint folders: marks, what is chosen to resume from, what is removed and in which order."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from hf_neuron_moe.errors import NeuronMoEWarning
from hf_neuron_moe.training import checkpoint_files
from hf_neuron_moe.training.checkpoint_files import (
    COMPLETE_FILE,
    SAVING_FILE,
    State,
    begin,
    checkpoints_in,
    find_last_complete,
    inspect,
    mark_complete,
    rotate,
)


def written(folder: Path, content: str = "weights") -> Path:
    """A checkpoint that lacks only its mark."""
    begin(folder)
    (folder / "part").mkdir()
    (folder / "model.safetensors").write_text(content)
    (folder / "part" / "state.pt").write_text("state")
    return folder


def complete(folder: Path, content: str = "weights") -> Path:
    mark_complete(written(folder, content))
    return folder


def states(home: Path) -> dict[str, State]:
    return {found.folder.name: found.state for found in checkpoints_in(home)}


def test_a_mark_names_every_file_and_comes_after_all_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "checkpoint-2")
    assert inspect(folder).state is State.INCOMPLETE
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_replace(old: Path, new: Path) -> None:
        events.append("renamed")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    mark_complete(folder)
    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    names = ("model.safetensors", "part/state.pt", "part", SAVING_FILE, "")
    assert set(before) == {os.path.realpath(folder / name) for name in names}
    assert after == [os.path.realpath(folder), os.path.realpath(tmp_path)]
    mark = json.loads((folder / COMPLETE_FILE).read_text())
    assert mark == {"format": 1, "sequence": 1, "files": {"model.safetensors": 7, "part/state.pt": 5}}
    assert not (folder / SAVING_FILE).exists()
    assert inspect(folder).state is State.COMPLETE


def test_the_last_written_complete_one_is_found(tmp_path: Path) -> None:
    assert find_last_complete(tmp_path / "absent") is None
    assert find_last_complete(tmp_path) is None
    complete(tmp_path / "checkpoint-10")  # left by an earlier run
    complete(tmp_path / "checkpoint-2")
    assert find_last_complete(tmp_path) == tmp_path / "checkpoint-2"
    complete(tmp_path / "checkpoint-4")
    complete(tmp_path / "other-20")
    assert find_last_complete(tmp_path) == tmp_path / "checkpoint-4"


@pytest.mark.parametrize("damage", ["cut", "missing", "mark", "written"])
def test_an_incomplete_one_is_named_and_never_chosen(tmp_path: Path, damage: str) -> None:
    complete(tmp_path / "checkpoint-2")
    folder = written(tmp_path / "checkpoint-4") if damage == "written" else complete(tmp_path / "checkpoint-4")
    problem = "its writing was interrupted"
    if damage == "cut":
        os.truncate(folder / "part" / "state.pt", 3)
        problem = "part/state.pt has 3 bytes instead of 5"
    elif damage == "missing":
        (folder / "model.safetensors").unlink()
        problem = "model.safetensors is missing"
    elif damage == "mark":
        os.truncate(folder / COMPLETE_FILE, 10)
        problem = f"{COMPLETE_FILE} cannot be read"
    with pytest.warns(NeuronMoEWarning) as caught:
        assert find_last_complete(tmp_path) == tmp_path / "checkpoint-2"
    assert get_last_checkpoint(str(tmp_path)) == str(folder)  # what the stock Trainer would resume from
    assert str(caught[0].message) == (
        f"{tmp_path}: passed over checkpoint-4 ({problem}). checkpoint-2 is the last complete one."
    )


def test_a_stock_checkpoint_is_taken_only_by_path(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.safetensors").write_text("weights")
    with pytest.warns(NeuronMoEWarning, match=r"checkpoint-3 \(without a mark.*There is no complete one"):
        assert find_last_complete(tmp_path) is None
    complete(tmp_path / "checkpoint-4")
    assert find_last_complete(tmp_path) == tmp_path / "checkpoint-4"  # newer anyway: no warning
    rotate(tmp_path, 1)
    assert states(tmp_path) == {"checkpoint-3": State.UNMARKED, "checkpoint-4": State.COMPLETE}


def test_one_without_a_mark_is_not_named_where_one_with_a_mark_has_its_step(tmp_path: Path) -> None:
    (tmp_path / "replaced-checkpoint-4").mkdir()
    (tmp_path / "replaced-checkpoint-4" / "weights").touch()
    last = complete(tmp_path / "checkpoint-4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint_files.find_last_complete(tmp_path) == last
    (tmp_path / "replaced-checkpoint-4").rename(tmp_path / "checkpoint-5")
    with pytest.warns(NeuronMoEWarning, match="checkpoint-5 .without a mark"):
        assert checkpoint_files.find_last_complete(tmp_path) == last


def test_rotation_counts_complete_ones_and_clears_the_rest(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        complete(tmp_path / f"checkpoint-{step}")
    written(tmp_path / "checkpoint-10")
    rotate(tmp_path, None)
    rotate(tmp_path, 0)
    assert len(states(tmp_path)) == 5
    rotate(tmp_path, 2, keep=str(tmp_path / "checkpoint-2"))
    assert states(tmp_path) == dict.fromkeys(("checkpoint-2", "checkpoint-8"), State.COMPLETE)
    rotate(tmp_path, 1)
    assert states(tmp_path) == {"checkpoint-8": State.COMPLETE}


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_rotation_leaves_as_many_as_it_is_told(tmp_path: Path, limit: int) -> None:
    for step in (2, 4, 6, 8):
        complete(tmp_path / f"checkpoint-{step}")
    rotate(tmp_path, limit)
    assert list(states(tmp_path)) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)[-limit:]]


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("best", ["run/checkpoint-2", "./run/../run/checkpoint-2/", "link/checkpoint-2"])
def test_the_best_one_stays_however_its_path_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absolute: bool, best: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run", target_is_directory=True)
    run = tmp_path / "run" if absolute else Path("run")
    for step in (2, 4, 6):
        complete(run / f"checkpoint-{step}")
    rotate(run, 2, keep=best)
    assert states(run) == dict.fromkeys(("checkpoint-2", "checkpoint-6"), State.COMPLETE)
    rotate(run, 1, keep=str(tmp_path / best))
    assert states(run) == dict.fromkeys(("checkpoint-2", "checkpoint-6"), State.COMPLETE)  # the last one stays, too


def test_the_last_complete_one_is_never_removed(tmp_path: Path) -> None:
    complete(tmp_path / "checkpoint-2")
    written(tmp_path / "checkpoint-4")
    rotate(tmp_path, 1)
    assert states(tmp_path) == {"checkpoint-2": State.COMPLETE}
    only = written(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    rotate(tmp_path, 1)
    assert states(tmp_path).keys() == {"checkpoint-2", only.name}  # nothing complete: nothing is touched


def test_a_step_written_anew_leaves_the_old_one_until_it_is_complete(tmp_path: Path) -> None:
    folder = complete(tmp_path / "checkpoint-2", "old")
    written(folder, "new")
    old = tmp_path / "replaced-checkpoint-2"
    with pytest.warns(NeuronMoEWarning, match="checkpoint-2"):
        assert find_last_complete(tmp_path) == old
    assert (old / "model.safetensors").read_text() == "old"
    written(folder, "newer")  # the next attempt, after a kill
    assert states(tmp_path) == {"checkpoint-2": State.INCOMPLETE, old.name: State.COMPLETE}
    mark_complete(folder)
    assert find_last_complete(tmp_path) == folder
    rotate(tmp_path, None)
    assert states(tmp_path) == {"checkpoint-2": State.COMPLETE}
    assert (folder / "model.safetensors").read_text() == "newer"


@pytest.mark.parametrize("calls", range(1, 5))
def test_an_interrupted_removal_never_looks_complete_or_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    folder = complete(tmp_path / "checkpoint-2")
    left = [calls]

    class Killed(BaseException):
        pass

    def counted(function):
        def call(*args, **kwargs):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, pytest.raises(Killed):
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        checkpoint_files.remove(folder)
        raise AssertionError("not interrupted")
    assert inspect(folder).state is State.INCOMPLETE


def test_what_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        complete(tmp_path / f"checkpoint-{step}")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_files, "remove", refuse)
    with pytest.warns(NeuronMoEWarning, match="checkpoint-2 cannot be removed.*Permission denied"):
        rotate(tmp_path, 1)

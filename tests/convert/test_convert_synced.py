"""A folder takes its name when all its files, and their names, are on the disk; then that name is brought there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, finalize_checkpoint
from hf_neuron_moe.convert.transaction import commit, disk, resume
from tests.unsynced import real_fsync

OPTIONS = ConvertOptions("bf16", "kernel", max_shard_bytes=40_000)


@pytest.fixture(autouse=True)
def _synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the disk here, as the package does: other tests leave that out."""
    monkeypatch.setattr(os, "fsync", real_fsync)


class Recorder:
    """Keeps what the disk was asked for, in order, as ``(function, path, ...)``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, ...]] = []
        for name in ("create", "write_at", "fsync", "fsync_folder", "rename", "exchange"):
            monkeypatch.setattr(disk, name, self._noting(name, getattr(disk, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            paths = arguments if name in ("rename", "exchange") else arguments[:1]
            if name != "exchange" or result:
                self.events.append((name, *(str(path if isinstance(path, Path) else path.name) for path in paths)))
            return result

        return call

    def at_each_rename(self) -> Iterator[tuple[str, str, set[str]]]:
        """Give old name, new name, and what a power cut just before would have taken: names and contents."""
        lost: set[str] = set()
        for name, path, *rest in self.events:
            if name == "create":
                lost |= {f"name of {path}", f"content of {path}"}
            elif name == "write_at":
                lost.add(f"content of {path}")
            elif name == "fsync":
                lost.discard(f"content of {path}")
            elif name == "fsync_folder":
                lost = {
                    each for each in lost if each.startswith("content") or os.path.dirname(each) != f"name of {path}"
                }
            else:
                yield path, rest[0], set(lost)
                lost = {each.replace(f" of {path}", f" of {rest[0]}") for each in lost} | {f"name of {rest[0]}"}
        yield "", "", lost


@pytest.mark.parametrize("way", ["fresh", "replaced", "without exchange", "exported", "in parts"])
def test_all_is_on_the_disk_before_the_folder_takes_its_name(
    way: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = checkpoint("llama"), tmp_path / "dst"
    if way in ("replaced", "without exchange"):
        convert_checkpoint(source, destination, ConvertOptions("mxfp8", "fused"))
    if way == "exported":
        convert_checkpoint(source, tmp_path / "converted", OPTIONS)
    if way == "without exchange":
        monkeypatch.setattr(disk, "exchange", lambda first, second: False)
    recorder = Recorder(monkeypatch)
    if way == "exported":
        export_checkpoint(tmp_path / "converted", destination)
    elif way == "in parts":
        for number in (1, 2):
            convert_checkpoint(source, destination, OPTIONS, part=(number, 2))
        finalize_checkpoint(source, destination)
    else:
        convert_checkpoint(source, destination, OPTIONS, force=way != "fresh")
    renames = list(recorder.at_each_rename())
    (lost,) = [lost for _, new, lost in renames if new == str(destination)]
    inside = str(commit.partial_of(destination) / commit.FOLDER)
    assert [each for each in lost if inside in each] == []
    assert f"name of {destination}" not in renames[-1][2]
    assert len({event[-1] for event in recorder.events if event[-1].startswith(inside)}) > 2


def test_a_shard_is_on_the_disk_before_it_is_remembered_as_finished(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst", OPTIONS)
    home = commit.partial_of(tmp_path / "dst")
    shards, record = 0, ""
    for _, new, lost in recorder.at_each_rename():
        assert f"name of {record}" not in lost, "a power cut would have two shards made again"
        record = new if Path(new).parent == home / resume.DONE else ""
        if Path(new).parent == home / resume.DONE:
            shard = home / commit.FOLDER / Path(new).name.removesuffix(resume.RECORD_SUFFIX)
            assert [each for each in lost if str(shard) in each] == []
            shards += 1
    assert shards > 2

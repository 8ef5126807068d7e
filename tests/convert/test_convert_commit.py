"""An output folder appears complete or not at all, whatever the operating system refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from hf_neuron_moe.convert import (
    MANIFEST_FILE,
    ConvertOptions,
    commands,
    convert_checkpoint,
    export,
    export_checkpoint,
    finalize_checkpoint,
)
from hf_neuron_moe.convert.io import shard
from hf_neuron_moe.convert.manifest import FORMAT_VERSION, sealed
from hf_neuron_moe.convert.transaction import commit, disk
from hf_neuron_moe.errors import ConversionError, DestinationError, DiskError, SourceDamageError
from tests.refusals import refused

OPTIONS = ConvertOptions("bf16", "kernel", max_shard_bytes=40_000)
TWO_SHARDS = ConvertOptions("bf16", "kernel", max_shard_bytes=100_000)
CODES = (errno.ENOSPC, errno.EIO, errno.EACCES)
"""The package asks no error for its number, so that one sweep over the calls takes them in turn."""


class FailingCalls:
    """Counts calls of wrapped functions and makes one of them fail."""

    def __init__(self, fail_at: int | None, code: int = errno.ENOSPC) -> None:
        self.count = 0
        self.fail_at = fail_at
        self.code = code

    def wrap(self, function):
        """Return `function` with the failure in front of it."""

        def call(*arguments, **keywords):
            self.count += 1
            if self.count == self.fail_at:
                raise OSError(self.code, os.strerror(self.code))
            return function(*arguments, **keywords)

        return call


def install(monkeypatch: pytest.MonkeyPatch, calls: FailingCalls) -> None:
    """Let every fsync, rename, tensor write and file open of a conversion count and fail."""
    for name in ("fsync", "rename"):
        monkeypatch.setattr(commit.os, name, calls.wrap(getattr(os, name)))
    monkeypatch.setattr(shard.ShardWriter, "write", calls.wrap(shard.ShardWriter.write))
    monkeypatch.setattr(shard.ShardWriter, "__init__", calls.wrap(shard.ShardWriter.__init__))


def count_calls(source: Path, destination: Path, force: bool) -> int:
    """Number of calls that can fail in one conversion."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = FailingCalls(None)
        install(monkeypatch, calls)
        convert_checkpoint(source, destination, TWO_SHARDS, force=force, workers=1)  # calls in one order
    return calls.count


def test_failure_at_every_call_leaves_no_destination(checkpoint, snapshot, tmp_path):
    source = checkpoint("llama")
    before = snapshot(source)
    total = count_calls(source, tmp_path / "counted", force=False)
    assert total > 30
    beside = {path.name for path in tmp_path.iterdir()}
    for number in range(1, total + 1):
        code = CODES[number % len(CODES)]
        with pytest.MonkeyPatch.context() as monkeypatch:
            install(monkeypatch, FailingCalls(number, code))
            with refused(DiskError, tmp_path / "dst", os.strerror(code)):
                convert_checkpoint(source, tmp_path / "dst", TWO_SHARDS, workers=1)
        left = {path.name for path in tmp_path.iterdir()} - beside
        # Only the sync of the parent folder comes after the rename: then the conversion is there and complete.
        assert left == (set() if number < total else {"dst"}), f"call {number} of {total}"
    assert (tmp_path / "dst" / MANIFEST_FILE).is_file()
    assert snapshot(source) == before


def test_failure_at_every_call_keeps_the_conversion_that_was_to_be_replaced(checkpoint, snapshot, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", "fused"))
    earlier = snapshot(tmp_path / "dst")
    convert_checkpoint(source, tmp_path / "counted", TWO_SHARDS)
    newer = snapshot(tmp_path / "counted")
    total = count_calls(source, tmp_path / "counted", force=True)
    beside = {path.name for path in tmp_path.iterdir()}
    kept = 0
    for number in range(1, total + 1):
        with pytest.MonkeyPatch.context() as monkeypatch:
            install(monkeypatch, FailingCalls(number))
            with pytest.raises(ConversionError):
                convert_checkpoint(source, tmp_path / "dst", TWO_SHARDS, force=True, workers=1)
        now = snapshot(tmp_path / "dst")
        assert now in (earlier, newer), f"call {number} of {total} left a mixture"
        kept += now == earlier
        assert {path.name for path in tmp_path.iterdir()} - beside <= {"dst.replaced"}
    assert kept == total - 1, "everything before the last sync keeps the earlier conversion"


def test_interrupt_cleans_up(checkpoint, tmp_path, monkeypatch):
    source = checkpoint("llama")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "dst", OPTIONS, progress=interrupt)
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


def test_manifest_is_written_last(checkpoint, tmp_path, monkeypatch):
    synced: list[str] = []
    original = disk.fsync

    def record(file) -> None:
        synced.append(Path(file.name).name)
        original(file)

    monkeypatch.setattr(disk, "fsync", record)
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst", OPTIONS)
    written = [name for name in synced if (tmp_path / "dst" / name).exists()]  # the others are records of the job
    assert written[-1] == MANIFEST_FILE
    assert sorted(written) == sorted(path.name for path in (tmp_path / "dst").iterdir())


def test_existing_destination_needs_force_and_must_be_ours(checkpoint, snapshot, tmp_path):
    source = checkpoint("llama")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with refused(DestinationError, theirs, got="something without" if force else "an existing one"):
            convert_checkpoint(source, theirs, OPTIONS, force=force)
    assert snapshot(theirs) == {"thesis.txt": b"years of work"}
    convert_checkpoint(source, tmp_path / "dst", OPTIONS)
    with refused(DestinationError, tmp_path / "dst", "--force"):
        convert_checkpoint(source, tmp_path / "dst", OPTIONS)
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "fused"), force=True)
    assert {path.name for path in tmp_path.iterdir()} == {source.name, "theirs", "dst"}
    assert len(list((tmp_path / "dst").glob("neuron-*.safetensors"))) == 1


@pytest.mark.parametrize("entered", [commands.opened, commands.write_rest], ids=["before it starts", "at its end"])
@pytest.mark.parametrize("taker", ["conversion", "folder"])
def test_a_name_that_another_takes_meanwhile_is_theirs(entered, taker, checkpoint, snapshot, tmp_path, monkeypatch):
    """A conversion takes hours: one that is not asked to replace anything replaces nothing that came since."""
    source, destination = checkpoint("llama"), tmp_path / "dst"

    def taken_first(*arguments, **options):
        monkeypatch.undo()
        if taker == "folder":
            destination.mkdir()
            (destination / "thesis.txt").write_text("years of work")
        elif entered is commands.opened:
            convert_checkpoint(source, destination, TWO_SHARDS)
        else:
            shutil.copytree(earlier, destination)
        taken.update(snapshot(destination))
        return entered(*arguments, **options)

    taken: dict[str, bytes] = {}
    convert_checkpoint(source, earlier := tmp_path / "earlier", TWO_SHARDS)
    monkeypatch.setattr(commands, entered.__name__, taken_first)
    with refused(DestinationError, destination, got="an existing one"):
        convert_checkpoint(source, destination, OPTIONS)
    assert taken and snapshot(destination) == taken and not commit.partial_of(destination).exists()


def test_force_replaces_no_folder_that_came_meanwhile(checkpoint, snapshot, tmp_path, monkeypatch):
    source, destination = checkpoint("llama"), tmp_path / "dst"
    make_rest = commands.write_rest

    def taken_first(*arguments):
        destination.mkdir()
        (destination / "thesis.txt").write_text("years of work")
        return make_rest(*arguments)

    monkeypatch.setattr(commands, "write_rest", taken_first)
    with refused(DestinationError, destination, got="something without"):
        convert_checkpoint(source, destination, OPTIONS, force=True)
    assert snapshot(destination) == {"thesis.txt": b"years of work"}


def test_a_partial_folder_that_came_meanwhile_stays(checkpoint, snapshot, tmp_path, monkeypatch):
    source, partial = checkpoint("llama"), tmp_path / "dst.partial"

    def taken_first(*arguments, **options):
        partial.mkdir(exist_ok=True)
        (partial / "thesis.txt").write_text("years of work")
        return entered(*arguments, **options)

    entered = commands.opened
    monkeypatch.setattr(commands, "opened", taken_first)
    with refused(DestinationError, tmp_path / "dst", got="a folder of that name"):
        convert_checkpoint(source, tmp_path / "dst", OPTIONS)
    assert snapshot(partial) == {"thesis.txt": b"years of work"}


def test_half_a_replacement_is_finished_by_who_may_replace(checkpoint, snapshot, tmp_path, monkeypatch):
    """A run with force is killed between its two renames; the folder that it made is still there for another."""
    source, destination = checkpoint("llama"), tmp_path / "dst"
    convert_checkpoint(source, destination, TWO_SHARDS)
    earlier, partial = snapshot(destination), commit.partial_of(destination)
    with monkeypatch.context() as killed:
        killed.setattr(disk, "exchange", lambda *_: False)
        killed.setattr(commit, "give_up", lambda *_: None)
        rename, names = disk.rename, []

        def once(old, new):
            if new == destination and names:
                raise KeyboardInterrupt
            names.append(new)
            rename(old, new)

        killed.setattr(disk, "rename", lambda old, new: once(old, new) if partial in old.parents else rename(old, new))
        names.append(None)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, destination, OPTIONS, force=True)
    assert not destination.exists() and (partial / commit.OLD).is_dir() and (partial / commit.FOLDER).is_dir()
    for options in ({}, {"resume": True}):
        with refused(DestinationError, destination, got="an existing one" if not options else "one of others"):
            convert_checkpoint(source, destination, OPTIONS, **options)
        assert snapshot(destination) == earlier and (partial / commit.FOLDER).is_dir()
    convert_checkpoint(source, destination, OPTIONS, force=True, resume=True)
    assert snapshot(destination) != earlier and not partial.exists()


def test_an_export_takes_no_name_that_came_meanwhile(checkpoint, snapshot, tmp_path, monkeypatch):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst", OPTIONS)

    def taken_first(*arguments, **options):
        (tmp_path / "back").mkdir()
        return side_files(*arguments, **options)

    side_files = export._write_side_files
    monkeypatch.setattr(export, "_write_side_files", taken_first)
    with refused(DestinationError, tmp_path / "back", got="an existing one"):
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert snapshot(tmp_path / "back") == {} and not commit.partial_of(tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "/", "n" * 248, "ä" * 124])
def test_a_destination_needs_a_name(name, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, shown = checkpoint("llama"), name if len(name) > 2 else repr(str(Path(name)))
    with refused(DestinationError, shown, where="convert"):
        convert_checkpoint(source, Path(name), OPTIONS)
    convert_checkpoint(source, Path("n" * 247), OPTIONS)
    with refused(DestinationError, shown, where="export"):
        export_checkpoint(Path("n" * 247), Path(name))
    with refused(DestinationError, shown, where="finalize"):
        finalize_checkpoint(source, Path(name), OPTIONS)


def test_leftover_of_a_killed_run_is_cleared_but_nothing_else(checkpoint, tmp_path):
    source = checkpoint("llama")
    partial = commit.partial_of(tmp_path / "dst")
    partial.mkdir()
    (partial / "notes.txt").write_text("not ours")
    with refused(DestinationError, tmp_path / "dst", got="a folder of that name"):
        convert_checkpoint(source, tmp_path / "dst", OPTIONS)
    assert (partial / "notes.txt").read_text() == "not ours"
    (partial / commit.MARKER_FILE).touch()
    convert_checkpoint(source, tmp_path / "dst", OPTIONS)
    assert not partial.exists()
    assert not (tmp_path / "dst" / "notes.txt").exists()


@pytest.mark.parametrize("place", ["same", "inside", "around"])
def test_destination_may_not_overlap_the_source(place, checkpoint, snapshot):
    source = checkpoint("llama")
    before = snapshot(source)
    destination = {"same": source, "inside": source / "dst", "around": source.parent}[place]
    with refused(DestinationError, destination, got="one that contains the other"):
        convert_checkpoint(source, destination, OPTIONS, force=True)
    assert snapshot(source) == before


def test_missing_parent(checkpoint, tmp_path):
    with refused(DestinationError, tmp_path / "no/dst", got="no folder"):
        convert_checkpoint(checkpoint("llama"), tmp_path / "no" / "dst", OPTIONS)
    assert not (tmp_path / "no").exists()


def test_export_refuses_a_conversion_that_was_tampered_with(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst", OPTIONS)
    manifest = tmp_path / "dst" / MANIFEST_FILE
    text = manifest.read_text()
    for old, new, kind, message in [
        ('"model.safetensors"', '"../up.safetensors"', SourceDamageError, "file name"),
        (f'"format_version": {FORMAT_VERSION}', '"format_version": 999', ConversionError, "format version 999"),
        ('"tensors"', '"tensor"', SourceDamageError, "unknown field 'tensor'"),
        ('"layout": "kernel"', '"layout": "colonel"', SourceDamageError, "layout"),
        ("{", "[", SourceDamageError, "JSONDecodeError"),
    ]:
        assert old in text
        changed = text.replace(old, new)
        # As somebody would write it who knows the format, and as chance would.
        knowing = json.dumps(sealed(json.loads(changed))) if new != "[" else changed
        for content, shown in ((knowing, message), (changed, f"{message}|checksum")):
            manifest.write_text(content)
            with refused(kind, manifest, shown):
                export_checkpoint(tmp_path / "dst", tmp_path / "back")
    manifest.write_text(text)
    shard_file = sorted((tmp_path / "dst").glob("neuron-*.safetensors"))[0]
    shard_file.write_bytes(shard_file.read_bytes()[:-2])
    with refused(SourceDamageError, f"{shard_file.name}: data"):
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
    shard_file.unlink()
    with refused(SourceDamageError, shard_file.name):
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {source.name, "dst"}


def test_a_lock_on_a_folder_that_its_owner_removed_is_taken_again(tmp_path, monkeypatch):
    home, destination, lock, locked = tmp_path / "dst.partial", tmp_path / "dst", commit._lock, []

    def removed_first(descriptor, *, shared):
        if not locked:
            home.rmdir()
            home.mkdir()
        locked.append(descriptor)
        return lock(descriptor, shared=shared)

    monkeypatch.setattr(commit, "_lock", removed_first)
    with commit.held(home, destination):
        assert len(locked) == 2
        with pytest.raises(DestinationError, match="another process at work"), commit.held(home, destination):
            pass


def test_the_marker_is_removed_last(tmp_path, monkeypatch):
    """Until then the folder is known as a conversion's, even if the removal is cut off."""
    for name in (commit.MARKER_FILE, "folder", ".a"):
        (tmp_path / name).touch()
    removed = []
    monkeypatch.setattr(disk, "remove_tree", lambda path: removed.append(path.name))
    commit.empty(tmp_path)
    assert removed == [".a", "folder", commit.MARKER_FILE]

"""Files are written whole or not at all, links stay, and what is no file is an error before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_neuron_moe.errors import DestinationError, DiskError
from hf_neuron_moe.output_files import check_file, replacing, why_no_folder
from tests.refusals import refused


@pytest.mark.parametrize("write", [check_file, lambda path: replacing(path).__enter__()])
def test_what_is_no_file_is_an_error_and_stays(write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "lost").symlink_to("nowhere/file")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for name, got in (
        ("pipe", "a device, a pipe or a socket"),
        ("link", "a device, a pipe or a socket"),
        ("lost", "a name in "),
        ("folder", "a folder"),
        ("nowhere/file", "a name in "),
    ):
        with refused(DestinationError, tmp_path / name, got=got):
            raise_named(write, tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "pipe").is_fifo()


def raise_named(write, path: Path) -> None:
    """Call `write`, and name its error as a public function would."""
    try:
        write(path)
    except DestinationError as error:
        raise error.named("explore") from error


@pytest.mark.parametrize("old", ["old", None])
def test_the_target_of_a_link_is_replaced(old: str | None, tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to("folder/target")
    if old is not None:
        target.write_text(old)
    with replacing(link) as partial:
        partial.write_text("new")
        assert partial.parent == target.parent and (target.read_text() if target.exists() else None) == old
    assert link.is_symlink() and target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with (
        pytest.raises(DiskError if isinstance(error, OSError) else KeyboardInterrupt) as caught,
        replacing(path) as new,
    ):
        new.write_text("ne")
        raise error
    assert isinstance(error, KeyboardInterrupt) or f"{path} must be a file that can be written" in str(caught.value)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_can_be_made_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_no_folder(tmp_path / "new" / "folder") is None
    assert why_no_folder(tmp_path / "file" / "below") == f"{tmp_path / 'file'} is no folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

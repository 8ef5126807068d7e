"""Output folders that appear complete or not at all.

Everything is written into ``DST.partial`` beside DST, synced, and renamed at the end. A failure removes the partial
folder and leaves DST as it was; so does an interrupt from the keyboard.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hf_neuron_moe.convert.manifest import MANIFEST_FILE
from hf_neuron_moe.errors import ConversionError, refuse

MARKER_FILE = ".hf-neuron-moe-partial"
"""Lies in every unfinished folder, so that only folders of ours are ever cleared away."""


def check_destination(destination: Path, source: Path, *, force: bool, where: str = "convert") -> None:
    """Refuse a destination that cannot be written, before any work is done.

    Raises:
        ConversionError: it exists and `force` is off or it is no earlier conversion; its parent does not exist; it lies
            in the source or the source in it; or something that is not ours has the partial folder's name.
    """
    expected, remedy = "", ""
    home, target = source.resolve(), destination.resolve()
    partial = partial_of(destination)
    if target == home or home in target.parents or target in home.parents:
        expected, got = "a folder outside the source", "one that contains the other"
        remedy = "Choose another destination."
    elif not target.parent.is_dir():
        expected, got = "in an existing folder", f"no folder {target.parent}"
        remedy = "Make the parent folder first."
    elif (destination.exists() or destination.is_symlink()) and not force:
        expected, got = "a name that is not taken", "an existing one"
        remedy = "Choose another" + (
            ", or use --force to replace an earlier conversion." if where == "convert" else ", or remove it first."
        )
    elif destination.exists() and not (destination / MANIFEST_FILE).is_file():
        expected, got = "new, or an earlier conversion", f"something without {MANIFEST_FILE}"
        remedy = "--force replaces conversions only; remove it yourself if it is not needed."
    elif partial.exists() and not (partial / MARKER_FILE).is_file():
        expected, got = f"a name with {partial.name} free", "a folder of that name that is not an unfinished conversion"
        remedy = "Move it away, or choose another destination."
    if expected:
        raise refuse(ConversionError, where=where, argument=str(destination), expected=expected, got=got, remedy=remedy)


@contextmanager
def committed_folder(destination: Path, where: str = "convert") -> Iterator[Path]:
    """Give a folder to fill, which becomes `destination` when the block ends without an exception.

    The caller has run :func:`check_destination`. Files written inside must have been synced.

    Raises:
        ConversionError: the operating system refused a write; nothing is left behind.
    """
    partial = partial_of(destination)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            (partial / MARKER_FILE).touch()
            yield partial
            (partial / MARKER_FILE).unlink()
            sync_folder(partial)
            _take_name(partial, destination)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise refuse(
            ConversionError,
            where=where,
            argument=str(destination),
            expected="written without an error of the operating system",
            got=f"{type(error).__name__}: {error}",
            remedy="Nothing was left behind. Check free space, permissions and the source's disk.",
        ) from error


def partial_of(destination: Path) -> Path:
    """The folder in which `destination` is made."""
    return destination.with_name(destination.name + ".partial")


def write_file(path: Path, content: bytes) -> None:
    """Write and sync a new file."""
    with path.open("xb") as file:
        file.write(content)
        sync(file)


def sync(file: BinaryIO) -> None:
    """Flush and fsync an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Fsync a folder, so that the names in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_name(partial: Path, destination: Path) -> None:
    """Rename to the final name, with an earlier conversion moved aside until the new one is in place."""
    if not destination.exists():
        os.rename(partial, destination)
        sync_folder(destination.parent)
        return
    aside = destination.with_name(destination.name + ".replaced")
    os.rename(destination, aside)
    try:
        os.rename(partial, destination)
    except OSError:
        os.rename(aside, destination)
        raise
    sync_folder(destination.parent)
    shutil.rmtree(aside)

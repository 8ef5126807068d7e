"""Files that are written whole or not at all, and what a name must be for that. Loads no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hf_neuron_moe.errors import DestinationError, DiskError

_WRITABLE = "a file that can be written"
WRITABLE_FOLDER = "a folder that exists or can be made, and that can be written to"
NAME_ANOTHER = "Name another file."


def check_file(path: Path, fix: str = NAME_ANOTHER) -> None:
    """Raise DestinationError where a file of this name cannot be replaced: call it before long work.

    A folder, a device, a pipe or a socket has the name, or the folder that it lies in does not exist.
    """
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        got = "a folder"
    elif path.exists() and not path.is_file():
        got = "a device, a pipe or a socket"
    elif not folder.is_dir():
        got = f"a name in {path.parent if not path.is_symlink() else folder}, which is no folder"
    else:
        return
    raise DestinationError.about(str(path), _WRITABLE, got, fix)


@contextlib.contextmanager
def replacing(path: Path, fix: str = NAME_ANOTHER) -> Iterator[Path]:
    """Give the path of a new file that replaces `path` when the block ends; a symlink stays, its target is replaced.

    Raises:
        DestinationError: as :func:`check_file` does; DiskError: the operating system refuses to write.
    """
    check_file(path, fix)
    target = Path(os.path.realpath(path))
    partial = target.with_name(target.name + ".partial")
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        if isinstance(error, FileNotFoundError):  # what /proc and the like say of every new file
            got = f"a name in {target.parent}, where no file can be created"
            raise DestinationError.about(str(path), _WRITABLE, got, fix) from error
        raise DiskError.about(str(path), _WRITABLE, error.strerror, fix) from error
    finally:
        with contextlib.suppress(OSError):  # the first error says what is wrong
            partial.unlink(missing_ok=True)


def why_no_folder(folder: str | Path) -> str | None:
    """Return why a folder can neither be written to nor be made, None where it can; nothing of the probe stays."""
    there = Path(folder).absolute()
    try:
        os.lstat(there)
    except ValueError:
        return "characters that it cannot have"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "a name too long"
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=there):
            return None
    except OSError as error:
        return f"{there}: {error.strerror}" if there.is_dir() else f"{there} is no folder"

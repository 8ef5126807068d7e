"""Every call of a conversion that reads weights or changes the disk; each error says which file was meant.

Other files call these through the module (``disk.rename(...)``), so that the tests can make each single call fail, stop
half way, or be the last one of the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

# Bytes given to the kernel at a time: it takes more of them several times slower (Linux 6.18, ext4).
WRITE_BYTES = 1 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h
# What file systems and kernels without an exchanging rename answer.
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def create(path: Path) -> FileIO:
    """Open a new file for writing, unbuffered; one of this name must not exist."""
    return FileIO(path, "xb")


def write_at(file: FileIO, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, and let the kernel start to carry it to the disk, before :func:`fsync` waits."""
    position = 0
    with _naming(file):
        while position < data.nbytes:
            position += os.pwrite(file.fileno(), data[position : position + WRITE_BYTES], offset + position)
        if hasattr(os, "posix_fadvise"):
            # Linux starts writing dirty pages of a range that is said not to be needed, and does not wait for it.
            os.posix_fadvise(file.fileno(), offset, data.nbytes, os.POSIX_FADV_DONTNEED)


def fsync(file: FileIO) -> None:
    """Return when the file's content is on the disk."""
    with _naming(file):
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name; a file of that name is replaced."""
    os.rename(old, new)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step. Returns False, having done nothing, where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
    if library is None or not hasattr(library, "renameat2"):
        return False
    names = (os.fsencode(first), os.fsencode(second))
    if library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def make_folder(path: Path) -> None:
    """Make a folder."""
    os.mkdir(path)


def unlink(path: Path) -> None:
    """Remove a file or a link."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with all it holds. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        unlink(path)
        return
    for entry in sorted(path.iterdir()):
        remove_tree(entry)
    remove_folder(path)


def open_to_read(path: Path) -> FileIO:
    """Open a file for reading, unbuffered."""
    return FileIO(path, "rb")


def read_at(file: FileIO, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` on; returns the number of bytes, fewer only where the file ends."""
    position = 0
    with _naming(file):
        while position < buffer.nbytes:
            count = os.preadv(file.fileno(), [buffer[position:]], offset + position)
            if count == 0:
                break
            position += count
    return position


@contextmanager
def _naming(file: FileIO) -> Iterator[None]:
    """Add the file's name to an error of a call that knew its number only."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from error

"""Output folders that appear complete or not at all.

Everything is written into ``DST.partial`` beside DST: the future folder, and what a resumed run needs to know. Only
when the folder is complete and on the disk does it take the name DST, in one step, also where an earlier conversion has
that name. Names inside the partial folder::

    .hf-neuron-moe-partial   what is being made; while it is there the partial folder is ours
    folder/                  what becomes DST
    writing-*/               files being written by one process
    done/, sources/          records of finished shards and of source files' checksums
    old/                     an earlier conversion on its way out, where names cannot be swapped in one step
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from hf_neuron_moe.convert.io.tensors import CHUNK_BYTES
from hf_neuron_moe.convert.manifest import MANIFEST_FILE
from hf_neuron_moe.convert.transaction import disk
from hf_neuron_moe.errors import DestinationError, DiskError

MARKER_FILE = ".hf-neuron-moe-partial"  # In every partial folder, so that only folders of ours are ever cleared away
SUFFIX = ".partial"
LONGEST_NAME = 255 - len(SUFFIX)  # bytes, on the usual file systems
FOLDER = "folder"
OLD = "old"


def check_destination(destination: Path, source: Path, *, force: bool | None) -> None:
    """Refuse a destination that cannot be written; a `force` of None has no such option.

    It is called before any work is done, when other processes are kept out, and before the name is taken: all may take
    hours, in which another folder may come to have that name.
    """
    check_name(destination)
    home, target, partial = source.resolve(), destination.resolve(), partial_of(destination)
    taken = destination.exists() or destination.is_symlink()
    if target == home or home in target.parents or target in home.parents:
        rule = "a folder outside the source", "one that contains the other", "Choose another destination."
    elif not target.parent.is_dir():
        rule = "in an existing folder", f"no folder {target.parent}", "Make the parent folder first."
    elif taken and not force:
        replace = "or remove it first." if force is None else "or use --force to replace an earlier conversion."
        rule = "a name that is not taken", "an existing one", f"Choose another, {replace}"
    elif destination.is_symlink():
        fix = "Give the folder itself; replacing it here would leave that one as it is and lose the link."
        rule = "a folder's own name", f"a link to {target}", fix
    elif taken and not (destination / MANIFEST_FILE).is_file():
        fix = "--force replaces conversions only; remove it yourself if it is not needed."
        rule = "new, or an earlier conversion", f"something without {MANIFEST_FILE}", fix
    elif not is_free(partial):
        got = "a folder of that name that is not an unfinished conversion"
        rule = f"a name with {partial.name} free", got, "Move it away, or choose another destination."
    else:
        return
    raise DestinationError.about(str(destination), *rule)


def enter(home: Path, destination: Path, source: Path, *, force: bool | None) -> None:
    """Check the destination again where other processes are kept out of `home`.

    What lies in there stays if that fails. Half a replacement is undone first: then the earlier conversion counts.
    """
    try:
        check_destination(destination, source, force=force)
        put_back(home, destination)
        check_destination(destination, source, force=force)
    except DestinationError:
        with suppress(OSError):
            disk.remove_folder(home)  # which is empty, or it was there before
        raise


def check_name(destination: Path) -> None:
    """Refuse what has no name of its own, next to which another folder could be made."""
    if destination.name in ("", ".."):
        got = "the root folder" if destination == destination.parent != Path() else "an empty name, '.' or '..'"
        fix = "Name a folder that does not exist yet; a shell's variable may be empty."
        raise DestinationError.about(repr(str(destination)), "the name of a folder", got, fix)
    size = len(os.fsencode(destination.name))
    if size > LONGEST_NAME:
        expected = f"a name of at most {LONGEST_NAME} bytes, as {SUFFIX} is added while the folder is made"
        raise DestinationError.about(str(destination), expected, f"one of {size}", "Choose a shorter one.")


@contextmanager
def committed_folder(destination: Path, source: Path) -> Iterator[Path]:
    """Give a folder to fill with synced files, which becomes `destination` when the block ends without an exception.

    It must not exist. `source` is what the files are made of.
    """
    home = partial_of(destination)
    with disk_errors(destination), held(home, destination):
        enter(home, destination, source, force=None)
        try:
            empty(home)
            disk.create(home / MARKER_FILE).close()
            disk.make_folder(home / FOLDER)
            yield home / FOLDER
            check_destination(destination, source, force=None)
            take_name(home, destination)
            clear(home)
        except BaseException:
            give_up(home, destination)
            raise


def partial_of(destination: Path) -> Path:
    """The folder in which `destination` is made."""
    return destination.with_name(destination.name + SUFFIX)


def check_space(folder: Path, needed: int) -> None:
    """Raise before hours of work for a folder whose disk cannot hold `needed` more bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        expected, got = f"on a disk with {needed:,} free bytes", f"one with {free:,}"
        raise DiskError.about(str(folder.parent), expected, got, "Free some space or choose another destination.")


def is_free(partial: Path) -> bool:
    """Whether this name is unused, or is an unfinished conversion's: one killed at once has no marker, but no files."""
    if not partial.is_dir():
        return not (partial.exists() or partial.is_symlink())
    names = [entry.name for entry in partial.iterdir()]
    return MARKER_FILE in names or all(name.startswith(MARKER_FILE) for name in names)


@contextmanager
def held(home: Path, destination: Path, *, shared: bool = False) -> Iterator[None]:
    """Make the partial folder if need be, and keep other processes out of it while the block runs.

    `shared` lets others in that ask for the same. A lock ends with its process, however that ends.
    """
    with ExitStack() as stack:
        while not _entered(home, destination, shared, stack):
            stack.close()
        yield


def _entered(home: Path, destination: Path, shared: bool, stack: ExitStack) -> bool:
    """Make the partial folder if need be, open it for the time of `stack`, and lock it.

    Returns False where its owner finished and removed it between opening and locking. A lock on the removed folder
    keeps nobody out of one that a third process may have made of the same name.
    """
    with suppress(FileExistsError):
        disk.make_folder(home)
    with suppress(FileNotFoundError):
        descriptor = os.open(home, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        if not _lock(descriptor, shared=shared):
            expected = "written by one process, or by several with --part"
            got = f"another process at work in {home.name}"
            raise DestinationError.about(str(destination), expected, got, "Wait until it is done.")
        return os.path.samestat(os.fstat(descriptor), os.stat(home))
    return False


def _lock(descriptor: int, *, shared: bool) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass  # Windows and some network file systems know no locks on folders
    return True


@contextmanager
def disk_errors(destination: Path) -> Iterator[None]:
    """Turn errors of the operating system into refusals that say what is left."""
    try:
        yield
    except OSError as error:
        home = partial_of(destination)
        left = "Nothing was left behind."
        if home.exists():
            left = f"What is finished lies in {home}; --resume goes on with it."
            if not (home / FOLDER).exists() and destination.exists():
                left = f"{destination} is complete; remove {home.name} next to it."
        expected = "written without an error of the operating system"
        fix = f"{left} Check free space, permissions and the source's disk."
        raise DiskError.about(str(destination), expected, f"{type(error).__name__}: {error}", fix) from error


@contextmanager
def _new_file(path: Path) -> Iterator[FileIO]:
    """Give a new file, which is synced at the end; what cannot be written completely is removed."""
    file = disk.create(path)
    try:
        with file:
            yield file
            disk.fsync(file)
    except OSError:
        with suppress(OSError):
            disk.unlink(path)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write and sync a new file; what cannot be written completely is removed."""
    with _new_file(path) as file:
        disk.write_at(file, memoryview(content), 0)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file in chunks, sync it and return its SHA-256; what cannot be written completely is removed."""
    digest = hashlib.sha256()
    buffer, position = memoryview(bytearray(CHUNK_BYTES)), 0
    with disk.open_to_read(source) as original, _new_file(target) as file:
        while count := disk.read_at(original, buffer, position):
            digest.update(buffer[:count])
            disk.write_at(file, buffer[:count], position)
            position += count
    return digest.hexdigest()


def take_name(home: Path, destination: Path) -> None:
    """Let the finished folder take its final name; an earlier conversion keeps that name until this moment."""
    folder, old = home / FOLDER, home / OLD
    disk.fsync_folder(folder)
    if not (destination.exists() or destination.is_symlink()):
        disk.rename(folder, destination)
    elif not disk.exchange(folder, destination):
        disk.rename(destination, old)
        try:
            disk.rename(folder, destination)
        except OSError:
            disk.rename(old, destination)
            raise
    disk.fsync_folder(destination.parent)


def put_back(home: Path, destination: Path) -> None:
    """Undo half a replacement: a run was killed between the two renames of :func:`take_name`."""
    if (home / OLD).is_dir() and not destination.exists():
        disk.rename(home / OLD, destination)
        disk.fsync_folder(destination.parent)


def empty(home: Path, prefixes: tuple[str, ...] = ("",)) -> None:
    """Remove what the partial folder holds, or what begins with one of `prefixes`, its marker last."""
    for entry in sorted(home.iterdir(), key=lambda entry: (entry.name.startswith(MARKER_FILE), entry.name)):
        if entry.name.startswith(prefixes):
            disk.remove_tree(entry)


def clear(home: Path) -> None:
    """Remove the partial folder."""
    empty(home)
    disk.remove_folder(home)


def give_up(home: Path, destination: Path) -> None:
    """Remove the partial folder after a failure, as far as the system lets us."""
    with suppress(OSError):
        put_back(home, destination)
        clear(home)

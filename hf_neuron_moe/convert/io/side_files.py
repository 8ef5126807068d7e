"""The files beside the weights: configuration, tokenizer, chat templates, in the folder and in folders of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from hf_neuron_moe.convert.io.bounded import is_relative_path
from hf_neuron_moe.convert.io.source import damaged, inside
from hf_neuron_moe.convert.manifest import MANIFEST_FILE
from hf_neuron_moe.convert.transaction import disk

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")

MOST_FILES = 10_000  # More than any checkpoint has: somebody gave a folder that is no checkpoint's alone


def side_files(folder: Path) -> dict[str, Path]:
    """The files next to the weights that belong to a checkpoint, by their path in it with ``/``, in order.

    Not those of hidden folders and of folders with other weights (``original/``, ``checkpoint-500/``, ``onnx/``).
    """
    found: dict[str, Path] = {}
    for name in files_below(folder, skip=_is_other):
        if name == MANIFEST_FILE or name.endswith(WEIGHT_SUFFIXES):
            continue
        if not is_relative_path(name):
            raise damaged("a file's name", "printable and without any of / \\ : and NUL", repr(name))
        if len(found) == MOST_FILES:
            raise damaged(str(folder), f"a checkpoint's folder with at most {MOST_FILES:,} files", "more")
        found[name] = inside(folder, name)
    return dict(sorted(found.items()))


def files_below(folder: Path, skip: Callable[[Path], bool] = lambda path: False) -> Iterator[str]:
    """Paths of all files in a folder and in its folders but those to skip, with ``/``; links to folders are skipped."""
    pending = [(folder, "")]
    while pending:
        place, prefix = pending.pop()
        for path in sorted(place.iterdir()):
            if path.is_file():
                yield prefix + path.name
            elif path.is_dir() and not path.is_symlink() and not skip(path):
                pending.append((path, f"{prefix}{path.name}/"))


def make_parents(folder: Path, name: str) -> Path:
    """Make the folders in which ``folder/name`` lies and return that path."""
    for parent in reversed(PurePosixPath(name).parents[:-1]):
        with suppress(FileExistsError):
            disk.make_folder(folder / parent)
            disk.fsync_folder((folder / parent).parent)
    return folder / name


def _is_other(folder: Path) -> bool:
    """Whether a folder in the checkpoint's is hidden or has weights, itself or further down."""
    return folder.name.startswith(".") or any(name.endswith(WEIGHT_SUFFIXES) for name in files_below(folder))

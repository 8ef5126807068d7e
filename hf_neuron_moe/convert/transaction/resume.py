"""What an unfinished conversion remembers, so that another run can go on with it.

The partial folder (see ``commit``) says which conversion it belongs to. A finished shard has a record with the
checksums of its tensors, written once the shard is on the disk; a resumed run keeps only shards with these bytes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hf_neuron_moe._version import __version__
from hf_neuron_moe.convert.io.bounded import MAX_MANIFEST_BYTES, read_json, record
from hf_neuron_moe.convert.io.side_files import make_parents
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.plan import ConversionPlan
from hf_neuron_moe.convert.transaction import commit, disk
from hf_neuron_moe.errors import DestinationError

DONE = "done"
SOURCES = "sources"
WRITING = "writing-"
RECORD_SUFFIX = ".json"
PARTS = "parts"


@dataclass(frozen=True)
class ShardRecord:
    """What is known of a finished shard."""

    checksums: dict[str, str]  # Of each tensor's bytes
    rounded: dict[str, int] = field(default_factory=dict)  # By source tensor, values that bf16 did not hold
    sources: dict[str, str] = field(default_factory=dict)  # :func:`version_of` each source file it was made of
    nonfinite: dict[str, int] = field(default_factory=dict)  # By source tensor, NaN and infinite values that were kept


def fingerprint(plan: ConversionPlan) -> str:
    """Identify a conversion: two plans with one fingerprint write the same names, shapes and layouts."""
    source = plan.source
    content = {
        "version": __version__,
        "options": asdict(plan.options),
        "files": {file: (source.directory / file).stat().st_size for file in source.files},
        "format": None if source.format is None else asdict(source.format),
        "source": {name: [t.file, t.dtype, t.shape, t.start] for name, t in source.tensors.items()},
        "weights": {name: [asdict(piece) for piece in weight.pieces] for name, weight in plan.weights.items()},
        "tensors": [asdict(tensor) for tensor in plan.tensors],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def version_of(path: Path) -> str:
    """Size and time of change of a file: another version of it has another."""
    state = path.stat()
    return f"{state.st_size}-{state.st_mtime_ns}"


class Job:
    """The partial folder of one conversion, held by this process."""

    def __init__(self, destination: Path) -> None:
        self.home = commit.partial_of(destination)
        self.folder = self.home / commit.FOLDER
        self._writing = self.home / (WRITING + secrets.token_hex(6))

    def temporary(self, name: str) -> Path:
        """Where to write a file that will be :meth:`publish`-ed; nothing lies there."""
        with suppress(FileExistsError):
            disk.make_folder(self._writing)
        path = self._temporary_path(name)
        if path.exists():
            disk.unlink(path)
        return path

    def publish(self, name: str) -> None:
        """Let a synced temporary file take its place in the future folder, or in a folder of it."""
        place = make_parents(self.folder, name)
        disk.rename(self._temporary_path(name), place)
        disk.fsync_folder(place.parent)

    def record_shard(self, file: str, record: ShardRecord) -> None:
        """Remember a published shard."""
        self._write_record(self.home / DONE / (file + RECORD_SUFFIX), asdict(record))

    def shard_record(self, file: str) -> ShardRecord | None:
        """What is remembered of a shard, or None."""
        content = _read_record(self.home / DONE / (file + RECORD_SUFFIX))
        with suppress(ValueError):
            if content is not None and (self.folder / file).is_file():
                return record(ShardRecord, content)
        return None

    def record_source(self, file: str, version: str, sha256: str) -> None:
        """Remember the checksum of a version of a source file."""
        self._write_record(self._source_path(file, version), {"sha256": sha256})

    def source_sha256(self, file: str, version: str) -> str | None:
        """The remembered checksum of a version of a source file, or None."""
        sha256 = (_read_record(self._source_path(file, version)) or {}).get("sha256")
        return sha256 if isinstance(sha256, str) else None

    def drop_strangers(self, expected: set[str]) -> None:
        """Remove from the future folder, and from folders of it, what does not belong there."""
        folders = {str(parent) for name in expected for parent in PurePosixPath(name).parents}
        for path in sorted(self.folder.rglob("*"), reverse=True):  # a folder after what it holds
            name = path.relative_to(self.folder).as_posix()
            needed = name in folders and path.is_dir() and not path.is_symlink()
            if name not in expected and not needed:
                disk.remove_tree(path)

    def leave(self) -> None:
        """Remove this process's temporary files."""
        if self._writing.exists():
            disk.remove_tree(self._writing)

    def start(self, content: Mapping[str, Any]) -> None:
        """Write the marker, whatever was there, and make the folders."""
        # On the disk before there is anything else in the folder that a power cut could leave without marker.
        marker = self.home / commit.MARKER_FILE
        self._write_record(marker, content, self.home / f"{marker.name}.{secrets.token_hex(6)}")
        self.make_folders()

    def make_folders(self) -> None:
        """Make those folders that are missing: the process that wrote the marker may not have come to that yet."""
        for path in (self.folder, self.home / DONE, self.home / SOURCES):
            with suppress(FileExistsError):
                disk.make_folder(path)
        disk.fsync_folder(self.home)
        disk.fsync_folder(self.home.parent)

    def marker(self) -> dict[str, Any] | None:
        """What the partial folder says it is, or None where it says nothing."""
        return _read_record(self.home / commit.MARKER_FILE)

    def _temporary_path(self, name: str) -> Path:
        return self._writing / name.replace("/", "%2F")

    def _source_path(self, file: str, version: str) -> Path:
        return self.home / SOURCES / f"{file}-{version}{RECORD_SUFFIX}"

    def _write_record(self, path: Path, content: Mapping[str, Any], temporary: Path | None = None) -> None:
        temporary = temporary or self.temporary(path.name)
        commit.write_file(temporary, json.dumps(content, sort_keys=True).encode())
        disk.rename(temporary, path)
        disk.fsync_folder(path.parent)


@contextmanager
def opened(
    destination: Path, plan: ConversionPlan, *, force: bool, resume: bool, part: bool, parts: int | None = None
) -> Iterator[Job]:
    """Hold the partial folder of a conversion: a new one, or one of the same conversion that is to be continued.

    `resume` continues what is there; `part` too, next to other processes that do the same. When the block fails, such a
    folder stays without its temporary files, and any other goes. A new one remembers the number of `parts`.
    """
    job = Job(destination)
    with commit.held(job.home, destination, shared=part):
        commit.enter(job.home, destination, plan.source.directory, force=force)
        try:
            content = {"fingerprint": fingerprint(plan), "options": asdict(plan.options), PARTS: parts}
            found = job.marker() if resume or part else None
            if found is not None:
                _check_same(found, content, destination)
                content[PARTS] = found.get(PARTS)
            if not part:
                commit.empty(job.home, ("",) if found is None else (WRITING, commit.MARKER_FILE + "."))
            if found is None or not part:
                job.start(content)
            else:
                job.make_folders()
            yield job
        except BaseException:
            if resume or part:
                with suppress(OSError):
                    job.leave()
            else:
                commit.give_up(job.home, destination)
            raise


def _check_same(found: Mapping[str, Any], content: Mapping[str, Any], destination: Path) -> None:
    if found.get("fingerprint") != content["fingerprint"]:
        got = f"an unfinished run of another source, version or options in {commit.partial_of(destination).name}"
        fix = "Repeat the options of that run, or leave --resume and --part out to start over."
        raise DestinationError.about(str(destination), "free, or an unfinished run of this very conversion", got, fix)


def options_of(destination: Path) -> ConvertOptions | None:
    """The options of the unfinished conversion at `destination`, or None where there is none."""
    content = _read_record(commit.partial_of(destination) / commit.MARKER_FILE) or {}
    with suppress(KeyError, ValueError):
        return record(ConvertOptions, content["options"])
    return None


def parts_of(job: Job) -> int | None:
    """Into how many parts an unfinished conversion was divided; None where it was not, or nothing says so."""
    count = (job.marker() or {}).get(PARTS)
    return count if type(count) is int and count > 0 else None


def _read_record(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError, ValueError):
        content = read_json(path, MAX_MANIFEST_BYTES)
        return content if isinstance(content, dict) else None
    return None

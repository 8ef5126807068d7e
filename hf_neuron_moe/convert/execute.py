"""Makes the shards of a conversion: one shard at a time, its weights on as many threads as memory allows."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from hf_neuron_moe.convert.io.encoded import ROWS_BYTES, values_shape
from hf_neuron_moe.convert.io.file_hashes import PrefixHash, check_shard, entries_of, hash_file
from hf_neuron_moe.convert.io.nonfinite import check_or_count
from hf_neuron_moe.convert.io.shard import ShardWriter, in_file_order
from hf_neuron_moe.convert.io.source import damaged
from hf_neuron_moe.convert.io.tensors import CHUNK_BYTES, TORCH_DTYPES, TensorReader, open_tensors
from hf_neuron_moe.convert.layout.orientations import SOURCE
from hf_neuron_moe.convert.layout.relayout import Scratch, read_bytes, scratch_bytes, store
from hf_neuron_moe.convert.manifest import Piece, WrittenTensor, grouped, header_metadata
from hf_neuron_moe.convert.plan import ConversionPlan
from hf_neuron_moe.convert.transaction.resume import Job, ShardRecord, version_of
from hf_neuron_moe.convert.workers import Progress, Workers, cores, counting, working
from hf_neuron_moe.errors import public

VALUE_BYTES = 16  # Held per value while codes are decoded: codes, fp32 values, factors and an intermediate
FREE_BYTES = 128 * 2**20  # Memory that several workers may use together beyond twice the largest weight


@dataclass
class Made:
    """What making shards has told: checksums by name; rounded, and NaN and infinite values by source tensor."""

    tensors: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    rounded: Counter[str] = field(default_factory=Counter)
    nonfinite: Counter[str] = field(default_factory=Counter)


@public("convert")
def make_shards(
    plan: ConversionPlan,
    job: Job,
    shards: dict[str, list[WrittenTensor]],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    whole: bool = True,
    only_check: bool = False,
    on_nonfinite: str = "error",
) -> Made:
    """Write those of `shards` that are not finished, unless it is `only_check`, and check those that are.

    Workers are one per core if None, and fewer where their memory together would be too much. `progress` is called
    after each weight, on the calling thread. Where `shards` are the `whole` plan's, checksums of the shards and of
    every source file are told too.
    """
    source = plan.source
    with open_tensors(source.directory, source.encodings) as reader, working(workers_for(plan, workers)) as pool:
        step = counting(progress, bytes_of(*shards.values()))
        run = _Run(plan, job, reader, pool, step, on_nonfinite)
        run.check_finished(shards)
        for file, tensors in shards.items():
            if file not in run.made.files and not only_check:
                run.make_shard(file, tensors, hash_file=whole)
        if whole:
            run.hash_rest()
        return run.made


def workers_for(plan: ConversionPlan, wanted: int | None) -> int:
    """How many workers together hold at most twice the largest weight and :data:`FREE_BYTES`; None wants all cores."""
    wanted = cores() if wanted is None else wanted
    largest = 2 * max(math.prod(weight.shape) for weight in plan.weights.values())
    return max(1, min(wanted, (2 * largest + FREE_BYTES) // memory_per_worker(plan)))


def memory_per_worker(plan: ConversionPlan) -> int:
    """Bytes that one worker holds at most: its two buffers, a chunk of what it reads, and what decodes it."""
    return sum(buffer_sizes(plan)) + CHUNK_BYTES + decoding_bytes(plan)


def decoding_bytes(plan: ConversionPlan) -> int:
    """Bytes that reading values of codes takes: codes of the rows, or of a matrix that is transposed, and fp32."""
    needed = 0
    for encoding in plan.source.encodings.values():
        experts = encoding.codes.shape[0] if len(encoding.codes.shape) > 2 else 1
        values = min(ROWS_BYTES // 2, math.prod(values_shape(encoding)) // experts)
        matrix = encoding.nbytes // experts if encoding.transposed else 0
        needed = max(needed, matrix + VALUE_BYTES * values)
    return needed


def buffer_sizes(plan: ConversionPlan) -> tuple[int, int]:
    """Bytes of the buffer that any of a plan's weights can be made in, and of the largest read."""
    read = max(read_bytes(piece) for weight in plan.weights.values() for piece in weight.pieces)
    return max(buffers_of(plan, plan.tensors).values()), read


def buffers_of(plan: ConversionPlan, tensors: Iterable[WrittenTensor]) -> dict[tuple[str, int | None], int]:
    """Bytes of the buffer that each group of `tensors` is made in, for one of its matrices at a time."""
    groups = dict.fromkeys(tensor.group for tensor in tensors if tensor.layout != SOURCE)
    return {group: scratch_bytes(plan.weights[group[0]], plan.forms(group)) for group in groups}


def bytes_of(*groups: Iterable[WrittenTensor]) -> int:
    """Bytes of tensor data in groups or shards."""
    return sum(tensor.nbytes for tensors in groups for tensor in tensors)


@dataclass
class _Run:
    """State of one call of :func:`make_shards`. Tasks for the workers return the bytes that they have written."""

    plan: ConversionPlan
    job: Job
    reader: TensorReader
    workers: Workers
    step: Callable[[int], None]
    on_nonfinite: str
    made: Made = field(default_factory=Made)
    versions: dict[str, str] = field(default_factory=dict)  # Of source files, when this run began with them
    lock: threading.Lock = field(default_factory=threading.Lock)
    buffers: threading.local = field(default_factory=threading.local)  # Each thread's own

    def check_finished(self, shards: dict[str, list[WrittenTensor]]) -> None:
        """Take over the shards that an earlier run finished, where their bytes are still right."""
        records = {file: record for file in shards if (record := self.job.shard_record(file)) is not None}
        if self.on_nonfinite == "error":  # those made with "keep" have to be refused, which making them does
            records = {file: record for file, record in records.items() if not record.nonfinite}
        records = {file: record for file, record in records.items() if self._same_sources(record)}
        tasks = [
            partial(check_shard, self.job.folder / file, shards[file], record.checksums)
            for file, record in records.items()
        ]
        for file, sha256 in zip(records, self.workers.run(tasks)):
            if sha256 is not None:
                self._add_shard(records[file])
                self.made.files[file] = sha256
                self.step(bytes_of(shards[file]))

    def make_shard(self, file: str, tensors: list[WrittenTensor], *, hash_file: bool) -> None:
        """Write one shard, let it take its place and record it."""
        groups = grouped(tensors, lambda tensor: tensor.group)
        files = sorted(set().union(*(self.plan.source_files(tensor.weight) for tensor in tensors)))
        versions = {name: self._first_version(name) for name in files}
        record = ShardRecord({}, {}, versions)
        # Source files are hashed as a whole just before they are read in pieces: the second time they are in memory.
        tasks = self._hash_tasks(versions)
        hashed = len(tasks)
        path, entries = self.job.temporary(file), entries_of(tensors)
        place = {entry.name: number for number, entry in enumerate(in_file_order(entries))}
        ordered = sorted(groups.values(), key=lambda group: min(place[tensor.name] for tensor in group))
        with ShardWriter(path, entries, header_metadata(tensors)) as writer, PrefixHash(path, tensors) as prefix:
            tasks += [partial(self._make_group, group, writer, record) for group in ordered]
            for number, nbytes in enumerate(self.workers.run(tasks), -hashed):
                if nbytes:
                    self.step(nbytes)
                if hash_file and number >= 0:
                    prefix.follow(tensor.name for tensor in ordered[number])
        self._check_unchanged(versions)
        self.job.publish(file)
        self.job.record_shard(file, record)
        self._add_shard(record)
        if hash_file:
            self.made.files[file] = prefix.hexdigest()

    def hash_rest(self) -> None:
        """Hash the source files of which nothing was converted."""
        files = {file: self._first_version(file) for file in self.plan.source.files}
        for _ in self.workers.run(self._hash_tasks(files)):
            pass
        self._check_unchanged(files)

    def _hash_tasks(self, versions: Mapping[str, str]) -> list[Callable[[], int]]:
        """Tasks that hash those source files of `versions` that were not hashed yet."""
        new = [(file, version) for file, version in versions.items() if file not in self.made.sources]
        return [partial(self._hash_source, file, version) for file, version in new]

    def _hash_source(self, file: str, version: str) -> int:
        sha256 = self.job.source_sha256(file, version)
        if sha256 is None:
            sha256 = hash_file(self.plan.source.directory / file)
            self.job.record_source(file, version, sha256)
        self.made.sources[file] = sha256
        return 0

    def _make_group(self, group: list[WrittenTensor], writer: ShardWriter, record: ShardRecord) -> int:
        """Write the tensors that are made together from one weight, or one tensor that is copied."""
        rounded: Counter[str] = Counter()
        nonfinite: Counter[str] = Counter()
        streams = [writer.begin(tensor.name) for tensor in group]
        for parts in self._parts(group, rounded, nonfinite):
            for stream, part in zip(streams, parts):
                stream.append(part)
        record.checksums.update((tensor.name, stream.end()) for tensor, stream in zip(group, streams))
        with self.lock:
            for counts, more in ((record.rounded, rounded), (record.nonfinite, nonfinite)):
                for name in +more:
                    counts[name] = counts.get(name, 0) + more[name]
        return bytes_of(group)

    def _parts(
        self, group: list[WrittenTensor], rounded: Counter[str], nonfinite: Counter[str]
    ) -> Iterator[list[torch.Tensor]]:
        """Consecutive parts of the group's tensors, together; each is valid until the next one is asked for."""
        if group[0].layout == SOURCE:
            source = self.plan.copied[group[0].name]
            for part in self.reader.chunks(source.file, source.name):
                values = part.view(TORCH_DTYPES[source.dtype])
                check_or_count(values, self.on_nonfinite, nonfinite, file=source.file, name=source.name)
                yield [part]
            return
        if not hasattr(self.buffers, "scratch"):
            scratch, read_at_once = buffer_sizes(self.plan)
            self.buffers.scratch = Scratch(scratch)
            self.buffers.read = torch.empty(read_at_once, dtype=torch.uint8)

        def read(piece: Piece, expert: int | None, rows: slice | None) -> torch.Tensor:
            if rows is None:
                return self.reader.read_scales(piece.source, expert)
            index, rows = piece.place(expert, rows)
            return self.reader.read(piece.file, piece.source, index, self.buffers.read, rows)

        weight, forms = self.plan.weights[group[0].weight], self.plan.forms(group[0].group)
        yield from store(
            weight, forms, read, self.buffers.scratch, rounded, on_nonfinite=self.on_nonfinite, nonfinite=nonfinite
        )

    def _first_version(self, file: str) -> str:
        """The version of a source file that this run began with: all shards are made of the same."""
        if file not in self.versions:
            self.versions[file] = self._version(file)
        return self.versions[file]

    def _version(self, file: str) -> str:
        return version_of(self.plan.source.directory / file)

    def _check_unchanged(self, versions: Mapping[str, str]) -> None:
        for name, version in versions.items():
            if self._version(name) != version:
                raise damaged(name, "left alone during the conversion", "a file that was changed meanwhile")

    def _same_sources(self, record: ShardRecord) -> bool:
        """Whether a shard was made of the source files as they are now: the same versions, or the same bytes."""
        for file, version in record.sources.items():
            if self._first_version(file) == version:
                continue
            sha256 = self.job.source_sha256(file, version)
            if sha256 is None:
                return False
            self._hash_source(file, self._first_version(file))
            if self.made.sources[file] != sha256:
                return False
        return True

    def _add_shard(self, record: ShardRecord) -> None:
        self.made.tensors |= record.checksums
        self.made.rounded.update(record.rounded)
        self.made.nonfinite.update(record.nonfinite)

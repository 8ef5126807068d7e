"""What a conversion will write, hold and take, without writing it: ``convert --dry-run``.

Bytes are counted with the functions that write them and are exact. Memory is what this process holds after planning and
a measurement that has loaded everything a conversion uses, and the buffers the conversion will add. Time comes from
measuring each kind of work on a few megabytes: reading, decoding of quantized sources, checksums, the weights' layouts,
and the destination's disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_neuron_moe.convert.commands import check_call, plan_for
from hf_neuron_moe.convert.execute import Made, buffer_sizes, buffers_of, decoding_bytes, workers_for
from hf_neuron_moe.convert.io.checksums import TensorChecksum
from hf_neuron_moe.convert.io.encoded import ROWS_BYTES, read_values, values_shape
from hf_neuron_moe.convert.io.file_hashes import entries_of
from hf_neuron_moe.convert.io.shard import shard_header
from hf_neuron_moe.convert.io.source import TORCH_DTYPES, Encoding, SourceTensor, nbytes_of
from hf_neuron_moe.convert.io.tensors import CHUNK_BYTES
from hf_neuron_moe.convert.layout.orientations import stored_forms
from hf_neuron_moe.convert.layout.relayout import WEIGHT_DTYPES, Scratch, scratch_bytes, store
from hf_neuron_moe.convert.layout.tensor_parallel import FusedWeight
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, LeftModule, Piece, WrittenTensor, grouped, header_metadata
from hf_neuron_moe.convert.notes import left_facts, left_notes, requantized, requantized_note
from hf_neuron_moe.convert.options import ConvertOptions
from hf_neuron_moe.convert.plan import ConversionPlan
from hf_neuron_moe.convert.result import files_beside
from hf_neuron_moe.convert.transaction.parts import check_part, part_of_shards
from hf_neuron_moe.convert.workers import anonymous_bytes, cores, working
from hf_neuron_moe.errors import counted, known_names, public

SAMPLE_BYTES = 1 << 24  # Bytes read, hashed and written in a measurement
SAMPLE_INNER = 512  # Intermediate values of a weight that is measured; H stays, since rows and blocks lie along it
NO_CHECKSUM = "0" * 64  # As long as every file's checksum: the manifest's length can be told before its content


@dataclass(frozen=True)
class Estimate:
    """What a conversion will cost."""

    files: dict[str, int]  # Bytes of every file that will be written
    output_bytes: int
    converted_weights: int  # Weights that change their layout
    copied_tensors: int  # Tensors that do not
    source_bytes: int  # Bytes of tensors to read
    workers: int  # Threads that will work: fewer than asked for where their memory together would be too much
    peak_memory_bytes: int  # Largest memory that no file backs
    compute_seconds: float  # Reading, decoding, checksums and layouts
    disk_seconds: float  # Carrying the output to the destination's disk, at the speed it has now
    exact: bool
    """Whether `files` are exact. The manifest counts the values that bf16 does not hold, and for sources wider than
    bf16 that number is known only afterwards: it may then be some bytes longer."""
    left: dict[str, LeftModule] = field(default_factory=dict)
    requantized: dict[str, Any] | None = None  # Codes whose values are quantized again: how many, and the least SQNR
    free_bytes: int = 0  # On the destination's disk; 0 where nothing can be written

    @property
    def seconds(self) -> float:
        """Seconds that it will take: the disk writes beside the other work, not after it."""
        return max(self.compute_seconds, self.disk_seconds)

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        facts = {**asdict(self), "left": left_facts(self.left)}
        return {"ok": True, "dry_run": True, **facts, "seconds": self.seconds}

    def _too_large(self) -> list[str]:
        if self.free_bytes >= self.output_bytes:
            return []
        got = f"has {self.free_bytes:,} free bytes, too few" if self.free_bytes else "cannot be written to"
        return [f"note: the conversion would fail: the destination's disk {got}"]

    def __str__(self) -> str:
        tail = "" if self.exact else f" (and the count of rounded values in {MANIFEST_FILE})"
        lines = [
            f"{counted(self.converted_weights, 'weight')} to convert, "
            f"{counted(self.copied_tensors, 'tensor')} to copy, {self.source_bytes:,} bytes to read",
            *(f"  {size:>15,}  {name}" for name, size in self.files.items()),
            f"output: {self.output_bytes:,} bytes in {counted(len(self.files), 'file')}{tail}",
            f"peak memory: about {self.peak_memory_bytes / 1e6:,.0f} MB with {counted(self.workers, 'worker')}",
            f"time: about {self.seconds:,.1f} s (work {self.compute_seconds:,.1f} s, in addition the disk "
            f"{self.disk_seconds:,.1f} s at its present speed)",
            *(f"note: {note}" for note in (*left_notes(self.left), requantized_note(self.requantized)) if note),
            *self._too_large(),
            "nothing was written",
        ]
        return "\n".join(lines)


@public("convert")
@known_names("convert")
def estimate_conversion(
    source: Path | str,
    destination: Path,
    options: ConvertOptions | None = None,
    *,
    force: bool = False,
    workers: int | None = None,
    part: tuple[int, int] | None = None,
    strict: bool = False,
) -> Estimate:
    """Return what :func:`hf_neuron_moe.convert.convert_checkpoint` would write, without writing it.

    Arguments are those of ``convert_checkpoint``. The destination's disk is measured with a file that has no name and
    is gone afterwards; of a `part`, only its shards are counted.
    """
    start = time.perf_counter()
    check_call(destination, options, workers)
    check_part(part)
    plan = plan_for(source, destination, options, force=force, strict=strict)
    planning = time.perf_counter() - start
    shards = part_of_shards(plan.shards, part)
    tensors = [tensor for group in shards.values() for tensor in group]
    files = {
        file: len(shard_header(entries_of(group), header_metadata(group))) + sum(tensor.nbytes for tensor in group)
        for file, group in shards.items()
    }
    if part is None:
        files |= _files_beside(plan)
    count = workers_for(plan, workers)
    weights = {tensor.weight for tensor in tensors}
    output_bytes = sum(files.values())
    source_bytes = sum(plan.source_bytes(name) for name in weights)
    converted = [plan.weights[name] for name in sorted(weights & plan.weights.keys())]
    # Before the memory is looked at: it loads everything that a conversion uses.
    compute_seconds = _compute_seconds(plan, converted, source_bytes, output_bytes, count)
    compute_seconds += _decoding_seconds(plan, weights, count)
    return Estimate(
        files=files,
        output_bytes=output_bytes,
        converted_weights=len(converted),
        copied_tensors=len(weights) - len(converted),
        source_bytes=source_bytes,
        workers=count,
        peak_memory_bytes=anonymous_bytes() + _held_bytes(plan, tensors, count),
        compute_seconds=planning + compute_seconds,
        disk_seconds=output_bytes * _write_cost(destination.parent),
        free_bytes=_free_bytes(destination),
        left=plan.left,
        requantized=requantized(plan.pieces, tensors, plan.source.encodings, plan.options),
        exact=all(piece.dtype == "BF16" for weight in plan.weights.values() for piece in weight.pieces),
    )


def _held_bytes(plan: ConversionPlan, tensors: list[WrittenTensor], workers: int) -> int:
    """Memory of the workers' buffers: of a buffer only what the largest of its matrices fills is ever in memory."""
    sizes = []
    for (name, _), needed in buffers_of(plan, tensors).items():
        weight = plan.weights[name]
        sizes += [needed] * (weight.shape[0] if weight.has_experts else 1)
    each = buffer_sizes(plan)[1] + CHUNK_BYTES + decoding_bytes(plan)
    return sum(sorted(sizes, reverse=True)[:workers]) + workers * each


def _files_beside(plan: ConversionPlan) -> dict[str, int]:
    made = Made(
        tensors={tensor.name: TensorChecksum().text() for tensor in plan.tensors},
        files=dict.fromkeys(plan.shards, NO_CHECKSUM),
        sources=dict.fromkeys(plan.source.files, NO_CHECKSUM),
    )
    contents, manifest = files_beside(plan, made)
    sizes = {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size
        for name, content in sorted(contents.items())
    }
    return {**sizes, MANIFEST_FILE: len(manifest.to_json().encode())}


def _compute_seconds(
    plan: ConversionPlan, converted: list[FusedWeight], source_bytes: int, output_bytes: int, workers: int
) -> float:
    """Add up the measured costs of every kind of work."""
    data = bytes(SAMPLE_BYTES)
    reading, hashing = _read_cost(plan), _fastest(lambda: hashlib.sha256(data).digest()) / SAMPLE_BYTES
    # Sources are read to be hashed and read again to be converted; shards are read again to be hashed.
    seconds = source_bytes * (2 * reading + hashing) + output_bytes * (reading + hashing)
    costs: dict[tuple[object, ...], float] = {}
    for weight in converted:
        first = weight.pieces[0]
        precision = plan.options.of(weight.name).precision
        kind = (precision, weight.halves, weight.has_experts, weight.hidden, first.dtype, first.transposed)
        if kind not in costs:
            with working(workers):  # each with its share of torch's threads
                costs[kind] = _relayout_cost(weight, plan.options)
        seconds += costs[kind] * math.prod(weight.shape)
    return seconds / min(workers, cores())


def _decoding_seconds(plan: ConversionPlan, weights: Collection[str], workers: int) -> float:
    """Seconds that decoding the sources of these weights and copied tensors takes, where they are codes."""
    found = {piece.source for name in weights for piece in plan.pieces[name]}
    used = (encoding for name, encoding in plan.source.encodings.items() if name in found)
    alike = grouped(used, lambda e: (e.codes.dtype, e.scales.dtype, e.block, e.transposed, values_shape(e)[-2:]))
    with working(workers):
        return sum(
            _decoding_cost(group[0]) * sum(math.prod(values_shape(each)) for each in group) for group in alike.values()
        ) / min(workers, cores())


def _decoding_cost(encoding: Encoding) -> float:
    """Seconds per value: the reader's own code on as many rows as it decodes at a time, with zeros as file."""
    *experts, rows, columns = values_shape(encoding)
    count = min(rows, max(1, ROWS_BYTES // (2 * columns)))

    def read(stored: SourceTensor, expert: int | None, part: slice | None) -> torch.Tensor:
        shape = stored.shape if expert is None else stored.shape[1:]
        shape = shape if part is None else (len(range(shape[0])[part]), *shape[1:])
        zeros = torch.zeros(nbytes_of(stored.dtype, shape), dtype=torch.uint8)
        return zeros.view(TORCH_DTYPES[stored.dtype]).view(shape)

    return _fastest(lambda: read_values(read, encoding, 0 if experts else None, slice(0, count))) / (count * columns)


def _relayout_cost(weight: FusedWeight, options: ConvertOptions) -> float:
    """Seconds per value: the weight's own code on one expert and few intermediate values."""
    inner, first = min(weight.intermediate, SAMPLE_INNER), weight.pieces[0]
    F, K = (weight.halves * inner, weight.hidden) if weight.halves else (weight.hidden, inner)
    shape = (K, F) if first.transposed else (F, K)
    piece = Piece("sample", "sample", first.dtype, shape, 0 if weight.has_experts else None, 0, first.transposed)
    sample = FusedWeight(weight.name, (1, F, K) if weight.has_experts else (F, K), (piece,))
    forms = stored_forms(sample, replace(options, tp_degree=1, ep_degree=1))
    values = torch.randn(shape).to(WEIGHT_DTYPES[first.dtype])
    scratch = Scratch(scratch_bytes(sample, forms))

    def read(piece: Piece, expert: int | None, rows: slice | None) -> torch.Tensor:
        return values[rows]

    def work() -> None:
        for _ in store(sample, forms, read, scratch, Counter(), on_nonfinite="error"):
            pass

    return _fastest(work) / (F * K)


def _read_cost(plan: ConversionPlan) -> float:
    """Seconds per byte of a source file, from its middle: the beginning has just been read for its header."""
    size, file = max(((plan.source.directory / file).stat().st_size, file) for file in plan.source.files)
    begin = time.perf_counter()
    with (plan.source.directory / file).open("rb", buffering=0) as opened:
        opened.seek(max(0, size // 2 - SAMPLE_BYTES // 2))
        count = len(opened.read(SAMPLE_BYTES))
    return (time.perf_counter() - begin) / max(1, count)


def _write_cost(folder: Path) -> float:
    """Seconds per byte written and synced beside the destination; nothing where that is not possible."""
    data = bytes(SAMPLE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return (time.perf_counter() - begin) / SAMPLE_BYTES
    except OSError:
        return 0.0


def _free_bytes(destination: Path) -> int:
    """Free bytes where the destination would be; 0 where nobody may write."""
    folder = Path(os.path.abspath(destination)).parent
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the faster of two runs; the first also loads what the work needs."""
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)

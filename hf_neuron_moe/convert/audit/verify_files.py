"""What ``verify`` can tell from the files themselves: checksums, agreement, coverage, finite values.

Findings are pairs of a subject (a file, tensor or weight) and a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_neuron_moe.convert.audit.manifest_check import disagreements
from hf_neuron_moe.convert.config_json import QUANTIZATION_CONFIG, quantization_config
from hf_neuron_moe.convert.io.bounded import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, read_json
from hf_neuron_moe.convert.io.checksums import TensorChecksum
from hf_neuron_moe.convert.io.file_hashes import hash_file
from hf_neuron_moe.convert.io.folder import CONFIG_FILE
from hf_neuron_moe.convert.io.nonfinite import count_nonfinite
from hf_neuron_moe.convert.io.side_files import WEIGHT_SUFFIXES, files_below
from hf_neuron_moe.convert.io.source import inside, read_header
from hf_neuron_moe.convert.io.tensors import TORCH_DTYPES, open_tensors
from hf_neuron_moe.convert.layout.orientations import FORWARD, SCALES, WORD_LAYOUTS
from hf_neuron_moe.convert.manifest import INDEX_OUT, MANIFEST_FILE, Manifest, WrittenTensor, header_metadata
from hf_neuron_moe.errors import ConversionError, SourceDamageError, counted, naming

Found = Iterator[tuple[str, str]]
Headers = Mapping[str, list[tuple[str, str]]]  # What differs between each shard's header and the manifest
Step = Callable[[int], None]  # Called with the bytes just read


def header_differences(converted: Path, manifest: Manifest) -> Headers:
    """Compare every shard's header with what the manifest says of its tensors."""
    return {file: list(_differences(converted / file, tensors)) for file, tensors in manifest.by_file().items()}


def check_files(converted: Path, manifest: Manifest, headers: Headers, step: Step) -> Found:
    """Compare every file's bytes with the manifest's checksums; shards of format version 1 have them by tensor only."""
    shards = manifest.by_file()
    expected = manifest.file_sha256 or dict.fromkeys(shards, "")
    for file in shards:
        if file not in expected:
            yield MANIFEST_FILE, f"no checksum of {file}"
    for file, checksum in sorted(expected.items()):
        try:
            path = inside(converted, file)  # a link only as the Hub's cache has them
        except SourceDamageError:
            yield file, "missing"
            continue
        if checksum and checksum == hash_file(path, step):
            continue
        elif file not in shards:
            yield file, "its bytes are not those that were written"
        elif headers[file]:
            yield from headers[file]
        else:
            altered = altered_tensors(path, shards[file])
            yield from ((f"{file}: {name}", "its bytes are not those that were written") for name in altered)
            if checksum and not altered:
                yield file, "its header's bytes are not those that were written"


def strays_in(converted: Path, manifest: Manifest) -> list[str]:
    """Files that the conversion did not write; of format version 1, which does not list side files, weights only."""
    known = {MANIFEST_FILE, *manifest.file_sha256, *manifest.by_file()}
    strays = sorted(name for name in files_below(converted) if name not in known)
    if manifest.file_sha256:
        return strays
    return [name for name in strays if name.endswith(WEIGHT_SUFFIXES) and name != INDEX_OUT]


def check_coverage(converted: Path, manifest: Manifest, headers: Headers) -> Found:
    """Compare manifest, index and headers, and check that sources fill every weight once and without a gap."""
    stored = {tensor.weight for tensor in manifest.tensors}
    found = [
        *((name, "twice in the manifest") for name in _repeated(tensor.name for tensor in manifest.tensors)),
        *((name, "no tensor stores it") for name in sorted(manifest.weights.keys() - stored)),
        *((name, "the manifest does not say what it was made of") for name in sorted(stored - manifest.weights.keys())),
        *((name, "used twice") for name in _repeated(piece.source for piece in manifest.pieces)),
    ]
    yield from found
    yield from (pair for pair in disagreements(manifest) if pair[0] not in dict(found))
    for differences in headers.values():
        yield from differences
    yield from _index_differences(converted / INDEX_OUT, manifest)
    yield from _config_differences(converted / CONFIG_FILE, manifest)


def check_finite(converted: Path, manifest: Manifest, headers: Headers, step: Step) -> Found:
    """Look for NaN and infinity in the readable files and, as MX has no infinity, in what the manifest says of them."""
    seen: Counter[str] = Counter()
    with open_tensors(converted) as reader:
        for tensor in manifest.tensors:
            if headers[tensor.file]:
                continue
            count = 0
            for part in reader.chunks(tensor.file, tensor.name):
                step(part.numel())
                count += _nonfinite(part, tensor)
            if count:
                yield f"{tensor.file}: {tensor.name}", f"{count:,} NaN or infinite values"
            if tensor.orientation == FORWARD:
                seen[tensor.weight] += count
    kept = manifest.nonfinite or {}
    for weight, pieces in manifest.weights.items():
        count = sum(kept.get(piece.source, 0) for piece in pieces)
        if count > seen[weight]:
            yield weight, f"made of {count:,} NaN or infinite values, kept on request; {seen[weight]:,} show"


def check_source(source: Path, manifest: Manifest, step: Step) -> tuple[list[tuple[str, str]], str]:
    """Compare the source with the one that was converted, by sizes, checksums and tensors; say what was covered."""
    covered, found = f"{counted(len(manifest.source_files), 'file')}", []
    for file, size in sorted(manifest.source_files.items()):
        path = source / file
        if not path.is_file():
            found.append((f"source {file}", "missing; is --source the folder that was converted?"))
        elif path.stat().st_size != size:
            found.append((f"source {file}", f"{path.stat().st_size} bytes, converted were {size}"))
        elif file in manifest.source_sha256 and hash_file(path, step) != manifest.source_sha256[file]:
            found.append((f"source {file}", "its bytes are not those that were converted"))
    if found:
        return found, covered
    try:
        with naming("verify"):
            headers = [read_header(source / file)[0] for file in manifest.source_files]
    except ConversionError as error:
        return [("source", str(error))], covered
    tensors = {t.name: (t.file, t.dtype, t.shape) for header in headers for t in header.values()}
    pieces = {
        piece.source: (piece.file, piece.dtype, piece.shape)
        for piece in manifest.pieces
        if piece.source not in manifest.encodings
    }
    pieces |= {part.name: (part.file, part.dtype, part.shape) for part in manifest.coded}
    for name in _unlike(pieces, tensors):
        alone = "not converted" if name in tensors else "not in the source"
        both = name in tensors and name in pieces
        found.append((name, "another file, dtype or shape in the source" if both else alone))
    return found, f"{covered}, {counted(len(tensors), 'tensor')}"


def altered_tensors(path: Path, tensors: list[WrittenTensor]) -> list[str]:
    """Names of a shard's tensors whose bytes have another checksum than the manifest's."""
    names = []
    with open_tensors(path.parent) as reader:
        for tensor in tensors:
            checksum = TensorChecksum(tensor.checksum)
            for part in reader.chunks(tensor.file, tensor.name):
                checksum.update(part.numpy().data)
            if checksum.text() != tensor.checksum:
                names.append(tensor.name)
    return names


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _unlike(expected: Mapping[str, object], actual: Mapping[str, object]) -> list[str]:
    return sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))


def _differences(path: Path, tensors: list[WrittenTensor]) -> Found:
    if not path.is_file():
        yield path.name, "missing"
        return
    try:
        with naming("verify"):
            header, metadata = read_header(path)
    except ConversionError as error:
        yield path.name, str(error)
        return
    expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    actual = {name: (entry.dtype, entry.shape) for name, entry in header.items()}
    for name in _unlike(expected, actual):
        yield f"{path.name}: {name}", "not what the manifest describes" if name in actual else "not in the file"
    wanted = header_metadata(tensors)
    for key in sorted(wanted.keys() & metadata.keys()):
        if metadata[key] != wanted[key]:
            yield path.name, f"metadata {key} differs from the manifest"


def _index_differences(path: Path, manifest: Manifest) -> Found:
    expected = {tensor.name: tensor.file for tensor in manifest.tensors}
    try:
        named: Any = read_json(path, MAX_INDEX_BYTES)["weight_map"]
        if not isinstance(named, dict):
            raise TypeError("weight_map is no map")
    except FileNotFoundError:
        yield path.name, "missing"
    except (ValueError, KeyError, TypeError) as error:
        yield path.name, f"damaged: {type(error).__name__}: {error}"
    else:
        for name in _unlike(expected, named)[:1]:
            yield path.name, f"another file for {name} than in the manifest"


def _config_differences(path: Path, manifest: Manifest) -> Found:
    """Whether config.json tells a loader the options of the manifest; version 1 did not write them there."""
    if CONFIG_FILE not in manifest.replaced_files:
        return
    try:
        if read_json(path, MAX_CONFIG_BYTES)[QUANTIZATION_CONFIG] != quantization_config(manifest.options):
            yield path.name, f"{QUANTIZATION_CONFIG} differs from the manifest's options"
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield path.name, f"no {QUANTIZATION_CONFIG} can be read: {type(error).__name__}: {error}"


def _nonfinite(part: Tensor, tensor: WrittenTensor) -> int:
    if tensor.layout in SCALES or tensor.dtype == "F8_E8M0":
        return int((part == 255).sum())
    if tensor.dtype == "F8_E4M3" or WORD_LAYOUTS.get(tensor.layout) == "mxfp8":
        return int((part & 0x7F == 0x7F).sum())
    if tensor.dtype == "F8_E5M2":
        return int((part & 0x7F >= 0x7C).sum())
    return count_nonfinite(part.view(TORCH_DTYPES[tensor.dtype]))

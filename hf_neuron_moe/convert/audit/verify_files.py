"""What ``verify`` can tell from the files themselves: checksums, agreement, coverage, finite values.

Every function returns findings as pairs of a subject (a file or tensor) and a message, and says what it covered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_neuron_moe.convert.audit.manifest_check import disagreements, fills
from hf_neuron_moe.convert.config_json import QUANTIZATION_CONFIG, quantization_config
from hf_neuron_moe.convert.io.bounded import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, read_json
from hf_neuron_moe.convert.io.checksums import TensorChecksum
from hf_neuron_moe.convert.io.file_hashes import hash_file
from hf_neuron_moe.convert.io.folder import CONFIG_FILE
from hf_neuron_moe.convert.io.nonfinite import count_nonfinite
from hf_neuron_moe.convert.io.side_files import WEIGHT_SUFFIXES, files_below
from hf_neuron_moe.convert.io.source import read_header
from hf_neuron_moe.convert.io.tensors import TORCH_DTYPES, TensorReader, open_tensors
from hf_neuron_moe.convert.layout.orientations import FORWARD, MOE_WORDS, SCALES, SOURCE
from hf_neuron_moe.convert.manifest import INDEX_OUT, MANIFEST_FILE, Manifest, WrittenTensor, header_metadata
from hf_neuron_moe.errors import ConversionError, naming, printable

Found = list[tuple[str, str]]
Step = Callable[[int], None]
"""Called with the bytes just read."""


def check_files(converted: Path, manifest: Manifest, step: Step) -> tuple[Found, str]:
    """Compare every file's bytes with the manifest's checksums."""
    found: Found = []
    shards = manifest.by_file()
    expected = manifest.file_sha256 or dict.fromkeys(shards, "")
    for file in shards:
        if file not in expected:
            found.append((MANIFEST_FILE, f"no checksum of {file}"))
    for file, checksum in sorted(expected.items()):
        path = converted / file
        if path.is_symlink() or not path.is_file():
            found.append((file, "missing"))
        elif file in shards and (not checksum or checksum != hash_file(path, step)):
            found += _damage_of(path, shards[file], bool(checksum))
        elif file not in shards and checksum != hash_file(path, step):
            found.append((file, "its bytes are not those that were written"))
    return found, f"checksums of {len(expected)} files"


def check_strays(converted: Path, manifest: Manifest) -> tuple[Found, list[str]]:
    """Look for files that the conversion did not write.

    Returns:
        Findings, and notes on hidden ones such as ``.gitattributes``, which no loader reads. A manifest of format
        version 1 does not list side files, so that only weights can be judged.
    """
    known = {MANIFEST_FILE, *manifest.file_sha256, *manifest.by_file()}
    strays = sorted(name for name in files_below(converted) if name not in known)
    if not manifest.file_sha256:
        strays = [name for name in strays if name.endswith(WEIGHT_SUFFIXES) and name != INDEX_OUT]
    hidden = [name for name in strays if name.startswith(".")]
    found = [(name, "not part of the conversion") for name in strays if not name.startswith(".")]
    return found, [f"{printable(name)}: not part of the conversion, and hidden" for name in hidden]


def check_coverage(converted: Path, manifest: Manifest) -> tuple[Found, str]:
    """Compare manifest, index and headers, and check that sources fill every weight once and without a gap."""
    found: Found = []
    names = [tensor.name for tensor in manifest.tensors]
    found += [(name, "twice in the manifest") for name in _repeated(names)]
    stored = {tensor.weight for tensor in manifest.tensors}
    found += [(weight, "no tensor stores it") for weight in sorted(manifest.weights.keys() - stored)]
    found += [
        (weight, "the manifest does not say what it was made of") for weight in sorted(stored - manifest.weights.keys())
    ]
    sources = [piece.source for piece in manifest.pieces]
    found += [(name, "used twice") for name in _repeated(sources)]
    layouts = {tensor.weight: tensor.layout for tensor in manifest.tensors}
    for weight, pieces in manifest.weights.items():
        if layouts.get(weight) not in (None, SOURCE):
            found += [(weight, message) for message in fills(pieces)]
    found += [(weight, message) for weight, message in disagreements(manifest) if weight not in dict(found)]
    for file, tensors in manifest.by_file().items():
        found += _header_differences(converted / file, tensors)
    found += _index_differences(converted / INDEX_OUT, manifest)
    found += _config_differences(converted / CONFIG_FILE, manifest)
    return found, f"{len(sources)} source tensors in {len(manifest.weights)} weights, {len(names)} stored tensors"


def check_finite(converted: Path, manifest: Manifest, files: set[str], step: Step) -> tuple[Found, str]:
    """Look for NaN and infinity in every tensor of the readable files, and in what the manifest says was kept.

    MX has no infinity: only the manifest knows of one in the source.
    """
    found: Found = []
    looked = 0
    seen: Counter[str] = Counter()
    with open_tensors(converted) as reader:
        for tensor in manifest.tensors:
            if tensor.file not in files:
                continue
            looked += 1
            count = _nonfinite(tensor, reader, step)
            if count:
                found.append((f"{tensor.file}: {tensor.name}", f"{count:,} NaN or infinite values"))
            if tensor.orientation == FORWARD:
                seen[tensor.weight] += count
    kept = manifest.nonfinite or {}
    for weight, pieces in manifest.weights.items():
        count = sum(kept.get(piece.source, 0) for piece in pieces)
        if count > seen[weight]:
            found.append((weight, f"made of {count:,} NaN or infinite values, kept on request; {seen[weight]:,} show"))
    return found, f"{looked} tensors"


def check_source(source: Path, manifest: Manifest, step: Step) -> tuple[Found, str]:
    """Check that the source is the one the conversion was made of: sizes, checksums, tensors."""
    found: Found = []
    for file, size in sorted(manifest.source_files.items()):
        path = source / file
        if not path.is_file():
            found.append((f"source {file}", "missing"))
        elif path.stat().st_size != size:
            found.append((f"source {file}", f"{path.stat().st_size} bytes, converted were {size}"))
        elif file in manifest.source_sha256 and hash_file(path, step) != manifest.source_sha256[file]:
            found.append((f"source {file}", "its bytes are not those that were converted"))
    if found:
        return found, f"{len(manifest.source_files)} files"
    pieces = {piece.source: (piece.file, piece.dtype, piece.shape) for piece in manifest.pieces}
    try:
        with naming("verify"):
            headers = [read_header(source / file)[0] for file in manifest.source_files]
    except ConversionError as error:
        return [("source", str(error))], f"{len(manifest.source_files)} files"
    tensors = {t.name: (t.file, t.dtype, t.shape) for header in headers for t in header.values()}
    for name in sorted(pieces.keys() ^ tensors.keys()):
        found.append((name, "not converted" if name in tensors else "not in the source"))
    found += [
        (name, "another file, dtype or shape in the source")
        for name in sorted(pieces.keys() & tensors.keys())
        if pieces[name] != tensors[name]
    ]
    return found, f"{len(manifest.source_files)} files, {len(tensors)} tensors"


def readable_files(converted: Path, manifest: Manifest) -> set[str]:
    """Shards whose headers are whole and describe what the manifest says."""
    return {file for file, tensors in manifest.by_file().items() if not _header_differences(converted / file, tensors)}


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


def _repeated(names: list[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _damage_of(path: Path, tensors: list[WrittenTensor], checksum_differs: bool) -> Found:
    """Say as closely as possible what is wrong with a shard: its header, or which tensors."""
    found = _header_differences(path, tensors)
    if not found:
        altered = altered_tensors(path, tensors)
        found = [(f"{path.name}: {name}", "its bytes are not those that were written") for name in altered]
    if checksum_differs and not found:
        found = [(path.name, "its header's bytes are not those that were written")]
    return found


def _header_differences(path: Path, tensors: list[WrittenTensor]) -> Found:
    if not path.is_file():
        return [(path.name, "missing")]
    try:
        with naming("verify"):
            header, metadata = read_header(path)
    except ConversionError as error:
        return [(path.name, str(error))]
    expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    actual = {name: (entry.dtype, entry.shape) for name, entry in header.items()}
    found: Found = []
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            found.append((f"{path.name}: {name}", "not in the file"))
        elif expected.get(name) != actual[name]:
            found.append((f"{path.name}: {name}", "not what the manifest describes"))
    wanted = header_metadata(tensors)
    found += [
        (path.name, f"metadata {key} differs from the manifest")
        for key in sorted(wanted.keys() & metadata.keys())
        if metadata[key] != wanted[key]
    ]
    return found


def _index_differences(path: Path, manifest: Manifest) -> Found:
    try:
        named: Any = read_json(path, MAX_INDEX_BYTES)["weight_map"]
        if not isinstance(named, dict):
            raise TypeError("weight_map is no map")
    except FileNotFoundError:
        return [(path.name, "missing")]
    except (ValueError, KeyError, TypeError) as error:
        return [(path.name, f"damaged: {type(error).__name__}: {error}")]
    expected = {tensor.name: tensor.file for tensor in manifest.tensors}
    if named == expected:
        return []
    wrong = sorted(name for name in expected.keys() | named.keys() if expected.get(name) != named.get(name))
    return [(path.name, f"another file for {wrong[0]} than in the manifest")]


def _config_differences(path: Path, manifest: Manifest) -> Found:
    """Whether config.json tells a loader the options of the manifest; version 1 did not write them there."""
    if CONFIG_FILE not in manifest.replaced_files:
        return []
    try:
        told = read_json(path, MAX_CONFIG_BYTES)[QUANTIZATION_CONFIG]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [(path.name, f"no {QUANTIZATION_CONFIG} can be read: {type(error).__name__}: {error}")]
    return (
        []
        if told == quantization_config(manifest.options)
        else [(path.name, f"{QUANTIZATION_CONFIG} differs from the manifest's options")]
    )


def _nonfinite(tensor: WrittenTensor, reader: TensorReader, step: Step) -> int:
    count = 0
    for part in reader.chunks(tensor.file, tensor.name):
        step(part.numel())
        count += _count(part, tensor)
    return count


def _count(part: Tensor, tensor: WrittenTensor) -> int:
    if tensor.layout in SCALES or tensor.dtype == "F8_E8M0":
        return int((part == 255).sum())
    if tensor.dtype == "F8_E4M3" or tensor.layout == MOE_WORDS["mxfp8"]:
        return int((part & 0x7F == 0x7F).sum())
    if tensor.dtype == "F8_E5M2":
        return int((part & 0x7F >= 0x7C).sum())
    return count_nonfinite(part.view(TORCH_DTYPES[tensor.dtype]))

"""Which tensors of a quantized checkpoint are codes and scales, by the ``quantization_config`` of its ``config.json``.

Two methods are read, ``mxfp4`` and ``fp8``. Their codes become tensors of bf16 values under the names that the model's
parameters have, so that everything behind sees an ordinary checkpoint. Other methods are errors with what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hf_neuron_moe.checks import is_whole
from hf_neuron_moe.convert.io.encoded import FP4_BLOCK, values_shape
from hf_neuron_moe.convert.io.source import GGUF_FIX, Encoding, SourceCheckpoint, SourceFormat, SourceTensor
from hf_neuron_moe.errors import ConversionError

QUANTIZATION_CONFIG = "quantization_config"
METHODS = ("mxfp4", "fp8")  # Methods whose checkpoints can be read
EXPERT_DTYPE = "expert_dtype"  # Of DeepSeek-V4, in the configuration itself or in its quantization_config

_UNQUANTIZED = "Convert the unquantized checkpoint that it was made of."
_OTHER_METHODS = {
    "awq": _UNQUANTIZED,
    "gptq": _UNQUANTIZED,
    "bitsandbytes": "Convert the unquantized checkpoint, or load this one where bitsandbytes runs, call "
    "model.dequantize() and save_pretrained, and convert the result.",
    "compressed-tensors": "Convert the unquantized checkpoint, or decompress this one first with the package "
    "compressed-tensors (CompressedTensorsConfig(run_compressed=False)) and save_pretrained.",
    "gguf": GGUF_FIX,
    "modelopt": "Convert the unquantized checkpoint: NVFP4 has two levels of scales, which no kernel here reads.",
}
"""What to do with a checkpoint of a method that is not read."""

_BLOCKS, _SCALES = "_blocks", "_scales"
_WEIGHT = ".weight"
_FP8_SCALES = ("_scale_inv",)  # Appended to the name of a tensor of FP8 codes
_FP8_WEIGHT_SCALES = (".scale", ".qscale_weight")  # Likewise, in place of ``.weight``
_ACTIVATIONS = (".activation_scale", ".input_scale", ".qscale_act")


def check_method(path: Path, content: Mapping[str, Any]) -> str | None:
    """Return the method of a configuration read from `path`, None for none; an error for one that is not read."""
    for section, nested in content.items():
        if isinstance(nested, dict) and QUANTIZATION_CONFIG in nested:
            fix = "If the whole checkpoint is quantized so, move the entry to the top of config.json."
            expected, got = f"absent, or at the top of {path.name}", f"one in {section!r}"
            raise ConversionError.about(f"{path}: {QUANTIZATION_CONFIG}", expected, got, fix)
    settings = content.get(QUANTIZATION_CONFIG)
    if settings is None:
        return None
    of_bitsandbytes = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    method = settings.get("quant_method") or ("bitsandbytes" if of_bitsandbytes else None)
    if method not in METHODS:
        expected = f"absent, or of quant_method {' or '.join(METHODS)}"
        fix = _OTHER_METHODS.get(str(method), _UNQUANTIZED)
        raise ConversionError.about(f"{path}: {QUANTIZATION_CONFIG}", expected, f"quant_method {method!r}", fix)
    return str(method)


def unquantized(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without what it says about quantization."""
    return {name: value for name, value in content.items() if name not in (QUANTIZATION_CONFIG, EXPERT_DTYPE)}


def decoded_source(source: SourceCheckpoint, path: Path, content: Mapping[str, Any]) -> SourceCheckpoint:
    """Return the checkpoint with tensors of values in place of codes and scales; itself where it is not quantized.

    `content` is its configuration, read from `path`. Codes without scales, scales without codes, and tensors of another
    dtype, shape or grid of scales are errors that name them.
    """
    method = check_method(path, content)
    if method is None:
        _check_no_codes(source, path)
        return source
    settings = content[QUANTIZATION_CONFIG]
    encodings = _mxfp4(source) if method == "mxfp4" else _fp8(source, path, {**_expert_dtype(content), **settings})
    if not encodings:
        fix = "Remove the entry if the weights are unquantized; else take config.json from where they came from."
        expected = f"absent, or of a checkpoint with codes of {method}"
        raise ConversionError.about(f"{path}: {QUANTIZATION_CONFIG}", expected, "one without codes", fix)
    _check_plain(encodings, settings.get("modules_to_not_convert") or settings.get("ignored_layers"), path)
    unused = tuple(tensor for name, tensor in source.tensors.items() if name.endswith(_ACTIVATIONS))
    taken = {tensor.name for each in encodings.values() for tensor in (each.codes, each.scales)}
    plain = {name: t for name, t in source.tensors.items() if name not in taken and t not in unused}
    for name in encodings.keys() & plain.keys():
        fix = "Remove the tensor that does not belong to the checkpoint."
        raise ConversionError.about(f"parameter {name}", "stored once", f"also {encodings[name].codes.name}", fix)
    values = {name: SourceTensor(name, each.codes.file, "BF16", values_shape(each)) for name, each in encodings.items()}
    found = SourceFormat(method, encodings, unused)
    return replace(source, tensors={**plain, **values}, format=found)


def with_transposed(source: SourceCheckpoint, names: Iterable[str]) -> SourceCheckpoint:
    """Return the checkpoint with the matrices of these tensors of values transposed, where they are MXFP4 codes.

    MXFP4 files hold experts as ``[E, N, K]``. Parameters of ``is_transposed`` experts, as gpt-oss has, are
    ``[E, K, N]``.
    """
    if source.format is None:
        return source
    found = {name: source.encodings[name] for name in names if name in source.encodings}
    turned = {name: replace(each, transposed=True) for name, each in found.items() if each.codes.dtype == "U8"}
    values = {name: replace(source.tensors[name], shape=values_shape(each)) for name, each in turned.items()}
    described = replace(source.format, encodings={**source.encodings, **turned})
    return replace(source, tensors={**source.tensors, **values}, format=described)


def _check_no_codes(source: SourceCheckpoint, path: Path) -> None:
    """Refuse pairs of codes and scales, by name and dtype, where the configuration names no method."""
    for method, dtype, end, scales_end in (("mxfp4", "U8", _BLOCKS, _SCALES), ("fp8", "F8_E4M3", "", *_FP8_SCALES)):
        for name, codes in source.tensors.items():
            scales = name.removesuffix(end) + scales_end
            if codes.dtype == dtype and name.endswith(end) and scales in source.tensors:
                got = f"none, but {name} and {scales} are codes and scales"
                fix = "Take config.json from where the weights came from."
                raise ConversionError.about(f"{path}: {QUANTIZATION_CONFIG}", f"one of quant_method {method}", got, fix)


def _expert_dtype(content: Mapping[str, Any]) -> dict[str, Any]:
    return {EXPERT_DTYPE: content[EXPERT_DTYPE]} if EXPERT_DTYPE in content else {}


def _mxfp4(source: SourceCheckpoint) -> dict[str, Encoding]:
    """Pair ``NAME_blocks`` and ``NAME_scales``."""
    encodings = {}
    for name, codes in source.tensors.items():
        base = name.removesuffix(_BLOCKS)
        if base != name:
            scales = _partner(source, codes, [base + _SCALES])
            encodings[base] = _checked(Encoding(codes, scales, FP4_BLOCK))
    _check_orphans(source, encodings, _SCALES)
    return encodings


def _fp8(source: SourceCheckpoint, path: Path, settings: Mapping[str, Any]) -> dict[str, Encoding]:
    """Pair codes, which their dtype tells, with their scales."""
    block = settings.get("weight_block_size", (128, 128))
    sizes = block is None or (isinstance(block, (list, tuple)) and len(block) == 2)
    if not sizes or not all(is_whole(size) and size > 0 for size in block or ()):
        fix = "Take config.json from where the weights came from."
        expected = "two positive integers, or null for one scale per tensor"
        raise ConversionError.about(f"{path}: {QUANTIZATION_CONFIG}.weight_block_size", expected, repr(block), fix)
    encodings = {}
    for name, codes in source.tensors.items():
        packed = codes.dtype == "I8" and settings.get(EXPERT_DTYPE) == "fp4"
        if codes.dtype == "F8_E4M3" or packed:
            base = name.removesuffix(_WEIGHT)
            others = _FP8_WEIGHT_SCALES if base != name else ()
            scales = _partner(source, codes, [*(name + end for end in _FP8_SCALES), *(base + end for end in others)])
            size = FP4_BLOCK if packed else tuple(codes.shape[-2:] if block is None else block)
            encodings[name] = _checked(Encoding(codes, scales, size))
        elif name.endswith(_WEIGHT) and codes.dtype in ("F8_E5M2", "I8", "U8"):
            fix = "Check that config.json belongs to these weights."
            expected = f"of dtype F8_E4M3, or I8 with {EXPERT_DTYPE} fp4, or unquantized"
            raise ConversionError.about(f"{codes.file}: {name}", expected, codes.dtype, fix)
    _check_orphans(source, encodings, *_FP8_SCALES)
    return encodings


def _checked(encoding: Encoding) -> Encoding:
    values_shape(encoding)
    return encoding


def _partner(source: SourceCheckpoint, codes: SourceTensor, names: list[str]) -> SourceTensor:
    """The scales of codes, under the one of `names` that the files have."""
    found = [source.tensors[name] for name in names if name in source.tensors]
    if len(found) != 1:
        got = " and ".join(tensor.name for tensor in found) or f"no tensor {' or '.join(names)}"
        fix = "Check that no file is missing, and download the checkpoint again."
        raise ConversionError.about(f"scales of {codes.file}: {codes.name}", "one tensor of the checkpoint", got, fix)
    return found[0]


def _check_orphans(source: SourceCheckpoint, encodings: Mapping[str, Encoding], *ends: str) -> None:
    used = {encoding.scales.name for encoding in encodings.values()}
    for name, tensor in source.tensors.items():
        if name.endswith(ends) and name not in used:
            fix = "Check that config.json belongs to these weights and that no file is missing."
            raise ConversionError.about(f"{tensor.file}: {name}", "the scales of codes", "scales without codes", fix)


def _check_plain(encodings: Mapping[str, Encoding], listed: object, path: Path) -> None:
    """Hold ``modules_to_not_convert``: what it names is stored as it is."""
    if listed is not None and not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
        fix = "Take config.json from where the weights came from."
        subject = f"{path}: {QUANTIZATION_CONFIG}.modules_to_not_convert"
        raise ConversionError.about(subject, "a list of names", repr(listed), fix)
    patterns = [entry for entry in listed or () if "*" in entry]
    exact = set(listed or ())
    for name, encoding in encodings.items():
        modules = {name[: dot.start()] for dot in re.finditer(r"\.", name)}
        entry = next(iter(modules & exact), None) or next((e for e in patterns if fnmatchcase(name, e + ".*")), None)
        if entry is not None:
            expected = f"unquantized, because modules_to_not_convert of {path.name} names {entry!r}"
            fix = "Check that config.json belongs to these weights."
            raise ConversionError.about(f"{encoding.codes.file}: {encoding.codes.name}", expected, "codes", fix)

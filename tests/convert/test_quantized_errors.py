"""Quantized checkpoints with one thing wrong, and methods that are not read: named before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.convert import convert_checkpoint
from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint
from hf_neuron_moe.convert.source_formats import METHODS
from hf_neuron_moe.errors import ConversionError, SourceDamageError
from tests.convert.quantized_sources import FP8, MODEL, MXFP4, rewrite, to_fp8
from tests.convert.test_quantized_sources import aria
from tests.refusals import refused

WEIGHT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"  # [96, 64] in blocks of 128 x 128
SCALE = f"{WEIGHT}_scale_inv"
DOWN = "model.layers.0.mlp.experts.down_proj"
BLOCKS, SCALES = f"{DOWN}_blocks", f"{DOWN}_scales"

Change = Callable[[dict[str, Tensor]], object]


def codes_with(index: tuple[int, ...], byte: int) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[WEIGHT].view(torch.uint8)[index] = byte

    return change


FP8_CASES: list[tuple[Change, type[ConversionError], str, str]] = [
    (lambda t: t.pop(SCALE), ConversionError, f"scales of {MODEL}: {WEIGHT}", f"no tensor {SCALE} or "),
    (
        lambda t: t.update({f"{WEIGHT[:-7]}.scale": t[SCALE].clone()}),
        ConversionError,
        f"scales of {MODEL}: {WEIGHT}",
        "",
    ),
    (lambda t: t.pop(WEIGHT), ConversionError, f"{MODEL}: {SCALE}", "scales without codes"),
    (lambda t: t.update({SCALE: torch.ones(2, 1)}), ConversionError, f"{MODEL}: {SCALE}", "[2, 1]"),
    (lambda t: t.update({SCALE: torch.ones(1, 1, 1)}), ConversionError, f"{MODEL}: {SCALE}", "[1, 1, 1]"),
    (lambda t: t.update({SCALE: torch.ones(1, 1).double()}), ConversionError, f"{MODEL}: {SCALE}", "F64"),
    (lambda t: t.update({WEIGHT: t[WEIGHT].view(torch.int8)}), ConversionError, f"{MODEL}: {WEIGHT}", "I8"),
    (lambda t: t.update({WEIGHT: t[WEIGHT][0]}), ConversionError, f"{MODEL}: {WEIGHT}", "F8_E4M3 of shape [64]"),
    (lambda t: t.update({WEIGHT: t[WEIGHT][:95]}), ConversionError, f"{MODEL}: {WEIGHT}", "[95, 64]"),
    (codes_with((7, 9), 0x7F), SourceDamageError, f"{MODEL}: {WEIGHT}", "1 NaN or infinite ones, the first at [7, 9]"),
    (
        codes_with((95, 63), 0xFF),
        SourceDamageError,
        f"{MODEL}: {WEIGHT}",
        "1 NaN or infinite ones, the first at [95, 63]",
    ),
    (
        lambda t: t.update({SCALE: torch.full((1, 1), float("inf"))}),
        SourceDamageError,
        f"{MODEL}: {WEIGHT}",
        f"{96 * 64:,} NaN or infinite ones, the first at [0, 0]",
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case[3] or "two scales")
def test_fp8(case, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    to_fp8(source)
    change, kind, argument, got = case
    rewrite(source, None, lambda tensors: (change(tensors), tensors)[1])
    with refused(kind, argument, got=got):
        convert_checkpoint(source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


MXFP4_CASES: list[tuple[Change, type[ConversionError], str, str]] = [
    (lambda t: t.pop(SCALES), ConversionError, f"scales of {MODEL}: {BLOCKS}", f"no tensor {SCALES}"),
    (lambda t: t.pop(BLOCKS), ConversionError, f"{MODEL}: {SCALES}", "scales without codes"),
    (lambda t: t.update({SCALES: t[SCALES][:, :, :1]}), ConversionError, f"{MODEL}: {SCALES}", "[3, 96, 1]"),
    (lambda t: t.update({SCALES: t[SCALES].float()}), ConversionError, f"{MODEL}: {SCALES}", "F32"),
    (lambda t: t.update({BLOCKS: t[BLOCKS][..., :8]}), ConversionError, f"{MODEL}: {BLOCKS}", "shape [3, 96, 2, 8]"),
    (lambda t: t.update({BLOCKS: t[BLOCKS].float()}), ConversionError, f"{MODEL}: {BLOCKS}", "F32"),
    (lambda t: t.update({DOWN: torch.zeros(3, 64, 96)}), ConversionError, f"parameter {DOWN}", f"also {BLOCKS}"),
    (  # Row 5, group 1 of expert 2: values [2, 32 .. 63, 5] of the transposed parameter.
        lambda t: t[SCALES].__setitem__((2, 5, 1), 255),
        SourceDamageError,
        f"{MODEL}: {DOWN}",
        "32 NaN or infinite ones, the first at [2, 32, 5]",
    ),
]


@pytest.mark.parametrize("case", MXFP4_CASES, ids=lambda case: case[3])
def test_mxfp4(case, tmp_path):
    source, _ = aria(tmp_path / "src")
    change, kind, argument, got = case
    rewrite(source, None, lambda tensors: (change(tensors), tensors)[1])
    with refused(kind, argument, got=got):
        convert_checkpoint(source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_values_that_are_copied_have_to_be_finite_too(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    to_fp8(source)
    name = "model.layers.1.self_attn.q_proj.weight"
    rewrite(source, None, lambda t: (t[name].view(torch.uint8).__setitem__((3, 4), 0x7F), t)[1])
    with refused(SourceDamageError, f"{MODEL}: {name}", got="1 NaN or infinite ones"):
        convert_checkpoint(source, tmp_path / "dst")
    manifest = convert_checkpoint(source, tmp_path / "dst", on_nonfinite="keep")
    assert manifest is not None and manifest.nonfinite == {name: 1}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"weight_block_size": [128]}, ".weight_block_size"),
        ({"weight_block_size": [0, 128]}, ".weight_block_size"),
        ({"weight_block_size": 128}, ".weight_block_size"),
        ({"modules_to_not_convert": "lm_head"}, ".modules_to_not_convert"),
        ({"modules_to_not_convert": [1]}, ".modules_to_not_convert"),
    ],
    ids=str,
)
def test_settings(settings, field, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    to_fp8(source)
    rewrite(source, FP8 | settings, lambda tensors: tensors)
    with refused(ConversionError, f"{source}/config.json: quantization_config{field}"):
        convert_checkpoint(source, tmp_path / "dst")


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("model.layers.1.self_attn", "1.self_attn.k_proj"),
        ("model.layers.*.self_attn", "0.self_attn.k_proj"),
        ("model.layers.1.self_attn.q_proj", "1.self_attn.q_proj"),
    ],
)
def test_modules_that_are_not_converted_hold_no_codes(entry, named, checkpoint, tmp_path):
    """And what is listed and plain is left alone: a prefix of a name is not its module."""
    source = checkpoint("mixtral")
    to_fp8(source)
    plain = ["lm_head", "model.layers.1.self_attn.q", "model.layers.1.mlp.gate", "model.embed_tokens"]
    rewrite(source, FP8 | {"modules_to_not_convert": plain}, lambda tensors: tensors)
    convert_checkpoint(source, tmp_path / "dst")
    rewrite(source, FP8 | {"modules_to_not_convert": [*plain, entry]}, lambda tensors: tensors)
    with refused(ConversionError, f"{MODEL}: model.layers.{named}.weight", says="modules_to_not_convert"):
        convert_checkpoint(source, tmp_path / "new")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_without_codes(method, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    rewrite(source, MXFP4 if method == "mxfp4" else FP8, lambda tensors: tensors)
    with refused(ConversionError, f"{source}/config.json: quantization_config", got="one without codes"):
        convert_checkpoint(source, tmp_path / "dst")


@pytest.mark.parametrize("method", METHODS)
def test_codes_without_a_method(method, checkpoint, tmp_path):
    source = tmp_path / "src"
    if method == "mxfp4":
        aria(source)
    else:
        source = checkpoint("mixtral")
        to_fp8(source)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    expected = f"one of quant_method {method}, got none, but model.layers"
    with refused(ConversionError, f"{source}/config.json: quantization_config", expected) as caught:
        convert_checkpoint(source, tmp_path / "dst")
    ends = (
        ("down_proj_blocks and", "down_proj_scales are")
        if method == "mxfp4"
        else (".weight and", "weight_scale_inv are")
    )
    assert all(end in str(caught.value) for end in ends) and not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("settings", "method", "remedy"),
    [
        ({"quant_method": "awq"}, "awq", "unquantized checkpoint"),
        ({"quant_method": "gptq"}, "gptq", "unquantized checkpoint"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes", r"model\.dequantize\(\)"),
        ({"load_in_4bit": True}, "bitsandbytes", r"model\.dequantize\(\)"),
        ({"load_in_8bit": True}, "bitsandbytes", r"model\.dequantize\(\)"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors", "run_compressed=False"),
        ({"quant_method": "gguf"}, "gguf", "gguf_file=NAME"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", "two levels of scales"),
        ({"quant_method": "hqq"}, "hqq", "unquantized checkpoint"),
        ({"quant_method": ["fp8"]}, "fp8", "unquantized checkpoint"),
        ({}, "None", "unquantized checkpoint"),
    ],
    ids=str,
)
def test_other_methods_say_what_to_do(settings, method, remedy, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    assert inspect_checkpoint(source).to_dict()["refused"] is None
    rewrite(source, settings, lambda tensors: tensors)
    with refused(ConversionError, f"{source}/config.json: quantization_config", remedy) as caught:
        convert_checkpoint(source, tmp_path / "dst")
    assert method in str(caught.value) and [path.name for path in tmp_path.iterdir()] == [source.name]
    report = inspect_checkpoint(source)
    assert str(caught.value) == f"convert: {report.refused}"
    assert report.to_text().endswith(f"\nnote: convert refuses it: {report.refused}")


@pytest.mark.parametrize("left", ["file", "folder", "folder with config.json"])
def test_gguf_weights_say_what_to_do(left, checkpoint, tmp_path):
    """Repositories of GGUF files have no config.json, or one and no safetensors."""
    source: Path = checkpoint("mixtral")
    for path in source.iterdir():
        if path.name != "config.json" or "with" not in left:
            path.unlink()
    (source / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    given = source / "model-Q4_K_M.gguf" if left == "file" else source
    remedy = r"from_pretrained\(FOLDER, gguf_file=NAME\) and call save_pretrained"
    got = "a file" if left == "file" else "GGUF weights (model-Q4_K_M.gguf)"
    with refused(ConversionError, given, remedy, got=got):
        convert_checkpoint(given, tmp_path / "dst")


def test_a_nested_entry_is_named(checkpoint, tmp_path):
    source: Path = checkpoint("mixtral")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"text_config": {"quantization_config": FP8}}))
    with refused(ConversionError, f"{source}/config.json: quantization_config", got="one in 'text_config'"):
        convert_checkpoint(source, tmp_path / "dst")

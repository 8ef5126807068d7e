"""What a conversion writes beside the weights and about them: configuration, card, headers, manifest, rank files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_neuron_moe.convert import MANIFEST_FILE, ConvertOptions, convert_checkpoint, export_checkpoint, read_manifest
from hf_neuron_moe.convert.audit.operands import read_operand
from hf_neuron_moe.convert.io.nonfinite import check_or_count
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.layout.relayout import restore
from hf_neuron_moe.errors import SourceDamageError, naming
from hf_neuron_moe.formats import fake_quantize_mx
from tests.refusals import refused


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    "wish", [{}, {"layout": "fused"}, {"precision": "mxfp8", "purpose": "lora", "scales": "oversized"}]
)
def test_config_json_says_what_the_folder_holds(wish, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    options = ConvertOptions(**wish)
    convert_checkpoint(source, tmp_path / "dst", options)
    before = json.loads((source / "config.json").read_text())
    after = json.loads((tmp_path / "dst" / "config.json").read_text())
    entry = after.pop("quantization_config")
    assert after == before
    assert entry["quant_method"] == "neuron_moe"
    left_out = {"max_shard_bytes", "allow_inexact"}  # what became of the latter is in the names of layouts
    asked = {name: value for name, value in dataclasses.asdict(options).items() if name not in left_out}
    in_force = {"swizzle": options.swizzled, "scale_rule": options.rule if options.quantized else None}
    assert entry == {"quant_method": "neuron_moe", **asked, **in_force}


def test_card_and_config_come_back_as_they_were(checkpoint, snapshot, tmp_path):
    for card in (None, "---\nlicense: apache-2.0\n---\n# Tiny Ærø", "no newline at the end"):
        source = checkpoint("llama")
        if card is not None:
            (source / "README.md").write_text(card)
        before = snapshot(source)
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel"))
        text = (tmp_path / "dst" / "README.md").read_text()
        assert text.startswith(card or "## Weight layout")
        assert text.count("## Weight layout") == 1
        assert "| layout | bf16_kernel (4 tensors) |" in text
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
        assert snapshot(tmp_path / "back") == before
        for folder in ("dst", "back", source.name):
            for path in (tmp_path / folder).iterdir():
                path.unlink()
            (tmp_path / folder).rmdir()


def test_the_card_names_losses_padding_and_ranks(checkpoint, tmp_path):
    options = ConvertOptions("mxfp8", "kernel", purpose="inference", tp_degree=2, pad=True)
    convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", options)
    text = (tmp_path / "dst" / "README.md").read_text()
    assert "mxfp8_moe_words (8 tensors)" in text
    assert "the original's bits are gone" in text and "--allow-inexact" in text
    assert "zeros at the end of H (up to 448) and I (up to 16)" in text
    assert "split among 2 ranks" in text


def test_the_card_names_the_most_padding_of_all_weights(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("qwen2_moe"), tmp_path / "dst", ConvertOptions("bf16", "kernel", pad=True))
    zeros = [tensor.padding.get("H", 0) for tensor in read_manifest(tmp_path / "dst").tensors]
    assert len({count for count in zeros if count}) == 2
    assert f"zeros at the end of H (up to {max(zeros)})" in (tmp_path / "dst" / "README.md").read_text()


def test_a_card_that_is_no_text_is_refused(checkpoint, tmp_path):
    source = checkpoint("llama")
    (source / "README.md").write_bytes(b"\xff\xfe not utf-8")
    with refused(SourceDamageError, "README.md"):
        convert_checkpoint(source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_headers_and_manifest_agree_about_every_tensor(checkpoint, tmp_path):
    options = ConvertOptions("mxfp8", "kernel", 200_000, purpose="training", tp_degree=3, scales="oversized")
    manifest = convert_checkpoint(checkpoint("qwen2_moe_96"), tmp_path / "dst", options)
    seen = 0
    for path in (tmp_path / "dst").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shown = json.loads(file.metadata()["hf_neuron_moe.tensors"])
            assert file.metadata()["hf_neuron_moe.format_version"] == "2"
            assert shown.keys() == set(file.keys())
        for tensor in manifest.tensors:
            if tensor.file == path.name:
                seen += 1
                assert shown[tensor.name] == {name: getattr(tensor, name) for name in next(iter(shown.values()))}
    assert seen == len(manifest.tensors)
    assert {tensor.orientation for tensor in manifest.tensors} == {"forward", "backward"}
    assert {tensor.scale_layout for tensor in manifest.tensors} == {None, "oversized"}


def test_each_rank_has_files_of_its_own(checkpoint, tmp_path):
    options = ConvertOptions("bf16", "kernel", 20_000, tp_degree=3)
    manifest = convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", options)
    for tensor in manifest.tensors:
        if tensor.tp_rank is None:
            assert tensor.layout == "source" and not tensor.file.startswith("neuron-tp")
        else:
            assert tensor.file.startswith(f"neuron-tp-{tensor.tp_rank:02d}-of-03-")
            assert tensor.name == f"{tensor.weight}.tp{tensor.tp_rank}"
    sizes = [sum(math.prod(t.shape) for t in manifest.tensors if t.tp_rank == rank) for rank in range(3)]
    assert len(set(sizes)) == 1
    names = {tensor.name for tensor in manifest.tensors}
    index = json.loads((tmp_path / "dst" / "neuron.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == names == load(tmp_path / "dst").keys()


def test_padding_is_recorded_where_it_is(checkpoint, tmp_path):
    options = ConvertOptions("bf16", "kernel", tp_degree=2, pad=True)
    manifest = convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", options)
    converted = load(tmp_path / "dst")
    for tensor in manifest.tensors:
        if tensor.layout == "source":
            assert tensor.padding == {}
            continue
        # 96 intermediate values, 48 for a rank, in multiples of 64; hidden size 64 in multiples of 512.
        assert tensor.padding == {"H": 448, "I": 16}
        values = converted[tensor.name]
        if "down" in tensor.name:
            assert values.shape[1:] == (64, 512)
            assert not values[:, 48:].any() and not values[..., 64:].any() and values[:, :48, :64].any()
        else:
            assert values.shape[1:] == (512, 128)
            assert not values[:, 64:].any()
            assert not values[:, :64, 48:64].any() and not values[:, :64, 112:].any() and values[:, :64, :48].any()


def test_backward_operands_hold_the_values_along_the_other_axis(checkpoint, tmp_path):
    source = checkpoint("llama")
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", "kernel", purpose="lora"))
    converted, original = load(tmp_path / "dst"), load(source)
    prefix = "model.layers.0.mlp."
    gate_up = torch.cat([original[f"{prefix}{half}_proj.weight"] for half in ("gate", "up")])
    for weight, pieces in manifest.weights.items():
        if not weight.startswith(prefix):
            continue
        tensors = [tensor for tensor in manifest.tensors if tensor.weight == weight]
        fused = gate_up if "gate_up" in weight else original[prefix + "down_proj.weight"]
        codes, scales = (tensor for tensor in tensors if tensor.orientation == "backward")
        held = read_operand(codes, scales, None, lambda tensor, expert: converted[tensor.name])
        assert torch.equal(held.bfloat16(), fake_quantize_mx(fused, 0).bfloat16().t())
        for piece in pieces:
            part = restore(piece, tensors, lambda index, expert, t=tensors: converted[t[index].name])
            assert torch.equal(part, fake_quantize_mx(fused, 1).bfloat16()[piece.rows])


def test_a_conversion_of_format_version_1_is_exported(checkpoint, snapshot, tmp_path):
    source = checkpoint("mixtral")
    before = snapshot(source)
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel"))
    dst = tmp_path / "dst"
    path = dst / MANIFEST_FILE
    content = json.loads(path.read_text()) | {"format_version": 1}
    # What version 1 wrote: configuration as in the source, no card, and fewer facts.
    for name, text in content.pop("replaced_files").items():
        (dst / name).unlink() if text is None else (dst / name).write_text(text)
    for name in ("source_sha256", "file_sha256", "sha256"):
        content.pop(name)
    content["options"] = {name: content["options"][name] for name in ("precision", "layout", "max_shard_bytes")}
    for tensor in content["tensors"]:
        del tensor["checksum"]
        with open_tensors(dst) as reader:
            data = b"".join(part.numpy().tobytes() for part in reader.chunks(tensor["file"], tensor["name"]))
        tensor["sha256"] = hashlib.sha256(data).hexdigest()
        for fact in ("scale_layout", "orientation", "tp_rank", "padding"):
            tensor.pop(fact)
    path.write_text(json.dumps(content))
    assert read_manifest(dst).options.purpose == "inference"
    assert export_checkpoint(dst, tmp_path / "back").inexact == ()
    assert snapshot(tmp_path / "back") == before


@pytest.mark.sampled(2)
@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("wish", [{}, {"precision": "mxfp8"}, {"tp_degree": 2}, {"layout": "fused"}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_weights_are_named_or_kept(wish, value, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors[name][5, 60] = value
    save_file(tensors, path, {"format": "pt"})
    with refused(SourceDamageError, f"model.safetensors: {name}", "--on-nonfinite keep", got="1 NaN or infinite"):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions(**wish))
    assert not (tmp_path / "dst").exists()
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions(**wish), on_nonfinite="keep")
    export_checkpoint(tmp_path / "dst", tmp_path / "back", allow_inexact=True)
    if "precision" not in wish:
        assert torch.equal(load(tmp_path / "back")[name].view(torch.int16), tensors[name].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_bit_pattern_of_a_dtype_is_judged_as_isfinite_does(dtype):
    check = partial(check_or_count, on_nonfinite="error", counts=Counter(), file="f", name="n")
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # All exponents and signs, with the mantissas that decide between infinity, NaN and neighbours.
    high = torch.arange(-(2**15), 2**15).to(width) << (8 * dtype.itemsize - 16)
    for low in (0, 1) if dtype.itemsize > 2 else (0,):
        values = (high | low).view(dtype)
        finite = values.isfinite()
        check(values[finite])
        for value in values[~finite][::13]:
            with refused(SourceDamageError, "f: n", got="1 NaN or infinite"), naming("convert"):
                check(torch.stack([torch.zeros((), dtype=dtype), value]))
    check(torch.full((3,), 255, dtype=torch.uint8))
    check(torch.empty(0, 4, dtype=dtype))

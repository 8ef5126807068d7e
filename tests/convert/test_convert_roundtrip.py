"""Conversions hold what they claim, and the way back gives the original bytes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_neuron_moe.convert import (
    LAYOUTS,
    MANIFEST_FILE,
    ConvertOptions,
    convert_checkpoint,
    export_checkpoint,
    plan_conversion,
    read_manifest,
)
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.export import NOTE_FILE
from hf_neuron_moe.convert.manifest import sealed
from hf_neuron_moe.errors import ConfigError, ConversionError, NeuronMoEWarning
from hf_neuron_moe.formats.mx import fake_quantize_mx, quantize_mx
from hf_neuron_moe.formats.scales import to_packed
from tests.refusals import refused

FAMILIES = ("llama", "llama_tied", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def in_memory(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters as stock transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_comes_back_as_the_same_files(family, layout, checkpoint, snapshot, tmp_path):
    source = checkpoint(family)
    before = snapshot(source)
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", layout))
    report = export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert report.inexact == ()
    assert len(manifest.weights) > 4
    assert any(tensor.layout == f"bf16_{layout}" for tensor in manifest.tensors)
    assert snapshot(source) == before
    assert snapshot(tmp_path / "back") == before


def test_sharded_source_and_many_output_shards(checkpoint, snapshot, tmp_path):
    source = checkpoint("mixtral", shard="100KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel", max_shard_bytes=60_000))
    assert len({tensor.file for tensor in manifest.tensors}) > 3
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    before, after = snapshot(source), snapshot(tmp_path / "back")
    index = "model.safetensors.index.json"
    assert json.loads(before.pop(index))["weight_map"] == json.loads(after.pop(index))["weight_map"]
    assert after == before


def test_a_source_that_was_exported_itself_keeps_its_note_and_its_index(checkpoint, snapshot, tmp_path):
    """One file may have an index; and what a source is not exact in, it is not after an exact way back either."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint("llama"), source)
    (source / NOTE_FILE).write_text("{}")
    file = "model-00001-of-00001.safetensors"
    (source / "model.safetensors").rename(source / file)
    names = dict.fromkeys(sorted(load(source)), file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel"))
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert (tmp_path / "back" / NOTE_FILE).read_text() == "{}"
    assert json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"] == names
    assert snapshot(tmp_path / "back").keys() == snapshot(source).keys()


def test_what_was_not_rounded_has_to_be_exact(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel"))
    (probe, *others) = verify_checkpoint(tmp_path / "dst", source).probes
    assert all(floor == math.inf for each in (probe, *others) for floor in each.floors.values()) and probe.floors


def test_experts_already_fused_on_disk(checkpoint, snapshot, tmp_path):
    source = checkpoint("mixtral", original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load(source)
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel"))
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)
    per_expert = convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst2", ConvertOptions("bf16", "kernel"))
    fused = {tensor.name: tensor.checksum for tensor in read_manifest(tmp_path / "dst").tensors}
    experts = {tensor.name: tensor.checksum for tensor in per_expert.tensors if "experts" in tensor.name}
    assert experts.items() <= fused.items()
    assert len(experts) == 4


def test_layouts_are_what_their_names_say(checkpoint, tmp_path):
    source = checkpoint("qwen2_moe")
    stock = in_memory(source)
    for layout in LAYOUTS:
        convert_checkpoint(source, tmp_path / layout, ConvertOptions("bf16", layout))
    fused, kernel = load(tmp_path / "fused"), load(tmp_path / "kernel")
    experts, shared = "model.layers.1.mlp.experts.", "model.layers.1.mlp.shared_expert."
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(fused[experts + name], stock[experts + name])
        assert torch.equal(kernel[experts + name], stock[experts + name].transpose(1, 2))
    gate_up = torch.cat([stock[shared + "gate_proj.weight"], stock[shared + "up_proj.weight"]])
    for converted in (fused, kernel):
        assert torch.equal(converted[shared + "gate_up_proj.weight"], gate_up)
        assert torch.equal(converted["model.embed_tokens.weight"], stock["model.embed_tokens.weight"])
        assert torch.equal(converted["model.layers.1.mlp.gate.weight"], stock["model.layers.1.mlp.gate.weight"])
    assert fused.keys() == kernel.keys()
    assert not any("experts.0." in name or "gate_proj" in name for name in fused)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_mxfp8_holds_the_codes_and_scales_of_each_matrix(family, layout, checkpoint, tmp_path):
    source = checkpoint(family)
    stock = in_memory(source)
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", layout))
    converted = load(tmp_path / "dst")
    if family == "llama":
        name = "model.layers.0.mlp.gate_up_proj.weight"
        prefix = "model.layers.0.mlp."
        matrices = [torch.cat([stock[prefix + "gate_proj.weight"], stock[prefix + "up_proj.weight"]])]
        codes, scales = converted[name][None], converted[name + "_scale"][None]
    else:
        name = "model.layers.0.mlp.experts.gate_up_proj"
        matrices = list(stock[name])
        codes, scales = converted[name], converted[name + "_scale"]
    assert codes.dtype == torch.float8_e4m3fn
    for matrix_FK, code, scale in zip(matrices, codes, scales, strict=True):
        mx = quantize_mx(matrix_FK)
        if layout == "kernel":
            assert torch.equal(code.view(torch.uint8), mx.codes)
            assert torch.equal(scale, to_packed(mx.scales))
        else:
            assert torch.equal(scale, mx.scales)
            block_exponents = code.float().abs().amax()
            assert 128 <= block_exponents <= 256, "Neuron's rule puts the largest element into [128, 256]"
    assert {tensor.layout for tensor in manifest.tensors if tensor.weight == name} == (
        {"mxfp8_swizzled_codes", "mxfp8_packed_scales"}
        if layout == "kernel"
        else {"mxfp8_fused_codes", "mxfp8_compact_scales"}
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mxfp8_comes_back_as_the_dequantized_values_and_only_when_asked(layout, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", layout))
    with refused(ConversionError, tmp_path / "dst", "--allow-inexact"):
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    report = export_checkpoint(tmp_path / "dst", tmp_path / "back", allow_inexact=True)
    original, back = load(source), load(tmp_path / "back")
    assert original.keys() == back.keys()
    assert set(report.inexact) == {name for name in original if ".experts." in name}
    for name, tensor in original.items():
        expected = fake_quantize_mx(tensor).to(tensor.dtype) if name in report.inexact else tensor
        assert torch.equal(back[name], expected), name


def test_fp32_source_in_bf16_is_rounded_and_says_so(checkpoint, tmp_path):
    source = checkpoint("llama", torch.float32)
    with pytest.warns(NeuronMoEWarning, match="F32 values in 6 tensors .*do not fit bf16 and were rounded"):
        manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel"))
    with refused(ConversionError, tmp_path / "dst", got="6 tensors"):
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
    report = export_checkpoint(tmp_path / "dst", tmp_path / "back", allow_inexact=True)
    original, back = load(source), load(tmp_path / "back")
    for name, tensor in original.items():
        expected = tensor.bfloat16().float() if name in report.inexact else tensor
        assert torch.equal(back[name], expected), name
    assert len(report.inexact) == 6
    lost = {name: int((original[name] != back[name]).sum()) for name in report.inexact}
    assert manifest.rounded == read_manifest(tmp_path / "dst").rounded == lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wider_sources_come_back_exactly_where_bf16_holds_their_values(layout, dtype, checkpoint, snapshot, tmp_path):
    source = checkpoint("mixtral", dtype)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        # Powers of two: every one of these dtypes holds them.
        tensors = {name: torch.full_like(value, 0.25).copysign(value) for name, value in tensors.items()}
        save_file(tensors, path, {"format": "pt"})
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", layout))
    assert manifest.rounded == {}
    assert export_checkpoint(tmp_path / "dst", tmp_path / "back").inexact == ()
    assert snapshot(tmp_path / "back") == snapshot(source)


@pytest.mark.parametrize("fused", [True, False])
def test_rounded_values_are_counted_per_source_tensor(fused, checkpoint, tmp_path):
    source = checkpoint("mixtral", torch.float32, original_format=not fused)
    name = "model.layers.1.mlp.experts.down_proj" if fused else "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    path = source / "model.safetensors"
    tensors = {key: value.bfloat16().float() for key, value in load_file(path).items()}
    tensors[name].view(-1)[:3] = torch.tensor([1 + 2**-9, 3.4e38, -1 - 2**-20])  # 3.4e38 rounds to infinity
    save_file(tensors, path, {"format": "pt"})
    with pytest.warns(NeuronMoEWarning, match="3 of .* in 1 tensor "):
        assert convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel")).rounded == {name: 3}
    # MXFP8 quantizes everything; that it also passes through bf16 is counted and not worth a warning.
    assert convert_checkpoint(source, tmp_path / "mx", ConvertOptions("mxfp8", "kernel")).rounded == {name: 3}


def test_a_manifest_without_counts_takes_every_wider_tensor_for_rounded(checkpoint, tmp_path):
    with pytest.warns(NeuronMoEWarning):
        convert_checkpoint(checkpoint("llama", torch.float32), tmp_path / "dst", ConvertOptions("bf16", "kernel"))
    path = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(path.read_text())
    content.pop("rounded")
    path.write_text(json.dumps(sealed(content)))
    with refused(ConversionError, path.parent, got="6 tensors"):
        export_checkpoint(tmp_path / "dst", tmp_path / "back")


def test_manifest_and_headers_describe_every_tensor(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    options = ConvertOptions("mxfp8", "kernel")
    written = convert_checkpoint(source, tmp_path / "dst", options)
    manifest = read_manifest(tmp_path / "dst")
    assert manifest == written
    assert manifest.options == options
    tensors = load(tmp_path / "dst")
    assert {tensor.name for tensor in manifest.tensors} == tensors.keys()
    for tensor in manifest.tensors:
        data = tensors[tensor.name]
        assert tensor.shape == tuple(data.shape)
        assert tensor.checksum == "xxh3_128:" + xxhash.xxh3_128_hexdigest(data.view(torch.uint8).numpy().tobytes())
        with safe_open(tmp_path / "dst" / tensor.file, framework="pt") as file:
            assert json.loads(file.metadata()["hf_neuron_moe.layouts"])[tensor.name] == tensor.layout
    assert sorted(piece.source for pieces in manifest.weights.values() for piece in pieces) == sorted(load(source))
    assert manifest.source_files == {"model.safetensors": (source / "model.safetensors").stat().st_size}


def test_the_same_source_gives_the_same_bytes(checkpoint, snapshot, tmp_path):
    source = checkpoint("mixtral")
    for name in ("one", "two"):
        convert_checkpoint(source, tmp_path / name, ConvertOptions("mxfp8", "kernel"))
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")
    assert str(tmp_path).encode() not in (tmp_path / "one" / MANIFEST_FILE).read_bytes()


def test_a_tensor_does_not_depend_on_the_shard_size(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    sums = []
    for size in (30_000, 5_000_000_000):
        manifest = convert_checkpoint(source, tmp_path / str(size), ConvertOptions("mxfp8", "kernel", size))
        sums.append({tensor.name: tensor.checksum for tensor in manifest.tensors})
    assert sums[0] == sums[1]


@pytest.mark.slow  # tests/quantizers/test_registration.py shows it of MX codes in the fast run
def test_stock_transformers_stops_instead_of_misreading_a_conversion(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("mixtral"), tmp_path / "dst", ConvertOptions("bf16", "kernel"))
    # In a process of its own: this one has imported the package, which can read it.
    code = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "dst"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode != 0
    assert "no file named" in result.stderr


def test_progress_ends_at_the_planned_size(checkpoint, tmp_path):
    source = checkpoint("llama")
    steps: list[tuple[int, int]] = []
    convert_checkpoint(source, tmp_path / "dst", progress=lambda done, total: steps.append((done, total)))
    plan = plan_conversion(source, ConvertOptions())
    assert steps[-1] == (plan.output_bytes, plan.output_bytes)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})


@pytest.mark.parametrize("option", [{"precision": "mxfp9"}, {"layout": "kernels"}, {"max_shard_bytes": 0}])
def test_options_are_checked(option):
    with refused(ConfigError, next(iter(option))):
        ConvertOptions(**option)


def test_fp32_sources_are_quantized_from_their_bf16_rounding(checkpoint, tmp_path):
    """The kernels and the patched blocks read bf16 weights, so a converted checkpoint must hold those numbers."""
    source = checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 2**-10)
    codes = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        folder, converted = tmp_path / name, tmp_path / f"{name}-mx"
        model.to(dtype).save_pretrained(folder)
        convert_checkpoint(folder, converted, ConvertOptions("mxfp8", "kernel"))
        (shard,) = converted.glob("*.safetensors")
        tensors = load_file(shard)
        codes.append({name: value.view(torch.uint8) for name, value in tensors.items() if "mlp" in name})
    assert codes[0].keys() == codes[1].keys() and len(codes[0]) >= 4
    assert all(torch.equal(codes[0][name], codes[1][name]) for name in codes[0])


def test_buffers_of_old_files_are_kept_and_not_read(checkpoint, snapshot, tmp_path):
    """transformers leaves them out when it loads, as it computes them today."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint("llama"), source)
    file = source / "model.safetensors"
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    save_file({**load_file(file), **old}, file, {"format": "pt"})
    before = snapshot(source)
    convert_checkpoint(source, tmp_path / "dst")
    assert verify_checkpoint(tmp_path / "dst", source).ok
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert snapshot(tmp_path / "back") == before
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert not any(name.endswith("layers.0.self_attn.rotary_emb.inv_freq") for name, _ in model.named_buffers())

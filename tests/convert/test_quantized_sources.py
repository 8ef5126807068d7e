"""Quantized checkpoints convert to what their codes stand for: values, files, reports and the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AriaTextConfig, AriaTextForCausalLM, AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_neuron_moe.convert import (
    ConvertOptions,
    convert_checkpoint,
    export_checkpoint,
    finalize_checkpoint,
    read_manifest,
)
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.estimate import estimate_conversion
from hf_neuron_moe.convert.io import encoded
from hf_neuron_moe.convert.layout import relayout
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, sealed
from hf_neuron_moe.errors import ConversionError, NeuronMoEWarning
from hf_neuron_moe.modules.experts_form import is_decorated_experts
from hf_neuron_moe.patching.discovery import EXPERTS, Candidate
from tests.convert.mutations import command
from tests.convert.quantized_sources import MODEL, MXFP4, random_mxfp4, rewrite, to_fp8
from tests.refusals import refused


def values_of(tensors: dict[str, Tensor], block: tuple[int, int], scale_name: str = ".weight_scale_inv") -> dict:
    """The tensors that FP8 codes and scales stand for, by a float64 model; others as they are."""
    values = {}
    for name, tensor in tensors.items():
        scales = tensors.get(name.removesuffix(".weight") + scale_name)
        if tensor.dtype == torch.float8_e4m3fn and scales is not None:
            row, column = (torch.arange(size) // step for size, step in zip(tensor.shape, block))
            factors = torch.exp2(scales.double() - 127) if scales.dtype == torch.uint8 else scales.double()
            values[name] = (tensor.double() * factors[row][:, column]).float().bfloat16()
        elif not name.endswith(scale_name):
            values[name] = tensor
    return values


def assert_same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def as_mxfp4(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random codes in place of the experts' matrices, and their values as transformers decodes them."""
    changed, values = dict(tensors), {}
    for seed, name in enumerate(name for name in tensors if ".experts." in name and tensors[name].ndim == 3):
        E, K, N = changed.pop(name).shape
        blocks, scales = random_mxfp4(E, N, K, seed)
        changed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales)
    return changed, values


def aria(folder: Path, hidden: int = 96, inner: int = 64) -> tuple[Path, dict[str, Tensor]]:
    """A tiny model with transposed experts in MXFP4, and the values of its experts as transformers decodes them."""
    config = AriaTextConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        moe_num_experts=3,
        moe_topk=2,
        moe_num_shared_experts=1,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    model = AriaTextForCausalLM(config)
    if not any(map(is_decorated_experts, model.modules())):
        pytest.skip("this transformers has Aria's experts in a loop of their own")
    model.bfloat16().save_pretrained(folder, save_original_format=False)
    wanted: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed, values = as_mxfp4(tensors)
        wanted.update(values)
        return changed

    rewrite(folder, MXFP4, change)
    return folder, wanted


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_fp8_loads_as_transformers_decodes_it(precision, checkpoint, tmp_path):
    """Blocks of 32 divide every size, so that transformers' own decoding is right."""
    source = checkpoint("qwen3_moe")
    to_fp8(source, block=(32, 32))
    stock = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions(precision))
    report = verify_checkpoint(tmp_path / "dst", source)
    assert report.ok and len(report.probes) == 2, str(report)
    assert manifest is not None and manifest.source_format is not None and manifest.source_format.method == "fp8"
    exported = export_checkpoint(tmp_path / "dst", tmp_path / "back", allow_inexact=precision == "mxfp8")
    assert "decoded values in bf16" in exported.statement[0] and bool(exported.inexact) == (precision == "mxfp8")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["hidden_size"] == 64
    if precision == "bf16":
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
        assert_same_tensors(dict(back.state_dict()), dict(stock.state_dict()))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", dtype="auto")
        assert_same_tensors(dict(loaded.state_dict()), dict(stock.state_dict()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("block", "how"),
    [
        ((48, 40), {}),
        ((1, 32), {"scale_dtype": torch.uint8, "scale_fmt": "ue8m0"}),
        ((48, 40), {"scale_dtype": torch.float8_e8m0fnu, "scale_name": ".scale", "scale_fmt": "ue8m0"}),
        ((48, 40), {"scale_dtype": torch.bfloat16, "scale_name": ".qscale_weight"}),
    ],
    ids=["ragged fp32", "mxfp8", "e8m0", "bf16"],
)
def test_every_tensor_is_decoded(block, how, checkpoint, tmp_path, monkeypatch):
    """Also those that are no MLP's; in parts of a few rows, which begin within blocks."""
    source = checkpoint("mixtral")
    tensors = to_fp8(source, block=block, **how)
    monkeypatch.setattr(relayout, "READ_BYTES", 1000)
    monkeypatch.setattr(encoded, "ROWS_BYTES", 1000)
    convert_checkpoint(source, tmp_path / "dst")
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    wanted = values_of(tensors, block, how.get("scale_name", ".weight_scale_inv"))
    assert_same_tensors(load_file(tmp_path / "back" / MODEL), wanted)


def test_one_scale_per_tensor(checkpoint, tmp_path):
    """``weight_block_size`` null; scales of no axis, as static quantization writes them, and unused activations'."""
    source = checkpoint("llama")
    tensors = to_fp8(source, block=(1000, 1000))

    def change(held: dict[str, Tensor]) -> dict[str, Tensor]:
        ends = ("_scale_inv", ".activation_scale")
        changed = {name: t.reshape(()) if name.endswith(ends[0]) else t for name, t in held.items()}
        return changed | {
            name.removesuffix("weight_scale_inv") + ends[1][1:]: torch.ones(())
            for name in held
            if name.endswith(ends[0])
        }

    rewrite(source, {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}, change)
    manifest = convert_checkpoint(source, tmp_path / "dst")
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert_same_tensors(load_file(tmp_path / "back" / MODEL), values_of(tensors, (1000, 1000)))
    assert manifest is not None and manifest.source_format is not None and len(manifest.source_format.unused) == 14
    assert verify_checkpoint(tmp_path / "dst", source).ok


@pytest.mark.parametrize("where", ["config", "quantization_config"])
def test_fp4_experts_beside_fp8(where, checkpoint, tmp_path):
    """DeepSeek-V4's form: experts as packed FP4 with a scale per row and 32 values, the rest as FP8."""
    source = checkpoint("qwen3_moe")
    wanted: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = dict(tensors)
        for seed, name in enumerate(name for name in tensors if ".experts." in name and name.endswith(".weight")):
            del changed[name.removesuffix(".weight") + ".weight_scale_inv"]
            (N, K), base = tensors[name].shape, name.removesuffix(".weight")
            blocks, scales = random_mxfp4(1, N, K, seed)
            changed |= {
                name: blocks.view(torch.int8).reshape(N, K // 2),
                f"{base}.scale": scales[0].view(torch.float8_e8m0fnu),
            }
            wanted[name] = convert_moe_packed_tensors(blocks, scales)[0].mT
        return changed

    tensors = to_fp8(source)
    extra: dict[str, Any] = {"expert_dtype": "fp4"}
    rewrite(source, {"quant_method": "fp8", **(extra if where == "quantization_config" else {})}, change)
    if where == "config":
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | extra))
    convert_checkpoint(source, tmp_path / "dst")
    assert verify_checkpoint(tmp_path / "dst", source).ok
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert_same_tensors(load_file(tmp_path / "back" / MODEL), values_of(tensors, (128, 128)) | wanted)
    assert "expert_dtype" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize(
    "options", [ConvertOptions(), ConvertOptions("mxfp8"), ConvertOptions("mxfp4", pad=True)], ids=str
)
def test_mxfp4_experts(options, tmp_path, monkeypatch):
    source, wanted = aria(tmp_path / "src")
    monkeypatch.setattr(relayout, "READ_BYTES", 4000)
    convert_checkpoint(source, tmp_path / "dst", options)
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok and len(report.probes) == 2 * 4, str(report)
    if options.precision == "bf16":
        export_checkpoint(tmp_path / "dst", tmp_path / "back")
        back = load_file(tmp_path / "back" / MODEL)
        assert_same_tensors({name: back[name] for name in wanted}, wanted)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
        name = "model.layers.1.mlp.experts.down_proj"
        assert torch.equal(model.state_dict()[name], wanted[name])


@pytest.mark.parametrize("pad", [False, True])
def test_gpt_oss_loads_as_transformers_decodes_it(pad, tmp_path):
    """Interleaved, transposed and biased experts: the model of the conversion holds stock's values, biases included."""
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        num_local_experts=3,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    source = tmp_path / "src"
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    for name, param in model.named_parameters():
        if name.endswith("_proj_bias"):
            torch.nn.init.normal_(param)
    model.save_pretrained(source)
    rewrite(source, MXFP4, lambda tensors: as_mxfp4(tensors)[0])
    stock = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions(pad=pad))
    assert verify_checkpoint(tmp_path / "dst", source, probes=0).ok
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    for folder in (tmp_path / "dst", tmp_path / "back"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert_same_tensors(dict(loaded.state_dict()), dict(stock.state_dict()))


def test_a_module_that_is_left_is_decoded_too(tmp_path, monkeypatch):
    """What no kernel computes is copied as values, which is what the result's config.json says of it."""
    source, wanted = aria(tmp_path / "src")
    reason = "not today"

    def judged(candidate: Candidate, _: object) -> Candidate:
        return replace(candidate, reason=reason) if candidate.kind == EXPERTS else candidate

    monkeypatch.setattr("hf_neuron_moe.convert.plan._convertible", judged)
    with refused(ConversionError, "every MLP and experts module", "with strict"):
        convert_checkpoint(source, tmp_path / "dst", strict=True)
    with pytest.warns(NeuronMoEWarning, match=reason):  # Without strict it is no error
        manifest = convert_checkpoint(source, tmp_path / "dst")
    assert manifest is not None and {each.reason for each in (manifest.left or {}).values()} == {reason}
    assert verify_checkpoint(tmp_path / "dst", source).ok
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    back = load_file(tmp_path / "back" / MODEL)
    assert_same_tensors({name: back[name] for name in wanted}, wanted)


def split(folder: Path) -> None:
    """Put the scales of a folder's codes into a file of their own."""
    tensors = load_file(folder / MODEL)
    parts = {
        "model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")},
        "model-00002-of-00002.safetensors": {n: t for n, t in tensors.items() if n.endswith("_scale_inv")},
    }
    (folder / MODEL).unlink()
    for file, held in parts.items():
        save_file(held, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {"total_size": 1, "kept": "yes"}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_scales_of_another_file(checkpoint, snapshot, tmp_path):
    """Parts, a resumed run and one run write the same bytes; a changed file of scales is noticed."""
    source, options = checkpoint("qwen3_moe"), ConvertOptions("bf16", max_shard_bytes=40_000)
    tensors = to_fp8(source)
    split(source)
    convert_checkpoint(source, tmp_path / "one", options)
    for part in (1, 2):
        convert_checkpoint(source, tmp_path / "dst", options, part=(part, 2))
    finalize_checkpoint(source, tmp_path / "dst")
    assert snapshot(tmp_path / "dst") == snapshot(tmp_path / "one")
    export_checkpoint(tmp_path / "dst", tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    back = load_file(tmp_path / "back" / "model-00001-of-00002.safetensors")
    assert_same_tensors(back, values_of(tensors, (128, 128)))
    assert index["metadata"] == {"kept": "yes", "total_size": sum(tensor.nbytes for tensor in back.values())}
    file = source / "model-00002-of-00002.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\x3a")
    assert "source model-00002-of-00002.safetensors" in str(verify_checkpoint(tmp_path / "one", source).findings)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_reports_name_the_source(precision, checkpoint, tmp_path):
    source = checkpoint("qwen3_moe")
    to_fp8(source)
    estimate = estimate_conversion(source, tmp_path / "dst", ConvertOptions(precision))
    stored = sum(tensor.nbytes for tensor in load_file(source / MODEL).values())
    assert estimate.source_bytes == stored and estimate.exact
    assert command("convert", source, tmp_path / "dst", "--precision", precision)[0] == 0
    assert estimate.files == {path.name: path.stat().st_size for path in (tmp_path / "dst").iterdir()}
    assert "| source | fp8, decoded to bf16 |" in (tmp_path / "dst" / "README.md").read_text()
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "neuron_moe" and "weight_block_size" not in config
    for folder, shown in ((source, "codes, blocks of 128 x 128"), (tmp_path / "dst", "source fp8")):
        code, printed = command("inspect", folder)
        assert code == 0 and shown in printed
        assert json.loads(command("inspect", folder, "--json")[1])["options"]["source"] == "fp8"
    assert "SQNR" in command("inspect", tmp_path / "dst", "--source", source)[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "floor", "bound"),
    [(["--precision", "mxfp8"], 24.0, "6.3%"), (["--precision", "mxfp8", "--scale-rule", "floor"], 17.7, "13.0%")],
)
def test_codes_that_are_quantized_again_are_counted_with_the_bound(options, floor, bound, checkpoint, tmp_path):
    source = checkpoint("qwen3_moe")
    tensors = to_fp8(source, block=(32, 32))
    coded = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn and ".experts." in name]
    values = sum(tensors[name].numel() for name in coded)
    expected = {"tensors": len(coded), "values": values, "sqnr_floor_db": floor}
    note = f"note: {len(coded)} tensors of codes ({values:,} values) are decoded and quantized again in MX: the error"
    assert len(coded) > 0
    for more in (["--dry-run"], []):
        shown = command("convert", source, tmp_path / f"json{len(more)}", *options, *more, "--json")[1]
        assert json.loads(shown[shown.index("{") :])["requantized"] == expected
        text = command("convert", source, tmp_path / f"text{len(more)}", *options, *more)[1]
        assert note in text and f"at most {bound} of its norm (SQNR {floor:g} dB)" in text
    report = verify_checkpoint(tmp_path / "text0", source)
    assert report.ok and min(min(probe.weights.values()) for probe in report.probes) >= floor


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["bf16", "unquantized", "kept", "glob"])
def test_what_is_not_quantized_again_has_no_such_note(how, checkpoint, tmp_path):
    if how == "kept":
        source, options = aria(tmp_path / "src", 512, 128)[0], ["--precision", "mxfp4"]
    else:
        source, options = checkpoint("qwen3_moe"), ["--precision", "bf16" if how == "bf16" else "mxfp8"]
        options += ["--keep-bf16", "model.layers.0.*"] if how == "glob" else []
        if how != "unquantized":
            to_fp8(source, block=(32, 32))
    code, printed = command("convert", source, tmp_path / "dst", *options, "--json")
    found = json.loads(printed[printed.index("{") :])["requantized"]
    assert code == 0 and (found is None) is (how != "glob")
    if how == "glob":  # one layer of two
        whole = command("convert", source, tmp_path / "all", "--precision", "mxfp8", "--json")[1]
        assert 2 * found["tensors"] == json.loads(whole[whole.index("{") :])["requantized"]["tensors"]


def test_a_manifest_s_codes_have_to_fit(checkpoint, tmp_path):
    """What somebody else wrote about the source is checked before it is read by."""
    source = checkpoint("qwen3_moe")
    to_fp8(source)
    convert_checkpoint(source, tmp_path / "dst")
    path = tmp_path / "dst" / MANIFEST_FILE
    kept = json.loads(path.read_text())
    assert read_manifest(tmp_path / "dst").encodings
    name = "model.layers.0.self_attn.q_proj.weight"
    for change in (
        {"block": [0, 128]},
        {"block": [128]},
        {"block": [1, 1]},
        {"scales": {**kept["source_format"]["encodings"][name]["scales"], "dtype": "I64"}},
        {"codes": {**kept["source_format"]["encodings"][name]["codes"], "shape": [64]}},
        {"codes": {**kept["source_format"]["encodings"][name]["codes"], "file": "../x.safetensors"}},
        {"transposed": True},
    ):
        content = json.loads(json.dumps(kept))
        content["source_format"]["encodings"][name] |= change
        path.write_text(json.dumps(sealed(content)))
        code, printed = command("export", tmp_path / "dst", tmp_path / "back")
        assert code == 3 and not (tmp_path / "back").exists(), (change, printed)
        assert not verify_checkpoint(tmp_path / "dst", source).ok, change


def test_earlier_manifests_have_plain_sources(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst")
    path = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(path.read_text())
    del content["source_format"]
    for pieces in content["weights"].values():
        for piece in pieces:
            del piece["interleaved"]
    path.write_text(json.dumps(sealed({**content, "format_version": 4})))
    assert read_manifest(tmp_path / "dst").encodings == {}
    assert verify_checkpoint(tmp_path / "dst").ok

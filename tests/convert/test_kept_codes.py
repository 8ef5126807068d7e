"""MX codes of a quantized source become ``moe_cte``'s words as they are: no value is rounded a second time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, read_manifest
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.estimate import estimate_conversion
from hf_neuron_moe.convert.io import encoded
from hf_neuron_moe.convert.layout import relayout
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, sealed
from hf_neuron_moe.errors import ConversionError
from hf_neuron_moe.formats import (
    MoEWeightMX,
    dequantize_moe_down,
    dequantize_moe_gate_up,
    unpack_moe_scales,
    unpack_x4,
)
from hf_neuron_moe.formats.constants import element_format
from tests.convert.mutations import command
from tests.convert.quantized_sources import FP8, MODEL, MXFP4, fp8_of, random_mxfp4, rewrite, to_fp8
from tests.convert.test_quantized_sources import aria
from tests.refusals import refused
from tests.tiny_models import tiny_model

EXPERTS = "model.layers.0.mlp.experts"
ROLES = ("gate_up_proj", "down_proj")


def gpt_oss(folder: Path, hidden: int, inner: int, largest: int = 124) -> tuple[Path, dict[str, Tensor]]:
    """One layer of gpt-oss in MXFP4 with random codes and scale bytes below `largest`; the tensors of the file."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "num_local_experts": 2}
    tiny_model("gpt_oss", **sizes).bfloat16().save_pretrained(folder)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = dict(tensors)
        for seed, name in enumerate(f"{EXPERTS}.{role}" for role in ROLES):
            E, K, N = changed.pop(name).shape
            blocks, scales = random_mxfp4(E, N, K, seed)
            if largest != 124:
                scales = torch.randint(0, largest, scales.shape, dtype=torch.uint8)
            changed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return changed

    return folder, rewrite(folder, MXFP4, change)


def decoded(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Gate_up ``[E, 2I, H]``, gate first, and down ``[E, H, I]`` as transformers decodes them."""
    gate_up, down = (
        convert_moe_packed_tensors(tensors[f"{EXPERTS}.{role}_blocks"], tensors[f"{EXPERTS}.{role}_scales"]).mT
        for role in ROLES
    )
    return torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1), down


def words_of(folder: Path, name: str = EXPERTS, fmt: str = "e2m1", suffix: str = "") -> list[MoEWeightMX]:
    """What a conversion stores of experts."""
    found = []
    with safe_open(next(folder.glob(f"neuron{'-tp-0' + suffix[-1] if suffix else '-0'}*.safetensors")), "pt") as file:
        for role in ROLES:
            words, scales = (file.get_tensor(f"{name}.{role}{end}{suffix}") for end in ("", "_scale"))
            carrier = element_format(fmt).carrier
            if scales.shape[1] == 128:
                scales = unpack_moe_scales(scales, words.shape[-2], words.shape[1] // 8)
            found.append(MoEWeightMX(words.view(carrier), scales, element_format(fmt)))
    return found


def positions(size: int, *, hidden: bool) -> Tensor:
    """Where a value of a padded axis lies, written as the formulas of the kernels' groups."""
    place = torch.empty(size, dtype=torch.int64)
    partitions = size // 4 if hidden else min(size // 4, 128)
    for k in range(size):
        q, r, i = k // 32, k % 32 // 8, k % 8
        if hidden:
            place[k] = r * (size // 4) + 128 * (q // 16) + 8 * (q % 16) + i
        else:
            place[k] = 512 * (q // (partitions // 8)) + r * partitions + 8 * (q % (partitions // 8)) + i
    return place


def natural(gate_up: MoEWeightMX, down: MoEWeightMX, H: int, I: int) -> tuple[Tensor, Tensor]:  # noqa: E741
    """The values of permuted words as ``[E, 2I, H]`` and ``[E, H, I]``; zeros of the padding are looked at."""
    values = dequantize_moe_gate_up(gate_up)  # [E, H', 2, I']
    along_h, along_i = positions(values.shape[1], hidden=True), positions(values.shape[3], hidden=False)
    values = values[:, along_h][..., along_i].permute(0, 2, 3, 1)
    below = dequantize_moe_down(down).mT[..., along_i]
    assert not values[:, :, I:].any() and not values[..., H:].any()
    assert not below[:, H:].any() and not below[..., I:].any()
    return values[:, :, :I, :H].flatten(1, 2), below[:, :H, :I]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float().view(torch.int32), other.float().view(torch.int32))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((576, 576), {}), ((96, 64), {"scales": "packed"}), ((512, 480), {"scales": "compact"})],
    ids=str,
)
def test_words_hold_the_codes_of_the_source(
    sizes: tuple[int, int], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, tensors = gpt_oss(tmp_path / "src", *sizes, largest=253)
    monkeypatch.setattr(relayout, "READ_BYTES", 40_000)
    monkeypatch.setattr(encoded, "ROWS_BYTES", 40_000)
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4", pad=True, **options))
    stored = words_of(tmp_path / "dst")
    assert all(map(same_bits, natural(*stored, *sizes), decoded(tensors)))
    # The codes and scale bytes themselves, zeros of the padding aside: words of the same nibbles and no other byte.
    for weight, role in zip(stored, ROLES, strict=True):
        nibbles = unpack_x4(weight.words, "e2m1")
        blocks = tensors[f"{EXPERTS}.{role}_blocks"]
        wanted = torch.cat([blocks & 15, blocks >> 4]).flatten().bincount(minlength=16)
        assert torch.equal(nibbles.flatten().bincount(minlength=16)[1:], wanted[1:])
        counts = [
            part.flatten().bincount(minlength=256) for part in (weight.scales, tensors[f"{EXPERTS}.{role}_scales"])
        ]
        padding = weight.scales.numel() - tensors[f"{EXPERTS}.{role}_scales"].numel()
        counts[1][127] += padding
        assert torch.equal(counts[0], counts[1])
    assert manifest is not None
    layouts = {tensor.weight: tensor.layout for tensor in manifest.tensors if tensor.name.endswith(ROLES)}
    assert set(layouts.values()) == {"mxfp4_moe_permuted_words"} and len(layouts) == 2


def test_reports_and_the_way_back_are_exact(tmp_path: Path) -> None:
    source, tensors = gpt_oss(tmp_path / "src", 96, 64)
    estimate = estimate_conversion(source, tmp_path / "dst", ConvertOptions("mxfp4", pad=True))
    assert command("convert", source, tmp_path / "dst", "--precision", "mxfp4", "--pad")[0] == 0
    assert estimate.files == {path.name: path.stat().st_size for path in (tmp_path / "dst").iterdir()}
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok and len(report.probes) == 2, str(report)
    for figures in (figures for probe in report.probes for figures in (probe.weights, probe.floors)):
        assert all(value == float("inf") for value in figures.values()), "exact, and nothing less would do"
    shown = command("inspect", tmp_path / "dst", "--source", source)[1]
    assert "mxfp4_moe_permuted_words" in shown and "groups of the source: I permuted and H" in shown
    assert shown.count("SQNR exact") == 2 and " dB" not in shown
    exported = export_checkpoint(tmp_path / "dst", tmp_path / "back")
    assert not exported.inexact and len(exported.statement) == 1 and "codes (mxfp4)" in exported.statement[0]
    back = load_file(tmp_path / "back" / MODEL)
    gate_up, down = decoded(tensors)
    halves = back[f"{EXPERTS}.gate_up_proj"].mT
    assert same_bits(torch.cat([halves[:, 0::2], halves[:, 1::2]], 1), gate_up)
    assert same_bits(back[f"{EXPERTS}.down_proj"].mT, down)
    card = (tmp_path / "dst" / "README.md").read_text()
    assert "but for the codes of permuted words" in card and "--allow-inexact" not in card


def test_ranks_have_whole_groups(tmp_path: Path) -> None:
    source, tensors = gpt_oss(tmp_path / "src", 512, 128)
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4", tp_degree=2))
    assert verify_checkpoint(tmp_path / "dst", source, probes=0).ok
    gate_up, down = decoded(tensors)
    for rank in range(2):
        found = natural(*words_of(tmp_path / "dst", suffix=f".tp{rank}"), 512, 64)
        own = slice(64 * rank, 64 * rank + 64)
        assert same_bits(found[0], gate_up.unflatten(1, (2, -1))[:, :, own].flatten(1, 2))
        assert same_bits(found[1], down[..., own])
    assert not export_checkpoint(tmp_path / "dst", tmp_path / "back").inexact


@pytest.mark.parametrize(
    ("sizes", "options", "got", "fix"),
    [
        ((512, 544), {}, "an intermediate size of 544", "Use --pad"),
        ((512, 64), {"scale_rule": "floor"}, "scale rule floor", "Leave --scale-rule out"),
        ((512, 96), {"pad": True, "tp_degree": 2}, "values 0 to 48", "Use fewer ranks"),
    ],
)
def test_codes_that_cannot_be_kept_are_quantized_again_on_request(
    sizes: tuple[int, int], options: dict[str, Any], got: str, fix: str, tmp_path: Path
) -> None:
    source, _ = gpt_oss(tmp_path / "src", *sizes)
    with refused(
        ConversionError, f"MXFP4 codes of {EXPERTS}.gate_up_proj, for moe_cte's words,", fix, got=got
    ) as error:
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4", **options))
    assert "--allow-inexact" in str(error.value) and not (tmp_path / "dst").exists()
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4", allow_inexact=True, **options))
    assert manifest is not None and "mxfp4_moe_words" in {tensor.layout for tensor in manifest.tensors}
    assert verify_checkpoint(tmp_path / "dst", source, probes=0).ok
    assert len(export_checkpoint(tmp_path / "dst", tmp_path / "back", allow_inexact=True).inexact) == 2


def test_one_weight_with_codes_is_quantized_again_on_request_only(tmp_path: Path) -> None:
    source, _ = gpt_oss(tmp_path / "src", 64, 64)
    key = f"{EXPERTS}.gate_up_proj"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks, scales = (tensors.pop(f"{key}_{end}") for end in ("blocks", "scales"))
        return tensors | {key: convert_moe_packed_tensors(blocks, scales)}

    rewrite(source, MXFP4, change)
    with refused(ConversionError, f"codes of {EXPERTS}.down_proj", f"no such codes in {key}"):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4", pad=True))
    assert not (tmp_path / "dst").exists()
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4", pad=True, allow_inexact=True))


def test_codes_are_not_kept_where_the_products_have_two_formats(tmp_path: Path) -> None:
    source, _ = gpt_oss(tmp_path / "src", 64, 64)
    precision = {"*": "mxfp4", "*.down_proj": "mxfp8"}
    with refused(
        ConversionError, f"codes of {EXPERTS}.gate_up_proj", "--allow-inexact", got="mxfp8 for the other product"
    ):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions(precision, pad=True))
    assert not (tmp_path / "dst").exists()
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions(precision, pad=True, allow_inexact=True))
    assert manifest is not None and not verify_checkpoint(tmp_path / "dst", source, probes=0).findings
    layouts = {tensor.layout for tensor in manifest.tensors if tensor.weight.endswith("_proj")}
    assert layouts >= {"mxfp4_moe_words", "mxfp8_moe_words"} and not any("permuted" in layout for layout in layouts)


def test_allowing_it_changes_nothing_where_codes_can_be_kept(tmp_path: Path) -> None:
    source, _ = gpt_oss(tmp_path / "src", 512, 64)
    for name, allowed in (("one", False), ("two", True)):
        convert_checkpoint(source, tmp_path / name, ConvertOptions("mxfp4", allow_inexact=allowed))
    shard = "neuron-00001-of-00001.safetensors"
    assert (tmp_path / "one" / shard).read_bytes() == (tmp_path / "two" / shard).read_bytes()
    options = ("--precision", "mxfp4", "--scale-rule", "even")
    assert command("convert", source, tmp_path / "no", *options)[0] == 1
    assert command("convert", source, tmp_path / "again", *options, "--allow-inexact")[0] == 0


@pytest.mark.parametrize("byte", [253, 254, 255])
def test_scales_that_overflow_are_errors(byte: int, tmp_path: Path) -> None:
    source, _ = gpt_oss(tmp_path / "src", 512, 64)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{EXPERTS}.down_proj_scales"][1, 2, 0] = byte
        tensors[f"{EXPERTS}.down_proj_blocks"][1, 2, 0] = 0x77
        return tensors

    rewrite(source, MXFP4, change)
    with pytest.raises(ConversionError, match=r"down_proj"):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp4"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["packed fp4", "mxfp8", "e8m0 in blocks of 64 x 128"])
def test_other_sources_with_powers_of_two(form: str, checkpoint: Any, tmp_path: Path) -> None:
    """One matrix per expert and projection, as DeepSeek-V4's packed FP4 and MXFP8 files have them."""
    source = checkpoint("qwen3_moe")
    precision, fmt, method = ("mxfp4", "e2m1", "fp8") if form == "packed fp4" else ("mxfp8", "e4m3fn", "fp8")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = dict(tensors)
        names = [name for name in tensors if ".experts." in name and name.endswith(".weight")]
        for seed, name in enumerate(names):
            base, (N, K) = name.removesuffix(".weight"), tensors[name].shape
            del changed[base + ".weight_scale_inv"]
            blocks, scales = random_mxfp4(1, N, K, seed)
            changed |= {name: blocks.view(torch.int8).reshape(N, K // 2), base + ".scale": scales[0]}
        return changed

    block = (1, 32) if form == "mxfp8" else (64, 128)
    to_fp8(source, block=block, scale_dtype=torch.uint8 if form == "mxfp8" else torch.float8_e8m0fnu)
    if form == "packed fp4":
        rewrite(source, {"quant_method": method, "expert_dtype": "fp4", "weight_block_size": list(block)}, change)
    options = ConvertOptions(precision, purpose="inference", pad=True)
    convert_checkpoint(source, tmp_path / "dst", options)
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok and report.probes, str(report)
    experts = [probe for probe in report.probes if probe.expert is not None]
    assert experts and all(value == float("inf") for probe in experts for value in probe.weights.values())
    convert_checkpoint(source, tmp_path / "bf16", ConvertOptions())
    for folder in ("dst", "bf16"):
        export_checkpoint(tmp_path / folder, tmp_path / f"{folder} back", allow_inexact=folder == "dst")
    one, other = (load_file(tmp_path / f"{folder} back" / MODEL) for folder in ("dst", "bf16"))
    for name in (name for name in one if ".experts." in name):
        assert same_bits(one[name], other[name]), name
    assert words_of(tmp_path / "dst", "model.layers.1.mlp.experts", fmt)[0].fmt.name == fmt


@pytest.mark.slow
def test_codes_that_lie_across_the_contraction_are_quantized_again(tmp_path: Path) -> None:
    """Transposed experts of an FP8 file have blocks along their outputs."""
    source, _ = aria(tmp_path / "src", 512, 64)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {}
        for name, tensor in tensors.items():
            base = name.removesuffix("_blocks")
            if base != name:
                matrices = convert_moe_packed_tensors(tensor, tensors[f"{base}_scales"])
                pairs = [fp8_of(matrix, (1, 32), torch.uint8) for matrix in matrices]
                changed[base] = torch.stack([codes for codes, _ in pairs])
                changed[f"{base}_scale_inv"] = torch.stack([scales for _, scales in pairs])
            elif not name.endswith("_scales"):
                changed[name] = tensor
        return changed

    rewrite(source, {**FP8, "weight_block_size": [1, 32]}, change)
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", purpose="inference", pad=True))
    assert manifest is not None and len(manifest.encodings) == 4
    assert {tensor.layout for tensor in manifest.tensors} >= {"mxfp8_moe_words"}
    assert not any("permuted" in tensor.layout for tensor in manifest.tensors)
    assert verify_checkpoint(tmp_path / "dst", source, probes=0).ok


def test_a_manifest_s_permuted_words_have_to_be_codes_of_its_source(tmp_path: Path) -> None:
    """Version 5 quantized such codes again, which is a conversion still; the other way round is damage."""
    source, _ = gpt_oss(tmp_path / "src", 512, 96)
    options = ConvertOptions("mxfp4", scale_rule="floor", allow_inexact=True)
    convert_checkpoint(source, tmp_path / "old", options)
    path = tmp_path / "old" / MANIFEST_FILE
    content = json.loads(path.read_text())
    del content["options"]["allow_inexact"]
    path.write_text(json.dumps(sealed({**content, "format_version": 5})))
    assert read_manifest(tmp_path / "old").options == replace(options, allow_inexact=False)
    export_checkpoint(tmp_path / "old", tmp_path / "back", allow_inexact=True)
    convert_checkpoint(source, tmp_path / "new", ConvertOptions("mxfp4"))
    path = tmp_path / "new" / MANIFEST_FILE
    kept = path.read_text()
    for change in ("one weight", "no codes"):
        content = json.loads(kept)
        for tensor in content["tensors"]:
            if change == "one weight" and tensor["name"].endswith("gate_up_proj"):
                tensor["layout"] = "mxfp4_moe_words"
        if change == "no codes":
            content["source_format"]["encodings"].clear()
        path.write_text(json.dumps(sealed(content)))
        code, printed = command("export", tmp_path / "new", tmp_path / "other")
        assert code == 3 and not (tmp_path / "other").exists(), (change, printed)

"""A conversion with a precision per block: what is stored, loaded and exported is each block's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_neuron_moe import NeuronMoEConfig, patch_model, set_activations
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, plan_conversion
from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.manifest import read_manifest, sealed
from hf_neuron_moe.errors import ConfigError, ConversionError
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.training.blocks import patch_record
from tests.quantizers.conftest import SIZES, WORDS, Converted, Source, load
from tests.refusals import refused
from tests.tiny_models import tokens

FIRST_IN_BF16 = {"*": "mxfp8", "model.layers.0.*": "bf16"}
BY_PRODUCT = {"*": "mxfp4", "model.layers.0.mlp.experts.down_proj": "mxfp8"}
LAYOUTS = [("fused", "stock"), ("kernel", "kernel")]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def own_precisions(model: Any) -> dict[str, str]:
    return {name: m.neuron_config.precision for name, m in model.named_modules() if isinstance(m, NeuronBlock)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "weights"), LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_loaded_conversion_equals_the_patched_original(
    source: Source, converted: Converted, family: str, layout: str, weights: str
) -> None:
    model = load(converted(family, precision=FIRST_IN_BF16, layout=layout))
    original = load(source(family))
    patch_model(original, NeuronMoEConfig(precision=FIRST_IN_BF16, weights=weights))
    assert torch.equal(logits(model), logits(original))
    own = own_precisions(model)
    assert own == own_precisions(original) and set(own.values()) == {"bf16", "mxfp8"}
    frozen = [isinstance(block, QuantizedBlock) for block in model.modules() if isinstance(block, NeuronBlock)]
    assert frozen == [False, True]
    asked = model.config.quantization_config.precision
    assert asked == FIRST_IN_BF16
    record = patch_record(model)
    assert record["config"]["precision"] == {"*": "bf16", list(own)[1]: "mxfp8"}
    assert [entry["precision"] for entry in record["entries"]] == ["bf16", "mxfp8"]
    assert list(set_activations(model, "recompute").values()) == ["recompute"] * 2
    model.dequantize()
    report = patch_model(model, {"precision": asked})
    assert {entry.name: entry.precision for entry in report.patched} == own
    exact = [entry.name for entry in report.patched if entry.precision == "bf16"]
    for name in exact:
        for mine, theirs in zip(
            model.get_submodule(name).parameters(), load(source(family)).get_submodule(name).parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", SIZES, {"precision": {"*": "bf16", "model.layers.1.mlp": "mxfp8"}}),
        ("mixtral", SIZES, {"precision": FIRST_IN_BF16, "pad": True, "scales": "oversized", "scale_rule": "ceil"}),
        pytest.param("mixtral", WORDS, {"precision": FIRST_IN_BF16, "purpose": "inference"}, marks=pytest.mark.slow),
        ("qwen2_moe", WORDS, {"precision": {"*": "mxfp8", "*.0.mlp.experts": "bf16", "*.1.mlp.experts": "mxfp4"}}),
        ("llama", SIZES, {"precision": FIRST_IN_BF16, "tp_degree": 2}),
        ("mixtral", WORDS, {"precision": BY_PRODUCT | {"model.layers.1.*": "bf16"}}),
    ],
    ids=str,
)
def test_each_weight_is_stored_as_a_uniform_conversion_stores_it(
    source: Source, tmp_path: Path, family: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    mixed = convert_checkpoint(source(family, sizes), tmp_path / "mixed", ConvertOptions(**options))
    purpose = mixed.options.purpose
    kept, stored = [], {}
    for precision in dict.fromkeys(options["precision"].values()):
        rest = {key: value for key, value in options.items() if precision != "bf16" or not key.startswith("scale")}
        alone = ConvertOptions(**{**rest, "precision": precision, "purpose": purpose})
        manifest = convert_checkpoint(source(family, sizes), tmp_path / precision, alone)
        stored[precision] = {
            tensor.name: (tensor.weight, tensor.layout, tensor.dtype, tensor.shape, tensor.padding, tensor.checksum)
            for tensor in manifest.tensors
        }
    for tensor in mixed.tensors:
        own = mixed.options.of(tensor.weight).precision
        facts = (tensor.weight, tensor.layout, tensor.dtype, tensor.shape, tensor.padding, tensor.checksum)
        assert stored[own][tensor.name] == facts, tensor.name
        kept += [tensor.weight] if own == "bf16" else []
    assert kept
    assert not verify_checkpoint(tmp_path / "mixed", source(family, sizes), probes=0).findings
    report = export_checkpoint(tmp_path / "mixed", tmp_path / "back", allow_inexact=True)
    with open_tensors(source(family, sizes)) as original, open_tensors(tmp_path / "back") as back:
        exact = [piece for weight, pieces in mixed.weights.items() for piece in pieces if weight in kept]
        assert exact and not {piece.source for piece in exact} & set(report.inexact)
        for piece in exact:
            assert torch.equal(original.read(piece.file, piece.source), back.read(piece.file, piece.source))
    kinds = [name for name in ("MXFP8", "MXFP4") if name.lower() in options["precision"].values()]
    assert [name for sentence in report.statement for name in ("MXFP8", "MXFP4") if f" {name} " in sentence] == kinds


def test_what_a_conversion_says_of_its_precisions(converted: Converted, source: Source, tmp_path: Path) -> None:
    folder = converted("llama", precision=FIRST_IN_BF16)
    manifest = read_manifest(folder)
    assert manifest.options.precision == FIRST_IN_BF16 and manifest.options == ConvertOptions(FIRST_IN_BF16)
    content = json.loads((folder / "neuron_moe_manifest.json").read_text())
    assert (content["format_version"], content["options"]["precision"]) == (7, FIRST_IN_BF16)
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (stated["precision"], stated["scale_rule"]) == (FIRST_IN_BF16, "neuron")
    assert "`model.layers.0.*`: bfloat16" in (folder / "README.md").read_text()
    report = inspect_checkpoint(folder, source("llama"))
    assert report.to_dict()["options"]["precision"] == FIRST_IN_BF16
    assert "precision mxfp8, model.layers.0.*: bf16" in report.to_text()
    by_layer = {"0": set[bool](), "1": set[bool]()}
    for tensor in report.tensors:
        if tensor.sqnr is not None:
            by_layer[tensor.name.split(".")[2]].add(tensor.sqnr == float("inf"))
    assert by_layer == {"0": {True}, "1": {False}}
    assert "precision mxfp8, model.layers.0.*: bf16" in verify_checkpoint(folder).done["manifest"]
    with refused(ConversionError, str(folder), "rounded or quantized", where="export"):
        export_checkpoint(folder, tmp_path / "back")


def test_single_products_of_experts_have_their_own_format(source: Source, converted: Converted, tmp_path: Path) -> None:
    folder = converted("mixtral", WORDS, precision=BY_PRODUCT)
    model = load(folder)
    stacks = [block.neuron_stack for block in model.modules() if isinstance(block, QuantizedBlock)]
    fmts = [(stack.gate_up_layout.fmt, stack.down_layout.fmt) for stack in stacks]
    assert fmts == [("e2m1", "e4m3fn"), ("e2m1", "e2m1")]
    assert "frozen e2m1 and e4m3fn" in repr(model.model.layers[0]) and " and " not in repr(model.model.layers[1])
    assert read_manifest(folder).options.precision == BY_PRODUCT
    shown = inspect_checkpoint(folder, source("mixtral", WORDS))
    of_down = {tensor.name: tensor for tensor in shown.tensors if tensor.name.endswith("down_proj")}
    first, second = of_down.values()
    assert (first.layout, second.layout) == ("mxfp8_moe_words", "mxfp4_moe_words")
    assert first.sqnr is not None and second.sqnr is not None and first.sqnr > second.sqnr + 6
    manifest = folder / "neuron_moe_manifest.json"
    content = json.loads(manifest.read_text())
    altered = tmp_path / "altered"
    shutil.copytree(folder, altered)
    content["options"]["precision"] = {"*": "mxfp4", "model.layers.1.mlp.experts.down_proj": "mxfp8"}
    (altered / manifest.name).write_text(json.dumps(sealed(content)))
    assert any("these options do not make" in finding.message for finding in verify_checkpoint(altered).findings)


def test_a_manifest_with_another_map_does_not_agree_with_its_tensors(converted: Converted, tmp_path: Path) -> None:
    folder = tmp_path / "altered"
    folder.mkdir()
    for path in converted("llama", precision=FIRST_IN_BF16).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = folder / "neuron_moe_manifest.json"
    content = json.loads(path.read_text())
    for changed in ({"*": "mxfp8", "model.layers.1.*": "bf16"}, {**FIRST_IN_BF16, "*.mlp": "mxfp8"}):
        content["options"]["precision"] = changed
        path.write_text(json.dumps(sealed(content)))
        assert any("these options do not make" in finding.message for finding in verify_checkpoint(folder).findings)
    for changed in ({"a": "bf16"}, {"*": 4}, 8):
        content["options"]["precision"] = changed
        path.write_text(json.dumps(sealed(content)))
        assert [finding.check for finding in verify_checkpoint(folder).findings] == ["manifest"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "options", "kind", "argument", "says"),
    [
        ("llama", {"precision": {"*": "mxfp8", "layers.7": "bf16"}}, ConfigError, "precision", "got 'layers.7'"),
        (
            "llama",
            {"precision": {"*": "mxfp8", "lm_head": "bf16"}},
            ConfigError,
            "precision",
            "an MLP or experts block",
        ),
        (
            "llama",
            {"precision": {"*": "mxfp8", "*.0.*": "bf16", "*.mlp": "mxfp8"}},
            ConfigError,
            "precision",
            r"'\*\.0\.\*' \(bf16\) and '\*\.mlp' \(mxfp8\), which match 'model\.layers\.0\.mlp'",
        ),
        ("llama", {"precision": {"*": "mxfp8", "*.layers.*": "bf16"}}, ConversionError, "precision", "bf16 for all 4"),
        (
            "mixtral",
            {"precision": {"*": "mxfp4", "model.layers.7.mlp.experts.down_proj": "mxfp8"}},
            ConfigError,
            "precision",
            "a product of experts",
        ),
        ("mixtral", {"precision": {"*": "mxfp4", "*.gate_proj": "mxfp8"}}, ConfigError, "precision", "experts block"),
        ("llama", {"precision": {"*": "mxfp8", "*.down_proj": "bf16"}}, ConfigError, "precision", "product of experts"),
        *(
            (family, {"precision": {"*": common, "*.down_proj": other}}, ConversionError, "precision", says)
            for family, common, other, says in (
                (
                    "mixtral",
                    "mxfp4",
                    "bf16",
                    r"mxfp4 for model.layers.0.mlp.experts.gate_up_proj and bf16 for.*read both weights",
                ),
                (
                    "mixtral",
                    "bf16",
                    "mxfp8",
                    r"bf16 for model.layers.0.mlp.experts.gate_up_proj and mxfp8 for.*read both weights",
                ),
                ("qwen2_moe", "mxfp4", "mxfp8", r"mxfp8 for model.layers.0.mlp.shared_expert.down_proj.weight"),
            )
        ),
        (
            "mixtral",
            {"precision": {"*": "mxfp4", "*.down_proj": "mxfp8", "*.0.mlp.experts.down_proj": "mxfp4"}},
            ConfigError,
            "precision",
            "which match",
        ),
        (
            "qwen2_moe",
            {"precision": {"*": "bf16", "*.shared_expert": "mxfp4"}},
            ConversionError,
            "precision mxfp4",
            r"without experts, such as model\.layers\.0\.mlp\.shared_expert",
        ),
    ],
    ids=str,
)
def test_refused_maps_write_nothing(
    source: Source,
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    kind: type[ConfigError],
    argument: str,
    says: str,
) -> None:
    for call in (
        lambda: convert_checkpoint(source(family), tmp_path / "dst", ConvertOptions(**options)),
        lambda: plan_conversion(source(family), ConvertOptions(**options)),
    ):
        with refused(kind, argument, says, where="convert"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "argument", "says"),
    [
        ({"precision": {"*": "fp32", "a": "bf16"}}, "precision['*']", "one of bf16, mxfp8, mxfp4"),
        ({"precision": {"a": "bf16"}}, "precision", "with the key"),
        ({"precision": {"*": "bf16", "a": "mxfp4"}, "purpose": "training"}, "purpose", "mxfp4"),
        ({"precision": {"*": "bf16", "a": "mxfp8"}, "swizzle": False}, "swizzle", "MX in kernel layout"),
        ({"precision": {"*": "bf16", "a": "bf16"}, "scales": "packed"}, "scales", "bf16"),
    ],
)
def test_refused_options(options: dict[str, Any], argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        ConvertOptions(**options)


def test_a_product_goes_before_its_block() -> None:
    own = ConvertOptions({"*": "mxfp4", "*.experts": "mxfp8", "*.experts.down_proj": "mxfp4"})
    weights = ("a.experts.gate_up_proj", "a.experts.down_proj", "a.experts.down_proj.weight", "a.mlp.down_proj.weight")
    assert [own.of(weight).precision for weight in weights] == ["mxfp8", "mxfp4", "mxfp4", "mxfp4"]


def test_products_are_for_conversions_only() -> None:
    with refused(ConfigError, "precision", "single products.*Name the block: 'model.layers.0.mlp.experts'"):
        NeuronMoEConfig(precision={"*": "mxfp8", "model.layers.0.mlp.experts.down_proj": "bf16"})


def test_rounded_values_are_told_where_blocks_stay_bf16(source: Source, tmp_path: Path) -> None:
    from hf_neuron_moe.convert import rounding_note

    wide = source("llama", dtype=torch.float32)
    with pytest.warns(UserWarning, match=r"in 3 tensors \(first: model\.layers\.0\.mlp\.down_proj\.weight\) do not"):
        mixed = convert_checkpoint(wide, tmp_path / "mixed", ConvertOptions(FIRST_IN_BF16))
    assert mixed is not None and len(mixed.rounded or {}) == 6
    uniform = convert_checkpoint(wide, tmp_path / "mxfp8", ConvertOptions("mxfp8"))
    assert uniform is not None and rounding_note(uniform) == ""

"""Every kind of block that is patched: converted, verified, opened, saved again and exported."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Dinov2Config,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    PreTrainedModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
    __version__,
)

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint
from hf_neuron_moe.convert.audit.compare import Comparison, _output, blocks_of
from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, sealed
from hf_neuron_moe.convert.plan import _check_mx
from hf_neuron_moe.errors import ConversionError, SourceDamageError, public
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching.discovery import discover
from hf_neuron_moe.training.metrics import TrainingMonitor
from tests.convert.test_verify_checks import patch_bytes
from tests.quantizers.test_loading import assert_same
from tests.refusals import refused
from tests.tiny_models import MUSE_SPARK, tiny_model, tokens

FAMILIES = (
    "gemma3",  # gelu_tanh
    "llama_biased",
    "gemma4",
    # Clamps; some names in its files look as if they were to be changed. Before, its own bf16 forward fails.
    *(("deepseek_v4",) if Version(__version__) >= Version("5.20") else ()),
    "gpt_oss",  # biases, gate and up alternate
    "nemotron_h",  # no gate
    *({"muse_spark"} & set(CONFIG_MAPPING)),  # a norm after each expert
    "llama4",
    "longcat_flash",  # rows for experts without a down projection
    "dbrx",  # matrices of all experts below one another
    "inkling_text",  # experts that all compute every token, called by another name
    "jetmoe",  # router and bias in the same module
    "moonshine",  # biases, rows of up first
    "step3p7",  # gate and up of all experts as a tensor each, clamps
    "dinov2",  # gate and up in one tensor of the files and in two of the model, biases too
    *sorted({"hrm_text", "inkling2_text"} & set(CONFIG_MAPPING)),  # rows of gate and up alternate in files
)
SLOW = ("gemma4", "gpt_oss", "deepseek_v4")
STOCK_ONLY = ("dbrx", "jetmoe", "inkling_text")
BOTH = [
    pytest.param(family, layout, marks=pytest.mark.slow if layout == "fused" or family in SLOW else ())
    for family in FAMILIES
    for layout in ("kernel", "fused")
]


MOONSHINE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
STEP = {
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_sliding_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "share_expert_dim": 24,
        "mlp_layer_types": ["sparse", "dense"],
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 8,
        "swiglu_limits": [0.5, None],
        "pad_token_id": 0,
        "max_position_embeddings": 64,
    },
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "mlp_ratio": 1.5,
    },
    "image_token_id": 1,
}
DINO = {
    "hidden_size": 32,
    "mlp_ratio": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_swiglu_ffn": True,
    "image_size": 28,
}
HRM = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
}
INKLING = {
    **HRM,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEED_OSS = {**HRM, "num_hidden_layers": 2, "residual_dropout": 0.1, "pad_token_id": 0}
HEADS: dict[str, Any] = {
    "seed_oss": AutoModelForCausalLM,
    "dinov2": AutoModel,
    "hrm_text": AutoModelForCausalLM,
    "inkling_text": AutoModelForCausalLM,
    "muse_spark": AutoModel,
    "moonshine": MoonshineForConditionalGeneration,
    "step3p7": Step3p7ForConditionalGeneration,
}
"""What opens a family that is no causal language model, or whose tiny configuration is here."""
CONFIGS: dict[str, Any] = {
    "seed_oss": lambda: AutoConfig.for_model("seed_oss", **SEED_OSS),
    "dinov2": lambda: Dinov2Config(**DINO),
    "inkling_text": lambda: AutoConfig.for_model("inkling_text", **INKLING),
    "hrm_text": lambda: AutoConfig.for_model("hrm_text", **HRM),
    "muse_spark": lambda: AutoConfig.for_model("muse_spark_text", **MUSE_SPARK),
    "moonshine": lambda: MoonshineConfig(**MOONSHINE),
    "step3p7": lambda: Step3p7Config(**STEP),
}


def made(family: str, folder: Path) -> Path:
    """Write a tiny bf16 checkpoint of a family."""
    if family in HEADS:
        torch.manual_seed(7)
        config = CONFIGS[family]()
        automatic = HEADS[family] in (AutoModel, AutoModelForCausalLM)
        model: nn.Module = HEADS[family].from_config(config) if automatic else HEADS[family](config)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "mlp" in name:
                    param.normal_(std=0.2)
    else:
        model = tiny_model(family)
    saved: Any = model.bfloat16()
    saved.save_pretrained(folder)
    return folder


def opened(family: str, folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = HEADS.get(family, AutoModelForCausalLM).from_pretrained(folder)
    return model.eval()


def output(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(model, MoonshineForConditionalGeneration):
            sound = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1)).bfloat16()
            return model(input_values=sound, decoder_input_ids=tokens()).logits
        if model.config.model_type == "dinov2":
            return model(torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)).bfloat16())[0]
        return model(input_ids=tokens())[0]


FIGURES = ("gemma3", "llama_biased", "gpt_oss", "nemotron_h", "moonshine", "dbrx", "step3p7", "dinov2")


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("family", FIGURES)
def test_the_figure_of_the_output_is_of_the_block_s_own_function(family: str, tmp_path: Path) -> None:
    """What ``verify`` computes in float64 is what the stock module does."""
    source = made(family, tmp_path / "source")
    manifest = convert_checkpoint(source, tmp_path / "dst")
    assert manifest is not None
    stock = opened(family, source).double()
    stock.set_experts_implementation("eager")  # the others take no float64
    with open_tensors(source) as original, open_tensors(tmp_path / "dst") as stored:
        comparison = Comparison(manifest, original, stored)
        for block in blocks_of(manifest):
            module, halves = stock.get_submodule(block.name), 1 if family == "nemotron_h" else 2
            for expert in comparison.experts_of(block.down):
                pair = comparison.original(block.gate_up, expert), comparison.original(block.down, expert)
                x = 3 * torch.randn(5, pair[1].shape[0], dtype=torch.float64)
                gate, biases = block.network.gate, comparison.biases(block, expert, (len(pair[0]), 32))
                found = _output(x, [pair], halves, gate, biases)
                routing = [] if expert is None else [torch.full((5, 1), expert), torch.ones(5, 1).double()]
                expected = module(x if family != "dbrx" else x[None], *routing).reshape(x.shape)
                # Some stock modules compute their gate in fp32.
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(
    ("family", "bias"),
    [
        ("llama_biased", "model.layers.1.mlp.down_proj.bias"),
        ("moonshine", "model.decoder.layers.0.mlp.fc1.bias"),
        ("dinov2", "encoder.layer.0.mlp.weights_in.bias"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias"),
    ],
)
def test_a_bias_with_other_values_than_the_source_s_is_found(family: str, bias: str, tmp_path: Path) -> None:
    source = made(family, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", pad=True))
    patch_bytes(tmp_path / "dst", bias, lambda raw: raw ^ 1)
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.findings and all(
        finding.message.endswith(f"{bias} is not the source's") for finding in report.findings
    )
    assert {finding.check for finding in report.findings} == {"probe"}


def blocks(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules() if isinstance(module, NeuronBlock)}


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(("family", "layout"), BOTH)
def test_converted_opened_and_back(family: str, layout: str, tmp_path: Path) -> None:
    """The logits are the patched original's, and every way back gives the source's bytes."""
    source = made(family, tmp_path / "source")
    manifest = convert_checkpoint(source, tmp_path / "dst", ConvertOptions(layout=layout, pad=layout == "kernel"))
    assert manifest is not None and manifest.left is not None
    assert all("no gate" in left.reason for left in manifest.left.values())
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok, str(report)
    assert all(probe.output >= 200 for probe in report.probes) and report.probes
    facts = inspect_checkpoint(tmp_path / "dst", source).tensors
    assert {fact.sqnr for fact in facts} == {None, math.inf}
    weights = "kernel" if layout == "kernel" and family not in STOCK_ONLY else "stock"
    stock, converted = opened(family, source), opened(family, tmp_path / "dst")
    state = stock.state_dict()
    assert state.keys() == converted.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())
    state = {name: value.clone() for name, value in state.items()}
    patch_model(stock, NeuronMoEConfig(precision="bf16", weights=weights), strict=False)
    assert blocks(converted) == blocks(stock) != {}
    assert_same(output(converted), output(stock), "bf16")
    converted.save_pretrained(tmp_path / "again")
    assert export_checkpoint(tmp_path / "dst", tmp_path / "back").inexact == ()
    original = (source / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == original
    again, first = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "source"))
    assert again.keys() == first.keys() and all(torch.equal(value, first[name]) for name, value in again.items())


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("family", FAMILIES)
def test_opened_as_codes(family: str, tmp_path: Path) -> None:
    """The model calls its blocks as it did before, and they compute what quantizing the weights in every call gives.

    Nearly: padding 24 columns for the kernels puts other values together in a group. Quantizing moves outputs by more.
    """
    source = made(family, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", pad=True))
    stock, converted = opened(family, source), opened(family, tmp_path / "dst")
    patch_model(stock, NeuronMoEConfig(precision="mxfp8"), strict=False)
    assert blocks(converted).keys() == blocks(stock).keys() != set()
    assert all(issubclass(kind, QuantizedBlock) for kind in blocks(converted).values())
    expected = output(stock).float()
    assert (output(converted).float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(("family", "counted"), [("jetmoe", set()), ("inkling_text", {"model.layers.0.mlp.experts"})])
def test_codes_of_experts_that_get_no_ids_are_measured(family: str, counted: set[str], tmp_path: Path) -> None:
    convert_checkpoint(made(family, tmp_path / "source"), tmp_path / "dst", ConvertOptions("mxfp8", pad=True))
    model = opened(family, tmp_path / "dst").train()
    monitor = TrainingMonitor(model)
    monitor.attach()
    monitor.begin_step(sample=True)
    model(input_ids=tokens())[0].sum().backward()
    monitor.end_step()
    measured = monitor.take()
    assert measured["experts"].keys() == counted and measured["health"].keys() == blocks(model).keys()


QWEN3_VL = {
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_files_hold_transposed(transposed: bool, tmp_path: Path) -> None:
    """As Qwen3-VL-MoE's on the Hub; transformers tells the two forms apart by their shapes."""
    torch.manual_seed(7)
    model: Any = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**QWEN3_VL))  # type: ignore[arg-type]
    for name, param in model.named_parameters():
        if ".experts." in name:
            param.data.normal_(std=0.2)
    source = tmp_path / "source"
    model.bfloat16().save_pretrained(source)
    file = source / "model.safetensors"
    if transposed:
        tensors = load_file(file)
        save_file({n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors.items()}, file, {"format": "pt"})
    stock = Qwen3VLMoeForConditionalGeneration.from_pretrained(source).state_dict()
    for precision in ("bf16", "mxfp8"):
        folder = tmp_path / precision
        convert_checkpoint(source, folder, ConvertOptions(precision, pad=True, purpose="inference"))
        assert verify_checkpoint(folder, source, probes=0).ok
    converted = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "bf16")
    state = converted.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in stock.items())
    converted.save_pretrained(tmp_path / "again")  # in the shapes of the stock model, which it writes of either form
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: value.shape for name, value in saved.items()} == {name: stock[name].shape for name in saved}
    assert export_checkpoint(tmp_path / "bf16", tmp_path / "back").inexact == ()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == file.read_bytes()
    wrong = load_file(file)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    save_file({**wrong, name: wrong[name][:, :-1].contiguous()}, file, {"format": "pt"})
    with refused(ConversionError, f"model.safetensors: {name}"):
        convert_checkpoint(source, tmp_path / "dst")


@pytest.mark.skipif("qwen3_5" not in CONFIG_MAPPING, reason="the family came later")
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_the_text_model_of_a_larger_one_opens_alone(precision: str, tmp_path: Path) -> None:
    """As of Qwen3.5, of which ``AutoModelForCausalLM`` makes the text model, whose names lack a prefix."""
    text = {**QWEN3_VL["text_config"], "intermediate_size": 48, "layer_types": ["full_attention"]}
    whole = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("qwen3_5", text_config=text, vision_config=QWEN3_VL["vision_config"])
    )
    whole.bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "dst", ConvertOptions(precision, pad=True))
    stock, converted = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("source", "dst"))
    state, others = stock.state_dict(), converted.state_dict()
    assert all(torch.equal(others[name], value) for name, value in state.items() if ".mlp." not in name)
    patch_model(stock, {"precision": precision})
    assert blocks(converted).keys() == blocks(stock).keys() != set()
    assert_same(output(converted), output(stock), precision)


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_headless_model_whose_source_names_lack_a_prefix(precision: str, tmp_path: Path) -> None:
    """As Qwen2.5-VL's, to which transformers adds it; the blocks of the vision tower never had one."""
    text = {key: value for key, value in QWEN3_VL["text_config"].items() if "rope" not in key}
    text |= {"intermediate_size": 48, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {**QWEN3_VL["vision_config"], "intermediate_size": 48}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "dst", ConvertOptions(precision, pad=True))
    stock, converted = (AutoModel.from_pretrained(tmp_path / name).eval() for name in ("source", "dst"))
    patch_model(stock, {"precision": precision})
    assert blocks(converted).keys() == blocks(stock).keys() >= {"visual.blocks.0.mlp", "language_model.layers.0.mlp"}
    state, others = stock.state_dict(), converted.state_dict()
    assert all(torch.equal(others[name], value) for name, value in state.items() if ".mlp." not in name)
    assert_same(output(converted), output(stock), precision)


@pytest.mark.parametrize("family", sorted({"hrm_text", "inkling2_text"} & set(CONFIG_MAPPING)))
def test_gate_and_up_of_one_tensor_of_the_files(family: str, tmp_path: Path) -> None:
    """Cut for two ranks, as codes, and the place of a value that is not finite."""
    source = made(family, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", pad=True, tp_degree=2))
    report = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert report.ok, str(report)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith(("mlp.gate_up_proj.weight", "w13_weight")))
    place = (*[2] * (tensors[name].dim() - 2), 31, 7)  # an odd row, of up where they alternate
    tensors[name][place] = math.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with refused(SourceDamageError, f"model.safetensors: {name}", rf"the first at \[{', '.join(map(str, place))}\]"):
        convert_checkpoint(source, tmp_path / "nan", on_nonfinite="error")


@pytest.mark.parametrize(
    ("family", "name", "values", "wrong"),
    [
        ("dinov2", "encoder.layer.0.mlp.weights_in.bias", torch.zeros(95).bfloat16(), "[95]"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", torch.zeros(4, 94).bfloat16(), "[4, 94]"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias", torch.zeros(4, 32).int(), "I32"),
        ("llama_biased", "model.layers.0.mlp.up_proj.bias", torch.zeros(47).bfloat16(), "[47]"),
        pytest.param(
            *("muse_spark", "layers.0.mlp.experts.post_expert_norm.weight", torch.zeros(31).bfloat16(), "[31]"),
            marks=pytest.mark.skipif("muse_spark" not in CONFIG_MAPPING, reason="transformers lacks it"),
        ),
        ("nemotron_h", "backbone.layers.0.mixer.gate.weight", torch.zeros(5, 32).bfloat16(), "[5, 32]"),
    ],
)
def test_what_is_copied_has_to_fit_the_model(
    family: str, name: str, values: torch.Tensor, wrong: str, tmp_path: Path
) -> None:
    """Biases, norms and routers: an error before anything is written, not when the conversion is loaded."""
    source = made(family, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    assert name in tensors, sorted(tensors)
    save_file({**tensors, name: values}, source / "model.safetensors", {"format": "pt"})
    with refused(ConversionError, f"model.safetensors: {name}", got=wrong):
        convert_checkpoint(source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_has_no_codes_is_named_before_anything_is_written(tmp_path: Path) -> None:
    source = made("seed_oss", tmp_path / "source")
    with refused(ConversionError, "precision", r"with dropout after it.*\. Use --precision bf16\.$"):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8"))
    first, second = "model.layers.0.m*", r"model\.layers\.1\.mlp: "
    with refused(ConversionError, "precision", second):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions({"*": "mxfp8", first: "bf16"}))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("family", "precision", "fix"),
    [
        ("qwen2_moe", "mxfp8", r"bf16, or --keep-bf16 'model.layers.\*.mlp.shared_expert'\.$"),
        ("qwen2_moe", "mxfp4", None),  # which is not for dense MLPs
        ("llama", "mxfp8", r"bf16\.$"),  # the glob would match the other layer too
    ],
)
def test_globs_are_offered_where_they_leave_a_block_in_mx(family: str, precision: str, fix: str | None) -> None:
    candidates = discover(tiny_model(family))
    first = next(each for each in candidates if each.roles is not None)
    assert first.roles is not None
    dropping = replace(first, roles=replace(first.roles, after=("dropout",)))
    given = [dropping if each is first else each for each in candidates]
    with (
        nullcontext()
        if fix is None
        else refused(ConversionError, "precision", f"with dropout after it. Use --precision {fix}")
    ):
        public("convert")(_check_mx)(ConvertOptions(precision), given)


_FIRST = "model.layers.0.mlp.experts"
WRONG_NETWORKS = {
    "order": {"biases": [f"{_FIRST}.down_proj_bias", f"{_FIRST}.gate_up_proj_bias"]},
    "one bias": {"biases": [f"{_FIRST}.gate_up_proj_bias"]},
    "too many biases": {"biases": [f"{_FIRST}.gate_up_proj_bias", *[f"{_FIRST}.down_proj_bias"] * 3]},
    "no activation": {"gate": {"act": "tanh"}},
    "no field": {"gate": {"limit": 1.0}},
    "limits": {"gate": {"up_max": -1.0, "up_min": 1.0}},
    "no gate": {"gate": {"gated": False}},
    "half a gate": {"gate": {"gated": 0.5}},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrong", [*WRONG_NETWORKS, "no module"])
def test_a_network_that_the_weights_do_not_have_is_named(wrong, tmp_path):
    source, folder = made("gpt_oss", tmp_path / "src"), tmp_path / "dst"
    convert_checkpoint(source, folder, ConvertOptions("mxfp8", pad=True))
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    networks, name = manifest["networks"], "model.layers.9.mlp" if wrong == "no module" else _FIRST
    networks[name] = {**networks[_FIRST], **WRONG_NETWORKS.get(wrong, {})}
    path.write_text(json.dumps(sealed(manifest)))
    (finding,) = verify_checkpoint(folder, source).findings
    assert (finding.check, finding.subject) == ("coverage", name) and finding.message.startswith("said to ")
    with refused(SourceDamageError, MANIFEST_FILE, got=name):
        export_checkpoint(folder, tmp_path / "values", allow_inexact=True)

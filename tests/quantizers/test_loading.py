"""A loaded conversion computes what the original model, patched, computes: bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.torch.compute import bf16_matmul_is_fast
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.convert.io.tensors import open_tensors
from hf_neuron_moe.convert.manifest import read_manifest
from hf_neuron_moe.formats import fake_quantize_mx, to_compact
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.quantizers import NeuronMoEQuantizationConfig
from hf_neuron_moe.quantizers.placeholders import Placement
from hf_neuron_moe.quantizers.quantizer import NeuronMoEQuantizer, _wanted_dtypes
from tests.quantizers.conftest import SIZES, UNEVEN, WORDS, Converted, Source, load, patched
from tests.tiny_models import FAMILIES, tiny_model, tokens

TARGETS: list[dict[str, Any]] = [
    {"precision": "bf16", "layout": "fused"},
    {"precision": "bf16", "layout": "kernel"},
    {"precision": "mxfp8", "layout": "fused"},
    {"precision": "mxfp8", "layout": "kernel"},
]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def assert_same(actual: torch.Tensor, expected: torch.Tensor, precision: str) -> None:
    """The same bits; in bf16 without bf16 instructions up to a few steps of it at the largest values.

    There torch's bf16 product of few rows sums weights in another order of memory in another order, and so does MKL's
    fp32 one; the sums are rounded to bf16 (2^-9 relative) after each product of two layers.
    """
    if precision == "bf16" and not bf16_matmul_is_fast(torch.device("cpu")):
        atol = 2.0**-6 * expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.sampled(3)
@pytest.mark.thinned(4, 4)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: "-".join(target.values()))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_as_when_patched(
    source: Source, converted: Converted, family: str, target: dict[str, Any]
) -> None:
    expected = logits(patched(source(family), target["precision"]))
    assert_same(logits(load(converted(family, **target))), expected, target["precision"])


@pytest.mark.sampled(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "qwen2_moe"])
def test_padded_weights_of_uneven_sizes(source: Source, converted: Converted, family: str, precision: str) -> None:
    expected = logits(patched(source(family, UNEVEN), precision))
    assert_same(logits(load(converted(family, UNEVEN, precision=precision, pad=True))), expected, precision)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_results_of_padded_blocks_have_no_gaps(converted: Converted, family: str) -> None:
    """Sums over processes by gloo take no notice of strides."""
    model = load(converted(family, UNEVEN, precision="mxfp8", pad=True))
    blocks = [module for module in model.modules() if isinstance(module, QuantizedBlock)]
    found: list[torch.Tensor] = []
    for block in blocks:
        block.register_forward_hook(lambda module, arguments, output: found.append(output))
    logits(model)
    assert len(found) == len(blocks) and all(each.is_contiguous() for each in found)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("phi3", {"precision": "bf16", "swizzle": True}),
        ("llama", {"precision": "mxfp8", "scales": "oversized"}),
        ("mixtral", {"precision": "mxfp8", "purpose": "lora"}),
    ],
)
def test_the_other_options_change_no_result(
    source: Source, converted: Converted, family: str, options: dict[str, Any]
) -> None:
    expected = logits(patched(source(family), options["precision"]))
    assert torch.equal(logits(load(converted(family, **options))), expected)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("options", [*TARGETS, {"precision": "mxfp8", "purpose": "lora"}], ids=str)
@pytest.mark.parametrize("headless", [False, True])
def test_nothing_is_reported_missing_or_left_over(
    converted: Converted, options: dict[str, Any], headless: bool
) -> None:
    kind = AutoModel if headless else AutoModelForCausalLM
    for family in ("llama", "qwen2_moe", "nemotron_h"):
        _, report = kind.from_pretrained(converted(family, **options), output_loading_info=True)
        assert report.pop("unexpected_keys") == ({"lm_head.weight"} if headless else set())
        assert not any(report.values()), report


@pytest.mark.sampled(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "auto", "bfloat16"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_dtype_device_map_and_low_memory(
    source: Source, converted: Converted, precision: str, dtype: torch.dtype | str
) -> None:
    options = {"dtype": dtype, "device_map": "cpu", "low_cpu_mem_usage": True}
    model = load(converted("mixtral", precision=precision), **options)
    assert model.lm_head.weight.dtype == (torch.bfloat16 if isinstance(dtype, str) else dtype)
    assert_same(logits(model), logits(patched(source("mixtral"), precision, dtype=dtype)), precision)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_model_without_its_head(source: Source, converted: Converted, family: str, precision: str) -> None:
    model = AutoModel.from_pretrained(converted(family, precision=precision))
    expected = AutoModel.from_pretrained(source(family))
    patch_model(expected, {"precision": precision})
    with torch.no_grad():
        assert_same(model(tokens()).last_hidden_state, expected(tokens()).last_hidden_state, precision)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_tied_embeddings_and_several_shards(source: Source, tmp_path: Any, precision: str) -> None:
    original = source("llama", tie_word_embeddings=True)
    convert_checkpoint(original, tmp_path / "dst", ConvertOptions(precision=precision, max_shard_bytes=20_000))
    assert len(list((tmp_path / "dst").glob("*.safetensors"))) > 1
    model = load(tmp_path / "dst")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(patched(original, precision)))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("options", [{"layout": "fused"}, {"layout": "kernel"}, {"scales": "oversized"}], ids=str)
def test_the_model_holds_the_file_s_codes_and_little_else(
    converted: Converted, family: str, options: dict[str, Any]
) -> None:
    folder = converted(family, precision="mxfp8", **options)
    model = load(folder)
    weights = 0
    with open_tensors(folder) as reader:
        for tensor in read_manifest(folder).tensors:
            if tensor.layout == "source" or tensor.orientation != "forward":
                continue
            held, stored = model.get_buffer(tensor.name), reader.read(tensor.file, tensor.name).view(torch.uint8)
            if tensor.name.endswith("_scale") and tensor.scale_layout != "compact":
                hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
                stored = to_compact(stored, hidden if "gate_up" in tensor.name else inner)
            assert torch.equal(held, stored)
            weights += 0 if tensor.name.endswith("_scale") else held.numel()
    blocks = [module for module in model.modules() if isinstance(module, QuantizedBlock)]
    state = [tensor for block in blocks for tensor in block.state_dict().values()]
    # One byte per weight and one per 32 weights, nothing else.
    assert sum(tensor.nbytes for tensor in state) == weights * 33 // 32
    assert not [name for block in blocks for name, _ in block.named_parameters()]


WORD_TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"precision": "mxfp8", "purpose": "inference"}),
    ("mixtral", {"precision": "mxfp8", "purpose": "inference", "scales": "packed"}),
    ("qwen2_moe", {"precision": "mxfp8", "purpose": "inference", "pad": True}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "options"), WORD_TARGETS, ids=str)
def test_moe_cte_words_are_read_back(converted: Converted, family: str, options: dict[str, Any]) -> None:
    """Groups along H differ from the patched blocks' ones, so what is compared are the weights' values."""
    model, plain = load(converted(family, WORDS, **options)), load(converted(family, WORDS, precision="bf16"))
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedBlock)}
    experts = {name: block for name, block in blocks.items() if name.endswith("experts")}
    assert experts
    for name, block in experts.items():
        stack, stock = block.neuron_stack, plain.state_dict()
        gate_up, down = stock[f"{name}.gate_up_proj"], stock[f"{name}.down_proj"]
        for expert in range(len(gate_up)):
            weights, whole = stack.expert(expert), slice(0, stack.hidden)
            inner = stack.inner
            for half in range(2):
                rows = slice(half * inner, (half + 1) * inner)
                value = weights.gate_up.values(rows, whole, torch.empty(inner, stack.hidden))
                expected = fake_quantize_mx(gate_up[expert, rows], scheme="one_tile")
                assert torch.equal(value, expected)
            value = weights.down.values(whole, slice(0, inner), torch.empty(stack.hidden, inner))
            assert torch.equal(value, fake_quantize_mx(down[expert], scheme="wrapX_single"))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_mxfp4_experts_beside_bf16_blocks(source: Source, converted: Converted, family: str) -> None:
    model = load(converted(family, WORDS, precision="mxfp4"))
    block = model.model.layers[0].mlp
    assert block.experts.neuron_stack.gate_up_layout.fmt == "e2m1"
    codes = sum(block.experts.get_buffer(name).nbytes for name in ("gate_up_proj", "down_proj"))
    assert codes * 2 == sum(p.numel() for p in load(source(family, WORDS)).model.layers[0].mlp.experts.parameters())
    if family == "qwen2_moe":
        shared = block.shared_expert
        assert shared.neuron_config.precision == "bf16"
        assert shared.gate_up_proj.requires_grad
    # FP4 keeps one mantissa bit; the model's output is still the original's in the main.
    exact = logits(load(source(family, WORDS))).float()
    assert (logits(model).float() - exact).norm() < 0.5 * exact.norm()


@pytest.mark.filterwarnings("ignore:convert. .* do not fit bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_stays_in_its_source_form_gets_the_dtype_that_is_asked_for(
    source: Source, dtype: torch.dtype, tmp_path: Path
) -> None:
    convert_checkpoint(source("llama", dtype=dtype), tmp_path / "dst", ConvertOptions("mxfp8"))
    model = load(tmp_path / "dst", dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.weight, load(source("llama", dtype=dtype)).lm_head.weight.bfloat16())


def test_keys_that_the_models_class_ignores_are_not_reported(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the layers that predict further tokens in DeepSeek-V3."""
    shutil.copytree(source("llama"), tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    save_file(load_file(file) | {"mtp.weight": torch.ones(2, dtype=torch.bfloat16)}, file, {"format": "pt"})
    for ignored in ([r"^mtp.*"], None):
        monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
        if ignored:
            convert_checkpoint(tmp_path / "src", tmp_path / "dst", ConvertOptions("mxfp8"))
        _, report = load(tmp_path / "dst", output_loading_info=True)
        assert set(report["unexpected_keys"]) == (set() if ignored else {"mtp.weight"})


def test_codes_keep_their_dtype_where_values_are_cast_after_loading() -> None:
    """As with transformers before 5.21, which leaves a renamed tensor in its file's dtype."""
    quantizer = NeuronMoEQuantizer(NeuronMoEQuantizationConfig("mxfp8"))
    kinds = {"codes": torch.uint8, "words": torch.int32, "router": torch.float32, "norm": torch.bfloat16}
    model = torch.nn.Module()
    for name, dtype in kinds.items():
        model.register_parameter(name, torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False))
    quantizer._dtypes = dict.fromkeys(("codes", "words", "router"), torch.bfloat16) | {"norm": torch.float32}
    quantizer._cast_renamed(model)  # type: ignore[arg-type]
    assert {name: param.dtype for name, param in model.named_parameters()} == {
        "codes": torch.uint8,
        "words": torch.int32,
        "router": torch.bfloat16,
        "norm": torch.float32,
    }


def test_the_configuration_of_a_loaded_model_opens_other_folders(source: Source, converted: Converted) -> None:
    config = load(converted("llama", precision="bf16")).config
    again = load(source("llama"), config=config)
    assert torch.equal(logits(again), logits(load(source("llama"))))


def test_converters_of_other_weights_stay() -> None:
    quantizer = NeuronMoEQuantizer(NeuronMoEQuantizationConfig("mxfp8"))
    quantizer.placement = Placement(names={"model.layers.0.mlp.experts.gate_up_proj"})
    joined = [Concatenate(dim=0)]
    own = WeightConverter("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", operations=joined)
    other = WeightConverter(["q_proj.weight", "k_proj.weight"], "qk_proj.weight", operations=joined)
    assert quantizer.update_weight_conversions([own, other]) == [other]


def test_the_dtypes_that_transformers_before_5_21_leaves_to_the_quantizer(tmp_path) -> None:
    """As transformers loads the source: DeepSeek-V4 keeps norms and more in fp32."""
    tiny_model("deepseek_v4").bfloat16().save_pretrained(tmp_path)
    stock = load(tmp_path)
    loaded = {name: param.dtype for name, param in stock.named_parameters()}
    assert set(loaded.values()) == {torch.bfloat16, torch.float32}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(stock.config, dtype=torch.bfloat16)
    for param in empty.parameters():
        param.data = param.data.bfloat16()
    assert _wanted_dtypes(empty) == loaded

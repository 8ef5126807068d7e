"""The bytes a block says it keeps are those that autograd keeps, and they stay below the promised ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.activation_policy import canonical_keep, keep_strings
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.saved_bytes import SavedBlock, recomputed_flops, saved_bytes
from hf_neuron_moe.training import measure_saved_bytes
from tests.tiny_models import MUSE_SPARK, tiny_model, tokens

LIMITS = {
    # (H, I, K): at most this many KiB per token in bf16, input and routing included.
    "Llama-3-8B MLP": ((4096, 14336, None), {"minimal": 64.2, "fp8": 33.2, "recompute": 8.2}),
    "Qwen3-30B-A3B experts": ((2048, 768, 8), {"minimal": 28.2, "fp8": 14.6, "recompute": 4.2}),
    "quarter-width Mixtral": ((1024, 3584, 2), {"minimal": 30.2, "fp8": 15.7, "recompute": 2.2}),
}


def blocks_of(model: nn.Module) -> dict[str, NeuronBlock]:
    return {name: module for name, module in model.named_modules() if isinstance(module, NeuronBlock)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("phi3", torch.bfloat16), ("qwen2_moe", torch.bfloat16), ("olmoe", torch.float32)],
)
def test_what_a_block_says_is_what_is_measured(family: str, dtype: torch.dtype) -> None:
    layers = 1 if family == "olmoe" else 2
    model = tiny_model(family, hidden_size=64, intermediate_size=640, num_hidden_layers=layers).to(dtype)
    for precision in ("bf16", "mxfp8", "fp32"):
        for policy in sorted({"full", *keep_strings(precision)}):
            if precision == "mxfp8" and policy.count("+") == 1:
                continue  # the other subsets show as much
            home = "kernel" if precision == "mxfp8" else "stock"
            report = patch_model(model, {"precision": precision, "activations": policy, "weights": home})
            with measure_saved_bytes(blocks_of(model)) as saved:
                model(input_ids=tokens())
            for entry in report.patched:
                block = model.get_submodule(entry.name)
                measured = saved.modules[entry.name].bytes_per_token
                assert measured == block.saved_bytes_per_token == entry.saved_bytes_per_token, (precision, policy)
            assert saved.bytes_per_token == report.saved_bytes_per_token
            unpatch_model(model)


@pytest.mark.parametrize("policy", ["minimal", "recompute", "fp8"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float32, "mxfp8"), (torch.bfloat16, "fp32")]
)
@pytest.mark.parametrize(("family", "top_k"), [("longcat_flash", 2), ("longcat_flash", 3), ("jetmoe", 2)])
def test_what_is_saved_next_to_the_operator_is_counted(
    family: str, top_k: int, dtype: torch.dtype, precision: str, policy: str
) -> None:
    """Zero experts of LongCat-Flash multiply the input, and JetMoE's router reads it where it is trained."""
    name = {"longcat_flash": "moe_topk", "jetmoe": "num_experts_per_tok"}[family]
    model = tiny_model(family, **{name: top_k}).to(dtype)
    patch_model(model, {"precision": precision, "activations": policy}, include=["*"], strict=False)
    blocks = {name: block for name, block in blocks_of(model).items() if block.neuron_shape.experts is not None}
    assert blocks
    for frozen in ("", "router"):
        for name, param in model.named_parameters():
            param.requires_grad_(not frozen or frozen not in name)
        with measure_saved_bytes(blocks) as saved:
            model(input_ids=tokens(2, 32))
        for name, block in blocks.items():
            assert saved.modules[name].bytes_per_token == block.saved_bytes_per_token, (name, frozen)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("family", ["llama4", *({"muse_spark"} & set(CONFIG_MAPPING))])
def test_a_row_per_token_and_expert_is_counted(family: str, top_k: int) -> None:
    """Llama 4 scales the input by expert, muse_spark norms each expert's output: both have rows of their own."""
    model = tiny_model("llama4", num_experts_per_tok=top_k)
    if family == "muse_spark":
        sizes = {**MUSE_SPARK, "num_experts_per_tok": top_k}
        model = AutoModel.from_config(AutoConfig.for_model("muse_spark_text", **sizes))
    for precision, policy in (("bf16", "minimal"), ("bf16", "recompute"), ("fp32", "full")):
        model = model.to(torch.float32 if precision == "fp32" else torch.bfloat16)
        report = patch_model(model, {"precision": precision, "activations": policy}, strict=False)
        said = {entry.name: entry.saved_bytes_per_token for entry in report.patched if entry.kind == "experts"}
        blocks = {name: model.get_submodule(name) for name in said}
        with measure_saved_bytes(blocks) as saved:
            model(input_ids=tokens(4, 16))
        for name, block in blocks.items():
            # Llama 4's experts get every token once per expert, and their bytes are counted by row.
            rows = 4 if family == "llama4" else 1
            measured = saved.modules[name].bytes_per_token * rows
            weight = 0 if family == "llama4" else 4 * 32 / 64  # the norm's in fp32, once per call
            assert measured == said[name] + weight == block.saved_bytes_per_token + weight, (precision, policy)
        unpatch_model(model)


@pytest.mark.parametrize(
    ("family", "weights", "copied"),
    [("dbrx", "stock", 4 * 2 * 24 * 32), ("gpt_oss", "kernel", 4 * 2 * 48), ("gpt_oss", "stock", 0)],
)
def test_parameters_in_another_order_are_counted_by_call(family: str, weights: str, copied: int) -> None:
    """Gate and up of two parameters become one at every call, and biases that alternate are put in order."""
    model = tiny_model(family).bfloat16()
    report = patch_model(model, {"weights": weights})
    blocks = blocks_of(model)
    with measure_saved_bytes(blocks) as saved:
        model(input_ids=tokens(4, 16))
    for entry in report.patched:
        measured = saved.modules[entry.name].bytes_per_token * 64
        assert entry.saved_bytes_per_call == blocks[entry.name].saved_bytes_per_call == 2 * copied
        assert measured == entry.saved_bytes_per_token * 64 + 2 * copied == blocks[entry.name].saved_bytes(64)


@pytest.mark.parametrize("name", LIMITS)
def test_the_promised_limits_hold(name: str) -> None:
    (hidden, inner, top_k), limits = LIMITS[name]
    shape = SavedBlock("bf16", hidden, inner, top_k)
    for policy, limit in limits.items():
        assert saved_bytes(shape, policy) <= limit * 1024, policy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LIMITS)
def test_the_promised_limits_hold_at_full_width(name: str) -> None:
    """The same, measured on real blocks; the number of experts does not matter, so there are only as many as used."""
    (hidden, inner, top_k), limits = LIMITS[name]
    shape, rows, kept = SavedBlock("bf16", hidden, inner, top_k), 32, dict[int, int]()
    draw = torch.bfloat16
    x = torch.randn(rows, hidden, dtype=draw, requires_grad=True)
    weights = [torch.full((inner, hidden), 0.01, dtype=draw, requires_grad=True) for _ in range(2)]
    weights.append(torch.full((hidden, inner), 0.01, dtype=draw, requires_grad=True))
    if top_k is not None:
        gate_up = torch.full((top_k, 2 * inner, hidden), 0.01, dtype=draw, requires_grad=True)
        weights = [gate_up, torch.full((top_k, hidden, inner), 0.01, dtype=draw, requires_grad=True)]
    own = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for policy, limit in limits.items():
        kept.clear()
        options = {"precision": "bf16", "backend": "torch", "activations": policy}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if top_k is None:
                ops.swiglu_mlp(x, *weights, **options)
            else:
                routing = torch.arange(top_k).repeat(rows, 1), torch.full((rows, top_k), 1 / top_k)
                ops.experts(x, *routing, *weights, transposed=False, block_size=128, **options)
        assert sum(kept.values()) / rows == saved_bytes(shape, policy) <= limit * 1024, policy


def test_what_is_kept_less_is_computed_more() -> None:
    shape = SavedBlock("mxfp8", 256, 1024, 2)
    everything = "gate_pre+gate_act+up+intermediate"
    assert recomputed_flops(shape, everything) == 0
    chain = (everything, "gate_pre+up+intermediate", "gate_pre+up", "minimal", "gate_pre", "recompute")
    for more, less in itertools.pairwise(chain):
        assert saved_bytes(shape, more) > saved_bytes(shape, less)
        assert recomputed_flops(shape, more) < recomputed_flops(shape, less)
    assert recomputed_flops(shape, "recompute") == 2 * (2 * 256 * 2 * 1024 + 5 * 1024)
    assert recomputed_flops(shape, "fp8") == recomputed_flops(shape, "gate_pre+up") + 2 * (2 * 1024)  # decoding
    plain = replace(shape, gate=Gate("squared_relu", gated=False))
    assert recomputed_flops(plain, "fp8") == recomputed_flops(plain, "up") + 2 * 1024


def test_a_model_that_does_not_say_its_top_k_has_no_figure() -> None:
    assert saved_bytes(SavedBlock("bf16", 64, 64, 0), "minimal") != saved_bytes(
        SavedBlock("bf16", 64, 64, 2), "minimal"
    )
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        del layer.mlp.top_k, layer.mlp.gate.top_k
    model.config.num_experts_per_tok = 0
    report = patch_model(model)
    assert {entry.saved_bytes_per_token for entry in report.patched} == {None}
    assert report.saved_bytes_per_token == 0 and "Saved for backward" not in str(report)
    assert torch.isnan(torch.tensor(next(iter(blocks_of(model).values())).saved_bytes_per_token))


def test_frozen_blocks_keep_all_of_up_and_repeat_none_of_it() -> None:
    """The last eighth of up is left out only where a weight gradient reads the input, and so could give it again."""
    trained, frozen = (SavedBlock("mxfp8", 64, 1024, None, quantized=quantized) for quantized in (False, True))
    assert recomputed_flops(frozen, "minimal") == recomputed_flops(frozen, "gate_pre+up")
    assert recomputed_flops(trained, "minimal") == recomputed_flops(trained, "gate_pre+up") + 2 * 64 * 128


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
@pytest.mark.parametrize(
    "gate",
    [Gate("squared_relu", gated=False), Gate("swish", 1.702, gate_max=7.0, up_offset=1.0)],
    ids=["relu2", "swish"],
)
def test_gates_and_biases_keep_what_is_said(gate: Gate, precision: str) -> None:
    """Biases are parameters; without a gate there is up alone, kept whole or not at all."""
    hidden, inner, experts, top_k, rows = 64, 200, 2, 2, 256
    halves, dtype = (2 if gate.gated else 1), torch.float32 if precision == "fp32" else torch.bfloat16
    sizes = ((experts, halves * inner, hidden), (experts, hidden, inner), (experts, halves * inner), (experts, hidden))
    given = [torch.full(size, 0.01, dtype=dtype, requires_grad=True) for size in sizes]
    x = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    own, kept = {tensor.untyped_storage().data_ptr() for tensor in given}, dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    shape = SavedBlock(precision, hidden, inner, top_k, experts=experts, gate=gate)
    routing = torch.arange(top_k).repeat(rows, 1), torch.full((rows, top_k), 0.5)
    for policy in ("full", "minimal", "recompute", "fp8", "gate_pre", "up"):
        keep = canonical_keep(policy, precision)
        kept.clear()
        options = {"precision": precision, "backend": "torch", "activations": keep, "gate": gate}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            weights = {"transposed": False, "block_size": 128, "biases": (given[2], given[3])}
            ops.experts(x, *routing, *given[:2], **weights, **options)
        assert sum(kept.values()) / rows == saved_bytes(shape, keep), policy


def test_without_a_gate_up_is_all_that_is_kept_or_made_again() -> None:
    shape = SavedBlock("bf16", 64, 1024, None, gate=Gate("squared_relu", gated=False))
    assert saved_bytes(shape, "minimal") == saved_bytes(shape, "up") == saved_bytes(shape, "gate_pre") + 2 * 1024
    assert recomputed_flops(shape, "minimal") == recomputed_flops(shape, "recompute") - 2 * 64 * 1024 == 4 * 1024

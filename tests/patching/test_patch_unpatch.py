"""patch_model and unpatch_model: what they change, what they leave alone, what they give back."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_neuron_moe import NeuronMoEConfig, patch_model, unpatch_model
from hf_neuron_moe.errors import ConfigError, NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.modules.experts import NeuronExperts
from hf_neuron_moe.modules.swiglu_mlp import NeuronSwiGLUMLP
from hf_neuron_moe.patching.report import PatchReport
from tests.refusals import refused
from tests.tiny_models import FAMILIES, WEIGHT_LAYOUTS, assert_same_snapshot, snapshot, tiny_model, tokens


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_gives_back_the_same_objects_and_bytes(family: str, home: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    random_state = torch.get_rng_state()
    patch_model(model, {"weights": home})
    assert torch.equal(torch.get_rng_state(), random_state)
    kinds = {type(module).__name__ for module in model.modules()}
    assert any(name.endswith(("SwiGLUMLP", "NeuronExperts", "LayoutExperts")) for name in kinds)
    unpatch_model(model)
    assert_same_snapshot(snapshot(model), before)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2_moe"])
def test_unpatch_brings_trained_weights_gradients_and_mode(family: str, home: str) -> None:
    model = tiny_model(family)
    patch_model(model, {"precision": "fp32", "weights": home})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    model.eval()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    unpatch_model(model)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    assert all(param.grad is not None and param.grad.shape == param.shape for param in model.parameters())
    places = {param.grad.untyped_storage().data_ptr() for param in model.parameters() if param.grad is not None}
    assert len(places) == len(list(model.parameters())), "each gradient has memory of its own"


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "qwen2_moe"])
def test_deepcopy_and_pickle_of_a_patched_model(family: str, home: str) -> None:
    model = tiny_model(family).eval()
    stock = copy.deepcopy(model)
    patch_model(model, {"precision": "fp32", "weights": home})
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            assert torch.equal(twin(ids).logits, expected)
            unpatch_model(twin)
            assert torch.equal(twin(ids).logits, stock(ids).logits)
        assert torch.equal(model(ids).logits, expected)


def test_same_call_again_returns_the_report_and_changes_nothing() -> None:
    model = tiny_model("mixtral")
    report = patch_model(model, NeuronMoEConfig(precision="mxfp8"), exclude="model.layers.1.*")
    before = snapshot(model)
    assert patch_model(model, {"precision": "mxfp8"}, exclude=["model.layers.1.*"]) is report
    assert_same_snapshot(snapshot(model), before)


@pytest.mark.parametrize(
    ("again", "named"),
    [
        ({"config": {"precision": "fp32"}}, "precision="),
        ({"include": "*"}, "include="),
        ({"exclude": "model.layers.0.*"}, "exclude="),
    ],
)
def test_other_arguments_on_a_patched_model_are_refused(again: dict, named: str) -> None:
    model = tiny_model("llama")
    patch_model(model)
    before = snapshot(model)
    with refused(UnsupportedModelError, "model", f"{named}.*unpatch_model"):
        patch_model(model, **again)
    assert_same_snapshot(snapshot(model), before)


def test_unpatching_an_unpatched_model_is_refused() -> None:
    with refused(UnsupportedModelError, "model", got="an unpatched LlamaForCausalLM"):
        unpatch_model(tiny_model("llama"))
    for model in (None, "gpt2"):
        with refused(UnsupportedModelError, "model", r"got (NoneType|str), which is no torch\.nn\.Module"):
            unpatch_model(model)


def test_include_and_exclude_show_in_the_report() -> None:
    model = tiny_model("qwen2_moe")
    report = patch_model(model, include="*.experts", exclude="model.layers.1.*")
    assert [entry.name for entry in report.patched] == ["model.layers.0.mlp.experts"]
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert reasons == {
        "model.layers.0.mlp.shared_expert": "not matched by include='*.experts'",
        "model.layers.1.mlp.experts": "excluded by 'model.layers.1.*'",
        "model.layers.1.mlp.shared_expert": "excluded by 'model.layers.1.*'",
    }
    assert isinstance(model.model.layers[0].mlp.experts, NeuronExperts)
    assert not isinstance(model.model.layers[0].mlp.shared_expert, NeuronSwiGLUMLP)


def test_no_globs_exclude_nothing() -> None:
    model = tiny_model("llama")
    report = patch_model(model, exclude=[])
    assert len(report.patched) == 2
    assert patch_model(model) is report  # the same request


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"excludes": ["*"]}, r"one of config, include, exclude, strict, got 'excludes'.* Did you mean 'exclude'\?"),
        ({"weights": "kernel"}, r"an option of the configuration: patch_model\(model, {'weights': 'kernel'}\)"),
        ({"precison": "fp32"}, r"Did you mean 'precision'\? That is an option of the configuration, .* config="),
    ],
)
def test_an_unknown_argument_is_answered_with_the_nearest(options: dict, hint: str) -> None:
    with refused(ConfigError, "argument name", hint):
        patch_model(tiny_model("llama"), **options)
    assert list(inspect.signature(patch_model).parameters) == ["model", "config", "include", "exclude", "strict"]


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_glob_without_match_names_the_nearest_block(argument: str) -> None:
    model = tiny_model("llama")
    with refused(ConfigError, argument, "Did you mean 'model.layers.0.mlp'", got="'model.layers.0.mpl'"):
        patch_model(model, **{argument: "model.layers.0.mpl"})


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": "fp32"},
        {"config": {"precison": "fp32"}},
        {"include": 3},
        {"include": []},
        {"exclude": ["a", 1]},
        {"strict": "no"},
    ],
)
def test_options_of_the_wrong_type_are_refused(arguments: dict) -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(ConfigError):
        patch_model(model, **arguments)
    assert_same_snapshot(snapshot(model), before)


def test_report_as_dict_and_table() -> None:
    report = patch_model(tiny_model("qwen2_moe"), {"precision": "mxfp8"}, exclude="model.layers.1.*")
    values = json.loads(json.dumps(report.to_dict()))
    assert values["config"]["precision"] == "mxfp8"
    first = values["entries"][0]
    assert (first["kind"], first["status"], first["weights"], first["backend"]) == (
        "experts",
        "patched",
        "stock",
        "torch",
    )
    assert (first["experts"], first["hidden_size"], first["intermediate_size"]) == (4, 32, 24)
    assert first["padded_sizes"] == [128, 128]
    assert first["padding_overhead_percent"] == pytest.approx(100 * (128 * 128 / (32 * 24) - 1))
    lines = str(report).splitlines()
    assert lines[0].startswith("2 patched, 2 skipped, 0 refused")
    columns = [lines[1].index(word) for word in ("kind", "class", "status", "reason")]
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[1:3] for column in columns[:3])
    assert "padding overhead" in lines[1] and lines[6].startswith("Padding overhead: extra multiply-adds of the Neuron")
    assert lines[7].startswith("Saved for backward: ") and len(lines) == 2 + 4 + 4
    assert lines[8].startswith("PyTorch multiplies by ") and lines[9].startswith("Generation holds quantized copies")
    # Nothing is padded, so there is nothing to explain.
    whole = {"hidden_size": 256, "intermediate_size": 384}
    assert "Padding overhead" not in str(PatchReport(report.config, (replace(report.entries[0], **whole),)))


def test_hooks_and_their_handles_survive_both_ways() -> None:
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    calls: list[str] = []
    early = mlp.register_forward_hook(lambda module, args, out: calls.append(f"early {type(module).__name__}"))
    mlp.register_forward_pre_hook(lambda module, args, kwargs: calls.append("pre"), with_kwargs=True)
    mlp.register_full_backward_hook(lambda module, gin, gout: calls.append("backward"))
    patch_model(model)
    late = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: calls.append("late"))
    model(tokens()).logits.sum().backward()
    assert calls == ["pre", "early NeuronSwiGLUMLP", "late", "backward"]
    early.remove()
    unpatch_model(model)
    calls.clear()
    model(tokens()).logits.sum().backward()
    assert calls == ["pre", "late", "backward"]
    late.remove()
    assert len(mlp._forward_hooks) == 0


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_tied_embeddings_stay_tied(home: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    patch_model(model, {"weights": home})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" in model.state_dict()


def test_a_module_shared_by_two_layers_is_replaced_in_both() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    shared = model.model.layers[0].mlp
    report = patch_model(model, {"precision": "fp32", "weights": "kernel"})
    assert [(entry.name, entry.aliases) for entry in report.patched] == [
        ("model.layers.0.mlp", ("model.layers.1.mlp",))
    ]
    assert model.model.layers[0].mlp is model.model.layers[1].mlp
    unpatch_model(model)
    assert model.model.layers[0].mlp is shared
    assert model.model.layers[1].mlp is shared


def test_weights_tied_between_blocks_stay_tied_in_the_stock_home_and_are_refused_in_the_kernel_home() -> None:
    model = tiny_model("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.gate_proj.weight = first.gate_proj.weight
    with refused(NothingToPatchError, "model", "tied to another module's parameter"):
        patch_model(model, {"weights": "kernel"})
    assert len(patch_model(model).patched) == 2
    layers = model.model.layers
    assert layers[0].mlp.gate_proj.weight is layers[1].mlp.gate_proj.weight


@pytest.mark.parametrize("where", ["other block", "same block", "elsewhere"])
def test_a_layer_with_two_places_is_refused_in_the_kernel_home_and_serves_both_in_the_stock_home(where: str) -> None:
    """It is one module with one parameter: a fused copy of its weight would leave the other place behind."""
    model = tiny_model("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    if where == "other block":
        second.gate_proj = first.gate_proj
    elif where == "same block":
        first.up_proj = first.gate_proj
    else:
        model.tap = first.up_proj
    before = snapshot(model)
    kind = NothingToPatchError if where == "other block" else UnsupportedModelError
    with refused(kind, "model", "tied to another module's parameter"):
        patch_model(model, {"weights": "kernel"})
    assert_same_snapshot(snapshot(model), before)
    stock = copy.deepcopy(model)
    patch_model(model, {"precision": "fp32"})
    for each in (model, stock):
        each(tokens(), labels=tokens()).loss.backward()
    for (name, param), expected in zip(model.named_parameters(), stock.parameters(), strict=True):
        # fp32 rounding: two gradients of one weight are added, of which each is a sum in another order.
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_requires_grad_survive(dtype: torch.dtype, home: str) -> None:
    model = tiny_model("mixtral").to(dtype).eval()
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.requires_grad_(False)
    patch_model(model, {"weights": home})
    experts = model.model.layers[0].mlp.experts
    assert (experts.gate_up_proj.requires_grad, experts.down_proj.requires_grad) == (True, False)
    assert all(param.dtype == dtype for param in model.parameters())
    assert not any(module.training for module in model.modules())
    assert model(tokens()).logits.dtype == dtype


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_meta_models_are_patched_and_filled_later(family: str, home: str) -> None:
    source = tiny_model(family).eval()
    model = copy.deepcopy(source).to("meta")
    patch_model(model, {"precision": "fp32", "weights": home})
    assert all(param.is_meta for param in model.parameters())
    model.load_state_dict(source.state_dict(), assign=True)
    assert not any(param.is_meta for param in model.parameters())
    # Rotary frequencies are buffers outside the state dict, so they stay on meta here.
    model.model.rotary_emb = copy.deepcopy(source.model.rotary_emb)
    ids = tokens()
    torch.testing.assert_close(model(ids).logits, source(ids).logits, rtol=1e-5, atol=1e-5)
    unpatch_model(model)
    assert torch.equal(model(ids).logits, source(ids).logits)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_moving_a_patched_model_moves_what_unpatch_gives_back(home: str) -> None:
    model = tiny_model("phi3")
    patch_model(model, {"weights": home})
    model.to(torch.bfloat16)
    unpatch_model(model)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_the_model_itself_as_block_is_refused() -> None:
    with refused(NothingToPatchError, "model", "pass the module that contains it"):
        patch_model(tiny_model("llama").model.layers[0].mlp)


def test_nothing_to_patch() -> None:
    with refused(NothingToPatchError, "model", got="a Sequential without"):
        patch_model(nn.Sequential(nn.Linear(4, 4)))
    with refused(NothingToPatchError, "model", "2 of them skipped"):
        patch_model(tiny_model("llama"), exclude="*")


def test_weights_that_were_frozen_while_patched_stay_frozen() -> None:
    model = tiny_model("mixtral")
    patch_model(model, {"weights": "kernel"})
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.requires_grad_(False)
    unpatch_model(model)
    experts = model.model.layers[0].mlp.experts
    assert (experts.gate_up_proj.requires_grad, experts.down_proj.requires_grad) == (True, False)

"""Every way to say what is kept, how it reaches the blocks, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hf_neuron_moe import ActivationBudget, ActivationPolicy, NeuronMoEConfig, patch_model, unpatch_model
from hf_neuron_moe.activation_policy import as_activations, canonical_keep, keep_strings, parse_keep
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.modules.experts import register_experts_implementation
from tests.refusals import refused
from tests.tiny_models import tiny_model

FORMS: list[tuple[Any, Any]] = [
    ("full", "full"),
    ("up+gate_pre", ActivationPolicy(keep=("gate_pre", "up"))),
    ({"keep": ["up"]}, ActivationPolicy(keep={"up"})),
    ({"keep": [], "storage": "compute", "modules": {}}, ActivationPolicy(keep=())),
    ({"keep": "minimal", "modules": {"*.0.*": "fp8"}}, ActivationPolicy(keep="minimal", modules={"*.0.*": "fp8"})),
    (
        {"modules": {"*.1.*": {"keep": ["gate_pre"]}, "*.0.*": "recompute"}},
        ActivationPolicy(modules={"*.0.*": "recompute", "*.1.*": ActivationPolicy(keep=("gate_pre",))}),
    ),
    ("48KiB/token", ActivationBudget(bytes_per_token=48 * 1024)),
    ("1.5 MB / token + fp8", ActivationBudget(bytes_per_token=1.5e6, allow_fp8=True)),
    ("2GiB/8192tokens", ActivationBudget(total_bytes=2 * 2**30, tokens=8192)),
    ({"total_bytes": 10**9, "tokens": 4096, "allow_fp8": True}, ActivationBudget(None, 10**9, 4096, True)),
]


@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_forms(form: Any, expected: Any) -> None:
    config = NeuronMoEConfig(activations=form)
    assert config.activations == expected and hash(config) == hash(NeuronMoEConfig(activations=expected))
    assert NeuronMoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert copy.deepcopy(config) == config
    if isinstance(expected, ActivationPolicy) and not expected.modules:
        assert canonical_keep(as_activations(expected.name), "bf16") == expected.name


REFUSED: list[tuple[Any, str, str]] = [
    ("ful", "activations", r"got 'ful'.*Did you mean 'full'\?"),
    ("gate_prep+up", "activations", r"Did you mean 'gate_pre'\?"),
    ("48KiB/tok", "activations", r"Did you mean '48KiB/token'\?"),
    ("48XB/token", "activations", "got '48XB/token'"),
    ("0KiB/token", "bytes_per_token", "got 0"),
    ("1GiB/0tokens", "tokens", "got 0"),
    (None, "activations", "got None"),
    ({"keeps": ["up"]}, "option name", r"got 'keeps'.*Did you mean 'keep'\?"),
    ({"keep": ["upp"]}, "keep", r"got 'upp'.*Did you mean 'up'\?"),
    ({"keep": "minimall"}, "keep", r"Did you mean 'minimal'\?"),
    ({"keep": ["up"], "storage": "fp8"}, "storage", r"got 'fp8' with keep=\('up',\)"),
    ({"storage": "int8"}, "storage", "got 'int8'"),
    ({"modules": {"a": "1KiB/token"}}, "modules['a']", "got 1KiB/token"),
    ({"modules": {"a": {"modules": {"b": "fp8"}}}}, "modules['a']", ""),
    ({"modules": ["a"]}, "modules", ""),
    ({"total_bytes": 5}, "budget", "got total_bytes"),
    ({"bytes_per_token": 5, "tokens": 3}, "budget", "got bytes_per_token, tokens"),
    ({"bytes_per_token": 5, "allow_fp8": 1}, "allow_fp8", ""),
    ({"bytes_per_token": 5, "alow_fp8": True}, "option name", r"Did you mean 'allow_fp8'\?"),
    ({"keep": ["gate_act"]}, "activations", "got gate_act"),
    ({"modules": {"a": "intermediate"}}, "activations", "got intermediate"),
]


@pytest.mark.parametrize(("form", "argument", "says"), REFUSED)
def test_refused_forms(form: Any, argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        NeuronMoEConfig(activations=form)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "fp32"])
def test_canonical_strings_are_read_as_written(precision: str) -> None:
    for keep in keep_strings(precision):
        assert canonical_keep(keep, precision) == keep
        assert parse_keep(keep).fp8 == (keep == "fp8") and parse_keep(keep).whole_up == (keep != "minimal")
    full = parse_keep(canonical_keep("full", precision))
    assert len(full.names) == (4 if precision == "mxfp8" else 2) and full.whole_up and not full.fp8
    assert len(keep_strings(precision)) == (3 + 15 if precision == "mxfp8" else 3 + 3)


def test_exceptions_reach_their_blocks() -> None:
    model = tiny_model("qwen2_moe")
    policy = {"keep": "minimal", "modules": {"*.0.mlp.experts": "fp8", "*.shared_expert": {"keep": ["up"]}}}
    report = patch_model(model, {"activations": policy})
    shown = {entry.name: entry.activations for entry in report.patched}
    assert list(shown.values()) == ["fp8", "up", "minimal", "up"]
    for entry in report.patched:
        block = model.get_submodule(entry.name)
        assert str(block.neuron_config.activations) == block.neuron_keep == entry.activations
        assert NeuronMoEConfig.from_dict(block.neuron_config.to_dict()) == block.neuron_config
    assert patch_model(model, {"activations": policy}) is report
    text, plain = str(report), json.loads(json.dumps(report.to_dict()))
    assert "Saved for backward:" in text and "1 experts block x" in text and "2 mlp blocks x" in text and "(up)" in text
    assert [entry["activations"] for entry in plain["entries"]] == list(shown.values())
    total = sum(entry["saved_bytes_per_token"] for entry in plain["entries"])
    assert plain["saved_bytes_per_token"] == total == report.saved_bytes_per_token


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"*.7.*": "fp8"}, r"got '\*\.7\.\*'"),
        ({"model.layer.0.mlp": "fp8"}, r"Did you mean 'model\.layers\.0\.mlp'"),
        ({"*.0.*": "fp8", "*mlp": "up"}, r"got '\*\.0\.\*' and '\*mlp'.*'model\.layers\.0\.mlp'"),
    ],
)
def test_refused_globs_change_nothing(modules: dict[str, str], message: str) -> None:
    model = tiny_model("llama")
    with refused(ConfigError, "activations.modules", message):
        patch_model(model, {"activations": {"modules": modules}})
    assert not any(hasattr(module, "neuron_config") for module in model.modules())


def test_budgets_are_divided_among_blocks() -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=640)
    per_block = {}
    for policy in ("full", "minimal", "recompute"):
        report = patch_model(model, {"activations": policy})
        per_block[policy] = report.patched[0].saved_bytes_per_token
        unpatch_model(model)
    assert per_block == {"full": 2688.0, "minimal": 2432.0, "recompute": 128.0}
    report = patch_model(model, {"activations": ActivationBudget(bytes_per_token=2688 + 128)})
    assert sorted(entry.activations for entry in report.patched) == ["full", "recompute"]
    assert report.config.activations == ActivationBudget(bytes_per_token=2816)
    unpatch_model(model)
    report = patch_model(model, {"activations": ActivationBudget(total_bytes=2560 * 100, tokens=100)})
    assert report.saved_bytes_per_token <= 2560 and "fp8" not in {entry.activations for entry in report.patched}
    unpatch_model(model)
    report = patch_model(model, {"activations": "2.75KiB/token+fp8"})
    assert {entry.activations for entry in report.patched} == {"fp8"}
    unpatch_model(model)
    with refused(ConfigError, "activations", r"256 bytes per token \(0\.25KiB/token\).*got 255 bytes"):
        patch_model(model, {"activations": ActivationBudget(bytes_per_token=255)})
    assert {e.activations for e in patch_model(model, {"activations": "256B/token"}).patched} == {"recompute"}


def test_a_budget_needs_to_know_the_experts_per_token() -> None:
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        del layer.mlp.top_k, layer.mlp.gate.top_k
    model.config.num_experts_per_tok = 0
    with refused(ConfigError, "activations", r"layers\.0\.mlp\.experts"):
        patch_model(model, {"activations": "48KiB/token"})


def test_only_patch_model_divides_budgets() -> None:
    for activations in ("48KiB/token", {"modules": {"*": "fp8"}}):
        with refused(ConfigError, "activations", "patch_model resolves"):
            register_experts_implementation({"activations": activations}, name="neuron_moe_budget")

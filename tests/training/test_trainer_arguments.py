"""The options as training arguments: command line, YAML, checks."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_neuron_moe import (
    ActivationBudget,
    ActivationPolicy,
    NeuronMoEArguments,
    NeuronMoEConfig,
    NeuronMoETrainingArguments,
)
from hf_neuron_moe.errors import ConfigError
from tests.refusals import refused

POLICY = {"keep": ["gate_pre"], "modules": {"*.0.mlp": "recompute"}}


def parse(*words: str) -> NeuronMoETrainingArguments:
    (arguments,) = HfArgumentParser(NeuronMoETrainingArguments).parse_args_into_dataclasses(
        [*words, "--use_cpu"], look_for_args_file=False
    )
    return arguments


def test_the_command_line_gives_the_configuration(tmp_path: Path) -> None:
    arguments = parse(
        *("--output_dir", str(tmp_path), "--learning_rate", "1e-3", "--neuron_precision", "mxfp8"),
        *("--neuron-weights", "kernel", "--neuron_block_size", "256", "--neuron_activations", "recompute"),
        *("--neuron_exclude", "*.0.*", "*.1.*", "--no_neuron_strict", "--neuron_health_steps", "7"),
        *("--neuron_fallback", "torch"),
    )
    assert arguments.learning_rate == 1e-3
    assert arguments.neuron_config() == NeuronMoEConfig(
        precision="mxfp8", weights="kernel", block_size=256, activations="recompute", fallback="torch"
    )
    assert arguments.neuron_exclude == ["*.0.*", "*.1.*"]
    assert arguments.neuron_include is None
    assert (arguments.neuron_patch, arguments.neuron_strict, arguments.neuron_health_steps) == (True, False, 7)


def test_defaults_are_those_of_the_configuration(tmp_path: Path) -> None:
    arguments = parse("--output_dir", str(tmp_path))
    assert arguments.neuron_config() == NeuronMoEConfig()
    assert arguments.neuron_health_steps == 100
    assert not parse("--no_neuron_patch").neuron_patch


def test_every_option_of_the_configuration_is_a_field_with_its_default() -> None:
    of_arguments = {each.name: each.default for each in fields(NeuronMoEArguments)}
    of_config = {f"neuron_{each.name}": each.default for each in fields(NeuronMoEConfig)}
    assert of_config.items() <= of_arguments.items()
    others = {"patch", "include", "exclude", "strict", "health_steps", "guard", "guard_steps"}
    assert of_arguments.keys() - of_config.keys() == {f"neuron_{name}" for name in others}


def test_an_activation_policy_comes_as_json_or_as_a_mapping(tmp_path: Path) -> None:
    expected = ActivationPolicy(keep=("gate_pre",), modules={"*.0.mlp": "recompute"})
    assert parse("--neuron_activations", json.dumps(POLICY)).neuron_config().activations == expected
    (from_dict,) = HfArgumentParser(NeuronMoETrainingArguments).parse_dict(
        {"use_cpu": True, "neuron_activations": POLICY}
    )
    assert from_dict.neuron_config().activations == expected


def test_yaml_gives_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nmax_steps: 3\nneuron_precision: fp32\nneuron_include: '*.mlp'\n"
        "neuron_activations: {keep: [gate_pre], modules: {'*.0.mlp': recompute}}\nneuron_health_steps: 0\n"
    )
    (arguments,) = HfArgumentParser(NeuronMoETrainingArguments).parse_yaml_file(file)
    assert (arguments.max_steps, arguments.neuron_health_steps) == (3, 0)
    assert arguments.neuron_include == ["*.mlp"]  # one glob may stand alone
    assert arguments.neuron_config().precision == "fp32"
    assert json.loads(arguments.to_json_string())["neuron_precision"] == "fp32"


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("neuron_precision", "mxpf8", "Did you mean 'mxfp8'?"),
        ("neuron_weights", "kernal", "Did you mean 'kernel'?"),
        ("neuron_backend", "pytorch", "Did you mean 'torch'?"),
        ("neuron_block_size", 500, "block_size must be one of"),
        ("neuron_activations", "recompte", "Did you mean 'recompute'?"),
        ("neuron_activations", "{keep: up}", "a JSON object"),
        ("neuron_include", [], "at least one glob"),
        ("neuron_exclude", [3], "globs over module names"),
        ("neuron_strict", "no", "a bool"),
        ("neuron_health_steps", -1, "a number of steps"),
        ("neuron_health_steps", 1.5, "a number of steps"),
    ],
)
def test_a_misspelt_value_is_refused_when_the_arguments_are_made(
    option: str, value: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refusal:
        NeuronMoETrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{option: value})
    assert text in str(refusal.value)


def test_no_globs_exclude_nothing(tmp_path: Path) -> None:
    assert NeuronMoETrainingArguments(str(tmp_path), neuron_exclude=[]).neuron_exclude == []


def test_a_misspelt_field_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with refused(ConfigError, "argument name", "Did you mean 'neuron_precision'"):
        NeuronMoETrainingArguments(str(tmp_path), neuron_precison="fp32")  # type: ignore[call-arg]
    with refused(ConfigError, "argument name", "Did you mean 'eval_strategy'"):
        NeuronMoETrainingArguments(str(tmp_path), eval_stategy="no")  # type: ignore[call-arg]
    with refused(ConfigError, "argument name", "Did you mean 'neuron_exclude'", where="NeuronMoEArguments"):
        NeuronMoEArguments(neuron_excludes=["*"])  # type: ignore[call-arg]
    assert "neuron_precision" in inspect.signature(NeuronMoETrainingArguments).parameters


def test_the_fields_go_with_other_training_arguments(tmp_path: Path) -> None:
    @dataclass
    class Other(TrainingArguments):
        max_length: int = 3

    @dataclass
    class Both(NeuronMoEArguments, Other):
        pass

    both = Both(output_dir=str(tmp_path), use_cpu=True, max_length=5, neuron_precision="fp32")
    assert (both.max_length, both.neuron_config().precision) == (5, "fp32")
    assert both.device.type == "cpu"  # TrainingArguments' own preparation took place


def test_a_map_of_precisions_may_be_a_file_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plan", "plan.txt", "plan.yaml", "bf16"):
        Path(name).write_text('"*": mxfp8\n"layers.0.*": bf16\n')
        found = parse("--neuron_precision", name).neuron_config().precision
        assert found == ("bf16" if name == "bf16" else {"*": "mxfp8", "layers.0.*": "bf16"})


def test_policy_objects_become_plain_since_the_trainer_writes_its_arguments_as_json(tmp_path: Path) -> None:
    policy = ActivationPolicy(keep="minimal", modules={"*.0.*": "full"})
    for given in (policy, ActivationBudget(bytes_per_token=4096)):
        args = NeuronMoETrainingArguments(str(tmp_path), neuron_activations=given)
        assert json.loads(args.to_json_string())["neuron_activations"] == given.to_dict()
        assert args.neuron_config().activations == given


@pytest.mark.parametrize("text", ["neuron_guard: off", "neuron_guard: 'off'", "neuron_guard: no"])
def test_the_guard_s_off_is_a_word_in_yaml_too(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"output_dir: {tmp_path}\nuse_cpu: true\n{text}\n")
    (arguments,) = HfArgumentParser(NeuronMoETrainingArguments).parse_yaml_file(str(tmp_path / "a.yaml"))
    assert arguments.neuron_guard == "off"
    with refused(ConfigError, "neuron_guard", "one of off, warn, stop"):
        NeuronMoEArguments(neuron_guard=True)

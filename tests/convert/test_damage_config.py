"""A ``config.json`` that is no JSON, or that describes no model: one line that names the file, never a defect."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

from hf_neuron_moe.cli.main import main
from hf_neuron_moe.convert import assign, convert_checkpoint
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.convert.config_values import ALWAYS_LAYERS, Room, _room, reason_of, wrong_values
from hf_neuron_moe.errors import ConversionError, naming
from tests.refusals import refused

REFUSED, DAMAGE = 1, 3
"""Exit codes that docs/convert.md documents."""

UNREADABLE = {
    "deep": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe{}",
    "list": b"[]",
    "cut off": b'{"model_type": "mixtral"',
}

UNACCEPTABLE = {
    "activation": ({"hidden_act": "foo"}, "", "'foo'"),
    "no size": ({"hidden_size": None}, "", "hidden_size"),
    "padding token": ({"pad_token_id": 10**9}, "", "AssertionError: Padding_idx must be"),
    "rope": ({"rope_parameters": {"rope_type": "foo"}}, "", "'foo'"),
    "architectures": (
        {"architectures": 5},
        "",
        "subscriptable" if Version(__version__) >= Version("5.18") else "got int",
    ),
    "overflow of a field of a family": ({"sliding_window": 8, "head_dim": 2**31 - 1}, "", "got "),
    "text for a size": ({"hidden_size": "x"}, "hidden_size", "'x'"),
    "float for a size": ({"hidden_size": 64.5}, "hidden_size", "64.5"),
    "endless size": ({"hidden_size": 10**30}, "hidden_size", "1" + "0" * 30),
    "half a position": ({"max_position_embeddings": 64.5}, "max_position_embeddings", "64.5"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads", "0"),
    "negative experts": ({"num_local_experts": -3}, "num_local_experts", "-3"),
    "nested": ({"vision_config": {"hidden_size": -1}}, "vision_config.hidden_size", "-1"),
    "dtype": ({"dtype": "evil"}, "dtype", "'evil'"),
    "dtype of torch that is none": ({"torch_dtype": "nn"}, "torch_dtype", "'nn'"),
    "quantization": ({"quantization_config": [1]}, "quantization_config", "[1]"),
    "layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers", "1000000"),
    "labels": ({"num_labels": 10**9}, "num_labels", "1000000000"),
    "long list": ({"bad_words_ids": [[1]] * 10_001}, "bad_words_ids", "10,001"),
    "family": ({"model_type": "mixtrall"}, "model_type", "'mixtrall'"),
    "family that is no text": ({"model_type": ["mixtral"]}, "model_type", "['mixtral']"),
}
"""Values, the field that the message names (none where only transformers knows), and the beginning of what it got."""


@pytest.mark.parametrize("family", sorted({"glm5_next_text", "musicflamingo", "mixtral"} & set(CONFIG_MAPPING)))
def test_what_a_family_itself_writes_is_acceptable(family: str) -> None:
    """One has heads without rotary dimensions, ``head_dim`` 0; another takes its number of positions from a float."""
    content = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    assert list(wrong_values(content, Room())) == []


def refusal(command: list[str], monkeypatch, capsys) -> tuple[int, str]:
    """Exit code and message of a command that fails."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["hf-neuron-moe", *command])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    # What transformers says on its own about a configuration stands before the command's one line.
    lines = [line for line in err.splitlines() if line.startswith(f"{command[0]}: ")]
    assert out == "" and len(lines) == 1 and "Traceback" not in err and "internal error" not in err
    return caught.value.code, lines[0]


@pytest.mark.parametrize("command", ["convert", "plan"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_json_object_is_damage(kind, command, checkpoint, tmp_path, monkeypatch, capsys):
    source = checkpoint("mixtral")
    (source / "config.json").write_bytes(UNREADABLE[kind])
    target = [str(tmp_path / "dst")] if command == "convert" else []
    code, line = refusal([command, str(source), *target], monkeypatch, capsys)
    assert code == DAMAGE and "config.json must be" in line
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", UNACCEPTABLE)
def test_values_that_make_no_model_are_refused(kind, checkpoint, tmp_path, monkeypatch, capsys):
    source = checkpoint("mixtral")
    values, field, shown = UNACCEPTABLE[kind]
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    code, line = refusal(["convert", str(source), str(tmp_path / "dst")], monkeypatch, capsys)
    assert code == REFUSED and "frame #" not in line and "Exception raised" not in line
    if field:
        assert f"config.json: {field} must be " in line and f", got {shown}" in line
    else:
        assert "config.json must be the configuration of a model, with values" in line and shown in line
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


def test_the_reason_of_torch_is_its_first_line():
    with pytest.raises(TypeError) as caught:
        torch.empty(10**30, device="meta")
    assert "frame #" in str(caught.value)
    assert reason_of(caught.value).endswith("Overflow when unpacking long long")


def test_a_long_model_type_leaves_the_message_whole(checkpoint):
    source = checkpoint("llama")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "llama" * 1000}))
    expected = refused(ConversionError, f"{path}: model_type", "Custom code from a checkpoint is never run")
    with expected as caught, naming("plan"):
        build_meta_model(source)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_model_type_of_custom_code_with_a_known_class(checkpoint, tmp_path):
    """As Kimi-K2's, which names DeepSeek-V3's class: the value that the message gives makes it a source."""
    source = checkpoint("mixtral")
    path = source / "config.json"
    content = json.loads(path.read_text())
    custom = {"model_type": "mix_2", "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"}}
    path.write_text(json.dumps(content | custom))
    says = r"transformers' own MixtralForCausalLM, set model_type to 'mixtral'\.$"
    with refused(ConversionError, f"{path}: model_type", says):
        convert_checkpoint(source, tmp_path / "dst")
    for architectures in (None, [], ["Llama4ForCausalLM"], [3], "MixtralForCausalLM", [["MixtralForCausalLM"]]):
        path.write_text(json.dumps(content | custom | {"architectures": architectures}))
        with refused(ConversionError, f"{path}: model_type") as caught:
            convert_checkpoint(source, tmp_path / "dst")
        assert "set model_type" not in str(caught.value), architectures
    path.write_text(json.dumps(content | custom | {"model_type": "mixtral"}))
    convert_checkpoint(source, tmp_path / "dst")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "dst")).__name__ == "MixtralForCausalLM"


@pytest.mark.parametrize(
    ("shard", "command"), [(None, "plan"), ("100KB", "plan"), (None, "estimate"), (None, "doctor")]
)
def test_layers_are_compared_with_names_where_no_weights_are_needed(shard, command, checkpoint, monkeypatch, capsys):
    """Of an index alone, too: the shards need not be there."""
    source = checkpoint("mixtral", **({"shard": shard} if shard else {}))
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1000}))
    for file in source.glob("model-*.safetensors"):
        file.unlink()
    options = ["--tokens", "8"] if command == "estimate" else []
    with monkeypatch.context() as patched:
        patched.setattr(assign, "_on_meta", None)  # nothing is built
        code, line = refusal([command, str(source), *options], monkeypatch, capsys)
    assert code == REFUSED and "config.json: num_hidden_layers must be at most 256 with these weights" in line


def test_weights_that_cannot_be_read_do_not_keep_a_plan_from_being_made(checkpoint):
    source = checkpoint("mixtral")
    (source / "model.safetensors").write_bytes(b"x")
    assert build_meta_model(source).config.num_hidden_layers == 2


def test_a_configuration_that_lies_elsewhere_is_not_followed(checkpoint, tmp_path, monkeypatch, capsys):
    source = checkpoint("llama")
    outside: Path = (source / "config.json").rename(tmp_path / "config.json")
    (source / "config.json").symlink_to(outside)
    code, line = refusal(["convert", str(source), str(tmp_path / "dst")], monkeypatch, capsys)
    assert code == DAMAGE and "config.json" in line and "a link to" in line


def test_labels_and_lists_have_a_bound() -> None:
    for count, wrong in ((32_768, 0), (32_769, 1)):
        assert len([*wrong_values({"num_labels": count}, Room())]) == wrong
    for count, wrong in ((10_000, 0), (10_001, 1)):
        assert len([*wrong_values({"bad_words_ids": [1] * count}, Room())]) == wrong


def test_a_name_with_a_large_number_is_no_large_model() -> None:
    assert _room(["model.layers.999.weight"], None).layers == ALWAYS_LAYERS
    assert _room([f"model.layers.{layer}.weight" for layer in range(999)], None).layers == 999

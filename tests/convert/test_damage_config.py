"""A ``config.json`` that is no JSON, or that describes no model: one line that names the file, never a defect."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hf_neuron_moe.cli.main import main

REFUSED, DAMAGE = 1, 3
"""Exit codes that docs/convert.md documents."""

UNREADABLE = {
    "deep": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe{}",
    "list": b"[]",
    "cut off": b'{"model_type": "mixtral"',
}

UNACCEPTABLE = {
    "activation": ({"hidden_act": "foo"}, "'foo'"),
    "text for a size": ({"hidden_size": "x"}, "hidden_size"),
    "no size": ({"hidden_size": None}, "hidden_size"),
    "negative experts": ({"num_local_experts": -3}, "-3"),
    "padding token": ({"pad_token_id": 10**9}, "AssertionError"),
    "rope": ({"rope_parameters": {"rope_type": "foo"}}, "'foo'"),
    "dtype": ({"dtype": "foo"}, "foo"),
    "architectures": ({"architectures": 5}, "subscriptable"),
}


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


@pytest.mark.parametrize("kind", UNACCEPTABLE)
def test_values_that_make_no_model_are_refused(kind, checkpoint, tmp_path, monkeypatch, capsys):
    source = checkpoint("mixtral")
    values, told = UNACCEPTABLE[kind]
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    code, line = refusal(["convert", str(source), str(tmp_path / "dst")], monkeypatch, capsys)
    assert code == REFUSED and "config.json must be the configuration" in line and told in line
    assert {path.name for path in tmp_path.iterdir()} == {source.name}


def test_a_configuration_that_lies_elsewhere_is_not_followed(checkpoint, tmp_path, monkeypatch, capsys):
    source = checkpoint("llama")
    outside: Path = (source / "config.json").rename(tmp_path / "config.json")
    (source / "config.json").symlink_to(outside)
    code, line = refusal(["convert", str(source), str(tmp_path / "dst")], monkeypatch, capsys)
    assert code == DAMAGE and "config.json" in line and "a link to" in line

"""The command line: what it prints, how it ends, and that asking for help is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_neuron_moe.cli.main import main
from hf_neuron_moe.errors import ConversionError


class Result(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs the command in this process; importing torch once more per call takes seconds."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["hf-neuron-moe", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    folder = tmp_path_factory.mktemp("model") / "llama"
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"], ["plan", "--help"], ["export", "--help"]])
def test_help_imports_no_torch(arguments, repo_root):
    code = (
        "import sys\n"
        f"sys.argv = ['hf-neuron-moe', *{arguments!r}]\n"
        "from hf_neuron_moe.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('HEAVY', sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo_root, check=True)
    assert "Usage: hf-neuron-moe" in result.stdout
    assert result.stdout.splitlines()[-1] == "HEAVY []"


def test_convert_and_export_round_trip(model_dir, run, tmp_path):
    converted = run("convert", model_dir, tmp_path / "dst", "--precision", "bf16", "--layout", "kernel")
    assert converted.code == 0, converted.err
    assert "2 weights converted" in converted.out
    assert converted.err == ""
    exported = run("export", tmp_path / "dst", tmp_path / "back", "--json")
    assert exported.code == 0, exported.err
    assert json.loads(exported.out)["inexact_tensors"] == 0
    original, back = model_dir / "model.safetensors", tmp_path / "back" / "model.safetensors"
    assert back.read_bytes() == original.read_bytes()


def test_refusal_is_one_line_with_exit_code_1(model_dir, run, tmp_path):
    (tmp_path / "dst").mkdir()
    result = run("convert", model_dir, tmp_path / "dst")
    assert (result.code, result.out) == (1, "")
    assert result.err.count("\n") == 1
    assert "--force" in result.err
    as_json = run("convert", model_dir, tmp_path / "dst", "--json")
    assert as_json.code == 1
    assert json.loads(as_json.out)["error"] == "ConversionError"
    with pytest.raises(ConversionError):
        run("--debug", "convert", model_dir, tmp_path / "dst")
    assert list((tmp_path / "dst").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [(["convert", "a", "b", "--precison", "bf16"], "--precision"), (["convert", "a", "b", "--layout", "x"], "fused")],
)
def test_wrong_usage_is_exit_code_2_with_a_hint(arguments, hint, run):
    result = run(*arguments)
    assert result.code == 2
    assert hint in result.err


def test_plan_needs_only_the_configuration(model_dir, run, tmp_path):
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    text = run("plan", tmp_path)
    assert text.code == 0, text.err
    assert "1 patched, 0 skipped, 0 refused" in text.out
    as_json = json.loads(run("plan", tmp_path, "--precision", "mxfp8", "--json").out)
    assert as_json["config"]["precision"] == "mxfp8"
    assert [entry["name"] for entry in as_json["entries"]] == ["model.layers.0.mlp"]

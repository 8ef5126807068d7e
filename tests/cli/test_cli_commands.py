"""The command line: what it prints, how it ends, and that asking for help is cheap."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_neuron_moe._version import __version__
from hf_neuron_moe.cli.main import COMMANDS


def test_help_imports_no_torch(repo_root):
    code = (
        "import sys\n"
        "from hf_neuron_moe.cli.main import main\n"
        f"for command in ([], *([name] for name in {list(COMMANDS)!r})):\n"
        "    sys.argv = ['hf-neuron-moe', *command, '--help']\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code, end.code\n"
        "    heavy = sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules))\n"
        "    print('LOADED', *command, heavy, flush=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo_root, check=True)
    loaded = [line for line in result.stdout.splitlines() if line.startswith("LOADED")]
    assert loaded == ["LOADED []", *(f"LOADED {name} []" for name in COMMANDS)]
    shown = result.stdout.split("LOADED")
    assert all(f"Usage: hf-neuron-moe {name}" in each for name, each in zip(["", *COMMANDS], shown[:-1], strict=True))


def test_the_list_of_commands_reads_no_distributions(repo_root):
    """Importing what reads them takes a tenth of its time."""
    code = "import sys\nfrom hf_neuron_moe.cli.main import application\napplication()\n"
    code += "print('importlib.metadata' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo_root, check=True)
    assert result.stdout == "False\n"


def test_help_is_quick(repo_root):
    code = "import sys; sys.argv = ['hf-neuron-moe', '--help']\nfrom hf_neuron_moe.cli.main import main; main()"
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=repo_root, check=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    # Processor time, which hardly depends on what else runs: a tenth to a quarter of a second, where 0.4 is promised.
    assert min(seconds) < 0.8, seconds


def test_the_version_is_told(run):
    assert run("--version") == (0, f"hf-neuron-moe {__version__}\n", "")


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


def test_refusal_is_one_line_with_the_exit_code_of_its_kind(model_dir, run, tmp_path):
    (tmp_path / "dst").mkdir()
    result = run("convert", model_dir, tmp_path / "dst")
    assert (result.code, result.out) == (4, "")
    assert result.err.count("\n") == 1
    assert "--force" in result.err
    as_json = run("convert", model_dir, tmp_path / "dst", "--json")
    assert (as_json.code, as_json.err) == (4, "")
    shown = json.loads(as_json.out)
    assert (shown["ok"], shown["error"], shown["kind"], shown["exit_code"]) == (
        False,
        "DestinationError",
        "destination",
        4,
    )
    assert shown["message"] == result.err.strip()
    debug = run("--debug", "convert", model_dir, tmp_path / "dst")
    assert debug.code == 4 and "DestinationError" in debug.err and debug.err.endswith(result.err)
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
    as_json = json.loads(run("plan", tmp_path, "--precision", "mxfp8", "--backend", "torch-grouped", "--json").out)
    assert as_json["ok"] is True
    assert as_json["config"]["backend"] == "torch-grouped"
    assert as_json["config"]["precision"] == "mxfp8"
    assert [entry["name"] for entry in as_json["entries"]] == ["model.layers.0.mlp"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", ["plan", "convert", "export", "verify", "inspect", "doctor", "estimate"])
def test_what_is_no_folder_is_named_for_what_it_is(command, model_dir, run, tmp_path):
    rest = [tmp_path / "dst"] if command in ("convert", "export") else []
    rest = ["--tokens", 8] if command == "estimate" else rest
    cases = {  # the Hub is its empty local cache
        tmp_path / "nowhere": "got no such folder. Check the spelling",
        Path(
            "some-org/some-model"
        ): "got no such folder.* and from the Hub.*unset the `HF_HUB_OFFLINE`.*hf download some-org/some-model",
        model_dir / "config.json": f"got a file. Give the folder that holds it: {re.escape(str(model_dir))}",
    }
    options = tmp_path.parent / f"{tmp_path.name}.yaml"
    options.touch()
    cases[options] = "got a YAML file. Give the model's folder, which the files of `train` name in `model:`"
    if command in ("plan", "doctor", "estimate"):  # take the file too
        del cases[model_dir / "config.json"]
    for given, shown in cases.items():
        result = run(command, given, *rest)
        assert (result.code, result.out) == (1 if given.is_file() else 3, "")
        assert re.match(rf"{command}: {re.escape(str(given))} must be .*{shown}", result.err), result.err
        assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_wrong_kind_is_sent_to_the_right_command(model_dir, run, tmp_path):
    assert run("convert", model_dir, tmp_path / "dst", "--precision", "mxfp8").code == 0
    (tmp_path / "empty").mkdir()
    for command, rest in (("plan", []), ("convert", [tmp_path / "new"])):
        shown = run(command, tmp_path / "dst", *rest)
        assert shown.code == 1
        assert re.match(
            rf"{command}: .*wrote \(precision mxfp8, layout kernel\)\. .*`hf-neuron-moe export .*dst NEW`", shown.err
        ), shown.err
        assert run(command, tmp_path / "empty", *rest).err.startswith(f"{command}: ")
    stock = run("export", model_dir, tmp_path / "new")
    assert (stock.code, stock.err.count("nothing to export")) == (1, 1)
    assert "there is nothing to verify." in run("verify", model_dir).err
    assert run("export", tmp_path / "empty", tmp_path / "new").err.startswith("export: ")
    taken = run("export", tmp_path / "dst", tmp_path / "empty")
    assert taken.code == 4
    assert taken.err.startswith("export: ") and "--force" not in taken.err
    assert not (tmp_path / "new").exists()


def test_damage_is_reported_under_the_command_that_met_it(model_dir, run, tmp_path):
    assert run("convert", model_dir, tmp_path / "dst").code == 0
    (shard,) = (tmp_path / "dst").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-3])
    shown = run("export", tmp_path / "dst", tmp_path / "back")
    assert shown.code == 3
    assert shown.err.startswith(f"export: {shard.name}")


def test_rounding_is_told_and_counted(model_dir, run, tmp_path):
    LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).save_pretrained(tmp_path / "exact")
    assert "rounded" not in run("convert", tmp_path / "exact", tmp_path / "one", "--precision", "bf16").out
    model = LlamaForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, :2] = 1 + 2**-12
    model.save_pretrained(tmp_path / "wide")
    shown = run("convert", tmp_path / "wide", tmp_path / "two", "--precision", "bf16")
    assert shown.code == 0, shown.err
    assert "note: 2 of 6,144 F32 values in 1 tensor (first: model.layers.0.mlp.down_proj.weight)" in shown.out
    as_json = run("convert", tmp_path / "wide", tmp_path / "three", "--precision", "bf16", "--json")
    assert json.loads(as_json.out)["rounded_values"] == 2

"""scripts/finetune.py, the shortest script of one's own: it trains, and says what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM


def ran(root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "finetune.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)


@pytest.mark.slow
def test_other_arguments_are_answered_with_those_it_takes(repo_root: Path) -> None:
    found = ran(repo_root, "--model", "model", "--train_files", "t.txt")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.splitlines()[-1] == "usage: python scripts/finetune.py MODEL DATA.jsonl OUTPUT_DIR"


@pytest.mark.slow
def test_the_lines_at_its_top_train_a_model(repo_root: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make = [sys.executable, "-m", "hf_neuron_moe", "tiny-model", "mixtral", str(model)]
    subprocess.run(make, check=True, capture_output=True, timeout=120)
    found = ran(repo_root, model, "data/sotu/eval.jsonl", tmp_path / "run")
    assert found.returncode == 0, found.stderr[-2000:]
    assert "saved_bytes" in found.stdout and "train_loss" in found.stdout
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "run"))
    name = "model.layers.0.mlp.experts.down_proj"
    assert not after.get_parameter(name).equal(before.get_parameter(name))

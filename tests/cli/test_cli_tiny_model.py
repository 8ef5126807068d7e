"""The command that makes a model for the others."""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_neuron_moe.cli.exit_codes import DISK
from hf_neuron_moe.cli.tiny_model import FAMILIES
from hf_neuron_moe.demo import tiny_model
from tests.cli.conftest import Result


def test_a_tiny_model_is_ready_for_chat_data(run: Callable[..., Result], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = run("tiny-model", "llama", ".cache/tiny-llama")
    assert made == (0, ".cache/tiny-llama: a tiny llama of random weights\n", "")
    chats = [[{"role": role, "content": "Hi"} for role in ("user", "assistant")]] * 4
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = ("--train_files", "chats.jsonl", "--eval_files", "chats.jsonl", "--assistant_only_loss", "true")
    checked = run("train", "tiny-llama", *options, "--packing_strategy", "bfd", "--check")
    assert (checked.code, checked.err) == (0, ""), checked
    taken = run("tiny-model", "llama", ".cache/tiny-llama")
    assert taken.code == 4 and "a new or empty folder, got one with files" in taken.err
    assert "Did you mean 'llama'?" in run("tiny-model", "lama", "other").err
    assert not Path("other").exists()
    assert set(FAMILIES) == set(tiny_model.FAMILIES)


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_takes_no_more_leaves_nothing(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if there:
        folder.mkdir()
    command = [sys.executable, "-m", "hf_neuron_moe", "tiny-model", "llama", str(folder)]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=120)
    assert ended.returncode == DISK.code and ended.stderr.splitlines()[-1].startswith(
        "Error while serializing: I/O error"
    )
    assert folder.exists() == there and not (there and any(folder.iterdir()))

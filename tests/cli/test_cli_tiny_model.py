"""The command that makes a model for the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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

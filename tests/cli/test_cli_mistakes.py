"""All mistakes that are found together are told together, each with its file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_neuron_moe.demo.tiny_model import make_tiny_model
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, SourceDamageError
from hf_neuron_moe.finetune.mistakes import pass_all, raise_together
from tests.cli.conftest import Result

STAGES = {
    "spelling": (
        ("learning_rate: fast", "learning_rate must be a number, got 'fast'"),
        ("max_lenght: 12", "key must be an option"),
        ("dtype: null", "dtype must be a value, got null"),
    ),
    "rules": (
        ("per_device_train_batch_size: 0", "per_device_train_batch_size must be at least 1"),
        ("lora_rank: -1", "lora_rank must be 0 or a positive rank"),
        ("eval_strategy: steps", "eval_strategy must be used with eval_files"),
    ),
    "machine": (
        ("eval_files: [nope.jsonl]", "eval_files must be existing files"),
        ("report_to: [wandb]", "report_to must be none, or what is installed"),
        ("activation_offloading: true", "activation_offloading must be false"),
        ("neuron_backend: neuron", "neuron_backend must be"),
        ("tokenizer: ./nope", "tokenizer must be an existing folder"),
    ),
}
"""What is looked at together, before the next of these: a line of a file, and how the message about it begins."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_mistake_of_a_stage_is_told_with_its_line(
    run: Callable[..., Result], stage: str, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    Path("rows.txt").write_text("a\n", encoding="utf-8")
    make_tiny_model("llama", Path("model"), num_hidden_layers=1)
    lines = ["use_cpu: true", "model: model", "train_files: [rows.txt]", *(line for line, _ in STAGES[stage])]
    Path("mine.yaml").write_text("\n".join(lines), encoding="utf-8")
    result = run("train", "mine.yaml", *(["--json"] if as_json else []))
    found = result.err.splitlines()
    if as_json:
        facts = json.loads(result.out)
        found = [facts["message"], *facts["also"]]
    assert result.code == 2 and len(found) == len(STAGES[stage])
    wanted = {f"mine.yaml, line {number}: {says}" for number, (_, says) in enumerate(STAGES[stage], 4)}
    assert {says for says in wanted if any(text.startswith(says) for text in found)} == wanted


def test_the_first_is_raised_once_each_and_what_is_right_gives_its_result() -> None:
    def refuse(kind: type[NeuronMoEError], argument: str) -> None:
        raise kind.about(argument, "right", "wrong", "Correct it.")

    places = {"a": "f.yaml, line 1", "b": "f.yaml, line 2"}
    with pytest.raises(SourceDamageError, match=r"^f.yaml, line 2: b must be right") as caught:
        pass_all(
            places,
            lambda: 1,
            lambda: refuse(SourceDamageError, "b"),
            lambda: refuse(ConfigError, "a"),
            lambda: pass_all(places, lambda: refuse(ConfigError, "a"), lambda: refuse(ConfigError, "c")),
        )
    of_a, of_c = "f.yaml, line 1: a must be right, got wrong. Correct it.", "c must be right, got wrong. Correct it."
    assert caught.value.__notes__ == [of_a, of_c]
    assert pass_all(places, lambda: 1, lambda: "two") == [1, "two"]
    raise_together(places, [])

"""All mistakes that are found together are told together, each with its file and line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_neuron_moe.demo.tiny_model import make_tiny_model
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, SourceDamageError
from hf_neuron_moe.finetune.mistakes import pass_all, raise_together
from hf_neuron_moe.output_files import WRITABLE_FOLDER
from tests.cli.conftest import Result

STAGES = {
    "spelling": (
        ("learning_rate: fast", "learning_rate must be a number, got 'fast'"),
        ("max_lenght: 12", "key must be an option"),
        ("dtype: null", "dtype must be a value, got null"),
        ("key: 1", "key must be an option"),
        ("warmup_ratio: 0.1", "key must be an option"),
        ("plot_loss: true", "key must be an option"),
        ("accelerator_config: 5", "accelerator_config must be names and values, got 5"),
        (f"seed: {2**70}", "seed must be a whole number below 2**63"),
        ("no_neuron_patch: true", "no_neuron_patch must be there without neuron_patch, got both"),
        ("neuron_patch: true", ""),
    ),
    "twice": (
        ("seed: 1", ""),
        ("seed: 1", "seed must be there once, got a second time, after line 4"),
        ("max_steps: 1", ""),
        ("max_steps: 2", "max_steps must be there once, got a second time, after line 6"),
    ),
    "rules": (
        ("per_device_train_batch_size: 0", "per_device_train_batch_size must be at least 1"),
        ("lora_rank: -1", "lora_rank must be 0 or a positive rank"),
        ("eval_strategy: steps", "eval_strategy must be used with eval_files"),
        ("neuron_precision: mxfp9", "neuron_precision must be one of"),
        ("neuron_guard: zz", "neuron_guard must be one of"),
        ("neuron_backend: foo", "neuron_backend must be one of"),
        ("bf16: true", "bf16, fp16 must be what TRL and transformers take"),
        ("fp16: true", ""),
        ("accelerator_config: {foo: 1}", "accelerator_config must be what TRL"),
    ),
    "machine": (
        ("eval_files: [nope.jsonl]", "eval_files must be existing files"),
        ("report_to: [wandb]", "report_to must be none, or what is installed"),
        ("activation_offloading: true", "activation_offloading must be false"),
        ("neuron_backend: neuron", "neuron_backend must be"),
        ("tokenizer: ./nope", "tokenizer must be an existing folder"),
    ),
    "names": (
        (f"eval_files: [{'z' * 300}.jsonl]", "eval_files must be existing files"),
        (f"tokenizer: {'z' * 300}", "tokenizer must be an existing folder or a hub id, got a name that no folder"),
        (f"resume_from_checkpoint: {'z' * 300}", "resume_from_checkpoint must be a checkpoint folder"),
        (f"output_dir: {'z' * 300}", f"output_dir must be {WRITABLE_FOLDER}, got '{'z' * 300}' (a name too long)"),
    ),
    "characters": (
        ('output_dir: "a\\0b"', f"output_dir must be {WRITABLE_FOLDER}, got 'a\\x00b' (characters"),
        ("report_to: [foo]", "report_to must be one of"),
    ),
}
"""What is looked at together: lines of a file, and how the message about each begins, if there is one."""


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
    wanted = {f"mine.yaml, line {number}: {says}" for number, (_, says) in enumerate(STAGES[stage], 4) if says}
    assert result.code == 2 and len(found) == len(wanted)
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


DAMAGES = [
    ("config.json", None, "model must be a folder with config.json, got 'model' without it"),
    (
        "config.json",
        '{"model_type":',
        "model must be one whose configuration transformers can read, got model/config.json",
    ),
    ("config.json", '{"model_type": "foo"}', "model must be one whose configuration transformers can read"),
    (
        "config.json",
        '{"model_type": "llama", "hidden_act": "SiLU"}',
        "model must be one whose activation transformers has, got hidden_act 'SiLU'",
    ),
    ("model.safetensors", "x", "model/model.safetensors must be a safetensors file as long as its header says"),
    ("model.safetensors", None, "model must be a folder with weights, got 'model' without any"),
]


@pytest.mark.parametrize(("name", "content", "says"), DAMAGES)
def test_what_is_wrong_with_a_model_s_files_has_the_model_s_line(
    run: Callable[..., Result],
    name: str,
    content: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.txt").write_text("a\n", encoding="utf-8")
    make_tiny_model("llama", Path("model"), num_hidden_layers=1)
    Path("model", name).unlink() if content is None else Path("model", name).write_text(content, encoding="utf-8")
    Path("mine.yaml").write_text("use_cpu: true\nmodel: model\ntrain_files: [rows.txt]\n", encoding="utf-8")
    result = run("train", "mine.yaml", "--check")
    assert result.code in (2, 3) and result.err.startswith(f"mine.yaml, line 2: {says}") and result.err.count("\n") == 1


def test_a_failure_of_standard_output_is_told_on_the_other_one(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path / "model", num_hidden_layers=1)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hf_neuron_moe", "plan", str(tmp_path / "model"), "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 5 and ended.stderr == "[Errno 28] No space left on device\n"

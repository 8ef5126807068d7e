"""The command ``train``: lists, checks, one line per mistake, one JSON object."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_neuron_moe.finetune import configs
from tests.byte_tokenizer import save_byte_tokenizer
from tests.tiny_models import tiny_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes the file of a short run."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(tiny_config("llama", vocab_size=256)).save_pretrained(model)
    save_byte_tokenizer(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "!"
    tokenizer.save_pretrained(model)
    (tmp_path / "text.jsonl").write_text('{"text": "We the people"}\n' * 8, encoding="utf-8")

    def write(**keys: Any) -> Path:
        given = {"model": str(model), "train_files": str(tmp_path / "text.jsonl"), "output_dir": str(tmp_path / "out")}
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(given | {"max_steps": 1, "use_cpu": True} | keys, sort_keys=False))
        return file

    return write


def test_configurations_are_listed_and_shown(run: Any) -> None:
    listed = json.loads(run("train", "--list-configs", "--json").out)
    assert listed["ok"] and listed["configs"].keys() == set(configs.names()) and all(listed["configs"].values())
    keys = json.loads(run("train", "--list-keys", "dpo", "--json").out)["keys"]
    assert {"model", "beta", "neuron_precision"} <= set(keys)
    shown = run("train", "--list-configs")
    assert shown.code == 0 and "mixtral-8x7b " in shown.out and "distributed/deepseek-v3-trn2" in shown.out
    shown = run("train", "--show-config", "mixtral-8x7b")
    assert shown.code == 0 and yaml.safe_load(shown.out)["model"] == "mistralai/Mixtral-8x7B-v0.1"
    shown = run("train", "--show-config", "mixtral-8x7")
    assert shown.code == 2 and "Did you mean 'mixtral-8x7b'?" in shown.err
    shown = run("train", "--list-keys", "sft")
    assert shown.code == 0 and "--neuron_precision" in shown.out
    shown = run("train")
    assert shown.code == 2 and "CONFIG" in shown.err


def test_a_run_and_its_mistakes(run: Any, config: Callable[..., Path], tmp_path: Path) -> None:
    shown = run("train", config(), "--check")
    assert (
        shown.code == 0
        and re.search(r"^no mistake found: [1-9]\d* rows of \w+; a run writes to ", shown.out)
        and not (tmp_path / "out").exists()
    )
    facts = json.loads(run("train", config(), "--check", "--json").out)
    assert f" {facts['rows']} rows of {facts['kind']}; a run writes to {facts['output_dir']}" in shown.out
    shown = run("train", config(), "--json", "--max_steps", "2")
    facts = json.loads(shown.out)
    assert shown.code == 0 and facts["ok"] and facts["metrics"]["train_loss"] > 0
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["max_steps"] == 2
    shown = run("train", config(max_length=4096))
    line = f"{tmp_path}/mine.yaml, line 6: max_length must be at most 64, the positions of {tmp_path}/model, got 4096."
    assert (shown.code, shown.out) == (2, "") and shown.err.splitlines()[-1].startswith(line)
    shown = run("train", config(), "--max_stepz", "2", "--json")
    assert shown.code == 2 and json.loads(shown.out)["kind"] == "usage"
    shown = run("train", config(), "--resume", "--output_dir", tmp_path / "new")
    assert shown.code == 2 and "resume_from_checkpoint must be used with a complete checkpoint" in shown.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_log_has_no_bars(run: Any, config: Callable[..., Path], tmp_path: Path, method: str) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "Q ", "chosen": "yes", "rejected": "no"}\n' * 4, encoding="utf-8")
    pairs = {"method": "dpo", "train_files": str(tmp_path / "pairs.jsonl"), "precompute_ref_log_probs": True}
    shown = run("train", config(eval_share=0.5, max_length=16, logging_steps=1, **(pairs if method == "dpo" else {})))
    assert shown.code == 0 and "'loss'" in shown.out, shown.err
    assert "it/s" not in shown.err + shown.out and "%|" not in shown.err + shown.out


def test_missing_packages_are_named_together(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = sys.modules["importlib.util"].find_spec
    gone = ("trl", "peft")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in gone else find(name, *more))
    shown = run("train", "tiny-mixtral")
    fix = "got no trl, peft. Install what the extra 'train' has: pip install trl peft."
    assert shown.code == 2 and fix in shown.err


ENDING = """
import atexit, sys
from hf_neuron_moe import __main__

class TakenApart:
    def __del__(self, write=sys.stdout.write, flush=sys.stdout.flush):
        write("taken apart\\n"), flush()

sys.modules["kept"] = TakenApart()
atexit.register(print, "at exit")
__main__.main()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["train", "--list-configs"], 0), (["train", "--no-such-file"], 2)])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_one_of_several_processes_ends_before_its_objects(arguments: list[str], code: int, processes: str) -> None:
    """The threads of gloo, which caches of torch keep, would abort it."""
    environment = os.environ | {"WORLD_SIZE": processes, "RANK": "0"}
    command = [sys.executable, "-c", ENDING, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.count("at exit") == 1
    assert ended.stdout.endswith("taken apart\n") == (processes == "1")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
@pytest.mark.parametrize(("code", "shown"), [(0, 120), (3, 3)])
def test_one_of_several_processes_says_that_its_output_was_not_written(code: int, shown: int) -> None:
    program = f"from hf_neuron_moe.__main__ import _end_without_teardown as end\nprint('text')\nend({code})"
    with open("/dev/full", "w") as full:
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        ended = subprocess.run([sys.executable, "-c", program], env=buffered, stdout=full, timeout=60, check=False)
    assert ended.returncode == shown

"""finetune.py from checkpoint to checkpoint: full, LoRA, and LoRA on a frozen MXFP8 base."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from finetune import describe_processes, finetune, main
from finetune_options import parse
from finetune_text import blocks
from huggingface_hub.errors import HfHubHTTPError
from make_tiny_model import make_tiny_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from tests.tiny_models import tokens

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "--block_length": "32",
    "--eval_share": "0.1",
    "--max_eval_blocks": "4",
    "--neuron_precision": "fp32",
    "--max_steps": "6",
    "--per_device_train_batch_size": "4",
    "--learning_rate": "1e-2",
    "--logging_steps": "1",
    "--report_to": "none",
    "--save_strategy": "no",
    "--use_cpu": "true",
    "--disable_tqdm": "true",
}


@pytest.fixture
def text(tmp_path: Path, repo_root: Path) -> Path:
    """A piece of a speech."""
    first = (repo_root / "data" / "sotu" / "eval.jsonl").read_text(encoding="utf-8").splitlines()[0]
    file = tmp_path / "speech.txt"
    file.write_text(json.loads(first)["text"][:6000], encoding="utf-8")
    return file


def command(tmp_path: Path, text: Path, **changes: Any) -> list[str]:
    """The command line of a run on the checkpoint in ``tmp_path / "model"``."""
    named = {"--model": tmp_path / "model", "--train_files": text, "--output_dir": tmp_path / "out", **SETTINGS}
    named |= {f"--{key}": value for key, value in changes.items()}
    words = []
    for key, value in named.items():
        words += [key, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def losses(out: Path) -> list[float]:
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens()).logits


@pytest.mark.parametrize(
    ("family", "home"), [("mixtral", "kernel"), pytest.param("llama", "stock", marks=pytest.mark.slow)]
)
def test_full_fine_tuning_ends_in_a_stock_checkpoint(tmp_path: Path, text: Path, family: str, home: str) -> None:
    make_tiny_model(family, tmp_path / "model")
    changes = {"neuron_weights": home, "save_strategy": "steps", "save_steps": 3}
    metrics = finetune(parse(command(tmp_path, text, **changes)))
    out = tmp_path / "out"
    learned = losses(out)
    assert len(learned) == 6 and learned[-1] < learned[0] - 0.5
    assert metrics["eval_loss"] < learned[0] and metrics["eval_perplexity"] > 1
    stock = AutoModelForCausalLM.from_pretrained(out / "final")
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(out / "final" / "model.safetensors")
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in before.items()}
    assert all(not torch.equal(after[key], before[key]) for key in after if "mlp" in key or "block_sparse" in key)
    assert AutoTokenizer.from_pretrained(out / "final").eos_token_id == 256
    # What was saved is what was trained: stock transformers evaluates it to the loss that the patched model had.
    _, held_out = blocks(parse(command(tmp_path, text)).data, AutoTokenizer.from_pretrained(out / "final"))
    assert held_out is not None
    ids = torch.tensor(held_out["input_ids"][:])
    with torch.no_grad():
        assert stock(ids, labels=ids).loss.item() == pytest.approx(metrics["eval_loss"], rel=1e-5)
    resumed = command(tmp_path, text, **changes, resume_from_checkpoint=str(out / "checkpoint-3"))
    resumed[resumed.index("--output_dir") + 1] = str(tmp_path / "again")
    finetune(parse(resumed))
    assert losses(tmp_path / "again") == learned
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "final")), logits(stock))


def test_lora_on_attention_and_experts_is_saved_and_merged(tmp_path: Path, text: Path) -> None:
    make_tiny_model("mixtral", tmp_path / "model")
    changes = {"lora_rank": 4, "lora_merge": True, "lora_targets": ["q_proj", "v_proj"]}
    changes["lora_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    finetune(parse(command(tmp_path, text, **changes)))
    out = tmp_path / "out"
    assert losses(out)[-1] < losses(out)[0]
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), out / "final")
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    actual, expected = logits(merged), logits(adapter)
    scale = expected.abs().max()
    assert (expected - plain).abs().max() > 1e-2 * scale, "the adapters did nothing"
    assert (actual - expected).abs().max() <= 1e-6 * scale


def test_lora_on_a_frozen_mxfp8_base(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model("mixtral", tmp_path / "source", hidden_size=128, intermediate_size=256)
    convert_checkpoint(tmp_path / "source", tmp_path / "model", ConvertOptions("mxfp8"))
    kept = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert main(command(tmp_path, text)) == 2
    assert "lora_rank must be positive, got a checkpoint whose blocks are frozen MX codes" in capsys.readouterr().err
    changes = {"lora_rank": 4, "gradient_checkpointing": True}
    assert main(command(tmp_path, text, **changes, lora_merge=True)) == 2
    assert "lora_merge must be off" in capsys.readouterr().err
    assert main(command(tmp_path, text, **changes)) == 0
    out = tmp_path / "out"
    assert losses(out)[-1] < losses(out)[0]
    saved = load_file(out / "final" / "adapter_model.safetensors")
    assert saved and all("lora_" in key for key in saved)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == kept


def test_refusals_are_one_line_and_exit_code_2(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where nobody has run the demo
    make_tiny_model("llama", tmp_path / "model")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"text": "whole"}\n{"text": cut\n', encoding="utf-8")
    for changes, message in (
        ({"eval_strategy": "epoch", "eval_share": 0}, "eval_strategy must be used with eval_files"),
        ({"neuron_exclude": "model.layers.*.mlq"}, "Did you mean 'model.layers"),
        ({"model": tmp_path / "models"}, "models', a folder that does not exist. Correct the path"),
        ({"model": ".cache/smollm2-mixtral/"}, "does not exist. Run `python scripts/get_smollm2.py`"),
        ({"tokenizer": text.parent}, "tokenizer must be a folder or hub id with a tokenizer, got"),
        ({"resume_from_checkpoint": "runs/nope"}, "true or auto, got 'runs/nope', which does not exist. Name a check"),
        ({"resume_from_checkpoint": tmp_path}, "resume_from_checkpoint must be a checkpoint folder"),
        ({"train_files": damaged}, "readable .jsonl files, got " + f"{damaged}, line 2: Expecting"),
        ({"lora_rank": 2, "lora_targets": "query"}, "lora_targets must be linear layers of "),
        (
            {"lora_rank": 2, "lora_targets": "query", "lora_parameters": "value"},
            "lora_targets, lora_parameters must be names",
        ),
        ({"attn_implementation": "flashy"}, "model must be a causal language model that transformers can load"),
    ):
        assert main(command(tmp_path, text, **changes)) == 2
        line = capsys.readouterr().err.splitlines()[-1]  # after the progress bars
        assert line.startswith("error: ") and message in line and ".." not in line


def test_processes_are_told_in_words() -> None:
    cpu = torch.device("cpu")
    assert describe_processes(1, DistributedType.NO, cpu) == "one process on cpu"
    assert describe_processes(2, DistributedType.MULTI_CPU, cpu) == "2 processes (MULTI_CPU) on cpu"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ImportError("You need `bits`:\n pip install bits."), 2, "error: an option needs a package: You need `bits`: "),
        (HfHubHTTPError("403 Forbidden", response=SimpleNamespace(headers={}, request=None)), 2, "error: the hub ref"),
        (KeyboardInterrupt(), 130, "interrupted; --resume_from_checkpoint auto continues"),
    ],
)
def test_what_stops_a_run_later_is_one_line_too(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(_: object) -> None:
        raise error

    monkeypatch.setattr("finetune.finetune", stop)
    assert main(["--model", "m", "--train_files", "a.txt", "--report_to", "none", "--use_cpu", "true"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_in_one_line(tmp_path: Path, text: Path) -> None:
    make_tiny_model("llama", tmp_path / "model")
    words = command(tmp_path, text, max_steps=100_000, logging_steps=5, disable_tqdm="true")
    child = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "scripts" / "finetune.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    for line in child.stdout:
        if "loss" in line:
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in err and err.splitlines()[-1].startswith("interrupted; ")

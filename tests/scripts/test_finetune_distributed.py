"""Two CPU processes, sharded (FSDP2) or replicated (DDP), train as one process does with the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import datasets
import pytest
import torch
from finetune import main
from finetune_checks import check_merging
from finetune_options import parse
from make_tiny_model import make_tiny_model, tiny_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.training.cpu_fsdp import shard_on_cpu
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
KINDS = {"fsdp2": "FSDP", "ddp": "MULTI_CPU"}
LORA = ["--lora_rank", "4", "--lora_targets", "q_proj", "gate_proj", "up_proj", "down_proj"]
"""Attention and patched MLPs."""


@pytest.fixture
def text(tmp_path: Path, repo_root: Path) -> Path:
    """A piece of a speech."""
    first = (repo_root / "data" / "sotu" / "eval.jsonl").read_text(encoding="utf-8").splitlines()[0]
    file = tmp_path / "speech.txt"
    file.write_text(json.loads(first)["text"][:6000], encoding="utf-8")
    return file


def options(family: str, folder: Path, out: str, batch: int, *more: str) -> list[str]:
    """Command line of a run on the checkpoint in ``folder / "model"``."""
    text = str(folder / "speech.txt")
    named = {
        "--model": str(folder / "model"),
        "--output_dir": str(folder / out),
        "--train_files": text,
        "--eval_files": text,
        "--max_eval_blocks": "4",
        "--max_steps": "8",
        "--learning_rate": "1e-2",
        "--per_device_train_batch_size": str(batch),
        "--neuron_precision": "fp32",
        "--disable_tqdm": "true",
    }
    return [str(CONFIGS / f"tiny-{family}.yaml"), *(word for pair in named.items() for word in pair), *more]


def launch(kind: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run finetune.py in two processes, as ``accelerate launch`` starts them."""
    config = str(CONFIGS / "accelerate" / f"{kind}-cpu.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file", config]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "HF_DATASETS_OFFLINE": "1",
    }
    return subprocess.run(
        [*command, str(ROOT / "scripts" / "finetune.py"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
        cwd=ROOT,
    )


def losses(out: Path) -> list[float]:
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds", "more"),
    [("llama", ["fsdp2", "ddp"], []), ("mixtral", ["fsdp2", "ddp"], []), ("llama", ["fsdp2"], LORA)],
    ids=["llama", "mixtral", "llama-lora"],
)
def test_two_processes_give_the_losses_of_one(
    family: str, kinds: list[str], more: list[str], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make_tiny_model(family, tmp_path / "model")
    assert main(options(family, tmp_path, "one", 4, *more)) == 0
    expected = losses(tmp_path / "one")
    assert len(expected) == 9 and expected[7] < expected[0] - 0.1
    name = "adapter_model.safetensors" if more else "model.safetensors"
    final = load_file(tmp_path / "one" / "final" / name)
    for kind in kinds:
        done = launch(kind, options(family, tmp_path, kind, 2, *more), tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"2 processes ({KINDS[kind]}) on cpu" in done.stdout
        # The gradients' sums run in another order, which eight steps of AdamW make a little larger.
        assert losses(tmp_path / kind) == pytest.approx(expected, rel=2e-5)
        saved = load_file(tmp_path / kind / "final" / name)
        assert saved.keys() == final.keys()
        for key, value in saved.items():
            torch.testing.assert_close(value, final[key], rtol=0, atol=1e-3, msg=key)  # a tenth of one step


def test_merging_sharded_adapters_is_refused(tmp_path: Path) -> None:
    asked = parse(options("mixtral", tmp_path, "out", 2, "--lora_rank", "2", "--lora_merge"))
    check_merging(asked.lora, sharded=False)
    with refused(ConfigError, "lora_merge", got="true"):
        check_merging(asked.lora, sharded=True)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_sharding_weights_in_the_kernels_layout_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", _fsdp_accelerator)
    for home in ("stock", "kernel"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
        args = NeuronMoETrainingArguments(str(tmp_path), neuron_weights=home, use_cpu=True, report_to=[])
        if home == "stock":
            assert NeuronMoETrainer(model=model, args=args).is_fsdp_enabled
            continue
        with refused(ConfigError, "neuron_weights", got="'kernel'"):
            NeuronMoETrainer(model=model, args=args)


_make_accelerator = Trainer.create_accelerator_and_postprocess


def _fsdp_accelerator(trainer: Trainer) -> None:
    """What the Trainer knows when a launcher asked for FSDP; no process group is needed to be asked for it."""
    _make_accelerator(trainer)
    trainer.is_fsdp_enabled = True


def test_fsdp_1_is_refused_on_cpus() -> None:
    with refused(ConfigError, "fsdp_version", got="1"):
        shard_on_cpu({"fsdp_plugin": types.SimpleNamespace(fsdp_version=1)})

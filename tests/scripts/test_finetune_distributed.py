"""Two CPU processes, sharded (FSDP2) or replicated (DDP), train as one process does with the same global batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from make_tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
KINDS = {"fsdp2": "FSDP", "ddp": "MULTI_CPU"}


def run(family: str, folder: Path, kind: str | None, home: str, text: Path) -> str:
    """Fine-tune the model in ``folder / "model"``; return what was printed."""
    program = [str(ROOT / "scripts" / "finetune.py"), str(CONFIGS / f"tiny-{family}.yaml")]
    batch = 4 if kind is None else 2
    options = ["--model", folder / "model", "--output_dir", folder / str(kind), "--max_steps", 8]
    options += ["--neuron_precision", "fp32", "--neuron_weights", home, "--per_device_train_batch_size", batch]
    options += ["--train_files", text, "--eval_files", text, "--max_eval_blocks", 4, "--disable_tqdm", "true"]
    command = [sys.executable]
    if kind is not None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command += [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(CONFIGS / "accelerate" / f"{kind}-cpu.yaml"),
        ]
        command += ["--main_process_port", str(port)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(
        [*command, *program, *map(str, options)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses(out: Path) -> list[float]:
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "home"), [("llama", "stock"), ("mixtral", "stock")])
def test_two_processes_give_the_losses_of_one(family: str, home: str, tmp_path: Path, repo_root: Path) -> None:
    first = (repo_root / "data" / "sotu" / "eval.jsonl").read_text(encoding="utf-8").splitlines()[0]
    text = tmp_path / "speech.txt"
    text.write_text(json.loads(first)["text"][:6000], encoding="utf-8")
    make_tiny_model(family, tmp_path / "model")
    assert "1 process(es), NO, on cpu" in run(family, tmp_path, None, home, text)
    expected = losses(tmp_path / "None")
    assert len(expected) == 9 and expected[7] < expected[0] - 0.5
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "None" / "final").state_dict()
    for kind, name in KINDS.items():
        assert f"2 process(es), {name}, on cpu" in run(family, tmp_path, kind, home, text)
        # The gradients' sums run in another order, which eight steps of AdamW make a little larger.
        assert losses(tmp_path / kind) == pytest.approx(expected, rel=2e-5)
        for key, value in AutoModelForCausalLM.from_pretrained(tmp_path / kind / "final").state_dict().items():
            torch.testing.assert_close(value, final[key], rtol=0, atol=2e-4, msg=key)

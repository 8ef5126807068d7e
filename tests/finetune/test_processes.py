"""Two processes, replicated or sharded in every way, train as one process does with the same global batch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_neuron_moe.finetune import configs, finetune, read_options
from tests.finetune.conftest import make_chat_model
from tests.finetune.data_files import ROWS, losses, write
from tests.shared_runs import made_once

STEPS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ep2": {"ep_size": 2, "fsdp_size": 2},
    "tp2": {"tp_size": 2, "per_device_train_batch_size": 4},
    "lora": {"lora_rank": 4, "lora_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "dpo": {"method": "dpo"},
}
"""What the files have in addition, trained one after the other by torchrun; the global batch is that of one process."""

NOTES = (
    "2 processes (MULTI_CPU) on cpu",
    "2 of 4 experts on each process.",
    "48 of 96 columns of the intermediate axis",
)


def write_config(folder: Path, name: str, **keys: Any) -> Path:
    config: dict[str, Any] = {
        "model": str(folder / "model"),
        "train_files": str(folder / ("pairs" if keys.get("method") else "chats") / "rows.jsonl"),
        "output_dir": str(folder / name),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "neuron_precision": "fp32",
        "eval_files": str(folder / ("pairs" if keys.get("method") else "chats") / "rows.jsonl"),
        "max_eval_samples": 4,
        # The balance of experts is a mean over the rows of each process, and no sum over processes.
        "router_aux_loss_coef": 0.0,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config | keys), encoding="utf-8")
    return file


def launched(folder: Path) -> str:
    """Train under every layout in two processes, and in this one; return the folder."""
    make_chat_model("mixtral", folder / "model")
    for name, rows in (("chats", ROWS["messages"]), ("pairs", ROWS["preference"])):
        (folder / name).mkdir()
        write(folder / name, rows)
    for name, keys in LAYOUTS.items():
        write_config(folder, name, **keys)
    write_config(folder, "stopped")
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shown = _run([*torchrun, "-m", "tests.finetune.layout_driver", str(folder)], environment)
    assert all(note in shown for note in NOTES), shown
    assert shown.count(f"stopped after step 2, with a checkpoint in {folder}/stopped") == 2
    assert [path.name for path in (folder / "stopped").glob("checkpoint-*")] == ["checkpoint-2"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    sharded = write_config(folder, "fsdp2")
    shown = _run(
        [*launch, "--config_file", str(configs.find("fsdp2-cpu")), "-m", "hf_neuron_moe", "train", str(sharded)],
        environment,
    )
    assert "2 processes (FSDP) on cpu" in shown
    for name in ("one", "one_lora", "one_dpo"):
        keys = LAYOUTS.get(name.removeprefix("one_"), {})
        finetune(read_options([str(write_config(folder, name, **keys | {"per_device_train_batch_size": 4}))]))
    return str(folder)


def _run(command: list[str], environment: dict[str, str]) -> str:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**environment, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
@pytest.mark.parametrize("layout", [*LAYOUTS, "fsdp2"])
def test_two_processes_train_evaluate_and_save_as_one(layout: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path(made_once(tmp_path_factory, "finetune", functools.partial(launched)))
    one = folder / (f"one_{layout}" if layout in ("lora", "dpo") else "one")
    expected = losses(one)
    assert len(expected) == STEPS and expected[-1] < expected[0]
    # The gradients' sums run in another order, which steps of AdamW make a little larger.
    assert losses(folder / layout) == pytest.approx(expected, rel=2e-4)
    name = "adapter_model.safetensors" if layout == "lora" else "model.safetensors"
    saved, final = load_file(folder / layout / name), load_file(one / name)
    assert {key: (value.shape, value.dtype) for key, value in saved.items()} == {
        key: (value.shape, value.dtype) for key, value in final.items()
    }
    for key, value in saved.items():
        torch.testing.assert_close(value, final[key], rtol=0, atol=1e-3, msg=key)  # a tenth of one step
    assert (folder / layout / "README.md").is_file()

"""The script's layout keys: two processes train a model that transformers shards while it is loaded."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from finetune import main
from make_tiny_model import make_tiny_model
from safetensors.torch import load_file

from tests.shared_runs import made_once

LAYOUTS = {
    "ep2": {"ep_size": 2, "fsdp_size": 2, "per_device_train_batch_size": 2},
    "tp2": {"tp_size": 2, "per_device_train_batch_size": 4},
}
"""What the YAML files of the runs have in addition; the global batch is that of one process."""
NOTES = ("2 of 4 experts on each process.", "48 of 96 columns of the intermediate axis on each process.")
STEPS = 4


def write_config(folder: Path, repo_root: Path, name: str, **keys: Any) -> Path:
    """Write the YAML file of a run, and of the text that all runs read a piece."""
    text = folder / "speech.txt"
    first = (repo_root / "data" / "sotu" / "eval.jsonl").read_text(encoding="utf-8").splitlines()[0]
    text.write_text(json.loads(first)["text"][:6000], encoding="utf-8")
    config = yaml.safe_load((repo_root / "configs" / "tiny-mixtral.yaml").read_text(encoding="utf-8"))
    config |= {"model": str(folder / "model"), "output_dir": str(folder / name), "max_eval_blocks": 4}
    config |= {"train_files": [str(text)], "eval_files": [str(text)], "max_steps": STEPS, "disable_tqdm": True}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config | {"neuron_precision": "mxfp8", "learning_rate": 1e-2} | keys))
    return file


def launched(repo_root: Path, folder: Path) -> str:
    """Train under every layout in one group of two processes, and under none in this one; return the folder."""
    make_tiny_model("mixtral", folder / "model")
    for name, keys in LAYOUTS.items():
        write_config(folder, repo_root, name, **keys)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    cache = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command += ["-m", "tests.scripts.layout_driver", str(folder)]
    done = subprocess.run(
        command, cwd=repo_root, env={**os.environ, **cache}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(note in done.stdout for note in NOTES), done.stdout
    for name, precision in (("one", "mxfp8"), ("exact", "fp32")):
        file = write_config(folder, repo_root, name, neuron_precision=precision)
        assert main([str(file)]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def runs(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        return Path(made_once(tmp_path_factory, "finetune", functools.partial(launched, repo_root)))


def losses(run: Path) -> torch.Tensor:
    """Losses of all steps and of the evaluation."""
    history = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return torch.tensor([entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_keys_train_evaluate_and_save_as_one_process(layout: str, runs: Path) -> None:
    found, one, exact = (losses(runs / name) for name in (layout, "one", "exact"))
    assert len(found) == STEPS + 1 and found[STEPS - 1] < found[0] - 0.1
    # Each process rounds its share, some values the other way: once for each what the format's own rounding is.
    shares = LAYOUTS[layout].get("tp_size", 1)
    assert (found - one).abs().max() <= shares * (exact - one).abs().max()
    files = (load_file(runs / name / "final" / "model.safetensors") for name in (layout, "one", "exact"))
    saved, expected, unrounded = files
    assert {name: (t.shape, t.dtype) for name, t in saved.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }
    for name, value in expected.items():
        assert (saved[name] - value).norm() <= 2 * shares * (unrounded[name] - value).norm(), name

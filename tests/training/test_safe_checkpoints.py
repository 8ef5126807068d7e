"""Trainers with safe checkpoints: killed anywhere and resumed, non-finite weights, rotation, stock checkpoints.

The kills run in a child process (tests/training/kill_driver.py), which compares losses, weights and what is left on the
disk with an uninterrupted run's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import IncompleteCheckpointError, NeuronMoEWarning, NonFiniteWeightsError
from hf_neuron_moe.training.checkpoints import SafeCheckpointMixin, refuse_nonfinite
from tests.refusals import refused
from tests.tiny_models import tiny_model, tokens


class SafeTrainer(SafeCheckpointMixin, Trainer):
    """The stock Trainer with safe checkpoints."""


def trainer(folder: Path, kind: type[Trainer] = SafeTrainer, callbacks: Any = None, **options: Any) -> Trainer:
    model = tiny_model("mixtral", num_hidden_layers=1)
    patch_model(model, {"precision": "fp32"})
    settings: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "seed": 5,
        "disable_tqdm": True,
    }
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 12, seed=11)]
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=callbacks)


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def folders(home: Path) -> set[str]:
    return {entry.name for entry in home.iterdir() if entry.is_dir()}


def kill(repo_root: Path, work: Path, *moments: str) -> list[dict[str, Any]]:
    """Outcomes of the driver; all kills must have ended well."""
    command = [sys.executable, "-m", "tests.training.kill_driver", str(work), *moments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=False)
    assert result.returncode == 0, result.stderr
    outcomes = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"at":')]
    assert [outcome for outcome in outcomes if outcome["problem"]] == [], result.stderr
    return outcomes


@pytest.mark.slow
def test_killed_at_every_kind_of_moment(repo_root: Path, tmp_path: Path) -> None:
    outcomes = kill(repo_root, tmp_path, "all")
    assert len(outcomes) >= 20
    assert "write checkpoint-6/optimizer.pt" in [outcome["moment"] for outcome in outcomes], "half of a file"
    inside = [outcome for outcome in outcomes if "checkpoint-" in outcome["moment"]]
    assert len(inside) >= 10
    for word in ("write", "open", "fsync", "replace", "makedirs", "unlink", "rmdir", "step"):
        assert any(word in outcome["moment"] for outcome in outcomes), word


def spoil(value: float, step: int) -> TrainerCallback:
    class Spoiler(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                with torch.no_grad():
                    kwargs["model"].model.layers[0].mlp.experts.down_proj[1, 2, 3] = value

    return Spoiler()


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_nonfinite_weights_are_not_written(tmp_path: Path, value: float, word: str) -> None:
    run = trainer(tmp_path, callbacks=[spoil(value, 4)])
    with refused(
        NonFiniteWeightsError, "the model's weights", f"{word} in down_proj of module 'model.layers.0.mlp.experts'"
    ):
        run.train()
    assert run.state.global_step == 4
    assert folders(tmp_path) == {"checkpoint-2"}
    with refused(NonFiniteWeightsError, "the model's weights", "earlier checkpoints are as they were"):
        run.save_model(str(tmp_path / "final"))
    assert folders(tmp_path) == {"checkpoint-2"}
    healthy = trainer(tmp_path)
    healthy.train(resume_from_checkpoint=True)
    assert folders(tmp_path) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


@pytest.mark.parametrize("resume", [None, False])
def test_nonfinite_weights_of_the_model_are_named_before_the_first_step(tmp_path: Path, resume: bool | None) -> None:
    run = trainer(tmp_path)
    with torch.no_grad():
        run.model.model.layers[0].self_attn.o_proj.weight[2, 3] = float("nan")
    named = r"^train: .* got NaN in weight of module 'model.layers.0.self_attn.o_proj' \(Linear\)\. Nothing was trained"
    with refused(NonFiniteWeightsError, "the model's weights", named):
        run.train(resume_from_checkpoint=resume)
    assert run.state.global_step == 0 and not folders(tmp_path)


def test_what_counts_as_finite() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, dtype=torch.float64))
    model[0].register_parameter("small", nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False))
    model[0].register_parameter("none", None)
    model[0].register_buffer("empty", torch.empty(0))
    model[0].register_buffer("passing", torch.tensor([float("nan")]), persistent=False)
    model[0].register_buffer("mask", torch.tensor([float("-inf")]))
    model[2].weight.data.fill_(1e300)  # finite, though not in single precision
    refuse_nonfinite(model)
    refuse_nonfinite(nn.Linear(2, 2, device="meta"))
    model[1].running_mean[1] = float("nan")
    with refused(NonFiniteWeightsError, "the model's weights", got="NaN in running_mean of module '1' (BatchNorm1d)"):
        refuse_nonfinite(model)
    model[0].small.data = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    with refused(NonFiniteWeightsError, "the model's weights", got="NaN in small of module '0' (Linear)"):
        refuse_nonfinite(model)


def test_resuming_from_stock_and_incomplete_checkpoints(tmp_path: Path) -> None:
    with refused(IncompleteCheckpointError, "resume_from_checkpoint=True"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    stock = trainer(tmp_path, Trainer)
    stock.train()
    with (
        pytest.warns(NeuronMoEWarning, match="checkpoint-2 \\(without a mark"),
        pytest.raises(IncompleteCheckpointError),
    ):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(stock)
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    with refused(IncompleteCheckpointError, "resume_from_checkpoint", r"optimizer.pt.*=True"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    again = trainer(tmp_path)
    with pytest.warns(NeuronMoEWarning, match="checkpoint-6 .*checkpoint-4 is the last complete one"):
        again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(stock)
    for name, value in stock.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_rotation_keeps_the_best_and_the_arguments_say_what_was_asked(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        save_total_limit=1,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=0.0,
        max_steps=4,
    )
    run.train()
    # All evaluations are equal, so the first checkpoint is the best one. At the end the Trainer leaves that alone.
    assert folders(tmp_path) == {"checkpoint-2"}
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert run.args.save_total_limit == 1
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == 1


def test_a_checkpoint_is_pushed_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[set[str]] = []

    def push(self: Trainer, folder: str) -> None:
        pushed.append({entry.name for entry in Path(folder).iterdir()})

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    run = trainer(tmp_path, max_steps=2)
    run.args.push_to_hub = True
    run.create_optimizer_and_scheduler(2)
    run.state.global_step = 2
    run._save_checkpoint(run.model, None)
    (names,) = pushed
    assert "neuron_moe_complete.json" in names and "neuron_moe_saving.json" not in names


@pytest.mark.slow
def test_two_processes(repo_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.training.rank_driver", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=False, timeout=900)
    assert result.returncode == 0, result.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank in ranks:
        assert rank["again"] == rank["losses"] and len(rank["losses"]) == 4
        assert "NaN in weight of module 'lm_head'" in rank["refused"]  # also where the weights are finite
    (warned,) = ranks[0]["warned"]
    assert "checkpoint-4 (rng_state_1.pth is missing). checkpoint-2 is the last complete one." in warned
    assert ranks[1]["warned"] == []
    mark = json.loads((tmp_path / "run" / "checkpoint-4" / "neuron_moe_complete.json").read_text())
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(mark["files"])
    assert folders(tmp_path / "run") == {"checkpoint-2", "checkpoint-4"}
    assert ranks[0]["stopped"] == ranks[1]["stopped"] != ""  # what only the second process found
    assert "of expert 2 of down in model.layers.0.mlp.experts, step 2" in ranks[0]["stopped"]
    assert folders(tmp_path / "guarded") == {"neuron_moe"}
    assert (tmp_path / "guarded" / "neuron_moe" / "guard_step2_process1.safetensors").is_file()
    precision, stock = zip(*(rank["differing"] for rank in ranks))
    assert precision[0] == precision[1] and precision[0][0] == "RankError"
    assert (
        "option precision must be the same on all ranks, got 'fp32' on rank 0 and 'bf16' on rank 1" in precision[0][1]
    )
    assert [kind for kind, _ in stock] == ["RankError", "UnsupportedModelError"]
    assert "rank 1 must be free of errors" in stock[0][1] and not (tmp_path / "other" / "neuron_moe").exists()


@pytest.mark.parametrize(("kind", "name"), [("FULL", "pytorch_model_fsdp.bin"), ("SHARDED", "pytorch_model_fsdp_0")])
def test_a_checkpoint_that_fsdp_cannot_read_is_an_error_on_every_process(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate lets the first process alone look for the file, while the others wait for its weights."""
    trainer(tmp_path, max_steps=2).train()
    run = trainer(tmp_path)
    says = f"with {name}, which a run with FSDP and {kind}_STATE_DICT writes"
    plugin = SimpleNamespace(state_dict_type=StateDictType[f"{kind}_STATE_DICT"])
    monkeypatch.setattr(run, "is_fsdp_enabled", True)
    monkeypatch.setitem(run.accelerator.state.__dict__, "fsdp_plugin", plugin)
    with refused(IncompleteCheckpointError, "resume_from_checkpoint", says, where="train"):
        run._load_from_checkpoint(str(tmp_path / "checkpoint-2"))

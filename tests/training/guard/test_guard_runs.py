"""The guard in real Trainers: silence, warnings, a stop before anything is saved, the reproduction, resumed bands."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from hf_neuron_moe import NeuronMoECallback, NeuronMoETrainer, patch_model
from hf_neuron_moe.errors import ConfigError, GuardError, NeuronMoEWarning, ReportError, UnsupportedModelError
from hf_neuron_moe.modules.op_watch import WATCHERS
from hf_neuron_moe.report.run_data import read_runs
from hf_neuron_moe.report.run_page import render
from hf_neuron_moe.training.guard import reproduction
from hf_neuron_moe.training.guard.bands import LEARNED
from tests.refusals import refused
from tests.tiny_models import tiny_model
from tests.training.guard.breaking import Breaking
from tests.training.guard.faults import Fault, fault_named
from tests.training.runs import SETTINGS, Rows, arguments, trainer

BLOCK = "model.layers.1.mlp"
BAD = LEARNED + 2
"""The step in which faults are, after the bands were learned."""
NAN = fault_named("NaN in a row of dX")
STALE = fault_named("stale copy of gate")


def guarded(folder: Path, fault: Fault | None, **options: Any) -> NeuronMoETrainer:
    named: dict[str, Any] = {"max_steps": BAD + 2, "neuron_guard_steps": 2, "neuron_precision": "bf16"} | options
    run = trainer(tiny_model("llama"), folder, **named)
    if fault is not None:
        run.callback_handler.callbacks.insert(
            0, Breaking(fault, BLOCK, BAD)
        )  # which has put it back when the guard judges
    return run


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "neuron_moe" / "guard.jsonl").read_text().splitlines()]


def test_a_stop_comes_before_the_checkpoint_and_leaves_what_replays_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = guarded(tmp_path, NAN, neuron_guard="stop", save_strategy="steps", save_steps=BAD // 2, max_grad_norm=0.0)
    with pytest.raises(GuardError) as error:
        run.train()
    text = str(error.value)
    assert f"step {BAD}" in text and BLOCK in text and "gate_up.dx" in text and "Replay it" in text
    assert run.state.global_step == BAD - 1
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{BAD // 2}"]
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
    assert WATCHERS == []
    file = tmp_path / "neuron_moe" / f"guard_step{BAD}.safetensors"
    assert file.stat().st_size <= 1_000_000
    assert reproduction.main([str(file)]) == 0
    said = capsys.readouterr().out
    assert f"step {BAD}: {BLOCK}, gate_up.dx, result dx" in said and "nan" in said and "torch 2" in said
    last = records(tmp_path)[-1]
    assert (last["step"], last["alarms"][0]["figure"]) == (BAD, "nonfinite")
    page = render(read_runs(tmp_path))
    assert f"guard_step{BAD}.safetensors" in page and f"the result dx of gate_up.dx in {BLOCK}, step {BAD}." in page


def test_a_warning_names_the_fault_once_and_training_goes_on(tmp_path: Path) -> None:
    run = guarded(tmp_path, STALE, neuron_guard="warn")
    with pytest.warns(NeuronMoEWarning, match=f"The guard found worst.* of gate_up in {BLOCK}, step {BAD}") as said:
        run.train()
    assert len([one for one in said if issubclass(one.category, NeuronMoEWarning)]) == 1
    assert run.state.global_step == BAD + 2
    looked = [record["step"] for record in records(tmp_path)]
    assert looked == [*range(1, LEARNED + 1), BAD, BAD + 2]
    assert [bool(record["alarms"]) for record in records(tmp_path)] == [step == BAD for step in looked]
    found = reproduction.Reproduction.load(tmp_path / "neuron_moe" / f"guard_step{BAD}.safetensors")
    lines = list(reproduction.replay(found))
    errors = [float(line.rpartition(": ")[2]) for line in lines if line.startswith("relative error")]
    assert 0.01 < errors[0] < 2 and found.facts["seed"] == SETTINGS["seed"]


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_healthy_steps_are_silent_and_train_the_same(family: str, tmp_path: Path) -> None:
    final = []
    for mode in ("off", "stop"):
        options = {"neuron_guard": mode, "neuron_guard_steps": 1, "neuron_precision": "mxfp8", "max_steps": 10}
        run = trainer(tiny_model(family), tmp_path / mode, gradient_accumulation_steps=2, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NeuronMoEWarning)
            run.train()
        final.append([parameter.detach().clone() for parameter in run.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*final, strict=True))
    assert [record["step"] for record in records(tmp_path / "stop")] == list(range(1, 11))
    assert not (tmp_path / "off" / "neuron_moe" / "guard.jsonl").exists()


def test_bands_go_on_after_a_resume(tmp_path: Path) -> None:
    guarded(tmp_path, None, neuron_guard="stop", save_strategy="steps", save_steps=9, max_steps=9).train()
    with open(tmp_path / "neuron_moe" / "guard.jsonl", "a") as file:
        file.write(json.dumps({"step": 10, "blocks": {}, "alarms": []}) + "\n")  # of steps that are done again
    run = guarded(tmp_path, STALE, neuron_guard="stop", save_strategy="steps", save_steps=9)
    with pytest.raises(GuardError):
        run.train(resume_from_checkpoint=True)
    assert [record["step"] for record in records(tmp_path)] == [*range(1, LEARNED + 2), BAD]
    first = records(tmp_path)[-1]["alarms"][0]
    rounding = next(alarm for alarm in records(tmp_path)[-1]["alarms"] if alarm["figure"] == "rounding")
    assert (first["block"], first["product"]) == (BLOCK, "gate_up")
    assert rounding["high"] < 1e-3  # a learned band; without one it would be 2e-2


class Poison(TrainerCallback):
    """Puts a NaN into a parameter before the first step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            kwargs["model"].get_parameter(self.name).view(-1)[0] = math.nan


@pytest.mark.parametrize(
    ("family", "name", "expert"),
    [("llama", "down_proj.weight", -1), ("mixtral", "experts.down_proj", 0)],
)
def test_only_blocks_of_experts_have_one_named(family: str, name: str, expert: int, tmp_path: Path) -> None:
    options = {"neuron_guard": "stop", "neuron_precision": "bf16"}
    run = trainer(tiny_model(family), tmp_path, callbacks=[Poison(f"model.layers.1.mlp.{name}")], **options)
    with pytest.raises(GuardError) as error:
        run.train()
    first = records(tmp_path)[0]["alarms"][0]
    assert (first["operand"], first["expert"]) == ("weights", expert)
    assert ("of expert 0 of down" in str(error.value)) == (expert == 0)


def test_a_trainer_of_ones_own_gets_the_guard_from_the_callback(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model)
    callback = NeuronMoECallback(guard="stop")
    run = Trainer(model=model, args=arguments(tmp_path, max_steps=2), train_dataset=Rows())
    callback.watch(run)
    run.train()
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_what_cannot_be_guarded_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "neuron_guard"):
        arguments(tmp_path, neuron_guard="halt")
    with refused(ConfigError, "neuron_guard_steps"):
        arguments(tmp_path, neuron_guard="warn", neuron_guard_steps=0)
    with refused(ConfigError, "guard"):
        NeuronMoECallback(guard="halt")
    with refused(ConfigError, "neuron_guard"):
        trainer(tiny_model("llama"), tmp_path, neuron_guard="warn", neuron_patch=False).train()
    (tmp_path / "other.safetensors").write_bytes(b"x")
    with refused(ReportError, str(tmp_path / "other.safetensors")):
        reproduction.Reproduction.load(tmp_path / "other.safetensors")


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter([Rows()[place % 16] for place in range(22)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "options", "saved"),
    [
        (Rows(), {"save_strategy": "steps", "save_steps": 11}, [11, 18]),
        (Rows(22), {"save_strategy": "epoch"}, [11, 18]),  # whose last epoch is cut short
        (Rows(44), {"save_strategy": "epoch", "gradient_accumulation_steps": 2}, [11, 18]),
        (Stream(), {"save_strategy": "epoch"}, [18]),  # where epochs end is not known
        (Rows(), {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 11}, [11, 18]),
        (Rows(), {"save_strategy": "no"}, [18]),  # save_model() comes after it
    ],
)
def test_steps_that_are_saved_are_looked_at(rows: Any, options: Any, saved: list[int], tmp_path: Path) -> None:
    options = {"neuron_guard": "warn", "neuron_guard_steps": 100, "max_steps": 18, **options}
    best = {"eval_dataset": Rows(4)} if "eval_steps" in options else {}
    own = arguments(tmp_path, metric_for_best_model="loss" if best else None, **options)
    NeuronMoETrainer(model=tiny_model("llama"), args=own, train_dataset=rows, **best).train()
    assert [record["step"] for record in records(tmp_path)] == sorted([*range(1, LEARNED + 1), 16, *saved])
    if options["save_strategy"] != "no" and not isinstance(rows, Stream):
        assert {int(path.name[11:]) for path in tmp_path.glob("checkpoint-*")} == {*saved}


def test_blocks_that_are_never_seen_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_neuron_moe.modules.ops.watched", lambda *_: None)
    with refused(UnsupportedModelError, "neuron_guard"):
        guarded(tmp_path, None, neuron_guard="warn").train()

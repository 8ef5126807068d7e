"""Whole Trainer runs through the Neuron backend on the contract double: the losses of the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_neuron_moe import patch_model
from tests.neuron.small_runs import CASES, SOME_SLOW, Case, Rows, close, train_with_trainer
from tests.same_routing import SameRouting

Start = Callable[..., SimpleNamespace]
LORA = {
    "dense": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "experts-mxfp8": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "experts-bf16": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "dense-bf16": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prepared(case: Case, backend: str, lora: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    model = case.model(layers=2)
    patch_model(model, {**case.options, "backend": backend, "weights": "stock", **options})
    if lora is None:
        return model
    torch.manual_seed(5)
    wrapped: nn.Module = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **lora))
    return wrapped


def compare(
    case: Case, folder: Path, machine: Start, *, bound: float, lora: dict[str, Any] | None = None,
    patch: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Run the Trainer twice, with the same experts for every token; return the double."""
    patch = patch or {}
    with SameRouting(None) as routing:
        expected = train_with_trainer(prepared(case, "torch", lora, **patch), folder / "torch", **options)
    assert bool(routing.chosen) is (case.family == "mixtral")
    double = machine(target=case.target).double
    with SameRouting(routing.chosen):
        losses = train_with_trainer(prepared(case, "neuron", lora, **patch), folder / "neuron", **options)
    assert len(expected) == 3 and len(set(expected)) == 3
    assert close(losses, expected, bound), (losses, expected)
    return double


@pytest.mark.parametrize("name", SOME_SLOW)
def test_a_trainer_run(name: str, tmp_path: Path, machine: Start) -> None:
    double = compare(CASES[name], tmp_path, machine, bound=CASES[name].bound)
    # Three steps, two layers, a forward and a backward each; one shape of either.
    assert len(double.launches) == 12 and len(double.compilations) == 2


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "minimal", "fp8", "recompute"])
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_run_with_every_policy(name: str, policy: str, tmp_path: Path, machine: Start) -> None:
    case = CASES[name]
    # FP8 rounds what is kept; see test_losses.py. Three steps change the last loss by six times as much.
    bound = 3e-3 if policy == "fp8" else case.bound
    compare(case, tmp_path, machine, bound=bound, patch={"activations": policy})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_run_with_lora(name: str, tmp_path: Path, machine: Start) -> None:
    compare(CASES[name], tmp_path, machine, bound=CASES[name].bound, lora=LORA[name])


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_run_with_gradient_checkpointing(name: str, reentrant: bool, tmp_path: Path, machine: Start) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    double = compare(CASES[name], tmp_path, machine, bound=CASES[name].bound, **options)
    assert len(double.launches) == 18, "every forward runs twice"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_trainer_run(name: str, tmp_path: Path, machine: Start) -> None:
    case = CASES[name]
    expected = train_with_trainer(prepared(case, "torch"), tmp_path / "torch")
    double = machine(target=case.target).double
    model = prepared(case, "neuron")
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    losses = train_with_trainer(model, tmp_path / "neuron")
    # Compiled attention and losses sum in another order; a step changes a loss by far more.
    assert close(losses, expected, max(case.bound, 1e-4)), (losses, expected)
    assert len(double.compilations) == 2 and not double.traced


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_run_under_autocast(name: str, tmp_path: Path, machine: Start) -> None:
    # A bf16 loss of about 4 has steps of 2^-6; the rest of the model computes in bf16 on both sides.
    compare(
        CASES[name], tmp_path, machine, bound=max(CASES[name].bound, 2**-7 if CASES[name].bound else 0.0), bf16=True
    )


@pytest.mark.slow
def test_the_packages_own_trainer(tmp_path: Path, machine: Start) -> None:
    from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments

    def losses(backend: str) -> list[float]:
        arguments = NeuronMoETrainingArguments(
            str(tmp_path / backend), neuron_precision="mxfp8", neuron_backend=backend, max_steps=3, logging_steps=1,
            per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = NeuronMoETrainer(model=CASES["dense"].model(), args=arguments, train_dataset=Rows())
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses("torch")
    double = machine().double
    assert losses("neuron") == expected
    assert len(double.launches) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_accumulated_gradients_and_bf16_weights(name: str, tmp_path: Path, machine: Start) -> None:
    case = CASES[name]
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    double = compare(case, tmp_path, machine, bound=case.bound, **options)
    assert len(double.launches) == 24

"""A checkpoint in bf16 layouts becomes an ordinary patched model: trainable, savable, without a copy of the experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from hf_neuron_moe import (
    NeuronMoEConfig,
    NeuronMoETrainer,
    NeuronMoETrainingArguments,
    patch_model,
    unpatch_model,
)
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.quantizers.bf16_loader import Bf16Loader
from tests.quantizers.conftest import UNEVEN, Converted, Source, load, patched
from tests.refusals import refused
from tests.tiny_models import FAMILIES, tokens


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", ["fused", "kernel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saving_gives_the_original_checkpoint_back(
    source: Source, converted: Converted, tmp_path: Path, family: str, layout: str
) -> None:
    model = load(converted(family, precision="bf16", layout=layout))
    model.save_pretrained(tmp_path)
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path, source(family)))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & config.keys()


@pytest.mark.parametrize(("layout", "home"), [("fused", "stock"), ("kernel", "kernel")])
def test_it_is_the_model_that_patch_model_makes(source: Source, converted: Converted, layout: str, home: str) -> None:
    model = load(converted("mixtral", precision="bf16", layout=layout))
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model, "hf_quantizer")
    expected = load(source("mixtral"))
    report = patch_model(expected, NeuronMoEConfig(precision="bf16", weights=home))
    # Patched with these arguments already: the call is answered with the report.
    assert str(patch_model(model, NeuronMoEConfig(precision="bf16", weights=home))) == str(report)
    assert [(n, p.shape, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in expected.named_parameters()
    ]
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert len(unpatch_model(model).patched) == 2
    stock = load(source("mixtral"))
    for (name, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(("layout", "home"), [("fused", "stock"), ("kernel", "kernel")])
def test_options_that_leave_the_layout_open_keep_that_of_the_conversion(
    converted: Converted, tmp_path: Path, layout: str, home: str
) -> None:
    model = load(converted("mixtral", precision="bf16", layout=layout))
    report = patch_model(model, {"precision": "bf16"})
    assert report.config.weights == home and patch_model(model) is report
    NeuronMoETrainer(model=model, args=NeuronMoETrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    assert patch_model(model, {"weights": home}) is report
    got = "got one that was patched before, or loaded as a conversion, and {}. Call unpatch"
    for options, differing in (
        ({"precision": "fp32"}, "precision='fp32' instead of 'bf16'"),
        (
            {"weights": "stock" if home == "kernel" else "kernel"},
            "weights='(stock|kernel)' instead of '(stock|kernel)'",
        ),
        ({"backend": "torch", "block_size": 128}, "backend='torch' instead of 'auto'; block_size=128 instead of 512"),
    ):
        with refused(UnsupportedModelError, "model", got.format(differing)):
            patch_model(model, options)
    with refused(UnsupportedModelError, "model", got.format(r"include=\('a',\) instead of \(\)")):
        patch_model(model, include="a")


@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("options", [{"layout": "fused"}, {"layout": "kernel"}, {"pad": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_gradients_are_those_of_the_patched_original(
    source: Source, converted: Converted, family: str, options: dict[str, Any]
) -> None:
    grads = []
    for model in (
        load(converted(family, UNEVEN, precision="bf16", **options)).train(),
        patched(source(family, UNEVEN), "bf16").train(),
    ):
        model(tokens(), labels=tokens()).loss.backward()
        unpatch_model(model)
        grads.append({name: param.grad for name, param in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert grad is not None, name
        assert torch.equal(grad, grads[1][name]), name


def test_experts_in_kernel_layout_are_not_copied(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    landed: dict[str, int] = {}
    hand_over = Bf16Loader.hand_over

    def watched(self: Bf16Loader, home: str) -> Any:
        name = self.candidate.name
        landed.update({f"{name}.{role}": self.role(role).data_ptr() for role in ("gate_up_proj", "down_proj")})
        return hand_over(self, home)

    monkeypatch.setattr(Bf16Loader, "hand_over", watched)
    model = load(converted("mixtral", precision="bf16", layout="kernel"))
    assert len(landed) == 4
    assert {name: model.get_parameter(name).data_ptr() for name in landed} == landed


def test_the_trainer_trains_saves_and_resumes(source: Source, converted: Converted, tmp_path: Path) -> None:
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 8)]

    def run(model: Any, folder: str, **options: Any) -> tuple[Trainer, list[float]]:
        arguments = TrainingArguments(
            tmp_path / folder, max_steps=4, save_steps=2, logging_steps=1, report_to=[], use_cpu=True, seed=3, **options
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    folder = converted("mixtral", precision="bf16", layout="kernel")
    losses = []
    for name, model in (("converted", load(folder)), ("patched", load(source("mixtral")))):
        patch_model(model, NeuronMoEConfig(precision="bf16", weights="kernel"))
        trainer, _ = run(model, name)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    again, _ = run(load(folder), "converted")
    again.train(resume_from_checkpoint=str(tmp_path / "converted" / "checkpoint-2"))
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == losses[0]
    assert load(tmp_path / "converted" / "checkpoint-4").config.model_type == "mixtral"

"""Trainers and peft's adapters: the order of patching and adapting, and adapters that fit one home of the weights."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments, patch_model
from hf_neuron_moe.errors import ConfigError, NothingToPatchError
from tests.refusals import refused
from tests.tiny_models import tiny_model


def test_adapters_before_the_patch_are_refused_with_what_to_do(tmp_path):
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["gate_proj", "q_proj"]))
    with refused(NothingToPatchError, "model", r"patch_model\(model\), then get_peft_model"):
        NeuronMoETrainer(model=model, args=NeuronMoETrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


@pytest.mark.parametrize("home", ["stock", "kernel"])
def test_adapters_that_only_fit_the_kernel_home_are_told_of(home, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_neuron_moe.training.prepare.logger", logging.getLogger("told"))
    model = tiny_model("mixtral")
    patch_model(model, {"weights": home})
    model = get_peft_model(model, LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"]))
    args = NeuronMoETrainingArguments(str(tmp_path), neuron_weights=home, use_cpu=True, report_to=[])
    NeuronMoETrainer(model=model, args=args)
    assert ("belong to weights in the kernels' layout" in caplog.text) == (home == "kernel")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_name_in_the_place_of_the_model_is_answered_with_how_to_load_it(kind, tmp_path):
    arguments = NeuronMoETrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with refused(ConfigError, "model", r"from_pretrained\('org/name'\)"):
        NeuronMoETrainer(model=kind("org/name"), args=arguments)
    with refused(ConfigError, "model", got=repr(kind("org/name"))):
        NeuronMoETrainer(kind("org/name"), arguments)

"""Trainers and peft's adapters: the order of patching and adapting, and adapters that fit one home of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments, patch_model
from hf_neuron_moe.errors import ConfigError, NothingToPatchError, UnsupportedModelError
from tests.refusals import refused
from tests.tiny_models import tiny_model, tokens


def test_adapters_before_the_patch_are_refused_with_what_to_do(tmp_path):
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["gate_proj", "q_proj"]))
    with refused(NothingToPatchError, "model", r"patch_model\(model\), then get_peft_model"):
        NeuronMoETrainer(model=model, args=NeuronMoETrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


@pytest.mark.parametrize("when", ["steps", "no"])
def test_adapters_that_cannot_be_saved_are_refused_before_the_first_step(when, tmp_path):
    """Experts' adapters fit stock models (tests/training/test_lora_runs.py); a run that saves nothing may merge."""
    for family, target in (("mixtral", "mlp.experts.down_proj"), ("llama", "mlp.down_proj")):
        model = tiny_model(family)
        patch_model(model, {"weights": "kernel"})
        model = get_peft_model(model, LoraConfig(target_modules=[], target_parameters=[target]))
        options = {"neuron_weights": "kernel", "save_strategy": when, "max_steps": 1, "use_cpu": True, "report_to": []}
        rows = [{"input_ids": ids, "labels": ids} for ids in tokens(8, 9)]
        args = NeuronMoETrainingArguments(str(tmp_path / family), **options)
        run = NeuronMoETrainer(model=model, args=args, train_dataset=rows)
        if (family, when) == ("llama", "steps"):
            with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
                run.train()
        else:
            run.train()
        assert run.state.global_step == ((family, when) != ("llama", "steps"))


@pytest.mark.parametrize("kind", [str, Path])
def test_a_name_in_the_place_of_the_model_is_answered_with_how_to_load_it(kind, tmp_path):
    arguments = NeuronMoETrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with refused(ConfigError, "model", r"from_pretrained\('org/name'\)"):
        NeuronMoETrainer(model=kind("org/name"), args=arguments)
    with refused(ConfigError, "model", got=repr(kind("org/name"))):
        NeuronMoETrainer(kind("org/name"), arguments)

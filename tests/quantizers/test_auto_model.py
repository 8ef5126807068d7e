"""``AutoNeuronMoEModelForCausalLM``: what ``from_pretrained`` returns, patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_neuron_moe import AutoNeuronMoEModelForCausalLM, NeuronMoEConfig, patch_model
from hf_neuron_moe.errors import ConfigError, NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching.apply import report_of
from tests.quantizers.conftest import Converted, Source

IDS = torch.arange(32).reshape(1, 32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_it_is_loading_and_then_patching(source: Source) -> None:
    folder, options = source("mixtral"), {"precision": "mxfp8", "activations": "recompute"}
    model, info = AutoNeuronMoEModelForCausalLM.from_pretrained(
        folder, neuron_config=options, dtype=torch.bfloat16, output_loading_info=True
    )
    assert model.dtype == torch.bfloat16 and not info["missing_keys"], "arguments and results are transformers'"
    by_hand = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    patch_model(by_hand, options)
    assert report_of(model).to_dict() == report_of(by_hand).to_dict()
    assert torch.equal(logits(model), logits(by_hand))
    assert report_of(AutoNeuronMoEModelForCausalLM.from_pretrained(folder)).config == NeuronMoEConfig()


def test_a_conversion_comes_as_it_was_made_or_in_another_precision(converted: Converted) -> None:
    bf16, mxfp8 = converted("mixtral", precision="bf16"), converted("mixtral", precision="mxfp8")
    as_made = AutoNeuronMoEModelForCausalLM.from_pretrained(bf16)
    assert torch.equal(logits(as_made), logits(AutoModelForCausalLM.from_pretrained(bf16)))
    other = AutoNeuronMoEModelForCausalLM.from_pretrained(bf16, neuron_config={"precision": "fp32"})
    assert report_of(other).config.precision == "fp32"
    codes = AutoNeuronMoEModelForCausalLM.from_pretrained(mxfp8)
    assert any(isinstance(module, QuantizedBlock) for module in codes.modules())
    with pytest.raises(UnsupportedModelError):
        AutoNeuronMoEModelForCausalLM.from_pretrained(mxfp8, neuron_config={"precision": "bf16"})


def test_a_failure_returns_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, n_positions=8)).save_pretrained(tmp_path)
    with pytest.raises(NothingToPatchError):
        AutoNeuronMoEModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_: pytest.fail("wrong options come first"))
    with pytest.raises(ConfigError):
        AutoNeuronMoEModelForCausalLM.from_pretrained(tmp_path, neuron_config={"precison": "mxfp8"})


def test_options_of_the_wrong_kind_name_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^AutoNeuronMoEModelForCausalLM\.from_pretrained: config must be a Neuron"):
        AutoNeuronMoEModelForCausalLM.from_pretrained(tmp_path, neuron_config="mxfp8")

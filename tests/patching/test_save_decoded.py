"""Models that transformers decoded from quantized files are saved under their own names once they are patched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from hf_neuron_moe import NeuronMoEConfig, NeuronMoEError, patch_model, unpatch_model
from tests.convert.quantized_sources import MODEL, MXFP4, random_mxfp4, rewrite, to_fp8

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention"],
}
EXPERTS = {"gpt_oss": "num_local_experts", "mixtral": "num_local_experts", "qwen3_moe": "num_experts"}


def quantized(family: str, folder: Path) -> dict[str, torch.Size]:
    """Write a quantized checkpoint; return the names and shapes of the plain one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **{EXPERTS[family]: 4}))
    model.save_pretrained(folder)
    plain = {name: tensor.shape for name, tensor in load_file(folder / MODEL).items()}
    if family != "gpt_oss":
        to_fp8(folder)
        return plain

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            E, K, N = tensors.pop(name).shape
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_mxfp4(E, N, K)
        return tensors

    rewrite(folder, MXFP4, change)
    return plain


def load(folder: Path, family: str) -> Any:
    settings = {} if family == "gpt_oss" else {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
    # transformers before 5.24 keeps what decoded the files.
    parts = [part for each in vars(model).get("_weight_conversions", ()) for part in getattr(each, "operations", ())]
    assert any(hasattr(part, "hf_quantizer") for part in parts) is ("_weight_conversions" in vars(model))
    return model.float()  # transformers 5.17 decodes into bf16 whatever the dtype asked for


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("weights", ["stock", "kernel"])
def test_decoded_models_save_as_plain_ones(family: str, weights: str, tmp_path: Path) -> None:
    plain = quantized(family, tmp_path / "source")
    model = load(tmp_path / "source", family)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    patch_model(model, NeuronMoEConfig(precision="fp32", weights=weights))
    model.save_pretrained(tmp_path / "saved")
    assert {name: tensor.shape for name, tensor in load_file(tmp_path / "saved" / MODEL).items()} == plain
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert opened.keys() == expected.keys()
    assert all(torch.equal(opened[name], expected[name]) for name in expected)
    unpatch_model(model)
    model.save_pretrained(tmp_path / "unpatched")
    assert load_file(tmp_path / "unpatched" / MODEL).keys() == plain.keys()


def test_a_failed_call_leaves_the_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized("gpt_oss", tmp_path / "source")
    model = load(tmp_path / "source", "gpt_oss")
    model._weight_conversions = before = [SimpleNamespace(operations=[SimpleNamespace(hf_quantizer=None)])]
    monkeypatch.setattr("hf_neuron_moe.patching.optimizer_layout.watch", _fails)
    with pytest.raises(NeuronMoEError, match="no"):
        patch_model(model)
    assert before and model._weight_conversions is before


def _fails(model: torch.nn.Module) -> None:
    raise NeuronMoEError("no")

"""A gpt-oss made of a Llama: the same function, MXFP4 as transformers reads it, and training from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from upcycle_gpt_oss import E2M1, save_mxfp4, to_mxfp4, upcycle

from hf_neuron_moe.demo.tiny_model import byte_tokenizer, make_tiny_model
from hf_neuron_moe.demo.upcycle import Experts
from hf_neuron_moe.finetune import finetune, read_options
from hf_neuron_moe.formats import dequantize_mxfp4_blocks
from tests.finetune.data_files import ROWS, losses, words as command, write
from tests.tiny_models import tokens

EXPERTS = "model.layers.0.mlp.experts"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens()).logits


@pytest.fixture
def llama(tmp_path: Path) -> LlamaForCausalLM:
    make_tiny_model("llama", tmp_path / "llama", initializer_range=0.1)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()


def test_identical_experts_compute_the_llama(llama: LlamaForCausalLM) -> None:
    expected = logits(llama)
    # fp32 and weights of another scale: a few roundings in each of two layers.
    torch.testing.assert_close(logits(upcycle(llama, Experts(noise=0.0))), expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.3


def test_mxfp4_takes_the_nearest_code() -> None:
    generator = torch.Generator().manual_seed(0)
    rows_ENK = torch.randn(3, 20, 64, generator=generator) * torch.logspace(-30, 30, 20)[:, None]
    blocks, scales = to_mxfp4(rows_ENK)
    decoded_ENG = dequantize_mxfp4_blocks(blocks, scales).double().unflatten(-1, (-1, 32))
    unit_ENG = torch.exp2(scales.double() - 127)[..., None]
    values = torch.cat([E2M1, -E2M1]).double()
    distance = (rows_ENK.double().unflatten(-1, (-1, 32))[..., None] / unit_ENG[..., None] - values).abs().amin(-1)
    error = (decoded_ENG - rows_ENK.double().unflatten(-1, (-1, 32))).abs() / unit_ENG
    assert torch.equal(error, distance)
    # Halfway values go to the even code; the largest group value lies between 4 and 8 units.
    halfway, scale = to_mxfp4(torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 4).view(1, 1, 32))
    assert scale.item() == 127
    assert dequantize_mxfp4_blocks(halfway, scale)[0, 0, :8].tolist() == [4, 0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_mxfp4_has_no_code_for_a_value_that_is_not_finite(value: float) -> None:
    weight = torch.ones(1, 2, 64)
    weight[0, 1, 40] = value
    with pytest.raises(ValueError, match="finite weights"):
        to_mxfp4(weight)
    with pytest.raises(ValueError, match="multiples of 32, got 40; use --bf16"):
        to_mxfp4(weight[..., :40])


def test_another_activation_is_an_error(llama: LlamaForCausalLM) -> None:
    llama.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match=r"hidden_act must be silu, .* got gelu"):
        upcycle(llama)


def test_transformers_reads_the_mxfp4_files(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    model = upcycle(llama)
    save_mxfp4(model, tmp_path / "model")
    files = load_file(tmp_path / "model" / "model.safetensors")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name in ("gate_up_proj", "down_proj"):
        key = f"{EXPERTS}.{name}"
        decoded = dequantize_mxfp4_blocks(files[f"{key}_blocks"], files[f"{key}_scales"]).transpose(1, 2)
        assert torch.equal(opened.state_dict()[key], decoded)
        assert key not in files
    assert torch.equal(opened.state_dict()[f"{EXPERTS}.gate_up_proj_bias"][:, 1::2].unique(), torch.tensor([-1.0]))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_training_from_mxfp4_ends_in_a_stock_checkpoint(
    llama: LlamaForCausalLM, tmp_path: Path, precision: str
) -> None:
    save_mxfp4(upcycle(llama), tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = command(tmp_path / "model", write(tmp_path, ROWS["text"]), tmp_path / "out", eval_share=0.25, max_steps=8)
    metrics = finetune(
        read_options([*given, "--neuron_precision", precision, "--dtype", "float32", "--packing", "false"])
    )
    learned = losses(tmp_path / "out")
    assert len(learned) == 8 and learned[-1] < learned[0] - 0.3
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert f"{EXPERTS}.gate_up_proj" in saved and saved[f"{EXPERTS}.gate_up_proj"].dtype == torch.float32
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
    # Every part of the experts was trained, and stock transformers, without this package, computes what was trained.
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert all(not torch.equal(saved[key], before[key]) for key in saved if ".experts." in key)
    torch.save(ids := torch.arange(48).view(2, 24), tmp_path / "ids.pt")
    script = Path(__file__).resolve().parents[2] / "scripts" / "stock_logits.py"
    words = [sys.executable, script, tmp_path / "ids.pt", tmp_path, tmp_path / "out"]
    subprocess.run([*map(str, words)], check=True)
    stock = torch.load(tmp_path / "out.pt", weights_only=True)
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(stock, reopened.eval()(ids, use_cache=False).logits)
    assert metrics["eval_loss"] < learned[0]

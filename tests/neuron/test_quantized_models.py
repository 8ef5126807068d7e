"""Converted checkpoints whose frozen blocks the Neuron backend computes: the way a user gets there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_neuron_moe import set_backend
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, NeuronMoEWarning, UnsupportedModelError
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from tests.convert.test_kept_codes import gpt_oss
from tests.convert.test_quantized_sources import aria
from tests.refusals import refused
from tests.tiny_models import tiny_model

Start = Callable[..., SimpleNamespace]
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=256, intermediate_size=512).bfloat16()
    model.save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "mx", ConvertOptions("mxfp8", "kernel"))
    return folder / "mx"


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def backends(model: Any) -> set[str]:
    return {block.neuron_config.backend for block in model.modules() if isinstance(block, QuantizedBlock)}


@torch.no_grad()
def test_inference_by_the_kernels(converted: Path, machine: Start) -> None:
    model = load(converted)
    expected = model(IDS).logits
    double = machine().double
    names = {f"model.layers.{number}.mlp": None for number in range(2)}
    assert set_backend(model, "neuron") == names
    found = model(IDS).logits
    assert double.names == ["mlp_forward_mxfp8_nki"] * 2
    assert torch.equal(found, expected)
    set_backend(model, "torch")
    assert torch.equal(model(IDS).logits, expected) and len(double.launches) == 2


def test_training_adapters_needs_the_fallback(converted: Path, machine: Start) -> None:
    base = load(converted)
    machine()
    set_backend(base, "neuron")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with refused(ConfigError, "backend", "gradient"):
        model(IDS, labels=IDS)
    with refused(
        ConfigError,
        "backend",
        r"fallback='torch' .*eval\(\) and under torch\.no_grad\(\) or torch\.inference_mode",
    ):
        base.eval()(IDS)  # autograd records it, although nobody will ask for a gradient
    set_backend(model, "neuron", fallback="torch")
    with pytest.warns(NeuronMoEWarning, match="computed by PyTorch"):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    set_backend(model, "torch")
    assert torch.equal(model(IDS, labels=IDS).loss, loss)


def test_what_the_kernels_cannot_compute_is_refused_at_once(converted: Path, machine: Start) -> None:
    model = load(converted)
    machine(target="trn2")
    with refused(ConfigError, "backend", r"2 of 2; model\.layers\.0\.mlp: .*Trn3"):
        set_backend(model, "neuron")
    assert backends(model) == {"torch"}
    reasons = set_backend(model, "neuron", fallback="torch")
    assert len(reasons) == 2 and all(reason and "Trn3" in reason for reason in reasons.values())


def test_refusals_change_nothing(converted: Path) -> None:
    model = load(converted)
    with pytest.raises(BackendUnavailableError):
        set_backend(model, "neuron")
    with refused(ConfigError, "backend", got="'neurno'"):
        set_backend(model, "neurno")
    with refused(ConfigError, "fallback"):
        set_backend(model, "torch", fallback="maybe")
    assert backends(model) == {"torch"}
    with refused(UnsupportedModelError, "model", "patch_model"):
        set_backend(torch.nn.Linear(2, 2), "torch")


@torch.no_grad()
@pytest.mark.parametrize("family", ["aria", "gpt_oss"])
def test_permuted_words_get_permuted_rows(family: str, tmp_path: Path, machine: Start) -> None:
    """Codes of an MXFP4 source: the kernel gets 32 adjacent values of H as one of its groups, zeros behind them."""
    source, _ = aria(tmp_path / "source") if family == "aria" else gpt_oss(tmp_path / "source", 96, 544)
    convert_checkpoint(source, tmp_path / "mx", ConvertOptions("mxfp4", pad=True))
    model = load(tmp_path / "mx")
    block = next(module for module in model.modules() if isinstance(module, QuantizedBlock))
    x = (torch.randn(20, 96) * 0.3).bfloat16()
    weights, index = torch.rand(20, 2).softmax(-1).topk(2, -1)
    expected = block(x, index, weights)
    double = machine().double
    assert set(set_backend(model, "neuron").values()) == {None}
    found = block(x, index, weights)
    assert double.names == ["moe_cte"]
    rows = double.calls[0].arguments["hidden_states"].data[:20]
    assert rows.shape == (20, 512)
    value = torch.arange(512)
    place = value % 32 // 8 * 128 + 8 * (value // 32) + value % 8
    assert torch.equal(rows[:, place][:, :96], x) and not rows[:, place][:, 96:].any()
    # As in test_frozen: the kernel takes its affinities in bf16 and rounds every expert's share and the sum to bf16.
    assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()

"""Quantization health against the definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe import patch_model
from hf_neuron_moe.formats import fake_quantize_mx
from hf_neuron_moe.training.blocks import PROJECTIONS, patched_blocks, sampled_weights
from hf_neuron_moe.training.figures import quantization_health
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model


def sqnr_db(values: Tensor, restored: Tensor) -> float:
    return 10 * math.log10(values.double().square().sum() / (values.double() - restored.double()).square().sum())


@pytest.mark.parametrize("K", [128, 40, 384, 640])
def test_the_ratio_is_that_of_fake_quantize_on_the_padded_rows(K: int) -> None:
    rows = torch.randn(5, K) * torch.logspace(-3, 3, 5)[:, None]
    amax, flushed, saturated, ratio = quantization_health(rows).tolist()
    padded = F.pad(rows.bfloat16(), (0, -K % 128))
    restored = fake_quantize_mx(padded)[:, :K]
    assert amax == rows.abs().max().item()
    assert ratio == pytest.approx(sqnr_db(rows, restored), abs=1e-3)  # fp32 sums against fp64 ones
    assert 25 < ratio < 40  # e4m3 with 32 values per scale
    assert flushed == ((restored == 0) & (rows != 0)).float().mean().item()
    assert saturated == 0


def test_small_values_beside_a_large_one_are_flushed() -> None:
    rows = torch.zeros(1, 128)
    rows[0, 0] = 1.0  # scale 2^-7: the smallest code is 2^-9, so the smallest value kept is 2^-16, and half of it is 0
    rows[0, 1:5] = torch.tensor([2.0**-16, 2.0**-17 * 1.5, 2.0**-17, 2.0**-20])
    _, flushed, saturated, _ = quantization_health(rows).tolist()
    assert flushed == 2 / 128  # 2^-17 is half way, and even is 0
    assert saturated == 0


def test_infinity_saturates_and_zeros_have_no_ratio() -> None:
    rows = torch.ones(1, 128)
    rows[0, 3] = math.inf
    assert quantization_health(rows)[2] == 1 / 128
    assert quantization_health(torch.zeros(2, 128))[:3].tolist() == [0, 0, 0]
    assert quantization_health(torch.zeros(2, 128))[3].isnan()
    assert quantization_health(torch.ones(2, 128))[3] == math.inf
    assert quantization_health(torch.empty(0, 0)).isnan().all()


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_sampled_rows_are_the_weights_whatever_their_home(family: str) -> None:
    stock = tiny_model(family)
    name = "model.layers.1.mlp" + (".experts" if family == "mixtral" else "")
    original = stock.get_submodule(name)
    I = 48  # noqa: E741
    if family == "mixtral":
        gate, up = original.gate_up_proj.detach().split(I, dim=1)
        expected = [part.reshape(-1, part.shape[-1]) for part in (gate, up, original.down_proj.detach())]
    elif family == "phi3":
        expected = [*original.gate_up_proj.weight.detach().split(I), original.down_proj.weight.detach()]
    else:
        expected = [getattr(original, f"{role}_proj").weight.detach() for role in PROJECTIONS]
    for home in WEIGHT_LAYOUTS:
        model = tiny_model(family)
        patch_model(model, {"weights": home, "precision": "fp32"})
        whole = sampled_weights(patched_blocks(model)[name], 10_000)
        few = sampled_weights(patched_blocks(model)[name], 6)
        for role, rows in zip(PROJECTIONS, expected, strict=True):
            assert torch.equal(whole[role], rows)
            assert torch.equal(few[role], rows[[len(rows) * i // 6 for i in range(6)]])

"""Weights in bf16 layouts on their way from a shard into the original modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_neuron_moe.convert.layout.orientations import BF16_FUSED
from hf_neuron_moe.errors import SourceDamageError
from hf_neuron_moe.patching.discovery import discover
from hf_neuron_moe.quantizers.bf16_loader import Bf16Loader
from hf_neuron_moe.quantizers.shard_layouts import StoredTensor, joined

H, I = 32, 48  # noqa: E741


@pytest.mark.parametrize("padding", [{}, {"I": 16}, {"H": 32}, {"H": 32, "I": 16}], ids=["none", "I", "H", "both"])
def test_padding_is_cut_off_and_halves_get_memory_of_their_own(padding: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    gate, up, down = (torch.randn(shape, generator=generator) for shape in ((I, H), (I, H), (H, I)))
    more_h, more_i = padding.get("H", 0), padding.get("I", 0)
    wide = {
        "gate_up_proj": torch.cat([nn.functional.pad(half, (0, more_h, 0, more_i)) for half in (gate, up)]),
        "down_proj": nn.functional.pad(down, (0, more_i, 0, more_h)),
    }
    model = nn.ModuleDict({"block": LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=I))})
    stored = {
        role: StoredTensor(
            role, BF16_FUSED, torch.empty(value.shape, dtype=torch.bfloat16, device="meta"), padding=padding
        )
        for role, value in wide.items()
    }
    assert [tensor.sizes for tensor in stored.values()] == [(H, I), (H, I)]
    loader = Bf16Loader(discover(model)[0], stored)
    for role, value in wide.items():
        loader.get_submodule(role).weight = nn.Parameter(value)
    block = loader.hand_over("stock")
    weights = [block.get_parameter(f"{name}_proj.weight") for name in ("gate", "up", "down")]
    assert all(torch.equal(weight, value) for weight, value in zip(weights, (gate, up, down), strict=True))
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 3
    assert all(weight.is_contiguous() for weight in weights)


def test_parts_are_those_of_all_ranks() -> None:
    values = torch.empty(H, I, dtype=torch.bfloat16, device="meta")
    parts = {f"down.tp{rank}": StoredTensor(f"down.tp{rank}", BF16_FUSED, values, tp_rank=rank) for rank in range(3)}
    assert [part.tp_rank for part in joined(parts)["down"].parts] == [0, 1, 2]
    del parts["down.tp1"]
    with pytest.raises(SourceDamageError, match=r"^tensor down .* got those of \.tp0, \.tp2"):
        joined(parts)

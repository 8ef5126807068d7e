"""Blocks without a gate stay stock, are reported, and do not count for `strict`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from tests.refusals import refused
from tests.tiny_models import tiny_config, tiny_model

VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llava(vision: Any = None) -> nn.Module:
    text = tiny_config("llama")
    assert isinstance(text, LlamaConfig)
    vision = vision or CLIPVisionConfig(**VISION, image_size=8, patch_size=4)
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision)).eval()


@pytest.mark.parametrize("vision", [CLIPVisionConfig, SiglipVisionConfig])
def test_a_vision_language_model_is_patched_by_default(vision: Any) -> None:
    model = llava(vision(**VISION, image_size=8, patch_size=4))
    report = patch_model(model)
    assert [entry.name for entry in report.patched] == [f"model.language_model.layers.{n}.mlp" for n in (0, 1)]
    assert {(entry.gated, entry.reason) for entry in report.refused} == {
        (False, "it has no gate: two projections in a row")
    }
    assert len(report.refused) >= 2 and not report.to_dict()["entries"][0]["gated"]
    assert patch_model(model) is report
    unpatch_model(model)


def test_a_gated_block_that_cannot_be_patched_still_counts_and_is_named_alone() -> None:
    model = llava()
    model.model.language_model.layers[1].mlp.act_fn = nn.Mish()
    with refused(UnsupportedModelError, "model", r"got 1 that cannot:\n  model\.language_model\.layers\.1") as caught:
        patch_model(model)
    assert "no gate" not in str(caught.value)
    assert len(patch_model(model, strict=False).patched) == 1


def test_a_model_of_ungated_blocks_has_nothing_to_patch() -> None:
    model = llava().model.vision_tower
    for strict in (True, False):
        with refused(NothingToPatchError, "model", "2 x CLIPMLP.: it has no gate"):
            patch_model(model, strict=strict)


class OneMLP(nn.Module):
    """Projections under names that say nothing."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        for number, (rows, columns) in enumerate(shapes):
            self.add_module(f"layer{number}", nn.Linear(columns, rows, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What it computes is not read where it has no gate."""
        raise NotImplementedError


@pytest.mark.parametrize(
    ("shapes", "gated"),
    [
        ([(24, 16), (16, 24)], False),  # fc1, fc2
        ([(16, 24), (24, 16)], False),  # fc2 registered first
        ([(24, 16), (40, 24)], False),  # a projector to another width
        ([(48, 16), (16, 24)], True),  # gate and up fused
        ([(16, 24), (48, 16)], True),  # the same, down registered first
        ([(24, 16), (24, 16), (16, 24)], True),  # gate, up, down
        ([(16, 16), (16, 16), (16, 16)], True),  # it could be
    ],
)
def test_what_counts_as_gated(shapes: list[tuple[int, int]], gated: bool) -> None:
    model = tiny_model("llama")
    model.extra = OneMLP(*shapes)
    if gated:
        with refused(UnsupportedModelError, "model", "extra .OneMLP."):
            patch_model(model)
        return
    (entry,) = patch_model(model).refused
    assert (entry.name, entry.gated) == ("extra", False)


def test_experts_without_a_gate_do_not_count_either() -> None:
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts.has_gate = False
    (entry,) = patch_model(model).refused
    assert (entry.gated, entry.reason[:28]) == (False, "it has no 3-D parameters up_")

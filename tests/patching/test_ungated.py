"""Blocks without a gate stay stock, are reported, and do not count for `strict`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
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
    assert f"Not gated MLPs, left stock: {len(report.refused)} x {report.refused[0].class_name}." in str(report)
    assert "no gate" not in str(report) and "Refused blocks" not in str(report)
    assert patch_model(model) is report
    unpatch_model(model)


TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
SIGLIP = {**VISION, "image_size": 28, "patch_size": 14}
QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
MULTIMODAL: dict[str, tuple[dict[str, Any], int, int]] = {
    "Gemma3": (SIGLIP, 2, 3),
    "Qwen3VL": ({**QWEN, "deepstack_visual_indexes": [0]}, 2, 2),
    "Idefics3": (SIGLIP, 2, 2),
    "Glm4v": (QWEN, 5, 0),
}
"""Configuration of the vision tower, and how many blocks are patched and have no gate; at least, of the latter."""


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_default_call_patches_all_gated_blocks(family: str) -> None:
    vision, patched, ungated = MULTIMODAL[family]
    text = {**TEXT, "model_type": "llama", "pad_token_id": 0} if family == "Idefics3" else TEXT
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    report = patch_model(model)
    assert len(report.patched) == patched
    assert len(report.refused) >= ungated and not any(entry.gated for entry in report.refused)


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
        """The product of two branches; which layers are in them is up to the shapes."""
        return self.layer1(self.layer0(x) * x)


class NoProductMLP(OneMLP):
    """Three projections in a row, scaled by a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x) * 0.5 * self.training
        return x


def test_three_projections_in_a_row_have_no_gate() -> None:
    model = tiny_model("llama")
    model.extra = NoProductMLP((24, 16), (24, 24), (16, 24))
    (entry,) = patch_model(model).refused
    assert (entry.name, entry.gated) == ("extra", False)
    assert entry.reason == "it has no gate: its forward multiplies no two branches before a projection"


class LastProductMLP(OneMLP):
    """Multiplies the results of two projections, and projects nothing after that."""

    def forward(self, x: torch.Tensor, state: Any = None) -> Any:
        return torch.sigmoid(self.layer2(x)) * self.layer1(torch.relu(self.layer0(x))), state


class LateProductMLP(LastProductMLP):
    """The same product inside a further projection."""

    def forward(self, x: torch.Tensor, state: Any = None) -> Any:
        return self.layer3(torch.sigmoid(self.layer2(x)) * self.layer1(torch.relu(self.layer0(x)))), state


def test_a_product_that_is_the_result_is_no_gate() -> None:
    model, shapes = tiny_model("llama"), ((24, 16), (16, 24), (16, 16), (16, 16))
    model.extra = LastProductMLP(*shapes)
    (entry,) = patch_model(model).refused
    assert not entry.gated and "before a projection" in entry.reason
    model = tiny_model("llama")
    model.extra = LateProductMLP(*shapes)
    with refused(UnsupportedModelError, "model", "extra .LateProductMLP."):
        patch_model(model)


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


class GateOfTwoMLP(nn.Module):
    """A gate projection and its activation in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(16, 24, bias=False), nn.SiLU())
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x) * self.up(x))


class ListedLayersMLP(nn.Module):
    """Three layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in ((16, 24), (16, 24), (24, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](F.silu(self.layers[0](x)) * self.layers[1](x))


def test_a_gate_inside_of_a_sequential_counts_and_layers_in_a_list_are_not_looked_at() -> None:
    model = tiny_model("llama")
    model.extra, blocks = GateOfTwoMLP(), len(model.model.layers)
    with refused(UnsupportedModelError, "model", r"extra .GateOfTwoMLP.: .* its gate .Sequential. is several modules"):
        patch_model(model)
    model.extra = ListedLayersMLP()
    report = patch_model(model)
    assert (len(report.patched), report.refused) == (blocks, ())


def test_experts_without_a_gate_do_not_count_either() -> None:
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts.has_gate = False
    (entry,) = patch_model(model).refused
    assert not entry.gated and entry.reason.startswith("it has no up_proj; its gate takes up_proj, down_proj")

"""The README's picture is what its script draws, from losses that a demo recorded and bytes that blocks save."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_neuron_moe import patch_model, unpatch_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_hidden_layers": 1, "vocab_size": 64}
MODELS = {
    "Llama-3-8B MLP": lambda: LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=14336, **SMALL)),
    "Qwen3-30B-A3B experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, head_dim=128, **SMALL
        )
    ),
    "quarter-width Mixtral experts": lambda: MixtralForCausalLM(
        MixtralConfig(hidden_size=1024, intermediate_size=3584, **SMALL)
    ),
}


@pytest.fixture(scope="module")
def front() -> ModuleType:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "figures"))  # where it finds drawing.py
    spec = importlib.util.spec_from_file_location("front", ROOT / "docs" / "figures" / "front.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.undo()
    return module


def test_the_picture_is_up_to_date(front: ModuleType) -> None:
    recorded: dict[str, Any] = json.loads(front.RECORD.read_text(encoding="utf-8"))
    rows = front.saved_bytes(front.CONCEPTS.read_text(encoding="utf-8"))
    assert front.PICTURE.read_text(encoding="utf-8") == front.draw(recorded, rows), "python docs/figures/front.py"


def test_the_picture_can_be_read_in_the_dark_and_by_a_screen_reader(front: ModuleType) -> None:
    text = front.PICTURE.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    root = ElementTree.fromstring(text)
    names = {child.tag.partition("}")[2]: child.text for child in root}
    assert root.get("role") == "img" and names["title"] and names["desc"]


def test_the_record_names_its_date_versions_and_setting(front: ModuleType) -> None:
    recorded = json.loads(front.RECORD.read_text(encoding="utf-8"))
    assert {"date", "torch", "transformers", "threads"} <= recorded["environment"].keys()
    assert recorded["curves"].keys() == front.RUNS.keys()
    for curve in recorded["curves"].values():
        assert curve[0][0] == 0 and curve[-1][0] == recorded["setting"]["steps"]
        assert curve[-1][1] < curve[0][1]
    day = recorded["environment"]["date"][:10]
    assert day in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_what_blocks_save(front: ModuleType, name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]().to(torch.bfloat16)
    row = front.saved_bytes(front.CONCEPTS.read_text(encoding="utf-8"))[name]
    row.pop("stock")
    for policy, kib in row.items():
        (entry,) = patch_model(model, {"activations": policy, "weights": "stock"}).patched
        assert entry.saved_bytes_per_token is not None
        assert round(entry.saved_bytes_per_token / 1024, 1) == kib, policy
        unpatch_model(model)

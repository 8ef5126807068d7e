"""Tiny checkpoints and their conversions, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.backends.torch import compute, generation
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from tests.tiny_models import tiny_config

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
"""Sizes that the MLP kernels take: multiples of 128. (384 would be grouped as one tile by the forward kernel.)"""

UNEVEN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
"""Sizes that have to be padded."""

WORDS = {
    "hidden_size": 512,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
"""Sizes that moe_cte's MX weights take: H a multiple of 512."""


def sizes_for(family: str, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes that a family's configuration has."""
    known = {"hidden_size", "intermediate_size"}
    known |= {"moe_intermediate_size"} if family in ("qwen2_moe", "qwen3_moe", "nemotron_h") else set()
    known |= {"shared_expert_intermediate_size"} if family == "qwen2_moe" else set()
    return {name: size for name, size in sizes.items() if name in known}


def wide_range_(model: nn.Module) -> nn.Module:
    """Give MLP weights magnitudes over 2^12, so that a value's rounding depends on which others share its scale."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ("mlp" in name or "experts" in name) and "gate.weight" not in name:
                exponent = torch.randint(-12, 1, param.shape, generator=generator)
                param.normal_(std=0.5, generator=generator).mul_(torch.exp2(exponent.float()))
    return model


Source = Callable[..., Path]
Converted = Callable[..., Path]


@pytest.fixture(autouse=True)
def fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """MX codes are multiplied in fp32 on every processor: patched blocks are compared with them doing the same."""
    monkeypatch.setenv(compute.OPTION, "fp32")
    monkeypatch.setenv(generation.OPTION, "0")
    monkeypatch.setattr(compute, "environment_option", lambda *_: "fp32")
    monkeypatch.setattr(generation, "environment_option", lambda *_: "0")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Return a function that gives a family's original checkpoint folder."""
    home = tmp_path_factory.mktemp("sources")

    def make(family: str, sizes: dict[str, int] = SIZES, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
        folder = home / "-".join(map(str, (family, dtype, *sizes.values(), *changes.items())))
        if not folder.exists():
            config = tiny_config(family, **sizes_for(family, sizes), **changes)
            torch.manual_seed(7)
            wide_range_(AutoModelForCausalLM.from_config(config)).to(dtype).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def converted(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Return a function that gives a family's converted checkpoint folder; tests must not write into it."""
    home = tmp_path_factory.mktemp("converted")
    made: dict[str, Path] = {}

    def make(family: str, sizes: dict[str, int] = SIZES, **options: Any) -> Path:
        key = f"{family}{sizes}{options}"
        if key not in made:
            made[key] = home / str(len(made))
            convert_checkpoint(source(family, sizes), made[key], ConvertOptions(**options))
        return made[key]

    return make


def load(folder: Path, **options: Any) -> Any:
    """``AutoModelForCausalLM.from_pretrained``."""
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def patched(folder: Path, precision: str, **options: Any) -> Any:
    """The original model, loaded and patched."""
    model = load(folder, **options)
    patch_model(model, NeuronMoEConfig(precision=precision))
    return model

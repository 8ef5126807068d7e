"""The configurations in distributed/: their layouts work, and need what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    PretrainedConfig,
)

from hf_neuron_moe.training.memory_estimate import optimizer_bytes
from hf_neuron_moe.training.one_rank import Layout, uneven, what_a_rank_holds
from tests.training.test_estimate import LARGE

FILES = sorted((Path(__file__).resolve().parents[2] / "hf_neuron_moe" / "configs" / "distributed").glob("*.yaml"))
CONFIGS: dict[str, tuple[PretrainedConfig, int]] = {
    **{name: LARGE[name][:2] for name in ("mixtral-8x7b", "qwen3-30b-a3b")},
    "gpt-oss-20b": (GptOssConfig(num_hidden_layers=24, num_local_experts=32), 20_914_757_184),
    "deepseek-v3": (DeepseekV3Config(), 671_026_404_352),
}
"""Configuration and number of parameters as published."""

MEMORY = {"trn2": 24 * 2**30, "h100": 80 * 10**9}
DEVICES = {"trn2": 64, "h100": 8}


def model_of(name: str) -> tuple[torch.nn.Module, int]:
    config, parameters = CONFIGS[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), parameters


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_layout_holds_what_its_file_says(file: Path) -> None:
    name, _, chip = file.stem.rpartition("-")
    text = file.read_text(encoding="utf-8")
    options = yaml.safe_load(text)
    sizes = {size: options.get(f"{size}_size", 1) for size in ("tp", "ep", "fsdp", "dp_replicate")}
    layout = Layout(**sizes)
    model, parameters = model_of(name)
    assert sum(param.numel() for param in model.parameters()) == parameters
    assert uneven(model, layout) is None  # type: ignore[arg-type]
    assert layout.devices % DEVICES[chip] == 0
    if options.get("lora_rank"):
        model.requires_grad_(False)
    held = what_a_rank_holds(model, layout, lambda other: other)  # type: ignore[arg-type]
    fixed = held.parameters + held.gradients + optimizer_bytes(held.trained, "adamw")
    (said,) = re.findall(r"parameters,\n?(?:# )? ?gradients and states ([\d.]+) GiB", text)
    assert said == f"{fixed / 2**30:.1f}"
    (total,) = re.findall(r"in all ([\d.]+) GiB", text)
    assert fixed + held.gathered < float(total) * 2**30 < MEMORY[chip]


@pytest.mark.slow
def test_deepseek_does_not_fit_on_eight_devices() -> None:
    model, _ = model_of("deepseek-v3")
    model.requires_grad_(False)
    held = what_a_rank_holds(model, Layout(ep=8, fsdp=8), lambda other: other)  # type: ignore[arg-type]
    assert held.parameters > 1.5 * MEMORY["h100"]
    text = (FILES[0].parent / "deepseek-v3-trn2.yaml").read_text(encoding="utf-8")
    assert f"{held.parameters / 2**30:.0f} GiB" in text and "does not fit 8 x H100" in text

"""A layout of bf16 values is one row of a table: conversion, export, verify and loading read everything from it.

The second reader of ``verify --source`` has a row of its own, since it must not share the writer's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, read_manifest
from hf_neuron_moe.convert.audit import operands
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.layout import orientations
from hf_neuron_moe.convert.layout.orientations import Bf16Layout
from hf_neuron_moe.errors import ConversionError
from tests.refusals import refused


def test_a_row_is_all_that_a_transposed_layout_needs(checkpoint, tmp_path, monkeypatch):
    """A dense ``[K, F]`` layout, which no kernel reads."""
    toy = Bf16Layout("toy_columns_first", False, lambda options: True, lambda F, K: (K, F), lambda stored: stored.mT)
    monkeypatch.setattr(orientations, "BF16_LAYOUTS", (toy, *orientations.BF16_LAYOUTS))
    monkeypatch.setitem(operands.FORMULAS, "toy_columns_first", lambda values, scales, stored: values.t().float())
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "toy", ConvertOptions("bf16", "kernel"))
    manifest = read_manifest(tmp_path / "toy")
    layouts = {tensor.name: tensor.layout for tensor in manifest.tensors}
    assert {layout for name, layout in layouts.items() if ".mlp." in name} == {"toy_columns_first"}
    before, stored = _tensors(source), _tensors(tmp_path / "toy")
    for name in (name for name in layouts if name.endswith("gate_up_proj.weight")):
        prefix = name.removesuffix("gate_up_proj.weight")
        gate, up, down = (before[f"{prefix}{role}_proj.weight"] for role in ("gate", "up", "down"))
        (inner, H), columns_HF = gate.shape, stored[name]
        for i in range(inner):  # the toy's own formula: value (f, k) lies at (k, f), up behind gate
            assert torch.equal(columns_HF[:, i], gate[i]) and torch.equal(columns_HF[:, inner + i], up[i])
        assert columns_HF.shape == (H, 2 * inner)
        assert torch.equal(stored[f"{prefix}down_proj.weight"], down.t())
    verified = verify_checkpoint(tmp_path / "toy", source)
    assert verified.ok and "probe" in verified.done and len(verified.probes) == 2
    assert not export_checkpoint(tmp_path / "toy", tmp_path / "back").inexact
    after = _tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    stock, loaded = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (source, tmp_path / "toy"))
    assert stock.keys() == loaded.keys() and all(torch.equal(stock[name], loaded[name]) for name in stock)
    monkeypatch.delitem(operands.FORMULAS, "toy_columns_first")
    argument = "layout of model.layers.0.mlp.gate_up_proj.weight"
    with refused(ConversionError, argument, "got 'toy_columns_first'.*Add its formula"):
        verify_checkpoint(tmp_path / "toy", source)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}

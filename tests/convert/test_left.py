"""Modules that no kernel computes stay in source form: named and counted everywhere, and refused with strict."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, read_manifest
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, LeftModule, sealed
from hf_neuron_moe.convert.notes import left_facts, left_notes
from hf_neuron_moe.errors import ConversionError, NeuronMoEWarning
from tests.convert.mutations import command
from tests.refusals import refused

EXPERTS = [f"model.layers.{layer}.feed_forward.experts" for layer in range(2)]
BYTES = 4 * 3 * 64 * 32 * 2
"""Of one layer's four experts: gate, up and down of H=64 and I=32 in bf16."""


@pytest.fixture
def llama4(tmp_path: Path) -> Path:
    """A tiny Llama 4, whose routed experts are written as one batched product."""
    config = Llama4TextConfig(
        hidden_size=64,
        intermediate_size=32,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        num_local_experts=4,
        interleave_moe_layer_step=1,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    Llama4ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "llama4")
    return tmp_path / "llama4"


def test_what_is_left_is_in_every_report(llama4, tmp_path):
    dst = tmp_path / "dst"
    reports = [
        ("convert", llama4, dst, "--dry-run"),
        ("convert", llama4, dst),
        ("verify", dst),
        ("inspect", dst),
    ]
    for arguments in reports:
        code, printed = command(*arguments, "--json")
        shown = json.loads(printed[printed.index("{") :])["left"]
        assert code == 0 and list(shown["modules"]) == EXPERTS and shown["tensors"] == 4 and shown["bytes"] == 2 * BYTES
        assert shown["modules"][EXPERTS[0]]["nbytes"] == BYTES and "use_experts_implementation" in str(shown)
        if dst.exists() and arguments[0] == "convert":
            command("export", dst, tmp_path / "back")
            for path in sorted(dst.iterdir()):
                path.unlink()
            dst.rmdir()
        code, printed = command(*arguments)
        note = "note: 2 modules left in source form (4 tensors, 98,304 bytes): model.layers.0-1.feed_forward.experts: "
        assert code == 0 and note in printed
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (llama4 / "model.safetensors").read_bytes()


def test_the_library_warns_and_the_manifest_tells(llama4, tmp_path):
    with pytest.warns(NeuronMoEWarning, match="2 modules left in source form"):
        manifest = convert_checkpoint(llama4, tmp_path / "dst", ConvertOptions("mxfp8"))
    assert manifest is not None and manifest == read_manifest(tmp_path / "dst")
    assert {name: (entry.tensors, entry.nbytes) for name, entry in (manifest.left or {}).items()} == dict.fromkeys(
        EXPERTS, (2, BYTES)
    )


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--part", "1/2"]])
def test_strict_refuses_and_writes_nothing(more, llama4, tmp_path):
    code, printed = command("convert", llama4, tmp_path / "dst", "--strict", *more)
    assert code == 1 and "model.layers.0-1.feed_forward.experts" in printed and "with strict" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["llama4"]


def test_strict_takes_a_model_of_which_nothing_is_left(checkpoint, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeuronMoEWarning)
        manifest = convert_checkpoint(checkpoint("qwen2_moe"), tmp_path / "dst", strict=True)
    assert manifest is not None and manifest.left == {} and left_notes(manifest.left) == []


def test_mxfp4_names_the_experts_that_no_kernel_computes(llama4, tmp_path):
    with refused(ConversionError, "precision mxfp4", r"model\.layers\.0-1\.feed_forward\.experts"):
        convert_checkpoint(llama4, tmp_path / "dst", ConvertOptions("mxfp4"))


def test_manifests_of_version_3_do_not_say(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst")
    path = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(path.read_text())
    del content["left"]
    path.write_text(json.dumps(sealed({**content, "format_version": 3})))
    assert read_manifest(tmp_path / "dst").left is None and left_facts(None) is None
    assert json.loads(command("verify", tmp_path / "dst", "--json")[1])["left"] is None
    assert export_checkpoint(tmp_path / "dst", tmp_path / "back").inexact == ()


def test_other_reasons_get_lines_of_their_own():
    left = {"a.0.b": LeftModule("x", 1, 2), "a.1.b": LeftModule("y", 3, 4), "a.2.b": LeftModule("x", 5, 6)}
    assert left_notes(left) == [
        "2 modules left in source form (6 tensors, 8 bytes): a.0,2.b: x",
        "1 module left in source form (3 tensors, 4 bytes): a.1.b: y",
    ]

"""Modules that no kernel computes stay in source form: named and counted everywhere, and refused with strict."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_neuron_moe import patch_model
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, export_checkpoint, read_manifest
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, LeftModule, sealed
from hf_neuron_moe.convert.notes import left_facts, left_notes
from hf_neuron_moe.errors import NeuronMoEWarning
from tests.convert.mutations import command
from tests.tiny_models import tiny_model

LEFT = [f"model.layers.{layer}.mlp" for layer in range(2)]
BYTES = 3 * 64 * 64 * 2
"""Of one layer's MLP: gate, up and down of H=64 and I=64 in bf16."""


@pytest.fixture
def gemma3n(tmp_path: Path) -> Path:
    """A tiny Gemma 3n: of three MLPs two keep the largest values of gate only, which no kernel computes."""
    config = Gemma3nTextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.95, 0.95, 0.0],
        altup_num_inputs=2,
        pad_token_id=0,
        layer_types=["full_attention"] * 3,
    )
    torch.manual_seed(7)
    Gemma3nForCausalLM(config).bfloat16().save_pretrained(tmp_path / "gemma3n")
    return tmp_path / "gemma3n"


def test_another_size_of_what_is_left_is_found_with_the_source(gemma3n, tmp_path):
    with pytest.warns(NeuronMoEWarning):
        convert_checkpoint(gemma3n, tmp_path / "dst")
    assert verify_checkpoint(tmp_path / "dst", gemma3n).ok
    path = tmp_path / "dst" / MANIFEST_FILE
    content = json.loads(path.read_text())
    content["left"][LEFT[0]]["nbytes"] += 2
    path.write_text(json.dumps(sealed(content)))
    (finding,) = verify_checkpoint(tmp_path / "dst", gemma3n).findings
    assert (finding.check, finding.subject) == ("source", LEFT[0])


def test_what_is_left_is_in_every_report(gemma3n, tmp_path):
    dst = tmp_path / "dst"
    reports = [
        ("convert", gemma3n, dst, "--dry-run"),
        ("convert", gemma3n, dst),
        ("verify", dst),
        ("inspect", dst),
    ]
    for arguments in reports:
        code, printed = command(*arguments, "--json")
        shown = json.loads(printed[printed.index("{") :])["left"]
        assert code == 0 and list(shown["modules"]) == LEFT and shown["tensors"] == 6 and shown["bytes"] == 2 * BYTES
        assert shown["modules"][LEFT[0]]["nbytes"] == BYTES and "_gaussian_topk" in str(shown)
        if dst.exists() and arguments[0] == "convert":
            command("export", dst, tmp_path / "back")
            for path in sorted(dst.iterdir()):
                path.unlink()
            dst.rmdir()
        code, printed = command(*arguments)
        note = "note: 2 modules left in source form (6 tensors, 49,152 bytes): model.layers.0-1.mlp: "
        assert code == 0 and note in printed
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (gemma3n / "model.safetensors").read_bytes()


def test_the_library_warns_and_the_manifest_tells(gemma3n, tmp_path):
    with pytest.warns(NeuronMoEWarning, match="2 modules left in source form"):
        manifest = convert_checkpoint(gemma3n, tmp_path / "dst", ConvertOptions("mxfp8"))
    assert manifest is not None and manifest == read_manifest(tmp_path / "dst")
    assert {name: (entry.tensors, entry.nbytes) for name, entry in (manifest.left or {}).items()} == dict.fromkeys(
        LEFT, (3, BYTES)
    )


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--part", "1/2"]])
def test_strict_refuses_and_writes_nothing(more, gemma3n, tmp_path):
    code, printed = command("convert", gemma3n, tmp_path / "dst", "--strict", *more)
    assert code == 1 and "model.layers.0-1.mlp" in printed and "with strict" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["gemma3n"]


def test_strict_takes_a_model_of_which_nothing_is_left(checkpoint, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeuronMoEWarning)
        manifest = convert_checkpoint(checkpoint("qwen2_moe"), tmp_path / "dst", strict=True)
    assert manifest is not None and manifest.left == {} and left_notes(manifest.left) == []


def test_strict_allows_what_a_glob_keeps(gemma3n, tmp_path):
    globs = ["--precision", "mxfp8", "--strict", "--keep-bf16", "model.layers.0.mlp"]
    code, printed = command("convert", gemma3n, tmp_path / "dst", *globs)
    assert code == 1 and "model.layers.1.mlp: " in printed and "add --keep-bf16 'model.layers.1.mlp'." in printed
    code, printed = command("convert", gemma3n, tmp_path / "dst", *globs, "--keep-bf16", "model.layers.1.mlp")
    assert code == 0 and "note: 2 modules left in source form" in printed


@pytest.mark.filterwarnings("ignore:convert. 2 modules left")
def test_strict_allows_modules_without_a_gate(tmp_path):
    tiny_model("nemotron_h").bfloat16().save_pretrained(tmp_path / "src")
    manifest = convert_checkpoint(tmp_path / "src", tmp_path / "dst", strict=True)
    assert manifest is not None and len(manifest.left or {}) == 2


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "one module"])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_blocks_that_share_weights_are_left(precision, tied, tmp_path, monkeypatch):
    """Zamba ties the MLPs of its layers; other code has one module in two of them. Its files name it once."""
    build = modeling_llama.LlamaModel.__init__
    names = [f"mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
    shared = {f"model.layers.1.{name}": f"model.layers.0.{name}" for name in names}

    def build_shared(self: modeling_llama.LlamaModel, config: LlamaConfig) -> None:
        build(self, config)
        if not tied:
            self.layers[1].mlp = self.layers[0].mlp

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", build_shared)
    monkeypatch.setattr(LlamaForCausalLM, "_tied_weights_keys", shared)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3}
    tiny_model("llama", **sizes, tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "src")
    with pytest.warns(NeuronMoEWarning, match="left in source form.*several modules of the model share its weights"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst", ConvertOptions(precision))
    assert list(read_manifest(tmp_path / "dst").left) == ["model.layers.0.mlp"]
    stock, model = (LlamaForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("src", "dst"))
    patch_model(stock, {"precision": precision}, include=["model.layers.2.*"])
    ids = torch.arange(8)[None]
    # A model of bf16 layouts is patched as a whole, where that is possible: its other blocks round otherwise.
    atol = 0.02 if precision == "bf16" else 0
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=0, atol=atol)

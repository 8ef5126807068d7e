"""NaN and infinity that a conversion kept on request: counted by source tensor, reported, and found by ``verify``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_neuron_moe.cli.main import main
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, finalize_checkpoint, nonfinite_note, read_manifest
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.layout import relayout
from hf_neuron_moe.errors import SourceDamageError
from tests.refusals import refused

EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
GATE = "model.layers.0.block_sparse_moe.experts.11.w1.weight"
NORM = "model.norm.weight"
COUNTS = {EXPERT: 2, GATE: 1, NORM: 3}
TARGETS = [
    ConvertOptions("bf16", "kernel"),
    ConvertOptions("bf16", "fused", tp_degree=2),
    ConvertOptions("mxfp8", "kernel"),
    ConvertOptions("mxfp8", "fused", tp_degree=3),
    ConvertOptions("mxfp4", "kernel", pad=True),
]


def spoil(source: Path) -> None:
    """Put infinities and a NaN into two experts' weights and a norm."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors[EXPERT][5, 7], tensors[EXPERT][63, 95] = float("inf"), float("-inf")
    tensors[GATE][0, 40] = float("nan")
    tensors[NORM][:3] = float("inf")
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", TARGETS, ids=lambda o: f"{o.precision}-{o.layout}-{o.tp_degree}")
def test_kept_values_are_counted_once_and_found_by_verify(options, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    spoil(source)
    manifest = convert_checkpoint(source, tmp_path / "dst", options, on_nonfinite="keep", workers=2)
    assert manifest is not None and manifest.nonfinite == COUNTS
    assert read_manifest(tmp_path / "dst") == manifest
    assert f"6 NaN or infinite values in 3 tensors (first: {GATE})" in nonfinite_note(manifest)
    assert ("in MX" in nonfinite_note(manifest)) == options.quantized
    shown = " ".join(f.subject for f in verify_checkpoint(tmp_path / "dst").findings if f.check == "finite")
    weights = ("layers.1.mlp.experts.down_proj", "layers.0.mlp.experts.gate_up_proj", NORM)
    assert all(weight in shown for weight in weights), shown
    kept = verify_checkpoint(tmp_path / "dst", on_nonfinite="keep")
    assert kept.ok and all(weight in " ".join(kept.notes) for weight in weights)


def test_an_infinity_that_mxfp8_cannot_show_is_known_from_the_manifest(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    spoil(source)
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", "kernel"), on_nonfinite="keep")
    messages = {f.subject: f.message for f in verify_checkpoint(tmp_path / "dst").findings}
    shown = messages["model.layers.1.mlp.experts.down_proj"]
    assert shown == "made of 2 NaN or infinite values, kept on request; 0 show"


def test_parts_count_as_one_run_does(checkpoint, snapshot, tmp_path):
    source, options = checkpoint("mixtral"), ConvertOptions("mxfp8", "kernel", 60_000)
    spoil(source)
    convert_checkpoint(source, tmp_path / "one", options, on_nonfinite="keep")
    for part in (1, 2):
        convert_checkpoint(source, tmp_path / "dst", options, on_nonfinite="keep", part=(part, 2))
    finalize_checkpoint(source, tmp_path / "dst")
    assert snapshot(tmp_path / "dst") == snapshot(tmp_path / "one")


def test_what_an_unfinished_run_kept_is_refused_by_one_that_does_not_keep(checkpoint, tmp_path):
    source, options = checkpoint("mixtral"), ConvertOptions("mxfp8", "kernel", 60_000)
    spoil(source)
    for part in (1, 2):
        convert_checkpoint(source, tmp_path / "dst", options, on_nonfinite="keep", part=(part, 2))
    with refused(
        SourceDamageError,
        "model.safetensors: model.layers.0.block_sparse_moe.experts.11.w1.weight",
        got="1 NaN or infinite ones",
    ):
        convert_checkpoint(source, tmp_path / "dst", options, resume=True)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(("name", "place"), [(GATE, (50, 40)), (EXPERT, (63, 95))])
def test_the_place_that_an_error_names_is_that_in_the_source(name, place, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    tensors = load_file(source / "model.safetensors")
    tensors[name][place] = float("nan")  # in the part of the second rank
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    shown = rf"1 NaN or infinite ones, the first at \[{place[0]}, {place[1]}\]"
    with refused(SourceDamageError, f"model.safetensors: {name}", shown):
        convert_checkpoint(source, tmp_path / "dst", ConvertOptions("bf16", "kernel", tp_degree=2))


def test_the_command_tells(checkpoint, tmp_path, monkeypatch, capsys):
    source = checkpoint("mixtral")
    spoil(source)
    command = ["convert", str(source), "--precision", "mxfp8", "--on-nonfinite", "keep"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["hf-neuron-moe", *command, str(tmp_path / "one")])
    main()
    assert "note: 6 NaN or infinite values in 3 tensors" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["hf-neuron-moe", *command, str(tmp_path / "two"), "--json"])
    main()
    assert json.loads(capsys.readouterr().out)["nonfinite_values"] == 6


def test_kept_values_of_all_reads_of_a_tensor_are_counted(checkpoint, tmp_path, monkeypatch):
    source = checkpoint("mixtral")
    spoil(source)
    monkeypatch.setattr(relayout, "READ_BYTES", 1 << 10)  # a few rows at a time
    manifest = convert_checkpoint(source, tmp_path / "dst", TARGETS[0], on_nonfinite="keep")
    assert manifest is not None and manifest.nonfinite == COUNTS

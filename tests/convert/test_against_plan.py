"""Manifests that agree with themselves and with every byte, and say what the source's configuration does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.manifest import MANIFEST_FILE, sealed
from tests.convert.quantized_sources import to_fp8
from tests.convert.test_every_family import made

EXPERTS = "model.layers.0.mlp.experts"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest's content, and its checksum with it."""
    path = folder / MANIFEST_FILE
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(sealed(content)))


def _another_limit(content: dict[str, Any]) -> None:
    content["networks"][EXPERTS]["gate"]["alpha"] = 1.0


def _silu(content: dict[str, Any]) -> None:
    content["networks"][EXPERTS]["gate"] = {}


def _no_biases(content: dict[str, Any]) -> None:
    content["networks"][EXPERTS]["biases"] = []


def _none(content: dict[str, Any]) -> None:
    content["networks"] = {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [_another_limit, _silu, _no_biases, _none])
def test_another_gate_than_the_configuration_has_is_found(change, tmp_path):
    source, folder = made("gpt_oss", tmp_path / "src"), tmp_path / "dst"
    convert_checkpoint(source, folder, ConvertOptions("mxfp8", pad=True))
    assert verify_checkpoint(folder, source, probes=1).ok
    rewrite(folder, change)
    assert verify_checkpoint(folder).ok, "without the source nothing can be seen"
    found = verify_checkpoint(folder, source, probes=1).findings
    assert found and {finding.check for finding in found} == {"source"}
    assert found[0].subject == EXPERTS and found[0].message.startswith("said to compute ")


def test_a_gate_that_a_swiglu_does_not_have_is_found(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst")
    rewrite(tmp_path / "dst", lambda content: content["networks"].update(_gelu("model.layers.1.mlp")))
    (finding,) = verify_checkpoint(tmp_path / "dst", source).findings
    assert str(finding) == (
        "source: model.layers.1.mlp: said to compute act gelu, and the source's configuration says silu(gate) * up"
    )


def _gelu(module: str) -> dict[str, Any]:
    return {module: {"gate": {"act": "gelu"}, "biases": []}}


def _exchange_experts(content: dict[str, Any]) -> None:
    """Say that the first two experts lie in each other's place, in both weights."""
    for name in [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"]:
        for piece in content["weights"][name]:
            piece["expert"] = {0: 1, 1: 0}.get(piece["expert"], piece["expert"])


def _exchange_halves(content: dict[str, Any]) -> None:
    """Say that up is gate and gate is up, of every expert."""
    for piece in content["weights"][f"{EXPERTS}.gate_up_proj"]:
        piece["start"] = 0 if piece["start"] else piece["shape"][0]


@pytest.mark.parametrize("change", [_exchange_experts, _exchange_halves])
def test_tensors_in_another_order_are_found_before_any_value_is_read(change, checkpoint, tmp_path):
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst")
    rewrite(tmp_path / "dst", change)
    report = verify_checkpoint(tmp_path / "dst", source)
    assert {(each.check, each.message) for each in report.findings} == {
        ("source", "made of other tensors, or in another order, than the source's configuration says")
    }
    assert report.skipped["probe"] and not report.probes


def _invented(content: dict[str, Any]) -> None:
    content["left"]["model.layers.0.mlp"] = {"reason": "no gate", "tensors": 1, "nbytes": 2}


def _other_version(content: dict[str, Any]) -> None:
    _invented(content)
    content["tool_version"] = "0.0.1"


def test_what_is_said_to_be_left_is_a_finding_or_with_another_version_a_note(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst")
    rewrite(tmp_path / "dst", _invented)
    (finding,) = verify_checkpoint(tmp_path / "dst", source).findings
    assert (finding.check, finding.subject) == ("source", "model.layers.0.mlp")
    (shown,) = verify_checkpoint(tmp_path / "dst", source).to_dict()["findings"]
    assert shown == {"check": "source", "subject": "model.layers.0.mlp", "message": finding.message}
    rewrite(tmp_path / "dst", _other_version)
    report = verify_checkpoint(tmp_path / "dst", source)
    assert report.ok
    (note,) = report.notes
    assert report.to_dict()["notes"] == [note] and report.to_dict()["findings"] == []
    assert note.startswith("model.layers.0.mlp: what stays in its source form differs") and "0.0.1 converted it" in note


def test_another_method_of_the_source_is_found(checkpoint, tmp_path):
    source = checkpoint("qwen3_moe")
    to_fp8(source, block=(32, 32))
    convert_checkpoint(source, tmp_path / "dst")
    rewrite(tmp_path / "dst", lambda content: content["source_format"].update(method="mxfp4"))
    (finding,) = verify_checkpoint(tmp_path / "dst", source).findings
    assert (finding.check, finding.subject) == ("source", "source") and "quantized tensors" in finding.message


@pytest.mark.filterwarnings("ignore:convert. .* do not fit bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_counts_of_rounded_values_are_counted_again(dtype, checkpoint, tmp_path):
    source = checkpoint("mixtral", dtype)
    manifest = convert_checkpoint(source, tmp_path / "dst")
    assert manifest is not None and manifest.rounded
    assert verify_checkpoint(tmp_path / "dst", source).ok
    name = next(iter(manifest.rounded))
    rewrite(tmp_path / "dst", lambda content: content["rounded"].update({name: manifest.rounded[name] + 1}))
    (finding,) = verify_checkpoint(tmp_path / "dst", source).findings
    assert (finding.check, finding.subject) == ("source", name)
    assert finding.message.startswith(f"{manifest.rounded[name] + 1:,} values said to be rounded to bf16, ")


def test_rounded_values_of_bf16_and_of_copies_are_none(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst")
    own, copied = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"
    rewrite(tmp_path / "dst", lambda content: content["rounded"].update({own: 1, copied: 1}))
    found = verify_checkpoint(tmp_path / "dst", source).findings
    assert [finding.subject for finding in found] == [own, copied]


def test_hidden_files_are_notes_and_others_findings(checkpoint, tmp_path):
    convert_checkpoint(checkpoint("llama"), tmp_path / "dst")
    (tmp_path / "dst" / ".gitattributes").write_text("")
    report = verify_checkpoint(tmp_path / "dst")
    assert report.ok and report.notes == [".gitattributes: not part of the conversion, and hidden"]
    (tmp_path / "dst" / "_other").write_text("")
    (finding,) = verify_checkpoint(tmp_path / "dst").findings
    assert (finding.check, finding.subject) == ("files", "_other")


def test_what_was_probed_is_said(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst")
    every = verify_checkpoint(tmp_path / "dst", source, probes=0)
    assert every.done["probe"] == "2 layers compared with the source, all their 24 experts (seed 0)"
    some = verify_checkpoint(tmp_path / "dst", source, probes=1, seed=3)
    assert some.done["probe"] == "1 layer compared with the source (seed 3)"


def test_why_nothing_is_probed(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst")
    with open(source / "model.safetensors", "ab") as file:
        file.write(b"0")
    skipped = verify_checkpoint(tmp_path / "dst", source).skipped
    assert skipped == {"probe": "the source is not the one that was converted"}
    (tmp_path / "dst" / "generation_config.json").write_text("{}")
    report = verify_checkpoint(tmp_path / "dst", source)
    assert {finding.check for finding in report.findings} == {"files", "source"}
    assert report.skipped == {"probe": "the files are damaged already"}


def test_a_source_that_cannot_be_planned_is_a_finding(checkpoint, tmp_path):
    source = checkpoint("llama")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions({"*": "mxfp8", "model.layers.0.mlp": "bf16"}))
    assert verify_checkpoint(tmp_path / "dst", source).ok
    config = source / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 1}))
    found = verify_checkpoint(tmp_path / "dst", source).findings
    assert found and {each.check for each in found} == {"source"}

"""Commands that look at a model take its Hub id, and fetch no more than they read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from tests.hub_cache import hub_cache

MODEL = "some-org/tiny"


@pytest.fixture
def in_cache(tmp_path, monkeypatch):
    """Return a function that puts a folder into the Hub's cache, where it is the only model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return lambda folder: hub_cache(tmp_path / "cache", folder, "main")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", [["plan"], ["estimate", "--tokens", 8], ["doctor"], ["inspect"]])
def test_a_model_of_the_hub(command, model_dir, in_cache, run):
    expected = run(*command, model_dir, "--json")
    snapshot = in_cache(model_dir)
    if command != ["inspect"]:
        (snapshot / "model.safetensors").unlink()  # config.json is enough
    result = run(*command, MODEL, "--json")
    assert (result.code, result.err) == (expected.code, "") == (0, ""), result
    of_hub, of_folder = json.loads(result.out), json.loads(expected.out)
    for shown in (of_hub, of_folder):
        for place in ("model", "directory", "date"):
            shown.pop(place, None)
    assert of_hub == of_folder


def test_a_conversion_of_the_hub_is_verified_against_a_source_of_it(model_dir, in_cache, run, tmp_path):
    convert_checkpoint(model_dir, tmp_path / "made", ConvertOptions(precision="mxfp8"))
    in_cache(tmp_path / "made")
    export = ["export", MODEL, "back", "--allow-inexact"]
    for command in (["verify", MODEL, "--source", model_dir], ["inspect", MODEL], export):
        assert run(*command).code == 0, command
    assert (Path("back") / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ["plan", "verify", "inspect", "doctor"])
def test_a_model_that_the_hub_does_not_have(command, in_cache, run):
    result = run(command, "some-org/unknown")
    assert result.code == 3 and result.err.count("\n") == 1 and "hf download some-org/unknown" in result.err
    assert "OfflineModeIsEnabled" in result.err and "locate the files" not in result.err, "nor other advice"

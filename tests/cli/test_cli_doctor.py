"""The command ``doctor``: what is told on machines with everything, nothing, or something broken installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from hf_neuron_moe.device.installed import ENVIRONMENT, MISSING, OK, PLACEHOLDER, inspect_installation
from hf_neuron_moe.device.judge import BOUNDS
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed

WRONG = "WRONG PACKAGE. Please install the package from Neuron Repository"


def put(folder: Path, distribution: str, version: str, description: str, module: str = "", code: str = "") -> None:
    """Install a package by hand."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n\n{description}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    if module:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(code, encoding="utf-8")


def test_doctor_works_with_nothing_installed(run, model_dir):
    result = run("doctor", model_dir)
    assert (result.code, result.err) == (0, "")
    for line in ('backend="neuron" can run here: no: nki is not installed', "Neuron SDK not installed", "nki-library"):
        assert line in result.out
    assert "1 x mlp (64, 96), mxfp8: mlp_forward_mxfp8_nki, mlp_backward_mxfp8_nki" in result.out
    assert "nkilib documents no bf16 kernel pair for dense MLPs" in result.out
    assert run("doctor", "--strict").code == 1


def test_doctor_as_json(run, mixtral_dir):
    told = json.loads(run("doctor", mixtral_dir, "--json").out)
    assert (told["ok"], told["usable"], told["sdk"], told["devices"]) == (True, False, None, None)
    assert {package["state"] for package in told["packages"]} == {MISSING}
    assert told["kernels"] and {kernel["generation"] for kernel in told["kernels"]} == {None}
    bf16, mxfp8 = told["blocks"]
    assert (bf16["precision"], bf16["experts"], len(bf16["names"])) == ("bf16", 4, 2)
    assert bf16["kernels"] == ["moe_cte", "blockwise_mm_bwd"]
    sizes = [256, 512, 1024, 2048, 4096]
    assert bf16["documented"]["trn2"] == {"usable": True, "reason": None, "block_sizes": sizes}
    assert mxfp8["documented"]["trn3"] == {"usable": True, "reason": None, "block_sizes": [128, *sizes]}
    assert bf16["block_size"] == 512 and mxfp8["documented"]["trn2"]["block_sizes"] == []
    assert mxfp8["documented"]["trn3"]["usable"] and "Trn3 only" in mxfp8["documented"]["trn2"]["reason"]
    assert not bf16["here"]["usable"] and "nki is not installed" in bf16["here"]["reason"]


def test_doctor_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None\nfrom hf_neuron_moe.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert json.loads(result.stdout)["usable"] is False


def test_doctor_on_machines(run, mixtral_dir, tmp_path):
    for release, target, block_size, usable in (((2, 33), "trn3", 512, True), ((2, 31), "trn2", 2048, False)):
        double = Double(release=release, target=target)
        with installed(tmp_path / target, double):
            result = run("doctor", mixtral_dir, "--json", "--block-size", block_size)
            text = run("doctor", mixtral_dir, "--block-size", block_size).out
            strict = run("doctor", mixtral_dir, "--strict", "--block-size", block_size).code
        told = json.loads(result.out)
        assert told["usable"] and told["sdk"] == "2.33", "of nki, which stays 0.7.0 on every one of these machines"
        assert told["target"] == {"value": target, "source": "NEURON_PLATFORM_TARGET_OVERRIDE"}
        assert told["environment"]["NEURON_LOGICAL_NC_CONFIG"] == told["lnc"]["value"] == "2"
        packages = {package["name"]: (package["state"], package["version"]) for package in told["packages"]}
        assert packages["nki"] == (OK, "0.7.0") and packages["neuronx-cc"] == (OK, "2.28.7631")
        assert told["blocks"][0]["here"]["usable"] is usable
        assert 'backend="neuron" can run here: yes' in text
        assert strict == (0 if usable else 1)
        kernels = {kernel["need"]: kernel["generation"] for kernel in told["kernels"]}
        assert (kernels["moe_forward_mxfp8"] is None) == (release == (2, 31))
        if not usable:
            assert "block_size is 2048" in told["blocks"][0]["here"]["reason"]
            assert "no blockwise_mm_fwd_mxfp8" in text
        assert not double.launches


def test_placeholders_of_pypi_are_recognized(tmp_path, monkeypatch):
    """As they are on PyPI: two that raise on import, one whose module cannot be named, one without a module."""
    raises = f"raise ImportError({WRONG!r})"
    put(tmp_path, "nki", "0.0.1", WRONG, "nki", raises)
    put(tmp_path, "torch-neuronx", "1.0", WRONG, "torch_neuronx", raises)
    put(tmp_path, "neuronx-cc", "1.0.post1", WRONG)
    put(tmp_path, "nki-library", "0.0.2", "NKI Library does not publish installable wheels to PyPI.")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = inspect_installation()
    assert {package.name: package.state for package in found.packages} == dict.fromkeys(
        ("nki", "nki-library", "torch-neuronx", "neuronx-cc"), PLACEHOLDER
    )
    assert not found.usable and "WRONG PACKAGE" in str(found.reason)
    assert all("AWS's own index" in package.note for package in found.packages)


def test_a_bad_setting_is_told_and_not_raised(run, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "3")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    told = json.loads(run("doctor", "--json").out)
    assert told["lnc"]["value"] is None and "1 or 2" in told["lnc"]["source"]
    assert told["target"]["value"] is None and "trn9" in told["target"]["source"]


def test_the_document_names_the_variables_and_the_bounds(repo_root):
    page = (repo_root / "docs" / "neuron.md").read_text(encoding="utf-8")
    table = page.partition("### Environment variables")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ENVIRONMENT)
    bf16, mxfp8 = BOUNDS["bf16"], BOUNDS["mxfp8"]
    for text in (
        f"{bf16.good_db:.0f} dB and more, and within {100 * bf16.relative:.0f} %",
        f"{mxfp8.good_db:.0f} dB and more, within {100 * mxfp8.relative:.0f} %",
        f"({bf16.slice_db:.0f} dB in bf16, {mxfp8.slice_db:.0f} in MXFP8",
        f"({100 * bf16.factor:.1f} %)",
    ):
        assert text in page
    for bounds in (bf16, mxfp8):
        assert f"{bounds.least_db:.0f} to {bounds.good_db:.0f} dB" in page

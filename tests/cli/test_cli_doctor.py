"""The commands ``doctor`` and ``estimate --device``: what is told with nothing installed, and the numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import MixtralConfig

from hf_neuron_moe.device.judge import BOUNDS
from hf_neuron_moe.device.figures import CHIPS
from hf_neuron_moe.device.installed import ENVIRONMENT, MISSING, OK, PLACEHOLDER, inspect_installation
from hf_neuron_moe.device.roofline import roofline
from hf_neuron_moe.device.usable import BlockGroup
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed

WRONG = "WRONG PACKAGE. Please install the package from Neuron Repository"


@pytest.fixture(scope="module")
def mixtral_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights."""
    config = MixtralConfig(
        hidden_size=512,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    folder = tmp_path_factory.mktemp("config") / "mixtral"
    config.save_pretrained(folder)
    return folder


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
    assert bf16["documented"]["trn2"] == bf16["documented"]["trn3"] == {"usable": True, "reason": None}
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


def test_estimate_tells_the_least_time(run, mixtral_dir):
    options = ["--length", 2048, "--activations", "minimal"]
    text = run("estimate", mixtral_dir, *options, "--device", "trn2")
    assert text.code == 0, text.err
    assert "An ESTIMATE from published figures; nothing was measured" in text.out
    assert "2 x experts 4 x" in text.out and "All of these blocks: at least" in text.out
    told = json.loads(run("estimate", mixtral_dir, *options, "--device", "trn3", "--precision", "mxfp8", "--json").out)
    floor = told["roofline"]
    assert (floor["device"], floor["tokens"], floor["block_size"]) == ("trn3", 2048, 512)
    assert "estimate" in floor["kind"] and "AWS Neuron documentation" in floor["source"] and floor["assumptions"]
    (blocks,) = floor["blocks"]
    assert blocks["flops"] == 18 * 4096 * 512 * 96
    assert [choice["block_size"] for choice in blocks["block_sizes"]] == [128, 256, 512, 1024, 2048, 4096]
    assert "roofline" not in json.loads(run("estimate", mixtral_dir, *options, "--json").out)
    assert run("estimate", mixtral_dir, *options, "--device", "trn4").code == 2
    assert run("estimate", mixtral_dir, *options, "--block-size", 384).code == 2


def test_a_dense_floor_by_hand():
    group = BlockGroup("mlp", ("a", "b"), None, None, 4096, 14336, None)
    line = roofline([group], "trn3", "mxfp8", 4096)
    (part,) = line.groups
    floor = part.floor
    assert floor is not None and part.reason is None and part.padding_overhead_percent == 0.0
    assert floor.padded_flops == 18 * 4096 * 4096 * 14336
    # A logical core is a quarter of a chip of 2,517 TFLOP/s.
    assert floor.compute_seconds == pytest.approx(18 * 4096 * 4096 * 14336 / 629.25e12, rel=1e-12)
    wide, row, weights = 4096 * 14336, 4096 * 4096, 3 * 4096 * 14336
    assert floor.bytes == 2 * (5 * row + 3 * weights + 6 * wide)
    assert floor.bound == "compute" and floor.seconds >= floor.compute_seconds
    assert line.seconds == 2 * floor.seconds
    few = roofline([group], "trn3", "mxfp8", 1).groups[0]
    assert few.floor is not None and few.floor.bound == "memory"
    assert few.padding_overhead_percent == pytest.approx(12700.0), "one row of a tile of 128"


def test_block_sizes_trade_padding_against_weights():
    group = BlockGroup("experts", ("a",), 128, 8, 2048, 768, None)
    few, many = (roofline([group], "trn2", "bf16", tokens, 256).groups[0] for tokens in (512, 32768))
    assert [choice.block_size for choice in few.choices] == [256, 512, 1024, 2048, 4096]
    assert few.best_block_size == 256
    assert many.best_block_size is not None and many.best_block_size > 256
    padded = [choice.padded_flops for choice in few.choices]
    assert padded == sorted(padded)
    # 4,096 pairs fill 16 blocks of 256; the worst routing opens 127 more.
    assert few.padding_overhead_percent == pytest.approx(100 * (143 * 256 / 4096 - 1))


def test_blocks_without_kernels_have_a_reason():
    dense = BlockGroup("mlp", ("a",), None, None, 512, 512, None)
    assert "no bf16 kernel pair" in str(roofline([dense], "trn2", "bf16", 64).groups[0].reason)
    impossible = roofline([dense], "trn2", "mxfp8", 64)
    assert impossible.groups[0].floor is None and "Trn3 only" in str(impossible.groups[0].reason)
    assert impossible.seconds == 0
    unknown = BlockGroup("experts", ("a",), 8, 0, 512, 512, None)
    assert "how many experts" in str(roofline([unknown], "trn2", "bf16", 64).groups[0].reason)
    odd = BlockGroup("mlp", ("a",), None, None, None, None, "its activation is GELU")
    assert roofline([odd], "trn2", "bf16", 64).groups[0].reason == odd.reason
    json.dumps(roofline([dense, unknown, odd], "trn3", "fp32", 64).to_dict(), allow_nan=False)


def test_a_logical_core_is_a_quarter_of_a_chip():
    core = CHIPS["trn2"].core()
    assert (core.flops["bf16"], core.bandwidth, core.memory) == (166.75e12, 0.725e12, 24 * 2**30)
    assert CHIPS["trn3"].core(1).memory == 18 * 2**30


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

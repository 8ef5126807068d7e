"""What verify and inspect compute with: places by formula, and floors that no data fall below."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint, read_manifest
from hf_neuron_moe.convert.audit.compare import BF16_FLOOR_DB, MX_FLOORS_DB, LayerProbe, blocks_of, sqnr_db
from hf_neuron_moe.convert.audit.inspect import inspect_checkpoint
from hf_neuron_moe.convert.audit.networks import is_gate
from hf_neuron_moe.convert.audit.operands import k_positions, scale_row_of
from hf_neuron_moe.convert.audit.verify import verify_checkpoint
from hf_neuron_moe.convert.layout.orientations import SOURCE
from hf_neuron_moe.errors import NeuronMoEWarning
from hf_neuron_moe.formats.mx import fake_quantize_mx
from hf_neuron_moe.formats.scales import scale_rows
from hf_neuron_moe.formats.swizzle import k_map

FORMATS = {"mxfp8": "e4m3fn", "mxfp4": "e2m1"}


@pytest.mark.parametrize("K", [*range(32, 1200, 32), 2048, 2176, 4096, 6400])
def test_places_by_formula_are_those_that_the_formats_write(K):
    row, lane = k_positions(K)
    assert torch.equal(k_map(K)[row, lane], torch.arange(K))
    blocks = torch.arange(K // 32)
    for layout in ("compact", "oversized", "packed"):
        assert torch.equal(scale_row_of(blocks, layout), scale_rows(K, layout))


# Magnitudes around which rounding, clipping and flushing are worst, in powers of two and just beside them.
HARD = st.sampled_from(
    [0.0, 0.2499, 0.25, 0.2501, 1.0, 1.0625, 1.25, 1.75, 1.9375, 1.999, 2.0, 2.5, 3.5, 3.999, 4.0, 5.0]
)
BLOCK = st.lists(st.tuples(HARD, st.integers(-12, 3)), min_size=32, max_size=32)


@pytest.mark.parametrize("precision", FORMATS)
@given(values=BLOCK, exponent=st.integers(-60, 60))
def test_no_block_falls_below_its_floor(precision, values, exponent):
    block = torch.tensor([[math.ldexp(value, step + exponent) for value, step in values]]).bfloat16()
    for rule, floor in MX_FLOORS_DB[precision].items():
        held = fake_quantize_mx(block, fmt=FORMATS[precision], rule=rule)
        assert sqnr_db(block, held) >= floor, (rule, block)


@pytest.mark.parametrize(
    ("precision", "rule", "first", "rest"),
    [
        ("mxfp8", "neuron", 1.0625, 1.0625),
        ("mxfp8", "ceil", 1.0625, 1.0625),
        ("mxfp8", "rceil", 1.0625, 1.0625),
        ("mxfp8", "floor", 1.996, 0.0),
        ("mxfp8", "even", 247 / 128, 0.0),
        ("mxfp4", "neuron", 2.0, 0.25),
        ("mxfp4", "ceil", 2.016, 0.25),
        ("mxfp4", "rceil", 3.016, 0.25),
        ("mxfp4", "floor", 4.0, 0.25),
        ("mxfp4", "even", 3.5, 0.25),
    ],
)
def test_floors_are_not_lower_than_the_worst_block_needs(precision, rule, first, rest):
    block = torch.tensor([[first, *[rest] * 31]]).bfloat16()
    worst = sqnr_db(block, fake_quantize_mx(block, fmt=FORMATS[precision], rule=rule))
    floor = MX_FLOORS_DB[precision][rule]
    assert floor <= worst < floor + 0.9


def test_bf16_floor():
    values = (
        1 + torch.arange(2**12, dtype=torch.float32) / 2**12
    )  # every place between two bf16 values and a sixteenth of it
    errors = (values - values.bfloat16().float()).abs() / values
    worst = -20 * math.log10(float(errors.max()))
    assert BF16_FLOOR_DB <= worst < BF16_FLOOR_DB + 0.3


def test_sqnr_of_special_cases():
    one = torch.ones(4)
    assert sqnr_db(one, one) == math.inf
    assert sqnr_db(torch.zeros(4), torch.zeros(4)) == math.inf
    assert sqnr_db(torch.zeros(4), one) == -math.inf
    assert math.isnan(sqnr_db(one, torch.full((4,), math.nan)))
    assert math.isnan(sqnr_db(one, torch.full((4,), math.inf))) and math.isnan(sqnr_db(one * math.inf, one))
    assert sqnr_db(one, one * 0.9) == pytest.approx(20.0, abs=1e-4)


def test_blocks_pair_every_converted_weight(checkpoint, tmp_path):
    manifest = convert_checkpoint(checkpoint("qwen2_moe"), tmp_path / "dst")
    blocks = blocks_of(manifest)
    assert [block.name for block in blocks][:2] == [
        "model.layers.0.mlp.experts",
        "model.layers.0.mlp.shared_expert",
    ]
    weights = {tensor.weight for tensor in manifest.tensors if tensor.layout != SOURCE}
    assert {name for block in blocks for name in (block.gate_up, block.down)} == weights


def test_inspect_tells_contents_and_errors(checkpoint, tmp_path):
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst", ConvertOptions("mxfp8", "kernel", 100_000, tp_degree=3))
    report = inspect_checkpoint(tmp_path / "dst", source)
    manifest = read_manifest(tmp_path / "dst")
    assert [tensor.name for tensor in report.tensors] == [tensor.name for tensor in manifest.tensors]
    shown = report.to_dict()
    assert shown["bytes"] == sum(entry["bytes"] for entry in shown["layouts"].values())
    assert shown["files"] == len({tensor.file for tensor in manifest.tensors}) > 3
    compared = {tensor.name: tensor.sqnr for tensor in report.tensors if tensor.sqnr is not None}
    assert compared.keys() == {t.name for t in manifest.tensors if t.layout == "mxfp8_swizzled_codes"}
    assert all(29 < value < 34 for value in compared.values()), "Gaussian weights in e4m3 have about 31.5 dB"
    text = report.to_text()
    assert "model.layers.*.mlp.experts.down_proj_T.tp*" in text and "backward, packed scales" in text
    assert text.count("\n") < len(report.tensors) and "None" not in text.splitlines()[1]
    assert report.to_text(every=True).count("model.layers.1.mlp.experts.down_proj_T.tp2 ") == 1
    assert all(tensor.sqnr is None for tensor in inspect_checkpoint(tmp_path / "dst").tensors)


def test_inspect_gives_the_error_of_the_worst_expert(checkpoint, tmp_path):
    source = checkpoint("mixtral", torch.float32)
    with pytest.warns(NeuronMoEWarning):
        convert_checkpoint(source, tmp_path / "bf16", ConvertOptions("bf16", "kernel"))
    shown = {t.name: t.sqnr for t in inspect_checkpoint(tmp_path / "bf16", source).tensors if t.layout != SOURCE}
    from safetensors.torch import load_file

    tensors = load_file(source / "model.safetensors")
    prefix = "model.layers.0.block_sparse_moe.experts."
    experts = [tensors[f"{prefix}{expert}.w2.weight"] for expert in range(12)]
    worst = min(sqnr_db(matrix, matrix.bfloat16()) for matrix in experts)
    assert shown["model.layers.0.mlp.experts.down_proj"] == pytest.approx(worst, abs=1e-9)


def test_inspect_of_an_ordinary_checkpoint(checkpoint):
    source = checkpoint("llama", shard="30KB")
    report = inspect_checkpoint(source)
    assert (report.kind, report.options) == ("checkpoint", {})
    assert len(report.tensors) == 21 and set(report.layouts) == {"Hugging Face"}
    assert "model.layers.*.mlp.up_proj.weight" in report.to_text()


def test_limits_of_a_gate_leave_something_between_them():
    assert is_gate({"gate_min": 0.0, "gate_max": 1.0}, True)
    assert not is_gate({"gate_min": 1.0, "gate_max": 1.0}, True)
    assert not is_gate({"up_min": 2.0, "up_max": 1.0}, True)


@pytest.mark.parametrize(
    ("options", "least"), [(ConvertOptions("bf16", tp_degree=3), 140), (ConvertOptions("mxfp8"), 10)]
)
def test_an_output_has_a_floor_that_a_wrong_layer_falls_below(options, least, checkpoint, tmp_path):
    """A layer with another gate or expert has less than 10 dB, one that is summed in fp32 about 140."""
    source = checkpoint("mixtral")
    convert_checkpoint(source, tmp_path / "dst", options)
    probes = verify_checkpoint(tmp_path / "dst", source).probes
    assert probes and all(least < probe.output_floor <= probe.output for probe in probes)


def test_what_is_no_number_is_below_every_floor():
    good = LayerProbe("mlp", 3, {"w": 30.0}, {"w": 24.0}, output=20.0, output_floor=17.0, stray={"w": 0})
    assert not good.faults and good.to_dict()["ok"] is True
    bad = replace(good, weights={"w": math.nan}, output=math.nan, stray={"w": 2}, changed=("b",))
    faults = ("w has undefined", "w has 2 values in its padding", "b is not", "output has undefined")
    assert len(bad.faults) == 4 and bad.to_dict()["ok"] is False
    assert all(found.startswith(f"expert 3: {fault}") for found, fault in zip(bad.faults, faults))

"""Byte equality with recorded tensors, and the documented numbers of the Neuron rule and of the OCP rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_neuron_moe.formats import (
    dequantize_mx,
    fake_quantize_mx,
    k_map,
    pack_x4,
    quantize_mx,
    quantize_mx_swizzled,
    swizzle,
    to_compact,
    to_oversized,
    to_packed,
    unswizzle,
)

RULES = ["neuron", "floor", "ceil", "rceil", "even"]
GOLDEN_K = [128, 512, 1408, 2176]


@pytest.fixture(params=GOLDEN_K)
def golden(request: pytest.FixtureRequest, golden_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(golden_dir / f"mxfp8_format_K{request.param}.safetensors")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integer view, so that NaN and the sign of zero take part in comparisons."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_quantize_matches_the_recorded_bytes(golden: dict[str, torch.Tensor]) -> None:
    quantized = quantize_mx(golden["weight"])
    assert torch.equal(quantized.codes, golden["codes"])
    assert torch.equal(quantized.scales, golden["scales_compact"])
    assert torch.equal(pack_x4(quantized.codes), golden["x4"])


def test_swizzle_matches_the_recorded_layout(golden: dict[str, torch.Tensor]) -> None:
    swizzled = swizzle(golden["weight"])
    assert torch.equal(bits(swizzled), bits(golden["swizzled"]))
    assert torch.equal(bits(unswizzle(golden["swizzled"])), bits(golden["weight"]))
    from_swizzled = quantize_mx_swizzled(golden["swizzled"])
    assert torch.equal(from_swizzled.codes, golden["codes"])
    assert torch.equal(from_swizzled.scales, golden["scales_compact"])


def test_dequantize_matches_the_recorded_values(golden: dict[str, torch.Tensor]) -> None:
    values = dequantize_mx(golden["codes"], golden["scales_compact"])
    assert torch.equal(bits(values), bits(golden["dequantised_swizzled"]))
    natural = fake_quantize_mx(golden["weight"])
    assert torch.equal(bits(swizzle(natural)), bits(golden["dequantised_swizzled"]))


def test_scale_layouts_match_the_recorded_ones(golden: dict[str, torch.Tensor]) -> None:
    K = golden["weight"].shape[1]
    compact = golden["scales_compact"]
    assert torch.equal(to_compact(golden["scales_oversized"], K), compact)
    assert torch.equal(to_compact(golden["scales_packed"], K), compact)
    # The recorded unused rows are 0, and so are ours; kernels may leave anything there.
    assert torch.equal(to_oversized(compact), golden["scales_oversized"])
    assert torch.equal(to_packed(compact), golden["scales_packed"])


def test_recorded_files_are_the_ones_the_manifest_describes(golden_dir: Path) -> None:
    manifest = json.loads((golden_dir / "manifest_mlp.json").read_text())
    described = {entry["file"]: entry["tensors"] for entry in manifest["files"]}
    for K in GOLDEN_K:
        tensors = load_file(golden_dir / f"mxfp8_format_K{K}.safetensors")
        expected = described[f"mxfp8_format_K{K}.safetensors"]
        found = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
        assert found == expected


def single(value: float, **options: str) -> tuple[int, int]:
    """Byte and code of a block that holds `value` and zeros."""
    block = torch.zeros(1, 32)
    block[0, 0] = value
    quantized = quantize_mx(block, scheme="1x32", **options)
    assert not quantized.codes.flatten()[1:].any()
    return int(quantized.scales[0, 0]), int(quantized.codes[0, 0])


@pytest.mark.parametrize(
    ("value", "byte", "code"),
    [
        (0.0, 0, 0x00),
        (2.0**-133, 0, 0x08),
        (2.0**-126, 0, 0x40),
        (2.0**-121, 0, 0x68),
        (2.0**-120, 0, 0x70),
        (torch.finfo(torch.bfloat16).max, 247, 0x78),
        (float("inf"), 248, 0x7E),
        (float("-inf"), 248, 0xFE),
        (float("nan"), 248, 0x7F),
    ],
)
def test_special_blocks_clamp(value: float, byte: int, code: int) -> None:
    """The scale byte is clamped at 0 and the data are divided by the clamped scale."""
    assert single(value) == (byte, code)


@pytest.mark.parametrize(
    ("fmt", "value", "byte", "code"),
    [
        ("e5m2", float("inf"), 241, 0x7B),
        ("e5m2", float("nan"), 241, 0x7F),
        ("e5m2", 2.0**-113, 0, 0x74),
        ("e2m1", float("inf"), 254, 0x7),
        ("e2m1", float("-inf"), 254, 0xF),
    ],
)
def test_special_blocks_of_other_formats(fmt: str, value: float, byte: int, code: int) -> None:
    assert single(value, fmt=fmt) == (byte, code)


def test_a_negative_nan_keeps_its_sign() -> None:
    block = torch.zeros(1, 32)
    block[0, 0] = torch.tensor(-0x00400000, dtype=torch.int32).view(torch.float32)
    assert int(quantize_mx(block, scheme="1x32").codes[0, 0]) == 0xFF


def test_infinity_flushes_its_finite_neighbors() -> None:
    block = torch.zeros(1, 32)
    block[0, :3] = torch.tensor([float("inf"), 2.0**110, 2.0**112])
    values = fake_quantize_mx(block, scheme="1x32")[0]
    assert values[:3].tolist() == [float("inf"), 0.0, 2.0**112]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil", "even"])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1"])
def test_ocp_rules_turn_a_nonfinite_block_into_nan(fmt: str, rule: str, value: float) -> None:
    block = torch.ones(2, 32)
    block[0, 3] = value
    values = fake_quantize_mx(block, fmt=fmt, rule=rule, scheme="1x32")
    assert torch.isnan(values[0]).all()
    assert torch.equal(values[1], torch.ones(32))


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
def test_codes_of_a_nan_block_do_not_depend_on_other_blocks(fmt: str) -> None:
    block = torch.zeros(1, 32)
    block[0, 3] = float("nan")
    alone = quantize_mx(block, fmt=fmt, rule="floor", scheme="1x32")
    beside_zeros = quantize_mx(torch.cat([block, torch.zeros(1, 32)]), fmt=fmt, rule="floor", scheme="1x32")
    assert torch.equal(alone.codes, beside_zeros.codes[:, :4])
    assert (alone.codes & 0x7F == 0x7F).all()


def test_e2m1_puts_nan_in_the_scale() -> None:
    block = torch.ones(1, 32)
    block[0, 3] = float("nan")
    quantized = quantize_mx(block, fmt="e2m1", scheme="1x32")
    assert int(quantized.scales) == 255
    assert torch.isnan(dequantize_mx(quantized.codes, quantized.scales, fmt="e2m1")).all()


def test_worked_block() -> None:
    column = torch.tensor([3, -1.7, 0.3, 0.01, 0.0005, 2.71875, -0.0078125, 1.0])
    weight = torch.zeros(1, 128, dtype=torch.bfloat16)
    weight[0, :8] = column  # K = 0..7 are lane 0 of swizzled rows 0..7: one column of block 0
    dequantized = [3, -1.75, 0.3125, 0.009765625, 0.00048828125, 2.75, -0.0078125, 1]
    for rule, byte, codes in (
        ("neuron", 121, [0x74, 0xEE, 0x5A, 0x32, 0x10, 0x73, 0xB0, 0x68]),
        ("floor", 120, [0x7C, 0xF6, 0x62, 0x3A, 0x18, 0x7B, 0xB8, 0x70]),
    ):
        quantized = quantize_mx(weight, rule=rule)
        assert quantized.scales.flatten().tolist() == [byte, 0, 0, 0]
        assert quantized.codes[:8, 0].tolist() == codes
        assert not quantized.codes[:, 1:].any()
        assert fake_quantize_mx(weight, rule=rule)[0, :8].tolist() == dequantized


@pytest.mark.parametrize(
    ("amax", *RULES),
    [
        (1.0, (120, 0x70, 1), (119, 0x78, 1), (119, 0x78, 1), (119, 0x78, 1), (119, 0x78, 1)),
        (1.5, (120, 0x74, 1.5), (119, 0x7C, 1.5), (120, 0x74, 1.5), (119, 0x7C, 1.5), (119, 0x7C, 1.5)),
        (1.75, (120, 0x76, 1.75), (119, 0x7E, 1.75), (120, 0x76, 1.75), (119, 0x7E, 1.75), (119, 0x7E, 1.75)),
        (1.8125, (120, 0x76, 1.75), (119, 0x7E, 1.75), (120, 0x76, 1.75), (120, 0x76, 1.75), (119, 0x7E, 1.75)),
        (1.875, (120, 0x77, 1.875), (119, 0x7E, 1.75), (120, 0x77, 1.875), (120, 0x77, 1.875), (119, 0x7E, 1.75)),
        (1.9375, (120, 0x78, 2), (119, 0x7E, 1.75), (120, 0x78, 2), (120, 0x78, 2), (120, 0x78, 2)),
        (2.0, (121, 0x70, 2), (120, 0x78, 2), (120, 0x78, 2), (120, 0x78, 2), (120, 0x78, 2)),
    ],
)
def test_scale_rules_side_by_side(
    amax: float,
    neuron: tuple[int, int, float],
    floor: tuple[int, int, float],
    ceil: tuple[int, int, float],
    rceil: tuple[int, int, float],
    even: tuple[int, int, float],
) -> None:
    block = torch.zeros(1, 32)
    block[0, 0] = amax
    for rule, (byte, code, value) in zip(RULES, (neuron, floor, ceil, rceil, even)):
        assert single(amax, rule=rule) == (byte, code), rule
        assert float(fake_quantize_mx(block, rule=rule, scheme="1x32")[0, 0]) == value, rule


@pytest.mark.parametrize(
    ("rule", "error"),
    [("neuron", 0.026651), ("floor", 0.029327), ("ceil", 0.026651), ("rceil", 0.026651), ("even", 0.027648)],
)
def test_error_on_gaussian_data(rule: str, error: float) -> None:
    x = torch.randn(1024, 1024).to(torch.bfloat16)
    difference = (fake_quantize_mx(x, rule=rule) - x.float()).double()
    relative = float(difference.norm() / x.double().norm())
    # The reference figures are from 4096**2 values; with 1024**2 the sampling error of an RMS is about 0.1 %.
    assert relative == pytest.approx(error, rel=5e-3)


def test_share_of_blocks_with_the_neuron_byte() -> None:
    x = torch.randn(1024, 1024).to(torch.bfloat16)
    neuron = quantize_mx(x).scales
    floor = quantize_mx(x, rule="floor").scales
    assert torch.equal(floor + 1, neuron)  # exact for normal amax
    share = float((quantize_mx(x, rule="ceil").scales == neuron).double().mean())
    assert share == pytest.approx(0.99, abs=3e-3)  # 32768 blocks: one standard deviation is 0.0006


def test_k_map_of_the_golden_remainders() -> None:
    rows = k_map(1408)
    assert rows[256].tolist() == [1024, 1088, 1152, 1216]
    assert rows[319].tolist() == [1087, 1151, 1215, 1279]
    assert rows[320].tolist() == [1280, 1312, 1344, 1376]
    assert rows[351].tolist() == [1311, 1343, 1375, 1407]

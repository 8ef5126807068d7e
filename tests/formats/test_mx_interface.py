"""How the MX functions treat axes, strides, autograd and bad arguments."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats import (
    E4M3FN,
    dequantize_mx,
    fake_quantize_mx,
    layouts,
    mx,
    pack_x4,
    quantize_mx,
    swizzle,
    to_packed,
    unswizzle,
)
from tests.refusals import refused


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1"])
@pytest.mark.parametrize("scheme", ["wrapX", "wrapX_single", "one_tile", "1x32"])
def test_fake_quantize_equals_quantize_then_dequantize(scheme: str, fmt: str) -> None:
    x = torch.randn(5, 1408).to(torch.bfloat16)
    quantized = quantize_mx(x, fmt=fmt, scheme=scheme)
    values = unswizzle(dequantize_mx(quantized.codes, quantized.scales, fmt=fmt), scheme)
    assert torch.equal(fake_quantize_mx(x, fmt=fmt, scheme=scheme), values)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_any_axis(axis: int) -> None:
    x = torch.randn(64, 96, 160)
    expected = fake_quantize_mx(x.movedim(axis, -1).contiguous()).movedim(-1, axis)
    got = fake_quantize_mx(x, axis)
    assert got.shape == x.shape
    assert torch.equal(got, expected)


def test_vectors_and_empty_operands() -> None:
    x = torch.randn(64)
    assert torch.equal(fake_quantize_mx(x), fake_quantize_mx(x.unsqueeze(0))[0])
    assert fake_quantize_mx(torch.zeros(0, 64)).shape == (0, 64)  # an expert without tokens


def test_chunking_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(37, 1408)
    whole, values = quantize_mx(x), fake_quantize_mx(x)
    monkeypatch.setattr(mx, "CPU_CHUNK", 3 * 1024)
    chunked = quantize_mx(x)
    assert torch.equal(chunked.codes, whole.codes)
    assert torch.equal(chunked.scales, whole.scales)
    assert torch.equal(fake_quantize_mx(x), values)
    assert torch.equal(
        dequantize_mx(chunked.codes, chunked.scales).view(torch.int32),
        dequantize_mx(whole.codes, whole.scales).view(torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_is_not_modified_and_no_gradient_flows(dtype: torch.dtype) -> None:
    x = torch.randn(3, 128, dtype=dtype, requires_grad=True)
    before = x.detach().clone()
    assert not fake_quantize_mx(x).requires_grad
    quantize_mx(x)
    assert torch.equal(x.detach(), before)


def test_quantized_values_of_bf16_are_exact_in_bf16() -> None:
    """Elements have at most 4 significant bits, so the emulation may keep them in bf16 without loss."""
    values = fake_quantize_mx(torch.randn(64, 512).to(torch.bfloat16))
    assert torch.equal(values.to(torch.bfloat16).float(), values)


def test_format_objects_are_accepted() -> None:
    assert quantize_mx(torch.ones(1, 32), fmt=E4M3FN).fmt is E4M3FN


@pytest.mark.parametrize(
    ("arguments", "options", "error", "argument", "says"),
    [
        (
            (torch.zeros(2, 48),),
            {},
            ShapeError,
            "weight_FK.shape[1] (K)",
            "got 48",
        ),
        ((torch.zeros(2, 0),), {}, ShapeError, "weight_FK", r"got \[2, 0\]"),
        ((torch.zeros(2, 2, 32),), {}, ShapeError, "weight_FK", r"got \[2, 2, 32\]"),
        ((torch.zeros(2, 32, dtype=torch.float64),), {}, DTypeError, "weight_FK", "got float64"),
        ((torch.zeros(2, 32, dtype=torch.int32),), {}, DTypeError, "weight_FK", "int32"),
        (([[0.0] * 32],), {}, DTypeError, "weight_FK", "got list"),
        ((torch.zeros(2, 32),), {"fmt": "e4m3"}, ConfigError, "fmt", "Did you mean 'e4m3fn'"),
        ((torch.zeros(2, 32),), {"fmt": None}, ConfigError, "fmt", "got None"),
        ((torch.zeros(2, 32),), {"rule": "round"}, ConfigError, "rule", ""),
        ((torch.zeros(2, 32),), {"scheme": "wrap"}, ConfigError, "scheme", "Did you mean 'wrapX'"),
    ],
)
def test_quantize_refuses(
    arguments: tuple[object, ...], options: dict[str, object], error: type[NeuronMoEError], argument: str, says: str
) -> None:
    with refused(error, argument, says):
        quantize_mx(*arguments, **options)


def test_dequantize_and_fake_quantize_refuse() -> None:
    quantized = quantize_mx(torch.ones(3, 64))
    with refused(ShapeError, "scales", got="[2, 2]"):
        dequantize_mx(quantized.codes, quantized.scales[:, :2])
    with refused(DTypeError, "codes", got="float8_e5m2"):
        dequantize_mx(quantized.codes.view(torch.float8_e5m2), quantized.scales)
    with refused(DTypeError, "scales", got="float32"):
        dequantize_mx(quantized.codes, quantized.scales.float())
    with refused(ShapeError, "axis", got="2"):
        fake_quantize_mx(torch.zeros(2, 32), 2)
    with refused(ShapeError, "axis", got="-1"):
        fake_quantize_mx(torch.zeros(()))
    with refused(ShapeError, "x.shape[-1]", got="48"):
        fake_quantize_mx(torch.zeros(32, 48))
    with refused(ShapeError, "axis", got="1.0"):
        fake_quantize_mx(torch.zeros(2, 32), 1.0)  # type: ignore[arg-type]
    with refused(ShapeError, "axis", got="True"):
        fake_quantize_mx(torch.zeros(2, 32), True)
    with refused(DeviceError, "scales", got="meta"):
        dequantize_mx(quantized.codes, quantized.scales.to("meta"))


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1"])
def test_tensors_without_values_have_the_shapes(fmt: str) -> None:
    quantized, real = (quantize_mx(torch.ones(3, 64, device=device), fmt=fmt) for device in ("meta", "cpu"))
    assert quantized.codes.shape == real.codes.shape and quantized.scales.shape == real.scales.shape
    values = dequantize_mx(quantized.codes, quantized.scales, fmt=fmt)
    assert values.is_meta and values.shape == real.codes.shape
    words, real_words = pack_x4(quantized.codes, fmt), pack_x4(real.codes, fmt)
    assert words.is_meta and (words.shape, words.dtype) == (real_words.shape, real_words.dtype)


@pytest.mark.slow
def test_layouts_are_traced_with_sizes_that_stay_open() -> None:
    for function, tensor in (
        (swizzle, torch.randn(4, 160)),
        (unswizzle, torch.randn(40, 16)),
        (to_packed, torch.zeros(5, 4, dtype=torch.uint8)),
        (layouts.gate_up_hf_to_kernel, torch.randn(2, 6, 4)),
    ):
        traced = torch.compile(function, backend="eager", dynamic=True, fullgraph=True)
        assert torch.equal(traced(tensor), function(tensor))

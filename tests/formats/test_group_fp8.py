"""Per-group FP8: the scale formula, nearest rounding, extremes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats import group_dequantize_fp8, group_fp8, group_quantize_fp8, group_scales
from tests.refusals import refused

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def finite_values(fp8: str) -> torch.Tensor:
    """Every finite value of the format, ascending."""
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[fp8]).double()
    return values[values.isfinite()].unique()


@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    size=st.sampled_from([1, 16, 32, 128]),
    fp8=st.sampled_from(["e4m3", "e5m2"]),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_every_element_is_nearest(rows: int, groups: int, size: int, fp8: str, exponent: int, seed: int) -> None:
    x = torch.randn(rows, groups * size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = group_quantize_fp8(x, size, fp8)
    assert codes.dtype == DTYPES[fp8]
    assert scales.dtype == torch.bfloat16
    assert scales.shape == (rows, groups)
    grouped = x.view(rows, groups, size)
    amax = torch.stack([row.abs().max() for row in grouped.flatten(0, 1)]).view(rows, groups)
    assert torch.equal(scales, ((amax + 1e-10) / LARGEST[fp8]).to(torch.bfloat16))
    # Nearest to the exact quotient, up to the fp32 rounding of the quotient itself (2**-24 relative).
    quotient = (grouped.double() / scales.double().unsqueeze(-1)).reshape(rows, -1)
    table = finite_values(fp8)
    best = (quotient.unsqueeze(-1) - table).abs().min(dim=-1).values
    error = (quotient - codes.double()).abs()
    assert (error <= best + quotient.abs() * 2**-23).all()
    values = group_dequantize_fp8(codes, scales)
    assert torch.equal(
        values.double(), (codes.double().view(rows, groups, size) * scales.double()[..., None]).view_as(x)
    )


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_representable_values_survive(dtype: torch.dtype, fp8: str) -> None:
    """Values already on the grid of a group whose scale is a power of two come back unchanged."""
    table = finite_values(fp8)
    top = table[table >= LARGEST[fp8] / 32]
    x = torch.cat([top, -top]).to(dtype)
    groups = torch.stack([x, x.flip(0)])
    codes, scales = group_quantize_fp8(groups, x.numel(), fp8)
    assert torch.equal(scales.float(), torch.ones(2, 1))
    assert torch.equal(group_dequantize_fp8(codes, scales, dtype), groups)


def test_zero_groups_have_a_usable_scale() -> None:
    codes, scales = group_quantize_fp8(torch.zeros(2, 32))
    assert torch.equal(scales, torch.full((2, 2), 1e-10 / 448).to(torch.bfloat16))
    assert torch.equal(group_dequantize_fp8(codes, scales), torch.zeros(2, 32))


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_scale_rounding_never_overflows(fp8: str) -> None:
    x = torch.linspace(1.0, 2.0, 4096).unsqueeze(1)  # groups of one: every amax in a binade
    codes, scales = group_quantize_fp8(x, 1, fp8)
    assert codes.float().isfinite().all()
    assert float(codes.float().max()) == LARGEST[fp8]
    # Half a step at the top of the range plus nothing else: the scale's own rounding is undone by the division.
    assert float((group_dequantize_fp8(codes, scales) / x - 1).abs().max()) < (2**-3 if fp8 == "e5m2" else 2**-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nonfinite_groups_are_nan_and_others_are_not_touched(value: float) -> None:
    x = torch.ones(1, 32)
    x[0, 3] = value
    values = group_dequantize_fp8(*group_quantize_fp8(x))
    assert values[0, :16].isnan().all()
    assert values[0, 16:].isfinite().all()


def test_leading_axes_and_case_of_the_name() -> None:
    x = torch.randn(2, 3, 64)
    codes, scales = group_quantize_fp8(x, fp8="E5M2")
    assert codes.dtype == torch.float8_e5m2
    flat_codes, flat_scales = group_quantize_fp8(x.view(6, 64), fp8="e5m2")
    assert torch.equal(codes.view(torch.uint8).view(6, 64), flat_codes.view(torch.uint8))
    assert torch.equal(scales.view(6, 4), flat_scales)
    assert torch.equal(group_scales(x, 16, "e5m2"), scales)
    assert group_dequantize_fp8(codes, scales, torch.bfloat16).dtype == torch.bfloat16


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 37, 64).to(torch.bfloat16)
    codes, scales = group_quantize_fp8(x)
    values = group_dequantize_fp8(codes, scales)
    monkeypatch.setattr(group_fp8, "CPU_CHUNK", 5 * 64)
    again, same_scales = group_quantize_fp8(x)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(same_scales, scales)
    assert torch.equal(group_scales(x), scales)
    assert torch.equal(group_dequantize_fp8(codes, scales), values)


def test_stochastic_rounding_is_unbiased() -> None:
    x = torch.randn(1, 256)
    _, scales = group_quantize_fp8(x)
    generator = torch.Generator().manual_seed(5)
    codes, same_scales = group_quantize_fp8(x.expand(4000, 256), stochastic=True, generator=generator)
    assert torch.equal(same_scales, scales.expand(4000, 16))
    mean = group_dequantize_fp8(codes, same_scales).double().mean(0)
    # One draw is less than a step away (2**-3 of the value, or the smallest code); a mean of n draws has sigma below
    # step / (2 sqrt(n)), so this is ten sigma.
    step = (x.double().abs() * 2**-3).clamp(min=float(scales.max()) * 2**-9)
    assert float(((mean - x.double()[0]) / step[0]).abs().max()) < 5 / 4000**0.5
    first, second = (
        group_quantize_fp8(x, stochastic=True, generator=torch.Generator().manual_seed(1))[0] for _ in range(2)
    )
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_no_gradient_and_no_modification() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    before = x.detach().clone()
    codes, scales = group_quantize_fp8(x)
    assert not scales.requires_grad
    assert not group_dequantize_fp8(codes, scales).requires_grad
    assert torch.equal(x.detach(), before)


def test_refusals() -> None:
    x = torch.zeros(2, 32)
    with refused(ShapeError, "x.shape[-1]", got="32"):
        group_quantize_fp8(x, 24)
    with refused(ConfigError, "group_size"):
        group_quantize_fp8(x, 0)
    with refused(ConfigError, "group_size", got="'16'"):
        group_quantize_fp8(x, "16")  # type: ignore[arg-type]
    with refused(ConfigError, "stochastic", got="1", where="group_quantize_fp8"):
        group_quantize_fp8(x, stochastic=1)  # type: ignore[arg-type]
    with refused(ConfigError, "generator", got="int"):
        group_quantize_fp8(x, stochastic=True, generator=7)  # type: ignore[arg-type]
    with refused(ConfigError, "fp8", "Did you mean 'e4m3'"):
        group_quantize_fp8(x, fp8="e4m3fn")
    with refused(DTypeError, "x", got="float64"):
        group_quantize_fp8(x.double())
    codes, scales = group_quantize_fp8(x)
    with refused(ShapeError, "scales", got="[1, 2]"):
        group_dequantize_fp8(codes, scales[:1])
    with refused(DTypeError, "codes", got="uint8"):
        group_dequantize_fp8(codes.view(torch.uint8), scales)
    with refused(DeviceError, "scales", got="meta"):
        group_dequantize_fp8(codes, scales.to("meta"))
    with refused(ShapeError, "codes.shape[-1]", got="0"):
        group_dequantize_fp8(codes[0, 0], scales[0])


def test_no_rows_have_codes_and_scales_of_no_rows() -> None:
    codes, scales = group_quantize_fp8(torch.randn(0, 32), 16)
    assert (codes.shape, scales.shape, group_scales(torch.randn(2, 0, 32), 16).shape) == ((0, 32), (0, 2), (2, 0, 2))
    assert group_dequantize_fp8(codes, scales).shape == (0, 32)

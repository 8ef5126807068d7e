"""Codes in the operand's own layout decode to the values they have in the swizzled one."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from hf_neuron_moe.errors import DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats import dequantize_mx, dequantize_mx_natural, fake_quantize_mx, quantize_mx, unswizzle
from hf_neuron_moe.formats.constants import ELEMENT_FORMATS, SwizzleScheme
from tests.refusals import refused


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    blocks=st.integers(1, 40),
    fmt=st.sampled_from(sorted(ELEMENT_FORMATS)),
    scheme=st.sampled_from([scheme.value for scheme in SwizzleScheme]),
    seed=st.integers(0, 99),
)
def test_it_inverts_quantization_as_the_swizzled_form_does(
    rows: int, blocks: int, fmt: str, scheme: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32 * blocks, generator=generator)
    x *= torch.exp2(torch.randint(-30, 30, x.shape, generator=generator).float())
    mx = quantize_mx(x, fmt=fmt, scheme=scheme)
    codes = unswizzle(mx.codes, scheme)
    natural = dequantize_mx_natural(codes, mx.scales, fmt=fmt, scheme=scheme)
    assert torch.equal(natural, unswizzle(dequantize_mx(mx.codes, mx.scales, fmt=fmt), scheme))
    assert torch.equal(natural, fake_quantize_mx(x, fmt=fmt, scheme=scheme))
    strided = torch.empty(32 * blocks, rows).t()
    assert dequantize_mx_natural(codes, mx.scales, fmt=fmt, scheme=scheme, out_FK=strided) is strided
    assert torch.equal(strided, natural)


def test_what_does_not_fit_is_refused() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    assert dequantize_mx_natural(codes, scales).shape == (4, 64)
    with refused(ShapeError, "scales", got="[1, 4]"):
        dequantize_mx_natural(codes, scales[:1])
    with refused(ShapeError, "codes.shape[1] (K)"):
        dequantize_mx_natural(codes[:, :48], scales)
    with refused(DTypeError, "codes", got="float8_e5m2"):
        dequantize_mx_natural(codes.view(torch.float8_e5m2), scales)
    with refused(DeviceError, "scales", got="meta"):
        dequantize_mx_natural(codes, scales.to("meta"))
    with refused(DTypeError, "out_FK"):
        dequantize_mx_natural(codes, scales, out_FK=torch.zeros(4, 64, dtype=torch.bfloat16))
    with refused(ShapeError, "out_FK"):
        dequantize_mx_natural(codes, scales, out_FK=torch.zeros(8, 64))

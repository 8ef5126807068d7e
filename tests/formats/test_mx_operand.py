"""Operands quantized piece by piece equal those quantized through fp32, whatever a piece holds and however it lies."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.formats import ElementFormat, mx_operand, quantize_mx
from hf_neuron_moe.formats.constants import ELEMENT_FORMATS, ScaleRule

SCHEMES = ["wrapX", "wrapX_single", "one_tile", "1x32"]
RULES = ["neuron", "floor", "ceil", "rceil", "even"]
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def equal(weight: torch.Tensor, fmt: str, rule: str, scheme: str) -> bool:
    """Whether bf16 gives the bytes of the same values in fp32, as rows and as a transposed matrix."""
    wide = quantize_mx(weight.float(), fmt=fmt, rule=rule, scheme=scheme)
    ways = [quantize_mx(w, fmt=fmt, rule=rule, scheme=scheme) for w in (weight, weight.t().contiguous().t())]
    return all(torch.equal(mx.codes, wide.codes) and torch.equal(mx.scales, wide.scales) for mx in ways)


@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("exponent", [-80, -3, 0, 60, 127])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
def test_every_bf16_value_below_an_anchor(fmt: str, rule: str, exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that can share a block with the anchor, none of them through fp32."""
    anchor = 1.9921875 * 2.0**exponent
    values = ALL_BF16[ALL_BF16.float().abs() <= anchor]
    blocks = torch.zeros(len(values), 32, dtype=torch.bfloat16)
    blocks[:, 5], blocks[:, 17] = values, anchor
    wide = quantize_mx(blocks.float(), fmt=fmt, rule=rule, scheme="1x32")
    # From here on the way through fp32 does not exist.
    monkeypatch.delattr(mx_operand, "quantize_tiles")
    for weight in (blocks, blocks.t().contiguous().t()):
        mx = quantize_mx(weight, fmt=fmt, rule=rule, scheme="1x32")
        assert torch.equal(mx.codes, wide.codes) and torch.equal(mx.scales, wide.scales)


@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("piece", [1 << 10, 1 << 12, 1 << 18])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1"])
def test_pieces_of_every_kind(fmt: str, scheme: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx_operand, "PIECE", piece)
    monkeypatch.setattr(mx_operand, "LEAST_ROWS", 5)
    monkeypatch.setattr(mx_operand, "LEAST_COLUMNS", 7)
    weight = torch.randn(37, 1408, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    weight[9, 700:] = 0
    weight[11, 40], weight[17, 900], weight[18, 901] = float("nan"), float("inf"), -float("inf")
    weight[20] *= 2.0**-120
    weight[21, :64] = 2.0**-133
    weight[30] *= 2.0**120
    assert equal(weight, fmt, "neuron", scheme)
    assert equal(weight, fmt, "floor", scheme)


@pytest.mark.parametrize("K", [32, 96, 384, 512, 640, 2048 + 384])
@pytest.mark.parametrize("F", [1, 2, 67])
def test_shapes(F: int, K: int) -> None:
    weight = torch.randn(F, K, generator=torch.Generator().manual_seed(F + K)).bfloat16()
    for scheme in SCHEMES:
        assert equal(weight, "e4m3fn", "neuron", scheme)
        assert equal(weight.repeat(1, 2)[:, K // 2 : K // 2 + K], "e4m3fn", "even", scheme)


def test_small_values_do_not_depend_on_flushed_denormals() -> None:
    weight = (torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * 2.0**-125).bfloat16()
    before = quantize_mx(weight)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        flushed = quantize_mx(weight)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert torch.equal(flushed.codes, before.codes) and torch.equal(flushed.scales, before.scales)


def test_memory_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a wider tensor are filled, and nothing beside them."""
    monkeypatch.setattr(mx_operand, "PIECE", 1 << 12)
    weight = torch.randn(24, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = quantize_mx(weight.float())
    codes, scales = torch.full((256, 4 * 40), 7, dtype=torch.uint8), torch.full((32, 40), 9, dtype=torch.uint8)
    fmt: ElementFormat = ELEMENT_FORMATS["e4m3fn"]
    mx_operand.quantize_into(
        weight, codes[:, 32:128], scales[:, 8:32], fmt=fmt, rule=ScaleRule.NEURON, scheme=mx_operand.SwizzleScheme.WRAPX
    )
    assert torch.equal(codes[:, 32:128], expected.codes) and torch.equal(scales[:, 8:32], expected.scales)
    assert (codes[:, :32] == 7).all() and (codes[:, 128:] == 7).all()
    assert (scales[:, :8] == 9).all() and (scales[:, 32:] == 9).all()

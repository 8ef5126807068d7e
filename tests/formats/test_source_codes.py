"""Codes of quantized checkpoints decode to transformers' values, bit for bit, and to those of a float64 model."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_neuron_moe.errors import DTypeError, ShapeError
from hf_neuron_moe.formats.source_codes import dequantize_fp8_blocks, dequantize_mxfp4_blocks, dequantize_packed_fp4
from tests.refusals import refused

STOCK = Fp8Dequantize(None)


def random_bytes(*shape: int, below: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def finite_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random e4m3 codes, all but NaN."""
    codes = random_bytes(*shape, seed=seed)
    return codes.masked_fill_(codes & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn)


def random_scales(*shape: int, seed: int = 1) -> torch.Tensor:
    """fp32 factors with full mantissas over 60 binades."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-40, 20, shape, generator=generator)
    return (1 + torch.rand(shape, generator=generator)) * torch.exp2(exponent.float())


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.int16), other.view(torch.int16))


def test_mxfp4_example_by_hand():
    """Low nibble first: codes 1, 2, 7, 9 are 0.5, 1, 6 and -0.5, times 2**(125 - 127)."""
    blocks, scales = torch.zeros(1, 1, 16, dtype=torch.uint8), torch.tensor([[125]], dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([0x21, 0x97], dtype=torch.uint8)
    values = dequantize_mxfp4_blocks(blocks, scales)
    assert values.shape == (1, 32) and values[0, :4].tolist() == [0.125, 0.25, 1.5, -0.125]
    assert torch.count_nonzero(values[0, 4:]) == 0


def test_mxfp4_equals_transformers():
    """Every byte of codes under every scale byte that transformers reads as the format does."""
    blocks = random_bytes(2, 255, 3, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(2, 255, 3)
    mine = dequantize_mxfp4_blocks(blocks, scales)
    stock = convert_moe_packed_tensors(blocks, scales.contiguous())  # [E, K, N]
    assert equal_bits(mine, stock.mT.contiguous())
    assert mine[:, :253].isfinite().all() and mine[:, 253:].isinf().any()


def test_mxfp4_byte_255_is_nan():
    """E8M0 has NaN there; transformers makes large numbers of it."""
    blocks, scales = random_bytes(1, 2, 16), torch.tensor([[120, 255]], dtype=torch.uint8)
    values = dequantize_mxfp4_blocks(blocks, scales)
    assert values[0, :32].isfinite().all() and values[0, 32:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_packed_fp4_equals_transformers(dtype):
    packed, scales = random_bytes(6, 48).view(dtype), random_bytes(6, 3, below=250, seed=2)
    mine = dequantize_packed_fp4(packed, scales)
    stock = STOCK._dequantize_one(packed.view(torch.int8), scales, torch.bfloat16)
    assert mine.shape == (6, 96) and equal_bits(mine, stock)


@pytest.mark.parametrize("shape", [(256, 384), (2, 128, 256)])
def test_fp8_equals_transformers_where_blocks_are_whole(shape):
    codes = finite_codes(*shape)
    scales = random_scales(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    assert equal_bits(
        dequantize_fp8_blocks(codes, scales, (128, 128)), STOCK._dequantize_one(codes, scales, torch.bfloat16)
    )


@pytest.mark.parametrize("block", [(128, 128), (1, 32), (48, 80), (500, 500)])
def test_fp8_equals_a_float64_model(block):
    """Ragged last blocks; the product of 4 and 24 bits is exact in float64, so fp32 rounds it once, then bf16."""
    N, K = 300, 200
    codes, scales = finite_codes(N, K), random_scales(-(-N // block[0]), -(-K // block[1]))
    row, column = torch.arange(N) // block[0], torch.arange(K) // block[1]
    exact = codes.float().double() * scales[row][:, column].double()
    mine = dequantize_fp8_blocks(codes, scales, block)
    assert equal_bits(mine, exact.float().bfloat16())
    assert torch.equal(dequantize_fp8_blocks(codes.view(torch.uint8), scales, block), mine)


def test_transformers_misreads_ragged_blocks():
    """192 rows with 2 rows of scales are blocks of 128 and 64, not of 96."""
    codes, scales = finite_codes(192, 128), torch.tensor([[1.0], [2.0]])
    mine, stock = dequantize_fp8_blocks(codes, scales, (128, 128)), STOCK._dequantize_one(codes, scales, torch.bfloat16)
    assert equal_bits(mine[:96], stock[:96]) and equal_bits(mine[128:], stock[128:])
    assert equal_bits(mine[96:128] * 2, stock[96:128])
    with pytest.raises(ValueError, match="not divisible"):
        STOCK._dequantize_one(finite_codes(576, 128), torch.ones(5, 1), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scale_bytes_are_powers_of_two(dtype):
    """All bytes but 255, among them 0, whose factor is an fp32 denormal."""
    codes, scales = finite_codes(255, 64), torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 2)
    mine = dequantize_fp8_blocks(codes, scales.view(dtype), (1, 32))
    exact = codes.float().double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    assert equal_bits(mine, exact.float().bfloat16())


def test_nan_stays_nan():
    codes = torch.tensor([[0x7F, 0xFF, 0x7E]], dtype=torch.uint8)
    assert dequantize_fp8_blocks(codes, torch.ones(1, 1), (128, 128)).isnan().tolist() == [[True, True, False]]
    assert dequantize_fp8_blocks(codes, torch.full((1, 1), 255, dtype=torch.uint8), (1, 32)).isnan().all()


def test_refusals():
    blocks, scales = random_bytes(4, 2, 16), random_bytes(4, 2)
    with refused(ShapeError, "blocks"):
        dequantize_mxfp4_blocks(blocks[..., :15], scales)
    with refused(ShapeError, "scales"):
        dequantize_mxfp4_blocks(blocks, scales[:, :1])
    with refused(DTypeError, "blocks"):
        dequantize_mxfp4_blocks(blocks.view(torch.int8), scales)
    with refused(ShapeError, "packed.shape[-1]"):
        dequantize_packed_fp4(random_bytes(4, 24), scales)
    with refused(ShapeError, "scales"):
        dequantize_fp8_blocks(finite_codes(192, 128), torch.ones(1, 1), (128, 128))
    with refused(ShapeError, "scales"):
        dequantize_fp8_blocks(finite_codes(2, 64, 64), torch.ones(1, 1), (128, 128))
    with refused(DTypeError, "codes"):
        dequantize_fp8_blocks(torch.zeros(4, 4, dtype=torch.float8_e5m2), torch.ones(1, 1), (128, 128))
    with refused(DTypeError, "scales"):
        dequantize_fp8_blocks(finite_codes(4, 4), torch.ones(1, 1, dtype=torch.int32), (128, 128))
    with refused(ShapeError, "block"):
        dequantize_fp8_blocks(finite_codes(4, 4), torch.ones(1, 1), (0, 128))

"""``quantize_block_mxfp8_kernel`` and ``matmul_mxfp8``: bytes, operand modes, sums and refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats import (
    fake_quantize_mx,
    pack_x4,
    quantize_mx,
    swizzle,
    to_compact,
    to_oversized,
    to_packed,
    unswizzle,
)
from hf_neuron_moe.kernels import TensorDescriptor, matmul_mxfp8, quantize_block_mxfp8_kernel
from tests.refusals import refused


def rows_of(*shape: int) -> Tensor:
    return (torch.randn(shape) * torch.exp2(torch.randint(-9, 1, shape))).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", [128, 384, 2176])
def test_quantized_bytes_are_those_of_the_formats(dtype: torch.dtype, K: int) -> None:
    source = rows_of(24, K).to(dtype)
    for fmt, kind in (("e4m3fn", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        wanted = quantize_mx(source, fmt=fmt)
        for packed in (True, False):
            scales, data = quantize_block_mxfp8_kernel(source, f"float8_{fmt}", False, packed)
            assert data.dtype is kind and data.shape == (K // 4, 4 * 24) and scales.dtype is torch.uint8
            assert len(scales) == (128 * -(-K // 2048) if packed else K // 4)
            assert torch.equal(data.view(torch.uint8), wanted.codes)
            assert torch.equal(to_compact(scales, K), wanted.scales)
    floor = quantize_block_mxfp8_kernel(source, "float8_e4m3fn", mx_scale_rule="floor")
    assert torch.equal(floor[1].view(torch.uint8), quantize_mx(source, rule="floor").codes)


@pytest.mark.parametrize(
    ("shape", "options", "argument", "says"),
    [
        ((8, 96), {}, "K of src_tensor", "128"),
        ((12, 128), {}, "F of src_tensor", "8"),
        ((504, 128), {"run_with_lnc2": True}, "F of src_tensor", "512"),
    ],
)
def test_quantize_refuses_sizes(shape: tuple[int, int], options: dict[str, Any], argument: str, says: str) -> None:
    with refused(ShapeError, argument, says):
        quantize_block_mxfp8_kernel(rows_of(*shape), "float8_e4m3fn", **options)


def test_quantize_refuses_other_arguments() -> None:
    assert len(quantize_block_mxfp8_kernel(rows_of(512, 128), "float8_e4m3fn", run_with_lnc2=True)) == 2
    with refused(ConfigError, "return_fp8_dtype"):
        quantize_block_mxfp8_kernel(rows_of(8, 128), "float8_e3m4")
    with refused(DTypeError, "src_tensor"):
        quantize_block_mxfp8_kernel(rows_of(8, 128).float(), "float8_e4m3fn")


def modes(raw_FK: Tensor, side: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """One operand in all documented forms: the argument and the options that go with it."""
    made = quantize_mx(raw_FK)
    scales, data = quantize_block_mxfp8_kernel(raw_FK, "float8_e4m3fn")
    raw = {f"{side}_is_swizzled": False}
    return {
        "raw": (raw_FK, raw),
        "K-major": (raw_FK.t().contiguous(), raw | {f"{side}_is_f_by_k": False}),
        "swizzled": (swizzle(raw_FK), {}),
        "pair": ((pack_x4(made.codes), to_packed(made.scales)), {}),
        "scales": (data, {f"{side}_scales": scales}),
        "oversized": ((data, to_oversized(made.scales)), {}),
        "described": (TensorDescriptor(raw_FK), {}),
    }


@pytest.mark.parametrize("K", [384, 640, 1408])
def test_every_mode_gives_the_same_bits(K: int) -> None:
    torch.manual_seed(K)
    left, right = rows_of(512, K), rows_of(512, K)
    wanted = matmul_mxfp8(left, right, lhs_is_swizzled=False, rhs_is_swizzled=False, output_dtype=torch.float32)
    exact = fake_quantize_mx(left).double() @ fake_quantize_mx(right).double().t()
    magnitude = fake_quantize_mx(left).double().abs() @ fake_quantize_mx(right).double().abs().t()
    # K fp32 additions, each with half a unit of the sum of magnitudes at most.
    assert bool(((wanted.double() - exact).abs() <= K * torch.finfo(torch.float32).eps * magnitude).all())
    for (a, one), (b, other) in zip(modes(left, "lhs").values(), reversed(modes(right, "rhs").values())):
        assert torch.equal(matmul_mxfp8(a, b, output_dtype=torch.float32, **one, **other), wanted)
        assert torch.equal(matmul_mxfp8(a, b, **one, **other), wanted.bfloat16())


def test_tiles_are_exact_for_integers_and_near_otherwise() -> None:
    torch.manual_seed(2)
    options: dict[str, Any] = {"lhs_is_swizzled": False, "rhs_is_swizzled": False, "output_dtype": torch.float32}
    left, right = (torch.randint(-4, 5, shape).bfloat16() for shape in ((144, 1152), (520, 1152)))
    exact = left.double() @ right.double().t()
    for counts in ({}, {"TILES_IN_BLOCK_K": 1, "TILES_IN_BLOCK_M": 2}, {"lhs_matmul_tile_shape_logical": (256, 64)}):
        tiles = {"rhs_matmul_tile_shape_logical": (256, 512)} if "lhs_matmul_tile_shape_logical" in counts else {}
        made = matmul_mxfp8(left, right, execute="tiles", spill_reload=True, **counts, **tiles, **options)
        assert torch.equal(made.double(), exact)
    left, right = rows_of(144, 1152), rows_of(520, 1152)
    fast, tiles_made = (matmul_mxfp8(left, right, execute=each, **options) for each in ("fast", "tiles"))
    torch.testing.assert_close(fast, tiles_made, rtol=0, atol=1e-6 * float(fast.abs().max()))


def test_output_is_filled_or_added_to() -> None:
    left, right = rows_of(16, 256), rows_of(24, 256)
    options: dict[str, Any] = {"lhs_is_swizzled": False, "rhs_is_swizzled": False}
    product = matmul_mxfp8(left, right, output_dtype=torch.float32, **options)
    start = rows_of(16, 24)
    for dtype in (torch.bfloat16, torch.float32):
        out = start.to(dtype, copy=True)
        assert matmul_mxfp8(left, right, output_td=TensorDescriptor(out), **options) is out
        assert torch.equal(out, product.to(dtype))
        out = start.to(dtype, copy=True)
        matmul_mxfp8(left, right, output_td=TensorDescriptor(out), initialize_accumulator=False, **options)
        assert torch.equal(out, (product + start.float()).to(dtype))


def test_documented_defaults() -> None:
    """Names and defaults of the page of 2.33 up to load_with_PE_swizzle; later ones are keyword-only here."""
    parameters = inspect.signature(matmul_mxfp8).parameters
    positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional[:2] == ["lhs", "rhs"] and positional[-1] == "load_with_PE_swizzle" and len(positional) == 22
    assert parameters["output_dtype"].default is torch.bfloat16 and parameters["lnc_2_shard_rhs"].default is None


def test_documented_example() -> None:
    """The page's first call: both operands pre-swizzled, K = 2048."""
    lhs, rhs = rows_of(512, 1024), rows_of(512, 2048)
    counts = {"TILES_IN_BLOCK_M": 2, "TILES_IN_BLOCK_N": 2, "TILES_IN_BLOCK_K": 1, "TILES_IN_LOAD_M": 1}
    shapes = {"lhs_matmul_tile_shape_logical": (512, 128), "rhs_matmul_tile_shape_logical": (512, 512)}
    result = matmul_mxfp8(lhs=lhs, rhs=rhs, **counts, TILES_IN_LOAD_N=1, **shapes)  # type: ignore[arg-type]
    natural = (unswizzle(each) for each in (lhs, rhs))
    wanted = matmul_mxfp8(*natural, lhs_is_swizzled=False, rhs_is_swizzled=False)
    assert result.shape == (256, 512) and torch.equal(result, wanted)


RAW = {"lhs_is_swizzled": False, "rhs_is_swizzled": False}
X = torch.ones(16, 256).bfloat16()


@pytest.mark.parametrize(
    ("call", "error", "argument"),
    [
        ({"rhs": torch.ones(16, 128).bfloat16()}, ShapeError, "rhs"),
        ({"lhs": torch.ones(16, 256)}, DTypeError, "lhs"),
        ({"lhs": [X]}, DTypeError, "lhs"),
        ({"lhs": X.float(), "lhs_is_swizzled": True}, DTypeError, "lhs"),
        ({"rhs": X[:12], "lnc_2_shard_rhs": True, "rhs_is_swizzled": True}, ShapeError, "K/4 of rhs"),
        ({"lhs": TensorDescriptor(X), "lhs_scales": torch.ones(128, 16, dtype=torch.uint8)}, ConfigError, "lhs_scales"),
        ({"lhs": X.t().contiguous(), "lhs_is_f_by_k": False}, ShapeError, "F of lhs"),
        ({"float8_dtype": "float8_e5m2"}, ConfigError, "float8_dtype"),
        ({"output_dtype": torch.float16}, ConfigError, "output_dtype"),
        ({"lnc_2_shard_rhs": 1}, ConfigError, "lnc_2_shard_rhs"),
        ({"initialize_accumulator": False}, ConfigError, "output_td"),
        ({"output_td": TensorDescriptor(X)}, ShapeError, "output_td"),
        ({"rhs_matmul_tile_shape_logical": (256, 512)}, ConfigError, "rhs_matmul_tile_shape_logical"),
        ({"lhs_matmul_tile_shape_logical": 256}, ConfigError, "lhs_matmul_tile_shape_logical"),
        (
            {"lhs": X.repeat(16, 1), "lhs_matmul_tile_shape_logical": (512, 256)},
            ConfigError,
            "lhs_matmul_tile_shape_logical",
        ),
        ({"TILES_IN_BLOCK_M": 0}, ConfigError, "TILES_IN_BLOCK_M"),
        ({"block_loop_order": "mm"}, ConfigError, "block_loop_order"),
        ({"execute": "slow"}, ConfigError, "execute"),
    ],
)
def test_matmul_refuses(call: dict[str, Any], error: type[NeuronMoEError], argument: str) -> None:
    with refused(error, argument):
        matmul_mxfp8(**({"lhs": X, "rhs": X} | RAW | call))


@pytest.mark.parametrize("execute", ["fast", "tiles"])
def test_an_output_in_an_operands_memory_is_an_error(execute: str) -> None:
    square = torch.randn(128, 128).bfloat16()
    before = square.clone()
    with refused(ConfigError, "output_td", "pass other memory", got="that of lhs"):
        matmul_mxfp8(
            square, torch.randn(128, 128).bfloat16(), lhs_is_swizzled=False, rhs_is_swizzled=False,
            output_td=TensorDescriptor(square), execute=execute,
        )  # fmt: skip
    assert torch.equal(square, before)


@pytest.mark.parametrize("tile_k", [36, 100, 510])
def test_a_tile_without_whole_groups_is_an_error(tile_k: int) -> None:
    x = torch.randn(128, 512).bfloat16()
    with refused(ConfigError, "lhs_matmul_tile_shape_logical", "8 partitions of 4 lanes", got=str(tile_k)):
        matmul_mxfp8(
            x, x, lhs_is_swizzled=False, rhs_is_swizzled=False,
            lhs_matmul_tile_shape_logical=(tile_k, 128), rhs_matmul_tile_shape_logical=(tile_k, 512),
        )  # fmt: skip

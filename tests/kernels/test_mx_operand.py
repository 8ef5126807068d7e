"""One MX operand in every layout: the descriptor's derived fields, the values a matmul sees, and what is refused."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError, naming
from hf_neuron_moe.formats import MXTensor, fake_quantize_mx, pack_x4, quantize_mx, swizzle, to_oversized, to_packed
from hf_neuron_moe.formats.constants import ScaleRule
from hf_neuron_moe.reference.described_operand import MXOperand, TensorDescriptor
from tests.refusals import refused


def values_of(F: int, K: int) -> Tensor:
    """bf16 values whose magnitudes differ widely, with zeros, so that the grouping along K shows."""
    values = torch.randn(F, K) * torch.exp2(torch.randint(-14, 3, (F, K)))
    return values.masked_fill(torch.rand(F, K) < 0.1, 0.0).bfloat16()


def describe(raw: Tensor, mode: str, quantized: MXTensor | None = None, **fields: Any) -> TensorDescriptor:
    quantized = quantize_mx(raw) if quantized is None else quantized
    match mode:
        case "raw":
            return TensorDescriptor(raw, **fields)
        case "swizzled":
            return TensorDescriptor(swizzle(raw), is_swizzled=True, **fields)
        case "x4":
            return TensorDescriptor(pack_x4(quantized.codes), to_packed(quantized.scales), **fields)
        case "uint32":
            words = pack_x4(quantized.codes).view(torch.uint32)
            return TensorDescriptor(words, to_oversized(quantized.scales), **fields)
        case _:
            codes = quantized.codes.view(torch.float8_e4m3fn)
            return TensorDescriptor(codes, to_oversized(quantized.scales).view(torch.float8_e8m0fnu), **fields)


@pytest.mark.parametrize(
    ("mode", "physical", "x4", "packed"),
    [
        ("raw", (16, 1152), False, False),
        ("swizzled", (288, 64), False, False),
        ("x4", (288, 16), True, True),
        ("uint32", (288, 16), True, False),
        ("fp8", (288, 64), False, False),
    ],
)
def test_derived_fields(mode: str, physical: tuple[int, int], x4: bool, packed: bool) -> None:
    td = describe(values_of(16, 1152), mode)
    assert td.physical_shape == td.sharded_physical_shape == physical
    assert td.logical_shape == td.sharded_logical_shape == (1152, 16), "(K, F)"
    assert td.is_x4 is x4 and td.scales_are_packed is packed
    assert td.is_quantized is (mode not in ("raw", "swizzled"))
    assert td.is_swizzled is (mode != "raw") and td.is_f_by_k is (mode == "raw")
    assert td.is_unswizzled_bf16 is td.is_raw is (mode == "raw")
    half = describe(values_of(16, 1152), mode, is_col_parallel_sharded=True)
    assert half.sharded_logical_shape == (1152, 8) and half.logical_shape == (1152, 16)
    rows, columns = physical
    assert half.sharded_physical_shape == ((rows // 2, columns) if mode == "raw" else (rows, columns // 2))


def test_scales_of_512_count_as_not_packed() -> None:
    quantized = quantize_mx(values_of(8, 512))
    assert torch.equal(to_packed(quantized.scales), to_oversized(quantized.scales))
    assert TensorDescriptor(pack_x4(quantized.codes), to_packed(quantized.scales)).scales_are_packed is False


def test_defaults_of_an_empty_descriptor() -> None:
    td = TensorDescriptor()
    assert td.data is td.scales is None
    assert td.is_f_by_k is True and td.is_swizzled is td.is_quantized is td.is_x4 is td.scales_are_packed is False
    assert td.quant_scheme == "wrapX" and td.logical_shape == (0, 0)
    assert TensorDescriptor(is_swizzled=True).is_f_by_k is False
    assert TensorDescriptor(is_quantized=True).is_swizzled is True


@given(
    K=st.sampled_from([128, 256, 384, 512, 640, 896, 1152, 2176]),
    F=st.sampled_from([8, 24, 64]),
    mode=st.sampled_from(["raw", "swizzled", "x4", "uint32", "fp8"]),
    k_major=st.booleans(),
    data=st.data(),
)
def test_every_mode_gives_the_quantized_values(K: int, F: int, mode: str, k_major: bool, data: st.DataObject) -> None:
    torch.manual_seed(K + F)
    raw = values_of(F, K)
    operand = MXOperand(describe(raw, mode), argument="operand")
    wanted = fake_quantize_mx(raw)
    assert torch.equal(operand.dequantized(), wanted)
    start = data.draw(st.integers(0, F - 1))
    stop = data.draw(st.integers(start + 1, F))
    part = operand.load(start, stop, k_major=k_major, scratch=Scratch(raw.device), name="part")
    assert torch.equal(part, wanted[start:stop])
    assert part.stride(0 if k_major else 1) == 1


@pytest.mark.parametrize("mode", ["swizzled", "x4", "fp8"])
@pytest.mark.parametrize("K", [32, 96, 544, 608])
def test_prepared_operands_of_any_whole_blocks(mode: str, K: int) -> None:
    raw = values_of(6, K)
    operand = MXOperand(describe(raw, mode), argument="operand")
    assert torch.equal(operand.dequantized(), fake_quantize_mx(raw))


def test_unused_scale_rows_do_not_matter() -> None:
    """Kernels leave garbage there."""
    raw = values_of(16, 640)
    quantized = quantize_mx(raw)
    for expand in (to_packed, to_oversized):
        clean, ones = expand(quantized.scales), expand(torch.ones_like(quantized.scales))
        dirty = torch.where(ones == 0, 255, clean).to(torch.uint8)
        assert not torch.equal(dirty, clean)
        operand = MXOperand(TensorDescriptor(pack_x4(quantized.codes), dirty), argument="operand")
        assert torch.equal(operand.dequantized(), fake_quantize_mx(raw))


def test_grouping_options_of_raw_operands() -> None:
    raw = values_of(8, 384)
    single, default = fake_quantize_mx(raw, scheme="wrapX_single"), fake_quantize_mx(raw)
    assert not torch.equal(single, default)

    def values(td: TensorDescriptor, lone_384: bool = False) -> Tensor:
        return MXOperand(td, argument="operand", lone_384=lone_384).dequantized()

    assert torch.equal(values(TensorDescriptor(raw)), default)
    assert torch.equal(values(TensorDescriptor(raw), lone_384=True), single)
    assert torch.equal(values(TensorDescriptor(raw, fast_dma_transpose=True)), single)
    assert torch.equal(values(TensorDescriptor(swizzle(raw), is_swizzled=True), lone_384=True), default)
    assert torch.equal(values(TensorDescriptor(raw, quant_scheme="1x32")), fake_quantize_mx(raw, scheme="1x32"))
    consecutive = quantize_mx(raw, scheme="1x32")
    td = TensorDescriptor(pack_x4(consecutive.codes), to_packed(consecutive.scales), quant_scheme="1x32")
    assert torch.equal(values(td), fake_quantize_mx(raw, scheme="1x32"))


@pytest.mark.parametrize("rule", ["neuron", "floor"])
@pytest.mark.parametrize("K", [128, 384, 896])
def test_scale_rules_are_those_of_the_formats(rule: str, K: int) -> None:
    raw = values_of(16, K)
    for lone in (False, True):
        scheme = "wrapX_single" if lone and K == 384 else "wrapX"
        operand = MXOperand(TensorDescriptor(raw), argument="", lone_384=lone, rule=ScaleRule(rule))
        expected = fake_quantize_mx(raw, rule=rule, scheme=scheme)
        assert torch.equal(operand.dequantized(), expected)
        scratch = Scratch(raw.device)
        assert torch.equal(operand.load(3, 11, k_major=True, scratch=scratch, name="x"), expected[3:11])
    quantized = quantize_mx(raw)
    td = TensorDescriptor(pack_x4(quantized.codes), to_packed(quantized.scales))
    kept = MXOperand(td, argument="", rule=ScaleRule(rule)).dequantized()
    assert torch.equal(kept, fake_quantize_mx(raw)), "codes stay as they are"


def test_k_major_raw_data_need_512_columns() -> None:
    raw = values_of(512, 128)
    td = TensorDescriptor(raw.t().contiguous(), is_f_by_k=False)
    assert td.logical_shape == (128, 512) and td.is_raw
    assert torch.equal(MXOperand(td, argument="x").dequantized(), fake_quantize_mx(raw))
    with refused(ShapeError, "F of x", got="256"), naming("kernel"):
        MXOperand(TensorDescriptor(raw[:256].t(), is_f_by_k=False), argument="x")


CODES = quantize_mx(torch.ones(8, 128))


@pytest.mark.parametrize(
    ("kind", "argument", "says", "fields"),
    [
        (DTypeError, "data", r"got torch\.uint8", {"data": CODES.codes, "scales": to_packed(CODES.scales)}),
        (DTypeError, "data", r"got float32", {"data": torch.ones(32, 32), "is_swizzled": True}),
        (DTypeError, "data", "got list", {"data": [[1.0]]}),
        (ShapeError, "data", "", {"data": torch.ones(8).bfloat16()}),
        (ShapeError, "K/4 of data", "", {"data": torch.ones(12, 32).bfloat16(), "is_swizzled": True}),
        (ShapeError, "scales", r"got \[4, 8\]", {"data": pack_x4(CODES.codes), "scales": CODES.scales}),
        (
            ShapeError,
            "scales",
            r"got \[128, 4\]",
            {"data": pack_x4(CODES.codes), "scales": to_packed(CODES.scales)[:, :4]},
        ),
        (ConfigError, "quant_scheme", "got 'wrapZ'", {"quant_scheme": "wrapZ"}),
        (ConfigError, "quant_scheme", "got 'wrapX_single'", {"quant_scheme": "wrapX_single"}),
        (ConfigError, "is_swizzled", "got 1", {"is_swizzled": 1}),
        (ConfigError, "is_quantized", "got 0", {"is_quantized": 0}),
        (ConfigError, "is_x4", r"got True with torch\.float16", {"data": torch.ones(8, 128).half(), "is_x4": True}),
        (
            ConfigError,
            "is_x4",
            "got True with torch.float8_e4m3fn",
            {"data": CODES.codes.view(torch.float8_e4m3fn), "is_quantized": True, "is_x4": True},
        ),
        (
            ConfigError,
            "is_quantized",
            "got False",
            {"data": pack_x4(CODES.codes), "scales": to_packed(CODES.scales), "is_quantized": False},
        ),
        (
            ConfigError,
            "scales_are_packed",
            "got True with 32",
            {"data": pack_x4(CODES.codes), "scales": to_oversized(CODES.scales), "scales_are_packed": True},
        ),
        (ConfigError, "is_f_by_k", "", {"is_swizzled": True, "is_f_by_k": True}),
        (ConfigError, "skip_dma", "", {"skip_dma": True}),
        (ConfigError, "scalar_offset", "", {"scalar_offset": torch.zeros(1)}),
        (ConfigError, "effective_f_dim", "", {"effective_f_dim": 8}),
    ],
)
def test_descriptor_refuses(kind: type[NeuronMoEError], argument: str, says: str, fields: dict[str, Any]) -> None:
    with refused(kind, argument, says, where="TensorDescriptor"):
        TensorDescriptor(**fields)


@pytest.mark.parametrize(
    ("kind", "argument", "says", "td"),
    [
        (ConfigError, "x", "got None", TensorDescriptor()),
        (ConfigError, "x", "got None", TensorDescriptor(pack_x4(CODES.codes), is_quantized=True)),
        (DTypeError, "x", "", TensorDescriptor(torch.ones(8, 128))),
        (ShapeError, "K of x", "", TensorDescriptor(torch.ones(8, 96).bfloat16())),
        (ShapeError, "F of x", "got 12", TensorDescriptor(torch.ones(12, 128).bfloat16())),
        (
            ShapeError,
            "F of x",
            "got 3",
            TensorDescriptor(torch.ones(8, 12).bfloat16(), is_swizzled=True),
        ),
    ],
)
def test_operand_refuses(kind: type[NeuronMoEError], argument: str, says: str, td: TensorDescriptor) -> None:
    with refused(kind, argument, says), naming("kernel"):
        MXOperand(td, argument="x")

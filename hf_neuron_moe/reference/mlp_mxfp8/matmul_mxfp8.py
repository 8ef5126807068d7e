"""The two operators that the MXFP8 MLP is made of: quantizing an operand, and one product of two operands.

Letters: M, N rows and columns of the result, K contraction axis, F free axis of an operand (M or N).

Sources: nki-library 2.30 ``quantize_mxfp8`` and ``matmul_mxfp8``, 2.33 ``matmul_mxfp8``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.checks import (
    Rule,
    check_dtype,
    check_flags,
    check_multiple,
    check_record,
    check_rules,
    check_same_device,
    check_shape,
    check_tensor,
)
from hf_neuron_moe.errors import ConfigError, ShapeError, not_one_of, public
from hf_neuron_moe.formats.constants import ScaleRule, choose
from hf_neuron_moe.formats.mx import quantize_mx
from hf_neuron_moe.formats.scales import to_oversized, to_packed
from hf_neuron_moe.reference.described_operand import RAW_DTYPES, MXOperand, TensorDescriptor, check_layout
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MatmulMxfp8KernelConfig, automatic_config
from hf_neuron_moe.reference.mlp_mxfp8.on_chip import check_fits
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    STORED,
    KernelCall,
    check_buffer,
    check_descriptor,
    check_grouping,
    check_logical,
    check_packing,
)
from hf_neuron_moe.reference.mlp_mxfp8.product_tiles import product_tiles

_FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
Operand = Tensor | TensorDescriptor | tuple[Tensor, Tensor]


_OPTIONAL = ("TILES_IN", "lhs_matmul", "rhs_matmul", "lhs_scales", "rhs_scales", "lnc_2_shard", "output_td")
"""How the names of arguments begin that may be None."""


@public
def quantize_block_mxfp8_kernel(
    src_tensor: Tensor,
    return_fp8_dtype: str,
    run_with_lnc2: bool = False,
    enable_scale_packing: bool = True,
    *,
    mx_scale_rule: str = "neuron",
) -> tuple[Tensor, Tensor]:
    """Quantize ``[F, K]`` along K; return the scales first, then the data (a product takes the data first).

    * src_tensor: bf16 or fp16, K a multiple of 128, F of 8 (and at least 512 with run_with_lnc2, which halves F).
    * return_fp8_dtype: ``"float8_e4m3fn"`` or, for no product here, ``"float8_e5m2"``. The data are plain fp8
      ``[K/4, 4F]``, swizzled.
    * enable_scale_packing: uint8 scales ``[128*ceil(K/2048), F]``, otherwise oversized ``[K/4, F]``. Rows without a
      scale are 0 here and undefined on the device.
    """
    check_dtype(src_tensor, RAW_DTYPES, "src_tensor")
    check_shape(src_tensor, (None, None), "[F, K]", "src_tensor")
    check_flags({"run_with_lnc2": run_with_lnc2, "enable_scale_packing": enable_scale_packing})
    if return_fp8_dtype not in _FORMATS:
        raise not_one_of("return_fp8_dtype", return_fp8_dtype, _FORMATS)
    rule = choose(ScaleRule, mx_scale_rule, argument="mx_scale_rule")
    F, K = src_tensor.shape
    check_multiple(K, 128, "K of src_tensor", "the loader transposes whole tiles of K")
    check_multiple(F, 8, "F of src_tensor", "the loader reads groups of 8 rows")
    expected, fix = "at least 512 with run_with_lnc2", "Quantize a smaller tensor on one core."
    check_rules([Rule(F >= 512 or not run_with_lnc2, "F of src_tensor", expected, F, fix, ShapeError)])
    made = quantize_mx(src_tensor, fmt=return_fp8_dtype.removeprefix("float8_"), rule=rule)
    scales = (to_packed if enable_scale_packing else to_oversized)(made.scales)
    return scales, made.codes.view(_FORMATS[return_fp8_dtype])


@public
@torch.no_grad()
def matmul_mxfp8(
    lhs: Operand,
    rhs: Operand,
    TILES_IN_BLOCK_M: int | None = None, TILES_IN_BLOCK_N: int | None = None, TILES_IN_BLOCK_K: int | None = None,
    TILES_IN_LOAD_M: int | None = None, TILES_IN_LOAD_N: int | None = None,
    lhs_matmul_tile_shape_logical: tuple[int, int] | None = None,
    rhs_matmul_tile_shape_logical: tuple[int, int] | None = None,
    block_loop_order: str = "mnk", tile_loop_order: str = "mnk",
    float8_dtype: str = "float8_e4m3fn",
    output_dtype: torch.dtype = torch.bfloat16,
    run_with_lnc2: bool = True,
    lnc_2_shard_rhs: bool | None = None,
    lhs_scales: Tensor | None = None, rhs_scales: Tensor | None = None,
    use_scale_packing: bool = False,
    spill_reload: bool = False,
    lhs_is_swizzled: bool = True, rhs_is_swizzled: bool = True,
    load_with_PE_swizzle: bool = False,
    *,
    lhs_is_f_by_k: bool = True, rhs_is_f_by_k: bool = True,
    output_td: TensorDescriptor | None = None, initialize_accumulator: bool = True,
    mx_scale_rule: str = "neuron",
    execute: str = "fast",
) -> Tensor:  # fmt: skip
    """Return ``lhs @ rhs^T`` ``[M, N]`` of MX operands: fp32 sums, rounded once to output_dtype (bf16 or fp32).

    An operand is a TensorDescriptor, or data with its scales (in a tuple or as the argument), or a bf16 tensor. The
    last is pre-swizzled ``[K/4, 4F]`` by default, raw ``[F, K]`` with ``*_is_swizzled=False``, raw ``[K, F]`` (F a
    multiple of 512) with ``*_is_f_by_k=False`` as well. Both operands have any mode.

    * TILES_IN_BLOCK_*, tile shapes ``(tile_k, tile_m)`` and ``(tile_k, tile_n)``: None is chosen automatically.
    * use_scale_packing: given scales must be packed.
    * lnc_2_shard_rhs: two cores halve N (True) or M (False); None is the kernel's choice. K is never cut, so this
      changes no sum.
    * output_td: bf16 or fp32 ``[M, N]`` to fill instead of a new tensor. With ``initialize_accumulator=False`` the
      product is added to it in fp32 and rounded once. Both are arguments of ``generic_matmul_mxfp8_api``.

    Releases: 2.30 has fp32, e5m2 and ``lnc_2_shard_rhs=True`` as defaults. 2.33 spells the memory order
    ``lhs_orientation``, ``rhs_orientation``.
    """
    given = {name: value for name, value in locals().items() if value is not None or not name.startswith(_OPTIONAL)}
    step = KernelCall("matmul_mxfp8", given)
    if output_dtype not in STORED:
        raise ConfigError.about("output_dtype", "torch.bfloat16 or torch.float32", str(output_dtype), "Choose one.")
    if float8_dtype != "float8_e4m3fn":
        raise not_one_of("float8_dtype", float8_dtype, ["float8_e4m3fn"])
    check_flags({"initialize_accumulator": initialize_accumulator})
    left, right = (_operand(step, name) for name in ("lhs", "rhs"))
    check_logical(right.td, left.K, right.F, "[N, K]", "rhs")
    check_grouping({"lhs": left, "rhs": right})
    if lnc_2_shard_rhs is not None:
        check_flags({"lnc_2_shard_rhs": lnc_2_shard_rhs})
        step.check_even({"N of rhs": right.F} if lnc_2_shard_rhs else {"M of lhs": left.F})
    size = (left.F, left.K, right.F)
    walk = step.walk(_config(step, size), size)
    if output_td is None and not initialize_accumulator:
        expected, fix = "given with initialize_accumulator=False", "Describe the tensor to add to."
        raise ConfigError.about("output_td", expected, "None", fix)
    check_record(output_td, TensorDescriptor, "output_td")
    shape = (left.F, right.F)
    output = None if output_td is None else check_buffer(output_td.data, shape, "[M, N]", "output_td", STORED)
    check_same_device({"lhs": left.td.data, "rhs": right.td.data, "output_td": output})
    if output is not None:
        read = [name for name, each in (("lhs", left), ("rhs", right)) if _same_memory(each.td.data, output)]
        fix, got = "Its rows are written while the operands are read: pass other memory.", "".join(read[:1])
        check_rules([Rule(not read, "output_td", "a tensor with memory of its own", f"that of {got}", fix)])
    step.launch()
    assert left.td.data is not None
    if output is None:
        output = left.td.data.new_empty(shape, dtype=output_dtype)
    scratch = call_scratch(output.device)
    for rows, columns, values in product_tiles([(left, right)], scratch, rows=slice(0, left.F), walk=walk):
        part = output[rows, columns]
        part.copy_(values if initialize_accumulator else values + part)
    return output


def _same_memory(data: Tensor | None, output: Tensor) -> bool:
    return data is not None and data.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()


def _operand(step: KernelCall, name: str) -> MXOperand:
    """Return the operand in argument `name`, ``lhs`` or ``rhs``, described and checked."""
    td, scales = step.call[name], step.call.get(f"{name}_scales")
    if isinstance(td, TensorDescriptor):
        expected, fix = "None with a TensorDescriptor", "Describe the scales."
        check_rules([Rule(scales is None, f"{name}_scales", expected, "a tensor", fix)])
    else:
        data, scales = td if isinstance(td, tuple) and len(td) == 2 and scales is None else (td, scales)
        check_tensor(data, name)
        swizzled, by_row = step.call[f"{name}_is_swizzled"], step.call[f"{name}_is_f_by_k"]
        check_flags({f"{name}_is_swizzled": swizzled, f"{name}_is_f_by_k": by_row})
        prepared = swizzled or scales is not None
        check_layout(data, swizzled=prepared, quantized=scales is not None, argument=name)
        td = TensorDescriptor(data, scales, swizzled, is_f_by_k=False if prepared else by_row)
    check_descriptor(td, name)
    if step.call["use_scale_packing"]:
        check_packing(td, True, f"{name}_scales")
    return MXOperand(td, argument=name, rule=step.rule)


def _config(step: KernelCall, size: tuple[int, int, int]) -> MatmulMxfp8KernelConfig:
    """Return the configuration that the arguments and, where they are None, the automatic choice make."""
    names = [each for each in step.call if each.startswith("TILES_IN") or each.endswith("loop_order")]
    chosen = {name: step.call[name] for name in (*names, "float8_dtype", "spill_reload", "load_with_PE_swizzle")}
    automatic = automatic_config(*size, run_with_lnc2=step.lnc2)
    for name, axis in (("lhs", "m"), ("rhs", "n")):
        argument = f"{name}_matmul_tile_shape_logical"
        default = (chosen.get("tile_k", automatic.tile_k), getattr(automatic, f"tile_{axis}"))
        shape = step.call.get(argument, default)
        fits = isinstance(shape, tuple) and len(shape) == 2 and chosen.setdefault("tile_k", shape[0]) == shape[0]
        expected, fix = f"(tile_k, tile_{axis}), for example {default}", "Both operands have one contraction tile."
        check_rules([Rule(fits, argument, expected, repr(shape), fix)])
        chosen[f"tile_{axis}"] = shape[1]
    config = replace(automatic, **chosen)
    tiles = {f"tile_{axis}": f"{'rhs' if axis == 'n' else 'lhs'}_matmul_tile_shape_logical" for axis in "mkn"}
    check_fits(config, lambda field: tiles.get(field, field))
    return config

"""Checks that the MXFP8 MLP entry points share: operands by their argument names, launch options by their rules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_flags, check_multiple, check_shape
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats.constants import ScaleRule, SwizzleScheme, choose
from hf_neuron_moe.formats.scales import ScaleLayout, scale_row_count
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import TILE_K, MlpBwdMatmulConfig, check_positive_int
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.mx_operand import RAW_DTYPES, MXOperand, TensorDescriptor, check_layout, check_scales

FP8_X4_DTYPES = (torch.float8_e4m3fn, "float8_e4m3fn_x4", "float8_e4m3fn")
"""What ``fp8_x4_dtype`` may say. Upstream ignores the argument; any other type would promise another arithmetic."""


def describe(
    data: Tensor,
    scales: Tensor | None = None,
    is_swizzled: bool = False,
    *,
    argument: str,
    scales_argument: str = "",
    use_scale_packing: bool = True,
    raw_shape: str,
    raw_dtypes: tuple[torch.dtype, ...] = RAW_DTYPES,
) -> TensorDescriptor:
    """Check one operand of a kernel under its argument's name and describe it.

    Args:
        data: the operand in any mode.
        scales: makes it pre-quantized.
        is_swizzled: makes it pre-swizzled.
        argument: name of `data`.
        scales_argument: name of `scales`.
        use_scale_packing: the layout the kernel is told the scales have.
        raw_shape: the raw layout in words, e.g. ``"[S, H]"``.
        raw_dtypes: dtypes of the raw mode.

    Raises:
        DTypeError, ShapeError, ConfigError: a switch that is no bool; see
            :func:`~hf_neuron_moe.reference.mx_operand.check_layout` and :func:`check_packing`.
    """
    quantized = scales is not None
    check_flags({f"{scales_argument.removesuffix('scales')}is_swizzled": is_swizzled})
    if not quantized and not is_swizzled:
        check_dtype(data, raw_dtypes, argument=argument)
        check_shape(data, (None, None), raw_shape, argument=argument)
    check_layout(data, scales, swizzled=is_swizzled or quantized, quantized=quantized, argument=argument)
    td = TensorDescriptor(data, None, is_swizzled, is_quantized=quantized)
    if scales is None:
        return td
    K, F = td.logical_shape
    check_scales(scales, K, F, argument=scales_argument)
    td = TensorDescriptor(data, scales)
    check_packing(td, use_scale_packing, argument=scales_argument)
    return td


def check_descriptor(td: TensorDescriptor, *, argument: str) -> None:
    """Refuse what is no TensorDescriptor (DTypeError) and the grouping 1x32, which no MLP kernel has (ConfigError)."""
    if not isinstance(td, TensorDescriptor):
        raise DTypeError.about(
            argument, "a TensorDescriptor", type(td).__name__, "Wrap the tensor: TensorDescriptor(tensor)."
        )
    if td.quant_scheme != SwizzleScheme.WRAPX.value:
        raise ConfigError.about(
            f"{argument}.quant_scheme",
            "wrapX, the one grouping of the MLP kernels",
            repr(td.quant_scheme),
            "Quantize the tensor from its bf16 values in the wrapX scheme.",
        )


def check_grouping(operands: Mapping[str, MXOperand]) -> None:
    """Refuse operands of one product whose last 384 contraction elements are grouped differently.

    ``fast_dma_transpose`` groups a remainder of 384 as one tile, every other loader as 256 + 128.

    Raises:
        ConfigError: otherwise; names the operand that has the flag.
    """
    schemes = {operand.scheme for operand in operands.values()}
    K = next(iter(operands.values())).K
    if K % TILE_K == 384 and len(schemes) > 1:
        named = [name for name, operand in operands.items() if operand.td.fast_dma_transpose]
        raise ConfigError.about(
            f"{named[0]}.fast_dma_transpose",
            f"alike for both operands of a product with K={K}, whose remainder of 384 it groups as one tile",
            "True for this one only",
            "Set it for both, or for none.",
        )


def check_options(clamp_limits: object, matmul_config: object) -> None:
    """Refuse option records of another type (ConfigError)."""
    records = (("clamp_limits", clamp_limits, ClampLimits), ("matmul_config", matmul_config, MlpBwdMatmulConfig))
    for name, value, kind in records:
        if value is not None and not isinstance(value, kind):
            raise ConfigError.about(
                name, f"None or a {kind.__name__}", type(value).__name__, f"Build it with {kind.__name__}(...)."
            )


def scale_rule(mx_scale_rule: str) -> ScaleRule:
    """Resolve the block scale rule's name (ConfigError for an unknown one)."""
    return choose(ScaleRule, mx_scale_rule, argument="mx_scale_rule")


def check_packing(td: TensorDescriptor, use_scale_packing: bool, *, argument: str) -> None:
    """Refuse scales in the other layout than the kernel is told (upstream computes garbage); K = 512 fits both.

    Raises:
        ConfigError: otherwise.
    """
    if td.scales is None:
        return
    K = td.logical_shape[0]
    oversized, packed = (scale_row_count(K, layout) for layout in (ScaleLayout.OVERSIZED, ScaleLayout.PACKED))
    if oversized != packed and td.scales_are_packed != use_scale_packing:
        raise ConfigError.about(
            argument,
            f"in the layout that use_scale_packing={use_scale_packing} announces: "
            f"{packed if use_scale_packing else oversized} rows for K={K}",
            f"{td.scales.shape[0]} rows",
            "Convert the scales (formats.oversized_to_packed, packed_to_oversized) or flip the flag.",
        )


def check_logical(td: TensorDescriptor, K: int, F: int, names: str, *, argument: str) -> None:
    """Refuse an operand whose logical ``[F, K]`` is not what the other operands imply.

    Args:
        td: the operand.
        K: required contraction size.
        F: required free size.
        names: the raw shape in words.
        argument: argument.

    Raises:
        ShapeError: otherwise.
    """
    if td.logical_shape != (K, F):
        layout = "" if td.is_raw else f" (here as [K/4, {'F' if td.is_x4 else '4F'}])"
        raise ShapeError.about(
            argument,
            f"of shape {names} = [{F}, {K}]{layout}",
            f"{list(td.physical_shape)}, which is [{td.logical_shape[1]}, {td.logical_shape[0]}]",
            "Both operands of a product have one contraction axis; check which axis is which.",
        )


def check_no_mix_at_384(operands: Mapping[str, TensorDescriptor], K: int) -> None:
    """Refuse raw and host-prepared operands of one product with K of exactly 384.

    The kernel groups a raw operand with K = 384 as one tile, host-prepared data are 256 + 128: the products would pair
    other elements (nki-library 2.30 forward and backward).

    Raises:
        ConfigError: otherwise; names the host-prepared operand.
    """
    prepared = [name for name, td in operands.items() if not td.is_raw]
    raw = [name for name, td in operands.items() if td.is_raw]
    if K == 384 and prepared and raw:
        raise ConfigError.about(
            prepared[0],
            f"raw like {raw[0]}, because their contraction axis is exactly 384",
            "swizzled or quantized data, which groups 384 as 256 + 128 and not as one tile",
            "Pass both raw, or pad the axis to 512 with zeros.",
        )


def check_raw_axis(td: TensorDescriptor, size: int, name: str, *, argument: str) -> None:
    """Refuse a raw operand whose contraction axis is no multiple of 128 (ShapeError)."""
    if td.is_raw:
        rule = "needed by the transposing loader while this operand is neither swizzled nor quantized"
        check_multiple(size, 128, f"{name} of {argument}", rule)


def check_even(sizes: Mapping[str, tuple[int, str]], run_with_lnc2: bool) -> None:
    """Refuse odd sizes that two cores cannot share.

    Args:
        sizes: argument name to the size and its letter.
        run_with_lnc2: whether two cores share the work.

    Raises:
        ShapeError: an odd size under LNC2.
    """
    if run_with_lnc2:
        for argument, (size, letter) in sizes.items():
            check_multiple(size, 2, f"{letter} of {argument}", "run_with_lnc2 halves it")


def check_launch(tiles: Mapping[str, int], flags: Mapping[str, bool], fp8_x4_dtype: object) -> None:
    """Check options that have no effect on values.

    Args:
        tiles: tile counts by argument name.
        flags: switches by argument name.
        fp8_x4_dtype: see :data:`FP8_X4_DTYPES`.

    Raises:
        ConfigError: a count that is not a positive integer, a switch that is no bool, another fp8 type.
    """
    for name, count in tiles.items():
        check_positive_int(count, argument=name)
    check_flags(flags)
    if fp8_x4_dtype not in FP8_X4_DTYPES:
        raise ConfigError.about(
            "fp8_x4_dtype",
            "float8_e4m3fn_x4 (upstream ignores this argument: every operand is e4m3)",
            repr(fp8_x4_dtype),
            "Leave the default; the kernel has no e5m2 path.",
        )


def check_buffer(
    buffer: Tensor | None, shape: tuple[int, int], names: str, dtypes: tuple[torch.dtype, ...], *, argument: str
) -> Tensor:
    """Return an output buffer; refuse None, another dtype (DTypeError) or another shape (ShapeError)."""
    checked: Tensor = buffer  # type: ignore[assignment]  # the next line refuses None
    check_dtype(checked, dtypes, argument=argument)
    check_shape(checked, shape, names, argument=argument)
    return checked


def core_rows(size: int, base: int, run_with_lnc2: bool, *, argument: str = "s_base_offset") -> slice:
    """Return the rows of one core: from `base`, half of `size` under LNC2, else all of it.

    Raises:
        ShapeError, ConfigError: an odd size under LNC2; a range that does not fit.
    """
    check_even({"S": (size, "rows")}, run_with_lnc2)
    length = size // 2 if run_with_lnc2 else size
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base <= size - length:
        raise ConfigError.about(
            argument,
            f"an int of at least 0 and at most {size - length}",
            repr(base),
            "It is the first row of a core's share: 0 for the first core, half the rows for the second.",
        )
    return slice(base, base + length)

"""What the MXFP8 MLP functions share: one call with its arguments, and operands checked under the arguments' names.

Letters: F free axis, K contraction axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_flags, check_multiple, check_record, check_shape
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError, not_one_of
from hf_neuron_moe.formats.constants import ScaleRule, SwizzleScheme, choose
from hf_neuron_moe.formats.scales import kernel_row_counts
from hf_neuron_moe.reference.block_rows import EXECUTIONS
from hf_neuron_moe.reference.described_operand import (
    RAW_DTYPES,
    UNSCALED,
    MXOperand,
    TensorDescriptor,
    check_layout,
    check_scales,
    logical_shape,
)
from hf_neuron_moe.reference.launch_record import note_launch, scheduling
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    TILE_K,
    MatmulMxfp8KernelConfig,
    MlpBwdMatmulConfig,
    Sizes,
    automatic_config,
    check_config,
    counted_config,
)
from hf_neuron_moe.reference.mlp_mxfp8.tile_walk import TileWalk
from hf_neuron_moe.reference.moe_types import ClampLimits
from hf_neuron_moe.reference.specification import multiples

_SHARED = multiples("mlp_forward", when="run_with_lnc2")
BF16 = (torch.bfloat16,)
STORED = (torch.bfloat16, torch.float32)  # dtypes of results: the device's, and fp32 to see the accumulators


def check_packing(td: TensorDescriptor, use_scale_packing: bool, argument: str) -> None:
    """Raise ConfigError for scales in the other layout than the kernel is told, which upstream turns into garbage."""
    if td.scales is None:
        return
    K = td.logical_shape[0]
    oversized, packed = kernel_row_counts(K)
    if oversized != packed and td.scales_are_packed != use_scale_packing:
        rows = packed if use_scale_packing else oversized
        expected = f"in the layout that use_scale_packing={use_scale_packing} announces: {rows} rows for K={K}"
        fix = "Convert the scales (formats.oversized_to_packed, packed_to_oversized) or flip the flag."
        raise ConfigError.about(argument, expected, f"{td.scales.shape[0]} rows", fix)


def check_descriptor(td: object, argument: str) -> None:
    """Raise DTypeError for no TensorDescriptor, ConfigError for the grouping 1x32, which no MLP kernel has."""
    if not isinstance(td, TensorDescriptor):
        fix = "Wrap the tensor: TensorDescriptor(tensor)."
        raise DTypeError.about(argument, "a TensorDescriptor", type(td).__name__, fix)
    if td.quant_scheme != SwizzleScheme.WRAPX.value:
        fix = "Quantize the tensor from its bf16 values in the wrapX scheme."
        got = repr(td.quant_scheme)
        raise ConfigError.about(f"{argument}.quant_scheme", "wrapX, the one grouping of the MLP kernels", got, fix)


def check_grouping(operands: Mapping[str, MXOperand]) -> None:
    """Raise ConfigError where ``fast_dma_transpose`` groups a remainder of 384 as one tile for one operand only."""
    K = next(iter(operands.values())).K
    if K % TILE_K == 384 and len({operand.scheme for operand in operands.values()}) > 1:
        name = next(name for name, operand in operands.items() if operand.td.fast_dma_transpose)
        expected = f"alike for both operands of a product with K={K}, whose remainder of 384 it groups as one tile"
        fix = "Set it for both, or for none."
        raise ConfigError.about(f"{name}.fast_dma_transpose", expected, "True for this one only", fix)


def check_no_mix_at_384(operands: Mapping[str, TensorDescriptor], K: int) -> None:
    """Raise ConfigError for a product of raw and prepared operands with K of exactly 384, which pairs other elements.

    The kernel groups a raw one as one tile, prepared data are 256 + 128 (nki-library 2.30 forward and backward).
    """
    raw = [name for name, td in operands.items() if td.is_raw]
    prepared = [name for name in operands if name not in raw]
    if K == 384 and prepared and raw:
        expected = f"raw like {raw[0]}, because their contraction axis is exactly 384"
        got = "swizzled or quantized data, which groups 384 as 256 + 128 and not as one tile"
        raise ConfigError.about(prepared[0], expected, got, "Pass both raw, or pad the axis to 512 with zeros.")


def check_logical(td: TensorDescriptor, K: int, F: int, names: str, argument: str) -> None:
    """Raise ShapeError for an operand whose logical ``[F, K]``, in words `names`, the others do not imply."""
    if td.logical_shape != (K, F):
        layout = "" if td.is_raw else f" (here as [K/4, {'F' if td.is_x4 else '4F'}])"
        got = f"{list(td.physical_shape)}, which is [{td.logical_shape[1]}, {td.logical_shape[0]}]"
        fix = "Both operands of a product have one contraction axis; check which axis is which."
        raise ShapeError.about(argument, f"of shape {names} = [{F}, {K}]{layout}", got, fix)


def check_buffer(
    buffer: Tensor | None,
    shape: Sequence[int | None],
    names: str,
    argument: str,
    dtypes: tuple[torch.dtype, ...] = BF16,
) -> Tensor:
    """Return a tensor of `dtypes` and of `shape` (in words `names`); raise for anything else."""
    checked: Tensor = buffer  # type: ignore[assignment]  # the next line refuses None
    check_dtype(checked, dtypes, argument)
    check_shape(checked, shape, names, argument)
    return checked


class KernelCall:
    """One call of a documented function, whose options are checked here; `call` are its arguments, its ``locals()``.

    `bf16` is for a function that takes no other `dtype`: the rule in words, and what to do. `lone_384` says whether it
    groups a raw contraction of exactly 384 as one tile, where `call` does not.
    """

    def __init__(
        self, kernel: str, call: Mapping[str, Any], bf16: tuple[str, str] | None = None, lone_384: bool = False
    ) -> None:
        self.call = dict(call)
        self.lnc2: bool = call.get("run_with_lnc2", False)
        self.lone_384: bool = call.get("lone_384", lone_384)
        self.rule = choose(ScaleRule, call.get("mx_scale_rule", ScaleRule.NEURON), argument="mx_scale_rule")
        self.execute: str = call.get("execute", "fast")
        if self.execute not in EXECUTIONS:
            raise not_one_of("execute", self.execute, EXECUTIONS)
        self._launch = kernel, scheduling(call)
        check_flags({"lone_384": self.lone_384})
        check_record(call.get("clamp_limits"), ClampLimits, "clamp_limits")
        check_record(call.get("matmul_config"), MlpBwdMatmulConfig, "matmul_config")
        if bf16 is not None and call["dtype"] != torch.bfloat16:
            raise ConfigError.about("dtype", bf16[0], str(call["dtype"]), bf16[1])

    def launch(self) -> None:
        """Record the launch: every check is done."""
        note_launch(*self._launch)

    def check_even(self, sizes: Mapping[str, int]) -> None:
        """Raise ShapeError for odd sizes, by name, that two cores cannot share."""
        for name, size in sizes.items() if self.lnc2 else ():
            check_multiple(size, _SHARED["S"], name, "run_with_lnc2 halves it")

    def step_options(self) -> dict[str, Any]:
        """Return what a whole backward passes to each of its steps: for both cores at once, with tiles for one."""
        defaults = {"fp8_x4_dtype": torch.float8_e4m3fn, "spill_reload": True, "use_scale_packing": True}
        options = {name: self.call.get(name, default) for name, default in defaults.items()}
        lnc2 = self.lnc2 and self.execute == "tiles"
        return options | {"run_with_lnc2": lnc2, "mx_scale_rule": self.rule, "execute": self.execute}

    def counted_walk(self, size: Sizes, arguments: tuple[str, ...]) -> TileWalk | None:
        """Check the tile counts in arguments, for M, N and K, of a product of M, K, N = `size`; return its walk."""
        m, n, k = (self.call[name] for name in arguments)
        return self.walk(counted_config(size, (m, n, k), arguments=arguments, lnc2=self.lnc2), size)

    def walk(self, config: MatmulMxfp8KernelConfig | None, size: Sizes, argument: str = "config") -> TileWalk | None:
        """Check the configuration of a product of M, K, N = `size`; return its walk, None where it runs fast."""
        check_config(config, size, argument=argument)
        if self.execute == "fast":
            return None
        config = config or automatic_config(*size, run_with_lnc2=self.lnc2)
        return TileWalk(config, self.call.get("spill_reload", True))

    def describe(
        self, argument: str, prefix: str, raw_shape: str, raw_dtypes: tuple[torch.dtype, ...] = RAW_DTYPES
    ) -> TensorDescriptor:
        """Check the operand in tensor `argument` under its name and describe it.

        Its scales are ``{prefix}_scales``. `raw_shape`, in words, and `raw_dtypes` are for an operand without, which is
        not ``{prefix}_is_swizzled``.
        """
        data, scales = self.call[argument], self.call.get(f"{prefix}_scales")
        quantized, swizzled = scales is not None, self.call.get(f"{prefix}_is_swizzled", False)
        check_flags({f"{prefix}_is_swizzled": swizzled})
        if not quantized and not swizzled:
            check_dtype(data, raw_dtypes, argument, UNSCALED)
            check_shape(data, (None, None), raw_shape, argument)
        check_layout(data, swizzled=swizzled or quantized, quantized=quantized, argument=argument)
        if scales is not None:
            check_scales(scales, *logical_shape(data, swizzled=True), argument=f"{prefix}_scales")
        td = TensorDescriptor(data, scales, swizzled)
        check_packing(td, self.call["use_scale_packing"], f"{prefix}_scales")
        return td

    def operand(self, name: str) -> MXOperand:
        """Return the operand in argument `name`."""
        td = self.call[name]
        check_descriptor(td, name)
        check_packing(td, self.call["use_scale_packing"], name)
        return MXOperand(td, argument=name, lone_384=self.lone_384, rule=self.rule)

    def pair(self, left: str, right: str, shape: str = "[F, K]") -> tuple[MXOperand, MXOperand]:
        """Return ``[M, K]`` and ``[N, K]`` of one product, checked; `shape` is the right one's in words."""
        one, other = self.operand(left), self.operand(right)
        check_logical(other.td, one.K, other.F, shape, right)
        if self.lone_384:
            check_no_mix_at_384({left: one.td, right: other.td}, one.K)
        check_grouping({left: one, right: other})
        return one, other

    def buffer(self, name: str, shape: tuple[int, int], names: str, dtypes: tuple[torch.dtype, ...] = BF16) -> Tensor:
        """Return the tensor that argument `name` describes, of `shape` (in words `names`)."""
        return check_buffer(self.call[name].data, shape, names, name, dtypes)

    def optional_buffers(
        self, arguments: Mapping[str, str], shape: tuple[int, int], dtypes: tuple[torch.dtype, ...] = BF16
    ) -> dict[str, Tensor]:
        """Return the ``[S, I]`` tensors of those `arguments`, given by what they hold, that are not None."""
        given = {held: name for held, name in arguments.items() if self.call[name] is not None}
        return {held: self.buffer(name, shape, "[S, I]", dtypes) for held, name in given.items()}

    def rows(self, argument: str, size: int, base: int | None = None) -> slice:
        """Return the rows of this core: from `base`, or what `argument` says, half of `size` under LNC2, else all."""
        self.check_even({"rows of S": size})
        length = size // 2 if self.lnc2 else size
        base = self.call[argument] if base is None else base
        if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base <= size - length:
            expected = f"an int of at least 0 and at most {size - length}"
            fix = "It is the first row of a core's share: 0 for the first core, half the rows for the second."
            raise ConfigError.about(argument, expected, repr(base), fix)
        return slice(base, base + length)

"""Tile configuration of single matmuls: the records of nki-library 2.31 ``matmul_mxfp8`` and ``mlp_bwd_mxfp8``.

They change the order of the device's fp32 sums at most, never a quantized value, and have no effect here beyond their
validation.

Letters: M, N rows and columns of the result, K contraction axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.formats.constants import SwizzleScheme, unknown_name
from hf_neuron_moe.reference.launch_record import check_positive_int

TILE_M = 128
"""Rows of a tile: the tensor engine's partitions."""

TILE_K = 512
"""Contraction elements of one MX matmul instruction."""

TILE_N = 512
"""Columns of a tile: one bank of fp32 accumulators."""

_FLAGS = (
    "enable_scale_packing", "run_with_lnc2", "spill_reload", "enable_psum_copy_in", "lhs_is_swizzled",
    "rhs_is_swizzled", "load_with_PE_swizzle",
)  # fmt: skip

MAX_BLOCK = 2048
"""A block of an automatic configuration is at most this wide (nki-library 2.31)."""


Sizes = tuple[int, int, int]
"""M, K, N."""

_WHERE = "MlpBwdMatmulConfig"


@dataclass(frozen=True)
class MatmulMxfp8KernelConfig:
    """How one matmul ``[M, K] x [N, K]^T`` is tiled; names and defaults are nki-library's.

    Attributes:
        M, K, N: sizes.
        tile_m, tile_k, tile_n: tile sizes.
        TILES_IN_BLOCK_M, TILES_IN_BLOCK_N, TILES_IN_BLOCK_K: tiles per block.
        TILES_IN_LOAD_M, TILES_IN_LOAD_N, TILES_IN_LOAD_K: tiles per load; None is the whole block. They divide the
            block's tiles.
        block_loop_order, tile_loop_order: order of the loops, a permutation of ``"mnk"``.
        float8_dtype: e4m3 only, as everywhere in the MLP.
        enable_scale_packing: layout of spilled and supplied scales.
        run_with_lnc2, lnc_2_shard_rhs: how two cores share the product.
        spill_reload, enable_psum_copy_in, load_with_PE_swizzle: how operands and sums move.
        lhs_is_swizzled, rhs_is_swizzled: modes of the operands.
        quant_scheme: which K values share a block.
        output_dtype: of the result.

    Raises:
        ConfigError: a size or count that is not a positive integer, loads that do not divide blocks, another loop
            order, fp8 type or scheme, a switch that is no bool.
    """

    M: int
    K: int
    N: int
    tile_m: int = TILE_M
    tile_k: int = TILE_K
    tile_n: int = TILE_N
    TILES_IN_BLOCK_M: int = 1
    TILES_IN_BLOCK_N: int = 1
    TILES_IN_BLOCK_K: int = 1
    TILES_IN_LOAD_M: int | None = None
    TILES_IN_LOAD_N: int | None = None
    TILES_IN_LOAD_K: int | None = None
    block_loop_order: str = "mnk"
    tile_loop_order: str = "mnk"
    float8_dtype: str = "float8_e4m3fn"
    enable_scale_packing: bool = False
    run_with_lnc2: bool = True
    lnc_2_shard_rhs: bool | None = None
    spill_reload: bool = False
    enable_psum_copy_in: bool = True
    lhs_is_swizzled: bool = True
    rhs_is_swizzled: bool = True
    load_with_PE_swizzle: bool = False
    quant_scheme: str = "wrapX"
    output_dtype: torch.dtype | None = None

    @public("MatmulMxfp8KernelConfig")
    def __post_init__(self) -> None:
        for name in ("M", "K", "N", "tile_m", "tile_k", "tile_n", *(f"TILES_IN_BLOCK_{axis}" for axis in "MNK")):
            check_positive_int(name, getattr(self, name))
        for axis in "MNK":
            load, block = getattr(self, f"TILES_IN_LOAD_{axis}"), getattr(self, f"TILES_IN_BLOCK_{axis}")
            if load is not None:
                check_positive_int(f"TILES_IN_LOAD_{axis}", load)
                if block % load:
                    raise ConfigError.about(
                        f"TILES_IN_LOAD_{axis}",
                        f"a divisor of TILES_IN_BLOCK_{axis} = {block}",
                        str(load),
                        "A block is loaded in whole groups of tiles.",
                    )
        self._check_options()

    def _check_options(self) -> None:
        names = _FLAGS if self.lnc_2_shard_rhs is None else (*_FLAGS, "lnc_2_shard_rhs")
        check_flags({name: getattr(self, name) for name in names})
        for name in ("block_loop_order", "tile_loop_order"):
            order = getattr(self, name)
            if not isinstance(order, str) or sorted(order) != sorted("mnk"):
                raise unknown_name(getattr(self, name), ["mnk", "mkn", "nmk", "nkm", "kmn", "knm"], argument=name)
        if self.float8_dtype != "float8_e4m3fn":
            raise unknown_name(self.float8_dtype, ["float8_e4m3fn"], argument="float8_dtype")
        if self.quant_scheme != SwizzleScheme.WRAPX.value:
            raise unknown_name(self.quant_scheme, [SwizzleScheme.WRAPX.value], argument="quant_scheme")
        if self.output_dtype is not None and not isinstance(self.output_dtype, torch.dtype):
            raise ConfigError.about(
                "output_dtype", "None or a torch.dtype", repr(self.output_dtype), "For example torch.bfloat16."
            )

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles along M, K and N."""
        return -(-self.M // self.tile_m), -(-self.K // self.tile_k), -(-self.N // self.tile_n)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks along M, K and N."""
        counts = (self.TILES_IN_BLOCK_M, self.TILES_IN_BLOCK_K, self.TILES_IN_BLOCK_N)
        m, k, n = (-(-tiles // count) for tiles, count in zip(self.tiles, counts, strict=True))
        return m, k, n


@dataclass(frozen=True)
class MlpBwdMatmulConfig:
    """One optional configuration per matmul of the backward; None chooses automatically (nki-library 2.31).

    Raises:
        ConfigError: one of another type.
    """

    recompute_gate: MatmulMxfp8KernelConfig | None = None
    recompute_up: MatmulMxfp8KernelConfig | None = None
    phase1_down_proj: MatmulMxfp8KernelConfig | None = None
    phase2_hidden_grad: MatmulMxfp8KernelConfig | None = None
    phase3_wgrad: MatmulMxfp8KernelConfig | None = None
    phase4_wgrad: MatmulMxfp8KernelConfig | None = None

    @public(_WHERE)
    def __post_init__(self) -> None:
        for name, config in vars(self).items():
            check_config(config, None, argument=name)

    @public(_WHERE)
    def resolve_backward_phases(
        self, seq_len: int, hidden_size: int, intermediate_size: int, run_with_lnc2: bool = True
    ) -> tuple[MatmulMxfp8KernelConfig, ...]:
        """Return the configurations of phases 1 to 4, each checked against the problem (per core under LNC2).

        Raises:
            ConfigError: one whose M, K or N is not the phase's.
        """
        return self.backward_phases(seq_len, hidden_size, intermediate_size, run_with_lnc2, "")

    def backward_phases(
        self, seq_len: int, hidden_size: int, intermediate_size: int, run_with_lnc2: bool, prefix: str
    ) -> tuple[MatmulMxfp8KernelConfig, ...]:
        """Do the same for a function whose argument this is; `prefix` stands before the fields' names in errors."""
        check_flags({"run_with_lnc2": run_with_lnc2})
        cores, S, H, inner = 2 if run_with_lnc2 else 1, seq_len, hidden_size, intermediate_size
        sizes = {
            "phase1_down_proj": (S // cores, H, inner),
            "phase2_hidden_grad": (S // cores, 2 * inner, H),
            "phase3_wgrad": (2 * inner // cores, S, H),
            "phase4_wgrad": (H // cores, S, inner),
        }
        return tuple(self._resolve(name, size, run_with_lnc2, prefix) for name, size in sizes.items())

    @public(_WHERE)
    def resolve_recompute_phases(
        self, seq_len: int, hidden_size: int, intermediate_size: int, run_with_lnc2: bool = True
    ) -> tuple[MatmulMxfp8KernelConfig, MatmulMxfp8KernelConfig]:
        """Return the configurations of the gate and the up projection.

        Raises:
            ConfigError: sizes of another problem, or two that do not share the tiles of the hidden states.
        """
        return self.recompute_phases(seq_len, hidden_size, intermediate_size, run_with_lnc2, "")

    def recompute_phases(
        self, seq_len: int, hidden_size: int, intermediate_size: int, run_with_lnc2: bool, prefix: str
    ) -> tuple[MatmulMxfp8KernelConfig, MatmulMxfp8KernelConfig]:
        """Do the same for a function whose argument this is; `prefix` stands before the fields' names in errors."""
        check_flags({"run_with_lnc2": run_with_lnc2})
        size = (seq_len // (2 if run_with_lnc2 else 1), hidden_size, intermediate_size)
        gate, up = (self._resolve(name, size, run_with_lnc2, prefix) for name in ("recompute_gate", "recompute_up"))
        arguments = tuple(f"{prefix}{name}" for name in ("recompute_gate", "recompute_up"))
        check_shared_hidden_tiles(gate, up, arguments=arguments)
        return gate, up

    def _resolve(self, name: str, size: Sizes, lnc2: bool, prefix: str) -> MatmulMxfp8KernelConfig:
        config: MatmulMxfp8KernelConfig | None = getattr(self, name)
        check_config(config, size, argument=f"{prefix}{name}")
        return automatic_config(*size, run_with_lnc2=lnc2) if config is None else config


def check_config(config: object, size: Sizes | None, *, argument: str) -> None:
    """Refuse (ConfigError) what is neither None nor a configuration for M, K, N = `size`; None for any size."""
    if config is None:
        return
    if not isinstance(config, MatmulMxfp8KernelConfig):
        raise ConfigError.about(
            argument,
            "None or a MatmulMxfp8KernelConfig",
            type(config).__name__,
            "Build it with MatmulMxfp8KernelConfig(M=..., K=..., N=...).",
        )
    if size is not None and size != (config.M, config.K, config.N):
        raise ConfigError.about(
            argument,
            f"a configuration for M, K, N = {size}",
            str((config.M, config.K, config.N)),
            "Make it for the sizes of one core: rows of the result are halved under LNC2.",
        )


def check_shared_hidden_tiles(
    gate: MatmulMxfp8KernelConfig, up: MatmulMxfp8KernelConfig, *, arguments: tuple[str, ...]
) -> None:
    """Refuse (ConfigError) configurations of the two projections that cut the hidden states into different tiles."""
    for name in ("tile_m", "tile_k", "TILES_IN_BLOCK_M", "TILES_IN_BLOCK_K"):
        if getattr(gate, name) != getattr(up, name):
            raise ConfigError.about(
                f"{arguments[1]}.{name}",
                f"that of {arguments[0]}, {getattr(gate, name)} (both read the same hidden tiles)",
                str(getattr(up, name)),
                "Configure both alike.",
            )


def automatic_config(M: int, K: int, N: int, *, run_with_lnc2: bool = True) -> MatmulMxfp8KernelConfig:
    """Return where upstream's automatic choice starts: tile_n the largest of 512, 256, 128 that divides N, blocks of at
    most 16 x 2 x 8 tiles and 2048 positions. Upstream then fits the blocks to the on-chip memory, which is not modeled.
    """  # noqa: D205
    tile_n = next((size for size in (512, 256, 128) if N % size == 0), TILE_N)
    counts = (-(-M // TILE_M), -(-K // TILE_K), -(-N // tile_n))
    limits = ((16, TILE_M), (8, TILE_K), (2, tile_n))
    m, k, n = (min(count, most, MAX_BLOCK // tile) for count, (most, tile) in zip(counts, limits, strict=True))
    return MatmulMxfp8KernelConfig(
        M=M, K=K, N=N, tile_n=tile_n, TILES_IN_BLOCK_M=m, TILES_IN_BLOCK_K=k, TILES_IN_BLOCK_N=n,
        run_with_lnc2=run_with_lnc2,
    )  # fmt: skip

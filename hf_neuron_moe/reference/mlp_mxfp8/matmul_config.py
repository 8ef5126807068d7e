"""Tile configuration of single matmuls: the records of nki-library 2.31 ``matmul_mxfp8`` and ``mlp_bwd_mxfp8``.

They change the order of the device's fp32 sums at most, never a quantized value, and have no effect here beyond their
validation.

Letters: M, N rows and columns of the result, K contraction axis.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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

MAX_BLOCK = 2048
"""A block of an automatic configuration is at most this wide (nki-library 2.31)."""


Sizes = tuple[int, int, int]
"""M, K, N."""

_WHERE = "MlpBwdMatmulConfig"


@dataclass(frozen=True)
class MatmulMxfp8KernelConfig:
    """How one matmul ``[M, K] x [N, K]^T`` is tiled; names and defaults are nki-library's.

    M, K, N are sizes, tile_* tile sizes. TILES_IN_BLOCK_* are tiles per block, TILES_IN_LOAD_* tiles per load, which
    divide those; None is the whole block. Loop orders are permutations of ``"mnk"``. float8_dtype is e4m3 and
    quant_scheme wrapX, as everywhere in the MLP. enable_scale_packing is the layout of spilled and supplied scales;
    run_with_lnc2 and lnc_2_shard_rhs say how two cores share the product, lhs_is_swizzled and rhs_is_swizzled the modes
    of the operands, and the other switches how operands and sums move. output_dtype is the result's.
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
            name, block = f"TILES_IN_LOAD_{axis}", f"TILES_IN_BLOCK_{axis}"
            load = getattr(self, name)
            if load is not None:
                check_positive_int(name, load)
                if getattr(self, block) % load:
                    expected = f"a divisor of {block} = {getattr(self, block)}"
                    raise ConfigError.about(name, expected, str(load), "A block is loaded in whole groups of tiles.")
        flags = {each.name for each in fields(self) if isinstance(each.default, bool)}
        flags |= set() if self.lnc_2_shard_rhs is None else {"lnc_2_shard_rhs"}
        check_flags({name: getattr(self, name) for name in sorted(flags)})
        orders = ["mnk", "mkn", "nmk", "nkm", "kmn", "knm"]
        allowed = {"block_loop_order": orders, "tile_loop_order": orders}
        allowed |= {"float8_dtype": ["float8_e4m3fn"], "quant_scheme": [SwizzleScheme.WRAPX.value]}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise unknown_name(getattr(self, name), values, argument=name)
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
    """One optional configuration per matmul of the backward; None chooses automatically (nki-library 2.31)."""

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
        """Return the configurations of phases 1 to 4, each checked against the problem (per core under LNC2)."""
        return self.backward_phases(seq_len, hidden_size, intermediate_size, run_with_lnc2, "")

    def backward_phases(
        self, S: int, H: int, inner: int, lnc2: bool, prefix: str
    ) -> tuple[MatmulMxfp8KernelConfig, ...]:
        """Do the same for a function whose argument this is; `prefix` stands before the fields' names in errors."""
        check_flags({"run_with_lnc2": lnc2})
        cores = 2 if lnc2 else 1
        sizes = {
            "phase1_down_proj": (S // cores, H, inner),
            "phase2_hidden_grad": (S // cores, 2 * inner, H),
            "phase3_wgrad": (2 * inner // cores, S, H),
            "phase4_wgrad": (H // cores, S, inner),
        }
        return tuple(self._resolve(name, size, lnc2, prefix) for name, size in sizes.items())

    @public(_WHERE)
    def resolve_recompute_phases(
        self, seq_len: int, hidden_size: int, intermediate_size: int, run_with_lnc2: bool = True
    ) -> tuple[MatmulMxfp8KernelConfig, MatmulMxfp8KernelConfig]:
        """Return the configurations of the gate and the up projection, which share the tiles of the hidden states."""
        return self.recompute_phases(seq_len, hidden_size, intermediate_size, run_with_lnc2, "")

    def recompute_phases(
        self, S: int, H: int, inner: int, lnc2: bool, prefix: str
    ) -> tuple[MatmulMxfp8KernelConfig, MatmulMxfp8KernelConfig]:
        """Do the same for a function whose argument this is; `prefix` stands before the fields' names in errors."""
        check_flags({"run_with_lnc2": lnc2})
        size, names = (S // (2 if lnc2 else 1), H, inner), ("recompute_gate", "recompute_up")
        gate, up = (self._resolve(name, size, lnc2, prefix) for name in names)
        check_shared_hidden_tiles(gate, up, arguments=tuple(f"{prefix}{name}" for name in names))
        return gate, up

    def _resolve(self, name: str, size: Sizes, lnc2: bool, prefix: str) -> MatmulMxfp8KernelConfig:
        config: MatmulMxfp8KernelConfig | None = getattr(self, name)
        check_config(config, size, argument=f"{prefix}{name}")
        return automatic_config(*size, run_with_lnc2=lnc2) if config is None else config


def check_config(config: object, size: Sizes | None, *, argument: str) -> None:
    """Raise ConfigError for what is neither None nor a configuration for M, K, N = `size`; None for any size."""
    if config is None:
        return
    if not isinstance(config, MatmulMxfp8KernelConfig):
        fix = "Build it with MatmulMxfp8KernelConfig(M=..., K=..., N=...)."
        raise ConfigError.about(argument, "None or a MatmulMxfp8KernelConfig", type(config).__name__, fix)
    has = (config.M, config.K, config.N)
    if size not in (None, has):
        fix = "Make it for the sizes of one core: rows of the result are halved under LNC2."
        raise ConfigError.about(argument, f"a configuration for M, K, N = {size}", str(has), fix)


def check_shared_hidden_tiles(
    gate: MatmulMxfp8KernelConfig, up: MatmulMxfp8KernelConfig, *, arguments: tuple[str, ...]
) -> None:
    """Raise ConfigError for configurations of both projections that cut the hidden states into different tiles."""
    for name in ("tile_m", "tile_k", "TILES_IN_BLOCK_M", "TILES_IN_BLOCK_K"):
        one, other = getattr(gate, name), getattr(up, name)
        if one != other:
            expected = f"that of {arguments[0]}, {one} (both read the same hidden tiles)"
            raise ConfigError.about(f"{arguments[1]}.{name}", expected, str(other), "Configure both alike.")


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

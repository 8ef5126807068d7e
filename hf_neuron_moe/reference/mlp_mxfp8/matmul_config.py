"""How matmuls are tiled on the device: records of nki-library 2.31 for single ones, tile counts of 2.30.

They change the order of the device's fp32 sums at most, never a quantized value. Here they are checked, and set the
order of the sums of ``execute="tiles"``. Letters: M, N rows and columns of the result, K contraction axis.

Sources: nki-library 2.31 ``matmul_mxfp8`` and ``mlp_bwd_mxfp8``; 2.30 ``mlp_fwd_mxfp8`` and ``mlp_bwd_mxfp8`` for the
counts by shape, which :class:`MlpBwdMatmulConfig` replaced in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_neuron_moe.checks import Rule, check_flags, check_multiple, check_record, check_rules
from hf_neuron_moe.errors import ConfigError, not_one_of, public
from hf_neuron_moe.formats.constants import SwizzleScheme
from hf_neuron_moe.reference.launch_record import check_positive_int
from hf_neuron_moe.reference.mlp_mxfp8.on_chip import Footprint, check_fits, product_footprint
from hf_neuron_moe.reference.moe_types import check_switches
from hf_neuron_moe.reference.specification import family

TILE_M = 128  # rows of a tile: the tensor engine's partitions
TILE_K = 512  # contraction elements of one MX matmul instruction
TILE_N = 512  # columns of a tile: one bank of fp32 accumulators
MAX_BLOCK = 2048  # a block of an automatic configuration is at most this wide (nki-library 2.31)

PHASES = ("phase1_down_proj", "phase2_hidden_grad", "phase3_wgrad", "phase4_wgrad")
PROJECTIONS = ("recompute_gate", "recompute_up")  # fields of :class:`MlpBwdMatmulConfig`

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class MatmulMxfp8KernelConfig:
    """How one matmul ``[M, K] x [N, K]^T`` is tiled; names and defaults are nki-library's."""

    M: int
    K: int
    N: int
    tile_m: int = TILE_M
    tile_k: int = TILE_K
    tile_n: int = TILE_N
    TILES_IN_BLOCK_M: int = 1
    TILES_IN_BLOCK_N: int = 1
    TILES_IN_BLOCK_K: int = 1
    TILES_IN_LOAD_M: int | None = None  # a divisor of those in a block; None is the whole block
    TILES_IN_LOAD_N: int | None = None
    TILES_IN_LOAD_K: int | None = None
    block_loop_order: str = "mnk"  # a permutation, as the next
    tile_loop_order: str = "mnk"
    float8_dtype: str = "float8_e4m3fn"  # as everywhere in the MLP, and so is quant_scheme
    enable_scale_packing: bool = False  # layout of spilled and supplied scales
    run_with_lnc2: bool = True  # with the next: how two cores share the product
    lnc_2_shard_rhs: bool | None = None
    spill_reload: bool = False  # this switch and those without a comment: how operands and sums move
    enable_psum_copy_in: bool = True
    lhs_is_swizzled: bool = True  # with the next: the modes of the operands
    rhs_is_swizzled: bool = True
    load_with_PE_swizzle: bool = False
    quant_scheme: str = "wrapX"
    output_dtype: torch.dtype | None = None  # the result's

    @public("MatmulMxfp8KernelConfig")
    def __post_init__(self) -> None:
        for name in ("M", "K", "N", "tile_m", "tile_k", "tile_n", *(f"TILES_IN_BLOCK_{axis}" for axis in "MNK")):
            check_positive_int(name, getattr(self, name))
        for axis in "MNK":
            load, block = getattr(self, f"TILES_IN_LOAD_{axis}"), getattr(self, f"TILES_IN_BLOCK_{axis}")
            if load is not None:
                check_positive_int(f"TILES_IN_LOAD_{axis}", load)
                expected = f"a divisor of TILES_IN_BLOCK_{axis} = {block}"
                fix = "A block is loaded in whole groups of tiles."
                check_rules([Rule(block % load == 0, f"TILES_IN_LOAD_{axis}", expected, load, fix)])
        check_switches(self)
        orders = ["mnk", "mkn", "nmk", "nkm", "kmn", "knm"]
        allowed = {"block_loop_order": orders, "tile_loop_order": orders}
        allowed |= {"float8_dtype": ["float8_e4m3fn"], "quant_scheme": [SwizzleScheme.WRAPX.value]}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise not_one_of(name, getattr(self, name), values)
        dtype = self.output_dtype
        known = dtype is None or isinstance(dtype, torch.dtype)
        check_rules([Rule(known, "output_dtype", "None or a torch.dtype", repr(dtype), "For example torch.bfloat16.")])

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

    @public("MlpBwdMatmulConfig")
    def __post_init__(self) -> None:
        for name, config in vars(self).items():
            check_config(config, None, argument=name)

    @public("MlpBwdMatmulConfig")
    def resolve_backward_phases(
        self, seq_len: int, hidden_size: int, intermediate_size: int, run_with_lnc2: bool = True
    ) -> tuple[MatmulMxfp8KernelConfig, ...]:
        """Return the configurations of phases 1 to 4, each checked against the problem (per core under LNC2)."""
        return self.resolve(PHASES, (seq_len, hidden_size, intermediate_size), run_with_lnc2)

    @public("MlpBwdMatmulConfig")
    def resolve_recompute_phases(
        self, seq_len: int, hidden_size: int, intermediate_size: int, run_with_lnc2: bool = True
    ) -> tuple[MatmulMxfp8KernelConfig, ...]:
        """Return the configurations of the gate and the up projection, which share the tiles of the hidden states."""
        return self.resolve(PROJECTIONS, (seq_len, hidden_size, intermediate_size), run_with_lnc2)

    def resolve(
        self, names: tuple[str, ...], problem: Sizes, lnc2: bool, prefix: str = ""
    ) -> tuple[MatmulMxfp8KernelConfig, ...]:
        """Return the configurations of some fields, all phases or both projections, for a `problem` of S, H and I.

        `prefix` stands before the fields' names in errors of a function whose argument this is.
        """
        check_flags({"run_with_lnc2": lnc2})
        by_step = product_sizes(problem, 2 if lnc2 else 1)
        M, half_K, N = by_step["phase2"]
        by_step["phase2"] = (M, 2 * half_K, N)  # gate and up are one axis
        sizes = {name: by_step[name.partition("_")[0]] for name in names}
        for name in names:
            check_config(getattr(self, name), sizes[name], argument=f"{prefix}{name}")
        found = [getattr(self, name) or automatic_config(*sizes[name], run_with_lnc2=lnc2) for name in names]
        if names == PROJECTIONS:
            check_shared_hidden_tiles(found[0], found[1], arguments=tuple(f"{prefix}{name}" for name in names))
        return tuple(found)


def product_sizes(problem: Sizes, cores: int) -> dict[str, Sizes]:
    """Return M, K and N of one core's products for S, H and I of all cores, by the prefix of their tile counts."""
    S, H, inner = problem
    rows = S // cores
    sizes = dict.fromkeys(("gate_up", "phase1", "recompute"), (rows, H, inner))
    sizes |= dict.fromkeys(("down", "phase2"), (rows, inner, H))
    return sizes | {"phase3": (2 * inner // cores, S, H), "phase4": (H // cores, S, inner)}


def check_config(config: object, size: Sizes | None, *, argument: str) -> None:
    """Raise ConfigError for what is neither None nor a configuration that fits, for M, K, N = `size` if given."""
    check_record(config, MatmulMxfp8KernelConfig, argument)
    if isinstance(config, MatmulMxfp8KernelConfig):
        has = (config.M, config.K, config.N)
        fix = "Make it for the sizes of one core: rows of the result are halved under LNC2."
        check_rules([Rule(size in (None, has), argument, f"a configuration for M, K, N = {size}", has, fix)])
        check_fits(config, lambda field: f"{argument}.{field}")


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
    """Return where upstream's automatic choice starts, before it fits blocks to the on-chip memory (not modeled).

    tile_n is the largest of 512, 256, 128 that divides N; blocks have at most 16 x 2 x 8 tiles and 2048 positions.
    """
    tile_n = next((size for size in (512, 256, 128) if N % size == 0), TILE_N)
    counts = (-(-M // TILE_M), -(-K // TILE_K), -(-N // tile_n))
    limits = ((16, TILE_M), (8, TILE_K), (2, tile_n))
    m, k, n = (min(count, most, MAX_BLOCK // tile) for count, (most, tile) in zip(counts, limits, strict=True))
    return MatmulMxfp8KernelConfig(
        M=M, K=K, N=N, tile_n=tile_n, TILES_IN_BLOCK_M=m, TILES_IN_BLOCK_K=k, TILES_IN_BLOCK_N=n,
        run_with_lnc2=run_with_lnc2,
    )  # fmt: skip


class _TileCounts:
    """Rows of tile counts by matmul."""

    def as_arguments(self) -> dict[str, int]:
        """Return the tile arguments of ``mlp_forward_mxfp8_nki`` or the 2.30 backward."""
        counts: dict[str, Sizes] = vars(self)
        return {f"{name}_tiles_{axis}": count for name, three in counts.items() for axis, count in zip("mnk", three)}


@dataclass(frozen=True)
class MlpFwdConfig(_TileCounts):
    """Tiles per block (M, N, K) of the forward's matmuls; the defaults are those of the upstream record."""

    gate_up: Sizes = (8, 2, 8)
    down: Sizes = (8, 4, 8)


@dataclass(frozen=True)
class MlpBwdConfig(_TileCounts):
    """Tiles per block (M, N, K) of the 2.30 backward's matmuls; the defaults are those of the upstream record."""

    phase1: Sizes = (8, 4, 8)
    phase2: Sizes = (8, 4, 8)
    phase3: Sizes = (4, 2, 8)
    phase4: Sizes = (4, 2, 8)
    recompute: Sizes = (8, 1, 8)


def _recorded(name: str) -> dict[Sizes, dict[str, Sizes]]:
    """Return the tile counts of a family that upstream recorded, by S, H and I and by the name of the matmul."""
    rows = [{key: tuple(value) for key, value in row.items()} for row in family(name)["recorded_tiles"]]
    return {row.pop("shape"): row for row in rows}


_FORWARD, _BACKWARD = _recorded("mlp_forward"), _recorded("mlp_backward")


@public
def get_forward_config_for_shape(seq_len: int, hidden_size: int, intermediate_size: int, lnc: int = 2) -> MlpFwdConfig:
    """Return the forward's tile counts for S, H, I and 1 or 2 cores that share S: recorded ones for six shapes.

    Otherwise: M the largest of 16, 8, 4, 2, 1 that divides the row tiles of one core, N all column tiles, K one.
    """
    _check_shape(seq_len, hidden_size, intermediate_size, lnc)
    if recorded := _FORWARD.get((seq_len, hidden_size, intermediate_size)):
        return MlpFwdConfig(**recorded)
    rows = seq_len // lnc
    m = _largest_divisor(rows, min(TILE_M, rows), (16, 8, 4, 2, 1))
    return MlpFwdConfig((m, -(-intermediate_size // TILE_N), 1), (m, -(-hidden_size // TILE_N), 1))


@public
def get_backward_config_for_shape(seq_len: int, hidden_size: int, intermediate_size: int, lnc: int = 2) -> MlpBwdConfig:
    """Return the 2.30 backward's tile counts: recorded ones for four shapes, with K lowered until it divides its tiles.

    Otherwise: M as in the forward, N the largest of 4, 2, 1 that divides the column tiles, K one.
    """
    _check_shape(seq_len, hidden_size, intermediate_size, lnc)
    S, H, inner = problem = seq_len, hidden_size, intermediate_size
    sizes, recorded, chosen = product_sizes(problem, lnc), _BACKWARD.get(problem), {}
    sizes["phase3"] = (inner // lnc, S, H)  # as upstream sizes it, although a core has I of the 2I there
    for name, (m, n, k) in (recorded or vars(MlpBwdConfig())).items():
        rows, contraction, columns = sizes[name]
        if recorded:
            k = _largest_divisor(contraction, TILE_K, range(k, 0, -1))
        else:
            m = _largest_divisor(rows, TILE_M, (16, 8, 4, 2, 1))
            n, k = _largest_divisor(columns, TILE_N, (4, 2, 1)), 1
        chosen[name] = (m, n, k)
    return MlpBwdConfig(**chosen)


def _check_shape(seq_len: int, hidden_size: int, intermediate_size: int, lnc: int) -> None:
    sizes = {"seq_len": seq_len, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    for name, size in sizes.items():
        check_positive_int(name, size)
    _check_lnc(lnc)
    check_positive_int("seq_len // lnc", seq_len // lnc)


def _check_lnc(lnc: int) -> None:
    check_rules([Rule(lnc in (1, 2), "lnc", "1 or 2 (cores per logical core)", repr(lnc), "Pass the launch's LNC.")])


def _largest_divisor(size: int, tile: int, candidates: tuple[int, ...] | range) -> int:
    """Return the first candidate that divides the number of tiles of an axis."""
    return next(candidate for candidate in candidates if -(-size // tile) % candidate == 0)


@public
def footprint(
    seq_len: int,
    hidden_size: int,
    intermediate_size: int,
    tiles: MlpFwdConfig | MlpBwdConfig | MlpBwdMatmulConfig,
    lnc: int = 2,
) -> dict[str, Footprint]:
    """Return what each product of a forward or backward needs of one core on Trn3, at least, by the name of its field.

    * seq_len, hidden_size, intermediate_size: S, H and I of all `lnc` cores, 1 or 2.
    * tiles: counts of the forward or of the 2.30 backward, or configurations of release 2.31 and later. Nothing is
      refused here; the functions refuse what exceeds 128 partitions, 8 PSUM banks or 256 KiB of SBUF per partition.
    """
    known, fix = isinstance(tiles, MlpFwdConfig | MlpBwdConfig | MlpBwdMatmulConfig), "Pass the record itself."
    expected = "an MlpFwdConfig, MlpBwdConfig or MlpBwdMatmulConfig"
    check_rules([Rule(known, "tiles", expected, type(tiles).__name__, fix)])
    _check_lnc(lnc)
    problem = {"seq_len": seq_len, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    for name, size in problem.items():
        check_multiple(size, lnc, name, "the cores share it")
    S, H, inner = problem.values()
    if isinstance(tiles, MlpBwdMatmulConfig):
        groups = [(names, tiles.resolve(names, (S, H, inner), lnc == 2)) for names in (PROJECTIONS, PHASES)]
        configs = {name: config for names, found in groups for name, config in zip(names, found)}
    else:
        sizes, counts = product_sizes((S, H, inner), lnc), vars(tiles)
        configs = {name: counted_config(sizes[name], counts[name], lnc2=lnc == 2) for name in counts}
    return {name: product_footprint(config) for name, config in configs.items()}


def counted_config(
    size: Sizes, counts: Sizes, *, arguments: tuple[str, ...] = (), lnc2: bool
) -> MatmulMxfp8KernelConfig:
    """Return the configuration for tiles per block (M, N, K) and one core's M, K, N; check that those of a call fit.

    `arguments` are the call's names of the counts. Tiles are 128 x 512 x 512, or the whole axis where it is shorter.
    """
    M, K, N = size
    blocks: dict[str, Any] = dict(zip(("TILES_IN_BLOCK_M", "TILES_IN_BLOCK_N", "TILES_IN_BLOCK_K"), counts))
    tiles = min(TILE_M, M), min(TILE_K, K), min(TILE_N, N)
    config = MatmulMxfp8KernelConfig(M, K, N, *tiles, **blocks, run_with_lnc2=lnc2)
    if arguments:
        names = dict(zip(blocks, arguments))
        check_fits(config, lambda field: names.get(field, field))
    return config


def counted_configs(call: Mapping[str, int], problem: Sizes, lnc2: bool) -> MlpBwdMatmulConfig:
    """Return the configurations of the arguments ``phase1_tiles_m`` and so on of release 2.30, checked.

    `problem` is S, H and I. Counts that `call` lacks have their defaults.
    """
    found, sizes = [], product_sizes(problem, 2 if lnc2 else 1)
    for name in ("recompute", "recompute", "phase1", "phase2", "phase3", "phase4"):
        defaults = zip("mnk", (4 if name in ("phase3", "phase4") else 8, 1, 8))
        counts = {f"{name}_tiles_{axis}": default for axis, default in defaults}
        m, n, k = (call.get(argument, default) for argument, default in counts.items())
        found.append(counted_config(sizes[name], (m, n, k), arguments=tuple(counts), lnc2=lnc2))
    return MlpBwdMatmulConfig(*found)

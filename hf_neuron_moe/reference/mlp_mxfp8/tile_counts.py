"""Tile counts by phase, as release 2.30 has them: the configurations and on-chip figures of their products."""

from __future__ import annotations

from collections.abc import Mapping

from hf_neuron_moe.checks import Rule, check_multiple, check_rules
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    PHASES,
    PROJECTIONS,
    TILE_K,
    TILE_M,
    TILE_N,
    MatmulMxfp8KernelConfig,
    MlpBwdConfig,
    MlpBwdMatmulConfig,
    MlpFwdConfig,
    Sizes,
    product_sizes,
)
from hf_neuron_moe.reference.mlp_mxfp8.on_chip import Footprint, check_fits, product_footprint


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
    check_rules([Rule(lnc in (1, 2), "lnc", "1 or 2 (cores per logical core)", repr(lnc), "Pass the launch's LNC.")])
    problem = {"seq_len": seq_len, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    for name, size in problem.items():
        check_multiple(size, lnc, name, "the cores share it")
    S, H, inner = problem.values()
    if isinstance(tiles, MlpBwdMatmulConfig):
        names = (*PROJECTIONS, *PHASES)
        found = [*(tiles.resolve(each, (S, H, inner), lnc == 2) for each in (PROJECTIONS, PHASES))]
        configs = dict(zip(names, (config for part in found for config in part)))
    else:
        sizes, counts = product_sizes((S, H, inner), lnc), vars(tiles)
        configs = {name: _config(sizes[name], counts[name], lnc == 2) for name in counts}
    return {name: product_footprint(config) for name, config in configs.items()}


def counted_config(size: Sizes, counts: Sizes, *, arguments: tuple[str, ...], lnc2: bool) -> MatmulMxfp8KernelConfig:
    """Return the configuration for tiles per block (M, N, K) in `arguments` and one core's M, K, N; check that it fits.

    Tiles are 128 x 512 x 512, or the whole axis where it is shorter.
    """
    config = _config(size, counts, lnc2)
    names = dict(zip(("TILES_IN_BLOCK_M", "TILES_IN_BLOCK_N", "TILES_IN_BLOCK_K"), arguments))
    check_fits(config, lambda field: names.get(field, field))
    return config


def counted_configs(call: Mapping[str, int], problem: Sizes, lnc2: bool) -> MlpBwdMatmulConfig:
    """Return the configurations of the arguments ``phase1_tiles_m`` and so on of release 2.30, checked.

    `problem` is S, H and I. Counts that `call` lacks have their defaults.
    """
    found, sizes = [], product_sizes(problem, 2 if lnc2 else 1)
    for name in ("recompute", "recompute", "phase1", "phase2", "phase3", "phase4"):
        default = {"m": 4 if name in ("phase3", "phase4") else 8, "n": 1, "k": 8}
        m, n, k = (call.get(f"{name}_tiles_{axis}", count) for axis, count in default.items())
        arguments = tuple(f"{name}_tiles_{axis}" for axis in default)
        found.append(counted_config(sizes[name], (m, n, k), arguments=arguments, lnc2=lnc2))
    return MlpBwdMatmulConfig(*found)


def _config(size: Sizes, counts: Sizes, lnc2: bool) -> MatmulMxfp8KernelConfig:
    (M, K, N), (m, n, k) = size, counts
    return MatmulMxfp8KernelConfig(
        M=M, K=K, N=N, tile_m=min(TILE_M, M), tile_k=min(TILE_K, K), tile_n=min(TILE_N, N),
        TILES_IN_BLOCK_M=m, TILES_IN_BLOCK_N=n, TILES_IN_BLOCK_K=k, run_with_lnc2=lnc2,
    )  # fmt: skip

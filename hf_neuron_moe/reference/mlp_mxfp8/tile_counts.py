"""The tile arguments of release 2.30 as the configurations of single products."""

from __future__ import annotations

from collections.abc import Mapping

from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import (
    TILE_K,
    TILE_M,
    TILE_N,
    MatmulMxfp8KernelConfig,
    MlpBwdMatmulConfig,
    Sizes,
)


def counted_config(size: Sizes, counts: Sizes, *, arguments: tuple[str, ...], lnc2: bool) -> MatmulMxfp8KernelConfig:
    """Return the configuration for tiles per block (M, N, K) of release 2.30 and one core's product M, K, N = `size`.

    Tiles are 128 x 512 x 512, or the whole axis where it is shorter. `arguments` are the names of the counts.
    """
    (M, K, N), (m, n, k) = size, counts
    return MatmulMxfp8KernelConfig(
        M=M, K=K, N=N, tile_m=min(TILE_M, M), tile_k=min(TILE_K, K), tile_n=min(TILE_N, N),
        TILES_IN_BLOCK_M=m, TILES_IN_BLOCK_N=n, TILES_IN_BLOCK_K=k, run_with_lnc2=lnc2,
    )  # fmt: skip


def counted_configs(call: Mapping[str, int], problem: Sizes, lnc2: bool) -> MlpBwdMatmulConfig:
    """Return the configurations of the arguments ``phase1_tiles_m`` and so on of release 2.30, checked.

    `problem` is S, H and I. Counts that `call` lacks have their defaults.
    """
    (S, H, inner), cores = problem, 2 if lnc2 else 1
    sizes = {
        "phase1": (S // cores, H, inner),
        "phase2": (S // cores, inner, H),
        "phase3": (2 * inner // cores, S, H),
        "phase4": (H // cores, S, inner),
        "recompute": (S // cores, H, inner),
    }
    found = []
    for name, size in sizes.items():
        default = {"m": 4 if name in ("phase3", "phase4") else 8, "n": 1, "k": 8}
        m, n, k = (call.get(f"{name}_tiles_{axis}", count) for axis, count in default.items())
        arguments = tuple(f"{name}_tiles_{axis}" for axis in default)
        found.append(counted_config(size, (m, n, k), arguments=arguments, lnc2=lnc2))
    *phases, recompute = found
    return MlpBwdMatmulConfig(recompute, recompute, *phases)

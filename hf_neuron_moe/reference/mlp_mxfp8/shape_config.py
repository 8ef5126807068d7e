"""Which tile counts upstream picks for a shape: ``get_config_for_shape`` of the forward and of the 2.30 backward.

Tile counts M, N, K are tiles of 128 x 512 x 512 per block. They tune the device and never change a quantized value.
Sources: nki-library 2.30 ``mlp_fwd_mxfp8`` and ``mlp_bwd_mxfp8``; releases from 2.31 on have no table for the backward
(:class:`~hf_neuron_moe.reference.mlp_mxfp8.matmul_config.MlpBwdMatmulConfig` replaced it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.reference.launch_record import check_positive_int
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import TILE_K, TILE_M, TILE_N

Counts = tuple[int, int, int]


class _TileCounts:
    """Rows of tile counts by matmul."""

    def as_arguments(self) -> dict[str, int]:
        """Return the tile arguments of the kernel function, ``mlp_forward_mxfp8_nki`` or the 2.30 backward."""
        counts: dict[str, Counts] = vars(self)
        return {f"{name}_tiles_{axis}": count for name, three in counts.items() for axis, count in zip("mnk", three)}


@dataclass(frozen=True)
class MlpFwdConfig(_TileCounts):
    """Tiles per block (M, N, K) of the forward's matmuls; the defaults are those of the upstream record."""

    gate_up: Counts = (8, 2, 8)
    down: Counts = (8, 4, 8)


@dataclass(frozen=True)
class MlpBwdConfig(_TileCounts):
    """Tiles per block (M, N, K) of the 2.30 backward's matmuls; the defaults are those of the upstream record."""

    phase1: Counts = (8, 4, 8)
    phase2: Counts = (8, 4, 8)
    phase3: Counts = (4, 2, 8)
    phase4: Counts = (4, 2, 8)
    recompute: Counts = (8, 1, 8)


_FORWARD = {
    (4096, 4096, 12288): MlpFwdConfig((8, 2, 8), (8, 4, 8)),
    (4096, 4096, 6144): MlpFwdConfig((8, 2, 8), (8, 4, 4)),
    (4096, 4096, 3072): MlpFwdConfig((8, 2, 8), (8, 8, 2)),
    (4096, 4096, 1536): MlpFwdConfig((8, 1, 8), (8, 8, 1)),
    (4096, 5120, 6400): MlpFwdConfig((8, 1, 8), (8, 8, 1)),
    (4096, 5120, 3200): MlpFwdConfig((8, 1, 8), (8, 8, 1)),
}
_WIDE = MlpBwdConfig((8, 4, 8), (8, 4, 8), (8, 2, 8), (8, 4, 8), (8, 4, 8))
_BACKWARD = {
    (4096, 4096, 12288): _WIDE,
    (4096, 4096, 6144): _WIDE,
    (4096, 4096, 3072): MlpBwdConfig((8, 3, 8), (8, 4, 3), (4, 2, 8), (8, 3, 8), (8, 3, 8)),
    (4096, 4096, 1536): MlpBwdConfig((8, 3, 8), (8, 8, 2), (2, 4, 8), (8, 3, 8), (8, 3, 8)),
}


def get_forward_config_for_shape(seq_len: int, hidden_size: int, intermediate_size: int, lnc: int = 2) -> MlpFwdConfig:
    """Return the forward's tile counts: the recorded ones of six shapes, otherwise the automatic rule.

    Automatic: M the largest of 16, 8, 4, 2, 1 that divides the row tiles of one core, N all column tiles, K one.

    seq_len, hidden_size and intermediate_size are S, H and I; lnc is the cores that share S, 1 or 2.
    """
    _check_shape(seq_len, hidden_size, intermediate_size, lnc)
    recorded = _FORWARD.get((seq_len, hidden_size, intermediate_size))
    if recorded is not None:
        return recorded
    rows = seq_len // lnc
    m = _largest_divisor(_tiles(rows, min(TILE_M, rows)), (16, 8, 4, 2, 1))
    return MlpFwdConfig((m, _tiles(intermediate_size, TILE_N), 1), (m, _tiles(hidden_size, TILE_N), 1))


def get_backward_config_for_shape(seq_len: int, hidden_size: int, intermediate_size: int, lnc: int = 2) -> MlpBwdConfig:
    """Return the 2.30 backward's tile counts: the recorded ones of four shapes, otherwise the automatic rule.

    Recorded K counts are lowered until they divide the K tiles. Automatic: M as in the forward, N the largest of 4, 2,
    1 that divides the column tiles, K one. Arguments as :func:`get_forward_config_for_shape`.
    """
    _check_shape(seq_len, hidden_size, intermediate_size, lnc)
    S, H, inner = seq_len, hidden_size, intermediate_size
    contraction = {"phase1": H, "phase2": inner, "phase3": S, "phase4": S, "recompute": H}
    recorded = _BACKWARD.get((S, H, inner))
    if recorded is not None:
        lowered = {}
        for name, size in contraction.items():
            m, n, k = getattr(recorded, name)
            lowered[name] = (m, n, _largest_divisor(_tiles(size, TILE_K), range(k, 0, -1)))
        return replace(recorded, **lowered)

    def automatic(rows: int, columns: int) -> Counts:
        m = _largest_divisor(_tiles(rows, TILE_M), (16, 8, 4, 2, 1))
        return m, _largest_divisor(_tiles(columns, TILE_N), (4, 2, 1)), 1

    # Upstream sizes phase 3 by I/lnc rows, although a core has I of the 2I there.
    return MlpBwdConfig(
        phase1=automatic(S // lnc, inner),
        phase2=automatic(S // lnc, H),
        phase3=automatic(inner // lnc, H),
        phase4=automatic(H // lnc, inner),
        recompute=automatic(S // lnc, inner),
    )


@public("get_config_for_shape")
def _check_shape(seq_len: int, hidden_size: int, intermediate_size: int, lnc: int) -> None:
    sizes = {"seq_len": seq_len, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    for name, size in sizes.items():
        check_positive_int(name, size)
    if lnc not in (1, 2):
        raise ConfigError.about("lnc", "1 or 2 (cores per logical core)", repr(lnc), "Pass the launch's LNC.")
    check_positive_int("seq_len // lnc", seq_len // lnc)


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _largest_divisor(count: int, candidates: tuple[int, ...] | range) -> int:
    return next(candidate for candidate in candidates if count % candidate == 0)

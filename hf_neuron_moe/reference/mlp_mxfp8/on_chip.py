"""What a block of one product needs of a core's memories on Trn3, at least: what exceeds this bound cannot run.

Counted, per partition:

* SBUF, operands: the x4 words of one block of the left and of one right operand, 4 bytes per position of F and K tile.
* SBUF, scales: 1 byte per position of F and 4 K tiles, as packed scales lie.
* SBUF, accumulators: fp32, one tile of the result where K has more than one block; otherwise the sums stay in PSUM.
* PSUM: the banks of one tile of the result.

Not counted: values before they are quantized, buffers for the next block and for results, the other accumulators of a
block, and the second right operand of gate and up. The kernels may need these too, but not all of them at once: a
recorded shape (S, H, I = 4096, 5120, 25600) has blocks whose accumulators alone exceed the SBUF. Where a configuration
has TILES_IN_LOAD_*, these count for the block.

Sources: Neuron documentation of NeuronCore-v4; nki-library 2.30 ``matmul_mxfp8``; NKI ``nc_matmul_mx``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_neuron_moe.checks import Rule, check_rules
from hf_neuron_moe.formats.constants import LANES, MX_BLOCK
from hf_neuron_moe.reference.tiled_product import BANK, PARTITIONS

if TYPE_CHECKING:
    from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import MatmulMxfp8KernelConfig

PSUM_BANKS = 8
SBUF_BYTES = (32 << 20) // PARTITIONS  # per partition: 256 KiB
_PACKED_TILES = 4  # K tiles whose packed scales share one row


@dataclass(frozen=True)
class Footprint:
    """The least that one product needs on chip; see the top of this file for what is counted."""

    partitions: int  # of the larger of an operand's tile (K'/4 swizzled rows) and a tile of the result
    psum_banks: int
    left_bytes: int  # words and scales of one block, per partition, as the next
    right_bytes: int
    accumulator_bytes: int

    @property
    def sbuf_bytes(self) -> int:
        """Bytes of SBUF per partition."""
        return self.left_bytes + self.right_bytes + self.accumulator_bytes


def product_footprint(config: MatmulMxfp8KernelConfig) -> Footprint:
    """Return the footprint of one core's product; blocks longer than an axis are cut to it."""
    tile_m, tile_n, tile_k = min(config.tile_m, config.M), min(config.tile_n, config.N), min(config.tile_k, config.K)
    k_slots = -(-config.K // tile_k)
    k_tiles = min(config.TILES_IN_LOAD_K or config.TILES_IN_BLOCK_K, k_slots)
    left = min((config.TILES_IN_LOAD_M or config.TILES_IN_BLOCK_M) * tile_m, config.M)
    right = min((config.TILES_IN_LOAD_N or config.TILES_IN_BLOCK_N) * tile_n, config.N)
    per_position = LANES * k_tiles + -(-k_tiles // _PACKED_TILES)
    return Footprint(
        partitions=max(-(-tile_k // LANES), tile_m),
        psum_banks=-(-tile_n // BANK),
        left_bytes=left * per_position,
        right_bytes=right * per_position,
        accumulator_bytes=4 * tile_n if k_slots > config.TILES_IN_BLOCK_K else 0,
    )


def check_fits(config: MatmulMxfp8KernelConfig, names: Callable[[str], str] = str) -> None:
    """Raise ConfigError for a configuration that exceeds a core; `names` gives the argument that a field came from."""
    need = product_footprint(config)
    larger = names("TILES_IN_BLOCK_M" if need.left_bytes > need.right_bytes else "TILES_IN_BLOCK_N")
    tile = names("tile_m" if config.tile_m > PARTITIONS else "tile_k")
    sbuf = f"a block of at most {SBUF_BYTES} bytes of SBUF per partition"
    check_rules([
        Rule(need.partitions <= PARTITIONS, tile, f"a tile of at most {PARTITIONS} partitions",
             need.partitions, f"A tile has up to {PARTITIONS} rows of the result and {LANES * PARTITIONS} of K."),
        Rule(config.tile_k % MX_BLOCK == 0, names("tile_k"), f"a multiple of {MX_BLOCK}",
             config.tile_k, "An MX group has 8 partitions of 4 lanes."),
        Rule(need.psum_banks <= PSUM_BANKS, names("tile_n"), f"a tile of at most {PSUM_BANKS} PSUM banks",
             need.psum_banks, f"A bank holds {BANK} fp32 values per partition."),
        Rule(need.sbuf_bytes <= SBUF_BYTES, larger, sbuf, f"at least {need.sbuf_bytes}", "Use fewer tiles per block."),
    ])  # fmt: skip

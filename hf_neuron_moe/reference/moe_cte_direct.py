"""The kernels behind ``moe_cte`` under their own names, with their own argument orders and defaults.

They compute and check what :func:`hf_neuron_moe.reference.moe_cte.moe_cte` does for the same implementation. Positions
matter here: the order of the up clamp limits is swapped in the I-sharded kernels, and `block_size` moves behind the
scales in the MX ones. The signatures are made from ``moe_cte_table``; the ``.pyi`` file next to this one, which editors
and mypy read, is written by ``python scripts/make_kernel_stubs.py``.
"""

from hf_neuron_moe.reference.moe_cte_table import KERNELS, direct

bwmm_shard_on_block = direct("bwmm_shard_on_block", __name__)
blockwise_mm_baseline_shard_intermediate = direct("blockwise_mm_baseline_shard_intermediate", __name__)
blockwise_mm_baseline_shard_intermediate_hybrid = direct("blockwise_mm_baseline_shard_intermediate_hybrid", __name__)
blockwise_mm_shard_intermediate_dropping = direct("blockwise_mm_shard_intermediate_dropping", __name__)
blockwise_mm_baseline_shard_hidden = direct("blockwise_mm_baseline_shard_hidden", __name__)
bwmm_shard_on_block_mx = direct("bwmm_shard_on_block_mx", __name__)
blockwise_mm_shard_intermediate_mx = direct("blockwise_mm_shard_intermediate_mx", __name__)
blockwise_mm_shard_intermediate_mx_hybrid = direct("blockwise_mm_shard_intermediate_mx_hybrid", __name__)
__all__ = [*KERNELS]

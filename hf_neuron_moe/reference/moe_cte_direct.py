"""The kernels behind ``moe_cte`` under their own names, with their own argument orders and defaults.

They compute and check what :func:`hf_neuron_moe.reference.moe_cte.moe_cte` does for the same implementation. Positions
matter here: the order of the up clamp limits is swapped in the I-sharded kernels, and `block_size` moves behind the
scales in the MX ones. The signatures are made from ``moe_cte_table``; the ``.pyi`` file next to this one, which editors
and mypy read, is written by ``python scripts/make_kernel_stubs.py``.
"""

from hf_neuron_moe.reference.moe_cte_table import KERNELS, direct

globals().update({name: direct(name, __name__) for name in KERNELS})
__all__ = [*KERNELS]

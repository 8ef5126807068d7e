"""The MXFP8 MLP kernels of nki-library (``experimental.mlp_mxfp8``) as functions.

``mlp_forward_mxfp8`` and ``mlp_backward_mxfp8`` return everything; the ``*_nki`` functions have the documented argument
order and defaults; the ``compute_*`` and ``recompute_*`` functions are the steps both are composed of. All of them are
names of :mod:`hf_neuron_moe.kernels`; docs/kernels.md describes every argument. :mod:`.tile_walk` shows how the kernels
walk a product.

Sources: nki-library 2.30 ``mlp_fwd_mxfp8.py``; 2.30 and 2.31 ``mlp_bwd_mxfp8.py``.
"""

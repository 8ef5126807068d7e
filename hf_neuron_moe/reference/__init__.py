"""The operators of the five documented systems, executable on any device: what the backends are compared with.

Public names are those of :mod:`hf_neuron_moe.kernels`. Nothing below or beside this package imports it.
"""

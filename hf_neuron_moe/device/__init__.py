"""For someone with a Neuron machine: what is installed, which kernels fit a model, whether they compute the same.

``installed`` imports no torch, so that it answers where nothing else works. ``device_verification`` compares the
kernels with PyTorch block by block, ``roofline`` says what a step costs at least, by the published figures.
"""

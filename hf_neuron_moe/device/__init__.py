"""For someone with a Neuron machine: what is installed, which kernels fit a model, whether they compute the same.

``installed`` and ``doctor`` import no torch, so that they answer where nothing else works. ``verify`` compares the
kernels with PyTorch block by block, ``roofline`` says what a step costs at least, by the published figures.
"""

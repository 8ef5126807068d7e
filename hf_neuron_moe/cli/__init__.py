"""The command line: ``hf-neuron-moe plan | convert | export``."""

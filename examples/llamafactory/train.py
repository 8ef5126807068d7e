"""LLaMA-Factory with the numerics of the Neuron kernels: ``python train.py my_sft.yaml``.

Written against LLaMA-Factory 0.9.5, which requires transformers 5.6.0 or older. This package requires 5.17 or later, so
the two have not run together.
"""

from __future__ import annotations

from llamafactory.train.tuner import run_exp

from hf_neuron_moe import NeuronMoECallback, NeuronMoEConfig

if __name__ == "__main__":
    run_exp(callbacks=[NeuronMoECallback(NeuronMoEConfig(precision="mxfp8", weights="stock"))])

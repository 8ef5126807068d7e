"""The activations of the blockwise MoE kernels by their documented type: values and derivatives."""

from __future__ import annotations

from hf_neuron_moe.backends.torch.activation_rows import ACTIVATIONS
from hf_neuron_moe.reference.moe_types import ActFnType

BY_TYPE = {
    ActFnType.SiLU: ACTIVATIONS["silu"],
    ActFnType.GELU: ACTIVATIONS["gelu"],
    ActFnType.GELU_Tanh_Approx: ACTIVATIONS["gelu_tanh"],
    ActFnType.Swish: ACTIVATIONS["swish"],
    ActFnType.SquaredReLU: ACTIVATIONS["squared_relu"],
}

"""Recognizes that nothing has happened to the linear layers of a dense MLP since they were found plain."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.structure import CALL_HOOKS


class Watch:
    """Answers in a microsecond or two per call.

    Generation asks for every token and block whether a layer was wrapped, replaced or hooked since. The dictionaries
    that would show it are looked up once; a layer keeps its hook dictionaries for life.
    """

    def __init__(self, parent: nn.Module, roles: DenseRoles, activation: object, backend: str) -> None:
        self.layers = []
        watched = [activation] if isinstance(activation, nn.Module) else []
        for name in roles.linears:
            root, *inner = name.split(".")
            layer = parent.get_submodule(name)
            self.layers.append((root, inner, layer, layer.__dict__, layer._parameters, name in roles.biased))
            watched += [parent.get_submodule(root), layer] if inner else [layer]
        self.activation_name, self.activation = roles.activation, activation
        self.hooks = [getattr(module, kind) for module in watched for kind in CALL_HOOKS]
        self.decode = get_backend(backend).mlp_decode
        # A fused layer is cut in two elsewhere, and the short way adds no biases.
        self.decodes = len(self.layers) == 3 and not roles.biased and roles.gate.reads_up_as_it_is

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: a copied block has layers of its own to look at."""
        return type(None), ()

    def unchanged(self, block: nn.Module) -> list[nn.Parameter] | None:
        """Return the layers' weights, or None where anything is not as it was found.

        A parameter made from a tensor subclass has that subclass's type, so the parameter's type settles its data's.
        """
        weights, children = [], block._modules
        for root, inner, layer, state, parameters, biased in self.layers:
            weight = parameters.get("weight")
            found: Any = children[root]
            for name in inner:
                found = None if found is None or "forward" in found.__dict__ else found._modules.get(name)
            if found is not layer or type(layer) is not nn.Linear or "forward" in state:
                return None
            bias = parameters.get("bias")
            if type(weight) is not nn.Parameter or (type(bias) is not nn.Parameter if biased else bias is not None):
                return None
            weights.append(weight)
        if self.activation_name in children:
            activation = children[self.activation_name]
            if activation is not self.activation or "forward" in activation.__dict__:
                return None
        elif self.activation_name is not None and block.__dict__.get(self.activation_name) is not self.activation:
            return None
        return None if any(self.hooks) else weights

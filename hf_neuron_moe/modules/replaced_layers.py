"""Stand-ins for the linear layers of a dense block whose weights live in the kernel layout.

peft goes by the modules that it finds. Without the layers, ``target_modules="all-linear"`` would pass the MLPs by
without a word; with stand-ins under their names, it meets them and is stopped.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_neuron_moe.errors import UnsupportedModelError, refuse

NAME = "replaced_layers"
"""Attribute of a block in kernel layout."""


class ReplacedLayers(nn.Module):
    """Holds a stand-in for each replaced linear layer, and lets nothing be put in its place.

    Args:
        block: name of the block in the model.
        shapes: ``(out_features, in_features)`` by layer name.
    """

    def __init__(self, block: str, shapes: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.neuron_name = block
        for name, (out_features, in_features) in shapes.items():
            self.add_module(name, _ReplacedLinear(out_features, in_features))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            UnsupportedModelError: `value` would take a replaced layer's place.
        """
        if isinstance(value, nn.Module) and name in self.__dict__.get("_modules", ()):
            inside = self.neuron_name.rpartition(".")[2] or self.neuron_name
            raise refuse(
                UnsupportedModelError,
                where=self.neuron_name,
                argument=name,
                expected="without adapters of its own while the block's weights are in kernel layout",
                got=f"a {type(value).__module__}.{type(value).__qualname__}",
                remedy="Load the model again (layers in front of this one may have adapters by now) and patch it with "
                f"weights='stock'. Or target the parameters: target_parameters=['{inside}.gate_up_proj', "
                f"'{inside}.down_proj'], and merge before saving.",
            )
        super().__setattr__(name, value)


class _ReplacedLinear(nn.Linear):
    """Says where a linear layer was; it has no parameters and is not called."""

    def __init__(self, out_features: int, in_features: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self._is_hf_initialized = True  # for transformers' init_weights, which would look for a weight

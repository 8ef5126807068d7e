"""Stand-ins for the linear layers of a dense block whose weights live in the kernel layout.

peft goes by the modules that it finds, and compares a target with a module's whole name or with its end. Without the
layers, ``target_modules="all-linear"`` would pass the MLPs by without a word. The stand-ins lie below the block's own
name (``model.layers.0.mlp.replaced_layers.model.layers.0.mlp.up_proj``), so that full names meet them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_neuron_moe.errors import NeuronMoEError, UnsupportedModelError, with_article

NAME = "replaced_layers"
"""Attribute of a block in kernel layout."""
_AROUND_A_BLOCK = "peft.utils.other.ModulesToSaveWrapper"


class ReplacedLayers(nn.Module):
    """Holds a stand-in for each replaced linear layer, and lets nothing be put in its place.

    `block` is the block's name in the model; `shapes` are ``(out_features, in_features)`` by layer name.
    """

    def __init__(self, block: str, shapes: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.neuron_name = block
        level = self
        for part in block.split(".") if shapes else ():
            inside = ReplacedLayers(block, {})
            level._modules[part] = inside
            level = inside
        for name, (out_features, in_features) in shapes.items():
            level.add_module(name, _ReplacedLinear(block, name, out_features, in_features))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        What peft puts around a whole block for ``modules_to_save`` goes around its namesakes in here, too, and is
        dropped: they hold nothing to save.
        """
        if isinstance(value, nn.Module) and name in self.__dict__.get("_modules", ()):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            if isinstance(self._modules[name], ReplacedLayers) and kind == _AROUND_A_BLOCK:
                return
            raise adapters_refused(self.neuron_name, name, with_article(kind))
        super().__setattr__(name, value)


class _ReplacedLinear(nn.Linear):
    """Says where a linear layer was; its weight has no values and is in no parameter list: LoHa asks for the shape."""

    weight: torch.Tensor

    def __init__(self, block: str, name: str, out_features: int, in_features: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.empty(out_features, in_features, device="meta").as_subclass(_NoValues)
        self.weight.place = block, name
        self.register_parameter("bias", None)
        self._is_hf_initialized = True  # for transformers' init_weights, which would look for a weight


_FACTS = {
    *("__get__", "__reduce_ex__", "__repr__", "__hash__", "__len__", "size", "dim", "stride", "numel"),
    *("element_size", "is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "detach"),
}
"""Functions of a tensor that read no value."""


class _NoValues(torch.Tensor):
    """A replaced layer's weight: what reads its values gets the error that adapters get."""

    place: tuple[str, str]

    def __deepcopy__(self, memo: Any) -> _NoValues:
        """Return itself: there is nothing to change."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call what asks for shape, dtype or device, and refuse the rest."""
        own = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, _NoValues))
        block, name = place = own.__dict__.get("place", ("", "weight"))  # not yet there while it is unpickled
        if func.__name__ not in _FACTS:
            raise adapters_refused(block, name, f"a call of {func.__name__} with its weight")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, _NoValues):
            result.place = place
        return result


def adapters_refused(block: str, layers: str, got: str) -> NeuronMoEError:
    """Return the error for adapters on `layers`, whose weights the block has in kernel layout."""
    inside = block.rpartition(".")[2] or block
    expected = "without adapters of its own while the block's weights are in kernel layout"
    fix = (
        "Load the model again (layers in front of this one may have adapters by now) and patch it with "
        f"weights='stock'. Or target the parameters: target_parameters=['{inside}.gate_up_proj', "
        f"'{inside}.down_proj'], and merge before saving."
    )
    return UnsupportedModelError.about(layers, expected, got, fix).named(block)

"""Initialises a block's weights as the module it replaced would be.

transformers' ``_init_weights`` goes by the class of a module and the names of its parameters. So it is shown an object
of the original class that has the block's weights, in stock layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin

_FLAG = "_is_hf_initialized"
"""Set by transformers on parameters that are not to be initialised again."""


def init_as_stock(block: NeuronBlock, init: Callable[[nn.Module], None]) -> None:
    """Initialise a trainable block's weights in place, as the original module's would be from the same random state."""
    if not isinstance(block, KernelLayoutMixin):
        init(_shell(block, block._parameters, {}))
        return
    parameters, copies = dict(block._parameters), dict[str, nn.Parameter]()
    for rule in block.neuron_rules:
        param = parameters.pop(rule.kernel)
        assert param is not None
        for name, view in zip(rule.stock, rule.to_stock(param.detach())):
            copy = nn.Parameter(view.clone(memory_format=torch.contiguous_format), requires_grad=param.requires_grad)
            if getattr(param, _FLAG, False):
                setattr(copy, _FLAG, True)
            copies[name] = copy
    layers: dict[str, nn.Module] = {}
    for name in block.neuron_stock_order:
        copy, (path, _, leaf) = copies[name], name.rpartition(".")
        if not path:
            parameters[leaf] = copy
            continue
        if path not in layers:
            rows, columns = copies[f"{path}.weight"].shape
            layers[path] = nn.Linear(columns, rows, bias=False, device="meta")
        layers[path].register_parameter(leaf, copy)
    for layer in layers.values():
        init(layer)
    init(_shell(block, parameters, layers))
    with torch.no_grad():
        for rule in block.neuron_rules:
            block.get_parameter(rule.kernel).copy_(rule.to_kernel([copies[name] for name in rule.stock]))


def _shell(block: NeuronBlock, parameters: dict[str, nn.Parameter | None], layers: dict[str, nn.Module]) -> nn.Module:
    """An object of the original class with the block's attributes, `parameters`, and `layers` among its children."""
    shell = object.__new__(block.neuron_stock_class)
    shell.__dict__.update(block.__dict__, _parameters=dict(parameters), _modules={**block._modules, **layers})
    if "is_transposed" in shell.__dict__ and block.neuron_rules:
        shell.__dict__["is_transposed"] = not any(rule.transposed for rule in block.neuron_rules)
        shell.__dict__["is_concatenated"] = not any(rule.interleaved for rule in block.neuron_rules)
    return shell

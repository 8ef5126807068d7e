"""Blocks that compute for a module which stays where it is.

transformers' engine and FSDP2 know a module by its object: they put weights and collectives there, and would not find
a replacement. So of a model that was sharded while loading, experts stay, and a block computes what their class's
forward did. The block shares the module's parameters, children and hooks, and is no child of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_neuron_moe.modules.block import OWN_COPY, NeuronBlock
from hf_neuron_moe.modules.engine import installed
from hf_neuron_moe.modules.expert_parallel import implementation_for

BLOCK = "_hf_neuron_moe_block"
"""Attribute of a module: the block that computes for it."""


def block_of(module: nn.Module) -> NeuronBlock | None:
    """Return `module` itself if it is a block, or the one that computes for it."""
    found = module if isinstance(module, NeuronBlock) else module.__dict__.get(BLOCK)
    return found if isinstance(found, NeuronBlock) else None


def named_blocks(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, NeuronBlock]]:
    """Yield every block of `model` with the name of its place."""
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        block = block_of(module)
        if block is not None:
            yield name, block


def computes_for(block: NeuronBlock, module: nn.Module) -> bool:
    """Return whether `block` was installed in `module` and its forward is still there."""
    return module.__dict__.get(BLOCK) is block and module.__dict__.get("forward") is block.neuron_installed


def install(block: NeuronBlock, module: nn.Module) -> None:
    """Let `block` compute for the `module` it was made of, within the collectives that the engine put around it."""
    for kind in OWN_COPY:
        block.__dict__[kind] = module.__dict__[kind]
    former = block.__dict__.pop("forward", None)
    engine = installed(module)
    block.__dict__["neuron_former_forward"] = former
    block.__dict__["neuron_same_tokens"] = None if engine is None else engine.same_tokens
    module.__dict__[BLOCK] = block
    module.__dict__["forward"] = _forward(block, module)
    if engine is not None:
        engine.again(module, implementation_for(engine.experts))
    block.__dict__["neuron_installed"] = module.__dict__["forward"]


def remove(block: NeuronBlock, module: nn.Module) -> None:
    """Undo :func:`install`; a forward that was put on `module` later goes too."""
    if module.__dict__.pop(BLOCK, None) is None:
        return
    former = block.neuron_former_forward
    if former is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = former


def _forward(block: NeuronBlock, module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if block.training != module.training:
            block.train(module.training)
        return block.forward(*args, **kwargs)

    return forward

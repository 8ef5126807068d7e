"""Where a patch is recorded, and what of it is still in place when a model comes back."""

from __future__ import annotations

from collections import Counter

from torch import nn

from hf_neuron_moe.errors import UnsupportedModelError, refuse
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.frozen_block import FrozenBlock
from hf_neuron_moe.patching.apply import PatchState, states


def inner_model(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model inside peft's wrappers, or `model` itself, and its name in `model`.

    The patch is recorded there, since ``merge_and_unload`` and ``unload`` hand back the inner model alone.
    """
    home = model
    while True:
        kinds = {base.__name__ for base in type(home).__mro__ if base.__module__.partition(".")[0] == "peft"}
        if kinds & {"PeftModel", "PeftMixedModel"}:
            inside = home.get_base_model()  # type: ignore[operator]
        elif "BaseTuner" in kinds:
            inside = home.model
        else:
            break
        if inside is home or not isinstance(inside, nn.Module):
            break
        home = inside
    return home, next(name for name, module in model.named_modules() if module is home)


def check_not_patched_elsewhere(model: nn.Module, home: nn.Module) -> None:
    """Refuse an unpatched `model` with parts that were patched separately, or through another object.

    Raises:
        UnsupportedModelError: as said; the message names the parts.
    """
    parts = {id(holder): state for holder, state in states(home)}
    names = [(name, parts[id(module)]) for name, module in home.named_modules() if id(module) in parts]
    if names:
        listed = ", ".join(f"{name!r} ({_blocks(len(state.swaps))})" for name, state in names)
        calls = ", ".join(f"unpatch_model(<{name}>)" for name, _ in names)
        raise refuse(
            UnsupportedModelError,
            where="patch_model",
            argument="model",
            expected="a model that is not patched yet, or that was patched as a whole",
            got=f"a {type(model).__name__} of which a part is patched: {listed}",
            remedy=f"Unpatch that first ({calls}), then patch the outer model; nothing was changed.",
        )
    _refuse_foreign_blocks("patch_model", home)


def check_patched_here(model: object) -> None:
    """Refuse to unpatch `model`, which holds no record of a patch, and say which case it is.

    Raises:
        UnsupportedModelError: always.
    """
    expected = "a model that patch_model has patched"
    if not isinstance(model, nn.Module):
        raise refuse(
            UnsupportedModelError,
            where="unpatch_model",
            argument="model",
            expected=expected,
            got=f"{type(model).__name__}, which is no torch.nn.Module",
            remedy="Pass the model object, not its name or report.",
        )
    if any(isinstance(module, FrozenBlock) for module in model.modules()):
        raise refuse(
            UnsupportedModelError,
            where="unpatch_model",
            argument="model",
            expected=expected,
            got=f"a {type(model).__name__} that was loaded with frozen MX blocks",
            remedy="They replaced nothing; model.dequantize() gives it ordinary weights.",
        )
    _refuse_foreign_blocks("unpatch_model", model)
    raise refuse(
        UnsupportedModelError,
        where="unpatch_model",
        argument="model",
        expected=expected,
        got=f"an unpatched {type(model).__name__}: nothing in it is patched (any more)",
        remedy="Nothing needs to be undone.",
    )


def _refuse_foreign_blocks(where: str, model: nn.Module) -> None:
    blocks = [name for name, module in model.named_modules() if isinstance(module, NeuronBlock)]
    if blocks:
        raise refuse(
            UnsupportedModelError,
            where=where,
            argument="model",
            expected="the object that patch_model was called on",
            got=f"a {type(model).__name__} with {_blocks(len(blocks))} (first: {blocks[0] or 'itself'!r}) patched "
            "through an outer or another object",
            remedy="Call unpatch_model on the object that was passed to patch_model; nothing was changed.",
        )


def displaced(home: nn.Module, state: PatchState) -> list[str]:
    """Return the names of replaced modules whose replacement is no longer wherever it was put."""
    present = Counter(id(child) for module in home.modules() for child in module._modules.values())
    return [swap.name for swap in state.swaps if present[id(swap.replacement)] < swap.places]


def original_name(name: str) -> str:
    """Return `name` without the levels that adapters put between a module and its parent."""
    return name.replace(".base_layer", "")


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"

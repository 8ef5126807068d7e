"""Where a patch is recorded, and what of it is still in place when a model comes back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable

from torch import nn

from hf_neuron_moe.errors import NeuronMoEWarning, UnsupportedModelError, pattern_of, public, spelled_together
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.own_forward import described, is_taken_over, passes_by
from hf_neuron_moe.modules.quantized_blocks import FrozenBlock
from hf_neuron_moe.patching.apply import PatchState, Swap, states


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


@public("patch_model")
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
        raise UnsupportedModelError.about(
            "model",
            "a model that is not patched yet, or that was patched as a whole",
            f"a {type(model).__name__} of which a part is patched: {listed}",
            f"Unpatch that first ({calls}), then patch the outer model; nothing was changed.",
        )
    _refuse_foreign_blocks(home)


@public("unpatch_model")
def check_patched_here(model: object) -> None:
    """Refuse to unpatch `model`, which holds no record of a patch, and say which case it is.

    Raises:
        UnsupportedModelError: always.
    """
    expected = "a model that patch_model has patched"
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError.about(
            "model",
            expected,
            f"{type(model).__name__}, which is no torch.nn.Module",
            "Pass the model object, not its name or report.",
        )
    if any(isinstance(module, FrozenBlock) for module in model.modules()):
        raise UnsupportedModelError.about(
            "model",
            expected,
            f"a {type(model).__name__} that was loaded with frozen MX blocks",
            "They replaced nothing; model.dequantize() gives it ordinary weights.",
        )
    _refuse_foreign_blocks(model)
    raise UnsupportedModelError.about(
        "model",
        expected,
        f"an unpatched {type(model).__name__}: nothing in it is patched (any more)",
        "Nothing needs to be undone.",
    )


def _refuse_foreign_blocks(model: nn.Module) -> None:
    blocks = [name for name, module in model.named_modules() if isinstance(module, NeuronBlock)]
    if blocks:
        raise UnsupportedModelError.about(
            "model",
            "the object that patch_model was called on",
            f"a {type(model).__name__} with {_blocks(len(blocks))} (first: {blocks[0] or 'itself'!r}) patched "
            "through an outer or another object",
            "Call unpatch_model on the object that was passed to patch_model; nothing was changed.",
        )


def displaced(home: nn.Module, state: PatchState) -> list[str]:
    """Return the names of replaced modules whose replacement is no longer wherever it was put."""
    present = Counter(id(child) for module in home.modules() for child in module._modules.values())
    return [swap.name for swap in state.swaps if present[id(swap.replacement)] < swap.places]


def changed(expected: str, got: str, remedy: str = "Call unpatch_model(model) first") -> UnsupportedModelError:
    """Return the error for a patched model that is not as it has to be."""
    return UnsupportedModelError.about("model", expected, got, f"{remedy}; nothing was changed.")


def check_called(home: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse a model whose patched `blocks`, given with their names, do not run any more.

    Raises:
        UnsupportedModelError: a forward was put on a block, or on the MoE block around experts, that goes past it.
    """
    named = list(blocks)
    expected = "as patch_model left it"
    taken = [name for name, block in named if is_taken_over(block)]
    if taken:
        raise changed(expected, f"a model whose patched blocks have another forward: {', '.join(taken)}")
    around = passed_by(home)
    # Experts only: what is around a dense MLP has more to do than to call it.
    passed = {name: id(block) for name, block in named if id(block) in around and is_experts(block)}
    if passed:
        forwards = {described(around[key].__dict__["forward"]) for key in passed.values()}
        raise changed(
            expected,
            f"a model whose patched experts do not run: {', '.join(passed)}; "
            f"the forward put on the module around them ({', '.join(sorted(forwards))}) does not call them",
            "Delete that forward (`del block.forward`), or call unpatch_model(model)",
        )


def is_experts(block: nn.Module) -> bool:
    """Return whether a patched block has experts."""
    return getattr(block, "neuron_top_k", None) is not None


def passed_by(home: nn.Module) -> dict[int, nn.Module]:
    """Return, by the id of each module that a forward on the module around it leaves out, the module around it."""
    found: dict[int, nn.Module] = {}
    for parent in home.modules():
        for child in parent._modules.values() if "forward" in parent.__dict__ else ():
            if child is not None and passes_by(parent, child):
                inside = child
                while isinstance(base := inside._modules.get("base_layer"), nn.Module):  # in an adapter's wrapper
                    inside = base
                found[id(inside)] = parent
    return found


def warn_of_lost_forwards(swaps: Iterable[Swap]) -> None:
    """Warn of what was put on patched blocks as their forward, which goes when they are taken out."""
    lost: dict[tuple[str, str], list[str]] = {}
    for swap in swaps:
        block = swap.replacement
        forward = block.__dict__.get("forward")
        if forward is not None and getattr(forward, "__func__", None) is not type(block).forward:
            lost.setdefault((described(forward), pattern_of(swap.name)), []).append(swap.name)
    for (function, _), names in lost.items():
        warnings.warn(
            f"unpatch_model: the forward {function} that was put on {spelled_together(names)} is dropped with the "
            "patched block. Put it on the original block if you need it there.",
            NeuronMoEWarning,
            stacklevel=4,
        )


def original_name(name: str) -> str:
    """Return `name` without the levels that adapters put between a module and its parent."""
    return name.replace(".base_layer", "")


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"

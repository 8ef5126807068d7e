"""What must hold of a model that is to be patched, or comes back patched; every error leaves it as it is."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.errors import (
    NeuronMoEWarning,
    NothingToPatchError,
    UnsupportedModelError,
    counted,
    pattern_of,
    spelled_together,
    with_article,
)
from hf_neuron_moe.modules.engine import is_sharded_at_loading
from hf_neuron_moe.modules.in_place import named_blocks
from hf_neuron_moe.modules.own_forward import described, is_taken_over, passes_by
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching.apply import Swap, states
from hf_neuron_moe.patching.report import PatchEntry, PatchReport

_WRAPPERS = {
    "DistributedDataParallel": "Patch the inner model before wrapping it.",
    "DataParallel": "Patch the inner model before wrapping it.",
    "FullyShardedDataParallel": "Patch the model before FSDP wraps it.",
    "DeepSpeedEngine": "Patch the model before deepspeed.initialize.",
    "OptimizedModule": "Patch the uncompiled model and compile it again: "
    "patch_model(model._orig_mod), then torch.compile(model._orig_mod).",
}
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NOT_QUANTIZED = (
    "Load it without quantization_config, or call model.dequantize() where its method has that. A GGUF file is "
    "dequantized while loading, but stays marked as quantized: load its state_dict() into a model made by from_config."
)
_PATCH_FIRST = (
    "Patch the model before adapters are put on its MLPs: patch_model(model), then get_peft_model(model, ...). "
    "Adapters on attention may be there already."
)


def unsupported(expected: str, got: str, fix: str) -> UnsupportedModelError:
    """Return the error about a model as a whole."""
    return UnsupportedModelError.about("model", expected, got, fix)


def changed(expected: str, got: str, remedy: str = "Call unpatch_model(model) first") -> UnsupportedModelError:
    """Return the error for a patched model that is not as it has to be."""
    return unsupported(expected, got, f"{remedy}; nothing was changed.")


def check_model(model: Any) -> None:
    """Raise for what is no ``nn.Module``, or is quantized, sharded, offloaded, wrapped or compiled."""
    if not isinstance(model, nn.Module):
        raise unsupported("a torch.nn.Module", type(model).__name__, "Pass the model object, not its name or config.")
    for name, module in model.named_modules():
        for wrapper, remedy in _WRAPPERS.items():
            if any(base.__name__ == wrapper for base in type(module).__mro__):
                raise unsupported("a plain, unwrapped model", f"{wrapper}{_at(name)}", remedy)
    for expected, find, remedy in _RULES:
        if found := next(find(model), None):
            raise unsupported(expected, found, remedy)


def _at(name: str) -> str:
    return f" at {name!r}" if name else ""


def _quantized(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if getattr(module, "is_quantized", False) is True or getattr(module, "hf_quantizer", None) is not None:
            method = getattr(module, "quantization_method", None)
            yield f"a quantized model{_at(name)}" + (f" ({getattr(method, 'value', method)})" if method else "")
        if type(module).__module__.startswith("bitsandbytes."):
            yield f"{with_article(type(module).__name__)} of bitsandbytes{_at(name)}"
    for name, param in model.named_parameters():
        if param.dtype not in _FLOAT_DTYPES:
            yield f"the parameter {name!r} of dtype {param.dtype}"


def _sharded(model: nn.Module) -> Iterator[str]:
    if is_sharded_at_loading(model):
        return
    for name, module in model.named_modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            yield f"a model sharded by fully_shard{_at(name)}"
    for name, param in model.named_parameters():
        if type(param.data).__name__ == "DTensor" or type(param).__name__ == "DTensor":
            yield f"a sharded model: {name!r} is a DTensor"


def _of_deepspeed(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if type(module).__module__.startswith("deepspeed."):
            yield f"{with_article(type(module).__name__)} of DeepSpeed{_at(name)}"
    for name, param in model.named_parameters():
        if hasattr(param, "ds_id"):
            yield f"a model partitioned by ZeRO-3: {name!r} carries a ds_id"


def _offloaded(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        places = {str(place) for place in (getattr(module, "hf_device_map", None) or {}).values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            yield f"a model offloaded by accelerate (hf_device_map: {', '.join(sorted(places))})"


_RULES: tuple[tuple[str, Callable[[nn.Module], Iterator[str]], str], ...] = (
    ("a model without quantization", _quantized, _NOT_QUANTIZED),
    (
        "a model whose weights are whole, or that transformers sharded while loading it",
        _sharded,
        "Load it with from_pretrained(..., distributed_config=DistributedConfig(...)) and patch it then, or patch it "
        "first and shard it afterwards (accelerate's FSDP, fully_shard).",
    ),
    (
        "a model that DeepSpeed has not changed",
        _of_deepspeed,
        "Patch it before deepspeed.initialize, without AutoEP, AutoTP and zero.Init; ZeRO-1 and ZeRO-2 keep parameters "
        "whole. To shard them use FSDP2 or a DistributedConfig.",
    ),
    ("a model whose weights are in memory", _offloaded, "Load it without disk or CPU offload."),
)


_GLOBAL_HOOKS = {
    "_global_forward_pre_hooks": "register_module_forward_pre_hook",
    "_global_forward_hooks": "register_module_forward_hook",
    "_global_backward_pre_hooks": "register_module_full_backward_pre_hook",
    "_global_backward_hooks": "register_module_full_backward_hook",
}


def check_no_global_hooks() -> None:
    """Refuse to patch while hooks run at the calls of all modules: they would not see a block's layers any more."""
    found = [register for kind, register in _GLOBAL_HOOKS.items() if getattr(nn.modules.module, kind)]
    if found:
        raise unsupported(
            "patched while no hook is registered for all modules",
            f"hooks of {' and '.join(found)}",
            "Remove them, patch, and register them again. They then see a patched block, not the layers in it.",
        )


def inner_model(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model inside peft's wrappers, or `model` itself, and its name in `model`.

    The patch is recorded there, since ``merge_and_unload`` and ``unload`` hand back the inner model alone.
    """
    home: nn.Module | None = None
    inside: Any = model
    while isinstance(inside, nn.Module) and inside is not home:
        home, inside = inside, None
        kinds = {base.__name__ for base in type(home).__mro__ if base.__module__.partition(".")[0] == "peft"}
        if kinds & {"PeftModel", "PeftMixedModel"}:
            inside = home.get_base_model()  # type: ignore[operator]
        elif "BaseTuner" in kinds:
            inside = home.model
    assert home is not None
    return home, next(name for name, module in model.named_modules() if module is home)


def check_not_patched_elsewhere(model: nn.Module, home: nn.Module) -> None:
    """Refuse an unpatched `model` with parts that were patched separately, or through another object."""
    parts = {id(holder): state for holder, state in states(home)}
    names = [(name, parts[id(module)]) for name, module in home.named_modules() if id(module) in parts]
    if names:
        listed = ", ".join(f"{name!r} ({counted(len(state.swaps), 'block')})" for name, state in names)
        calls = ", ".join(f"unpatch_model(<{name}>)" for name, _ in names)
        expected = "a model that is not patched yet, or that was patched as a whole"
        fix = f"Unpatch that first ({calls}), then patch the outer model; nothing was changed."
        raise unsupported(expected, f"{with_article(type(model).__name__)} of which a part is patched: {listed}", fix)
    _refuse_foreign_blocks(home)


def not_patched_here(model: object) -> UnsupportedModelError:
    """Return the error for `model`, which holds no record of a patch to undo; it says which case it is."""
    expected, kind = "a model that patch_model has patched", type(model).__name__
    if not isinstance(model, nn.Module):
        fix = "Pass the model object, not its name or report."
        return unsupported(expected, f"{kind}, which is no torch.nn.Module", fix)
    if any(isinstance(module, QuantizedBlock) for module in model.modules()):
        fix = "They replaced nothing; model.dequantize() gives it ordinary weights."
        return unsupported(expected, f"a {kind} that was loaded with frozen MX blocks", fix)
    _refuse_foreign_blocks(model)
    got = f"an unpatched {kind}: nothing in it is patched (any more)"
    return unsupported(expected, got, "Nothing needs to be undone.")


def _refuse_foreign_blocks(model: nn.Module) -> None:
    blocks = [name for name, _ in named_blocks(model)]
    if blocks:
        raise unsupported(
            "the object that patch_model was called on",
            f"{with_article(type(model).__name__)} with {counted(len(blocks), 'block')} "
            f"(first: {blocks[0] or 'itself'!r}) patched "
            "through an outer or another object",
            "Call unpatch_model on the object that was passed to patch_model; nothing was changed.",
        )


def check_called(home: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise for a forward that goes past one of the patched `blocks`: put on it, or on the MoE block around it."""
    named = list(blocks)
    expected = "as patch_model left it"
    taken = [name for name, block in named if is_taken_over(block)]
    if taken:
        raise changed(expected, f"a model whose patched blocks have another forward: {', '.join(taken)}")
    around = passed_by(home)
    # Experts only: what is around a dense MLP has more to do than to call it.
    experts = [(name, block) for name, block in named if getattr(block, "neuron_top_k", None) is not None]
    passed = {name: around[id(block)] for name, block in experts if id(block) in around}
    if passed:
        forwards = {described(parent.__dict__["forward"]) for parent in passed.values()}
        got = (
            f"a model whose patched experts do not run: {', '.join(passed)}; "
            f"the forward put on the module around them ({', '.join(sorted(forwards))}) does not call them"
        )
        raise changed(expected, got, "Delete that forward (`del block.forward`), or call unpatch_model(model)")


def passed_by(home: nn.Module) -> dict[int, nn.Module]:
    """Return, by the id of each module that a forward on the module around it leaves out, the module around it."""
    found: dict[int, nn.Module] = {}
    for parent in home.modules():
        for child in parent._modules.values() if "forward" in parent.__dict__ else ():
            if child is not None and passes_by(parent, child):
                found[id(inside_adapters(child))] = parent
    return found


def inside_adapters(layer: nn.Module) -> nn.Module:
    """Return the layer that adapters (peft's ``base_layer``) were put around, or `layer` itself."""
    while isinstance(inner := layer._modules.get("base_layer"), nn.Module):
        layer = inner
    return layer


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


def check_outcome(model: nn.Module, report: PatchReport, strict: bool) -> None:
    """Raise for a plan that patches nothing, or with `strict` not every gated block that is not excluded."""
    if not report.patched:
        listed = _listed(report.refused)
        expected = "a model with at least one MLP or experts block that can be patched"
        got = f"{with_article(type(model).__name__)} {_counted(report)}{':' + listed if listed else ''}"
        raise NothingToPatchError.about("model", expected, got, ("\n" if listed else "") + _what_to_do(report))
    counted = [entry for entry in report.refused if entry.gated]
    if strict and counted:
        raise unsupported(
            "a model whose gated MLP and experts blocks can all be patched (strict=True)",
            f"{len(counted)} that cannot:{_listed(counted)}",
            f"\n{_PATCH_FIRST} Or name them in exclude=...; strict=False leaves them stock."
            if _has_adapters(report)
            else "\nName them in exclude=..., or pass strict=False to leave them stock.",
        )


def _listed(entries: Iterable[PatchEntry]) -> str:
    """A line per reason: each once for all blocks of a class whose names differ in their numbers only."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for entry in entries:
        groups[pattern_of(entry.name), entry.class_name, entry.reason].append(entry.name or "the model")
    return "".join(
        f"\n  {spelled_together(names)} ({f'{len(names)} x ' if len(names) > 1 else ''}{class_name}): {reason}"
        for (_, class_name, reason), names in groups.items()
    )


def _counted(report: PatchReport) -> str:
    """How many blocks the model has, and that none of them can be patched."""
    count = len(report.entries)
    if not count:
        return "without MLP or experts blocks"
    blocks = f"with {count} MLP or experts block{'s' if count > 1 else ''}"
    if report.skipped:
        return f"{blocks}, {len(report.skipped)} of them skipped and {len(report.refused)} refused"
    return f"{blocks}, {'none of which can' if count > 1 else 'which cannot'} be patched"


def _has_adapters(report: PatchReport) -> bool:
    return any("peft." in entry.reason for entry in report.refused)


def _what_to_do(report: PatchReport) -> str:
    """The remedy where nothing is left to patch."""
    if report.skipped:
        return f"include and exclude leave nothing: make them match blocks such as {report.skipped[0].name!r}."
    if _has_adapters(report):
        return _PATCH_FIRST
    if report.refused:
        return (
            "If a reason names something you added (hooks, adapters, an option, ...), remove it and patch again; "
            "otherwise train this model as it is. strict=False does not help: no block would be left to patch."
        )
    return (
        "Pass the model that holds such blocks, before it is compiled or wrapped; a model without any is trained as "
        "it is."
    )

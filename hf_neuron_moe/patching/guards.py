"""Models that are refused as a whole, before anything is looked at in detail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.errors import UnsupportedModelError

_WRAPPERS = {
    "DistributedDataParallel": "Patch the inner model before wrapping it.",
    "DataParallel": "Patch the inner model before wrapping it.",
    "FullyShardedDataParallel": "Patch the model before FSDP wraps it.",
    "DeepSpeedEngine": "Patch the model before deepspeed.initialize.",
    "OptimizedModule": "Patch the uncompiled model and compile it again: "
    "patch_model(model._orig_mod), then torch.compile(model._orig_mod).",
}
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_model(model: Any) -> None:
    """Refuse what cannot be patched as a whole.

    Raises:
        UnsupportedModelError: `model` is no ``nn.Module``, or is quantized, sharded, offloaded, wrapped or compiled.
    """
    if not isinstance(model, nn.Module):
        raise _refusal("a torch.nn.Module", type(model).__name__, "Pass the model object, not its name or config.")
    for name, module in model.named_modules():
        for wrapper, remedy in _WRAPPERS.items():
            if any(base.__name__ == wrapper for base in type(module).__mro__):
                raise _refusal("a plain, unwrapped model", f"{wrapper}{_at(name)}", remedy)
    for expected, find, remedy in _RULES:
        found = find(model)
        if found is not None:
            raise _refusal(expected, found, remedy)


def _refusal(expected: str, got: str, remedy: str) -> Exception:
    return UnsupportedModelError.about("model", expected, got, remedy).named("patch_model")


def _at(name: str) -> str:
    return f" at {name!r}" if name else ""


def _quantized(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if getattr(module, "is_quantized", False) is True or getattr(module, "hf_quantizer", None) is not None:
            method = getattr(module, "quantization_method", None)
            return f"a quantized model{_at(name)}" + (f" ({getattr(method, 'value', method)})" if method else "")
        if type(module).__module__.startswith("bitsandbytes."):
            return f"a {type(module).__name__} of bitsandbytes{_at(name)}"
    for name, param in model.named_parameters():
        if param.dtype not in _FLOAT_DTYPES:
            return f"the parameter {name!r} of dtype {param.dtype}"
    return None


def _sharded_at_loading(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if getattr(module, "is_distributed_loading_by_transformers", False) is True:
            asked = getattr(getattr(module, "config", None), "distributed_config", None)
            sizes = {key: getattr(asked, key, None) for key in ("tp_size", "ep_size", "fsdp_size")}
            named = ", ".join(f"{key}={size}" for key, size in sizes.items() if size not in (None, 1))
            return f"one that from_pretrained sharded{_at(name)}" + (f" ({named})" if named else "")
    return None


def _sharded(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            return f"a model sharded by fully_shard{_at(name)}"
    for name, param in model.named_parameters():
        if type(param.data).__name__ == "DTensor" or type(param).__name__ == "DTensor":
            return f"a sharded model: {name!r} is a DTensor"
        if hasattr(param, "ds_id"):
            return f"a model partitioned by DeepSpeed ZeRO-3: {name!r} carries a ds_id"
    return None


def _offloaded(model: nn.Module) -> str | None:
    for module in model.modules():
        places = {str(place) for place in (getattr(module, "hf_device_map", None) or {}).values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            return f"a model offloaded by accelerate (hf_device_map: {', '.join(sorted(places))})"
    return None


_NOT_QUANTIZED = (
    "Load it without quantization_config, or call model.dequantize() where its method has that. A GGUF file is "
    "dequantized while loading, but stays marked as quantized: load its state_dict() into a model made by from_config."
)

_RULES: tuple[tuple[str, Callable[[nn.Module], str | None], str], ...] = (
    ("a model without quantization", _quantized, _NOT_QUANTIZED),
    (
        "a model that transformers did not shard while loading",
        _sharded_at_loading,
        "Load it without distributed_config, tp_plan and device_map, patch it, then shard it with FSDP (accelerate or "
        "fully_shard) or wrap it with DDP. Patched blocks do not support tensor or expert parallelism.",
    ),
    ("a model whose weights are whole", _sharded, "Patch the model first and shard it afterwards."),
    ("a model whose weights are in memory", _offloaded, "Load it without disk or CPU offload."),
)

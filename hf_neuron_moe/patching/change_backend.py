"""Another backend for blocks with frozen MX weights, which come patched."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, public
from hf_neuron_moe.modules.quantized_blocks import FrozenBlock
from hf_neuron_moe.patching.lock import one_at_a_time

_WHERE = "set_backend"


@one_at_a_time
@public(_WHERE)
def set_backend(model: nn.Module, backend: str, *, fallback: str = "refuse") -> dict[str, str | None]:
    """Choose what computes the frozen MX blocks of a loaded conversion; their weights are not touched.

    ``from_pretrained`` makes them with ``backend="torch"``. Trainable blocks have the backend that ``patch_model`` was
    given, and keep it.

    Args:
        model: what ``from_pretrained`` made of a checkpoint that ``hf-neuron-moe convert`` wrote in MX; wrappers such
            as PEFT's around it are fine.
        backend: as in ``NeuronMoEConfig``.
        fallback: as in ``NeuronMoEConfig``: ``"refuse"`` or ``"torch"``. The Neuron backend has no backward for frozen
            weights, so that training through such blocks needs ``"torch"`` there.

    Returns:
        By block name, why the backend's kernels cannot compute the block's inference, or None where they can.

    Raises:
        BackendUnavailableError: the backend cannot run here. Nothing is changed then or below.
        ConfigError: an unknown option, or with ``fallback="refuse"`` a block that the kernels cannot compute.
        UnsupportedModelError: the model has no frozen MX blocks.
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, FrozenBlock)}
    if not blocks:
        raise UnsupportedModelError.about(
            "model",
            "a model with frozen MX blocks",
            f"a {type(model).__name__} without any",
            "For other models the backend is chosen when they are patched: "
            "unpatch_model(model), then patch_model(model, NeuronMoEConfig(backend=...)).",
        )
    configs = {name: replace(block.neuron_config, backend=backend, fallback=fallback) for name, block in blocks.items()}
    reasons = {name: _why_not(block, backend) for name, block in blocks.items()}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if refused and fallback != "torch":
        name, reason = next(iter(refused.items()))
        raise ConfigError.about(
            "backend",
            "one whose kernels compute every frozen block",
            f"{backend!r}, which cannot compute {len(refused)} of {len(blocks)}; {name}: {reason}",
            "Use fallback='torch' to compute those with PyTorch on the same device.",
        )
    for name, block in blocks.items():
        block.neuron_config = configs[name]
        block.neuron_told.clear()
    return reasons


def _why_not(block: FrozenBlock, backend: str) -> str | None:
    stack = block.neuron_stack
    name = resolve_backend(backend, stack.gate_up_codes.device)
    return get_backend(name).quantized_support(stack, training=False).reason

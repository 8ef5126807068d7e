"""Whether the chosen backend's kernels compute a block, and what becomes of it if not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.modules.block import stock_slot
from hf_neuron_moe.patching.apply import PlanItem
from hf_neuron_moe.patching.discovery import Candidate


def plan_item(candidate: Candidate, config: NeuronMoEConfig) -> PlanItem:
    """Resolve backend and home of the weights for one candidate; its activation policy is still the default.

    Where the backend's kernels cannot compute it, the item carries the reason: as `refusal`, or, with
    ``fallback="torch"``, as `fallback`, and PyTorch is its backend.
    """
    device = next(iter(candidate.module.parameters())).device
    # A meta module has no device yet; the CPU is where transformers materializes it by default.
    backend = resolve_backend(config.backend, torch.device("cpu") if device.type == "meta" else device)
    reason = None if backend == "torch" else _why_not_kernels(candidate, config, backend)
    falls_back = reason is not None and config.fallback == "torch"
    if falls_back:
        backend = "torch"
    home = config.weights
    if home == "auto":
        home = "stock" if backend == "torch" else "kernel"
    resolved = replace(config, backend=backend, weights=home, activations="minimal")
    if reason is not None and falls_back:
        return PlanItem(candidate, resolved, fallback=reason)
    if reason is not None:
        return PlanItem(candidate, resolved, refusal=reason)
    if backend == "torch":
        return PlanItem(candidate, resolved)
    most = _most_tokens(candidate, resolved) if config.fallback == "torch" else None
    long = () if most is None else (f"calls of more than {most:,} tokens run on torch",)
    notes = (*long, *_open_points(candidate, resolved))
    copies = _copy_bytes(candidate, resolved)
    sizes: tuple[int, int] = _block(candidate, resolved).padded
    return PlanItem(candidate, resolved, weight_copy_bytes=copies, most_tokens=most, notes=notes, kernel_sizes=sizes)


def products_of(candidate: Candidate, config: NeuronMoEConfig) -> str:
    """Return how PyTorch will multiply in a block, in words; empty where kernels compute it."""
    if config.backend != "torch":
        return ""
    from hf_neuron_moe.backends.torch.compute import describe_products

    device = next(iter(candidate.module.parameters())).device
    return describe_products(config.precision, torch.device("cpu") if device.type == "meta" else device)


def _block(candidate: Candidate, config: NeuronMoEConfig) -> Any:
    from hf_neuron_moe.backends.neuron.limits import Block

    _, hidden, inner = candidate.sizes
    assert hidden is not None and inner is not None, "a block of unknown sizes is refused before"
    return Block(candidate.kind, config.precision, hidden, inner, config.block_size)


def _why_not_kernels(candidate: Candidate, config: NeuronMoEConfig, backend: str) -> str | None:
    kernels: Any = get_backend(backend)
    reason: str | None = kernels.why_not(_block(candidate, config))
    return reason


def _open_points(candidate: Candidate, config: NeuronMoEConfig) -> tuple[str, ...]:
    from hf_neuron_moe.backends.neuron.limits import open_points

    return open_points(_block(candidate, config))


def _most_tokens(candidate: Candidate, config: NeuronMoEConfig) -> int | None:
    kernels: Any = get_backend(config.backend)
    most: int | None = kernels.most_tokens(_block(candidate, config))
    return most


def _copy_bytes(candidate: Candidate, config: NeuronMoEConfig) -> int:
    """Bytes of the copies that the kernels' orientations, sizes and dtype ask for."""
    kernels: Any = get_backend(config.backend)
    in_kernel_home = config.weights == "kernel"
    roles = candidate.roles
    count: int = kernels.weight_copy_bytes(
        _block(candidate, config),
        experts=candidate.sizes[0],
        ordered=in_kernel_home or (len(roles.inputs) == 1 if roles is not None else _is_transposed(candidate)),
        dtype=getattr(*stock_slot(candidate.module, candidate.rules[0].stock[0])).dtype,
    )
    return count


def _is_transposed(candidate: Candidate) -> bool:
    return bool(candidate.module.is_transposed)

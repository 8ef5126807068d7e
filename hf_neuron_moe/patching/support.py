"""Whether the chosen backend computes a block, and what happens if not."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.modules.block import stock_slot
from hf_neuron_moe.patching.apply import PlanItem
from hf_neuron_moe.patching.discovery import Candidate


def plan_item(candidate: Candidate, config: NeuronMoEConfig) -> PlanItem:
    """Resolve backend and weight layout for one candidate; its activation policy is still the default.

    Where the backend does not support it, the item carries the reason: as `refusal`, or, with ``fallback="torch"``, as
    `fallback`, and PyTorch is its backend.
    """
    backend = resolve_backend(config.backend, _device(candidate))
    kernels = get_backend(backend)
    layout = kernels.default_layout if config.weights == "auto" else config.weights
    resolved = replace(config, backend=backend, weights=layout, activations="minimal")
    support = kernels.support(
        _shape(candidate, layout), BlockSpec(config.precision, config.block_size, gate=candidate.gate)
    )
    may_fall_back = config.fallback == "torch"
    if support.reason is not None and may_fall_back:
        layout = get_backend(config.fallback).default_layout if config.weights == "auto" else config.weights
        return PlanItem(candidate, replace(resolved, backend=config.fallback, weights=layout), fallback=support.reason)
    if support.reason is not None:
        return PlanItem(candidate, resolved, refusal=support.reason)
    most = support.most_tokens if may_fall_back else None
    long = () if most is None else (f"calls of more than {most:,} tokens run on torch",)
    return PlanItem(
        candidate,
        resolved,
        weight_copy_bytes=support.weight_copy_bytes,
        most_tokens=most,
        notes=(*long, *support.notes),
        kernel_sizes=support.kernel_sizes,
    )


def products_of(candidate: Candidate, config: NeuronMoEConfig) -> str:
    """Return how PyTorch will multiply in a block, in words; empty where kernels compute it."""
    return get_backend(config.backend).describe_products(config.precision, _device(candidate))


def _device(candidate: Candidate) -> torch.device:
    """Where the block is; a meta module goes to the CPU, where transformers materializes it by default."""
    device = next(iter(candidate.module.parameters())).device
    return torch.device("cpu") if device.type == "meta" else device


def _shape(candidate: Candidate, layout: str) -> BlockShape:
    experts, hidden, inner = candidate.sizes
    assert hidden is not None and inner is not None, "a block of unknown sizes is refused before"
    roles = candidate.roles
    ordered = len(roles.inputs) == 1 if roles is not None else bool(candidate.module.is_transposed)
    dtype = getattr(*stock_slot(candidate.module, candidate.rules[0].stock[0])).dtype
    top_k = None if experts is None else candidate.top_k
    return BlockShape(candidate.kind, hidden, inner, experts, top_k, ordered or layout == "kernel", dtype)

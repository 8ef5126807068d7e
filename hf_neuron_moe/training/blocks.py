"""What the metrics need to know of a patched block, whatever its kind and weight layout.

Legend: E experts, H hidden size, I intermediate size, R rows, K contraction axis.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.experts import NeuronExperts
from hf_neuron_moe.modules.quantized_blocks import FrozenBlock, FrozenExperts
from hf_neuron_moe.modules.swiglu_mlp import KernelLayoutSwiGLUMLP, NeuronSwiGLUMLP
from hf_neuron_moe.patching.apply import report_of
from hf_neuron_moe.patching.preconditions import inside_adapters
from hf_neuron_moe.patching.report import PATCHED, PatchEntry

PROJECTIONS = ("gate", "up", "down")


def patched_blocks(model: nn.Module) -> dict[str, NeuronBlock]:
    """Return the patched blocks of `model` by the names that the patch report has for them."""
    found: dict[str, NeuronBlock] = {}
    for name, module in model.named_modules():
        if isinstance(module, NeuronBlock):
            found[name if module.neuron_name in found else module.neuron_name] = module
    return found


def has_experts(block: NeuronBlock) -> bool:
    """Whether tokens are routed to experts in `block`."""
    return isinstance(block, NeuronExperts | FrozenExperts)


def block_sizes(block: NeuronBlock) -> tuple[int, int, int]:
    """Return E (0 for a dense block), H and I, padding of stored MX tensors included."""
    shape = block.neuron_shape
    experts = block.neuron_stack.gate_up_scales.shape[0] if isinstance(block, FrozenExperts) else shape.experts
    return experts or 0, shape.hidden, shape.intermediate


def device_of(block: NeuronBlock) -> torch.device:
    """Device of the block's weights."""
    return next(chain(block.parameters(), block.buffers())).device


def sampled_weights(block: NeuronBlock, rows: int) -> dict[str, Tensor]:
    """Return up to `rows` rows of every projection, evenly spread, each row along the contraction axis of its matmul.

    ``{"gate": [R, H], "up": [R, H], "down": [R, I]}`` in the parameters' dtype, detached; of a sharded parameter the
    rows that are on this rank. A block with frozen MX weights has none to quantise.
    """
    if isinstance(block, FrozenBlock):
        return {}
    if isinstance(block, NeuronExperts):
        gate_up, down = _local(_base(block, "gate_up_proj")), _local(_base(block, "down_proj"))
        if block.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        inner = gate_up.shape[1] // 2
        parts = {"gate": gate_up[:, :inner], "up": gate_up[:, inner:], "down": down}
        return {name: _spread_pairs(part, rows) for name, part in parts.items()}
    return {name: spread_rows(_local(weight), rows) for name, weight in _dense_weights(block).items()}


def spread_rows(values_RK: Tensor, rows: int) -> Tensor:
    """Return up to `rows` rows of ``[R, K]``, evenly spread, as a copy."""
    return values_RK.detach()[_spread(len(values_RK), rows, values_RK.device)]


def patch_record(model: nn.Module) -> dict[str, Any]:
    """Return the patch report of `model` as plain values.

    Of frozen blocks, which no patch made, one like it with the first one's configuration.
    """
    report = report_of(model)
    if report is not None:
        return report.to_dict()
    entries = []
    blocks = patched_blocks(model)
    for name, block in blocks.items():
        experts, hidden, inner = block_sizes(block)
        entry = PatchEntry(
            name=name,
            kind="experts" if has_experts(block) else "mlp",
            class_name=type(block).__name__,
            status=PATCHED,
            experts=experts or None,
            hidden_size=hidden,
            intermediate_size=inner,
            weights="frozen" if isinstance(block, FrozenBlock) else block.neuron_config.weights,
            backend=block.neuron_config.backend,
        )
        entries.append(entry.to_dict())
    return {"config": next(iter(blocks.values())).neuron_config.to_dict(), "entries": entries}


def _dense_weights(block: nn.Module) -> dict[str, Tensor]:
    assert isinstance(block, NeuronSwiGLUMLP)
    if isinstance(block, KernelLayoutSwiGLUMLP):
        gate_up, down = _base(block, "gate_up_proj"), _base(block, "down_proj")
    else:
        roles = block.neuron_roles
        weights = [_base(inside_adapters(block.get_submodule(name)), "weight") for name in roles.linears]
        if len(roles.inputs) == 2:
            return dict(zip(PROJECTIONS, weights, strict=True))
        gate_up, down = weights
    gate_IH, up_IH = gate_up.chunk(2, dim=0)
    return {"gate": gate_IH, "up": up_IH, "down": down}


def _base(module: nn.Module, name: str) -> Tensor:
    """A parameter's own values, without what a parametrization adds: asking for those would compute and cache them."""
    parametrized = getattr(module, "parametrizations", None)
    tensor = parametrized[name].original if parametrized is not None and name in parametrized else getattr(module, name)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (``DTensor``), any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _spread(count: int, rows: int, device: torch.device) -> Tensor:
    taken = min(rows, count)
    return torch.arange(taken, device=device) * count // max(taken, 1)


def _spread_pairs(weight_ERK: Tensor, rows: int) -> Tensor:
    """Up to `rows` rows spread over all experts' rows."""
    positions = _spread(weight_ERK.shape[0] * weight_ERK.shape[1], rows, weight_ERK.device)
    each = max(weight_ERK.shape[1], 1)
    return weight_ERK[torch.div(positions, each, rounding_mode="floor"), positions % each]

"""What the metrics need to know of a patched block, whatever its kind and weight layout.

Legend: E experts, H hidden size, I intermediate size, R rows, K contraction axis.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.engine import axis_parts, installed, is_sharded_at_loading, local
from hf_neuron_moe.modules.experts import ExpertsBlock, NeuronExperts
from hf_neuron_moe.modules.experts_calls import BY_EXPERT, SHARED, SORTED, STACKED
from hf_neuron_moe.modules.experts_form import parameter_of
from hf_neuron_moe.modules.in_place import named_blocks
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock, QuantizedExperts
from hf_neuron_moe.modules.swiglu_mlp import KernelLayoutSwiGLUMLP, NeuronSwiGLUMLP
from hf_neuron_moe.patching.apply import report_of
from hf_neuron_moe.patching.preconditions import inside_adapters
from hf_neuron_moe.patching.report import PATCHED, PatchEntry
from hf_neuron_moe.precision_map import DEFAULT_GLOB

PROJECTIONS = ("gate", "up", "down")


def patched_blocks(model: nn.Module) -> dict[str, NeuronBlock]:
    """Return the patched blocks of `model` by the names that the patch report has for them."""
    found: dict[str, NeuronBlock] = {}
    for name, block in named_blocks(model):
        found[name if block.neuron_name in found else block.neuron_name] = block
    return found


def has_experts(block: NeuronBlock) -> bool:
    """Whether tokens are routed to experts in `block`."""
    return isinstance(block, ExpertsBlock | QuantizedExperts)


def gets_ids(block: NeuronBlock) -> bool:
    """Whether each token's experts are an argument of a call."""
    if isinstance(block, QuantizedExperts):
        return block.neuron_form.call not in (BY_EXPERT, SORTED, SHARED)
    return isinstance(block, NeuronExperts)


def block_sizes(block: NeuronBlock) -> tuple[int, int, int]:
    """Return E of all processes (0 for a dense block), H and I, padding of stored MX tensors included."""
    shape = block.neuron_shape
    experts = block.neuron_stack.gate_up_scales.shape[0] if isinstance(block, QuantizedExperts) else shape.experts
    return (experts or 0) * expert_processes(block), shape.hidden, shape.intermediate


def expert_processes(block: NeuronBlock) -> int:
    """Return over how many processes the experts of `block` are divided."""
    return _expert_parts(block)[0]


def first_expert(block: NeuronBlock) -> int:
    """Return the model's number of the first expert that this process has of `block`; 0 for a dense block."""
    parts, index = _expert_parts(block)
    return block_sizes(block)[0] // parts * index


def _expert_parts(block: NeuronBlock) -> tuple[int, int]:
    """Return over how many processes experts are divided, and which part is here."""
    if isinstance(block, ExpertsBlock):
        return axis_parts(parameter_of(block, block.neuron_form.down), 0)
    found = installed(block)  # codes are buffers, which do not say how they were divided
    if found is None or found.experts is None:
        return 1, 0
    return found.mesh.size(), found.mesh.get_local_rank()


def processes_with_one_batch(model: nn.Module) -> int:
    """Return how many processes count the same tokens: those of tensor parallelism."""
    asked = getattr(getattr(model, "config", None), "distributed_config", None)
    return (getattr(asked, "tp_size", None) or 1) if is_sharded_at_loading(model) else 1


def device_of(block: NeuronBlock) -> torch.device:
    """Device of the block's weights."""
    return next(chain(block.parameters(), block.buffers())).device


def sampled_weights(block: NeuronBlock, rows: int) -> dict[str, Tensor]:
    """Return up to `rows` rows of every projection, evenly spread, each row along the contraction axis of its matmul.

    ``{"gate": [R, H], "up": [R, H], "down": [R, I]}`` in the parameters' dtype, detached; of a sharded parameter the
    rows that are on this rank. Without a gate there is no ``"gate"``. Frozen MX weights are not quantized again.
    """
    if isinstance(block, QuantizedBlock):
        return {}
    if isinstance(block, NeuronSwiGLUMLP) and not isinstance(block, KernelLayoutSwiGLUMLP):
        layers = [inside_adapters(block.get_submodule(name)) for name in block.neuron_roles.linears]
        weights = [_base(layer, "weight") for layer in layers]
    elif isinstance(block, ExpertsBlock):
        weights = _expert_rows(block)
    else:
        weights = [_base(block, "gate_up_proj"), _base(block, "down_proj")]
    *inputs, down = weights
    if len(inputs) == 1 and not _ungated(block):
        inputs = [*inputs[0].chunk(2, dim=-2)]
    names = PROJECTIONS[-len(inputs) - 1 :]
    return {name: spread_rows(local(part), rows) for name, part in zip(names, (*inputs, down))}


def _ungated(block: NeuronBlock) -> bool:
    return isinstance(block, ExpertsBlock) and not block.neuron_form.gate.gated


def _expert_rows(block: ExpertsBlock) -> list[Tensor]:
    """Gate and up (or up alone, or both in one) and down of experts, rows along the last axis."""
    form = block.neuron_form
    own = [local(_held(block, name)) for name in (*form.inputs, form.down)]
    if form.call in (SHARED, STACKED):
        return own
    gate_up, down = (weight.transpose(1, 2) if form.transposed else weight for weight in own)
    return [gate_up[:, ::2], gate_up[:, 1::2], down] if form.interleaved else [gate_up, down]


def spread_rows(values: Tensor, rows: int) -> Tensor:
    """Return up to `rows` of all rows of ``[R, K]`` or ``[E, R, K]``, evenly spread, as a copy."""
    count = math.prod(values.shape[:-1])
    taken, each = min(rows, count), max(values.shape[-2], 1)
    positions = torch.arange(taken, device=values.device) * count // max(taken, 1)
    first = () if values.dim() == 2 else (torch.div(positions, each, rounding_mode="floor"),)
    return values.detach()[(*first, positions % each)]


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
            precision=block.neuron_config.precision,
            gate=block.neuron_gate.short,
            experts=experts or None,
            hidden_size=hidden,
            intermediate_size=inner,
            weights="frozen" if isinstance(block, QuantizedBlock) else block.neuron_config.weights,
            backend=block.neuron_config.backend,
        )
        entries.append(entry.to_dict())
    config = next(iter(blocks.values())).neuron_config
    own = {DEFAULT_GLOB: config.precision} | {name: block.neuron_config.precision for name, block in blocks.items()}
    precision = {name: kind for name, kind in own.items() if name == DEFAULT_GLOB or kind != config.precision}
    return {"config": replace(config, precision=precision).to_dict(), "entries": entries}


def _base(module: nn.Module, name: str) -> Tensor:
    """A parameter's own values, without what a parametrization adds: asking for those would compute and cache them."""
    parametrized = getattr(module, "parametrizations", None)
    tensor = parametrized[name].original if parametrized is not None and name in parametrized else getattr(module, name)
    assert isinstance(tensor, Tensor)
    return tensor.detach()


def _held(block: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    return _base(block.get_submodule(owner), name)

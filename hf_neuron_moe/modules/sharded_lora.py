"""LoRA in a model that transformers' engine sharded while loading, where peft knows whole weights only.

peft makes adapters of experts as whole, ordinary parameters, equal on all processes. Their block takes the part that
belongs to its own part of a weight and adds the product there. Gradients of whole factors are summed over the
processes that have the same tokens. The average over all processes, which transformers' Trainer takes of ordinary
parameters, is then that of the batch.

Of a layer that tensor parallelism cuts, peft cuts one factor likewise. Where FSDP cuts the layer too, it would take the
sizes from both cuts, and nobody would average that factor's gradients: :func:`size_by_layers` and ``_share`` do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn

from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.collectives import sum_gradients
from hf_neuron_moe.modules.engine import axis_parts, installed, is_sharded, local, strided, style_name
from hf_neuron_moe.modules.in_place import block_of
from hf_neuron_moe.modules.low_rank import LowRank, is_lora_linear


def is_lora_parameter(layer: Any) -> bool:
    """Return whether `layer` is peft's LoRA wrapper of a parameter (``target_parameters``)."""
    kind = type(layer)
    return (kind.__module__, kind.__qualname__) == ("peft.tuners.lora.layer", "ParamWrapper")


_sized: WeakSet[nn.Module] = WeakSet()
"""Layers whose adapters get the sizes of the whole layer."""


def size_by_layers(model: nn.Module) -> None:
    """Let peft take the sizes of adapters from whole layers where a mesh of several axes cuts these.

    From there it cuts a factor by the model's plan. peft 0.21 takes the part that is left by all axes, FSDP's too.
    """
    linear: list[Any] = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    layers = [layer for layer in linear if is_sharded(layer.weight) and layer.weight.device_mesh.ndim > 1]
    if layers and find_spec("peft") is not None:
        from peft.tuners.lora import layer

        _sized.update(layers)
        wrapper: Any = layer.Linear
        wrapper._get_in_out_features = _sizes


def release_sizes(model: nn.Module) -> None:
    """Undo :func:`size_by_layers`."""
    _sized.difference_update(model.modules())


def _sizes(adapter: Any, layer: Any) -> Any:
    from peft.tuners.lora.layer import LoraLayer

    if layer in _sized:
        return layer.in_features, layer.out_features
    return LoraLayer._get_in_out_features(adapter, layer)


def prepare_adapters(model: nn.Module) -> None:
    """Make LoRA adapters of a model that was sharded while loading compute, and merge, with its parts.

    A patched model calls this before every forward. Call it yourself to merge adapters before the first one.
    """
    for name, layer in model.named_modules():
        if is_lora_parameter(layer):
            if block_of(layer.get_base_layer()) not in (None, layer.get_base_layer()):
                _check_parameter(layer, name)
                layer._activate_lora = MethodType(_activated, layer)
                layer.get_delta_weight = MethodType(_delta_weight, layer)
        elif is_lora_linear(layer):
            _check_linear(layer, name)
            for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
                if is_sharded(factor.weight):  # peft gives the sizes of a part, and the engine reads the whole's
                    factor.out_features, factor.in_features = factor.weight.shape
                    if is_sharded(layer.base_layer.weight):
                        for parameter in factor.parameters():
                            _share(parameter, layer.base_layer.weight.device_mesh)
            layer.get_delta_weight = MethodType(_delta_weight, layer)
        copies = layer._modules.get("modules_to_save")
        if copies is not None and any(map(installed, copies.modules())):
            expected = "one that tensor parallelism leaves whole, since a copy computes with the original's weights"
            fix = "Leave it out of modules_to_save."
            raise UnsupportedModelError.about("the module to save", expected, "a cut one", fix).named(name)


def release_adapters(model: nn.Module) -> None:
    """Undo :func:`prepare_adapters`."""
    for layer in model.modules():
        if is_lora_parameter(layer) or is_lora_linear(layer):
            for name in ("_activate_lora", "get_delta_weight"):
                layer.__dict__.pop(name, None)


def _check_parameter(layer: Any, name: str) -> None:
    parameter = layer.parameter_name
    if layer.get_param().dim() != 3 or not hasattr(layer, "get_delta_factors"):
        expected = "a weight of experts with three axes, wrapped by peft 0.21 or later"
        got = f"{parameter} of shape {tuple(layer.get_param().shape)}"
        fix = "Target gate_up_proj and down_proj only, or put adapters on attention."
        raise UnsupportedModelError.about("the target parameter", expected, got, fix).named(name)


def _check_linear(layer: Any, name: str) -> None:
    engine, weight = installed(layer.base_layer), layer.base_layer.weight
    style = None if engine is None else style_name(engine.style)
    if style not in (None, "colwise", "rowwise"):
        expected = "a layer that tensor parallelism cuts colwise or rowwise, as peft can cut its adapters"
        fix = "Leave it out of target_modules, or shard by fsdp_size and ep_size without tp_size."
        raise UnsupportedModelError.about("the adapter", expected, str(style), fix).named(name)
    outputs, inputs = layer.base_layer.out_features, layer.base_layer.in_features
    for factors, axis, size, of in ((layer.lora_B, 0, outputs, "outputs"), (layer.lora_A, 1, inputs, "inputs")):
        parts, index = axis_parts(weight, axis)
        part = -(-size // parts)
        held = len(range(size)[part * index : part * (index + 1)])
        for factor in factors.values():
            if local(factor.weight).shape[axis] != held:
                expected = f"one with {held} {of} on this process, as its layer has"
                got = f"{local(factor.weight).shape[axis]}, which peft took from the part that FSDP stores"
                fix = "Call patch_model before get_peft_model, or leave the layer out of target_modules."
                raise UnsupportedModelError.about("the adapter", expected, got, fix).named(name)


class _Average(NamedTuple):
    """A hook that averages a parameter's gradient over groups of processes."""

    groups: list[Any]

    def __call__(self, parameter: Any) -> None:
        for group in self.groups:
            dist.all_reduce(local(parameter.grad), group=group)
            parameter.grad /= group.size()


def _share(factor: Any, mesh: Any) -> None:
    """Keep a factor that peft cut equal on the processes of `mesh` that hold the same part and have other tokens."""
    groups = [mesh.get_group(axis) for axis, name in enumerate(mesh.mesh_dim_names or ()) if name != "tp"]
    if groups and factor.requires_grad and not hasattr(factor, "neuron_shared"):
        for group in groups:
            dist.broadcast(local(factor.detach()), group_src=0, group=group)
        if not any(isinstance(hook, _Average) for hook in (factor._post_accumulate_grad_hooks or {}).values()):
            factor.register_post_accumulate_grad_hook(_Average(groups))
        # Module.to swaps the tensor for another one, which has the list of hooks but does not call them: set it again.
        factor._post_accumulate_grad_hooks = factor._post_accumulate_grad_hooks
        factor.neuron_shared = True


@contextmanager
def _activated(layer: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Lend a block the factors of a wrapper while that calls it; peft's own way changes whole weights only."""
    block: Any = block_of(layer.get_base_layer())
    weight, group = layer.get_param(), block.neuron_same_tokens
    factors = []
    for adapter in active_adapters:
        if adapter in layer.lora_A:
            *whole, scaling = layer.get_delta_factors(adapter)
            left, right = whole if group is None else (sum_gradients(each, group) for each in whole)
            left, right = _part(left, weight, 0), _part(right, weight, 0)
            factors.append((_part(left, weight, 1), _part(right, weight, 2), scaling))
    block.neuron_factors[layer.parameter_name] = factors
    try:
        yield
    finally:
        del block.neuron_factors[layer.parameter_name]


def _part(factor: Tensor, weight: Any, axis: int) -> Tensor:
    """Return what of an axis of a `factor` belongs to this process's part of that axis of a `weight`."""
    parts, index = axis_parts(weight, axis)
    halves = 2 if parts > 1 and strided(weight, axis) else 1
    return factor.unflatten(axis, (halves, parts, -1)).select(axis + 1, index).flatten(axis, axis + 1)


def _delta_weight(layer: Any, adapter: str) -> Tensor:
    """Return what an adapter adds to a weight, cut like that."""
    linear = is_lora_linear(layer)
    weight = layer.base_layer.weight if linear else layer.get_param()
    if linear and is_sharded(weight):
        factors = (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
        a_RN, b_OR = (each.full_tensor() if is_sharded(each) else each for each in factors)
        delta = LowRank(weight, a_RN, b_OR, layer.scaling[adapter]).product
    else:
        delta = type(layer).get_delta_weight(layer, adapter)
    if not is_sharded(weight):
        return delta
    from torch.distributed.tensor import DTensor
    from transformers.distributed.sharding_utils import DtensorShardOperation

    part: Any = DtensorShardOperation(weight).shard_tensor(delta)
    sizes = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(part, weight.device_mesh, weight.placements, run_check=False, **sizes)

"""What is done to a model once transformers has filled it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConversionError, UnsupportedModelError, public
from hf_neuron_moe.formats.moe_mx import TILE, from_groups
from hf_neuron_moe.modules.block import put_parameter, release_layout
from hf_neuron_moe.modules.engine import is_sharded_at_loading
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching import adapter_watch
from hf_neuron_moe.patching.api import patch_model
from hf_neuron_moe.patching.apply import PlanItem, all_slots, build, put_in, take_out
from hf_neuron_moe.patching.discovery import Candidate, discover
from hf_neuron_moe.patching.lock import one_at_a_time
from hf_neuron_moe.patching.ranks import OneAnswer
from hf_neuron_moe.quantizers.bf16_loader import give_weights
from hf_neuron_moe.quantizers.placeholders import Placement
from hf_neuron_moe.quantizers.quantization_config import ONE_DEVICE, NeuronMoEQuantizationConfig
from hf_neuron_moe.quantizers.shard_layouts import WHERE
from hf_neuron_moe.quantizers.sharded import OpenFiles, Slices


@public(WHERE)
def finish(model: PreTrainedModel, placement: Placement, options: NeuronMoEQuantizationConfig) -> None:
    """Settle the MX blocks, and put the original modules back where bf16 weights landed, patched."""
    model.config.__dict__.pop("transformers_weights", None)
    _check_filled(placement)
    if placement.readings or placement.codes:
        with OneAnswer(), OpenFiles() as slices:
            _read(model, placement, slices)
    for stand_in in (*(block for block, _ in placement.quantized), *placement.loaders):
        missing = [name for name, tensor in stand_in.state_dict(keep_vars=True).items() if tensor.is_meta]
        if missing:
            fix = "Load it without disk offload; otherwise the checkpoint is damaged."
            raise ConversionError.about(missing[0], "filled from the checkpoint", "no values", fix)
    for block, _ in placement.quantized:
        block.settle()
    if placement.quantized:
        adapter_watch.watch(model, [])
    if not placement.loaders and not placement.readings:
        return
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        expected = "one device for a checkpoint in bf16 layouts, whose blocks are patched after loading"
        raise UnsupportedModelError.about("device_map", expected, ", ".join(sorted(devices)), ONE_DEVICE)
    landed: list[Any] = [*placement.loaders, *placement.readings]
    forms = [each.candidate.form for each in landed]
    fixed = any(form is not None and form.stock_only is not None for form in forms) or is_sharded_at_loading(model)
    layout = "kernel" if options.layout == "kernel" and not fixed else "stock"
    config = NeuronMoEConfig(precision="bf16", backend="torch", weights=layout)
    slots = all_slots(model)
    found = {reading.candidate.name for reading in placement.readings}
    while placement.loaders:
        loader = placement.loaders.pop(0)
        original = loader.hand_over(layout)
        for parent, attribute in slots[id(loader)]:
            parent._modules[attribute] = original
        found.add(loader.candidate.name)
    placement.readings.clear()
    if placement.quantized:  # bf16 blocks next to MX ones: patch_model would refuse the model as quantized
        for candidate in (each for each in discover(model) if each.name in found and each.reason is None):
            swap = build(PlanItem(candidate, config))
            put_in(model, swap, all_slots(model))
            release_layout(swap.replacement, swap.original)
            placement.swaps.append(swap)
    else:
        # What was matched while loading belongs to the converted names; saving starts from the model's own again.
        model.__dict__.pop("_weight_conversions", None)
        patch_model(model, NeuronMoEConfig(precision="bf16", weights=layout), strict=False)


def _check_filled(placement: Placement) -> None:
    """Raise where a block's own tensor is not in the checkpoint: transformers leaves memory with any values there."""
    stand_ins = [(block.neuron_name, block) for block, _ in placement.quantized]
    for module, stand_in in (*stand_ins, *((each.candidate.name, each) for each in placement.loaders)):
        for name, tensor in stand_in.state_dict(keep_vars=True).items():
            if not getattr(tensor, "_is_hf_initialized", tensor.is_meta):
                fix = "The checkpoint is damaged: convert the original again."
                raise ConversionError.about(f"tensor {module}.{name}", "in the checkpoint", "none", fix)


def _read(model: PreTrainedModel, placement: Placement, slices: Slices) -> None:
    """Fill what transformers left out, each process its part."""
    there = {id(module) for module in model.modules()}  # pipeline stages lack the others' layers
    placement.readings = [each for each in placement.readings if id(each.candidate.module) in there]
    placement.codes = [each for each in placement.codes if id(each.block) in there]
    placement.quantized = [each for each in placement.quantized if id(each[0]) in there]
    place = next(param.device for param in model.parameters() if not param.is_meta)
    for codes in placement.codes:
        codes.check()
    for reading in placement.readings:
        reading.finish(slices, place)
    for codes in placement.codes:
        codes.finish(slices, place, model)
    placement.codes.clear()


def parts_with_codes(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the transformers models in `model`, itself not included, that have quantized blocks."""
    inner = (each for each in model.modules() if isinstance(each, PreTrainedModel) and each is not model)
    return [each for each in inner if any(isinstance(block, QuantizedBlock) for block in each.modules())]


@one_at_a_time
def dequantize(model: PreTrainedModel, placement: Placement, dtype: torch.dtype) -> None:
    """Give an MX base its codes' values as weights: exact in bf16 and wider dtypes, as far as their exponents reach."""
    if is_sharded_at_loading(model):
        fix = "Load it in one process and call dequantize() there."
        raise UnsupportedModelError.about("model", "whole", "one that was sharded while loading", fix)
    for part in parts_with_codes(model):
        part.__dict__.pop("save_pretrained", None)
    slots = all_slots(model)
    for block, candidate in placement.quantized:
        original = give_weights(candidate, *_values(block, candidate, dtype), "stock").train(block.training)
        original._parameters.update(block._parameters)  # those beside the weights, such as a bias of the sum
        for name, bias in block.original_biases(candidate.sizes[1], candidate.sizes[2]).items():
            put_parameter(original, name, nn.Parameter(bias.to(dtype)))
        for parent, attribute in slots.get(id(block), ()):
            parent._modules[attribute] = original
    for swap in placement.swaps:
        take_out(model, swap, slots)
    placement.quantized.clear()
    placement.swaps.clear()
    model.__dict__.pop("_weight_conversions", None)


def _values(block: QuantizedBlock, candidate: Candidate, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Fused gate_up and down of a block, without padding; an expert at a time in fp32."""
    stack, (experts, hidden, inner) = block.neuron_stack, candidate.sizes
    assert hidden is not None and inner is not None
    device, leading = stack.gate_up_codes.device, () if experts is None else (experts,)
    # Rows of gate and up without a down projection, which nothing reads, become zeros.
    halves, first = stack.gate.halves, block.tensor_names(stack.gate.gated)[0]
    rows_E = () if experts is None else (len(block.get_buffer(first)),)
    gate_up = torch.zeros((*rows_E, halves * inner, hidden), dtype=dtype, device=device)
    down = torch.empty((*leading, hidden, inner), dtype=dtype, device=device)
    for number in [None] if experts is None else range(experts):
        weights = stack.expert(number)
        rows_of = (gate_up, down) if number is None else (gate_up[number], down[number])
        for half in range(halves):
            rows, whole = slice(half * stack.inner, (half + 1) * stack.inner), slice(0, stack.hidden)
            values = weights.gate_up.values(
                rows, whole, torch.empty(stack.inner, stack.hidden, dtype=torch.float32, device=device)
            )
            if block.permuted:
                values = from_groups(from_groups(values).mT, min(stack.inner, TILE)).mT
            rows_of[0][half * inner : (half + 1) * inner].copy_(values[:inner, :hidden])
        K = weights.down.shape[1]
        values = weights.down.values(
            slice(0, hidden), slice(0, K), torch.empty(hidden, K, dtype=torch.float32, device=device)
        )
        rows_of[1].copy_((from_groups(values, min(K, TILE)) if block.permuted else values)[:, :inner])
    return gate_up, down

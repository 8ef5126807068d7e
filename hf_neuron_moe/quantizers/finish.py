"""What is done to a model once transformers has filled it."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConversionError, UnsupportedModelError, refuse
from hf_neuron_moe.modules.block import release_layout
from hf_neuron_moe.patching.api import patch_model
from hf_neuron_moe.patching.apply import PlanItem, build, holders, put_in
from hf_neuron_moe.quantizers.config import NeuronMoEQuantizationConfig
from hf_neuron_moe.quantizers.placement import Placement
from hf_neuron_moe.quantizers.stored import WHERE


def finish(model: PreTrainedModel, placement: Placement, options: NeuronMoEQuantizationConfig) -> None:
    """Settle the frozen blocks, and put the original modules back where bf16 weights landed, patched.

    Args:
        model: the loaded model.
        placement: its stand-ins.
        options: what the checkpoint is.

    Raises:
        ConversionError: a converted tensor was not loaded.
        UnsupportedModelError: bf16 weights were spread over several devices.
    """
    model.config.__dict__.pop("transformers_weights", None)
    for stand_in in (*placement.frozen, *placement.landings):
        missing = [name for name, tensor in stand_in.state_dict(keep_vars=True).items() if tensor.is_meta]
        if missing:
            raise refuse(
                ConversionError,
                where=WHERE,
                argument=missing[0],
                expected="filled from the checkpoint",
                got="no values",
                remedy="Load it without disk offload; otherwise the checkpoint is damaged.",
            )
    for block in placement.frozen:
        block.settle()
    if not placement.landings:
        return
    _check_devices(model)
    home = "kernel" if options.layout == "kernel" else "stock"
    config = NeuronMoEConfig(precision="bf16", backend="torch", weights=home)
    while placement.landings:
        landing = placement.landings.pop(0)
        candidate, original = landing.candidate, landing.hand_over(home)
        for parent, attribute in holders(model, landing):
            parent._modules[attribute] = original
        if placement.frozen:  # a bf16 block beside frozen ones: patch_model would refuse the model as quantised
            swap = build(PlanItem(candidate, config))
            put_in(model, swap)
            release_layout(swap.replacement, swap.original)
    if not placement.frozen:
        # What was matched while loading belongs to the converted names; saving starts from the model's own again.
        model.__dict__.pop("_weight_conversions", None)
        patch_model(model, NeuronMoEConfig(precision="bf16", weights=home), strict=False)


def _check_devices(model: PreTrainedModel) -> None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        raise refuse(
            UnsupportedModelError,
            where=WHERE,
            argument="device_map",
            expected="one device for a checkpoint in bf16 layouts, whose blocks are patched after loading",
            got=", ".join(sorted(places)),
            remedy="Load it on one device, or shard the loaded model afterwards.",
        )

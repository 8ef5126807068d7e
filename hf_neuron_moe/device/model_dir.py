"""The folder that ``doctor`` and ``verify-device`` are given: what can be told of it without reading a weight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from hf_neuron_moe.convert.assign import build_converted_model, build_meta_model
from hf_neuron_moe.convert.io.folder import check_model, is_conversion
from hf_neuron_moe.convert.io.source import read_header, read_source
from hf_neuron_moe.convert.manifest import load_manifest
from hf_neuron_moe.device.kernel_support import BlockGroup, block_groups
from hf_neuron_moe.errors import ConfigError, SourceDamageError


def groups_of_folder(folder: Path) -> list[BlockGroup]:
    """Return the blocks of a checkpoint, a conversion or a ``config.json``, like ones together, those in MX last."""
    check_model(folder)
    if not is_conversion(folder):
        return block_groups(build_meta_model(folder))
    model = _converted_model(folder)
    stock = block_groups(model)
    _place_codes(model, folder)
    frozen = [group for group in block_groups(model) if group.codes]
    taken = {name for group in frozen for name in group.names}
    others = [replace(group, names=tuple(name for name in group.names if name not in taken)) for group in stock]
    return [group for group in others if group.names] + frozen


def check_model_dir(folder: Path, *, random_weights: bool) -> None:
    """Raise for a folder whose blocks no machine could compare; reads ``config.json`` and, of weights, headers only."""
    check_model(folder)
    if is_conversion(folder):
        if random_weights:
            expected = "off for a conversion, whose layouts are read with its weights"
            fix = "Leave --random-weights out, or give the checkpoint that it was made of."
            raise ConfigError.about("random_weights", expected, "on", fix)
        _place_codes(_converted_model(folder), folder)
        return
    build_meta_model(folder)
    if random_weights:
        return
    if not any(folder.glob("*.safetensors*")):
        expected = "a folder with the weights in safetensors files"
        fix = "Give the checkpoint's folder, or compare on random weights: --random-weights."
        raise SourceDamageError.about(str(folder), expected, "config.json without them", fix)
    read_source(folder)


def _place_codes(model: PreTrainedModel, folder: Path) -> None:
    """Put the blocks of a conversion's shards, whose headers account for all of their bytes, into its model."""
    from hf_neuron_moe.quantizers.placeholders import place
    from hf_neuron_moe.quantizers.shard_layouts import read_stored

    files = sorted({tensor.file for tensor in load_manifest(folder).tensors})
    for file in files:
        read_header(folder / file)
    place(model, read_stored(str(folder / file) for file in files))


def _converted_model(folder: Path) -> PreTrainedModel:
    import hf_neuron_moe.quantizers  # noqa: F401 - makes transformers know converted checkpoints

    return build_converted_model(folder)

"""Whether a chip's kernels compute the blocks of a run, before its model is loaded.

B tokens per block of experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import fnmatch

from hf_neuron_moe.backends import NEURON_BACKENDS
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import (
    Block,
    Device,
    most_tokens,
    unsupported_reason,
    unsupported_reason_tokens,
)
from hf_neuron_moe.device.kernel_support import NO_TRAINING, BlockGroup, block_groups
from hf_neuron_moe.finetune.early_checks import check_quantized_backend, meta_model
from hf_neuron_moe.finetune.model_files import FROZEN, conversion_of
from hf_neuron_moe.finetune.train_options import Options, bad
from hf_neuron_moe.precision_map import precision_of, precisions_in, spelled

_ANY_SIZE = 1024
"""H and I that every kernel takes, for a model whose sizes are not known yet."""


def asks_for_kernels(options: Options) -> bool:
    """Whether blocks are patched, and for a backend that calls nkilib's kernels."""
    return options.training.neuron_patch and options.training.neuron_backend in NEURON_BACKENDS


def check_kernels(options: Options, config: bytes | str, device: Device, adapter: Adapter) -> list[str]:
    """Refuse a run whose blocks the kernels cannot compute, where PyTorch may not either.

    Args:
        options: of a run that patches for the Neuron backend.
        config: the bytes of the model's ``config.json``, or why it cannot be looked at.
        device: the chip that it is for.
        adapter: the kernels there.

    Returns:
        What was found, a line each.

    Raises:
        ConfigError: blocks have no kernel and ``neuron_fallback`` is ``"refuse"``.
    """
    training = options.training
    converted = conversion_of(config)
    if converted in FROZEN:
        check_quantized_backend(training.neuron_backend, training.neuron_fallback)
        state = f"{options.model.model} is a conversion in {converted}; {NO_TRAINING}"
        return [f"frozen MX blocks: in training PyTorch computes them on the device: {state}"]
    found, note = _blocks_of(options.model.model, config)
    notes = [note] if note else []
    if found is None:
        judged, prefix = _judge_kinds(options, device, adapter), "if it has "
        without = judged if all(judged.values()) else {}
    else:
        chosen = [group for group in found if _is_chosen(group, training.neuron_include, training.neuron_exclude)]
        blocks = {label: block for group in chosen for label, block in _blocks(group, options).items()}
        judged, prefix = {label: _judge(block, options, device, adapter) for label, block in blocks.items()}, ""
        without = {label: why for label, why in judged.items() if why}
        if not training.neuron_strict and len(without) < len(judged):
            without = {}
    may_fall_back = training.neuron_fallback == "torch"
    if without and not may_fall_back:
        of_lnc = device.lnc == 1 and any("LNC" in why for why in without.values() if why)
        raise bad(
            "neuron_precision, neuron_block_size and the length of batches",
            f"ones that the {device.platform} kernels compute (backend {training.neuron_backend})",
            "; ".join(f"{label} ({spelled(training.neuron_precision)}): {why}" for label, why in without.items()),
            f"{'Set NEURON_LOGICAL_NC_CONFIG=2, change' if of_lnc else 'Change'} the option, or set neuron_fallback: "
            "torch, with which PyTorch computes such blocks on the device.",
        )
    outcome = "the run is refused" if training.neuron_strict else "they stay stock"
    if may_fall_back:
        outcome = "PyTorch computes them"
    for label, why in judged.items():
        notes.append(f"{prefix}{label}: " + (f"{outcome}: {why}" if why else "the kernels compute them"))
    return notes


def _blocks_of(name: str, config: bytes | str) -> tuple[list[BlockGroup] | None, str]:
    """The blocks that could be patched by the model's configuration, or None where nobody has that; and a note.

    Blocks of families that transformers does not know are left to the loading. A conversion in bf16 is patched anew.
    """
    if isinstance(config, str):
        return None, config
    model = meta_model(name, config)
    if isinstance(model, str):
        return [], f"the blocks of {name} cannot be judged before it is loaded: {model}"
    return [group for group in block_groups(model) if group.reason is None], ""


def _is_chosen(group: BlockGroup, include: list[str] | None, exclude: list[str] | None) -> bool:
    def matches(name: str, globs: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in globs)

    return any((not include or matches(name, include)) and not matches(name, exclude or []) for name in group.names)


def _blocks(group: BlockGroup, options: Options) -> dict[str, Block]:
    """The group's blocks by label, one for each precision that they have."""
    precision = options.training.neuron_config().precision
    own = sorted({precision_of(precision, (name,)) for name in group.names})
    labels = [group.label if len(own) == 1 else f"{group.label} in {name}" for name in own]
    return {label: group.block(name, options.training.neuron_block_size) for label, name in zip(labels, own)}


def _judge_kinds(options: Options, device: Device, adapter: Adapter) -> dict[str, str | None]:
    """The same by kind of block, for a model that nothing is known of."""
    training = options.training
    kinds = {"dense MLPs": "mlp", "experts": "experts"}
    own = precisions_in(training.neuron_config().precision)
    sizes = (_ANY_SIZE, _ANY_SIZE, training.neuron_block_size)
    return {
        words if len(own) == 1 else f"{words} in {name}": _judge(Block(kind, name, *sizes), options, device, adapter)
        for words, kind in kinds.items()
        for name in own
    }


def _judge(block: Block, options: Options, device: Device, adapter: Adapter) -> str | None:
    """Why no kernel computes `block` in this run."""
    reason = unsupported_reason(block, device, adapter)
    if reason is not None:
        return reason
    training = options.training
    batches = {"per_device_train_batch_size": training.per_device_train_batch_size}
    if options.has_evaluation:
        batches["per_device_eval_batch_size"] = training.per_device_eval_batch_size
    for name, size in batches.items():
        tokens = size * (training.max_length or 1)
        reason = unsupported_reason_tokens(most_tokens(block), tokens)
        if reason is not None:
            return f"{reason}, and {name} {size} x max_length {training.max_length} = {tokens:,}"
    return None

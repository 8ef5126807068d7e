"""What can be told of a run of ``finetune.py`` before text or model is loaded, and of one on a Neuron chip beforehand.

B tokens per block of experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import fnmatch
import os
import tempfile
from pathlib import Path

import torch
from finetune_folder import (
    CONFIG_FILE,
    FROZEN,
    check_quantized,
    check_quantized_backend,
    check_weights,
    conversion_of,
    longest_input,
    without_mark,
)
from finetune_needs import check_needs
from finetune_options import LoraOptions, Options
from finetune_places import check_places, one_line, read_config
from finetune_trainer import check_trainer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.trainer import TRAINER_STATE_NAME

from hf_neuron_moe import NeuronMoETrainingArguments
from hf_neuron_moe.backends import NEURON_BACKENDS, resolve_backend
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import (
    Block,
    Device,
    most_tokens,
    this_device,
    unsupported_reason,
    unsupported_reason_tokens,
)
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.device.kernel_support import NO_TRAINING, BlockGroup, block_groups
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, naming, nearest
from hf_neuron_moe.precision_map import precision_of, precisions_in, spelled

_ANY_SIZE = 1024
"""H and I that every kernel takes, for a model whose sizes are not known yet."""


def check_run(options: Options) -> None:
    """Refuse what cannot work on this machine, before anything is loaded.

    Raises:
        ConfigError: there is no such model, tokenizer or checkpoint to resume from, or the kernels of this machine
            compute a block neither nor may PyTorch, or options contradict each other or the model, or need a package
            or an account that is not here, or the Trainer takes one of them not.
        SourceDamageError: the model's weights are cut off or missing.
        BackendUnavailableError: the backend cannot run here.
    """
    check_resume(options)
    check_trainer(options.training)
    check_needs(options.training)
    if options.training.neuron_patch:
        # A named backend is refused whatever the device.
        resolve_backend(options.training.neuron_backend, torch.device("cpu"))
    check_places(options.model)
    check_weights(options.model.model)
    check_training(options)
    if asks_for_kernels(options.training):
        check_kernels(options, this_device(), Adapter())


def asks_for_kernels(training: NeuronMoETrainingArguments) -> bool:
    """Whether blocks are patched, and for a backend that calls nkilib's kernels."""
    return training.neuron_patch and training.neuron_backend in NEURON_BACKENDS


def check_training(options: Options) -> None:
    """Refuse options that the Trainer, or the model once it is loaded, would refuse; the hub is not asked.

    Raises:
        ConfigError: blocks that are longer than the model's positions; adapters on layers that it does not have;
            weights in the kernels' layout, or adapters to merge, under FSDP; or a base of MX codes that is to be
            trained without adapters.
    """
    config = read_config(options.model, online=False)
    check_length(options, config)
    check_targets(options, config)
    frozen = isinstance(config, bytes) and conversion_of(config) in FROZEN
    if frozen:
        check_quantized(options.lora)
    if not options.training.fsdp and os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return
    training = options.training
    kernel_home = training.neuron_weights == "kernel" or (
        training.neuron_weights == "auto"
        and training.neuron_backend in NEURON_BACKENDS
        and training.neuron_fallback != "torch"  # blocks that PyTorch computes stay in the stock layout
    )
    if training.neuron_patch and not frozen and kernel_home:
        auto = "" if training.neuron_weights == "kernel" else f", which is kernel on backend {training.neuron_backend}"
        raise _bad(
            "neuron_weights",
            "'stock' under FSDP, whose checkpoints go by the stock names and shapes",
            f"{training.neuron_weights!r}{auto}",
            "Set neuron_weights: stock; the numbers are the same.",
        )
    check_merging(options.lora, sharded=True)


def check_length(options: Options, config: bytes | str) -> None:
    """Refuse blocks of text that are longer than the model's positions.

    Args:
        options: of the run.
        config: what ``read_config`` returned.

    Raises:
        ConfigError: they are.
    """
    longest = longest_input(config) if isinstance(config, bytes) else None
    if longest is not None and options.data.block_length > longest:
        expected = f"at most {longest}, the positions of {options.model.model}"
        remedy = f"Set block_length: {longest} or less."
        raise _bad("block_length", expected, str(options.data.block_length), remedy)


def check_targets(options: Options, config: bytes | str) -> None:
    """Refuse adapters none of whose target layers the model has.

    As in peft, a target is a module's whole name or its last parts, and one that is found is enough. Models that
    cannot be built by their configuration alone, and what patching takes away, are left to peft.

    Args:
        options: of the run.
        config: what ``read_config`` returned.

    Raises:
        ConfigError: it has none of them.
    """
    lora = options.lora
    if isinstance(config, str) or not lora.lora_rank or lora.lora_parameters or lora.lora_targets == ["all-linear"]:
        return
    model = _meta_model(options.model.model, config)
    if isinstance(model, str):
        return
    names = [f".{name}" for name, _ in model.named_modules()]
    if any(name.endswith(f".{target}") for name in names for target in lora.lora_targets):
        return
    layers = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D))
    linear = sorted({name.rpartition(".")[2] for name in layers})
    near = next(filter(None, (nearest(target, linear) for target in lora.lora_targets)), "")
    raise _bad(
        "lora_targets",
        f"linear layers of {options.model.model}, or all-linear",
        ", ".join(lora.lora_targets) or "none",
        f"It has {', '.join(linear)}.{near}",
    )


def check_merging(lora: LoraOptions, *, sharded: bool) -> None:
    """Refuse to merge adapters into weights that FSDP shards.

    Raises:
        ConfigError: `lora` asks for it.
    """
    if sharded and lora.lora_merge:
        remedy = "Load the saved adapter in one process and call merge_and_unload() there."
        raise _bad("lora_merge", "false under FSDP", "true", remedy)


def check_resume(options: Options) -> None:
    """Refuse a checkpoint to resume from that is none.

    Raises:
        ConfigError: it is none.
    """
    wish = options.training.resume_from_checkpoint
    if not wish or wish is True or wish in ("auto", "true", "True"):
        return
    folder = Path(wish)
    if (folder / TRAINER_STATE_NAME).is_file():
        return
    got = f"{wish!r} without one" if folder.is_dir() else f"{wish!r}, which does not exist"
    raise _bad(
        "resume_from_checkpoint",
        f"a checkpoint folder (with {TRAINER_STATE_NAME}), true or auto",
        got,
        "Name a checkpoint-N folder; auto takes the newest of output_dir, or starts anew.",
    )


def check_kernels(options: Options, device: Device, adapter: Adapter, *, online: bool = True) -> list[str]:
    """Refuse a run whose blocks the kernels cannot compute, where PyTorch may not either.

    Args:
        options: of a run that patches for the Neuron backend.
        device: the chip that it is for.
        adapter: the kernels there.
        online: whether the hub may be asked for the model's configuration.

    Returns:
        What was found, a line each.

    Raises:
        ConfigError: blocks have no kernel and ``neuron_fallback`` is ``"refuse"``.
    """
    training = options.training
    config = read_config(options.model, online=online)
    converted = conversion_of(config) if isinstance(config, bytes) else None
    if converted in FROZEN:
        return _check_codes(options, converted)
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
    of_lnc = device.lnc == 1 and any("LNC" in why for why in without.values() if why)
    if without and not may_fall_back:
        raise _bad(
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
    model = _meta_model(name, config)
    if isinstance(model, str):
        return [], f"the blocks of {name} cannot be judged before it is loaded: {model}"
    return [group for group in block_groups(model) if group.reason is None], ""


def _meta_model(name: str, config: bytes) -> PreTrainedModel | str:
    """The model of a configuration, a conversion's as its source's was, without weights; or why it cannot be built."""
    if conversion_of(config) is not None:
        config = without_mark(config)
    with tempfile.TemporaryDirectory(prefix="hf-neuron-moe-") as folder:
        (Path(folder) / CONFIG_FILE).write_bytes(config)
        try:
            with naming("finetune"):
                return build_meta_model(Path(folder))
        except NeuronMoEError as error:
            return one_line(error).replace(folder, name)


def _check_codes(options: Options, converted: str) -> list[str]:
    """Refuse to train through MX codes where PyTorch may not: no kernel does that."""
    check_quantized_backend(options.training.neuron_backend, options.training.neuron_fallback)
    state = f"{options.model.model} is a conversion in {converted}; {NO_TRAINING}"
    return [f"frozen MX blocks: in training PyTorch computes them on the device: {state}"]


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
    batches = {"per_device_train_batch_size": options.training.per_device_train_batch_size}
    if options.data.eval_files or options.data.eval_split or options.data.eval_share:
        batches["per_device_eval_batch_size"] = options.training.per_device_eval_batch_size
    for name, size in batches.items():
        tokens = size * options.data.block_length
        reason = unsupported_reason_tokens(most_tokens(block), tokens)
        if reason is not None:
            return f"{reason}, and {name} {size} x block_length {options.data.block_length} = {tokens:,}"
    return None


def _bad(argument: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy).named("finetune")

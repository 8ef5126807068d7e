"""The model of ``finetune.py``: load, patch, attach adapters, save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from finetune_folder import check_quantized, check_quantized_backend
from finetune_options import LoraOptions, ModelOptions
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_neuron_moe import NeuronMoETrainingArguments, PatchReport, patch_model, set_backend, unpatch_model
from hf_neuron_moe.backends import resolve_backend
from hf_neuron_moe.errors import ConfigError, NeuronMoEError
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.training.prepare import is_patched, refuse_unsavable_adapters


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """Return the tokenizer.

    Raises:
        ConfigError: there is none, as where the model's name is misspelt.
    """
    name = options.tokenizer or options.model
    revision = "main" if options.tokenizer else options.revision
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ConfigError.about(
            "tokenizer" if options.tokenizer else "model",
            "a folder or hub id with a tokenizer",
            f"{name!r}: {str(error).strip().splitlines()[0].rstrip('.')}",
            "Correct the name, or name another with --tokenizer.",
        ).named("finetune") from error


def load_model(options: ModelOptions) -> PreTrainedModel:
    """Return the model as ``from_pretrained`` loads it; converted checkpoints come with their patched or MX blocks.

    Raises:
        ConfigError: it cannot be loaded: no weights, an unknown family, or an attention that is not there.
    """
    extra: dict[str, Any] = {}
    if options.attn_implementation:
        extra["attn_implementation"] = options.attn_implementation
    if options.layout:
        extra["distributed_config"] = options.layout
    try:
        return AutoModelForCausalLM.from_pretrained(
            options.model, revision=options.revision, dtype=options.dtype, **extra
        )
    except NeuronMoEError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        if options.layout:
            raise ConfigError.about(
                "the layout",
                "one that transformers can load on the processes there are",
                f"{options.layout} ({' '.join(str(error).split())[:300].rstrip('.')})",
                "Start as many processes with torchrun as the product of tp_size, fsdp_size and dp_replicate_size.",
            ).named("finetune") from error
        if isinstance(error, RuntimeError):
            raise
        raise ConfigError.about(
            "model",
            "a causal language model that transformers can load",
            f"{options.model!r}: {' '.join(str(error).split()).rstrip('.')}",
            "Correct model or attn_implementation, or download the weights first.",
        ).named("finetune") from error


def has_frozen_base(model: nn.Module) -> bool:
    """Whether blocks of `model` hold MX codes instead of trainable weights."""
    return any(isinstance(module, QuantizedBlock) for module in model.modules())


def patch(model: PreTrainedModel, training: NeuronMoETrainingArguments, lora: LoraOptions) -> PatchReport | None:
    """Patch `model` as `training` says, before adapters or an optimizer exist.

    A conversion in bf16 comes patched; it is patched anew, as `training` says. The frozen blocks of one in MX get the
    backend that `training` names.

    Returns:
        The report; None where there is nothing to do: ``neuron_patch`` is false, or the base is frozen in MX, whose
        blocks compute with the kernels' numbers already. The Trainer is then told so, too.

    Raises:
        ConfigError: a frozen base without adapters, with adapters that are to be merged into it, or on a backend whose
            kernels do not train through it and may not be stood in for.
        PatchError: as :func:`hf_neuron_moe.patch_model`.
    """
    if has_frozen_base(model):
        check_quantized(lora)
        if training.neuron_patch:
            _choose_backend(model, training)
        training.neuron_patch = False
        return None
    if not training.neuron_patch:
        return None
    if is_patched(model):
        unpatch_model(model)
    return patch_model(
        model,
        training.neuron_config(),
        include=training.neuron_include,
        exclude=training.neuron_exclude,
        strict=training.neuron_strict,
    )


def _choose_backend(model: PreTrainedModel, training: NeuronMoETrainingArguments) -> None:
    """Let the run's backend compute the frozen blocks; ``auto`` is decided now, as when patching."""
    backend = resolve_backend(training.neuron_backend, model.device)
    check_quantized_backend(backend, training.neuron_fallback)
    set_backend(model, backend, fallback=training.neuron_fallback)


def describe_unpatched(model: nn.Module) -> str:
    """Say what a model is that :func:`patch` had nothing to patch in."""
    backends = sorted(
        {module.neuron_config.backend for module in model.modules() if isinstance(module, QuantizedBlock)}
    )
    if not backends:
        return "nothing patched: neuron_patch is off"
    kernels = "" if backends == ["torch"] else "; its kernels compute inference where they can, PyTorch all training"
    return f"nothing patched: the base is frozen MX, backend {', '.join(backends)}{kernels}"


def with_adapters(model: PreTrainedModel, options: LoraOptions) -> PreTrainedModel | PeftModel:
    """Return `model` wrapped by peft with LoRA as `options` say, or as it is for rank 0.

    Raises:
        ConfigError: a target is not there.
        UnsupportedModelError: the adapters could not be saved.
    """
    if not options.lora_rank:
        return model
    targets: Any = options.lora_targets
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        target_parameters=options.lora_parameters or None,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft reads it under its old name, about which transformers 5.23 and later warn; users can do nothing.
            warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError.about(
            "lora_targets, lora_parameters",
            "names of the model's linear layers and parameters",
            f"what peft refuses: {str(error).rstrip('.')}",
            "Blocks in kernel layout and frozen MX blocks have no layers inside: name others.",
        ).named("finetune") from error
    refuse_unsavable_adapters(adapted)
    return adapted


def save_merged(model: PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Merge the adapters into the weights and write the whole model, in stock layout, to `folder`."""
    merged = model.merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""The model of a run: load it, patch it, make adapters for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_neuron_moe.backends import resolve_backend, trains_quantized
from hf_neuron_moe.errors import NeuronMoEError, nearest
from hf_neuron_moe.finetune.early_checks import check_quantized, check_quantized_backend
from hf_neuron_moe.finetune.model_files import REFUSALS
from hf_neuron_moe.finetune.train_options import LoraOptions, ModelOptions, bad, one_line
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching.api import patch_model, unpatch_model
from hf_neuron_moe.patching.report import PatchReport
from hf_neuron_moe.patching.update import set_backend
from hf_neuron_moe.training.prepare import is_patched


def load_tokenizer(options: ModelOptions, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with the chat template of a Jinja file or of another tokenizer where one is named."""
    argument, revision = ("tokenizer", "main") if options.tokenizer else ("model", options.revision)
    tokenizer = _tokenizer(argument, options.tokenizer or options.model, revision)
    if tokenizer.eos_token is None:
        raise bad(argument, "one whose tokenizer has an end-of-text token", "one without", "Set its eos_token.")
    if chat_template and chat_template.endswith((".jinja", ".j2")):
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            got = f"{chat_template}: {one_line(error)}"
            raise bad("chat_template_path", "text in UTF-8", got, "Convert it to UTF-8.") from error
    elif chat_template:  # TRL adds its tokens as well
        tokenizer.chat_template = _tokenizer("chat_template_path", chat_template, "main").chat_template
    return tokenizer


def check_tokens(training: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse tokens that the tokenizer does not have."""
    for name in ("eos_token", "pad_token"):
        token = getattr(training, name, None)
        if token and token not in tokenizer.get_vocab():
            near = nearest(token, tokenizer.all_special_tokens)
            raise bad(name, "a token of the tokenizer", repr(token), f"Correct it, or leave it out.{near}")


def _tokenizer(argument: str, name: str, revision: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except REFUSALS as error:
        got = f"{name!r}: {one_line(error)}"
        other = "a .jinja file" if argument == "chat_template_path" else "another tokenizer: --tokenizer"
        fix = f"Correct the name, or name {other}."
        raise bad(argument, "a folder or hub id with a tokenizer", got, fix) from error


def load_model(options: ModelOptions) -> PreTrainedModel:
    """Return the model as ``from_pretrained`` loads it; converted checkpoints come with their patched or MX blocks."""
    extra: dict[str, Any] = {}
    if options.attn_implementation:
        extra["attn_implementation"] = options.attn_implementation
    if options.layout:
        extra["distributed_config"] = options.layout
    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, revision=options.revision, dtype=options.dtype, **extra
        )
        if model.generation_config is not None:
            model.generation_config.validate(strict=True)  # else saving the model would raise, after the training
        return model
    except NeuronMoEError:
        raise
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        if options.layout:
            sizes = " x ".join(f"{key} {size}" for key, size in options.layout.items())
            fix = "Start as many processes with torchrun as the product of tp_size, fsdp_size and dp_replicate_size."
            expected, got = "a layout that fits the processes there are", f"{sizes} ({one_line(error)[:300]})"
            raise bad(", ".join(options.layout), expected, got, fix) from error
        fix = "Correct model or attn_implementation, or download the weights first."
        got = f"{options.model!r}: {one_line(error)}"
        argument = "attn_implementation" if options.attn_implementation else "model"
        raise bad(argument, "what transformers can load a causal language model with", got, fix) from error


def patch(model: PreTrainedModel, training: Any, lora: LoraOptions) -> PatchReport | None:
    """Patch `model` as `training` says, before adapters or an optimizer exist.

    A conversion in bf16 comes patched; it is patched anew, as `training` says. The frozen blocks of one in MX get the
    backend that `training` names.

    Returns:
        The report; None where there is nothing to do: ``neuron_patch`` is false, or the base is frozen in MX, whose
        blocks compute with the kernels' values already. The Trainer is then told so, too.
    """
    if any(isinstance(module, QuantizedBlock) for module in model.modules()):
        check_quantized(lora)
        if training.neuron_patch:
            backend = resolve_backend(training.neuron_backend, model.device)  # decided now, as when patching
            check_quantized_backend(backend, training.neuron_fallback)
            set_backend(model, backend, fallback=training.neuron_fallback)
        training.neuron_patch = False
        return None
    if not training.neuron_patch:
        return None
    if is_patched(model):
        unpatch_model(model)
    which = {name: getattr(training, f"neuron_{name}") for name in ("include", "exclude", "strict")}
    return patch_model(model, training.neuron_config(), **which)


def describe_unpatched(model: nn.Module) -> str:
    """Say what a model is that :func:`patch` had nothing to patch in."""
    backends = sorted(
        {module.neuron_config.backend for module in model.modules() if isinstance(module, QuantizedBlock)}
    )
    if not backends:
        return "nothing patched: neuron_patch is off"
    kernels = (
        ""
        if all(map(trains_quantized, backends))
        else "; its kernels compute inference where they can, PyTorch all training"
    )
    return f"nothing patched: the base is frozen MX, backend {', '.join(backends)}{kernels}"


def adapters(options: LoraOptions, model: nn.Module) -> LoraConfig | None:
    """Return peft's configuration of the adapters on a patched model; None for rank 0."""
    if not options.lora_rank:
        return None
    names = [f".{name}" for name, _ in model.named_parameters()]
    for wanted in options.lora_parameters:
        if not any(name.endswith(f".{wanted}") for name in names):
            known = sorted({".".join(name.split(".")[-3:]) for name in names if "mlp" in name})
            fix = f"It has, for one, {', '.join(known[:3])}.{nearest(wanted, known)}" if known else "Name others."
            raise bad("lora_parameters", "names of the patched model's parameters", repr(wanted), fix)
    targets: Any = options.lora_targets
    alpha: Any = options.lora_alpha
    return LoraConfig(
        r=options.lora_rank,
        lora_alpha=alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        target_parameters=options.lora_parameters or None,
        task_type="CAUSAL_LM",
    )


def save_merged(model: PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Merge the adapters into the weights and write the whole model, in stock layout, to `folder`."""
    model.merge_and_unload().save_pretrained(folder)
    tokenizer.save_pretrained(folder)

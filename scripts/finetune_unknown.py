"""What to do about an option that ``finetune.py`` does not have: TRL's have another name here, or none."""

from __future__ import annotations

from hf_neuron_moe.errors import nearest

_SFT = "is an option of TRL's SFTTrainer. Remove it, or train with that: docs/training.md, The Trainer."
_NAMES = {
    "model_name_or_path": "model",
    "model_revision": "revision",
    "dataset_name": "dataset",
    "dataset_text_field": "text_column",
    "max_length": "block_length",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "lora_target_parameters": "lora_parameters",
}
"""TRL's names, and those of the options here that mean the same."""

_OTHERS = {
    "packing": "is an option of TRL. Remove it: text is always packed here, into blocks of block_length tokens.",
    "use_peft": "is an option of TRL. Remove it: lora_rank above 0 trains adapters.",
    "assistant_only_loss": _SFT,
    "chat_template_path": _SFT,
    "completion_only_loss": _SFT,
    "dataset_kwargs": _SFT,
    "eos_token": _SFT,
    "eval_packing": _SFT,
    "load_in_4bit": "is an option of TRL. Remove it: blocks with quantized weights are not patched.",
    "load_in_8bit": "is an option of TRL. Remove it: blocks with quantized weights are not patched.",
    "loss_type": _SFT,
    "padding_free": _SFT,
}
"""What TRL has and ``finetune.py`` does not do, or does always."""


def remedy_for(name: str, known: list[str]) -> str:
    """Return what to do about the unknown option `name`: what it is elsewhere, or the nearest one of `known`."""
    if name in _NAMES:
        return f"TRL's {name} is {_NAMES[name]} here."
    if name in _OTHERS:
        return f"{name} {_OTHERS[name]}"
    return f"Remove or rename it.{nearest(name, known)}"

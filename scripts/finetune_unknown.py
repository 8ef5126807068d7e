"""What to do about an option that ``finetune.py`` does not have: TRL's and peft's have another name here, or none."""

from __future__ import annotations

from hf_neuron_moe.errors import nearest

_SFT = "is an option of TRL's SFTTrainer. Remove it, or train with that: docs/training.md, The Trainer."
_PACKING = "is an option of TRL. Remove it: text is always packed here, into blocks of block_length tokens."
_NAMES = {
    "model_name_or_path": "model",
    "model_revision": "revision",
    "dataset_name": "dataset",
    "dataset_text_field": "text_column",
    "dataset_train_split": "train_split",
    "dataset_test_split": "eval_split",
    "max_length": "block_length",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "lora_target_parameters": "lora_parameters",
}
"""TRL's names, and those of the options here that mean the same."""

_OLD_NAMES = {"max_seq_length": "block_length"}
"""The same of earlier releases of TRL."""

_PEFT_NAMES = {
    "r": "lora_rank",
    "target_modules": "lora_targets",
    "target_parameters": "lora_parameters",
}
"""The same of peft's LoraConfig."""

_OTHERS = {
    "packing": _PACKING,
    "packing_strategy": _PACKING,
    "use_peft": "is an option of TRL. Remove it: lora_rank above 0 trains adapters.",
    "activation_offloading": _SFT,
    "assistant_only_loss": _SFT,
    "chat_template_path": _SFT,
    "completion_only_loss": _SFT,
    "dataset_kwargs": _SFT,
    "eos_token": _SFT,
    "eval_packing": _SFT,
    "load_in_4bit": "is an option of TRL. Remove it: blocks with quantized weights are not patched.",
    "load_in_8bit": "is an option of TRL. Remove it: blocks with quantized weights are not patched.",
    "loss_type": _SFT,
    "pad_token": _SFT,
    "padding_free": _SFT,
}
"""What TRL has and ``finetune.py`` does not do, or does always."""


def remedy_for(name: str, known: list[str]) -> str:
    """Return what to do about the unknown option `name`: what it is elsewhere, or the nearest one of `known`."""
    for names, source in ((_NAMES, "TRL"), (_OLD_NAMES, "TRL"), (_PEFT_NAMES, "peft")):
        if name in names:
            return f"{source}'s {name} is {names[name]} here."
    if name in _OTHERS:
        return f"{name} {_OTHERS[name]}"
    return f"Remove or rename it.{nearest(name, known)}"

"""Checkpoints to resume from: that there is one, and that it is of this run."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.training_args import OptimizerNames
from transformers.utils import ADAPTER_CONFIG_NAME

from hf_neuron_moe.errors import NeuronMoEWarning
from hf_neuron_moe.finetune.model_files import content_of, read_config
from hf_neuron_moe.finetune.train_options import Options, bad
from hf_neuron_moe.training.checkpoint_files import find_last_complete
from hf_neuron_moe.training.run_files import FOLDER, RUN_FILE

FUSED = dict.fromkeys(("w1", "w3", "gate_proj", "up_proj"), "gate_up_proj") | dict.fromkeys(
    ("w2", "down_proj"), "down_proj"
)
"""Layers of experts, and the parameter that transformers stacks them in."""

SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts", "num_experts")
"""What models differ in; the vocabulary may have grown."""


def last_complete(folder: str) -> Path | None:
    """Return the newest complete checkpoint, without the warnings about others, which ``train`` gives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuronMoEWarning)
        return find_last_complete(folder)


def check_resumed(options: Options, config: bytes | str) -> None:
    """Refuse a checkpoint of another model, of other adapters or another optimizer, whose states do not fit."""
    wish = options.training.resume_from_checkpoint
    folder = last_complete(options.training.output_dir) if wish in (True, "true", "True", "auto") else Path(wish or "")
    if not wish or folder is None:
        return
    adapter = content_of(read_config(folder, ADAPTER_CONFIG_NAME))
    was: dict[str, Any] = {"lora_rank": adapter.get("r", 0)}
    now: dict[str, Any] = {"lora_rank": options.lora.lora_rank}
    if adapter:
        modules, made = (set(adapter.get(f"target_{kind}") or []) for kind in ("modules", "parameters"))
        every, parameters = options.lora.lora_targets == ["all-linear"], set(options.lora.lora_parameters)
        targets = modules if every else set(options.lora.lora_targets)
        # peft makes parameters of targets that are parts of a fused weight, and for all-linear what it finds.
        gone = {target for target in targets - modules if FUSED.get(target) in {name.split(".")[-1] for name in made}}
        fused, targets = {FUSED[target] for target in gone}, targets - gone
        made -= {name for name in made - parameters if every or name.split(".")[-1] in fused}
        alpha = adapter.get("lora_alpha", options.lora.lora_alpha)
        was |= {"lora_alpha": alpha, "lora_parameters": sorted(made), "lora_targets": sorted(modules)}
        now["lora_alpha"] = options.lora.lora_alpha
        now |= {"lora_parameters": sorted(parameters), "lora_targets": sorted(targets)}
    else:
        was |= {name: value for name, value in content_of(read_config(folder)).items() if name in SHAPE}
        now |= {name: value for name, value in content_of(config).items() if name in SHAPE}
    kind = _optimizer_of(options.training, recorded(folder.parent).get("training", {}).get("optim"))
    if kind is not None:
        was["optim"], now["optim"] = kind, _optimizer_of(options.training, options.training.optim)
    found = [f"{name} {was[name]} and {now[name]}" for name in was if name in now and was[name] != now[name]]
    if found:
        expected, got = "a checkpoint of this run's model, adapters and optimizer", f"{folder}: {found[0]} here"
        raise bad("resume_from_checkpoint", expected, got, "Name another output_dir, or begin without it.")


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the parts of the record of the last run in an output folder; none where there is no such record."""
    parts = content_of(read_config(folder / FOLDER, RUN_FILE))
    return {name: part for name, part in parts.items() if isinstance(part, dict)}


def base_of(folder: Path) -> str:
    """Return what the model of the last run in an output folder was loaded from; empty where it is not recorded."""
    return str(content_of(read_config(folder / FOLDER, RUN_FILE)).get("model") or "")


def _optimizer_of(training: Any, name: str | None) -> str | None:
    """Return the class of the optimizer of a name; None where it is not known or cannot be made here."""
    other = copy.copy(training)
    try:
        other.optim = OptimizerNames(name)
        return str(Trainer.get_optimizer_cls_and_kwargs(other)[0].__name__)
    except (ImportError, ValueError):
        return None


def check_resume(options: Options) -> None:
    """Refuse a checkpoint to resume from that is none."""
    wish, out = options.training.resume_from_checkpoint, options.training.output_dir
    if wish in (True, "true", "True"):
        if last_complete(out) is None:
            fix = "Begin without it, or name a checkpoint that the stock Trainer wrote."
            raise bad("resume_from_checkpoint", f"used with a complete checkpoint in {out}", "none", fix)
        return
    if not wish or wish == "auto" or os.path.isfile(Path(wish) / TRAINER_STATE_NAME):
        return
    got = f"{wish!r} without one" if os.path.isdir(wish) else f"{wish!r}, which does not exist"
    expected = f"a checkpoint folder (with {TRAINER_STATE_NAME}), true or auto"
    fix = "Name a checkpoint-N folder; auto takes the newest of output_dir, or starts anew."
    raise bad("resume_from_checkpoint", expected, got, fix)

"""What a run of ``train`` can be asked for: a model, data, adapters, and the arguments of TRL and of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trl import DPOConfig, SFTConfig

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.training.arguments import NeuronMoEArguments

DTYPES = ("auto", "float32", "bfloat16")


def _option(default: object, meaning: str) -> Any:
    return field(default=default, metadata=_help(meaning))


def _help(meaning: str) -> dict[str, str]:
    return {"help": meaning}


@dataclass
class ModelOptions:
    """Which model, and how it is loaded."""

    _argument_group_name = "model"

    model: str = _option("", "Local checkpoint folder (converted ones too) or hub id. Needed.")
    revision: str = _option("main", "Branch, tag or commit of a hub id.")
    tokenizer: str = _option("", "Folder or hub id of the tokenizer, if not the model's own.")
    dtype: str = _option("auto", "Of the parameters: auto (as in the checkpoint), float32 or bfloat16.")
    attn_implementation: str = _option("", "As in from_pretrained; empty for its default.")
    tp_size: int = _option(1, "Tensor parallelism, as in transformers' DistributedConfig.")
    ep_size: int = _option(1, "Expert parallelism, likewise.")
    fsdp_size: int = _option(1, "FSDP2, likewise.")
    dp_replicate_size: int = _option(1, "Replicas of that, likewise.")

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the layout; nothing where the model is loaded whole."""
        sizes = {name: getattr(self, name) for name in ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")}
        return sizes if any(size != 1 for size in sizes.values()) else {}


@dataclass
class DataOptions:
    """Which data. The columns tell its kind: chat, Alpaca, prompt and completion, text, or preferences."""

    _argument_group_name = "data"

    method: str = _option("sft", "sft (supervised fine-tuning) or dpo (preferences: columns chosen and rejected).")
    train_files: list[str] = field(
        default_factory=list,
        metadata=_help("Local .jsonl, .json, .csv, .parquet or .txt files (one kind; globs work)."),
    )
    eval_files: list[str] = field(default_factory=list, metadata=_help("The same, for evaluation."))
    dataset: str = _option("", "Hub name of a dataset, instead of train_files.")
    dataset_config: str = _option("", "Its configuration, where it has several.")
    train_split: str = _option("train", "Its split to train on.")
    eval_split: str = _option("", "Its split to evaluate on.")
    eval_share: float = _option(0.0, "Share of the rows, the last ones, to evaluate on where no evaluation data is.")
    max_train_samples: int = _option(0, "Use only the first N rows, packed ones where rows are packed; 0 for all.")
    max_eval_samples: int = _option(0, "Evaluate on only the first N of them; 0 for all.")


@dataclass
class LoraOptions:
    """Adapters instead of full fine-tuning."""

    _argument_group_name = "LoRA"

    lora_rank: int = _option(0, "Rank of the adapters; 0 trains the whole model.")
    lora_alpha: float = _option(16.0, "Adapters are scaled by alpha / rank.")
    lora_dropout: float = _option(0.0, "Not with lora_parameters: peft has none there.")
    lora_targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"],
        metadata=_help("Names of linear layers; the one word all-linear takes every one."),
    )
    lora_parameters: list[str] = field(
        default_factory=list,
        metadata=_help("Names of parameters, such as mlp.experts.gate_up_proj mlp.experts.down_proj."),
    )
    lora_merge: bool = _option(False, "Also write the model with merged adapters, to OUTPUT_DIR/merged.")


@dataclass
class SFTArguments(NeuronMoEArguments, SFTConfig):
    """TRL's ``SFTConfig`` with the neuron_* options."""


@dataclass
class DPOArguments(NeuronMoEArguments, DPOConfig):
    """TRL's ``DPOConfig`` with the neuron_* options."""


METHODS: dict[str, type[SFTArguments] | type[DPOArguments]] = {"sft": SFTArguments, "dpo": DPOArguments}
OWN = (ModelOptions, DataOptions, LoraOptions)


@dataclass(frozen=True)
class Options:
    """Everything a run needs; ``places`` says where each option was given: ``mine.yaml, line 3``."""

    model: ModelOptions
    data: DataOptions
    lora: LoraOptions
    training: Any  # SFTArguments or DPOArguments
    places: Mapping[str, str]

    @property
    def has_evaluation(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.data.eval_files or self.data.eval_split or self.data.eval_share)


def known_options(method: str) -> list[str]:
    """Return the names of all options of a method."""
    return [found.name for kind in (*OWN, METHODS[method]) for found in fields(kind) if found.init]


def bad(argument: str, expected: str, got: object, fix: str) -> ConfigError:
    """Return the error about an option; the file and line, or the command, are put in front of it later."""
    return ConfigError.about(argument, expected, got, fix).named("train")


def one_line(error: BaseException) -> str:
    """Return what an error says, without line breaks and the full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__

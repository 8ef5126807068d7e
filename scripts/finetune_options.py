"""Options of ``finetune.py``: a YAML file of ``configs/``, overridden by the command line.

Both name the same fields: those of the three classes below and of ``NeuronMoETrainingArguments`` (which has all of
``transformers.TrainingArguments``). A name that none of them has is refused with the nearest one that exists.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from finetune_unknown import remedy_for
from transformers import HfArgumentParser
from transformers.integrations import is_deepspeed_available

from hf_neuron_moe import NeuronMoETrainingArguments
from hf_neuron_moe.backends import resolve_backend
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, nearest

DESCRIPTION = """Fine-tune a causal language model, dense or mixture of experts, whole or with LoRA, on text.

The model's SwiGLU blocks are patched as the neuron_* options say; the final model (or adapter) has the stock layout.

  python scripts/finetune.py configs/smollm2-135m.yaml
  python scripts/finetune.py configs/smollm2-135m.yaml --max_steps 10 --neuron_precision mxfp8
  python scripts/finetune.py configs/mixtral-8x7b.yaml --lora_rank 16 --train_files mine.jsonl --output_dir out
  accelerate launch --config_file configs/accelerate/fsdp2-cpu.yaml scripts/finetune.py configs/tiny-mixtral.yaml

Any option may stand in the YAML file or on the command line, which wins. Besides those listed here, every field of
transformers.TrainingArguments is one; --help-all lists them too."""

COMMON = (
    *("output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "bf16"),
    *("torch_compile", "torch_compile_backend", "logging_steps", "eval_strategy", "eval_steps", "save_strategy"),
    *("gradient_checkpointing", "activation_checkpointing"),
    *("save_steps", "resume_from_checkpoint", "report_to", "seed", "use_cpu"),
)
"""Fields of TrainingArguments that the short help shows."""

_RENAMED = {
    old: new
    for old, new in (
        ("gradient_checkpointing", "activation_checkpointing"),
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    )
    if new in {f.name for f in dataclasses.fields(NeuronMoETrainingArguments)}
}
"""Names that transformers 5.23 and later warn about; earlier ones know no others, so files of options have these."""

_PLACE = "finetune"
_ABSENT: Any = object()


@dataclass
class ModelOptions:
    """Which model."""

    _argument_group_name = "model"

    model: str = field(default="", metadata={"help": "Local checkpoint folder (converted ones too) or hub id. Needed."})
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a hub id."})
    tokenizer: str = field(default="", metadata={"help": "Folder or hub id of the tokenizer, if not the model's own."})
    dtype: str = field(
        default="auto", metadata={"help": "Of the parameters: auto (as in the checkpoint), float32 or bfloat16."}
    )
    attn_implementation: str = field(default="", metadata={"help": "As in from_pretrained; empty for its default."})
    tp_size: int = field(default=1, metadata={"help": "Tensor parallelism, as in transformers' DistributedConfig."})
    ep_size: int = field(default=1, metadata={"help": "Expert parallelism, likewise."})
    fsdp_size: int = field(default=1, metadata={"help": "FSDP2, likewise."})
    dp_replicate_size: int = field(default=1, metadata={"help": "Replicas of that, likewise."})

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the layout; nothing where the model is loaded whole."""
        names = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
        sizes = {name: getattr(self, name) for name in names}
        return sizes if any(size != 1 for size in sizes.values()) else {}


@dataclass
class DataOptions:
    """Which text. Documents are tokenized, joined with end-of-text tokens between them, and cut into equal blocks."""

    _argument_group_name = "text"

    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Local .jsonl, .json, .txt or .parquet files (one kind; globs work)."}
    )
    eval_files: list[str] = field(default_factory=list, metadata={"help": "The same, for evaluation."})
    dataset: str = field(default="", metadata={"help": "Hub name of a dataset, instead of train_files."})
    dataset_config: str = field(default="", metadata={"help": "Its configuration, where it has several."})
    train_split: str = field(default="train", metadata={"help": "Its split to train on."})
    eval_split: str = field(default="", metadata={"help": "Its split to evaluate on."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    block_length: int = field(default=512, metadata={"help": "Tokens per training example."})
    eval_share: float = field(
        default=0.0,
        metadata={"help": "Share of the blocks, the last ones, to evaluate on where no evaluation text is named."},
    )
    max_train_blocks: int = field(default=0, metadata={"help": "Use only the first N blocks; 0 for all."})
    max_eval_blocks: int = field(default=0, metadata={"help": "Evaluate on only the first N blocks; 0 for all."})


@dataclass
class LoraOptions:
    """Adapters instead of full fine-tuning."""

    _argument_group_name = "LoRA"

    lora_rank: int = field(default=0, metadata={"help": "Rank of the adapters; 0 trains the whole model."})
    lora_alpha: float = field(default=16.0, metadata={"help": "Adapters are scaled by alpha / rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Not with lora_parameters: peft has none there."})
    lora_targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"],
        metadata={"help": "Names of linear layers; the one word all-linear takes every one."},
    )
    lora_parameters: list[str] = field(
        default_factory=list,
        metadata={"help": "Names of parameters, such as mlp.experts.gate_up_proj mlp.experts.down_proj."},
    )
    lora_merge: bool = field(
        default=False, metadata={"help": "Also write the model with merged adapters, to OUTPUT_DIR/merged."}
    )


@dataclass(frozen=True)
class Options:
    """Everything a run needs."""

    model: ModelOptions
    data: DataOptions
    lora: LoraOptions
    training: NeuronMoETrainingArguments


class _Parser(HfArgumentParser):
    """The parser of all fields; ``short`` leaves rarely used ones out of its help."""

    def __init__(self, short: bool) -> None:
        kinds = [ModelOptions, DataOptions, LoraOptions, NeuronMoETrainingArguments]
        super().__init__(
            kinds,
            prog="finetune.py",
            usage="%(prog)s [CONFIG.yaml] [--option value ...]",
            description=DESCRIPTION,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        self.add_argument("config", nargs="?", help="YAML file of options")
        self.add_argument("--help-all", action="help", help="show every option and exit")
        self._action_groups.sort(key=lambda group: group.title == "options")  # the many of TrainingArguments last
        own = {f.name for kind in kinds[:3] for f in dataclasses.fields(kind)}
        for action in self._actions:
            shown = action.dest in own or action.dest in COMMON or action.dest.startswith("neuron_")
            negated = action.nargs == 0 and action.option_strings[0].startswith("--no_")  # `--x false` says the same
            if negated or (short and not shown and action.dest not in ("help", "help_all", "config")):
                action.help = argparse.SUPPRESS


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, one spelling per option, and keeps the description's lines."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{action.option_strings[0]} {'VALUE ...' if action.nargs == '+' else 'VALUE'}"


def parse(argv: Sequence[str]) -> Options:
    """Return the options of ``[CONFIG.yaml] [--option value ...]``.

    Raises:
        ConfigError: an option does not exist, has a value of the wrong kind, or a needed one is missing.
        BackendUnavailableError: there is no device that the options fit, and the backend cannot run here.
    """
    parser = _Parser(short="--help-all" not in argv)
    # Whatever still is _ABSENT afterwards was not on the command line, so that the file's value or the default counts.
    given = argparse.Namespace(**{action.dest: _ABSENT for action in parser._actions})
    given, unknown = parser.parse_known_args(list(argv), given)
    known = known_options()
    for word in unknown:
        raise ConfigError.about(
            "option",
            "one that --help-all lists",
            word,
            remedy_for(word.lstrip("-").replace("-", "_").partition("=")[0], known),
        ).named(_PLACE)
    typed = {key: value for key, value in vars(given).items() if value is not _ABSENT}
    config = typed.pop("config", None)
    values = {**_renamed(read_yaml(config, parser) if config else {}), **_renamed(typed)}
    if values.get("deepspeed") and not is_deepspeed_available():
        remedy = "Install it (`pip install deepspeed`), or shard with FSDP2: configs/accelerate/fsdp2-cpu.yaml."
        expected = "unset where the package deepspeed is not installed"
        raise _bad(_PLACE, "deepspeed", expected, repr(values["deepspeed"]), remedy)
    try:
        options = Options(*parser.parse_dict(values))
    except NeuronMoEError:
        raise
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:  # what TrainingArguments refuses
        remedy, got = "Correct them.", " ".join(str(error).split()).rstrip(".")
        if "use_cpu" in str(error):  # bf16 without a device that has it
            _check_backend(values)
            remedy = (
                "To rehearse the run on a CPU add --use_cpu true, and --neuron_backend torch where it names another."
            )
        raise _bad(_PLACE, "training options", "ones that TrainingArguments takes", got, remedy) from error
    return checked(options)


def _check_backend(values: Mapping[str, Any]) -> None:
    """Refuse a backend that is not here, which says more than that a device is missing."""
    if values.get("neuron_patch", True) is not False:
        resolve_backend(str(values.get("neuron_backend", "auto")), torch.device("cpu"))


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options under the names that the installed transformers has for them; a new name beside its old one wins."""
    current = {_RENAMED[key]: value for key, value in values.items() if key in _RENAMED}
    return current | {key: value for key, value in values.items() if key not in _RENAMED}


def known_options() -> list[str]:
    """Return the names of all options."""
    kinds = (ModelOptions, DataOptions, LoraOptions, NeuronMoETrainingArguments)
    return [f.name for kind in kinds for f in dataclasses.fields(kind) if f.init]


def read_yaml(path: str | Path, parser: argparse.ArgumentParser | None = None) -> dict[str, Any]:
    """Return the options in a YAML file, their values converted to their fields' types.

    Raises:
        ConfigError: the file is missing or no flat mapping, a key is unknown, or a value is of the wrong kind.
    """
    file = Path(path)
    if not file.is_file():
        raise _bad(f"{file}", "file", "an existing YAML file of options", "nothing", "See configs/ for examples.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise _bad(f"{file}", "content", "YAML", " ".join(str(error).split()), "Mend the file.") from error
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise _bad(f"{file}", "content", "a mapping of options", f"a {kind}", "Write lines of `option: value`.")
    known = known_options()
    for key in content:
        if key not in known:
            remedy = remedy_for(str(key), known)
            raise _bad(f"{file}", "key", "an option that --help-all lists", repr(key), remedy)
    actions = {action.dest: action for action in reversed((parser or _Parser(short=False))._actions)}
    return {key: _converted(str(file), actions[key], value) for key, value in content.items()}


def _converted(where: str, action: argparse.Action, value: Any) -> Any:
    """Return a YAML value as its field's type; YAML 1.1 reads 1e-4 as text, for one."""
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, list) or action.nargs == "+":
        return [_converted_scalar(where, action, item) for item in (value if isinstance(value, list) else [value])]
    return _converted_scalar(where, action, value)


def _converted_scalar(where: str, action: argparse.Action, value: Any) -> Any:
    kind: Any = action.type
    name = getattr(kind, "__name__", str(kind))
    is_bool_field = name == "string_to_bool"
    fits = not (kind is int and isinstance(value, float | bool)) and not (kind is float and isinstance(value, bool))
    if is_bool_field and not isinstance(value, str):
        fits = isinstance(value, bool)
    try:
        if fits and (isinstance(value, str) or kind is float):
            return value if kind is None or kind is str else kind(value)
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        fits = False
    if not fits:
        wanted = "true or false" if is_bool_field else f"a value of type {name}"
        raise _bad(where, action.dest, wanted, repr(value), "Correct the value.")
    return value


def checked(options: Options) -> Options:
    """Return `options` if they make sense together.

    Raises:
        ConfigError: they do not.
    """
    model, data, lora = options.model, options.data, options.lora
    if not model.model:
        raise _bad(_PLACE, "model", "a checkpoint folder or a hub id", "nothing", "Name it: --model PATH.")
    if bool(data.train_files) == bool(data.dataset):
        got = "both" if data.dataset else "neither"
        raise _bad(_PLACE, "the text", "train_files or dataset", got, "Name one of them.")
    rate = options.training.learning_rate
    if not 0 <= rate < math.inf:
        raise _bad(_PLACE, "learning_rate", "a finite number, 0 or more", rate, "5e-5 suits many runs.")
    if data.block_length < 2:
        raise _bad(_PLACE, "block_length", "at least 2", data.block_length, "512 suits most runs.")
    if not 0 <= data.eval_share < 1:
        raise _bad(_PLACE, "eval_share", "at least 0 and less than 1", data.eval_share, "0.05 keeps a twentieth.")
    if model.dtype not in DTYPES:
        remedy = f"Choose one of these.{nearest(model.dtype, list(DTYPES))}"
        raise _bad(_PLACE, "dtype", f"one of {', '.join(DTYPES)}", repr(model.dtype), remedy)
    if lora.lora_rank < 0:
        raise _bad(_PLACE, "lora_rank", "0 or a positive rank", lora.lora_rank, "0 trains the whole model.")
    if lora.lora_merge and not lora.lora_rank:
        raise _bad(_PLACE, "lora_merge", "used with lora_rank", "no lora_rank", "Set lora_rank, or leave it out.")
    if lora.lora_parameters and lora.lora_dropout:
        remedy = "Set lora_dropout: 0."
        raise _bad(_PLACE, "lora_dropout", "0 with lora_parameters", lora.lora_dropout, remedy)
    return options


def check_files(data: DataOptions) -> None:
    """Refuse local text that is not there.

    Raises:
        ConfigError: a name or glob matches no file.
    """
    for argument in ("train_files", "eval_files"):
        files_of(getattr(data, argument), argument)


def files_of(patterns: Sequence[str], argument: str) -> list[str]:
    """Return the files that names and globs stand for, those of each glob sorted.

    Raises:
        ConfigError: there are none.
    """
    files = [path for pattern in patterns for path in sorted(glob.glob(pattern)) or [pattern]]
    missing = [path for path in files if not Path(path).is_file()]
    if missing:
        raise _bad(_PLACE, argument, "existing files", f"nothing at {', '.join(missing)}", "Correct the path.")
    return files


DTYPES = ("auto", "float32", "bfloat16")


def _bad(where: str, argument: str, expected: str, got: object, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy).named(where)

"""Options from a YAML file and from words of a command line; each remembers where it was given."""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import HfArgumentParser
from transformers.integrations import is_deepspeed_available

from hf_neuron_moe.backends import resolve_backend
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, nearest, not_one_of
from hf_neuron_moe.finetune import configs
from hf_neuron_moe.finetune.train_options import DTYPES, METHODS, OWN, Options, bad, known_options, one_line

COMMAND_LINE = "command line"
ELSEWHERE = {
    "block_length": "max_length",
    "max_seq_length": "max_length",
    "sequence_len": "max_length",
    "text_column": "dataset_text_field",
    "max_train_blocks": "max_train_samples",
    "max_eval_blocks": "max_eval_samples",
    "model_name_or_path": "model",
    "base_model": "model",
    "model_revision": "revision",
    "dataset_name": "dataset",
    "dataset_train_split": "train_split",
    "dataset_test_split": "eval_split",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_targets",
    "target_modules": "lora_targets",
    "lora_target_parameters": "lora_parameters",
    "target_parameters": "lora_parameters",
    "use_peft": "lora_rank, above 0",
    "sample_packing": "packing",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "val_set_size": "eval_share",
}
"""Names of TRL, peft, axolotl and earlier releases, and what they are here."""

_MERGE = "tag:yaml.org,2002:merge"


class Given(NamedTuple):
    """The value of an option and where it was given."""

    value: Any
    place: str


def read_options(words: Sequence[str]) -> Options:
    """Return the options of ``[CONFIG] [--option value ...]``; the command line wins over the file.

    Raises:
        ConfigError: an option does not exist, has a value of the wrong kind, or a needed one is missing.
        BackendUnavailableError: there is no device that the options fit, and the backend cannot run here.
    """
    given = read_yaml(configs.find(words[0])) if words and not words[0].startswith("--") else {}
    given |= _read_words(words[1:] if words and not words[0].startswith("--") else words)
    places = {key: found.place for key, found in given.items()}
    with located(places):
        method = str(given["method"].value) if "method" in given else "sft"
        if method not in METHODS:
            raise not_one_of("method", method, METHODS).named("train")
        parser = parser_of(method)
        values = _typed(given, method, parser)
        return _checked(Options(*_built(values, parser, places), places))


@contextmanager
def located(places: Mapping[str, str]) -> Iterator[None]:
    """Put the file and line of the option that an error is about in front of its message."""
    try:
        yield
    except NeuronMoEError as error:
        for word in re.findall(r"\w+", error.argument):
            if place := places.get(word) or places.get(f"neuron_{word}"):
                error.where = place
                break
        raise


def read_yaml(path: Path) -> dict[str, Given]:
    """Return the keys of a YAML file with their lines."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or one_line(error)
        raise ConfigError.about("content", "YAML", problem, "Correct the file.").named(place) from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        kind, fix = type(node).__name__.removesuffix("Node").lower(), "Write lines of `option: value`."
        raise ConfigError.about("content", "a mapping of options", f"a {kind}", fix).named(str(path))
    found: dict[str, Given] = {}
    for key_node, value_node in node.value:
        key, place = str(loader.construct_object(key_node)), f"{path}, line {key_node.start_mark.line + 1}"
        if key in found and key_node.tag != _MERGE:
            got = f"a second time, after {found[key].place.rpartition(', ')[2]}"
            raise ConfigError.about(key, "there once", got, "Remove one.").named(place)
        found[key] = Given(loader.construct_object(value_node, deep=True), place)
    return found


def _read_words(words: Sequence[str]) -> dict[str, Given]:
    """Read ``--key value``, ``--key=value``, ``--key one two`` and ``--flag``."""
    found: dict[str, Given] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
            found[name.replace("-", "_")] = Given(values, COMMAND_LINE)
        elif not found:
            raise bad("CONFIG", "one file before the options", repr(word), "Write options as --key value.")
        else:
            values.append(word)
    return {key: Given(_unpacked(given.value), given.place) for key, given in found.items()}


def _unpacked(values: list[str]) -> Any:
    return True if not values else values[0] if len(values) == 1 else values


def parser_of(method: str) -> HfArgumentParser:
    """Return the parser that has the fields of a method, this command's own first."""
    kinds: list[Any] = [*OWN, METHODS[method]]
    usage = "hf-neuron-moe train CONFIG.yaml [--option value ...]"
    parser = HfArgumentParser(kinds, usage=usage, formatter_class=_Formatter, add_help=False)
    parser._action_groups.sort(key=lambda group: group.title == "options")
    for action in parser._actions:
        if action.option_strings[0].startswith("--no_"):  # `--x false` says the same
            action.help = argparse.SUPPRESS
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, and one spelling per option."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return f"{action.option_strings[0]} {'VALUE ...' if action.nargs == '+' else 'VALUE'}"


def _typed(given: Mapping[str, Given], method: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the values in their fields' types."""
    actions = {action.dest: action for action in reversed(parser._actions)}
    values = {}
    for key, (value, place) in given.items():
        if key.startswith("no_") and key[3:] in actions and value is True:  # as --no_neuron_patch
            values[key[3:]] = False
        elif key not in actions:
            raise _unknown(key, method).named(place)
        else:
            values[key] = _converted(actions[key], value)
    return values


def _unknown(key: str, method: str) -> ConfigError:
    known = known_options(method)
    other = next((name for name in METHODS if name != method and key in known_options(name)), None)
    if key in ELSEWHERE:
        fix = f"{key} is {ELSEWHERE[key]} here."
    elif other:
        fix = f"It is an option of method: {other}."
    elif key in ("load_in_4bit", "load_in_8bit"):
        fix = "Remove it: quantized weights are not patched. Convert the model: `hf-neuron-moe convert`."
    else:
        fix = f"Remove or rename it.{nearest(key, known)}"
    return ConfigError.about("key", "an option that `hf-neuron-moe train --list-keys` shows", repr(key), fix)


def _converted(action: argparse.Action, value: Any) -> Any:
    """Return a value as its field's type; YAML 1.1 reads 1e-4 as text and `no` as false, for two."""
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, list) or action.nargs == "+":
        return [_scalar(action, item) for item in (value if isinstance(value, list) else [value])]
    return _scalar(action, value)


def _scalar(action: argparse.Action, value: Any) -> Any:
    kind: Any = action.type
    name = getattr(kind, "__name__", str(kind))
    is_flag = name == "string_to_bool"
    if value is False and not is_flag and kind not in (int, float):
        return "no"
    fits = not (kind is int and isinstance(value, float | bool)) and not (kind is float and isinstance(value, bool))
    if is_flag and not isinstance(value, str):
        fits = isinstance(value, bool)
    try:
        if fits and (isinstance(value, str) or kind is float):
            value = value if kind is None or kind is str else kind(value)
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        fits = False
    if not fits:
        wanted = "true or false" if is_flag else {int: "a whole number", float: "a number"}.get(kind, f"of type {name}")
        raise bad(action.dest, wanted, repr(value), "Correct the value.")
    if action.choices and value not in action.choices:
        raise not_one_of(action.dest, value, map(str, action.choices)).named("train")
    return value


def _built(values: dict[str, Any], parser: HfArgumentParser, places: Mapping[str, str]) -> tuple[Any, Any, Any, Any]:
    """Make the dataclasses; what TRL's or transformers' refuse is about the option that the message names."""
    if values.get("deepspeed") and not is_deepspeed_available():
        fix = "Install it (`pip install deepspeed`), or shard with FSDP2: fsdp_size."
        raise bad("deepspeed", "unset where the package deepspeed is not installed", repr(values["deepspeed"]), fix)
    if not values.get("fp16"):
        # TRL trains in bf16 by default, which is an error where there is no accelerator.
        values.setdefault("bf16", torch.accelerator.is_available() and not values.get("use_cpu"))
    if not torch.accelerator.is_available():
        values.setdefault("dataloader_pin_memory", False)  # which torch would warn of
    try:
        with warnings.catch_warnings():
            # TRL reads checkpointing by its old name, about which transformers 5.23 and later warn.
            warnings.filterwarnings("ignore", r"`gradient_checkpointing", FutureWarning)
            model, data, lora, training = parser.parse_dict(values)
            return model, data, lora, training
    except NeuronMoEError:
        raise
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        got, fix = one_line(error), "Correct it."
        if "use_cpu" in got:  # bf16 without a device that has it
            if values.get("neuron_patch", True) is not False:
                resolve_backend(str(values.get("neuron_backend", "auto")), torch.device("cpu"))
            fix = "To rehearse on a CPU add --use_cpu true, and --neuron_backend torch where it names another."
        shown = [key for key in places if str(values.get(key)) in re.split(r"[\s']+", got)]
        about = "bf16" if "use_cpu" in got else blamed(got, places, *shown)
        raise bad(about, "what TRL and transformers take", got, fix) from error


def blamed(message: str, places: Mapping[str, str], *others: str) -> str:
    """Return the option that a message of a library is about: the first given one that it names, or of `others`.

    Options with an underscore are found as words, others, such as ``model``, between quotes.
    """
    quoted = (key if "_" in key else f"[`'-]{key}" for key in places)
    named = (key for key, pattern in zip(places, quoted) if re.search(rf"(?<!\w){pattern}(?!\w)", message))
    return next(named, others[0] if others else "options")


_RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("learning_rate", lambda rate: 0 <= rate < math.inf, "a finite number, 0 or more", "2e-5 suits many runs."),
    ("per_device_train_batch_size", lambda count: count >= 1, "at least 1", "1 needs the least memory."),
    ("gradient_accumulation_steps", lambda count: count >= 1, "at least 1", "1 is the default."),
    ("max_length", lambda length: length is None or length >= 2, "at least 2", "1024 suits most runs."),
    ("eval_share", lambda share: 0 <= share < 1, "at least 0 and less than 1", "0.05 keeps a twentieth."),
    ("lora_rank", lambda rank: rank >= 0, "0 or a positive rank", "0 trains the whole model."),
    ("lora_dropout", lambda share: 0 <= share < 1, "at least 0 and less than 1", "0 is the default."),
    ("max_train_samples", lambda count: count >= 0, "0 or more", "0 takes all."),
    ("max_eval_samples", lambda count: count >= 0, "0 or more", "0 takes all."),
    *(
        (name, lambda size: size >= 1, "at least 1", "1 is the default.")
        for name in ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
    ),
)


def _checked(options: Options) -> Options:
    """Return `options` if they make sense together."""
    model, data, lora, training = options.model, options.data, options.lora, options.training
    for key, holds, expected, fix in _RULES:
        (value,) = (getattr(part, key) for part in (model, data, lora, training) if hasattr(part, key))
        if not holds(value):
            raise bad(key, expected, value, fix)
    if model.dtype not in DTYPES:
        raise not_one_of("dtype", model.dtype, DTYPES).named("train")
    if not model.model:
        raise bad("model", "a checkpoint folder or a hub id", "nothing", "Write `model: PATH`, or add --model PATH.")
    if bool(data.train_files) == bool(data.dataset):
        got = "both" if data.dataset else "neither"
        raise bad("train_files, dataset", "the data, in one of these two", got, "Name one of them.")
    if lora.lora_merge and not lora.lora_rank:
        raise bad("lora_merge", "used with lora_rank", "no lora_rank", "Set lora_rank, or leave it out.")
    if lora.lora_parameters and lora.lora_dropout:
        raise bad("lora_dropout", "0 with lora_parameters", lora.lora_dropout, "Set lora_dropout: 0.")
    if training.eval_strategy != "no" and not options.has_evaluation:
        fix = "Name evaluation data, or set eval_strategy: 'no'."
        raise bad("eval_strategy", "used with eval_files, eval_split or eval_share", "none of them", fix)
    return options

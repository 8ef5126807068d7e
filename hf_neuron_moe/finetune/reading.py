"""Options from a YAML file and from words of a command line; each remembers where it was given."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser
from transformers.integrations import is_deepspeed_available

from hf_neuron_moe.backends import resolve_backend
from hf_neuron_moe.errors import (
    BackendUnavailableError,
    ConfigError,
    NeuronMoEError,
    NeuronMoEWarning,
    nearest,
    not_one_of,
)
from hf_neuron_moe.finetune import configs
from hf_neuron_moe.finetune.data_sources import PACKAGE
from hf_neuron_moe.finetune.mistakes import located, raise_together
from hf_neuron_moe.finetune.other_names import ELSEWHERE, GONE
from hf_neuron_moe.finetune.train_options import DTYPES, METHODS, OWN, Options, bad, known_options, one_line

COMMAND_LINE = "command line"
_BESIDES: dict[str, set[Any]] = {"fsdp": {bool}, "resume_from_checkpoint": {bool}, "neuron_precision": {dict}}
"""What options take besides the classes that their annotations name."""

_WORDS = {"include_num_input_tokens_seen": ("all", "non_padding", "no")}
"""What flags take besides true and false."""


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
    if "compute_environment" in given:
        fix = f"Start with it: `accelerate launch --config_file {words[0]} -m hf_neuron_moe train CONFIG.yaml`."
        raise bad("CONFIG", "a configuration of train", f"{words[0]!r}, which is accelerate's", fix)
    own = _read_words(words[1:] if words and not words[0].startswith("--") else words)
    if "train_files" in own and PACKAGE in str(given.get("eval_files", "")):  # which go with the package's own
        if not own.keys() & {"eval_files", "eval_split", "eval_share"}:
            left = f"{given['eval_files'].place}: eval_files, which belong to the package's train_files, are left out."
            warnings.warn(f"{left} Name others for an evaluation: --eval_files, or --eval_share.", NeuronMoEWarning, 2)
        given = {key: found for key, found in given.items() if key not in ("eval_files", "eval_strategy")}
    given |= own
    places = {key: found.place for key, found in given.items()}
    with located(places):
        method = str(given["method"].value) if "method" in given else "sft"
        if method not in METHODS:
            raise not_one_of("method", method, METHODS).named("train")
        parser = parser_of(method)
        values = _typed(given, method, parser)
        parts, errors = _built(values, parser, places)
        options = Options(*parts, places)
        raise_together(places, [*errors, *_contradictions(options)])
        return options


def read_yaml(path: Path) -> dict[str, Given]:
    """Return the keys of a YAML file with their lines."""
    place, found, twice = str(path), dict[str, Given](), list[ConfigError]()
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            kind, fix = type(node).__name__.removesuffix("Node").lower(), "Write lines of `option: value`."
            raise ConfigError.about("content", "a mapping of options", f"a {kind}", fix).named(place)
        written, own = {id(key_node) for key_node, _ in node.value}, set[str]()
        loader.flatten_mapping(node)  # keys of a merge (<<) come first: those beside it win
        for key_node, value_node in node.value:
            place = f"{path}, line {key_node.start_mark.line + 1}"
            key = str(loader.construct_object(key_node, deep=True))
            if key in own:
                got = f"a second time, after {found[key].place.rpartition(', ')[2]}"
                twice.append(ConfigError.about(key, "there once", got, "Remove one.").named(place))
                continue
            if id(key_node) in written:
                own.add(key)
            found[key] = Given(loader.construct_object(value_node, deep=True), place)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if mark := getattr(error, "problem_mark", None):
            place = f"{path}, line {mark.line + 1}"
        problem = getattr(error, "problem", None) or one_line(error)
        raise ConfigError.about("content", "YAML", problem, "Correct the file.").named(place) from error
    raise_together({}, twice)
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
    hints = {name: hint for kind in (*OWN, METHODS[method]) for name, hint in get_type_hints(kind).items()}
    values, errors = dict[str, Any](), list[NeuronMoEError]()
    for key, (value, place) in given.items():
        if key.startswith("no_") and key[3:] in actions and value is True:  # as --no_neuron_patch
            values[key[3:]] = False
            if key[3:] in given and given[key[3:]].place.partition(", line")[0] == place.partition(", line")[0]:
                errors.append(bad(key, f"there without {key[3:]}", "both", "Remove one.").named(place))
        elif key not in actions:
            errors.append(_unknown(key, method).named(place))
        else:
            try:
                values[key] = _converted(actions[key], value, _kinds(hints[key]) | _BESIDES.get(key, set()))
            except ConfigError as error:
                errors.append(error)
    raise_together({key: found.place for key, found in given.items()}, errors)
    return values


def _unknown(key: str, method: str) -> ConfigError:
    known = known_options(method)
    other = next((name for name in METHODS if name != method and key in known_options(name)), None)
    if key in ELSEWHERE:
        fix = f"{key} is {ELSEWHERE[key]} here."
    elif other:
        fix = f"It is an option of method: {other}."
    elif key in GONE:
        fix = f"Remove it: {GONE[key]}."
    else:
        fix = f"Remove or rename it.{nearest(key, known)}"
    return ConfigError.about("key", "an option that `hf-neuron-moe train --list-keys` shows", repr(key), fix)


def _kinds(hint: object) -> set[Any]:
    """The classes that a field takes by its annotation; the parser keeps only one of several."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(part) or part for part in parts}


def _converted(action: argparse.Action, value: Any, kinds: set[Any]) -> Any:
    """Return a value as its field's type; YAML 1.1 reads 1e-4 as text and `no` as false, for two."""
    if value is None and NoneType not in kinds:
        raise bad(action.dest, "a value", "null", "Write one, or remove the line.")
    if value is None or (isinstance(value, Mapping) and dict in kinds):
        return value
    if action.nargs == "+" or (isinstance(value, list) and list in kinds):
        return [_scalar(action, item, kinds) for item in (value if isinstance(value, list) else [value])]
    if dict in kinds and str(value).lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            fix = "Correct the JSON, or write YAML in the file."
            raise bad(action.dest, "a mapping", f"{value!r}: {one_line(error)}", fix) from error
    return _scalar(action, value, kinds)


def _scalar(action: argparse.Action, value: Any, kinds: set[Any]) -> Any:
    if isinstance(value, str) and value in _WORDS.get(action.dest, ()):
        return value
    kind: Any = action.type
    name = getattr(kind, "__name__", str(kind))
    is_flag, is_text = name == "string_to_bool", kind not in (int, float)
    if isinstance(value, bool) and is_text and not is_flag and bool not in kinds:
        value = "true" if value else "no"
    takes: dict[Any, Any] = {int: int | str, float: int | float | str}
    fits = isinstance(value, bool | str if is_flag else takes.get(kind, str)) or (is_text and type(value) in kinds)
    fits = fits and (is_text or not isinstance(value, bool))
    try:
        if fits and kind is not None and kind is not str and (isinstance(value, str) or kind is float):
            value = kind(value)
        fits = fits and (kind is not int or abs(value) < 2**63)
    except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError):
        fits = False
    if not fits:
        numbers = {int: "a whole number", float: "a number"}
        wanted = "true or false" if is_flag else numbers.get(kind, "text")
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            wanted = "a whole number below 2**63"
        if dict in kinds:
            raise bad(action.dest, "names and values", repr(value), "Write `name: value` below it.")
        fix = (
            "Put it in quotes."
            if is_text and not is_flag and isinstance(value, int | float | date)
            else "Correct the value."
        )
        raise bad(action.dest, wanted, str(value) if isinstance(value, date) else repr(value), fix)
    if action.choices and value not in action.choices:
        raise not_one_of(action.dest, value, map(str, action.choices)).named("train")
    return value


_Parts = tuple[Any, Any, Any, Any]  # model, data, LoRA, training


def _built(
    values: dict[str, Any], parser: HfArgumentParser, places: Mapping[str, str]
) -> tuple[_Parts, list[NeuronMoEError]]:
    """Make the dataclasses, without the values that they refuse; return them and what was refused."""
    errors: list[NeuronMoEError] = []
    while True:
        try:
            return _parts(dict(values), parser, places), errors
        except NeuronMoEError as error:
            if f"neuron_{error.argument}" in values:
                error.prefixed("neuron_")
            errors.append(error)
            refused = [key for key in re.split(r", |\[", error.argument) if key in values and key in places]
            if not refused:
                raise_together(places, errors)
            if isinstance(error, BackendUnavailableError):  # whose device decides about bf16
                refused.append("bf16")
            values = {key: value for key, value in values.items() if key not in refused}


def _parts(values: dict[str, Any], parser: HfArgumentParser, places: Mapping[str, str]) -> _Parts:
    """Make the dataclasses; what TRL's or transformers' refuse is about the option that the message names."""
    if values.get("deepspeed") and not is_deepspeed_available():
        fix = "Install it (`pip install deepspeed`), or shard with FSDP2: fsdp_size."
        raise bad("deepspeed", "unset where the package deepspeed is not installed", repr(values["deepspeed"]), fix)
    if not values.get("fp16"):
        # TRL trains in bf16 by default, which is an error where there is no accelerator.
        values.setdefault("bf16", torch.accelerator.is_available() and not values.get("use_cpu"))
    if not torch.accelerator.is_available():
        values.setdefault("dataloader_pin_memory", False)  # which torch would warn of
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not values.get("bf16"):
            values.setdefault("use_cpu", True)  # else each process would train alone
    try:
        with warnings.catch_warnings():
            # TRL reads checkpointing by its old name, about which transformers 5.23 and later warn.
            warnings.filterwarnings("ignore", r"`gradient_checkpointing", FutureWarning)
            model, data, lora, training = parser.parse_dict(values)
            return model, data, lora, training
    except NeuronMoEError:
        raise
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        got, about, fix = one_line(error), blamed(one_line(error), places, values), "Correct it."
        if "use_cpu" in got:  # bf16 without a device that has it
            if values.get("neuron_patch", True) is not False:
                resolve_backend(str(values.get("neuron_backend", "auto")), torch.device("cpu"))
            fix = "To rehearse on a CPU add --use_cpu true, and --neuron_backend torch where it names another."
            about, got = "bf16", "true on a machine without an accelerator"
        if "fp16 and bf16" in got:
            about, got, fix = "bf16, fp16", "true for both", "Leave one out."
        raise bad(about, "what TRL and transformers take", got, fix) from error


def blamed(message: str, places: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Return the option that a message of a library is about: the first given one that it names or whose text it has.

    Options with an underscore are found as words, others, such as ``model``, between quotes.
    """
    quoted = (key if "_" in key else f"[`'-]{key}" for key in places)
    classes = message.lower()  # AcceleratorConfig is made of accelerator_config
    named = (
        key
        for key, pattern in zip(places, quoted)
        if re.search(rf"(?<!\w){pattern}(?!\w)", message) or ("_" in key and f"{key.replace('_', '')}." in classes)
    )
    words = set(re.split(r"[\s'\"`:,.]+", message))
    texts = ((key, values.get(key)) for key in places)
    shown = (key for key, text in texts if not words.isdisjoint(text if isinstance(text, list) else [str(text)]))
    return next(named, None) or next((key for key in shown if not isinstance(values[key], int | float)), "options")


def _names_values(value: object) -> bool:
    return value is None or isinstance(value, dict)


_RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("learning_rate", lambda rate: 0 <= rate < math.inf, "a finite number, 0 or more", "2e-5 suits many runs."),
    ("per_device_train_batch_size", lambda count: count >= 1, "at least 1", "1 needs the least memory."),
    ("max_steps", lambda count: count != 0, "at least 1", "Leave it out to count epochs."),
    ("gradient_accumulation_steps", lambda count: count >= 1, "at least 1", "1 is the default."),
    ("max_length", lambda length: length is None or length >= 2, "at least 2", "1024 suits most runs."),
    ("eval_share", lambda share: 0 <= share < 1, "at least 0 and less than 1", "0.05 keeps a twentieth."),
    ("lora_rank", lambda rank: rank >= 0, "0 or a positive rank", "0 trains the whole model."),
    ("lora_dropout", lambda share: 0 <= share < 1, "at least 0 and less than 1", "0 is the default."),
    ("lora_alpha", lambda alpha: 0 < alpha < math.inf, "a positive number", "16 is the default."),
    ("per_device_eval_batch_size", lambda count: count >= 1, "at least 1", "8 is the default."),
    ("weight_decay", lambda rate: 0 <= rate < math.inf, "a finite number, 0 or more", "0 is the default."),
    ("dataloader_num_workers", lambda count: count >= 0, "0 or more", "0 is the default."),
    ("dataset_num_proc", lambda count: count is None or count >= 1, "at least 1", "Leave it out for one process."),
    ("pad_to_multiple_of", lambda size: size is None or size >= 1, "at least 1", "Leave it out for no multiple."),
    ("output_dir", bool, "the name of a folder", "Name one."),
    *(
        (name, lambda beta: 0 <= beta < 1, "at least 0 and less than 1", "0.9 and 0.999 are the defaults.")
        for name in ("adam_beta1", "adam_beta2")
    ),
    ("adam_epsilon", lambda epsilon: 0 <= epsilon < math.inf, "a finite number, 0 or more", "1e-8 is the default."),
    ("neftune_noise_alpha", lambda alpha: alpha is None or 0 <= alpha < math.inf, "0 or more", "Or leave it out."),
    ("dataloader_prefetch_factor", lambda count: count is None or count >= 1, "at least 1", "Leave it out for 2."),
    ("gradient_checkpointing_kwargs", _names_values, "names and values", "Write use_reentrant: false below it."),
    *(
        (name, lambda seed: seed is None or 0 <= seed < 2**32, "0 or more, and below 2**32", "42 is the default.")
        for name in ("seed", "data_seed")
    ),
    ("max_train_samples", lambda count: count >= 0, "0 or more", "0 takes all."),
    ("max_eval_samples", lambda count: count >= 0, "0 or more", "0 takes all."),
    *(
        (name, lambda size: size >= 1, "at least 1", "1 is the default.")
        for name in ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
    ),
)


def _contradictions(options: Options) -> Iterator[ConfigError]:
    """Yield what is wrong with the values, alone and together."""
    model, data, lora, training = options.model, options.data, options.lora, options.training
    for key, holds, expected, fix in _RULES:
        (value,) = (getattr(part, key) for part in (model, data, lora, training) if hasattr(part, key))
        if not holds(value):
            yield bad(key, expected, "nothing" if value == "" else value, fix)
    if model.dtype not in DTYPES:
        yield not_one_of("dtype", model.dtype, DTYPES).named("train")
    if not model.model:
        yield bad("model", "a checkpoint folder or a hub id", "nothing", "Write `model: PATH`, or add --model PATH.")
    if bool(data.train_files) == bool(data.dataset):
        got = "both" if data.dataset else "neither"
        yield bad("train_files, dataset", "the data, in one of these two", got, "Name one of them.")
    if not data.dataset and data.eval_split:
        yield bad("eval_split", "used with dataset", "no dataset", "Name eval_files, or eval_share.")
    if data.eval_files and data.eval_split:
        yield bad("eval_files, eval_split", "one of the two", "both", "Remove one.")
    if training.max_steps <= 0 and not 0 < training.num_train_epochs < math.inf:
        fix = "3 is the default; max_steps counts steps instead."
        yield bad("num_train_epochs", "a positive number", training.num_train_epochs, fix)
    for key in ("lora_merge", "lora_targets", "lora_parameters", "lora_alpha", "lora_dropout"):
        if key in options.places and "lora_rank" not in options.places and getattr(lora, key):
            yield bad(key, "used with lora_rank", "no lora_rank", "Set lora_rank, or leave it out.")
    if lora.lora_merge and not lora.lora_rank and "lora_rank" in options.places:
        yield bad("lora_merge", "used with a lora_rank above 0", 0, "Set lora_rank, or leave lora_merge out.")
    if lora.lora_parameters and lora.lora_dropout:
        yield bad("lora_dropout", "0 with lora_parameters", lora.lora_dropout, "Set lora_dropout: 0.")
    best = training.metric_for_best_model
    if training.load_best_model_at_end and best not in (None, "loss", "eval_loss"):
        yield bad("metric_for_best_model", "eval_loss, which every evaluation has", repr(best), "Leave it out.")
    if training.eval_strategy != "no" and not options.has_evaluation:
        fix = "Name evaluation data, or set eval_strategy: 'no'."
        yield bad("eval_strategy", "used with eval_files, eval_split or eval_share", "none of them", fix)

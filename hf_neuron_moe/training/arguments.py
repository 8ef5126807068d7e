"""The package's options as training arguments: from Python, the command line, or a YAML file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import TrainingArguments

from hf_neuron_moe.activation_policy import activations_from_text, mapping_from_text, to_plain
from hf_neuron_moe.backends import NEURON_BACKENDS
from hf_neuron_moe.backends.neuron.versions import settle_environment
from hf_neuron_moe.config import BACKENDS, PRECISIONS, NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, known_names, public
from hf_neuron_moe.precision_map import read_recipe

DEFAULT_HEALTH_STEPS = 100
GUARDS, DEFAULT_GUARD_STEPS = ("off", "warn", "stop"), 200
Class = TypeVar("Class", bound=type)


def _with_known_names(cls: Class) -> Class:
    """Answer misspelt fields of the dataclass `cls` with the nearest; classes derived from it make their own."""
    made: Any = cls  # a type checker refuses to exchange the constructor of what may be a subclass
    made.__init__ = known_names(cls.__name__)(made.__init__)
    return cls


def _field(default: object, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


def _option(name: str, meaning: str) -> Any:
    """A field with the default that :class:`NeuronMoEConfig` has for its option `name`."""
    return _field(getattr(NeuronMoEConfig(), name), meaning)


def _names_a_file(precision: str) -> bool:
    """Return whether `precision` is the path of a map, and not the name of a precision."""
    path = Path(precision)
    return path.suffix in (".yaml", ".yml", ".json") or (precision not in PRECISIONS and path.is_file())


def _are_globs(value: Any) -> bool:
    return value is None or all(isinstance(glob, str) for glob in value)


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("neuron_include", _are_globs, "None or globs over module names"),
    ("neuron_exclude", _are_globs, "None or globs over module names"),
    ("neuron_include", lambda globs: globs is None or bool(globs), "None or at least one glob over module names"),
    ("neuron_patch", lambda flag: isinstance(flag, bool), "a bool"),
    ("neuron_strict", lambda flag: isinstance(flag, bool), "a bool"),
    ("neuron_health_steps", lambda steps: type(steps) is int and steps >= 0, "a number of steps, 0 for never"),
    ("neuron_guard", lambda mode: mode in GUARDS, f"one of {', '.join(GUARDS)}"),
    ("neuron_guard_steps", lambda steps: type(steps) is int and steps > 0, "a number of steps of at least 1"),
)
"""Field, rule, and the rule in words."""


@_with_known_names
@dataclass
class NeuronMoEArguments:
    """The fields that :class:`NeuronMoETrainerMixin` reads, to be combined with any class of training arguments.

    With a trainer that has arguments of its own, TRL's ``SFTTrainer`` say, one line makes the class it needs::

        @dataclass
        class Arguments(NeuronMoEArguments, SFTConfig): ...

    Values are checked when the arguments are made; the rules are those of :class:`hf_neuron_moe.NeuronMoEConfig` and
    :func:`hf_neuron_moe.patch_model`.
    """

    neuron_patch: bool = _field(True, "Replace the model's SwiGLU MLPs and experts before the optimizer is made.")
    neuron_precision: str = _option(
        "precision",
        "Numbers that patched blocks compute with: bf16, mxfp8 or fp32, or a JSON object of these by glob over module "
        "names, or a recipe: a YAML or JSON file with one.",
    )
    neuron_backend: str = _option(
        "backend",
        f"What computes patched blocks: auto (by the device at patching), {', '.join(BACKENDS)}. Say neuron on a "
        "Neuron machine: models are patched on the CPU, before they are moved.",
    )
    neuron_fallback: str = _option(
        "fallback", "Fallback for blocks that the backend's kernels do not support: refuse (error) or torch."
    )
    neuron_weights: str = _option("weights", "Layout of patched weights in memory: auto, stock or kernel.")
    neuron_block_size: int = _option("block_size", "Tokens per block of the blockwise MoE kernels: 128, 256, ... 4096.")
    neuron_activations: str = _option(
        "activations",
        "What patched blocks keep for backward: the name of a preset, a budget of bytes, or an activation policy as a "
        "JSON object.",
    )
    neuron_include: list[str] | None = field(
        default=None, metadata={"help": "Globs over module names: only these are patched."}
    )
    neuron_exclude: list[str] | None = field(
        default=None, metadata={"help": "Globs over module names that are left alone."}
    )
    neuron_strict: bool = _field(True, "Raise an error for a gated block that is neither patched nor excluded.")
    neuron_health_steps: int = _field(
        DEFAULT_HEALTH_STEPS,
        "Measure how MXFP8 would round a sample of weights and inputs in the first step and in every step whose number "
        "is a multiple of this; 0 for never.",
    )
    neuron_guard: str = _field(
        "off",
        "Compare operands and results of every product with bands and with float64 in sampled steps: off, warn (of "
        "what left its band), or stop (before the step's update).",
    )
    neuron_guard_steps: int = _field(
        DEFAULT_GUARD_STEPS,
        "Steps from one that the guard looks at to the next, after the first ones, from which it learns its bands.",
    )

    def __post_init__(self) -> None:
        """Check the values, then let the other base class do its part."""
        for name in ("neuron_include", "neuron_exclude"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        if self.neuron_guard in (False, "no"):  # what YAML makes of off
            self.neuron_guard = "off"
        for name, holds, expected in _RULES:
            value = getattr(self, name)
            if not holds(value):
                got = value if isinstance(value, str) else repr(value)
                fix = "See help(hf_neuron_moe.NeuronMoETrainingArguments)."
                raise ConfigError.about(name, expected, got, fix).named("NeuronMoEArguments")
        precision: Any = self.neuron_precision
        if isinstance(precision, str) and _names_a_file(precision):
            self.neuron_precision = cast(Any, read_recipe(Path(precision)))
        config = self.neuron_config()
        given: Any = self.neuron_activations
        if not isinstance(given, str | dict):  # the Trainer writes its arguments into JSON files
            given = to_plain(config.activations)
        self.neuron_activations = given
        if self.neuron_backend in NEURON_BACKENDS:
            settle_environment()  # the other class asks the device what it can do
        getattr(super(), "__post_init__", lambda: None)()

    @public("NeuronMoEArguments")
    def neuron_config(self) -> NeuronMoEConfig:
        """Return what patched blocks compute and keep."""
        options: dict[str, Any] = {
            option.name: getattr(self, f"neuron_{option.name}") for option in fields(NeuronMoEConfig)
        }
        if isinstance(options["precision"], str):
            expected = "the name of a precision or a JSON object"
            options["precision"] = mapping_from_text(options["precision"], "neuron_precision", expected)
        if isinstance(options["activations"], str):
            options["activations"] = activations_from_text(options["activations"], "neuron_activations")
        try:
            return NeuronMoEConfig(**options)
        except NeuronMoEError as error:
            raise error.prefixed("neuron_") from None


@_with_known_names
@dataclass
class NeuronMoETrainingArguments(NeuronMoEArguments, TrainingArguments):
    """transformers' ``TrainingArguments`` and the fields of :class:`NeuronMoEArguments`.

    ``HfArgumentParser(NeuronMoETrainingArguments)`` reads them from the command line, a dict, JSON or YAML.
    """

"""The package's options as training arguments: from Python, the command line, or a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_neuron_moe.activation_policy import activations_from_text, to_plain
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.patching.option_names import with_checked_fields

DEFAULT_HEALTH_STEPS = 100


@with_checked_fields
@dataclass
class NeuronMoEArguments:
    """The fields that :class:`NeuronMoETrainerMixin` reads, to be combined with any class of training arguments.

    With a trainer that has arguments of its own, TRL's ``SFTTrainer`` say, one line makes the class it needs::

        @dataclass
        class Arguments(NeuronMoEArguments, SFTConfig): ...

    Values are checked when the arguments are made; the rules are those of :class:`hf_neuron_moe.NeuronMoEConfig` and
    :func:`hf_neuron_moe.patch_model`.
    """

    neuron_patch: bool = field(
        default=True, metadata={"help": "Replace the model's SwiGLU MLPs and experts before the optimizer is made."}
    )
    neuron_precision: str = field(
        default="bf16", metadata={"help": "Numbers that patched blocks compute with: bf16, mxfp8 or fp32."}
    )
    neuron_backend: str = field(
        default="auto",
        metadata={
            "help": "What computes patched blocks: auto (by the device at patching), torch, neuron or nki-sim. Say "
            "neuron on a Neuron machine: models are patched on the CPU, before they are moved."
        },
    )
    neuron_fallback: str = field(
        default="refuse",
        metadata={"help": "What becomes of blocks that the backend's kernels cannot compute: refuse or torch."},
    )
    neuron_weights: str = field(
        default="auto", metadata={"help": "Layout of patched weights in memory: auto, stock or kernel."}
    )
    neuron_block_size: int = field(
        default=512, metadata={"help": "Tokens per block of the blockwise MoE kernels: 128, 256, ... 4096."}
    )
    neuron_activations: str = field(
        default="minimal",
        metadata={
            "help": "What patched blocks keep for backward: the name of a preset, a budget of bytes, or an activation "
            "policy as a JSON object."
        },
    )
    neuron_include: list[str] | None = field(
        default=None, metadata={"help": "Globs over module names: only these are patched."}
    )
    neuron_exclude: list[str] | None = field(
        default=None, metadata={"help": "Globs over module names that are left alone."}
    )
    neuron_strict: bool = field(
        default=True,
        metadata={"help": "Refuse a model with a gated block that can neither be patched nor is excluded."},
    )
    neuron_health_steps: int = field(
        default=DEFAULT_HEALTH_STEPS,
        metadata={
            "help": "Measure how MXFP8 would round a sample of weights and inputs in the first step and in every step "
            "whose number is a multiple of this; 0 for never."
        },
    )

    def __post_init__(self) -> None:
        """Check the values, then let the other base class do its part.

        Raises:
            ConfigError: a value is not allowed.
        """
        for name in ("neuron_include", "neuron_exclude"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, [value])
            elif value is not None and not all(isinstance(glob, str) for glob in value):
                raise _refusal(name, "None or globs over module names", value)
        if self.neuron_include is not None and not self.neuron_include:
            raise _refusal("neuron_include", "None or at least one glob over module names", self.neuron_include)
        for name in ("neuron_patch", "neuron_strict"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, "a bool", getattr(self, name))
        if type(self.neuron_health_steps) is not int or self.neuron_health_steps < 0:
            raise _refusal("neuron_health_steps", "a number of steps, 0 for never", self.neuron_health_steps)
        config = self.neuron_config()
        given: Any = self.neuron_activations
        if not isinstance(given, str | dict):  # the Trainer writes its arguments into JSON files
            given = to_plain(config.activations)
        self.neuron_activations = given
        following = getattr(super(), "__post_init__", None)
        if following is not None:
            following()

    @public("NeuronMoEArguments")
    def neuron_config(self) -> NeuronMoEConfig:
        """Return what patched blocks compute and keep.

        Raises:
            ConfigError: a value is not allowed.
        """
        activations = self.neuron_activations
        if isinstance(activations, str):
            activations = activations_from_text(activations, "neuron_activations")
        return NeuronMoEConfig(
            precision=self.neuron_precision,
            backend=self.neuron_backend,
            weights=self.neuron_weights,
            block_size=self.neuron_block_size,
            activations=activations,
            fallback=self.neuron_fallback,
        )


@with_checked_fields
@dataclass
class NeuronMoETrainingArguments(NeuronMoEArguments, TrainingArguments):
    """transformers' ``TrainingArguments`` and the fields of :class:`NeuronMoEArguments`.

    ``HfArgumentParser(NeuronMoETrainingArguments)`` reads them from the command line, a dict, JSON or YAML.
    """


def _refusal(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError.about(
        name,
        expected,
        got if isinstance(got, str) else repr(got),
        "See help(hf_neuron_moe.NeuronMoETrainingArguments).",
    ).named("NeuronMoEArguments")

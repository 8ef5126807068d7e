"""A Trainer that patches its model before the optimizer exists, measures it, and saves without half checkpoints."""

from __future__ import annotations

import inspect
import os
from functools import partial
from os import PathLike
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import Trainer

from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.patching.apply import states
from hf_neuron_moe.training.arguments import NeuronMoEArguments
from hf_neuron_moe.training.callback import NeuronMoECallback
from hf_neuron_moe.training.checkpoints import SafeCheckpointMixin
from hf_neuron_moe.training.cpu_fsdp import CpuTensorParallelMixin
from hf_neuron_moe.training.gathered_rows import gather_rows_once
from hf_neuron_moe.training.prepare import (
    is_patched,
    patch_for_training,
    refuse_mixed_layouts,
    refuse_sharded_kernel_layout,
)
from hf_neuron_moe.training.sharded_checkpoints import ShardedCheckpointMixin


class NeuronMoETrainerMixin(CpuTensorParallelMixin, SafeCheckpointMixin):
    """Makes a Trainer of any Trainer subclass that patches, measures, and keeps its checkpoints whole.

    Name it first::

        class NeuronSFTTrainer(NeuronMoETrainerMixin, SFTTrainer): ...

    The constructor's arguments are those of the other class. The options come from its ``args``, if these have the
    fields of :class:`NeuronMoEArguments`. Without them a model that is patched already stays as it is, and any other is
    patched with the defaults. ``model`` may be a module, peft's wrapper around one, absent with ``model_init``, or a
    name where the other class takes one. What is logged is listed at :class:`NeuronMoECallback`, what is different
    about checkpoints at :class:`SafeCheckpointMixin`. An optimizer of parameters that patching would replace is an
    error.
    """

    _like_reference: tuple[object, object] | None = None

    @public("NeuronMoETrainer")
    def __init__(self, *positional: Any, **named: Any) -> None:
        constructor = super(ShardedCheckpointMixin, self).__init__  # of the other class
        given = _given(constructor, positional, named)
        model, optimizers = given.get("model"), given.get("optimizers") or (None, None)
        is_stock = getattr(constructor, "__func__", None) is Trainer.__init__
        if is_stock and isinstance(model, str | PathLike):  # trainers of TRL load it
            expected = "a model: transformers' Trainer does not load one by its name"
            fix = f"Pass AutoModelForCausalLM.from_pretrained({str(model)!r}), or a function as model_init."
            raise ConfigError.about("model", expected, repr(model), fix)
        if isinstance(model, nn.Module):  # before adapters, devices and data-parallel wrappers
            _patch(model, given.get("args"), optimizers[0])
        self._like_reference = None if given.get("ref_model") is not None else (model, given.get("args"))
        super().__init__(*positional, **named)
        self._like_reference = None
        self._refuse_lone_processes()
        if not isinstance(model, nn.Module) and given.get("model_init") is None:
            _patch(self.accelerator.unwrap_model(self.model), self.args, self.optimizer)
        if self.is_fsdp_enabled and self.model is not None:
            refuse_sharded_kernel_layout(self.model)
        if self.model is not None:
            refuse_mixed_layouts(self.model, self.callback_handler.callbacks)
        own = [callback for callback in self.callback_handler.callbacks if isinstance(callback, NeuronMoECallback)]
        self.neuron_callback = (own[0] if own else _TrainerCallback()).watch(self)

    def _refuse_lone_processes(self) -> None:
        """Raise where each of several processes would train alone, on all rows: CPUs without ``use_cpu``."""
        started, joined = int(os.environ.get("WORLD_SIZE", "1")), self.accelerator.num_processes
        if joined < started and self.args.device.type == "cpu":
            expected = f"true for {started} processes on CPUs"
            got = f"{self.args.use_cpu}, with which each process trains alone, on all rows"
            raise ConfigError.about("use_cpu", expected, got, "Set use_cpu=True in the training arguments.")

    @property
    def ref_model(self) -> Any:
        """The reference of TRL's trainers. One that a trainer loads is patched like the model, before it is sharded."""
        return self._ref_model

    @ref_model.setter
    def ref_model(self, reference: Any) -> None:
        self._ref_model = reference
        if self._like_reference is not None and isinstance(reference, nn.Module) and not is_patched(reference):
            _patch_reference(reference, *self._like_reference)

    def call_model_init(self, trial: object = None) -> nn.Module:
        """Make a model with ``model_init``, and patch it."""
        model: nn.Module = super().call_model_init(trial)
        _patch(model, self.args, None)
        return model

    def create_optimizer(self, *positional: Any, **named: Any) -> Any:
        """Create the optimizer of the parameters that FSDP2 trains.

        An evaluation before leaves its last group gathered, in parameters that no later step reads.
        """
        for module in self.model.modules() if self.model is not None and self.optimizer is None else ():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().create_optimizer(*positional, **named)

    def train(self, *positional: Any, **named: Any) -> Any:
        """Train as the other class does; the hooks for the metrics are gone afterwards, whatever happens."""
        try:
            return super().train(*positional, **named)
        finally:
            self.neuron_callback.detach()

    def evaluation_loop(self, *positional: Any, **named: Any) -> Any:
        """Evaluate as the other class does; under tensor parallelism each row counts once."""
        copies = self.get_tp_size()
        if copies == 1:
            return super().evaluation_loop(*positional, **named)
        gather = self.gather_function
        self.gather_function = partial(gather_rows_once, self.accelerator, copies, gather)
        try:
            return super().evaluation_loop(*positional, **named)
        finally:
            self.gather_function = gather

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count as the other class does; under tensor parallelism each token counts once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()

    def log(self, logs: dict[str, float], *positional: Any, **named: Any) -> None:
        """Log, with the figures of the patched blocks where the logs are those of a training step."""
        if "loss" in logs:
            logs.update(self.neuron_callback.collect())
        super().log(logs, *positional, **named)


class NeuronMoETrainer(NeuronMoETrainerMixin, Trainer):
    """transformers' Trainer with :class:`NeuronMoETrainerMixin`; ``args`` are :class:`NeuronMoETrainingArguments`."""


class _TrainerCallback(NeuronMoECallback):
    """The mixin's callback: the mixin has patched, and a model that was to stay stock is trained without metrics."""

    _may_be_stock = True


@public("NeuronMoETrainer")
def _patch(model: nn.Module, args: object, optimizer: Optimizer | None) -> None:
    options = args if isinstance(args, NeuronMoEArguments) else NeuronMoEArguments()
    if options.neuron_patch and (options is args or not is_patched(model)):
        which: dict[str, Any] = {name: getattr(options, f"neuron_{name}") for name in ("include", "exclude", "strict")}
        patch_for_training(model, options.neuron_config(), optimizer, **which)


@public("NeuronMoETrainer")
def _patch_reference(reference: nn.Module, model: object, args: object) -> None:
    if not isinstance(model, nn.Module):  # a name, under which both are loaded
        _patch(reference, args, None)
        return
    names = {id(module): name for name, module in model.named_modules()}
    for module, state in states(model):
        config, include, exclude = state.request
        part = reference.get_submodule(names[id(module)])
        patch_for_training(part, config, None, include=include or None, exclude=exclude or None, strict=False)


def _given(constructor: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor by name; of one that passes everything on, by the names that Trainer has."""
    signature = inspect.signature(constructor)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        names = [name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]
        return dict(zip(names, positional)) | named
    bound = signature.bind_partial(*positional, **named).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound

"""Metrics of patched models for any Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, not_one_of, public, with_article
from hf_neuron_moe.modules.engine import is_sharded_at_loading
from hf_neuron_moe.patching.apply import report_of
from hf_neuron_moe.patching.ranks import OneAnswer, facts_of
from hf_neuron_moe.training.arguments import DEFAULT_GUARD_STEPS, DEFAULT_HEALTH_STEPS, GUARDS
from hf_neuron_moe.training.blocks import patch_record
from hf_neuron_moe.training.figures import logs_of
from hf_neuron_moe.training.guard.guard import Guard, saves_after
from hf_neuron_moe.training.metrics import TrainingMonitor
from hf_neuron_moe.training.prepare import is_patched, patch_for_training, refuse_unsavable_adapters
from hf_neuron_moe.training.run_files import EVALUATIONS_FILE, RunFiles, environment, training_record

_WHERE = "NeuronMoECallback"
_PREFERENCE = {"rewards/margins": "reward_margin", "rewards/accuracies": "reward_accuracy"}
"""What TRL's DPOTrainer logs, and its names in the files."""


class NeuronMoECallback(TrainerCallback):
    """Measures a patched model while a Trainer of your own trains it.

    Every logging step gets ``neuron/tokens_per_second``, ``neuron/saved_bytes_per_token`` and
    ``neuron/padding_overhead``. The second is what all patched blocks save for the backward, without recomputation. The
    third are extra multiply-adds of the Neuron kernels, as a fraction of the needed ones. With experts it also gets
    ``neuron/load_entropy`` (1 where all get the same), ``neuron/load_max_over_mean`` and ``neuron/dead_experts`` (no
    token since the last log). Under expert parallelism the load of processes follows
    (``neuron/process_load_max_over_mean``, ``neuron/idle_processes``, ``neuron/processes_per_token``). Under activation
    checkpointing there is ``neuron/routing_kept``: decisions that replay kept from changing. After sampled steps there
    are ``neuron/sqnr_weights_db``, ``neuron/sqnr_inputs_db``, ``neuron/flushed``, ``neuron/saturated`` and
    ``neuron/amax``: what MXFP8 does to the weights and the blocks' inputs, whatever precision they compute in. Figures
    per module go to ``<output_dir>/neuron_moe/metrics.jsonl``, evaluations to ``evaluations.jsonl``, and ``run.json``
    says what was run.

    Make it known with :meth:`watch`, which puts it in front of the callbacks that report to TensorBoard and others.
    Passed as ``Trainer(callbacks=[...])`` it comes after them: then only callbacks that follow, ``log_history`` and
    the files have the figures. :class:`NeuronMoETrainer` does all of this by itself.

    Args:
        config: patch the model with this configuration: when the Trainer is made if it was passed in ``callbacks``,
            else when training begins. By then the optimizer exists, so a configuration that moves weights to another
            layout is refused. None: the model is patched already.
        health_steps: measure quantization in the first step and every this many; 0 for never. None: the training
            arguments' ``neuron_health_steps``, or 100 where they have none.
        guard: ``"off"``, ``"warn"`` or ``"stop"``. None: the training arguments' ``neuron_guard``, or off where they
            have none; ``neuron_guard_steps`` likewise.
    """

    _may_be_stock = False  # whether a model without patched blocks is trained without metrics

    @public(_WHERE)
    def __init__(
        self,
        config: NeuronMoEConfig | Mapping[str, Any] | None = None,
        health_steps: int | None = None,
        guard: str | None = None,
    ) -> None:
        if health_steps is not None and (type(health_steps) is not int or health_steps < 0):
            expected, fix = "a number of steps, 0 for never", "Leave it out for the default."
            raise ConfigError.about("health_steps", expected, repr(health_steps), fix)
        if guard is not None and guard not in GUARDS:
            raise not_one_of("guard", guard, GUARDS)
        self.config, self.guard_mode = config, guard
        self.health_steps = health_steps
        self.sample_every = 0
        self.monitor: TrainingMonitor | None = None
        self.guard: Guard | None = None
        self.files: RunFiles | None = None
        self.pending: dict[str, Any] | None = None  # measured and logged, not written yet

    def watch(self, trainer: Trainer) -> NeuronMoECallback:
        """Add this callback to `trainer`, in front of those that report the logs; return it."""
        handler = trainer.callback_handler
        if self not in handler.callbacks:
            trainer.add_callback(self)
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)
        return self

    @public(_WHERE)
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Patch the model, where a configuration was given: there is no optimizer yet, unless the caller made one."""
        if self.config is not None:
            patch_for_training(kwargs["model"], self.config, kwargs.get("optimizer"))

    @public(_WHERE)
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to count, and write ``run.json``."""
        model: nn.Module = kwargs["model"]
        with OneAnswer() as facts:  # DDP compares shapes only
            if self.config is not None:
                patch_for_training(model, self.config, kwargs.get("optimizer"))
            elif not is_patched(model) and not self._may_be_stock:
                got = f"{with_article(type(model).__name__)} without patched blocks"
                fix = (
                    "Call patch_model(model, ...) before the Trainer is made (inside model_init where there is one), "
                    "give the callback a config, or use NeuronMoETrainer."
                )
                raise UnsupportedModelError.about("model", "patched when training begins", got, fix)
            facts |= facts_of(report_of(model), sharded=is_sharded_at_loading(model))
        mode = getattr(args, "neuron_guard", "off") if self.guard_mode is None else self.guard_mode
        if not is_patched(model):
            if mode != "off":
                fix = "Leave neuron_patch on, or neuron_guard off."
                raise ConfigError.about("neuron_guard", "'off' for a model without patched blocks", repr(mode), fix)
            return
        if args.save_strategy != "no":
            refuse_unsavable_adapters(model)
        self.detach()
        self.monitor = TrainingMonitor(model)
        self.monitor.attach()
        from_args = getattr(args, "neuron_health_steps", DEFAULT_HEALTH_STEPS)
        self.sample_every = from_args if self.health_steps is None else self.health_steps
        self.files = RunFiles(args.output_dir) if state.is_world_process_zero else None
        if self.files is not None:
            patch, data = patch_record(model), getattr(kwargs.get("train_dataloader"), "dataset", None)
            rows = len(data) if isinstance(data, Sized) else None
            run = {
                "patch": patch,
                "config": patch["config"],
                "training": training_record(args, state, model, rows),
                "environment": {**environment(), "processes": args.world_size},
                "model": getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__,
            }
            self.files.begin(run, state.global_step)
        if mode != "off":
            every = getattr(args, "neuron_guard_steps", DEFAULT_GUARD_STEPS)
            self.guard = Guard(model, mode, every=every, files=RunFiles(args.output_dir), seed=args.seed)
            if state.global_step:
                self.guard.resume(args.world_size)
        self.monitor.restart_clock()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide whether this step is sampled."""
        if self.monitor is not None:
            step, every = state.global_step + 1, self.sample_every
            self.monitor.begin_step(sample=every > 0 and (step == 1 or step % every == 0))
            if self.guard is not None:
                self.guard.begin_step(step, saves=saves_after(step, args, state, kwargs.get("train_dataloader")))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the other parts of an accumulated step to themselves: the guard looks at the first."""
        if self.guard is not None:
            self.guard.pause()

    @public(_WHERE)
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Judge the step's products while the weights are what they were."""
        if self.guard is not None:
            self.guard.end_step(args.world_size, args.process_index)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at the weights of a sampled step, and at the clock."""
        if self.monitor is not None:
            self.monitor.end_step()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave evaluation out of tokens per second, and write its metrics into the files."""
        if self.monitor is not None:
            self.monitor.restart_clock()
        measured = kwargs.get("metrics")
        if self.files is not None and measured:
            ended = self.monitor is None and args.load_best_model_at_end
            step = state.best_global_step if ended else None  # the Trainer has loaded that step's model by now
            self.files.append({"step": state.global_step if step is None else step, **measured}, EVALUATIONS_FILE)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave saving out of tokens per second."""
        if self.monitor is not None:
            self.monitor.restart_clock()

    def collect(self) -> dict[str, float]:
        """Return the numbers to log now; the line for the file waits for :meth:`on_log`. All ranks call it together."""
        if self.monitor is None:
            return {}
        self.pending = self.monitor.take()
        return logs_of(self.pending)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the figures into a logging step of training, and into the files."""
        logs: dict[str, Any] = kwargs["logs"]
        if self.monitor is None or "loss" not in logs:
            return
        if self.pending is None:
            logs.update(self.collect())
            state.log_history[-1].update(logs)
        pending, self.pending = self.pending, None
        if self.files is not None and pending is not None:
            head = {key: logs.get(key) for key in ("epoch", "loss", "learning_rate", "grad_norm")}
            head |= {name: logs[key] for key, name in _PREFERENCE.items() if key in logs}
            self.files.append({"step": state.global_step, **head, **pending})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the hooks off the model."""
        self.detach()

    def detach(self) -> None:
        """Take the hooks off the model, also after a training that an exception ended."""
        if self.monitor is not None:
            self.monitor.detach()
        if self.guard is not None:
            self.guard.detach()
        self.monitor, self.guard, self.pending = None, None, None

"""A whole run: check, load, patch, train, evaluate, save."""

from __future__ import annotations

import logging
import math
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import DistributedType
from transformers import set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import this_device
from hf_neuron_moe.errors import NeuronMoEError, counted
from hf_neuron_moe.finetune.data import Data, limited, load_data
from hf_neuron_moe.finetune.early_checks import check_merging, check_packing, check_run
from hf_neuron_moe.finetune.kernels import asks_for_kernels, check_kernels
from hf_neuron_moe.finetune.mistakes import located
from hf_neuron_moe.finetune.model import (
    adapters,
    check_tokens,
    describe_unpatched,
    load_model,
    load_tokenizer,
    patch,
    save_merged,
)
from hf_neuron_moe.finetune.reading import blamed
from hf_neuron_moe.finetune.resumed import base_of, last_complete, recorded
from hf_neuron_moe.finetune.train_options import Options, bad, one_line
from hf_neuron_moe.finetune.trainers import TRAINERS, LogShortRuns, StopAfterStep
from hf_neuron_moe.patching.apply import report_of
from hf_neuron_moe.precision_map import spelled
from hf_neuron_moe.training.prepare import refuse_unsavable_adapters

MERGED = "merged"
Tell = Callable[[str], None]
_logger = logging.getLogger(__name__)


class TrainingInterrupted(KeyboardInterrupt):
    """Training ended after a step, with a checkpoint, because somebody asked for it."""


def check(options: Options) -> tuple[Any, Data]:
    """Find every mistake that can be found before a model is loaded; return the tokenizer and the rows.

    Raises:
        NeuronMoEError: an option does not fit this machine, the model, the data or another option.
    """
    with located(options.places):
        config = check_run(options)
        if asks_for_kernels(options):
            check_kernels(options, config, this_device(), Adapter())
        tokenizer = load_tokenizer(options.model, getattr(options.training, "chat_template_path", None))
        check_tokens(options.training, tokenizer)
        with options.training.main_process_first(desc="data"):
            data = load_data(options, tokenizer)
        check_packing(options, config)  # the data decides where no option does
        return tokenizer, data


def finetune(options: Options, tell: Tell = _logger.info, *, quiet: bool = False) -> dict[str, Any]:
    """Train, evaluate and save; return the metrics.

    Written to ``output_dir``: the model or the adapter with its tokenizer and a model card, and ``merged`` if asked
    for. So are ``trainer_state.json`` with the loss of every logging step, ``*_results.json``, and what the Trainer
    itself writes.

    Args:
        options: what :func:`hf_neuron_moe.finetune.read_options` returned.
        tell: gets what a reader of the run wants to know, in the first process only.
        quiet: without the Trainer's own lines and bars.

    Raises:
        NeuronMoEError: as :func:`check`.
        TrainingInterrupted: Ctrl-C was pressed; there is a checkpoint to resume from.
    """
    tokenizer, data = check(options)
    with located(options.places):
        trainer = make_trainer(options, tokenizer, data, tell)
        if quiet:
            for callback in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(callback)
        out = Path(options.training.output_dir)
        if options.training.process_index == 0:
            _tell_of_earlier(trainer, out, tell, resumes=bool(checkpoint_to_resume(options)))
        return _train(trainer, options, tell)


def _tell_of_earlier(trainer: Any, out: Path, tell: Tell, *, resumes: bool) -> None:
    """Say what becomes of the run that the output folder holds."""
    if not resumes and (out / TRAINER_STATE_NAME).is_file():
        tell(f"{out} holds a run that ended, and this one writes over it; --resume would continue it")
        if found := last_complete(str(out)):
            tell(f"its checkpoints stay, {found.name} the last: remove them, or a later --resume may take that one")
    was = recorded(out).get("config", {}).get("precision")
    model = trainer.accelerator.unwrap_model(trainer.model)
    base, given = base_of(out), getattr(model.config, "_name_or_path", "")
    if resumes and base and given and base != given:
        tell(f"this run was begun from {base}, and continues from {given}")
    report = report_of(model)
    now = None if report is None else spelled(report.config.precision)
    if resumes and was is not None and now not in (None, spelled(was)):
        tell(f"this run was computed in {spelled(was)}, and continues in {now}")


@contextmanager
def _without_false_warnings() -> Iterator[None]:
    """Leave out what libraries warn of among themselves.

    TRL and peft know checkpointing by its old name, about which transformers 5.23 and later warn. peft doubles the rank
    of a fused ``gate_up_proj``, then looks for it among modules and says that it ignores it; as a parameter it has it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing", FutureWarning)
        warnings.filterwarnings(
            "ignore", r"The following (rank|alpha)_pattern keys [^\[]*\['[^']*gate_up_proj[^',]*'\]", RuntimeWarning
        )
        yield


def make_trainer(options: Options, tokenizer: Any, data: Data, tell: Tell = _logger.info) -> Any:
    """Load the model, patch it, and return the Trainer over it and its adapters."""
    training = options.training
    set_seed(training.seed)
    model = load_model(options.model)
    report = patch(model, training, options.lora)
    more: dict[str, Any] = {}
    if options.data.method == "dpo" and not options.lora.lora_rank:
        more["ref_model"] = reference = load_model(options.model)  # with the same rounding as the model's
        patch(reference, training, options.lora)
    try:
        with _without_false_warnings():
            trainer: Any = TRAINERS[options.data.method](
                model=model,
                args=training,
                train_dataset=data.train,
                eval_dataset=data.held_out,
                processing_class=tokenizer,
                peft_config=adapters(options.lora, model),
                **more,
            )
    except NeuronMoEError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        keys = (
            "lora_targets, lora_parameters"
            if "target" in str(error).lower()
            else blamed(str(error), options.places, vars(training))
        )
        raise bad(keys, "what TRL and peft take with this model and data", one_line(error), "Correct it.") from error
    trainer.options = options
    trainer.train_dataset, trainer.eval_dataset = limited(options, trainer.train_dataset, trainer.eval_dataset)
    refuse_unsavable_adapters(trainer.model)
    check_merging(options.lora, sharded=trainer.is_fsdp_enabled)
    if not len(trainer.train_dataset) or not _teaches(trainer.train_dataset, training.max_length):
        got = f"{training.max_length}, with which no row has a token to learn"
        raise bad("max_length", "long enough for the prompts and something of the answers", got, "Raise it.")
    together = training.train_batch_size * training.world_size
    if training.dataloader_drop_last and len(trainer.train_dataset) < together:
        got = f"true, and {len(trainer.train_dataset):,} rows for batches of {together:,}"
        raise bad("dataloader_drop_last", "false where rows do not fill a batch", got, "Use smaller batches.")
    if training.process_index == 0:
        trained = sum(param.numel() for param in trainer.model.parameters() if param.requires_grad)
        held_out = len(trainer.eval_dataset) if trainer.eval_dataset is not None else 0
        tell(str(report) if report else describe_unpatched(model))
        rows = f"{counted(len(trainer.train_dataset), 'row')} of {data.kind}, {held_out:,} to evaluate on"
        if getattr(training, "packing", False):
            rows += f"; packed, from {len(data.train):,} and {len(data.held_out or ()):,} in the data"
        tell(f"{trained:,} trainable parameters; {rows}")
        tell(_processes(trainer))
    return trainer


def _teaches(rows: Any, length: int | None) -> bool:
    """Whether a row has a token to learn within `length`, as far as labels or masks of TRL say which are learned."""
    columns = set(rows.column_names or ())
    if "labels" in columns:
        return any(label != -100 for row in rows for label in row["labels"][:length])
    masks = {"assistant_masks", "completion_mask"} & columns
    return not masks or any(all(any(row[mask][:length]) for mask in masks) for row in rows)


def _processes(trainer: Any) -> str:
    """Say in words on how many processes, and how, a run is spread."""
    state = trainer.accelerator.state
    count, kind = state.num_processes, state.distributed_type
    if count == 1 and kind is DistributedType.NO:
        return f"one process on {state.device}"
    return f"{count} process{'es' if count > 1 else ''} ({kind.value}) on {state.device}"


def checkpoint_to_resume(options: Options) -> str | bool | None:
    """Return what ``Trainer.train`` resumes from: ``"auto"`` is the newest complete checkpoint, if there is one."""
    wish = options.training.resume_from_checkpoint
    if wish in (True, "true", "True"):
        return True
    if wish == "auto":
        return True if last_complete(options.training.output_dir) is not None else None
    return wish or None


@_without_false_warnings()
def _train(trainer: Any, options: Options, tell: Tell) -> dict[str, Any]:
    out = Path(options.training.output_dir)
    with StopAfterStep() as stop:
        trainer.add_callback(stop)
        if "logging_steps" not in options.places:
            trainer.add_callback(LogShortRuns())
        try:
            metrics = trainer.train(resume_from_checkpoint=checkpoint_to_resume(options)).metrics
        except NeuronMoEError:
            raise
        except (KeyError, ValueError, TypeError, AttributeError, AssertionError, ImportError) as error:
            key, resumed = blamed(str(error), options.places, vars(options.training)), checkpoint_to_resume(options)
            if resumed and (isinstance(error, KeyError) or "state dict" in str(error)):
                fix = "Resume with the settings of the run that wrote it."
                raise bad("resume_from_checkpoint", "of a run with this optimizer", one_line(error), fix) from error
            if key not in options.places:
                raise
            raise bad(key, "what TRL and transformers train with", one_line(error), "Correct it.") from error
    if stop.stopped:
        raise TrainingInterrupted(f"stopped after step {trainer.state.global_step}, with a checkpoint in {out}")
    if stop.steps:
        trainer.save_metrics("train", metrics)
    else:  # the run had ended: its loss stays in the file
        metrics = {}
        if trainer.is_world_process_zero():
            tell(f"nothing was left to train: the checkpoint is of step {trainer.state.global_step}, the last one")
    if trainer.eval_dataset is not None:
        measured = trainer.evaluate()
        if options.data.method == "sft":
            measured["eval_perplexity"] = math.exp(min(measured["eval_loss"], 700.0))
        trainer.save_metrics("eval", measured)
        metrics |= measured
    trainer.save_state()
    if options.training.push_to_hub:
        trainer.push_to_hub()  # saves, and writes the card
    else:
        trainer.save_model(str(out))
        trainer.create_model_card()
    if options.lora.lora_merge and trainer.is_world_process_zero():
        save_merged(trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class, out / MERGED)
    if trainer.is_world_process_zero():
        shown = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items() if isinstance(value, float))
        tell(f"{shown}\nsaved to {out}\nlook at the run: hf-neuron-moe report {shlex.quote(str(out))} --open")
    trainer.accelerator.wait_for_everyone()  # the first process may still write
    return metrics

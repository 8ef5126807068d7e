"""One run of a comparison: a variant trained with one seed, measured, and its result in a file of its own.

Legend: B sequences per batch, L tokens per sequence, N rows of tokens.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_neuron_moe.errors import DestinationError, NonFiniteLossError
from hf_neuron_moe.output_files import check_file
from hf_neuron_moe.training import NeuronMoETrainer, NeuronMoETrainingArguments, measure_saved_bytes
from hf_neuron_moe.training.run_files import write_whole

HELD_OUT = 10
"""One batch is held out for evaluation for so many steps."""
LOGS = 20  # lines of metrics.jsonl per run


@dataclass(frozen=True)
class Setting:
    """How every run of a comparison trains."""

    steps: int
    batch: int  # B
    length: int  # L
    learning_rate: float  # peak of AdamW's

    @property
    def held_out(self) -> int:
        """Batches that are held out."""
        return math.ceil(self.steps / HELD_OUT)

    @property
    def tokens(self) -> int:
        """Tokens that a run needs: each is read once, in training or in evaluation."""
        return (self.steps + self.held_out) * self.batch * self.length

    def fits(self, tokens: int) -> str:
        """Return the options that so many tokens do for."""
        steps = fitting_steps(tokens // (self.length * self.batch))
        return f"--steps {steps}" if steps else "a smaller --batch or --length"


def fitting_steps(count: int) -> int:
    """Return the steps of the longest run that `count` batches are enough for, those held out included."""
    return count - math.ceil(count / (HELD_OUT + 1))


@dataclass(frozen=True)
class Run:
    """Where a run's own files go, its seed, and whom it tells about each step."""

    folder: Path
    seed: int
    stepped: Callable[[], None]


def batches(rows_NL: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield ``[B, L]`` batches forever, in an order that only the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows_NL), generator=generator)
        for start in range(0, len(order) - batch + 1, batch):
            yield rows_NL[order[start : start + batch]]


def cross_entropy(model: nn.Module, output: Any) -> float:
    """Return the loss without the routers' load-balancing part, which is not what is compared.

    That part has the weight ``router_aux_loss_coef`` of the model's config; one of another name stays in the loss.
    """
    balance, loss = getattr(output, "aux_loss", None), output.loss.detach().double()
    if balance is not None:
        loss = loss - getattr(model.config, "router_aux_loss_coef", 0.0) * balance.detach().double()
    return float(loss)


def saved_bytes_per_token(model: nn.Module, blocks: Sequence[str], ids_BL: Tensor) -> float:
    """Return what the named blocks together keep for backward per token of one forward pass."""
    with measure_saved_bytes({name: model.get_submodule(name) for name in blocks}) as saved:
        model(ids_BL, labels=ids_BL, use_cache=False)
    return saved.bytes_per_token


def stored(path: Path, identity: str = "settings") -> dict[str, Any] | None:
    """Return what an earlier call of :func:`store` left, None without; `identity` is the key of what it belongs to."""
    if os.path.lexists(path):
        check_file(path, "Remove it, or name another folder with -o.")
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        result = None
    if not isinstance(result, dict) or not isinstance(result.get(identity), dict):
        fix = "It was changed, or is of another program. Remove it, or name another folder with -o."
        raise DestinationError.about(str(path), f"a JSON object with {identity}", "something else", fix)
    return result


def store(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content) + "\n")


class Observed(NeuronMoETrainer):
    """Trains and evaluates a model that is patched already, or stays stock, and notes each step's loss and duration."""

    def __init__(self, run: Run, **options: Any) -> None:
        super().__init__(**options)
        self.run, self.losses, self.seconds = run, list[float](), list[float]()
        # With batches of one size the mean per batch is the mean per token; so is the evaluation's.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.add_callback(_Clock(self.seconds, run.stepped))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as the Trainer does; evaluations get the cross entropy alone."""
        loss, output = super().compute_loss(model, inputs, True, num_items_in_batch)
        entropy = cross_entropy(model, output)
        if not math.isfinite(entropy):
            moment = f"step {len(self.losses) + 1}" if model.training else "evaluation"
            which = f"the loss of {self.run.folder.name}, {moment},"
            fix = "Lower --learning-rate. If stock is named, the model or its checkpoint is at fault, no recipe."
            if not self.losses:
                fix = "No step was taken yet: the model or its checkpoint is at fault, or the recipe if one is named."
            raise NonFiniteLossError.about(which, "finite", entropy, fix)
        if model.training:
            self.losses.append(entropy)
        else:
            loss = loss.new_tensor(entropy)
        return (loss, output) if return_outputs else loss


class _Clock(TrainerCallback):
    """Notes how long each step takes."""

    def __init__(self, seconds: list[float], stepped: Callable[[], None]) -> None:
        self.seconds, self.stepped, self.begin = seconds, stepped, 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begin)
        self.stepped()


def trained(
    model: nn.Module, blocks: Sequence[str], rows: tuple[Tensor, Tensor], setting: Setting, run: Run
) -> dict[str, Any]:
    """Train `model`, patched or stock, and return its losses, times, and the bytes that `blocks` save.

    `rows` are the token ids ``[N, L]`` to train on, and those that are held out.
    """
    train_NL, held_out_NL = rows
    ordered = torch.cat(list(islice(batches(train_NL, setting.batch, run.seed), setting.steps)))
    arguments = NeuronMoETrainingArguments(
        output_dir=str(run.folder),
        neuron_patch=False,
        max_steps=setting.steps,
        per_device_train_batch_size=setting.batch,
        per_device_eval_batch_size=setting.batch,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=0.05,  # of all steps
        adam_beta2=0.95,
        weight_decay=0.01,
        seed=run.seed,
        train_sampling_strategy="sequential",
        logging_steps=max(1, setting.steps // LOGS),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several would each get a batch
    examples = [[{"input_ids": row, "labels": row} for row in part] for part in (ordered, held_out_NL)]
    trainer = Observed(run, model=model, args=arguments, train_dataset=examples[0], eval_dataset=examples[1])
    with torch.random.fork_rng():  # dropout's numbers in training are those of every variant
        saved = saved_bytes_per_token(model.train(), blocks, ordered[: setting.batch].to(arguments.device))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return {
        "losses": trainer.losses,
        "eval_before": before,
        "eval_loss": trainer.evaluate()["eval_loss"],
        "step_seconds": statistics.median(trainer.seconds),
        "seconds": round(sum(trainer.seconds), 3),
        "saved_bytes_per_token": saved,
    }

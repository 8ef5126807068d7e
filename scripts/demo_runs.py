"""One fine-tuning run of the demo: load, patch, train with the stock Trainer, save, keep the logits for the comparison.

B batch, S sequence, V vocabulary, N windows, L tokens per window.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_text import PROGRESS_SECONDS, TokenWindows, mean_loss
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from hf_neuron_moe import NeuronMoEConfig, patch_model, unpatch_model
from hf_neuron_moe.training import measure_saved_bytes

STOCK = "stock fp32"
EDGE_STEPS = 4  # steps averaged for the training loss at the start and at the end: one step of 256 tokens is noisy


@dataclass(frozen=True)
class TrainOptions:
    """What every run of a demo has in common."""

    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    scratch: Path


@dataclass
class RunResult:
    """What one run measured; losses in nats, times in seconds."""

    name: str
    eval_loss_before: float = 0.0
    eval_loss_after: float = 0.0
    step_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    tokens_per_step: int = 0
    saved_bytes_per_token: float = 0.0
    patch_report: dict[str, Any] | None = None
    patched: int = 0
    skipped: int = 0
    refused: int = 0
    logit_difference: dict[str, float] = field(default_factory=dict)

    @property
    def train_loss_start(self) -> float:
        """Mean training loss of the first steps."""
        return statistics.fmean(self.step_losses[:EDGE_STEPS])

    @property
    def train_loss_end(self) -> float:
        """Mean training loss of the last steps."""
        return statistics.fmean(self.step_losses[-EDGE_STEPS:])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median step, optimizer included, the first (warm-up) step left out."""
        return self.tokens_per_step / statistics.median(self.step_seconds[1:] or self.step_seconds)


class StepRecorder(TrainerCallback):
    """Records loss and wall time of every step and prints a line every few seconds."""

    def __init__(self, result: RunResult, console: Console) -> None:
        self.result = result
        self.console = console
        self.started = self.printed = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.result.step_seconds.append(time.perf_counter() - self.started)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self.result.step_losses.append(float(logs["loss"]))
        now = time.perf_counter()
        if now - self.printed > PROGRESS_SECONDS or state.global_step in (1, state.max_steps):
            self.printed = now
            rate = self.result.tokens_per_step / self.result.step_seconds[-1]
            self.console.print(
                f"   step {state.global_step}/{state.max_steps}  loss {logs['loss']:.3f}  {rate:,.0f} tokens/s"
            )


def load(model_dir: Path | str) -> PreTrainedModel:
    """Load a causal language model in fp32 through the ordinary ``from_pretrained``."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def saved_bytes_per_token(model: PreTrainedModel, names: list[str], batch_BS: Tensor) -> float:
    """Return the bytes per token that the named blocks keep for backward in one training forward pass."""
    model.train()
    with measure_saved_bytes({name: model.get_submodule(name) for name in names}) as saved:
        model(batch_BS, labels=batch_BS, use_cache=False)
    return saved.bytes_per_token


def measure_blocks(model_dir: Path | str, precisions: tuple[str, ...], batch_BS: Tensor) -> dict[str, float]:
    """Return bytes per token saved for backward by the same blocks: stock, and patched with each precision.

    One model is loaded once, patched and unpatched in turn; which blocks are counted is what `patch_model` patches.
    """
    model = load(model_dir)
    measured: dict[str, float] = {}
    names: list[str] = []
    for precision in precisions:
        names = [entry.name for entry in patch_model(model, NeuronMoEConfig(precision=precision)).patched]
        measured[precision] = saved_bytes_per_token(model, names, batch_BS)
        unpatch_model(model)
    measured[STOCK] = saved_bytes_per_token(model, names, batch_BS)
    return measured


def logits_of(model: PreTrainedModel, ids_BS: Tensor) -> Tensor:
    """Return ``[B, S, V]`` logits in eval mode."""
    model.eval()
    with torch.no_grad():
        return model(ids_BS, use_cache=False).logits


def train(model: PreTrainedModel, data: TokenWindows, options: TrainOptions, recorder: StepRecorder) -> None:
    """Fine-tune with the stock Trainer; nothing in here knows whether the model is patched."""
    arguments = TrainingArguments(
        output_dir=str(options.scratch / "trainer"),
        per_device_train_batch_size=options.batch_size,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=min(2, options.steps // 4),
        lr_scheduler_type="cosine",
        seed=options.seed,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[recorder])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    # Trainer and optimizer refer to each other in circles; their memory is twice the model's.
    del trainer
    gc.collect()


def run(
    model_dir: Path | str,
    precision: str | None,
    data: TokenWindows,
    eval_windows_NL: Tensor,
    options: TrainOptions,
    console: Console,
) -> tuple[RunResult, PreTrainedModel]:
    """Fine-tune one model, stock (`precision` None) or patched, and evaluate it before and after.

    Returns:
        The measurements and the trained model, still patched.
    """
    result = RunResult(name=STOCK if precision is None else f"patched {precision}")
    result.tokens_per_step = options.batch_size * data.windows_NL.shape[1]
    model = load(model_dir)
    if precision is not None:
        report = patch_model(model, NeuronMoEConfig(precision=precision))
        result.patch_report = report.to_dict()
        result.patched, result.skipped = len(report.patched), len(report.skipped)
        result.refused = len(report.refused)
        console.print(f"   patched {result.patched}, skipped {result.skipped}, refused {result.refused} modules")
    result.eval_loss_before = mean_loss(model, eval_windows_NL, console, "evaluation before training, windows")
    console.print(f"   evaluation loss before training {result.eval_loss_before:.3f}")
    train(model, data, options, StepRecorder(result, console))
    result.eval_loss_after = mean_loss(model, eval_windows_NL, console, "evaluation after training, windows")
    console.print(f"   evaluation loss after training  {result.eval_loss_after:.3f}")
    return result, model


def save_and_keep_logits(model: PreTrainedModel, checkpoint: Path, ids_BS: Tensor) -> dict[str, Tensor]:
    """Save a trained patched model the ordinary way and return its logits for the comparison after reloading.

    Returns:
        ``"patched"``: as it was trained; ``"fp32"``: the same weights, patched with ``precision="fp32"``.
    """
    model.save_pretrained(checkpoint)
    logits = {"patched": logits_of(model, ids_BS)}
    unpatch_model(model)
    patch_model(model, NeuronMoEConfig(precision="fp32"))
    logits["fp32"] = logits_of(model, ids_BS)
    return logits

"""The same training three times, stock, bf16 and mxfp8, and what the runs say together.

Legend: N windows, L tokens per window, V vocabulary.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralForCausalLM

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.demo.speeches import held_out_windows, token_windows
from hf_neuron_moe.demo.subject import HELD_OUT_LENGTH, Subject
from hf_neuron_moe.patching.api import patch_model, unpatch_model
from hf_neuron_moe.recipes.variant_runs import Run, saved_bytes_per_token, trained
from hf_neuron_moe.training.run_files import environment

STOCK = "stock fp32"
VARIANTS = {STOCK: None, "bf16": NeuronMoEConfig(precision="bf16"), "mxfp8": NeuronMoEConfig(precision="mxfp8")}
SAVED = {
    "stock, fp32": (torch.float32, None),
    "stock, bf16": (torch.bfloat16, None),
    **{
        f"{precision}, {policy}": (torch.float32, NeuronMoEConfig(precision=precision, activations=policy))
        for precision, policy in (("bf16", "minimal"), ("mxfp8", "minimal"), ("mxfp8", "fp8"), ("mxfp8", "recompute"))
    },
}
"""What the bars of saved bytes show: the parameters' dtype, and how the block is patched."""
_CHUNK = 4  # windows of one forward pass

Progress = Callable[[int, int], None]
"""Called with the steps done and all of them."""


@dataclass
class Trained:
    """One run; losses in nats."""

    name: str
    curve: list[tuple[int, float]] = field(default_factory=list)  # step and held-out loss
    before: list[float] = field(default_factory=list)  # held-out loss by window
    after: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    saved_bytes_per_token: float = 0.0  # of all patched blocks together

    @property
    def loss(self) -> float:
        """The held-out loss at the end."""
        return self.curve[-1][1]


@dataclass
class Word:
    """A token of the held-out text, and what it cost the model before and after training."""

    year: int
    context: str
    token: str
    before: float
    after: float


@dataclass
class Comparison:
    """Everything that the page shows."""

    title: str
    years: list[int]
    setting: dict[str, Any]
    runs: list[Trained] = field(default_factory=list)
    saved: dict[str, float] = field(default_factory=dict)  # bytes per token and block
    words: list[Word] = field(default_factory=list)
    stock_loss: float = 0.0  # held-out loss of the mxfp8 run's weights in stock blocks
    reloaded_loss: float = 0.0  # the same, as a process without this package computes it from the saved checkpoint
    environment: dict[str, Any] = field(default_factory=environment)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Text:
    """What every run is trained on, and what its losses are measured on."""

    train_NL: Tensor
    held_NL: Tensor


def compare(subject: Subject, folder: Path, progress: Progress, say: Callable[[str], None]) -> Comparison:
    """Train `subject` in every way of :data:`VARIANTS` on the same batches; run files go to `folder`."""
    setting = subject.setting
    held_out = held_out_windows(subject.encode, HELD_OUT_LENGTH)
    text = Text(token_windows(subject.encode, "train", setting.length), torch.stack(list(held_out.values())))
    facts = asdict(setting) | {"held_out_tokens": text.held_NL.numel()}
    found = Comparison(subject.title, list(held_out), facts, saved=saved_by_policy(subject.model))
    model: MixtralForCausalLM
    for number, name in enumerate(VARIANTS):
        model = None  # type: ignore[assignment] # free before the next one is made
        gc.collect()  # Trainer, optimizer and model refer to each other in circles
        advance = partial(_advance, progress, number * setting.steps, len(VARIANTS) * setting.steps)
        model, run, before_NL, after_NL = _trained(name, subject, text, folder, advance)
        found.runs.append(run)
        say(f"{name}: held-out loss {run.curve[0][1]:.3f} -> {run.loss:.3f}")
    found.words = _learned(subject, held_out, before_NL, after_NL)
    unpatch_model(model)
    found.stock_loss = float(token_losses(model, text.held_NL).mean())
    say("opening the mxfp8 run's checkpoint in stock transformers, in a process of its own")
    found.reloaded_loss = loss_without_us(model, text.held_NL)
    return found


def _advance(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _trained(
    name: str, subject: Subject, text: Text, folder: Path, progress: Callable[[int], None]
) -> tuple[MixtralForCausalLM, Trained, Tensor, Tensor]:
    """Train a copy of the model; return it, what was measured, and the losses of all tokens before and after."""
    model, config, setting = copy.deepcopy(subject.model), VARIANTS[name], subject.setting
    if config is not None:
        patch_model(model, config)
    before_NL = after_NL = token_losses(model, text.held_NL)
    run = Trained(name, [(0, float(before_NL.mean()))], before_NL.mean(1).tolist())
    done = 0

    def after_step() -> None:
        nonlocal done, after_NL
        done += 1
        if done % subject.every == 0 or done == setting.steps:
            after_NL = token_losses(model, text.held_NL)
            run.curve.append((done, float(after_NL.mean())))
        progress(done)

    files = Run(folder / name.replace(" ", "-"), 0, after_step)
    # Its own evaluation is of one window only: the losses are measured here, at every point of the curve.
    measured = trained(model, experts_of(subject.model), (text.train_NL, text.held_NL[:1]), setting, files)
    run.after, run.train_losses = after_NL.mean(1).tolist(), measured["losses"]
    run.tokens_per_second = setting.batch * setting.length / measured["step_seconds"]
    run.saved_bytes_per_token = measured["saved_bytes_per_token"]
    return model, run, before_NL, after_NL


def experts_of(model: MixtralForCausalLM) -> list[str]:
    """Return the names of the blocks that are patched."""
    with torch.device("meta"):
        return [entry.name for entry in patch_model(MixtralForCausalLM(model.config)).patched]


def token_losses(model: nn.Module, windows_NL: Tensor) -> Tensor:
    """Return the cross entropy of every token but the first of each window, ``[N, L - 1]``, in evaluation mode."""
    training = model.training
    model.eval()
    parts = []
    with torch.no_grad():
        for ids_NL in windows_NL.split(_CHUNK):
            logits_NLV = model(ids_NL, use_cache=False).logits[:, :-1].float()
            parts.append(nn.functional.cross_entropy(logits_NLV.transpose(1, 2), ids_NL[:, 1:], reduction="none"))
    model.train(training)
    return torch.cat(parts)


def saved_by_policy(model: MixtralForCausalLM) -> dict[str, float]:
    """Return what one block of the model saves for backward per token, by :data:`SAVED`."""
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(256, (2, HELD_OUT_LENGTH), generator=generator)
    saved = {}
    config_of_one = copy.deepcopy(model.config)
    config_of_one.num_hidden_layers, config_of_one.vocab_size, config_of_one.pad_token_id = 1, 256, None
    for name, (dtype, config) in SAVED.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            small = MixtralForCausalLM(config_of_one)
        nn.Module.to(small, dtype).train()
        if config is not None:
            patch_model(small, config)
        saved[name] = saved_bytes_per_token(small, ["model.layers.0.mlp.experts"], ids_BL)
    return saved


def loss_without_us(model: MixtralForCausalLM, windows_NL: Tensor) -> float:
    """Save the model, and return its loss on the windows as a process computes it that does not have this package."""
    with tempfile.TemporaryDirectory(prefix="hf-neuron-moe-demo-") as folder:
        windows_file, checkpoint = Path(folder) / "windows.pt", Path(folder) / "checkpoint"
        torch.save(windows_NL, windows_file)
        model.save_pretrained(checkpoint)
        script = Path(__file__).with_name("stock_losses.py")
        command = [sys.executable, "-P", str(script), str(windows_file), str(checkpoint)]
        # In a session of its own it does not see Ctrl-C: this process ends it, and says so in one line.
        # Ctrl-C while it is being started leaves it without its files, of which it must not print a traceback.
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return float(done.stdout.split()[-1])


def _learned(subject: Subject, held_out: dict[int, Tensor], before_NL: Tensor, after_NL: Tensor) -> list[Word]:
    """The token of each window whose loss fell most, with the text before it."""
    words = []
    for (year, window_L), before_L, after_L in zip(held_out.items(), before_NL, after_NL):
        ids = window_L.tolist()
        shown_L = torch.tensor([bool(subject.decode([token]).strip()) for token in ids[1:]])  # the first has no loss
        place = int((before_L - after_L).where(shown_L, -torch.inf).argmax()) + 1
        context = " ".join(subject.decode(ids[max(0, place - 12) : place]).split())
        loss = float(before_L[place - 1]), float(after_L[place - 1])
        words.append(Word(year, context, subject.decode([ids[place]]).strip(), *loss))
    return words

"""One run of the parity study: a model, a variant, a seed; its losses go into one JSON file, which is not run again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from study_models import Study, Subject
from study_train import train
from transformers import PreTrainedModel

from hf_neuron_moe import __version__, patch_model, unpatch_model
from hf_neuron_moe.recipes.variant_runs import batches, saved_bytes_per_token, store, stored

STOCK = "stock fp32"
CONTROL = "fp32"
VARIANTS: dict[str, dict[str, str] | None] = {
    STOCK: None,
    CONTROL: {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "mxfp8": {"precision": "mxfp8"},
    "mxfp8, fp8 saved": {"precision": "mxfp8", "activations": "fp8"},
    "mxfp8, recompute": {"precision": "mxfp8", "activations": "recompute"},
}
"""The control is the same mathematics as stock in sums of another order: how far two curves part that nobody can call
different. Training is chaotic where routers choose; a difference below the control's says nothing about a variant."""

FP32_VARIANTS: dict[str, dict[str, str] | None] = {
    "fp32, full": {"precision": "fp32", "activations": "full"},
    "fp32, recompute": {"precision": "fp32", "activations": "recompute"},
}
"""Lossless policies in exact arithmetic: their curves and the control's must be one."""
FP32_STEPS = 64
Tell = Callable[[int, float, float], None]
"""Called with the step, its loss, and the seconds since the run began."""


@dataclass(frozen=True)
class Run:
    """What one run is; its file name and its settings follow from it."""

    model: str
    variant: str
    seed: int
    steps: int

    @property
    def file_name(self) -> str:
        """Name of the file with the run's result."""
        variant = self.variant.replace(", ", "-").replace(" ", "-")
        return f"{self.model}.{variant}.{self.seed}.json"


def planned(subjects: dict[str, Subject], seeds: int) -> list[Run]:
    """Return all runs of the study, seed by seed, so that an early end leaves whole comparisons.

    Recomputing comes last: it should only repeat what the lossless policy did.
    """
    runs, last = [], []
    for seed in range(seeds):
        for name, subject in subjects.items():
            own = [Run(name, variant, seed, subject.steps) for variant in VARIANTS]
            runs += own[:-1]
            last += own[-1:]
        if seed == 0:
            for name, subject in subjects.items():
                runs += [Run(name, variant, seed, min(FP32_STEPS, subject.steps)) for variant in FP32_VARIANTS]
    return runs + last


def settings(run: Run, subject: Subject) -> dict[str, Any]:
    """Everything that decides a run's losses, beside the code."""
    options = (VARIANTS | FP32_VARIANTS)[run.variant]
    return {**asdict(run), "subject": asdict(subject), "options": options, "version": __version__}


def known_result(folder: Path, run: Run, subject: Subject) -> dict[str, Any] | None:
    """Return the result of a run that was done before with the same settings, or None."""
    result = stored(folder / run.file_name)
    return result if result is not None and result["settings"] == settings(run, subject) else None


def do(run: Run, study: Study, folder: Path, tell: Tell) -> dict[str, Any]:
    """Train, and write the losses to the run's file, which appears only when it is complete."""
    subject = study.subjects[run.model]
    model = study.model(run.model, run.seed)
    options = (VARIANTS | FP32_VARIANTS)[run.variant]
    patched, saved = patch_and_measure(model, options, study.windows(run.model)[: subject.batch])
    begin = time.perf_counter()
    data = batches(study.windows(run.model), subject.batch, run.seed)
    losses = []
    # The schedule is always the whole run's, so that a run of fewer steps is the beginning of a longer one.
    for step, loss in enumerate(islice(train(model, data, subject.steps, subject.rate), run.steps)):
        losses.append(loss)
        tell(step, loss, time.perf_counter() - begin)
    result = {
        "settings": settings(run, subject),
        "patched": patched,
        "saved_bytes_per_token": saved,
        "seconds": round(time.perf_counter() - begin, 1),
        "losses": losses,
    }
    store(folder / run.file_name, result)
    return result


def patch_and_measure(
    model: PreTrainedModel, options: dict[str, str] | None, ids_BL: torch.Tensor
) -> tuple[int, float]:
    """Patch the model (unless `options` is None) and count what the blocks save per token in one forward pass.

    Returns:
        Number of patched blocks, and bytes per token of all blocks together; stock: of those that would be patched.
    """
    names = [entry.name for entry in patch_model(model, options).patched]
    if options is None:
        unpatch_model(model)
    return len(names) if options is not None else 0, saved_bytes_per_token(model, names, ids_BL)

"""The model card of a run: what was trained on what, how it was computed, and what came out."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from hf_neuron_moe.finetune.train_options import Options
from hf_neuron_moe.patching.apply import report_of
from hf_neuron_moe.precision_map import spelled

_PACKAGES = ("hf-neuron-moe", "torch", "transformers", "trl", "peft", "datasets")


def card_of(trainer: Any, options: Options) -> str:
    """Return the card in Markdown, with the metadata that the hub reads."""
    model, data, lora = options.model, options.data, options.lora
    base = None if Path(model.model).exists() else model.model
    metadata = ModelCardData(
        base_model=base,
        datasets=[data.dataset] if data.dataset else None,
        library_name="peft" if lora.lora_rank else "transformers",
        pipeline_tag="text-generation",
        tags=["hf-neuron-moe", "trl", data.method],
    )
    rows = {**_settings(trainer, options), **_computed(trainer, options), **_results(trainer)}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value not in (None, ""))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES if _is_installed(name))
    name = base or Path(model.model).name
    return (
        f"---\n{metadata.to_yaml()}\n---\n\n# {Path(trainer.args.output_dir).name}\n\n"
        f"Fine-tuned from `{name}` with `hf-neuron-moe train` "
        f"({'LoRA adapters' if lora.lora_rank else 'all weights'}, method `{data.method}`).\n\n"
        f"| | |\n|---|---|\n{table}\n\nMade with {versions}.\n"
    )


def _settings(trainer: Any, options: Options) -> dict[str, Any]:
    args, lora, data = trainer.args, options.lora, options.data
    targets = ", ".join([*lora.lora_targets, *lora.lora_parameters])
    return {
        "data": data.dataset or ", ".join(Path(file).name for file in data.train_files).replace("|", "\\|"),
        "training rows": f"{len(trainer.train_dataset):,}",
        "LoRA": f"rank {lora.lora_rank}, alpha {lora.lora_alpha:g} on {targets}" if lora.lora_rank else None,
        "steps": f"{trainer.state.global_step:,} of {trainer.state.max_steps:,}",
        "rows per step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "learning rate": f"{args.learning_rate:g}, {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}",
        "beta": getattr(args, "beta", None) if data.method == "dpo" else None,
        "longest row": args.max_length,
        "packed": getattr(args, "packing", None),
        "seed": args.seed,
    }


def _computed(trainer: Any, options: Options) -> dict[str, Any]:
    """How the blocks were computed, and what they kept for backward."""
    report = report_of(trainer.accelerator.unwrap_model(trainer.model))
    if report is None:
        return {"patched blocks": "none"}
    config = report.config
    blocks = Counter((entry.kind, entry.precision, entry.backend) for entry in report.patched)
    saved = [entry.saved_bytes_per_token for entry in report.patched]
    known = None if None in saved else sum(found for found in saved if found is not None)
    return {
        "precision": f"`{spelled(config.precision)}`",
        "patched blocks": "; ".join(
            f"{count} {kind} in {precision}, computed by {backend}"
            for (kind, precision, backend), count in blocks.items()
        ),
        "activation policy": f"`{options.training.neuron_activations}`",
        "saved bytes per token": None if known is None else f"{known:,.0f}",
        "weight layout": ", ".join(sorted({str(entry.weights) for entry in report.patched})),
    }


def _results(trainer: Any) -> dict[str, Any]:
    history, saved = trainer.state.log_history, trainer.state.best_global_step
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    best = trainer.args.load_best_model_at_end and saved in dict(evaluated)
    shown = {"loss": losses, "evaluation loss": [entry for entry in evaluated if not best or entry[0] <= saved]}
    results = {name: _last_and_first(found) for name, found in shown.items() if found}
    return {**results, "saved model": f"that of step {saved}, the best one"} if best else results


def _last_and_first(found: list[tuple[int, float]]) -> str:
    last, first = (f"{loss:.4f} at step {step}" for step, loss in (found[-1], found[0]))
    return last if last == first else f"{last} ({first})"


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False

"""Exploring a model: measure, rank, verify, plan, fold."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_neuron_moe._version import __version__
from hf_neuron_moe.errors import ConfigError, NonFiniteWeightsError, not_one_of, public
from hf_neuron_moe.explore import fold as folding
from hf_neuron_moe.explore.advice import advise
from hf_neuron_moe.explore.explain import FOLD, reason_of
from hf_neuron_moe.explore.exploration import Exploration, Ranked
from hf_neuron_moe.explore.measure import Pass
from hf_neuron_moe.explore.measured_changes import at_precisions, losses_of, spread_over
from hf_neuron_moe.explore.measures import FORMATS, PRODUCTS, Measures
from hf_neuron_moe.explore.precision_plan import DEVICES, costs_of, limit_of, make_plan
from hf_neuron_moe.explore.state import identity_of, load_state, save_state
from hf_neuron_moe.explore.text import token_rows
from hf_neuron_moe.patching import patch_model
from hf_neuron_moe.training.blocks import patched_blocks

FEWEST_ROWS = 4
"""Rows of text below which neither deviations nor a plan can be trusted."""

Progress = Callable[[int, int], None]
"""Called with the units of work that are done, and all of them."""


@dataclass(frozen=True)
class Options:
    """What to measure and how."""

    tokens: int = 16384
    length: int = 512  # tokens per row
    formats: tuple[str, ...] = ("mxfp8", "fp8-saved")
    budget: str = "0.25%"
    device: str = "trn3"
    step_tokens: int = 8192
    verify: int = 4
    draws: int = 1  # sets of labels per row for the second order
    fold: Path | None = None
    held_out: int = 0  # tokens behind the measured ones, on which the plan's loss is measured


@public("explore")
def explore(
    folder: Path, text: Path, options: Options, state: Path | None = None, progress: Progress | None = None
) -> Exploration:
    """Measure what the formats do to the model in `folder` on a text, and plan its precisions.

    `state` is a file that holds what was gathered so far: a run that was killed goes on from there, and it is removed
    at the end.

    Raises:
        ConfigError: an option or the text does not do; NothingToPatchError: the model has no block to look at;
        NonFiniteWeightsError: it has weights that are not finite.
    """
    _check(options)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows_NL = token_rows(text, tokenizer, options.tokens, options.length)
    if len(rows_NL) < FEWEST_ROWS:
        needed = FEWEST_ROWS * rows_NL.shape[1]
        fix = "Give a longer text and more --tokens, or a smaller --length."
        raise ConfigError.about("tokens", f"at least {needed:,} ({FEWEST_ROWS} rows)", f"{options.tokens:,}", fix)
    if options.fold is not None:
        folding.check_destination(options.fold)
    model = load_model(folder)
    what = (options.tokens, options.length, options.formats, options.draws)
    identity = identity_of(folder, text, what)
    measures = (load_state(state, identity) if state is not None else None) or Measures()
    flips = options.verify + 3 if options.verify else 2
    all_work = len(rows_NL) * (4 + flips)

    def advance(done: int) -> None:
        if progress is not None:
            progress(done, all_work)

    one = Pass(model, options.formats, measures, options.draws)
    advance(4 * measures.rows)
    for row_L in rows_NL[measures.rows :]:
        one.run(row_L)
        if state is not None:
            save_state(state, identity, measures)
        advance(4 * measures.rows)
    result = _judged(folder, text, options, measures)
    result = _verified(model, rows_NL, options, result, lambda step: advance(len(rows_NL) * (4 + step)))
    if options.fold is not None:
        _folded(model, tokenizer, rows_NL, options.fold, result)
    advance(all_work)
    if state is not None:
        state.unlink(missing_ok=True)
    return result


def _check(options: Options) -> None:
    for name in options.formats:
        if name not in FORMATS:
            raise not_one_of("formats", name, FORMATS)
    if "mxfp8" not in options.formats:
        raise ConfigError.about("formats", "with mxfp8, which is planned", ",".join(options.formats), "Add mxfp8.")
    if options.device not in DEVICES:
        raise not_one_of("device", options.device, DEVICES)
    limit_of(options.budget, 1.0)


def load_model(folder: Path) -> Any:
    """Return the model in evaluation mode, patched to compute as a training step in bf16 does."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    check_finite(model)
    model.eval().requires_grad_(False)
    patch_model(model, {"precision": "bf16", "activations": "recompute", "weights": "stock", "backend": "torch"})
    for block in patched_blocks(model).values():
        block.train()  # inference may take a shorter way with other roundings
    return model


def check_finite(model: nn.Module) -> None:
    """Raise for weights that hold NaN or infinity."""
    for name, param in model.named_parameters():
        if not torch.isfinite(param).all():
            fix = "Find the checkpoint before they appeared."
            raise NonFiniteWeightsError.about(
                name, "finite", f"{int((~param.isfinite()).sum()):,} values that are not", fix
            )


def _judged(folder: Path, text: Path, options: Options, measures: Measures) -> Exploration:
    """Rank, explain and plan."""
    planned = [form for form in ("mxfp8", "mxfp4") if form in options.formats]
    ranking = {form: _ranked(measures, form) for form in (*planned, *("bf16",) * ("bf16" in options.formats))}
    costs = costs_of(measures.blocks, measures.tokens, options.device, options.step_tokens, ("bf16", *planned))
    trained = {name: {kind: cost for kind, cost in row.items() if kind != "mxfp4"} for name, row in costs.items()}
    limit = limit_of(options.budget, measures.loss / measures.tokens)
    where = options.device, options.step_tokens
    plan = make_plan(measures, trained, limit, *where)
    frozen = make_plan(measures, costs, limit, *where, frozen=True) if "mxfp4" in planned else None
    advice = advise(measures, costs, options.device, options.step_tokens)
    environment = {
        "hf_neuron_moe": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    names = str(folder), str(text)
    return Exploration(*names, options.formats, measures, ranking, plan, frozen, advice, environment=environment)


def _ranked(measures: Measures, form: str) -> list[Ranked]:
    tokens, rows = measures.tokens, []
    for name, block in measures.blocks.items():
        score = block.scores[form]
        products = {
            product: block.scores[f"{form} {product}"].total / tokens
            for product in PRODUCTS
            if f"{form} {product}" in block.scores
        }
        reason = reason_of(name, block, form)
        rows.append(Ranked(name, score.total / tokens, score.deviation / tokens, reason, products))
    return sorted(rows, key=lambda row: -row.predicted)


def _verified(
    model: Any, rows_NL: Tensor, options: Options, result: Exploration, advance: Callable[[int], None]
) -> Exploration:
    """Measure the loss of uniform precisions, of the plan, and with single blocks in mxfp8."""
    names, base = list(result.measures.blocks), result.loss
    maps = {"mxfp8": dict.fromkeys(names, "mxfp8"), "plan": result.plan.precisions}
    result.measured["bf16"] = base
    step = 0
    for label, precisions in maps.items():
        with at_precisions(model, precisions):
            result.measured[label] = _mean(losses_of(model, rows_NL))
        advance(step := step + 1)
    ranked = result.ranking.get("mxfp8", [])
    measured = {}
    for name in spread_over([row.block for row in ranked], options.verify):
        with at_precisions(model, {name: "mxfp8"}):
            measured[name] = _mean(losses_of(model, rows_NL)) - base
        advance(step := step + 1)
    if ranked:
        result.ranking["mxfp8"] = [replace(row, measured=measured.get(row.block)) for row in ranked]
    return result


def _folded(model: Any, tokenizer: Any, rows_NL: Tensor, destination: Path, result: Exploration) -> None:
    """Fold every outlier that was found, measure again, and write the checkpoint."""
    form = next(iter(result.ranking))
    rows = [row for row in result.ranking[form] if row.reason.remedy_kind == FOLD and row.reason.outlier is not None]
    if not rows:
        fix = "Leave out --fold: no block has an outlier channel that costs it bits."
        raise ConfigError.about("fold", "left out where there is nothing to fold", str(destination), fix)
    outliers = {row.block: row.reason.outlier for row in rows if row.reason.outlier is not None}
    result.folds += [each.text for each in folding.fold(model, outliers, rows_NL[0])]
    names = list(result.measures.blocks)
    for precision in ("bf16", "mxfp8"):
        with at_precisions(model, dict.fromkeys(names, precision)):
            result.folded[precision] = _mean(losses_of(model, rows_NL))
    folding.save_folded(model, tokenizer, destination)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

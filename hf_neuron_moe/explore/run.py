"""Exploring a model: measure, rank, verify, plan, fold."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_neuron_moe._version import __version__
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.convert.io.folder import checkpoint_folder
from hf_neuron_moe.convert.plan import no_codes
from hf_neuron_moe.device.kernel_support import block_groups
from hf_neuron_moe.device.roofline_math import GPUS
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, not_one_of, public
from hf_neuron_moe.explore import fold as folding
from hf_neuron_moe.explore.advice import advise, missing_kernels, without_kernels
from hf_neuron_moe.explore.explain import reason_of
from hf_neuron_moe.explore.exploration import Exploration, Ranked, standard_error
from hf_neuron_moe.explore.inputs import check_finite, checked_rows
from hf_neuron_moe.explore.measure import Pass
from hf_neuron_moe.explore.measured_changes import at_precisions, losses_of, spread_over
from hf_neuron_moe.explore.measures import FORMATS, PRODUCTS, Measures
from hf_neuron_moe.explore.precision_plan import DEVICES, MXFP4_PRODUCTS, costs_of, limit_of, make_plan
from hf_neuron_moe.explore.state import identity_of, load_state, save_state
from hf_neuron_moe.patching import patch_model
from hf_neuron_moe.patching.discovery import discover
from hf_neuron_moe.training.blocks import patched_blocks

FEWEST_ROWS = 4
"""Rows of text below which neither deviations nor a plan can be trusted."""

ROW_WORK = 6
"""What measuring a row takes, in forwards of one."""

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

    def fits(self, tokens: int) -> str:
        """Return the options that so many tokens do for; nothing if none do."""
        if tokens // self.length >= FEWEST_ROWS:
            return f"--tokens {tokens // self.length * self.length}"
        length = tokens // FEWEST_ROWS
        return f"--tokens {length * FEWEST_ROWS} --length {length}" if length > 1 else ""


@public("explore")
def explore(
    folder: Path, text: Path, options: Options, state: Path | None = None, progress: Progress | None = None
) -> Exploration:
    """Measure what the formats do to the model in `folder` on a text, and plan its precisions.

    `state` is a file that holds what was gathered so far: a run that was killed goes on from there. It stays, for the
    caller to remove when the result is safe. One of another model, text or options is overwritten with a warning.

    Raises:
        ConfigError: an option or the text does not do; NothingToPatchError: the model has no block to look at;
        NonFiniteWeightsError: it has weights that are not finite; NonFiniteLossError: its loss is not.
    """
    _check(options)
    folder = checkpoint_folder(folder)
    on_meta = build_meta_model(folder, attention=None)
    uncoded = [each.name for each in discover(on_meta) if each.reason is None and no_codes(each) is not None]
    groups = block_groups(on_meta)
    patch_model(on_meta)
    tokenizer, rows_NL = checked_rows(folder, on_meta, text, options.tokens, options.length, options.fits)
    model = load_model(folder)
    what = (options.tokens, options.length, options.formats, options.draws)
    identity = identity_of(folder, text, what)
    measures = (load_state(state, identity) if state is not None else None) or Measures()
    flips = min(options.verify, len(patched_blocks(model))) + 2
    all_work = len(rows_NL) * (ROW_WORK + flips)

    def advance(done: int) -> None:
        if progress is not None:
            progress(done, all_work)

    one = Pass(model, options.formats, measures, options.draws)

    def save() -> None:
        if state is not None:
            save_state(state, identity, measures)

    advance(ROW_WORK * measures.rows)
    for row_L in rows_NL[measures.rows :]:
        one.run(row_L)
        save()
        advance(ROW_WORK * measures.rows)
    missing = missing_kernels(groups, options.device)
    result = _judged(folder, text, options, measures, uncoded, missing)
    result.advice += without_kernels(missing, result.plan.precisions, options.device)

    def flipped(count: int) -> None:
        save()
        advance(len(rows_NL) * (ROW_WORK + count))

    _verify(model, rows_NL, options, result, flipped)
    if options.fold is not None:
        _fold(model, tokenizer, rows_NL, options.fold, result)
    advance(all_work)
    return result


def _check(options: Options) -> None:
    rows = options.tokens // min(options.length, options.tokens)
    if rows < FEWEST_ROWS:
        needed = FEWEST_ROWS * options.length
        fix = "Give a longer text and more --tokens, or a smaller --length."
        raise ConfigError.about("tokens", f"at least {needed:,} ({FEWEST_ROWS} rows)", f"{options.tokens:,}", fix)
    if options.fold is not None:
        folding.check_destination(options.fold)
    for name in options.formats:
        if name not in FORMATS:
            raise not_one_of("formats", name, FORMATS)
    if "mxfp8" not in options.formats:
        got = repr(",".join(options.formats))
        raise ConfigError.about("formats", "a list with mxfp8, which is planned", got, "Add mxfp8.")
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


def _judged(
    folder: Path,
    text: Path,
    options: Options,
    measures: Measures,
    uncoded: Sequence[str] = (),
    missing: Collection[tuple[str, str]] = (),
) -> Exploration:
    """Rank, explain and plan; no conversion stores codes for the blocks `uncoded`.

    `missing` are blocks and precisions that the device has no kernel for.
    """
    planned = [form for form in ("mxfp8", "mxfp4") if form in options.formats]
    ranking = {form: _ranked(measures, form) for form in (*planned, *("bf16",) * ("bf16" in options.formats))}
    kinds = ("bf16", *planned, *MXFP4_PRODUCTS * ("mxfp4" in planned and options.device in GPUS))
    costs = costs_of(measures.blocks, measures.positions, options.device, options.step_tokens, kinds)
    trained = {name: {kind: cost for kind, cost in row.items() if "mxfp4" not in kind} for name, row in costs.items()}
    limit = limit_of(options.budget, measures.loss / measures.tokens)
    where = options.device, options.step_tokens
    plan = make_plan(measures, trained, limit, *where, missing=missing)
    stored = costs | {name: {"bf16": costs[name]["bf16"]} for name in uncoded}
    frozen = make_plan(measures, stored, limit, *where, frozen=True) if "mxfp4" in planned else None
    advice = advise(measures, costs, options.device, options.step_tokens)
    environment = {
        "hf_neuron_moe": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    names = folder.name or str(folder.resolve()), _spelled(text)
    return Exploration(*names, options.formats, measures, ranking, plan, frozen, advice, environment=environment)


def _spelled(text: Path) -> str:
    """A file's name as it was given: one of this package begins with ``package:``, not with where that is installed."""
    package = Path(__file__).resolve().parents[1]
    return f"package:{text.relative_to(package).as_posix()}" if text.is_relative_to(package) else str(text)


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


def _verify(model: Any, rows_NL: Tensor, options: Options, result: Exploration, flipped: Callable[[int], None]) -> None:
    """Measure the loss of uniform mxfp8, of the plan, and with single blocks in mxfp8."""
    measures, names = result.measures, list(result.measures.blocks)
    planned = [name for name, precision in result.plan.precisions.items() if precision == "mxfp8"]
    singles = spread_over([row.block for row in result.ranking["mxfp8"]], options.verify)
    known = measures.flips
    known[""] = measures.losses  # of no block in mxfp8
    changes: dict[str, tuple[float, float]] = {}
    for count, blocks in enumerate([names, planned, *([name] for name in singles)], 1):
        key = " ".join(blocks)
        if key not in known:
            with at_precisions(model, dict.fromkeys(blocks, "mxfp8")):
                known[key] = losses_of(model, rows_NL)
        differences = [one - other for one, other in zip(known[key], measures.losses, strict=True)]
        changes[key] = fmean(differences), standard_error(differences)
        flipped(count)
    for label, blocks in (("bf16", []), ("mxfp8", names), ("plan", planned)):
        change, result.measured_errors[label] = changes.get(" ".join(blocks), (0.0, 0.0))
        result.measured[label] = result.loss + change
    rows = [(row, changes.get(row.block, (None, None))) for row in result.ranking["mxfp8"]]
    result.ranking["mxfp8"] = [replace(row, measured=change, measured_error=error) for row, (change, error) in rows]
    reach, limit = 2 * result.measured_errors["mxfp8"], result.plan.limit
    if reach > limit:
        needed = math.ceil(rows_NL.numel() * (reach / limit) ** 2 / rows_NL.shape[1]) * rows_NL.shape[1]
        result.advice.append(
            f"This text is short for the limit: {rows_NL.numel():,} tokens tell the change by uniform mxfp8 within "
            f"± {100 * reach / result.loss:.2g} % (two standard errors). About {needed:,} tokens are needed."
        )


def _fold(model: Any, tokenizer: Any, rows_NL: Tensor, destination: Path, result: Exploration) -> None:
    """Fold the outliers that were found, block by block; measure again, and write the checkpoint if any was folded."""
    for row in result.ranking["mxfp8"]:
        if row.reason.outliers:
            try:
                result.folds += [each.text for each in folding.fold(model, row.block, row.reason.outliers, rows_NL[0])]
            except UnsupportedModelError as error:
                result.not_folded.append(str(error))
    if not result.folds:
        result.not_folded.append(f"{destination} was not written: no block has an outlier channel that can be folded.")
        return
    for precision in ("bf16", "mxfp8"):
        with at_precisions(model, dict.fromkeys(result.measures.blocks, precision)):
            result.folded[precision] = fmean(losses_of(model, rows_NL))
    folding.save_folded(model, tokenizer, destination)

"""Stock against recipes on one model and text: which runs that takes, and what they say together.

Legend: N rows, L tokens per row.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_neuron_moe._version import __version__
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.convert.io.file_hashes import hash_file
from hf_neuron_moe.convert.io.folder import CONFIG_FILE, checkpoint_folder
from hf_neuron_moe.convert.io.source import read_source
from hf_neuron_moe.errors import ConfigError, DestinationError, NeuronMoEError, public
from hf_neuron_moe.explore.text import token_rows
from hf_neuron_moe.patching.api import patch_model, unpatch_model
from hf_neuron_moe.recipes.loss_differences import compared, paired
from hf_neuron_moe.recipes.variant_runs import Run, Setting, store, stored, trained
from hf_neuron_moe.training.run_files import environment

STOCK = "stock"
RUNS_FOLDER, STUDY_FILE = "runs", "parity.json"


class RecipeStudy:
    """The same training with the stock model and with each recipe, over several seeds.

    Everything that can be wrong is checked when it is made, before a step is trained. The seed decides the order of the
    text and, where the model has dropout, its numbers; weights and text are the same in all runs.

    Args:
        model: a checkpoint's folder or a Hub id.
        text: what is trained on; the rows behind are held out for evaluation.
        recipes: what the patched blocks compute, by the name of each variant.
        setting: how every run trains.
        seeds: number of them, beginning with 0.
        folder: where the files of the runs go. Runs that ended there before are not repeated.
    """

    @public("parity")
    def __init__(
        self, model: str, text: Path, recipes: Mapping[str, NeuronMoEConfig], setting: Setting, seeds: int, folder: Path
    ) -> None:
        self.directory = checkpoint_folder(model)
        self.name = self.directory.resolve().name
        self.variants: dict[str, NeuronMoEConfig | None] = {STOCK: None, **recipes}
        self.setting, self.seeds, self.folder = setting, seeds, folder
        files = (CONFIG_FILE, *read_source(self.directory).files)
        self.blocks = _blocks(self.directory, recipes, setting.length)
        rows_NL = _rows(self.directory, text, setting)
        self.rows = rows_NL[: setting.steps * setting.batch], rows_NL[setting.steps * setting.batch :]
        self.identity = {
            "model": {file: hash_file(self.directory / file) for file in files},
            "text": hashlib.sha256(rows_NL.numpy().tobytes()).hexdigest(),
            **asdict(setting),
            "version": __version__,
        }
        self._check_folder()

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Variant and seed of each run, seed by seed: an early end leaves whole comparisons."""
        return [(variant, seed) for seed in range(self.seeds) for variant in self.variants]

    @property
    def missing(self) -> list[tuple[str, int]]:
        """The runs that have no result yet."""
        return [run for run in self.runs if self.result(*run) is None]

    def result(self, variant: str, seed: int) -> dict[str, Any] | None:
        """Return what a run left, None if it has not ended; DestinationError for a run of another study."""
        path = self._path(variant, seed)
        found = stored(path)
        if found is not None:
            self._check_same(path, found["settings"], self._settings(variant, seed))
        return found

    @public("parity")
    def do(self, variant: str, seed: int, told: Callable[[], None]) -> None:
        """Train one run, and write its result; `told` is called after every step."""
        config, path = self.variants[variant], self._path(variant, seed)
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        if config is not None:
            patch_model(model, config)
        measured = trained(model, self.blocks, self.rows, self.setting, Run(variant, seed, path.with_suffix(""), told))
        store(path, {"settings": self._settings(variant, seed), **measured})

    def finish(self) -> dict[str, Any]:
        """Return the summary over the runs that ended; it is written into ``parity.json`` with the curves."""
        found = {run: result for run in self.runs if (result := self.result(*run)) is not None}
        own: dict[str, dict[str, dict[str, Any]]] = {}
        for (variant, seed), result in found.items():
            own.setdefault(variant, {})[str(seed)] = result
        curves = {name: _column(results, "losses") for name, results in own.items()}
        summary = compared(curves, dict.fromkeys(self.variants.keys() - {STOCK}, STOCK))
        for name, results in own.items():
            summary[name] |= _measured(results, own.get(STOCK, {}))
        steps = {self.name: self.setting.steps * len(found)}
        content = {
            "summary": {self.name: {"variants": summary, "fp32": None}},
            "saved_bytes_per_token": {self.name: {name: of["saved_bytes_per_token"] for name, of in summary.items()}},
            "environment": environment(),
            "runs": {
                "planned": len(self.runs),
                "complete": len(found),
                "steps": steps,
                "seconds": round(sum(result["seconds"] for result in found.values()), 1),
            },
            "study": self.identity,
        }
        store(self.folder / STUDY_FILE, {"models": {self.name: curves}, **content})
        return content

    def _path(self, variant: str, seed: int) -> Path:
        return self.folder / RUNS_FOLDER / f"{variant}.{seed}.json"

    def _settings(self, variant: str, seed: int) -> dict[str, Any]:
        config = self.variants[variant]
        return {**self.identity, "seed": seed, "recipe": None if config is None else config.to_dict()}

    def _check_folder(self) -> None:
        """Raise for a folder with results of another study, or of another recipe of one of the names."""
        path = self.folder / STUDY_FILE
        if self.folder.exists() and not self.folder.is_dir():
            raise DestinationError.about(str(self.folder), "a folder", "a file", "Name another one with -o.")
        if (known := stored(path, "study")) is not None:
            self._check_same(path, known["study"], self.identity)
        for run in self.runs:
            self.result(*run)

    def _check_same(self, path: Path, known: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        differing = [key for key, value in asked.items() if known.get(key) != value]
        if differing:
            got = f"one with another {', '.join(differing)}"
            fix = "Name another folder with -o, or ask for the same as before. More seeds and recipes may join."
            raise DestinationError.about(str(path), "a result of the same study", got, fix)


def _column(results: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {seed: result[key] for seed, result in results.items()}


def _measured(results: Mapping[str, Mapping[str, Any]], stock: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a variant's runs measured besides their losses in training, and its relation to stock's."""
    after, before = _column(results, "eval_loss"), _column(results, "eval_before")
    times, stock_times = _column(results, "step_seconds"), _column(stock, "step_seconds")
    ratios = [seconds / stock_times[seed] for seed, seconds in times.items() if seed in stock_times]
    return {
        "eval_before": statistics.fmean(before.values()),
        "eval_loss": statistics.fmean(after.values()),
        "eval": paired(after, _column(stock, "eval_loss")),
        "step_seconds": statistics.fmean(times.values()),
        "time_ratio": statistics.fmean(ratios) if ratios else None,
        "saved_bytes_per_token": statistics.fmean(_column(results, "saved_bytes_per_token").values()),
    }


def _blocks(directory: Path, recipes: Mapping[str, NeuronMoEConfig], length: int) -> list[str]:
    """Names of the blocks that are patched, once every recipe was tried on the model without weights."""
    model = build_meta_model(directory, attention=None)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and length > context:
        fix = f"Pass --length {context} or less."
        raise ConfigError.about("length", f"at most {context}, the positions of this model", length, fix)
    blocks = [entry.name for entry in patch_model(model).patched]
    unpatch_model(model)
    for name, config in recipes.items():
        try:
            patch_model(model, config)
        except NeuronMoEError as error:
            raise type(error)(f"recipe {name}: {error}") from error
        unpatch_model(model)
    return blocks


def _rows(directory: Path, text: Path, setting: Setting) -> torch.Tensor:
    """The text's rows of tokens ``[N, L]``, as many as a run needs."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        got = f"{directory}, of which transformers says: {' '.join(str(error).split())[:200]}"
        fix = "Save the model's tokenizer there with save_pretrained."
        raise ConfigError.about("model", "a folder with a tokenizer", got, fix) from error

    def fewer(tokens: int) -> str:
        rows, batch = tokens // setting.length, setting.batch
        fitting = (steps for steps in range(rows // batch, 0, -1) if Setting(steps, batch, 1, 0.0).tokens <= rows)
        steps = next(fitting, 0)
        return f"--steps {steps}" if steps else "a smaller --batch or --length"

    return token_rows(text, tokenizer, setting.tokens, setting.length, less=fewer)

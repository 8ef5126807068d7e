"""Stock against recipes on one model and text: which runs that takes, and what they say together.

Legend: N rows, L tokens per row.
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_neuron_moe._version import __version__
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.convert.assign import build_meta_model
from hf_neuron_moe.convert.io.file_hashes import hash_file
from hf_neuron_moe.convert.io.folder import CONFIG_FILE, checkpoint_folder
from hf_neuron_moe.convert.io.source import read_source
from hf_neuron_moe.errors import DestinationError, NeuronMoEError, NonFiniteLossError, public
from hf_neuron_moe.explore.inputs import check_finite, checked_rows
from hf_neuron_moe.output_files import WRITABLE_FOLDER, why_no_folder
from hf_neuron_moe.patching.api import patch_model, unpatch_model
from hf_neuron_moe.recipes.loss_differences import compared, paired
from hf_neuron_moe.recipes.variant_runs import Run, Setting, store, stored, trained
from hf_neuron_moe.training.run_files import environment

STOCK = "stock"
RUNS_FOLDER, STUDY_FILE = "runs", "parity.json"
MEASURED = ("eval_before", "eval_loss", "step_seconds", "saved_bytes_per_token")
"""What the summary has as the mean over the seeds."""


class RecipeStudy:
    """The same training with the stock model and with each recipe, over several seeds.

    What can be wrong is found when it is made, before a step is trained. The seed decides the order of the text and the
    numbers of dropout; weights and text are the same in all runs.

    Args:
        model: a checkpoint's folder or a Hub id.
        text: what is trained on; the rows behind are held out for evaluation.
        recipes: what the patched blocks compute, by the name of each variant.
        setting: how every run trains.
        seeds: number of them, beginning with 0.
        folder: where the files go. Runs that ended there before are not repeated.

    Attributes:
        runs: variant and seed of each run, seed by seed: an early end leaves whole comparisons.
        missing: those that had no result yet.
        joined: variant and seed of other runs that ended in `folder` in the same study; the summary has them, too.
    """

    @public("parity")
    def __init__(
        self, model: str, text: Path, recipes: Mapping[str, NeuronMoEConfig], setting: Setting, seeds: int, folder: Path
    ) -> None:
        self.directory = checkpoint_folder(model)
        self.name = self.directory.resolve().name
        self.variants: dict[str, NeuronMoEConfig | None] = {STOCK: None, **recipes}
        self.setting, self.folder = setting, folder
        files = (CONFIG_FILE, *read_source(self.directory).files)
        model_on_meta = build_meta_model(self.directory, attention=None)
        self.blocks = _blocks(model_on_meta, recipes)
        fits = setting.fits
        _, rows_NL = checked_rows(self.directory, model_on_meta, text, setting.tokens, setting.length, fits)
        self.rows = rows_NL[: setting.steps * setting.batch], rows_NL[setting.steps * setting.batch :]
        self.identity = {
            "model": {file: hash_file(self.directory / file) for file in files},
            "text": hashlib.sha256(rows_NL.numpy().tobytes()).hexdigest(),
            **asdict(setting),
            "version": __version__,
        }
        self.runs = [(variant, seed) for seed in range(seeds) for variant in self.variants]
        if (why := why_no_folder(folder)) is not None:
            raise DestinationError.about(str(folder), WRITABLE_FOLDER, why, "Name another one with -o.")
        self._known(folder / STUDY_FILE, "study", self.identity)
        self.missing = [run for run in self.runs if self._result(*run) is None]
        self.joined = self._joined()

    @public("parity")
    def do(self, variant: str, seed: int, stepped: Callable[[], None]) -> None:
        """Train one run, and write its result; `stepped` is called after every step."""
        config, path = self.variants[variant], self._path(variant, seed)
        gc.collect()  # the run before is full of circles, which hold its model and optimizer
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        check_finite(model)
        if config is not None:
            patch_model(model, config)
        folders = path.with_suffix(""), path.parent, self.folder
        made = [folder for folder in folders if not folder.exists()]
        try:
            measured = trained(model, self.blocks, self.rows, self.setting, Run(folders[0], seed, stepped))
        except NonFiniteLossError:
            with suppress(OSError):  # one has files of steps before, and stays
                for folder in made:
                    folder.rmdir()
            raise
        store(path, {"settings": self._settings(variant, seed), **measured})

    def finish(self) -> dict[str, Any]:
        """Return the summary over all runs, none of which is missing, and those that joined.

        ``parity.json`` has it with the curves.
        """
        found: dict[str, dict[str, Any]] = {}
        runs = [*self.runs, *self.joined]
        for variant, seed in runs:
            found.setdefault(variant, {})[str(seed)] = stored(self._path(variant, seed))
        curves = {name: _column(results, "losses") for name, results in found.items()}
        summary = compared(curves, dict.fromkeys(found.keys() - {STOCK}, STOCK))
        for name, results in found.items():
            measured = {key: statistics.fmean(_column(results, key).values()) for key in MEASURED}
            time_ratio = measured["step_seconds"] / summary[STOCK].get("step_seconds", measured["step_seconds"])
            paired_losses = paired(_column(results, "eval_loss"), _column(found[STOCK], "eval_loss"))
            summary[name] |= {**measured, "time_ratio": time_ratio, "eval": {} if name == STOCK else paired_losses}
        seconds = sum(result["seconds"] for results in found.values() for result in results.values())
        steps = {self.name: self.setting.steps * len(runs)}
        content = {
            "summary": {self.name: {"variants": summary, "fp32": None}},
            "saved_bytes_per_token": {self.name: {name: of["saved_bytes_per_token"] for name, of in summary.items()}},
            "environment": environment(),
            "runs": {"planned": len(runs), "complete": len(runs), "steps": steps, "seconds": seconds},
            "study": self.identity,
        }
        store(self.folder / STUDY_FILE, {"models": {self.name: curves}, **content})
        return content

    def _path(self, variant: str, seed: int) -> Path:
        return self.folder / RUNS_FOLDER / f"{variant}.{seed}.json"

    def _settings(self, variant: str, seed: int) -> dict[str, Any]:
        config = self.variants[variant]
        return {**self.identity, "seed": seed, "recipe": None if config is None else config.to_dict()}

    def _result(self, variant: str, seed: int) -> dict[str, Any] | None:
        return self._known(self._path(variant, seed), "settings", self._settings(variant, seed))

    def _joined(self) -> list[tuple[str, int]]:
        """Runs of earlier calls with other recipes or more seeds, where stock has their seed, too."""
        found = []
        for path in (self.folder / RUNS_FOLDER).glob("*.json"):
            variant, _, seed = path.stem.rpartition(".")
            if variant and seed.isdecimal() and (variant, int(seed)) not in self.runs:
                settings = (stored(path) or {"settings": {}})["settings"]
                if not _differing(settings, {**self.identity, "seed": int(seed)}):
                    found.append((variant, int(seed)))
        seeds = {seed for variant, seed in [*self.runs, *found] if variant == STOCK}
        return sorted(run for run in found if run[1] in seeds)

    def _known(self, path: Path, key: str, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a file has, None without the file; DestinationError where it is of another study or recipe."""
        found = stored(path, key)
        if found is not None and (differing := _differing(found[key], identity)):
            got = f"one with another {', '.join(differing)}"
            fix = "Name another folder with -o, or ask for the same as before. More seeds and recipes may join."
            raise DestinationError.about(str(path), "a result of the same study", got, fix)
        return found


def _differing(found: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Names in `identity` that a file has with another value."""
    asked = json.loads(json.dumps(identity))
    differing = [name for name in asked if found.get(name) != asked[name]]
    # What is taken of a text depends on the setting, so with another one it says nothing about the text.
    setting = {each.name for each in fields(Setting)}
    return [name for name in differing if name != "text" or setting.isdisjoint(differing)]


def _column(results: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    return {seed: result[key] for seed, result in results.items()}


def _blocks(model: PreTrainedModel, recipes: Mapping[str, NeuronMoEConfig]) -> list[str]:
    """Names of the blocks that are patched, once every recipe was tried on the model without weights."""
    blocks = [entry.name for entry in patch_model(model).patched]
    unpatch_model(model)
    for name, config in recipes.items():
        try:
            patch_model(model, config)
        except NeuronMoEError as error:
            raise type(error)(f"recipe {name}: {error}") from error
        unpatch_model(model)
    return blocks

"""The guard of one training run: which steps it looks at, what all processes found, and the files."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.trainer_utils import has_length

from hf_neuron_moe.errors import GuardError, NeuronMoEWarning, UnsupportedModelError
from hf_neuron_moe.patching.ranks import OneAnswer
from hf_neuron_moe.training.guard.bands import LEARNED, Bands
from hf_neuron_moe.training.guard.watch import StepLooked, Watch
from hf_neuron_moe.training.run_files import GUARD_FILE, RunFiles

STOP = "stop"
_LOWEST = ("sqnr_db", "rms")  # of which the smallest of all processes is the worst; of others the largest


class Guard:
    """Looks at the first steps, then at 16, 32 and so on, at every so many, and at those before a checkpoint.

    What the bands have learned is read from ``guard.jsonl`` when a run is resumed; without that file they are learned
    again.
    """

    def __init__(self, model: nn.Module, mode: str, *, every: int, files: RunFiles, seed: int = 0) -> None:
        self.mode, self.every, self.files, self.seed = mode, every, files, seed
        self.bands = Bands()
        self.watch = Watch(model, self.bands, seed)
        self.sampled = 0
        if not self.watch.blocks:
            fix = "Leave neuron_guard off, or neuron_patch on."
            raise UnsupportedModelError.about("neuron_guard", "a model with patched blocks", "one without", fix)

    def resume(self, processes: int) -> None:
        """Learn from the records that the run has written before."""
        path = self.files.folder / GUARD_FILE
        found = [path.read_text(encoding="utf-8").splitlines() if path.is_file() else []]
        if processes > 1:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(found)
        for line in found[0]:
            record = json.loads(line)
            self.sampled += 1
            if not record["alarms"]:
                self.bands.learn(record["blocks"])

    def begin_step(self, step: int, *, saves: bool = False) -> None:
        """Begin a step; with `saves` a checkpoint is written after it."""
        doubled = step.bit_count() == 1 and step < self.every  # while a young model's magnitudes change fast
        if self.sampled < LEARNED or doubled or step % self.every == 0 or saves:
            self.watch.begin(step)

    def pause(self) -> None:
        """Leave the rest of the step alone."""
        self.watch.pause()

    def detach(self) -> None:
        """Take the hooks off the model."""
        self.watch.detach()

    def end_step(self, processes: int = 1, process: int = 0) -> None:
        """Judge a step before its update: warn of alarms, or raise GuardError on every process."""
        self.pause()
        looked, self.watch.looked = self.watch.looked, None
        if looked is None:
            return
        self.sampled += 1
        if not looked.alarms:
            self.bands.learn(looked.blocks)
        mine = looked.blocks, [alarm | {"process": process} for alarm in looked.alarms], looked.seconds
        parts = [mine]
        if processes > 1:
            from accelerate.utils import gather_object

            parts = gather_object([mine])
        blocks = merged([part[0] for part in parts])
        if not blocks:
            got = f"no call of an operator in step {looked.step}"
            fix = "Train without torch.compile where the backend traces through kernels, or leave neuron_guard off."
            raise UnsupportedModelError.about("neuron_guard", "blocks that call their operators", got, fix)
        alarms = first_of_all([part[1] for part in parts])
        if process == 0:
            record = {
                "step": looked.step,
                "seconds": max(part[2] for part in parts),
                "blocks": blocks,
                "alarms": alarms,
            }
            self.files.append(record, GUARD_FILE)
        if alarms:
            self._report(looked, alarms, process)

    def _report(self, looked: StepLooked, alarms: Sequence[Mapping[str, Any]], process: int) -> None:
        first = alarms[0]
        suffix = f"_process{first['process']}" if first["process"] else ""
        path = self.files.folder / f"guard_step{looked.step}{suffix}.safetensors"
        with OneAnswer():
            if first["process"] == process and looked.reproduction is not None:
                self.files.folder.mkdir(parents=True, exist_ok=True)
                looked.reproduction.save(path, self.seed)
        got, fix = (
            described(first, len(alarms)),
            f"Replay it: python -m hf_neuron_moe.training.guard.reproduction {path}",
        )
        if self.mode == STOP:
            fix = f"Nothing of this step was saved. {fix}"
            raise GuardError.about(f"step {looked.step}", "one whose figures stay in their bands", got, fix)
        if process == 0:
            warnings.warn(f"The guard found {got}. {fix}", NeuronMoEWarning, stacklevel=2)


def described(alarm: Mapping[str, Any], count: int) -> str:
    """Return an alarm in words."""
    expert = "" if alarm["expert"] == -1 else f" of expert {alarm['expert']}"
    what = f"the operand {alarm['operand']}" if alarm["result"] is None else f"the result {alarm['result']}"
    bounds = {"at least": alarm["low"], "at most": alarm["high"]}
    limits = " and ".join(f"{word} {limit:.3g}" for word, limit in bounds.items() if limit is not None)
    place = f"{what}{expert} of {alarm['product']} in {alarm['block']}, step {alarm['step']}"
    place += f", process {alarm['process']}" if alarm.get("process") else ""
    others = "" if count == 1 else f" (and {count - 1} more figures)"
    return f"{alarm['figure']} {alarm['value']:.3g}, expected {limits}, in {place}{others}"


def first_of_all(alarms: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the alarms of all processes: the first of each, then the second of each, and so on."""
    longest = max(map(len, alarms), default=0)
    return [dict(each[place]) for place in range(longest) for each in alarms if place < len(each)]


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst figures of all processes."""
    if len(parts) == 1:
        return dict(parts[0])
    found: dict[str, Any] = {}
    for blocks in parts:
        for block, products in blocks.items():
            for product, measured in products.items():
                for name, figures in measured.items():
                    place = found.setdefault(block, {}).setdefault(product, {}).setdefault(name, {})
                    for figure, value in figures.items():
                        pick: Callable[[Iterable[float]], float] = min if figure in _LOWEST else max
                        known = [
                            each for each in (place.get(figure), value) if each is not None and not math.isnan(each)
                        ]
                        place[figure] = pick(known) if known else math.nan
    return found


def saves_after(step: int, args: Any, state: Any, loader: Any = None) -> bool:
    """Whether a checkpoint may be written after a step: by the Trainer, or by the caller after the last one.

    `loader` is that of the training text, whose length says where an epoch ends.
    """
    if step == state.max_steps:
        return True
    strategy, every = args.save_strategy, state.save_steps
    if strategy == "best":  # of which only evaluations know
        strategy, every = args.eval_strategy, state.eval_steps
    if strategy == "epoch":
        every = -(-len(loader) // args.gradient_accumulation_steps) if has_length(loader) else 0
    return strategy in ("steps", "epoch") and every > 0 and step % every == 0

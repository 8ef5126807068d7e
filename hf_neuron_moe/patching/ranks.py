"""One answer on all ranks of a job: what they are about to do is compared, and all others name a rank that failed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hf_neuron_moe._version import __version__
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.torch import compute, generation
from hf_neuron_moe.errors import RankError, spelled_together
from hf_neuron_moe.patching.report import PatchEntry, PatchReport

ANSWER_SECONDS = 600.0
"""How long a rank waits for the others, who may still be reading their weights; torch gives NCCL as long."""

_VARIABLES = (
    *(generation.OPTION, versions.LNC_OVERRIDE, "NEURON_LOGICAL_NC_CONFIG"),
    *("NEURON_CC_FLAGS", "NEURON_RT_STOCHASTIC_ROUNDING_EN"),
)
"""Environment variables that change results or which kernels can run."""
_FIXES = {
    compute.OPTION: f"Set {compute.OPTION} to fp32 on every rank, or to native: processors or environments differ.",
    "version of ": "Install the same packages for every rank.",
    "option ": "Pass the same configuration on every rank.",
    "environment variable ": "Set it to one value on every rank, or unset it.",
    "content of ": "Save to a folder that all ranks share.",
    "plan of ": "Load the same model in the same way on every rank.",
}
"""What to do about a fact that differs, by the beginning of its name."""


class OneAnswer:
    """Context of work that all ranks do alike; its end compares the facts that were put into its dictionary.

    >>> with OneAnswer() as facts:
    ...     facts |= facts_of(report)

    If the work raises on a rank, the other ranks raise a RankError with that exception's text. Arguments are those of
    :func:`same_on_all_ranks`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = ANSWER_SECONDS) -> None:
        self._facts: dict[str, str] = {}
        self._with = (group, timeout)

    def __enter__(self) -> dict[str, str]:
        return self._facts

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            same_on_all_ranks(self._facts, *self._with)
        elif isinstance(error, Exception):  # who interrupts a rank does not wait for the others
            try:
                same_on_all_ranks({}, *self._with, failure=error)
            except RankError as unheard:
                error.add_note(f"The other ranks could not be told: {unheard}")


def same_on_all_ranks(
    facts: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    timeout: float = ANSWER_SECONDS,
    *,
    failure: Exception | None = None,
) -> None:
    """Raise the same RankError on every rank if one of the `facts` differs between them, or if a rank failed.

    One small gather where all is well. Every rank has to call it; without other ranks it returns at once.

    Args:
        facts: text by name. Of several differences the first in the order of the lowest rank is named.
        group: who takes part, within the group's own time limit. None: all ranks, who make a gloo group with the
            limit `timeout` for this call, so that no accelerator is touched.
        timeout: seconds to wait for the others, of each step: connect, compare, gather what differs.
        failure: what went wrong on this rank, for the others to raise; this rank returns.
    """
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake"  # which has no others
    if alone or dist.get_world_size(group) < 2:
        return
    try:
        failures, everyones = _exchange(facts, failure, group, timeout)
    except RuntimeError as silence:  # a peer that is gone, a store or a socket that timed out
        got = f"no answer on rank {dist.get_rank()} ({str(silence).partition(chr(10))[0]})"
        fix = "Look for an error of another rank. All ranks of the job have to make this call."
        limit = f"{timeout:g} s" if group is None else "its process group's time limit"
        raise RankError.about("every rank", f"one that answers within {limit}", got, fix) from silence
    failed = [index for index, text in enumerate(failures) if text]
    if failed and failure is None:
        fix = "Correct the cause there, then start all ranks again."
        raise RankError.about(_named(failed, group), "free of errors", failures[failed[0]], fix)
    for name in dict.fromkeys(name for each in everyones for name in each):
        values = [each.get(name, "nothing") for each in everyones]
        who = {value: _named([i for i, its in enumerate(values) if its == value], group) for value in values}
        if len(who) > 1:
            fix = next((fix for start, fix in _FIXES.items() if name.startswith(start)), "Start all ranks alike.")
            got = " and ".join(f"{value} on {ranks}" for value, ranks in who.items())
            raise RankError.about(name, "the same on all ranks", got, fix)


def facts_of(report: PatchReport) -> dict[str, str]:
    """Return what of a planned patch has to be the same on all ranks, as text by name; causes before the plan."""
    packages = {"hf_neuron_moe": __version__, "torch": str(torch.__version__)}
    packages["transformers"] = importlib.metadata.version("transformers")
    packages |= {name: versions.installed_version(name) or "none" for name in versions.PACKAGES}
    facts = {f"version of {name}": version for name, version in packages.items()}
    facts |= {f"option {name}": repr(value) for name, value in report.config.to_dict().items()}
    facts |= {f"environment variable {name}": repr(os.environ.get(name, "")) for name in _VARIABLES}
    # What the processor decides: another rank would compute other bits.
    facts[compute.OPTION] = ", ".join(sorted({entry.products for entry in report.patched} - {""})) or "no products"
    return facts | {f"plan of {entry.name or 'the model'}": _planned(entry) for entry in report.entries}


def _planned(entry: PatchEntry) -> str:
    sizes = (entry.experts, entry.hidden_size, entry.intermediate_size)
    options = (entry.precision, entry.backend, entry.weights, entry.activations)
    return ", ".join(str(value) for value in (entry.class_name, *sizes, entry.status, *options) if value is not None)


def _exchange(
    facts: Mapping[str, str], failure: Exception | None, group: dist.ProcessGroup | None, timeout: float
) -> tuple[list[str], list[dict[str, str]]]:
    """Return the failure of every rank, or an empty text, and everybody's facts if they differ and no rank failed."""
    backend = "gloo" if dist.is_gloo_available() else None
    line = group or dist.new_group(timeout=timedelta(seconds=timeout), backend=backend)
    try:
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
        text = "" if failure is None else f"{type(failure).__name__}: {failure}".removesuffix(".")
        failures, digests = zip(*_gathered(line, (text, digest)))
        return list(failures), [] if any(failures) or len({*digests}) == 1 else _gathered(line, dict(facts))
    finally:
        if group is None:
            dist.destroy_process_group(line)


def _gathered(group: dist.ProcessGroup, mine: object) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group)
    return everyones


def _named(places: list[int], group: dist.ProcessGroup | None) -> str:
    ranks = dist.get_process_group_ranks(group)
    return spelled_together([f"rank {ranks[place]}" for place in places])

"""One answer on all ranks of a job: what they are about to do is compared, and all others name a rank that failed."""

from __future__ import annotations

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
from hf_neuron_moe.patching.report import PatchReport

ANSWER_SECONDS = 600.0  # the others may still be reading their weights; torch gives NCCL as long

# Environment variables that change results or which kernels can run.
_VARIABLES = (generation.OPTION, versions.LNC_OVERRIDE, versions.LNC_VARIABLE, "NEURON_CC_FLAGS")
# What of a block's entry in the report is compared.
_PLANNED = ("class_name", "experts", "hidden_size", "intermediate_size", "status", "precision", "backend", "weights")
_ALIKE = "Start all ranks with the same packages, model, configuration and environment variables."
# What to do about another difference, by the beginning of its name.
_FIXES = {
    compute.OPTION: f"Set {compute.OPTION} to fp32 on every rank, or to native: processors or environments differ.",
    "stored form of ": "Copy one conversion to every machine.",
    "content of ": "Save to a folder that all ranks share.",
}


class OneAnswer:
    """Context of work that all ranks do alike: ``with OneAnswer() as facts: facts |= facts_of(report)``.

    Its end compares the facts. If the work raises on a rank, the others raise a RankError with that exception's text.
    The arguments are those of :func:`same_on_all_ranks`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = ANSWER_SECONDS) -> None:
        self._facts: dict[str, str] = {}
        self._with = (group, timeout)

    def __enter__(self) -> dict[str, str]:
        return self._facts

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):  # who interrupts a rank does not wait for the others
            same_on_all_ranks(self._facts, *self._with, failure=error)


def same_on_all_ranks(
    facts: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    timeout: float = ANSWER_SECONDS,
    *,
    failure: Exception | None = None,
) -> None:
    """Raise the same RankError on every rank where one of the `facts`, text by name, differs or a rank has a `failure`.

    A rank with a `failure` returns, to raise that. Every rank of `group` has to call this; without others it returns at
    once. Without `group` all ranks make a gloo group, so that no accelerator is touched. It waits `timeout` seconds to
    connect and as long for an answer; a given group has its own time limit. Of several differences the first is named.
    """
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake"  # which has no others
    if alone or dist.get_world_size(group) < 2:
        return
    text = "" if failure is None else f"{type(failure).__name__}: {failure}".removesuffix(".")
    said: list[Any] = [None] * dist.get_world_size(group)
    try:
        backend = "gloo" if dist.is_gloo_available() else None
        line = group or dist.new_group(timeout=timedelta(seconds=timeout), backend=backend)
        try:
            dist.all_gather_object(said, (text, dict(facts)), line)
        finally:
            if group is None:
                dist.destroy_process_group(line)
    except RuntimeError as silence:  # a peer that is gone, a store or a socket that timed out
        got = f"no answer on rank {dist.get_rank()} ({str(silence).partition(chr(10))[0]})"
        fix = "Look for an error of another rank. All ranks of the job have to make this call."
        unheard = RankError.about("every rank", "one that answers in time", got, fix)
        if failure is None:
            raise unheard from silence
        failure.add_note(f"The other ranks could not be told: {unheard}")
    if failure is None:
        _compare({f"rank {rank}": answer for rank, answer in zip(dist.get_process_group_ranks(group), said)})


def _compare(said: Mapping[str, tuple[str, Mapping[str, str]]]) -> None:
    """Raise for a rank that failed, else for facts that differ; `said` has both by rank."""
    failed = [rank for rank, (text, _) in said.items() if text]
    if failed:
        fix = "Correct the cause there, then start all ranks again."
        raise RankError.about(spelled_together(failed), "free of errors", said[failed[0]][0], fix)
    for name in dict.fromkeys(name for _, facts in said.values() for name in facts):
        who: dict[str, list[str]] = {}
        for rank, (_, facts) in said.items():
            who.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(who) > 1:
            got = " and ".join(f"{value} on {spelled_together(ranks)}" for value, ranks in who.items())
            fix = next((fix for start, fix in _FIXES.items() if name.startswith(start)), _ALIKE)
            raise RankError.about(name, "the same on all ranks", got, fix)


def facts_of(report: PatchReport, *, same_blocks: bool = True) -> dict[str, str]:
    """Return what of a planned patch has to be the same on all ranks, as text by name; causes before the plan.

    Without `same_blocks`, ranks have other layers: stages of a pipeline.
    """
    packages = {"hf_neuron_moe": __version__, "torch": str(torch.__version__)}
    packages["transformers"] = importlib.metadata.version("transformers")
    packages |= {name: versions.installed_version(name) or "none" for name in versions.PACKAGES}
    facts = {f"version of {name}": version for name, version in packages.items()}
    facts |= {f"option {name}": repr(value) for name, value in report.config.to_dict().items()}
    facts |= {f"environment variable {name}": repr(os.environ.get(name, "")) for name in _VARIABLES}
    # What the processor decides: another rank would compute other bits.
    facts[compute.OPTION] = ", ".join(sorted({entry.products for entry in report.patched} - {""})) or "no products"
    blocks = report.entries if same_blocks else ()
    plans = {entry.name: [getattr(entry, name) for name in (*_PLANNED, "activations")] for entry in blocks}
    return facts | {f"plan of {name or 'the model'}": ", ".join(map(str, plan)) for name, plan in plans.items()}

"""One answer on all ranks of a job: what they are about to do is compared, and all others name a rank that failed."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hf_neuron_moe._version import __version__
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.torch import compute, generation
from hf_neuron_moe.environment import RANK_TIMEOUT, rank_seconds
from hf_neuron_moe.errors import RankError, spelled_together
from hf_neuron_moe.patching.report import PatchReport

APART_SECONDS = 60.0  # for a rank that was seen to patch another model

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
    `timeout` is that of :func:`same_on_all_ranks`, `apart` the seconds for a rank that called :func:`stand_apart`.
    """

    def __init__(self, timeout: float | None = None, apart: float | None = None) -> None:
        self._facts: dict[str, str] = {}
        self._times = (timeout, apart)

    def __enter__(self) -> dict[str, str]:
        return self._facts

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):  # who interrupts a rank does not wait for the others
            timeout, apart = self._times
            same_on_all_ranks(self._facts, timeout=timeout, apart=apart, failure=error)


def same_on_all_ranks(
    facts: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    *,
    apart: float | None = None,
    failure: Exception | None = None,
) -> None:
    """Raise the same RankError on every rank where one of the `facts`, text by name, differs or a rank has a `failure`.

    A rank with a `failure` returns, to raise that. Every rank of `group` has to call this; without others it returns at
    once. Without `group` all ranks make a gloo group, so that no accelerator is touched. It waits `timeout` seconds, by
    default :func:`rank_seconds`, to connect and as long for an answer; a given group has its own time limit. Of several
    differences the first is named.
    """
    if _is_alone() or dist.get_world_size(group) < 2:
        return
    timeout = rank_seconds() if timeout is None else timeout
    text = "" if failure is None else f"{type(failure).__name__}: {failure}".removesuffix(".")
    said: list[Any] = [None] * dist.get_world_size(group)
    try:
        if group is None:
            _come_together(timeout, timeout if apart is None else min(apart, timeout))
        backend = "gloo" if dist.is_gloo_available() else None
        line = group or dist.new_group(timeout=timedelta(seconds=timeout), backend=backend)
        try:
            dist.all_gather_object(said, (text, dict(facts)), line)
        finally:
            if group is None:
                dist.destroy_process_group(line)
    except RuntimeError as silence:  # a peer that is gone, a store or a socket that timed out
        unheard = silence if isinstance(silence, RankError) else _silent(str(silence))
        if failure is None:
            raise unheard from (silence.__cause__ if unheard is silence else silence)
        failure.add_note(f"The other ranks could not be told: {unheard}")
    if failure is None:
        _compare({f"rank {rank}": answer for rank, answer in zip(dist.get_process_group_ranks(group), said)})


def stand_apart() -> None:
    """Note that this rank patches a model of its own, which no other has to, for ranks that wait for it.

    Raises what they ended with, if they did.
    """
    if _is_alone() or dist.get_world_size() < 2:
        return
    with suppress(dist.DistError):  # of a store that is gone with the others
        store, rank = _store(), dist.get_rank()
        turn = store.add(f"turns of {rank}", 0) + 1
        if store.check([f"{turn}/ended"]):
            _come_together(0.0, 0.0)
        store.set(f"{turn}/seen/{rank}", str(_groups()))


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake"  # which has no others


def _store() -> dist.Store:
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.PrefixStore(__name__, _get_default_store())


def _groups() -> int:
    """Return how many groups of processes there are: each loading of a sharded model adds some."""
    from torch.distributed.distributed_c10d import get_pg_count

    return get_pg_count()


def _come_together(timeout: float, apart: float) -> None:
    """Wait until all ranks of the job are here, `apart` seconds for those that patch a model of their own.

    A rank that comes when the others have given up raises what they raised.
    """
    store, rank, ranks = _store(), dist.get_rank(), range(dist.get_world_size())
    turn = store.add(f"turns of {rank}", 1)
    if store.check([f"{turn}/ended"]):
        raise RankError(store.get(f"{turn}/ended").decode())
    seen, here = ([f"{turn}/{sign}/{each}" for each in ranks] for sign in ("seen", "here"))
    for sign in ("seen", "here"):
        store.delete_key(f"{turn - 1}/{sign}/{rank}")  # which all have read by now
        store.set(f"{turn}/{sign}/{rank}", "0")

    def elsewhere() -> list[str]:
        """Return the ranks that patched another model after these ones were loaded."""
        absent = (each for each in ranks if store.check([seen[each]]) and not store.check([here[each]]))
        return [f"rank {each}" for each in absent if int(store.get(seen[each])) >= _groups()]

    try:
        store.wait(seen, timedelta(seconds=timeout))
        store.wait(here, timedelta(seconds=apart if elsewhere() else timeout))
    except RuntimeError as silence:
        absent = [f"rank {each}" for each in ranks if not store.check([here[each]])]
        if not absent:
            return  # the last came a moment ago
        error = _silent(f"{spelled_together(absent)} is absent")
        if others := elsewhere():
            expected = "given a model that was sharded while loading, as other ranks were"
            fix = "Call patch_model with it on every rank. Patch whole models, for comparison, before it is loaded."
            error = RankError.about(spelled_together(others), expected, "another model", fix)
        store.set(f"{turn}/ended", str(error))
        raise error from silence


def _silent(why: str) -> RankError:
    fix = (
        f"Look for an error of another rank. All ranks of the job have to make this call. {RANK_TIMEOUT} sets the time."
    )
    got = f"no answer on rank {dist.get_rank()} ({why.partition(chr(10))[0]})"
    return RankError.about("every rank", "one that answers in time", got, fix)


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


def facts_of(report: PatchReport | None, *, sharded: bool = False, same_blocks: bool = True) -> dict[str, str]:
    """Return what of a planned patch has to be the same on all ranks, as text by name; causes before the plan.

    `report` is None of a model without a patch, `sharded` says whether the model was sharded while loading. Without
    `same_blocks`, ranks have other layers: stages of a pipeline.
    """
    if report is None:
        return {"the model": "one that is not patched"}
    packages = {"hf_neuron_moe": __version__, "torch": str(torch.__version__)}
    packages["transformers"] = importlib.metadata.version("transformers")
    packages |= {name: versions.installed_version(name) or "none" for name in versions.PACKAGES}
    facts = {"the model": "one sharded while loading" if sharded else "a whole one"}
    facts |= {f"version of {name}": version for name, version in packages.items()}
    facts |= {f"option {name}": repr(value) for name, value in report.config.to_dict().items()}
    facts |= {f"environment variable {name}": repr(os.environ.get(name, "")) for name in _VARIABLES}
    # What the processor decides: another rank would compute other bits.
    facts[compute.OPTION] = ", ".join(sorted({entry.products for entry in report.patched} - {""})) or "no products"
    blocks = report.entries if same_blocks else ()
    plans = {entry.name: [getattr(entry, name) for name in (*_PLANNED, "activations")] for entry in blocks}
    return facts | {f"plan of {name or 'the model'}": ", ".join(map(str, plan)) for name, plan in plans.items()}

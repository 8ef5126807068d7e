"""All ranks of a job do the same or raise the same error, and none waits for ever."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_neuron_moe import environment, patch_model
from hf_neuron_moe.backends.torch import compute
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.patching import ranks
from tests.patching.agreement_driver import APART, CELLS, DYING, SECONDS
from tests.refusals import refused
from tests.shared_runs import made_once
from tests.tiny_models import tiny_model

FAILED = "RankError", "rank 1 must be free of errors, got DTypeError: weight must be bf16, got int8. Cast it."
DIFFERING = {
    "precision": "option precision must be the same on all ranks, got 'bf16' on rank 0 and 'mxfp8' on rank 1. Start ",
    "version": "version of hf_neuron_moe must be the same on all ranks, got 0.1.0 on rank 0 and 0.2.0 on rank 1. Star",
    "switch": "environment variable NEURON_LOGICAL_NC_CONFIG must be the same on all ranks, got '1' on rank 0 and '2' ",
    "processor": "HF_NEURON_MOE_BF16_PRODUCTS must be the same on all ranks, got bf16 products on rank 0 and fp32 pro",
    "whole": "the model must be the same on all ranks, got one sharded while loading on rank 0 and a whole one on ",
    "stock": "the model must be the same on all ranks, got a whole one on rank 0 and one that is not patched on rank 1",
    "block": "plan of model.layers.0.mlp must be the same on all ranks, got LlamaMLP, None, 64, 96, patched, bf16, ",
}
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two processes saw."""
    ranks: Ranks = made_once(tmp_path_factory, "ranks", functools.partial(launched, repo_root))
    return ranks


def launched(repo_root: Path, folder: Path) -> Ranks:
    """Run all cells in two processes."""
    command = [sys.executable, "-m", "tests.patching.agreement_driver", str(folder)]
    started = [
        subprocess.Popen([*command, str(rank)], cwd=repo_root, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        shown = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 3], "\n".join(shown)
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.slow
def test_equal_ranks_go_on_after_one_gather_each_time(two: Ranks) -> None:
    for rank in two:
        assert (rank["equal"]["error"], rank["equal"]["gathers"]) == (None, 20)
        assert rank["own_group"]["error"] is None


@pytest.mark.slow
@pytest.mark.parametrize("cell", DIFFERING)
def test_what_differs_is_the_same_error_on_every_rank(cell: str, two: Ranks) -> None:
    (kind, message), other = (rank[cell]["error"] for rank in two)
    assert [kind, message] == other and kind == "RankError"
    assert message.startswith(DIFFERING[cell])
    assert [rank[cell]["gathers"] for rank in two] == [1, 1]


@pytest.mark.slow
def test_a_rank_that_fails_keeps_its_error_and_the_others_name_it(two: Ranks) -> None:
    heard, own = (rank["raising"]["error"] for rank in two)
    assert heard[0] == FAILED[0] and heard[1].startswith(FAILED[1])
    assert own == ["DTypeError", "weight must be bf16, got int8. Cast it."]
    assert [rank["both"]["error"] for rank in two] == [["MemoryError", f"of rank {rank}"] for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["apart", "late_in_patch_model"])
def test_a_rank_that_patches_another_model_ends_all_in_short_time(cell: str, two: Ranks) -> None:
    (kind, message), late = (rank[cell]["error"] for rank in two)
    assert [kind, message] == late and kind == "RankError"
    assert message.startswith("rank 1 must be given a model that was sharded while loading, as other ranks were, got ")
    assert max(rank[cell]["seconds"] for rank in two) < 5 * APART + 1


@pytest.mark.slow
def test_a_reference_that_one_rank_patches_before_loading_is_no_fault(two: Ranks) -> None:
    assert [rank["reference"]["error"] for rank in two] == [None, None]
    assert min(rank["reference"]["seconds"] for rank in two) > 2 * APART


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_others_in_time(two: Ranks) -> None:
    assert "dying" not in two[1] and len(two[1]) == len(CELLS) - 1
    kind, message = two[0]["dying"]["error"]
    assert kind == "RankError" and DYING <= two[0]["dying"]["seconds"] < 2 * DYING + 1
    assert message.startswith("every rank must be one that answers in time, got no answer on rank 0 (rank 1 is absent)")
    assert all(rank[cell.__name__]["seconds"] < SECONDS for rank in two for cell in CELLS[:-1])


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "1e10", "ten"])
def test_a_time_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.RANK_TIMEOUT, given)
    with refused(ConfigError, f"the environment variable {environment.RANK_TIMEOUT}"):
        public("patch_model")(environment.rank_seconds)()


def test_variables_that_hold_nothing_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.OWN:
        monkeypatch.setenv(name, "")
    assert environment.wrong_values() == {} and environment.rank_seconds() == environment.ANSWER_SECONDS


def test_alone_there_is_nothing_to_compare() -> None:
    with ranks.OneAnswer(timeout=0.1) as facts:
        facts["a"] = "b"
    with pytest.raises(MemoryError) as caught, ranks.OneAnswer(timeout=0.1):
        raise MemoryError
    assert not hasattr(caught.value, "__notes__")


def test_a_fake_group_has_no_other_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    try:
        ranks.same_on_all_ranks({"a": "b"}, timeout=0.1)
    finally:
        dist.destroy_process_group()


def test_the_processor_is_a_fact_of_blocks_that_go_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fast in (True, False):
        monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda fast=fast: fast)
        found.append(ranks.facts_of(patch_model(tiny_model("mixtral").to(torch.bfloat16), {"precision": "mxfp8"})))
        exact = ranks.facts_of(patch_model(tiny_model("llama"), {"precision": "fp32"}))
        assert exact[compute.OPTION] == "fp32 products"
    native, emulated = found
    assert {name for name in native if native[name] != emulated[name]} == {compute.OPTION}
    assert native["version of transformers"] and native["option precision"] == "'mxfp8'"
    assert native["plan of model.layers.0.mlp.experts"].startswith("MixtralExperts, 4, 32, 48, patched, mxfp8, torch")

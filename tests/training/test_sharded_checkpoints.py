"""Checkpoints of models that transformers' engine sharded while loading: saved, resumed, damaged, killed.

Everything runs in forks of one driver (tests/training/sharded_driver.py), whose cells share a process group.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers.distributed", reason="this transformers cannot shard while loading")


class Outcome(NamedTuple):
    """What the driver's processes found."""

    folder: Path
    cells: list[list[dict[str, Any]]]  # of each cell, by process
    alone: dict[str, Any]


def launched(repo_root: Path, folder: Path, cells: list[list[Any]], processes: int = 2) -> Outcome:
    """Run the driver; all its processes are gone when this returns."""
    command = [sys.executable, "-m", "tests.training.sharded_driver", str(folder), str(processes), json.dumps(cells)]
    run(command, repo_root)
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    return Outcome(
        folder, [list(each) for each in zip(*ranks, strict=True)], json.loads((folder / "alone.json").read_text())
    )


def run(command: list[str], repo_root: Path, seconds: float = 240) -> str:
    """Run a command in a group of processes of its own; end them all when the time is over."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=repo_root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"no end after {seconds} s\n{output[-6000:]}")
    assert process.returncode == 0, output[-6000:]
    return output


def assert_saved(results: list[dict[str, Any]], folder: Path) -> None:
    """The files of one process, byte for byte; parts that another layout reads."""
    expected = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    config = (folder / "model" / "config.json").read_text(encoding="utf-8")
    for result in results:
        assert result["error"] is None
        assert result["files"] == [expected, expected] and result["config"] == config
        assert result["parts"] == len(results) and result["unequal"] == [] and result["names"] == 12


def assert_resumed(results: list[dict[str, Any]], layout: str, others: list[str], alone: dict[str, Any]) -> None:
    """Bit for bit on the same layout; on others as on one process, up to the order of sums."""
    for result in results:
        assert result["error"] is None
        assert result["again"] == result["losses"] and result["weights"][0] == result["weights"][1]
        assert not result["marked"] and not result["only_model"]
        for losses in (result["losses"], *(result[other] for other in others), alone[f"through-{layout}"]):
            assert losses == pytest.approx(alone["losses"], rel=2e-6)
        # Of the first step only: AdamW divides by small moments, so that later gradients differ in more than sums.
        assert result["norms"][0] == pytest.approx(alone["norms"][0], rel=1e-6)


@pytest.mark.slow
def test_saved_whole_and_in_parts_and_resumed(repo_root: Path, tmp_path: Path) -> None:
    cells: list[list[Any]] = [["saving", "ep2_fsdp2", "tp2"], ["resumed", "ep2_fsdp2", ["tp2"]], ["evaluated", "fsdp2"]]
    cells += [["predicted", "tp2"]]
    found = launched(repo_root, tmp_path, cells)
    saved, resumed, evaluated, predicted = found.cells
    assert_saved(saved, found.folder)
    for result in evaluated:  # the evaluation leaves FSDP2's last group gathered
        assert result["error"] is None and result["weights"][0] == result["weights"][1]
    assert_resumed(resumed, "ep2_fsdp2", ["tp2"], found.alone)
    for result in predicted:  # both processes have all rows
        assert result["error"] is None
        assert result["loss"] == pytest.approx(found.alone["predicted"]["loss"], rel=2e-6)
        assert result["sums"] == pytest.approx(found.alone["predicted"]["sums"], rel=1e-4)
    assert "neuron_weights must be 'stock' for sharded checkpoints" in found.alone["kernel"]
    assert max(resumed[0]["norms"]) > 0.5  # gradients were clipped


@pytest.mark.slow
def test_every_layout_of_four_processes(repo_root: Path, tmp_path: Path) -> None:
    cells: list[list[Any]] = [["saving", "ep4_fsdp4", "fsdp4"], ["saving", "fsdp4", "ep2_fsdp4"]]
    cells += [["saving", "hsdp", "ep4_fsdp4"], ["resumed", "ep4_fsdp4", ["ep2_fsdp4", "hsdp"]]]
    found = launched(repo_root, tmp_path, cells, processes=4)
    *saved, resumed = found.cells
    for results in saved[:2]:
        assert_saved(results, found.folder)
    assert_resumed(resumed, "ep4_fsdp4", ["ep2_fsdp4", "hsdp"], found.alone)


@pytest.mark.slow
def test_resumed_with_dropout_or_adapters_and_what_is_an_error_of_all(repo_root: Path, tmp_path: Path) -> None:
    damages = {
        "sizes": ("UnsupportedModelError", "gate_up_proj has shape [8, 1024, 128], got [8, 512, 128]"),
        "layers": ("UnsupportedModelError", "model.layers.1.self_attn.q_proj.weight has shape [128, 128], got none"),
        "wider": ("UnsupportedModelError", "model.embed_tokens.weight has shape [96, 128], got [64, 128]"),
        "shard-00002-*.safetensors": ("IncompleteCheckpointError", "shard-00002-model-00001-of-00001.safetensors is"),
        "rng_state_1.pth": ("IncompleteCheckpointError", "rng_state_1.pth is missing"),
        "__1_0.distcp": ("IncompleteCheckpointError", "optimizer/__1_0.distcp is missing"),
        "frozen": ("UnsupportedModelError", "a state for every parameter that is trained now, got Missing key"),
        "stock": ("IncompleteCheckpointError", "the checkpoint of a model that was sharded while loading"),
    }
    cells: list[list[Any]] = [["resumed", "fsdp2", [], 0.2], ["resumed", "ep2_fsdp2", ["tp2"], 0.0, 4]]
    cells += [["best", "ep2_fsdp2"], ["scattered", "fsdp2"], ["failing", "fsdp2"]]
    cells += [["saving", "tp2", "fsdp2"], ["saving", "fsdp2", "ep2_fsdp2"]]
    cells += [["refusing", "fsdp2", damage] for damage in damages]
    found = launched(repo_root, tmp_path, cells)
    dropout, adapters, best, scattered, failing, *saved = found.cells[:7]
    refused = found.cells[7:]
    for results in saved:
        assert_saved(results, found.folder)
    for result in (*dropout, *adapters):
        assert result["error"] is None
        assert result["again"] == result["losses"] and result["weights"][0] == result["weights"][1]
    for result in adapters:
        assert result["tp2"] == pytest.approx(result["losses"], rel=2e-6)
    for result in best:
        assert result["error"] is None and result["chosen"] < 3
        assert result["weights"] == result["kept"][result["chosen"] - 1] != result["kept"][-1]
    for result in scattered:
        assert result["error"][0] == "RankError" and "on rank 0" in result["error"][1]
        assert "Save to a folder that all ranks share." in result["error"][1]
    first, second = (result["error"] for result in failing)
    assert first[0] == "RankError" and "rank 1 must be free of errors, got OSError: [Errno 28] No space" in first[1]
    assert second[0] == "OSError"
    for (kind, text), results in zip(damages.values(), refused, strict=True):
        for result in results:
            assert result["error"] is None
            assert result["refused"][0] == kind and text in result["refused"][1], result
            assert not result["changed"] or text.startswith("a state for every")  # then the weights were good


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rank", "least"), [(0, 10), (1, 5)])
def test_a_process_killed_while_saving_loses_nothing(rank: int, least: int, repo_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.sharded_kill_driver", str(tmp_path), str(rank)]
    output = run(command, repo_root, seconds=450)  # up to thirty short runs
    outcomes = [json.loads(line) for line in output.splitlines() if line.startswith('{"rank":')]
    assert [outcome for outcome in outcomes if outcome["problem"]] == [], output[-6000:]
    struck = [outcome["moment"] for outcome in outcomes if outcome["rank"] == rank]
    assert len(struck) == len(outcomes) >= least
    assert any(".distcp" in moment for moment in struck) and any("shard-" in moment for moment in struck)

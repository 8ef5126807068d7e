"""Where processes divide the experts, an alarm names the expert by its number in the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.training.guard import reproduction
from tests.training.guard.experts_driver import BAD
from tests.training.guard.test_codes import EXPERT
from tests.training.sharded_driver import SIZES

pytestmark = pytest.mark.slow
pytest.importorskip("transformers.distributed", reason="this transformers cannot shard while loading")
FIRST = SIZES["num_local_experts"] // 2
"""The second process's first expert."""


@pytest.fixture(scope="module")
def ranks(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("experts")
    command = [sys.executable, "-m", "tests.training.guard.experts_driver", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=False, timeout=240)
    assert result.returncode == 0, result.stderr[-6000:]
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["ep2_fsdp2", "ep2_tp2"])
def test_an_alarm_names_the_models_expert(
    layout: str, ranks: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (first, second) = ranks
    expert = FIRST + 1  # the fault is in the process's second one
    (said,) = first["said"][layout]
    assert f"the result y of expert {expert} of down in model.layers.0.mlp.experts, step {BAD}, process 1" in said
    assert second["said"][layout] == []
    files = folder / layout / "neuron_moe"
    records = [json.loads(line) for line in (files / "guard.jsonl").read_text().splitlines()]
    alarms = records[BAD - 1]["alarms"]
    assert {(alarm["expert"], alarm["process"]) for alarm in alarms} == {(expert, 1)}
    assert not records[0]["alarms"] and not records[BAD]["alarms"]
    assert reproduction.main([str(files / f"guard_step{BAD}_process1.safetensors")]) == 0
    lines = capsys.readouterr().out.splitlines()
    errors = [float(line.rpartition(": ")[2]) for line in lines if line.startswith("relative error")]
    assert f"expert {expert}" in lines[0] and errors[0] > 0.01


def test_experts_whose_weights_are_codes_are_counted_and_named_like_others(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    (first, second) = (rank["codes"] for rank in ranks[1])
    assert first["alarms"] == []
    assert {alarm["expert"] for alarm in second["alarms"] if alarm["product"] == "down"} == {FIRST + EXPERT}
    load = first["counted"]["load"]
    assert len(load) == 2 * FIRST and sum(load) == 2 * 4 * 40 * 2  # processes, rows, tokens, experts of a token
    assert first["counted"]["process_load"] == [sum(load[:FIRST]), sum(load[FIRST:])]

"""The benchmark for GPUs says that there is none, and its contestants run where none is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@no_gpu
def test_without_a_gpu_it_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == gpu.NO_GPU and "benchmarks/blocks.py" in gpu.NO_GPU


def test_a_dry_run_measures_bytes_and_no_times() -> None:
    """Saved bytes are counted on any device; what is not installed has its reason."""
    for layers in (0, 2):
        results = gpu.contest(gpu.TINY, layers, "cpu", {}, 1)
        assert results.keys() == set(gpu.CONTESTANTS)
        for name in ("grouped_mm", "patched bf16", "patched mxfp8"):
            assert results[name].keys() == {"saved_bytes"} and results[name]["saved_bytes"] > 0
        assert results["patched bf16"]["saved_bytes"] < results["grouped_mm"]["saved_bytes"]
        assert "missing" in results["sonicmoe"], "there is no such kernel for CPUs"


@no_gpu
@pytest.mark.triton
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "every"])
@pytest.mark.slow
def test_every_row_of_the_table_of_tiles_is_a_step_that_runs(every: bool) -> None:
    pytest.importorskip("triton")
    from hf_neuron_moe.backends.triton.launch_grid import candidates

    steps = gpu.kernel_steps(gpu.TINY, "cpu", 32)
    names = {step.partition(" ")[0] for step in steps}
    assert len(names) == 8 and len(steps) == sum(len(candidates(name)) for name in names)
    first = {name: next(step for step in steps if step.partition(" ")[0] == name) for name in names}
    for step in steps if every else first.values():
        steps[step]()


@no_gpu
@pytest.mark.slow
def test_the_command_prints_every_contestant(repo_root: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run"]
    shown = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True).stdout
    assert "no times" in shown and " ms " not in shown
    assert all(shown.count(name) == 2 for name in ("sonicmoe  ", "liger  ", "patched bf16", "patched mxfp8"))

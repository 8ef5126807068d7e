"""Memory of a conversion follows its largest weight, not the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.measured_models import save_mixtral

MEASURE = """
import sys
from pathlib import Path
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

def anonymous_mb():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3

def peak_of(layers):
    peak = 0.0
    def progress(done, total):
        nonlocal peak
        peak = max(peak, anonymous_mb())
    folder = Path(sys.argv[1])
    options = ConvertOptions(sys.argv[2], "kernel")
    convert_checkpoint(folder / f"source{layers}", folder / f"{sys.argv[2]}{layers}", options, progress=progress)
    return peak

start = anonymous_mb()
print(peak_of(1) - start, peak_of(6) - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_anonymous_memory_does_not_grow_with_the_checkpoint(repo_root, tmp_path):
    for layers in (1, 6):
        save_mixtral(tmp_path / f"source{layers}", layers)
    for precision in ("bf16", "mxfp8"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), precision]
        result = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, check=True)
        small, large = map(float, result.stdout.split())
        # Five more layers hold 220 MB of experts. 15 MB leave room for the allocator and the larger plan.
        assert large <= small + 15, (precision, small, large)
        # One fused weight has 29.4 MB in bf16; the rest is what transformers loads on first use.
        assert small <= 29.4 + 60, (precision, small)

"""Loading copies nothing: the tensors are those of the mapped file, and no float copy of codes is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from tests.measured_models import save_mixtral

ROOT = Path(__file__).resolve().parent.parent.parent
MEASURE = """
import sys, threading, time
import torch
import hf_neuron_moe
from transformers import AutoModelForCausalLM

def anonymous_mb():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3

# Whatever is imported and allocated on first use is not the large model's.
AutoModelForCausalLM.from_pretrained(sys.argv[1])
start, peak, done = anonymous_mb(), 0.0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous_mb())
        time.sleep(0.001)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
done = True
thread.join()
print(peak - start, sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e6)
"""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_next_to_no_anonymous_memory_is_used(tmp_path: Path, precision: str) -> None:
    for layers in (1, 6):
        save_mixtral(tmp_path / f"source{layers}", layers)
        convert_checkpoint(tmp_path / f"source{layers}", tmp_path / str(layers), ConvertOptions(precision))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "1"), str(tmp_path / "6")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    peak, state = map(float, result.stdout.split())
    # 6 layers of 22 million expert weights.
    assert state > 120 * (2 if precision == "bf16" else 1)
    # One expert weight has 29.4 MB in bf16: a single one that is copied or decoded would show.
    assert peak <= 20

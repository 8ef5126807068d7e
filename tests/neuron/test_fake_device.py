"""Models and operator bodies on a fake ``neuron`` device, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.neuron.small_runs import CASES


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no Python backends for its private device",
)
def test_training_on_a_fake_neuron_device(repo_root: Path) -> None:
    script = repo_root / "tests" / "neuron" / "fake_device.py"
    environment = {"PYTHONPATH": str(repo_root), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *CASES], capture_output=True, text=True, env=environment, cwd=repo_root
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == CASES.keys()
    for result in found.values():
        bodies = result.pop("bodies")
        assert result == {
            "auto": "neuron", "loss": "neuron:0", "parameters": ["neuron:0"], "gradients": ["neuron:0"], "shapes": True,
            "launches": 0, "traced": [],
        }  # fmt: skip
        assert bodies == {"devices": ["neuron:0"], "traced": 2, "launches": 0}

"""Starts processes that compute together, and ends all of them when one fails or none answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def launch(repo_root: Path, module: str, folder: Path, processes: int, seconds: float) -> list[dict[str, Any]]:
    """Run ``python -m module FOLDER`` in so many processes; return what each wrote to FOLDER/rank-N.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1", "RENDEZVOUS": f"file://{folder}/rendezvous"}
    logs = [(folder / f"rank-{rank}.log").open("w+") for rank in range(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            cwd=repo_root,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.poll() not in (None, 0) for process in started):
                break
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
    texts = [Path(log.name).read_text(encoding="utf-8")[-3000:] for log in logs]
    for log in logs:
        log.close()
    codes = [process.returncode for process in started]
    assert codes == [0] * processes, "\n".join([f"exit codes {codes}", *texts])
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]

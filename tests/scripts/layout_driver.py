"""Fine-tunes by the script, once for every YAML file in a folder, in one group of processes.

    torchrun --nproc-per-node 2 -m tests.scripts.layout_driver FOLDER

The first process writes what it measured to FOLDER/results.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from finetune import finetune
from finetune_options import parse

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    results = {file.stem: finetune(parse([str(file)])) for file in sorted(folder.glob("*.yaml"))}
    if os.environ["RANK"] == "0":
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()

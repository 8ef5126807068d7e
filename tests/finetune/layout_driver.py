"""Fine-tunes once for every YAML file in a folder, in one group of processes.

torchrun --nproc-per-node 2 -m tests.finetune.layout_driver FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hf_neuron_moe.finetune import finetune, read_options

if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sorted(Path(sys.argv[1]).glob("*.yaml")):
        finetune(read_options([str(file)]), print, quiet=True)
    torch.distributed.destroy_process_group()

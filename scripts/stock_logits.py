#!/usr/bin/env python3
"""Compute the logits of saved checkpoints with stock transformers, in a process without ``hf_neuron_moe``.

The demo starts it as a child process: what it computes is what anyone gets who opens the checkpoint without the
package. ``python scripts/stock_logits.py IDS.pt OUT_DIR CHECKPOINT...`` reads token ids ``[B, S]`` and writes fp32
logits ``[B, S, vocabulary]`` to ``OUT_DIR/<name of the checkpoint folder>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

FOREIGN = "hf_neuron_moe"


def main(ids_file: str, out_dir: str, *checkpoints: str) -> None:
    """Load each checkpoint in fp32, run it on the ids, write the logits.

    Raises:
        RuntimeError: the package under test got into this process.
    """
    transformers_logging.disable_progress_bar()
    ids_BS = torch.load(ids_file, weights_only=True)
    for checkpoint in checkpoints:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        with torch.no_grad():
            logits_BSV = model(ids_BS, use_cache=False).logits
        torch.save(logits_BSV, Path(out_dir) / f"{Path(checkpoint).name}.pt")
        print(f"   {Path(checkpoint).name}: {type(model).__name__} opened without {FOREIGN}", flush=True)
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == FOREIGN)
    if loaded:
        raise RuntimeError(f"this process must not import {FOREIGN}, but it holds {loaded[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

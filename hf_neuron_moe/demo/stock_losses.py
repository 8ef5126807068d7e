"""The loss of a saved checkpoint in stock transformers, in a process without ``hf_neuron_moe``.

    python -P stock_losses.py WINDOWS.pt CHECKPOINT

reads token ids ``[N, L]`` and prints the mean cross entropy over them, in nats. The demo starts it: what it computes is
what anyone gets who opens the checkpoint without the package.
"""

import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

FOREIGN = "hf_neuron_moe"


def main(windows_file: str, checkpoint: str) -> None:
    """Load the checkpoint in fp32 and write its loss to standard output."""
    logging.disable_progress_bar()
    windows_NL = torch.load(windows_file, weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [model(window_L[None], labels=window_L[None], use_cache=False).loss.item() for window_L in windows_NL]
    if loaded := sorted(name for name in sys.modules if name.split(".")[0] == FOREIGN):
        raise RuntimeError(f"this process must not import {FOREIGN}, but it holds {loaded[0]}")
    sys.stdout.write(f"{sum(losses) / len(losses)!r}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

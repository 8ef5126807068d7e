"""Calls of few tokens in fp32: a patched experts block against stock's, processor seconds of one thread, in turns.

    python benchmarks/few_tokens.py                                     # 128 experts of H=2048 I=768, generation
    python benchmarks/few_tokens.py --train --sizes 128 256 32 8        # H, I, experts, experts per token

Processor time, since other processes of the machine take the wall clock's. All contestants share one set of weights.
In training there is one more, whose kernels return memory without values: what torch's operators take by themselves.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch

from benchmarks.blocks import Block, Case, decode_step, make_inputs, patched_block, share_weights, train_step
from benchmarks.setting import check_top_k, machine, positive
from hf_neuron_moe.backends.spec import BlockShape
from hf_neuron_moe.backends.torch.backend import TorchBackend

ALONE = "operators alone"


def without_kernels(step: Callable[[], None]) -> Callable[[], None]:
    """Let `step` compute nothing of experts between the operators' beginning and end."""

    def forward(self: Any, x_TH: Any, routing: Any, weights: Any, spec: Any, keep: Any) -> Any:
        shape = BlockShape("experts", *weights.down.shape[1:], len(weights.down), routing.index_TK.shape[1])
        return torch.empty_like(x_TH), self.fake_saved(x_TH, shape, spec, keep)

    def backward(self: Any, dout_TH: Any, x_TH: Any, routing: Any, weights: Any, saved: Any, call: Any) -> Any:
        grads = map(torch.empty_like, (dout_TH, routing.weight_TK, weights.gate_up, weights.down))
        return *grads, dout_TH.new_empty(0), dout_TH.new_empty(0)

    def empty() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchBackend, "experts_forward", forward)
            patch.setattr(TorchBackend, "experts_backward", backward)
            step()

    return empty


def measure(case: Case, tokens: int, repeats: int, *, train: bool) -> dict[str, list[float]]:
    """Return the processor seconds of each contestant's turns, ascending."""
    blocks = {name: Block(case, torch.float32, name) for name in ("grouped_mm", "eager")}
    blocks["patched"] = patched_block(case, "fp32")
    for block in blocks.values():
        share_weights(block, blocks["grouped_mm"])
    inputs = make_inputs(case, tokens, torch.float32)
    steps = {name: (train_step if train else decode_step)(block, inputs) for name, block in blocks.items()}
    if train:
        blocks[ALONE], steps[ALONE] = blocks["patched"], without_kernels(steps["patched"])
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order, draw = list(steps), random.Random(0)
    for turn in range(repeats + 1):  # the first one warms up
        draw.shuffle(order)
        for name in order:
            for taken in (False, True):  # in a model the layer before has run the same code, so one call goes before
                start = time.process_time()
                steps[name]()
                if turn and taken:
                    seconds[name].append(time.process_time() - start)
                blocks[name].zero_grad(set_to_none=True)
    return {name: sorted(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sizes = [2048, 768, 128, 8]
    names = ("H", "I", "E", "K")
    parser.add_argument("--sizes", type=positive, nargs=4, default=sizes, metavar=names, help="(2048 768 128 8)")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 8, 32], help="in all (1 8 32)")
    parser.add_argument("--train", action="store_true", help="a training step in place of a call of generation")
    parser.add_argument("--repeats", type=positive, default=7, help="turns after the first (7)")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    hidden, inner, experts, per_token = asked.sizes
    check_top_k(parser, experts, per_token)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    rows = []
    for tokens in asked.tokens:
        case = Case("few", hidden, inner, tokens, experts, per_token)
        found = measure(case, tokens, asked.repeats, train=asked.train)
        median = {name: statistics.median(values) for name, values in found.items()}
        ratio = median["patched"] / min(median["grouped_mm"], median["eager"])
        rows.append({"tokens": tokens, "seconds": found, "patched_over_best_stock": ratio})
        times = (
            f"{name} {1e3 * median[name]:.2f} ms ({1e3 * turns[0]:.2f} to {1e3 * turns[-1]:.2f})"
            for name, turns in found.items()
        )
        print(f"{tokens} tokens: {', '.join(times)}; patched over the better stock {ratio:.2f}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "sizes": asked.sizes, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

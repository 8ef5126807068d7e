"""Time of a training step under each activation policy, of the three blocks of the table in docs/concepts.md.

    python benchmarks/policies.py --json out.json
    python docs/figures/policies.py --record out.json       # the figures that docs/figures/policies.svg shows

Forward and backward in bf16, contestants taking turns as in ``blocks.py``. Stock is transformers' default for experts,
``grouped_mm``. All contestants of a block share one set of weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# A script's folder is searched first, and kernels.py here is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console

from benchmarks import blocks
from benchmarks.blocks import Block, Case, Progress
from benchmarks.setting import machine, restart_with_isa
from hf_neuron_moe import NeuronMoEConfig, patch_model

CASES = {
    "Llama-3-8B MLP": Case("llama", 4096, 14336, 512),
    "Qwen3-30B-A3B experts": Case("qwen3", 2048, 768, 512, 128, 8),
    "quarter-width Mixtral experts": Case("mixtral", 1024, 3584, 1024, 8, 2),
}
POLICIES = ("full", "minimal", "fp8", "recompute")


def measure(case: Case, repeats: int, progress: Progress) -> dict[str, dict[str, float]]:
    """Return median and quartiles in seconds, of stock and of each policy."""
    first = Block(case, torch.bfloat16, "grouped_mm")
    contestants = {"stock": first}
    for policy in POLICIES:
        contestants[policy] = Block(case, torch.bfloat16, "eager")
        patch_model(contestants[policy], NeuronMoEConfig(precision="bf16", activations=policy))
    for block in contestants.values():
        if block is not first:
            blocks.share_weights(block, first)
    inputs = blocks.make_inputs(case, case.T, torch.bfloat16)
    steps = {name: blocks.train_step(block, inputs) for name, block in contestants.items()}
    return blocks.time_in_turns(steps, repeats, 60.0, f"bf16, {case.sizes}", progress)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each")
    parser.add_argument("--isa", choices=("avx2",), help="hold the matmul libraries to an instruction set")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    if options.isa:
        restart_with_isa(options.isa)
    report: dict[str, Any] = {"machine": machine(), "blocks": {}}
    print(f"{'block':30} {'policy':10} {'tokens':>7} {'median':>9} {'quartiles':>18} {'of full':>8}")
    for name, case in CASES.items():
        times = measure(case, options.repeats, Progress(Console(stderr=True)))
        report["blocks"][name] = {"tokens": case.T, "times": times}
        for policy, found in times.items():
            quartiles = f"{1e3 * found['q1_s']:.0f} to {1e3 * found['q3_s']:.0f} ms"
            ratio = found["median_s"] / times["full"]["median_s"]
            print(
                f"{name:30} {policy:10} {case.T:>7} {1e3 * found['median_s']:>6.0f} ms {quartiles:>18} {ratio:>8.2f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Time of one training step on two processes against half of one process's, and what the processes send.

    python benchmarks/scale_out.py                    # a Mixtral of two layers, bf16
    python benchmarks/scale_out.py --precision mxfp8 --tokens 2048 --json out.json

Every process has one thread. One process trains on all tokens. Two of them train on the same tokens, cut as the layout
says. Waiting is the time in which a process waits for a collective, its partner's work included; the rest of the step
is its own computation. The bytes are those that one process hands to collectives in one step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

if str(Path(__file__).resolve().parent) in sys.path:  # whose kernels.py would hide a package
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.setting import machine
from hf_neuron_moe import parity

LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp2": {"fsdp": 2},
    "tp2": {"tp": 2},
    "ep2": {"fsdp": 2, "ep": 2},
    "ep2 x tp2": {"tp": 2, "ep": 2},
}
WORDS = {"alltoall": "exchange", "allreduce": "sum", "allgather": "gather", "reduce_scatter": "scatter"}
"""Collectives by a part of their operator's name."""


class Waiting:
    """Seconds spent waiting for collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wait = dist.Work.wait

    def __enter__(self) -> Waiting:
        dist.Work.wait = lambda work, *args: self._timed(work, *args)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        dist.Work.wait = self._wait  # type: ignore[method-assign]

    def _timed(self, work: Any, *args: Any) -> Any:
        start = time.perf_counter()
        result = self._wait(work, *args)
        self.seconds += time.perf_counter() - start
        return result


class Messages(TorchDispatchMode):
    """Bytes that this process hands to collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name:
            plain = name.replace("_", "")
            kind = next((word for part, word in WORDS.items() if part.replace("_", "") in plain), None)
            if kind is not None:
                tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(each)]
                sizes = [each.numel() * each.element_size() for each in tensors]  # of the input and, mostly, the output
                handed = {"gather": min(sizes), "scatter": max(sizes)}
                self.bytes[kind] += handed.get(kind, sizes[-1])
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def model_folder(home: Path, arguments: argparse.Namespace) -> str:
    """Make the model that is measured."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.inner,
        num_local_experts=arguments.experts,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
    )
    MixtralForCausalLM(config).save_pretrained(home / "model")
    return str(home / "model")


def measure(trial: parity.Trial, steps: int) -> dict[str, Any]:
    """Return the seconds of each step, those of waiting, and what one step sends; the first step does not count."""
    model = parity.load(trial, distributed=dist.is_initialized())
    rank = dist.get_rank() // trial.layout.get("tp", 1) if dist.is_initialized() else 0
    parts = trial.batches if dist.is_initialized() else 1

    def step(number: int) -> None:
        ids = parity.batch_of(trial, 1024, number, rank, parts)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    def timed(number: int) -> tuple[float, float]:
        if dist.is_initialized():
            dist.barrier()
        with Waiting() as waiting:
            start = time.perf_counter()
            step(number)
            return time.perf_counter() - start, waiting.seconds

    step(0)
    times = [timed(number) for number in range(1, steps + 1)]
    with Messages() as messages:
        step(0)
    return {"seconds": times, "bytes": dict(messages.bytes), "calls": dict(messages.calls)}


def child(folder: Path, layout: str, arguments: argparse.Namespace) -> None:
    """Measure on this process, and write what was found."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        store = f"file://{folder}/{layout.replace(' ', '')}"
        dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    rows = arguments.tokens // 128
    patch = {"precision": arguments.precision}
    trial = parity.Trial(str(folder / "model"), LAYOUTS.get(layout, {}), patch, rows=rows, tokens=128)
    found = measure(trial, arguments.steps)
    if world > 1:
        dist.destroy_process_group()
    (folder / f"{layout}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def run(folder: Path, layout: str, processes: int) -> list[dict[str, Any]]:
    """Measure in processes of their own."""
    command = [sys.executable, *sys.argv, "--child", str(folder), layout]
    variables = {**os.environ, "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    started = [
        subprocess.Popen(command, env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    codes = [process.wait(timeout=900) for process in started]
    if any(codes):
        raise SystemExit(f"{layout}: exit codes {codes}")
    return [json.loads((folder / f"{layout}-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


def median(found: list[dict[str, Any]], of: Callable[[tuple[float, float]], float]) -> tuple[float, float]:
    """Return the median over steps of the slowest process, and the spread between quartiles relative to it."""
    values = [max(of(pair) for pair in pairs) for pairs in zip(*(each["seconds"] for each in found), strict=True)]
    quartiles = statistics.quantiles(values, n=4)
    middle = statistics.median(values)
    return middle, (quartiles[2] - quartiles[0]) / middle if middle else 0.0


def main() -> None:
    """Measure all layouts and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "mxfp8"))
    parser.add_argument("--tokens", type=int, default=1024, help="of one step, over all processes; a multiple of 256")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=1792)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(Path(arguments.child[0]), arguments.child[1], arguments)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_folder(folder, arguments)
        alone = run(folder, "alone", 1)
        one, spread = median(alone, lambda pair: pair[0])
        rows = [{"layout": "one process", "ms": 1e3 * one, "spread": spread, "over_half": 2.0, "waiting": 0.0}]
        for layout in LAYOUTS:
            found = run(folder, layout, 2)
            middle, spread = median(found, lambda pair: pair[0])
            waiting, _ = median(found, lambda pair: pair[1])
            sent = {kind: max(each["bytes"].get(kind, 0) for each in found) for kind in WORDS.values()}
            rows.append(
                {
                    "layout": layout,
                    "ms": 1e3 * middle,
                    "spread": spread,
                    "over_half": middle / (one / 2),
                    "waiting": waiting / middle,
                    "bytes": sent,
                    "calls": found[0]["calls"],
                }
            )
    setting = {**machine(), "threads": 1, **{key: value for key, value in vars(arguments).items() if key != "json"}}
    if arguments.json:
        result = json.dumps({"setting": setting, "rows": rows}, indent=1, default=str)
        arguments.json.write_text(result, encoding="utf-8")
    print(setting)
    print("| layout | step, ms | spread | over half of one process | waiting | exchange | sum | gather | scatter |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        sent = row.get("bytes", {})
        cells = [f"{sent.get(kind, 0) / 1e6:.2f} MB" for kind in WORDS.values()]
        print(
            f"| {row['layout']} | {row['ms']:.0f} | {row['spread']:.0%} | {row['over_half']:.2f} | "
            f"{row['waiting']:.0%} | {' | '.join(cells)} |"
        )


if __name__ == "__main__":
    main()

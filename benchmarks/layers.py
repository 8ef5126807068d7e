"""A training step of several layers, patched and stock, each in a process of its own.

    python benchmarks/layers.py                                      # cases a, c and d of blocks.py, four layers
    python benchmarks/layers.py --cases a --tokens 256 --isa avx2    # as on a CPU without bf16 instructions
    python benchmarks/layers.py --sizes 128 256 32 8 --tokens 8 --dtype fp32 --threads 1    # H, I, experts, per token

The gradients of all layers are alive together, and freed together before the next step. Then the C library may give
their memory back to the system, and the next step's are new pages: each costs a page fault. In one process a contestant
would find the memory of another. So each has its own, and they take turns, a step at a time, in an order that is drawn
anew. Medians and quartiles are of these turns. Ratios are to the faster of stock's implementations; the other one runs
in the warm-up only.

Legend: H hidden, I intermediate, E experts, k experts per token, T tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.blocks import CASES, DTYPES, Block, Case, make_inputs, patched_block, stock_implementations, train_step
from benchmarks.setting import check_top_k, machine, positive, restart_with_isa

WARM_UP = 3


def page_faults() -> int:
    """Return how many pages the system has given this process so far."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def serve(pipe: Connection, case: Case, dtype: str, name: str, layers: int, threads: int) -> None:
    """Make a contestant, and run a step for each message: seconds and page faults are the answer."""
    torch.set_num_threads(threads)
    stock = name in stock_implementations(case)
    stack = Block(case, DTYPES[dtype], name, layers) if stock else patched_block(case, name, layers)
    step = train_step(stack, make_inputs(case, case.T, DTYPES[dtype]))
    pipe.send("ready")
    with suppress(EOFError):  # the other end is closed
        while pipe.recv():
            faults, start = page_faults(), time.perf_counter()
            step()
            pipe.send((time.perf_counter() - start, page_faults() - faults))


def answer(pipe: Connection, name: str) -> Any:
    """Wait for what a contestant sends."""
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"layers.py: the process of {name!r} has ended; what it said is above") from None


def measure(case: Case, dtype: str, layers: int, repeats: int, threads: int) -> dict[str, Any]:
    """Return seconds and page faults of a step of each contestant, and the ratios."""
    stock = stock_implementations(case)
    names = [*stock, *(("bf16", "mxfp8") if dtype == "bf16" else ("fp32",))]
    context, turns = multiprocessing.get_context("spawn"), {name: list[tuple[float, int]]() for name in names}
    with ExitStack() as stack:
        pipes: dict[str, Connection] = {}
        for name in names:
            pipes[name], other = context.Pipe()
            child = context.Process(target=serve, args=(other, case, dtype, name, layers, threads), daemon=True)
            child.start()
            stack.callback(child.join)
            stack.callback(pipes[name].close)
            other.close()  # so that the end of a process is one of its pipe
        for name, pipe in pipes.items():
            answer(pipe, name)
        draw = random.Random(0)
        for turn in range(WARM_UP + repeats):
            if turn == WARM_UP:  # the slower of stock's can take a hundred times as long
                best = min(stock, key=lambda name: min(turns[name]))
                names = [best, *names[len(stock) :]]
                turns = {name: [] for name in names}
            for name in draw.sample(names, len(names)):
                pipes[name].send(True)
                turns[name].append(answer(pipes[name], name))
    times = {name: _summary(taken) for name, taken in turns.items()}
    over = {name: times[best]["median_s"] / times[name]["median_s"] for name in names[1:]}
    return {"case": asdict(case), "dtype": dtype, "times": times, "best_stock": best, "speedup_over_best_stock": over}


def _summary(taken: list[tuple[float, int]]) -> dict[str, float]:
    seconds, faults = zip(*taken, strict=True)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (seconds[0],) * 3
    return {
        "median_s": statistics.median(seconds),
        "q1_s": low,
        "q3_s": high,
        "median_page_faults": statistics.median(faults),
    }


def show(rows: list[dict[str, Any]], layers: int, console: Console) -> None:
    """Print a row for each contestant."""
    table = Table("shape", "dtype", "", "ms per layer", "quartiles", "page faults per layer", "stock / it")
    for row in rows:
        for name in (row["best_stock"], *row["speedup_over_best_stock"]):
            entry, ratio = row["times"][name], row["speedup_over_best_stock"].get(name)
            median, low, high = (entry[key] * 1e3 / layers for key in ("median_s", "q1_s", "q3_s"))
            called = f"stock {name}" if ratio is None else f"patched {name}"
            faults = f"{entry['median_page_faults'] / layers:,.0f}"
            spread, last = f"{low:.3g} to {high:.3g}", "" if ratio is None else f"{ratio:.2f}"
            table.add_row(Case(**row["case"]).title, row["dtype"], called, f"{median:.3g}", spread, faults, last)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--cases", nargs="+", choices=sorted(CASES), default=["a", "c", "d"], help="of blocks.py (a c d)"
    )
    shapes.add_argument("--sizes", type=positive, nargs=4, metavar=("H", "I", "E", "K"), help="in place of the cases")
    tokens = [64, 256, 512, 1024]
    parser.add_argument("--tokens", type=positive, nargs="+", default=tokens, help="in all (64 256 512 1024)")
    parser.add_argument("--layers", type=positive, default=4, help="blocks in a stack (4)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of weights and tokens (bf16)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="of each process (all cores)")
    parser.add_argument("--repeats", type=positive, default=15, help="turns after the warm-up (15)")
    parser.add_argument("--isa", choices=("native", "avx2"), default="native", help="instruction set")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    asked = parser.parse_args()
    if asked.isa == "avx2":
        restart_with_isa(asked.isa)
    if asked.sizes:
        hidden, inner, experts, per_token = asked.sizes
        check_top_k(parser, experts, per_token)
        cases = [Case("asked", hidden, inner, 0, experts, per_token)]
    else:
        cases = [CASES[name] for name in asked.cases]
    console, rows = Console(width=140), []
    console.print(machine() | {"layers": asked.layers, "threads": asked.threads})
    for case in cases:
        for tokens in asked.tokens:
            sized = replace(case, T=tokens)
            console.print(f"{sized.title} ...")
            rows.append(measure(sized, asked.dtype, asked.layers, asked.repeats, asked.threads))
            if asked.json:
                report = {"machine": machine(), "layers": asked.layers, "threads": asked.threads, "rows": rows}
                asked.json.write_text(json.dumps(report, indent=1) + "\n")
    show(rows, asked.layers, console)


if __name__ == "__main__":
    main()

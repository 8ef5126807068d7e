"""Speed of patched blocks in two checkouts of this repository: before and after a change.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before                      # all that the processor has
    python benchmarks/before_after.py ../before --isa avx2           # as on a CPU without bf16 instructions

Each checkout has a process that stays, and the two take turns at single steps (forward and backward), so that a change
of the machine's clock or load hits both. Shapes and steps are those of ``blocks.py`` of the checkout; nothing of stock
transformers runs. A ratio divides medians: above 1, the checkout that this script lies in is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WORKER = """
import json, sys, time
from benchmarks.blocks import CASES, DTYPES, make_inputs, patched_block, train_step
steps = {}
for line in sys.stdin:
    name, precision, tokens = key = tuple(json.loads(line))
    if key not in steps:
        steps.clear()
        case = CASES[name]
        inputs = make_inputs(case, tokens or case.T, DTYPES[precision])
        steps[key] = train_step(patched_block(case, precision), inputs)
    start = time.perf_counter()
    steps[key]()
    print(f"seconds {time.perf_counter() - start}", flush=True)
"""


class Checkout:
    """The process of one checkout."""

    def __init__(self, folder: Path, isa: str | None) -> None:
        self.folder = folder
        environment = os.environ | {"PYTHONPATH": str(folder)}
        if isa:  # as benchmarks/setting.py, which the other checkout need not have
            environment |= {"ATEN_CPU_CAPABILITY": isa}
            environment |= dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"), isa.upper())
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, case: str, precision: str, tokens: int | None) -> float:
        """Return the time of one step; the first of a case makes its block."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([case, precision, tokens]) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit(f"The process of {self.folder} ended; its own words are above.")


@contextmanager
def checkouts(folders: dict[str, Path], isa: str | None) -> Iterator[dict[str, Checkout]]:
    """Start a process for each folder; end them."""
    started = {name: Checkout(folder, isa) for name, folder in folders.items()}
    try:
        yield started
    finally:
        for checkout in started.values():
            checkout.process.kill()
            checkout.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--cases", nargs="+", default=["a", "b", "c", "d"], help="of blocks.py")
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "mxfp8", "fp32"), default=["bf16", "mxfp8"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[None], help="the case's own unless given")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each")
    parser.add_argument("--isa", choices=("avx2",), help="hold the matmul libraries to an instruction set")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2, for quartiles")
    results = []
    print(f"{'case':5} {'precision':10} {'tokens':>7} {'before ms':>22} {'after ms':>22} {'after/before':>13}")
    with checkouts({"before": options.before.resolve(), "after": HERE}, options.isa) as both:
        for case in options.cases:
            for precision in options.precisions:
                for tokens in options.tokens:
                    times: dict[str, list[float]] = {name: [] for name in both}
                    for turn in range(options.rounds + 1):  # the first warms up
                        for name in random.sample(list(both), 2):
                            seconds = both[name].seconds(case, precision, tokens)
                            times[name] += [1e3 * seconds] if turn else []
                    cells, medians = [], {}
                    for name, values in times.items():
                        low, medians[name], high = statistics.quantiles(values, n=4)
                        cells.append(f"{medians[name]:.1f} ({low:.1f} to {high:.1f})")
                    ratio = medians["after"] / medians["before"]
                    shown = tokens or "own"
                    print(f"{case:5} {precision:10} {shown:>7} {cells[0]:>22} {cells[1]:>22} {ratio:13.2f}", flush=True)
                    row = {"case": case, "precision": precision, "tokens": tokens, "ms": times, "ratio": ratio}
                    results.append(row)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

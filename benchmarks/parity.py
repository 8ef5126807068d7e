"""Does a model still learn with the patched blocks? Loss curves of every variant on real text, and how far they part.

    python benchmarks/parity.py                                # the whole study; goes on where an earlier run stopped
    python benchmarks/parity.py --only smollm2 --seeds 1       # a part of it
    python benchmarks/parity.py --budget-minutes 35            # begins no run that would end later
    python benchmarks/parity.py --isa avx2 --docs docs/parity.md

Every run writes one file; runs whose file is there are not repeated. ``parity.json`` has all curves and the summary,
and ``hf-neuron-moe report`` draws them. Losses do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Not the benchmarks' own folder: kernels.py in it is not the package of that name that transformers looks for.
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "parity_study"))

import torch
from rich.console import Console
from rich.table import Table
from study_models import SUBJECTS, Study, Subject, study_parser
from study_runs import Run, do, known_result, planned
from study_summary import FP32_HEADINGS, HEADINGS, fp32_rows, markdown, rows, summarize, verdict
from transformers.utils import logging as transformers_logging

from benchmarks.setting import machine, restart_with_isa

PROGRESS_S = 10.0


def parse_arguments() -> argparse.Namespace:
    parser = study_parser(__doc__, "parity_output")
    parser.add_argument("--docs", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--only", nargs="+", choices=sorted(SUBJECTS), help="these models only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of every run, for a trial")
    parser.add_argument("--budget-minutes", type=float, default=60.0, help="begin no run that would end later")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or (arguments.steps is not None and arguments.steps < 1):
        parser.error("--seeds and --steps must be at least 1")
    return arguments


class Progress:
    """Prints a line every few seconds while a run goes on."""

    def __init__(self, console: Console, run: Run) -> None:
        self.console = console
        self.run = run
        self.printed = 0.0

    def __call__(self, step: int, loss: float, seconds: float) -> None:
        if seconds - self.printed > PROGRESS_S or step + 1 == self.run.steps:
            self.printed = seconds
            self.console.print(f"   step {step + 1}/{self.run.steps}  loss {loss:.4f}  {seconds:.0f} s")


def do_all(runs: list[Run], study: Study, folder: Path, budget_s: float, console: Console) -> None:
    """Do the runs that have no file yet, as long as the budget lasts."""
    begin = time.perf_counter()
    per_step: dict[str, float] = {}
    for index, run in enumerate(runs):
        if known_result(folder, run, study.subjects[run.model]) is not None:
            continue
        left = budget_s - (time.perf_counter() - begin)
        if left < per_step.get(run.model, 0.0) * run.steps:
            console.print(f"the budget ends before {run.file_name}; run the command again to go on")
            continue
        console.print(f">> {index + 1}/{len(runs)} {run.model}, {run.variant}, seed {run.seed}")
        result = do(run, study, folder, Progress(console, run))
        per_step[run.model] = max(per_step.get(run.model, 0.0), result["seconds"] / run.steps)


def collect(runs: list[Run], subjects: dict[str, Subject], folder: Path) -> dict[str, Any]:
    """Return the report over all runs that have a file."""
    curves: dict[str, dict[str, dict[str, list[float]]]] = {}
    saved: dict[str, dict[str, float]] = {}
    steps: dict[str, int] = {}
    seconds = complete = 0
    for run in runs:
        result = known_result(folder, run, subjects[run.model])
        if result is None:
            continue
        curves.setdefault(run.model, {}).setdefault(run.variant, {})[str(run.seed)] = result["losses"]
        saved.setdefault(run.model, {})[run.variant] = result["saved_bytes_per_token"]
        steps[run.model] = steps.get(run.model, 0) + len(result["losses"])
        seconds += result["seconds"]
        complete += 1
    return {
        "models": curves,
        "summary": summarize(curves),
        "saved_bytes_per_token": saved,
        "environment": machine(),
        "subjects": {name: asdict(subject) for name, subject in subjects.items()},
        "runs": {"planned": len(runs), "complete": complete, "steps": steps, "seconds": round(seconds, 1)},
    }


def show(report: dict[str, Any], console: Console) -> None:
    for headings, body in ((HEADINGS, rows(report["summary"])), (FP32_HEADINGS, fp32_rows(report["summary"]))):
        table = Table(*headings)
        for row in body:
            table.add_row(*row)
        console.print(table)
    for line in verdict(report["summary"]):
        console.print(line)


def main() -> None:
    arguments = parse_arguments()
    if arguments.isa:
        restart_with_isa(arguments.isa)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console = Console(width=150)
    subjects = {name: subject for name, subject in SUBJECTS.items() if not arguments.only or name in arguments.only}
    if arguments.steps:
        subjects = {name: replace(subject, steps=arguments.steps) for name, subject in subjects.items()}
    runs = planned(subjects, arguments.seeds)
    folder = arguments.out / "runs"
    console.print(f"{len(runs)} runs, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    do_all(
        runs, Study(subjects, arguments.out / "starts", arguments.model), folder, arguments.budget_minutes * 60, console
    )
    report = collect(runs, subjects, folder)
    if not report["models"]:
        raise SystemExit("no run was done within the budget")
    (arguments.out / "parity.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    if arguments.docs:
        arguments.docs.write_text(markdown(report), encoding="utf-8")
    show(report, console)


if __name__ == "__main__":
    main()

"""The demo's outcome: a table for the terminal, a report in Markdown and the same numbers in JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from demo_runs import STOCK, RunResult
from rich import box
from rich.console import Console
from rich.table import Table

HEADINGS = ("run", "train loss", "eval loss", "tok/s", "saved B/tok", "ratio", "P/S/R")
LEGEND = (
    "Losses: mean cross entropy (nats) at the start->at the end; eval is on speeches of years never trained on. "
    "Saved: bytes per token that the patched blocks keep for backward; ratio: to stock. "
    "P/S/R: modules patched/skipped/refused. Stock computes in fp32, so tok/s of bf16 and mxfp8 are against fp32, "
    "the fastest stock way on a CPU without bfloat16 instructions."
)
LOSS_NOTE = (
    "Train loss is noisy: the mean of a few small steps on other text at the end than at the start, so it may rise in "
    "every run alike while the model learns. Whether it learned is what eval loss tells, which is on the same text "
    "before and after."
)
RELOAD_HEADINGS = ("checkpoint of", "precision fp32", "as trained", "as trained, rms")
RELOAD_LEGEND = (
    "Checkpoints: saved, then reloaded in stock transformers in a process without this package. Precision fp32: "
    "largest difference of a logit to the trained model computing at that precision; as trained: largest and root "
    'mean square difference to the model as it was trained. The stock model computes in fp32, so "as trained" shows '
    'the arithmetic of bf16 or MXFP8 in the blocks; a difference of the weights would show in "precision fp32".'
)
ROUTING_NOTE = (
    'The largest difference "as trained" is that of the worst token, and may be large for a mixture of experts: there '
    "rounding also sends tokens whose experts nearly tie to another expert. The rms and the eval loss show whether "
    "that matters."
)


@dataclass
class Part:
    """Results of one model: the dense one or the mixture of experts."""

    title: str
    model: str
    blocks: str
    runs: list[RunResult] = field(default_factory=list)

    @property
    def padding(self) -> str:
        """What the kernels' padding of the patched blocks to multiples of 128 costs, in words."""
        entries = [entry for run in self.runs if run.patch_report for entry in run.patch_report["entries"]]
        costs = {(tuple(e["padded_sizes"]), e["padding_overhead_percent"]) for e in entries if e["status"] == "patched"}
        texts = [
            f"to H, I = {sizes[0]}, {sizes[1]} (+{percent:.1f} % multiply-adds)" for sizes, percent in sorted(costs)
        ]
        return "Neuron's kernels would pad: " + "; ".join(texts)

    @property
    def stock(self) -> RunResult:
        """The reference run."""
        return next(result for result in self.runs if result.name == STOCK)


@dataclass
class Outcome:
    """Everything a demo run has to say."""

    options: dict[str, Any]
    perplexity: float
    perplexity_windows: int
    context: int
    logit_tolerance: float
    parts: list[Part] = field(default_factory=list)
    seconds: float = 0.0


def machine() -> dict[str, str]:
    """Describe where the numbers come from: processor, cores, versions and date, and nothing that names the host."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{model} ({torch.backends.cpu.get_cpu_capability()}), {cores} cores, no accelerator used",
        "threads": str(torch.get_num_threads()),
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def rows(part: Part) -> list[tuple[str, ...]]:
    """Return the table's rows of one part, in the order of `HEADINGS`."""
    stock_bytes = part.stock.saved_bytes_per_token
    table = []
    for result in part.runs:
        patched = "-" if result.name == STOCK else f"{result.patched}/{result.skipped}/{result.refused}"
        table.append(
            (
                result.name,
                f"{result.train_loss_start:.3f}->{result.train_loss_end:.3f}",
                f"{result.eval_loss_before:.3f}->{result.eval_loss_after:.3f}",
                f"{result.tokens_per_second:,.0f}",
                f"{result.saved_bytes_per_token:,.0f}",
                f"{result.saved_bytes_per_token / stock_bytes:.2f}x",
                patched,
            )
        )
    return table


def reload_rows(part: Part) -> list[tuple[str, ...]]:
    """Return one row per saved checkpoint: largest logit differences to the same checkpoint in stock transformers."""
    reloaded = [(result.name, result.logit_difference) for result in part.runs if result.logit_difference]
    return [
        (name, f"{gap['fp32']:.1e}", f"{gap['patched']:.2g}", f"{gap['patched_rms']:.2g}") for name, gap in reloaded
    ]


def print_tables(console: Console, outcome: Outcome) -> None:
    """Print what the report holds, as tables for the terminal."""
    for part in outcome.parts:
        # A line each, which a log file gets whole.
        console.print(f"\n[bold]{part.title}[/bold]: {part.model}", soft_wrap=True)
        console.print(f"{part.blocks}\n{part.padding}", soft_wrap=True)
        console.print(_terminal_table(HEADINGS, rows(part)))
        console.print(_terminal_table(RELOAD_HEADINGS, reload_rows(part)))
    for text in (LEGEND, LOSS_NOTE, RELOAD_LEGEND, ROUTING_NOTE):
        console.print(text)


def _terminal_table(headings: tuple[str, ...], body: list[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row in body:
        table.add_row(*row)
    return table


def _markdown_table(headings: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(row) + " |" for row in body]


def markdown(outcome: Outcome, where: dict[str, str]) -> str:
    """Return the report's text."""
    lines = ["# Demo report", "", *(f"* {key}: {value}" for key, value in where.items())]
    lines += [f"* wall time: {outcome.seconds:.0f} s", "* options: " + json.dumps(outcome.options), ""]
    lines += [
        f"Perplexity of the dense model before fine-tuning: **{outcome.perplexity:.1f}**, over "
        f"{outcome.perplexity_windows} non-overlapping windows of {outcome.context} tokens, evenly spread over the "
        "speeches of 2010-2021; each window is scored on its own, without a start token.",
    ]
    for part in outcome.parts:
        lines += ["", f"## {part.title}", "", f"{part.model}; {part.blocks}; {part.padding}.", ""]
        lines += _markdown_table(HEADINGS, rows(part))
        lines += ["", *_markdown_table(RELOAD_HEADINGS, reload_rows(part))]
    reload = f"{RELOAD_LEGEND} The first must stay below {outcome.logit_tolerance:g}."
    for text in (LEGEND, LOSS_NOTE, reload, ROUTING_NOTE):
        lines += ["", text]
    lines += ["", "How to read this: docs/demo.md.", ""]
    return "\n".join(lines)


def write_report(outcome: Outcome, folder: Path) -> Path:
    """Write ``report.md`` and ``report.json`` and return the path of the former."""
    where = machine()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.md"
    path.write_text(markdown(outcome, where), encoding="utf-8")
    record = {"machine": where, **asdict(outcome)}
    (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path

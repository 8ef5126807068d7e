"""A page's parser, and the files of made-up runs and studies."""

from __future__ import annotations

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

TRAINING = {
    "learning_rate": 1e-3,
    "batch_size_per_process": 4,
    "accumulation_steps": 2,
    "processes": 1,
    "max_steps": 12,
    "seed": 0,
    "resumed_from_step": 0,
    "parameters": 5000,
    "trainable_parameters": 5000,
    "adapter": None,
    "lora_rank": None,
}
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data: list[str] = []  # of scripts
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.data if self.open[-1:] == ["script"] else self.words).append(data)

    def figures(self) -> list[str]:
        """What the figures show, as a screen reader says it."""
        return [str(attrs["aria-label"]) for tag, attrs in self.tags if attrs.get("role") == "img"]

    def drawings(self) -> dict[str, dict[str, Any]]:
        """What plotly.js gets, by the figures' description."""
        scripts = [json.loads(text) for text in self.data if text.startswith("{")]
        return dict(zip(self.figures(), scripts, strict=True))

    def files(self) -> list[list[list[str]]]:
        """The tables to download."""
        links = [str(attrs["href"]).partition(",")[2] for tag, attrs in self.tags if tag == "a" and "download" in attrs]
        return [list(csv.reader(io.StringIO(unquote(link), newline=""))) for link in links]

    def text(self) -> str:
        return " ".join(self.words)


def entry(layer: int, kind: str, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": f"model.layers.{layer}.mlp",
        "kind": kind,
        "class_name": "MixtralExperts" if kind == "experts" else "LlamaMLP",
        "status": "patched",
        "reason": "",
        "experts": 4 if kind == "experts" else None,
        "hidden_size": 32,
        "intermediate_size": 48,
        "activations": "minimal",
        "saved_bytes_per_token": 2048.0,
    }
    return facts | changes


def health(sqnr: float | None) -> dict[str, Any]:
    figures = {"amax": 1.5, "flushed": 0.01, "saturated": 0.0, "sqnr_db": sqnr}
    return {"weights": {"gate": figures, "down": figures}, "input": figures}


def write_run(
    folder: Path,
    *,
    kind: str = "experts",
    steps: int = 6,
    sampled: bool = True,
    shift: float = 0.0,
    evaluated: int = 0,
    **training: Any,
) -> None:
    files = folder / "neuron_moe"
    files.mkdir(parents=True)
    refused = entry(2, kind, status="refused", reason="it has <hooks> & more", activations=None)
    entries = [entry(0, kind), entry(1, kind), refused | {"saved_bytes_per_token": None}]
    run = {
        "patch": {"config": {}, "entries": entries},
        "config": {"precision": "mxfp8", "activations": "minimal"},
        "environment": {"packages": {"torch": "2.13.0"}, "python": "3.11.7", "threads": 2, "date": "2026-11-21"},
        "model": "tiny",
    } | ({"training": TRAINING | training} if training else {})
    (files / "run.json").write_text(json.dumps(run))
    names = [known["name"] for known in entries[:2]]
    with open(files / "metrics.jsonl", "w", encoding="utf-8") as out:
        for step in range(1, steps + 1):
            record: dict[str, Any] = {"step": step, "epoch": 0.1, "loss": 5.0 / step + shift, "learning_rate": 1e-3}
            record |= {
                "grad_norm": 0.5 / step,
                "tokens_per_second": 321.0,
                "saved_bytes_per_token": 4096.0,
                "peak_memory_bytes": 3 * 2**29,
                "padding_overhead": 0.25,
            }
            load = {"entropy": 0.9, "max_over_mean": 1.5, "dead": 1, "load": [0, 10, 20, 10]}
            record["experts"] = dict.fromkeys(names, load) if kind == "experts" else {}
            if sampled and step % 2 == 0:
                record["health"] = {names[0]: health(27.5), names[1]: health(None)}
            out.write(json.dumps(record) + "\n")
        out.write(f'{{"step": {steps + 1}, "lo')  # the run was killed here
    if evaluated:
        at = range(evaluated, steps + 1, evaluated)
        measured = [{"step": step, "eval_loss": 6.0 / step + shift, "eval_aux_loss": 2.0} for step in at]
        (files / "evaluations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in measured))


def write_guard(folder: Path, steps: int, *, alarm_in: int = 0) -> None:
    """The guard's file of a run; in one step an expert's result is wrong."""
    lines = []
    for step in range(1, steps + 1):
        operand = {"nonfinite": 0.0, "amax": 4.0, "rms": 1.0, "sqnr_db": 31.0 + step / 10, "flushed": 0.0}
        blocks = {
            f"model.layers.{layer}.mlp": {
                "gate_up": {"activations": operand, "weights": operand | {"sqnr_db": None, "amax": None}},
                "down": {"y": {"rounding": 1.0, "worst": 0.002 * (step == alarm_in and layer == 1) + 0.001}},
            }
            for layer in range(2)
        }
        alarm = {"step": step, "block": "model.layers.1.mlp", "product": "down", "operand": "result", "figure": "worst"}
        alarm |= {"expert": 3, "value": 0.3, "low": None, "high": 0.08, "result": "y", "process": 0}
        lines.append(json.dumps({"step": step, "blocks": blocks, "alarms": [alarm] if step == alarm_in else []}) + "\n")
    (folder / "neuron_moe" / "guard.jsonl").write_text("".join(lines))


def write_study(folder: Path) -> None:
    folder.mkdir(parents=True)
    steps = range(1, 121)
    curves = {
        variant: {str(seed): [3 + 2 / step + 0.01 * seed + gap for step in steps] for seed in range(3)}
        for variant, gap in (("bf16", 0.0), ("mxfp8", 0.003))
    }
    curves["fp32, minimal"] = {"0": [3.0] * 64}
    compared = {"reference": "bf16", "difference_percent": 0.0987, "goal_percent": 0.25, "met": True}
    summary = {
        "variants": {
            "bf16": {"last_mean": 3.04, "seed_spread_percent": 0.3},
            "mxfp8": {"last_mean": 3.043, "seed_spread_percent": 0.3, **compared},
        },
        "fp32": {"steps": 64, "largest_difference": 0.0, "goal": 1e-6, "met": True},
    }
    content = {"models": {"smol": curves}, "summary": {"smol": summary}, "environment": {"date": "today"}}
    content["saved_bytes_per_token"] = {"smol": {"bf16": 9000.0, "mxfp8": 9000.0}}
    (folder / "parity.json").write_text(json.dumps(content))

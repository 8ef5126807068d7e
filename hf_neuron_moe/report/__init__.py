"""One self-contained page about training runs, made from the files that they leave. Loads no torch."""

from __future__ import annotations

from hf_neuron_moe.report.run_data import Contents, RunData, StudyData, read_runs
from hf_neuron_moe.report.run_page import render, write_report

__all__ = ["Contents", "RunData", "StudyData", "read_runs", "render", "write_report"]

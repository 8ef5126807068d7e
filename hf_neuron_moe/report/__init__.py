"""One self-contained HTML page about training runs, made from the files that they leave. Loads no torch."""

from __future__ import annotations

from hf_neuron_moe.report.page import render, write_report
from hf_neuron_moe.report.run_data import Contents, RunData, StudyData, read_runs

__all__ = ["Contents", "RunData", "StudyData", "read_runs", "render", "write_report"]

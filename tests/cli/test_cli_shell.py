"""What a shell expects of a command: quick help, completion, pipes, colours, and any home, locale and width."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys

import pytest
from rich.console import Console

from hf_neuron_moe.cli.estimate import policies_table
from hf_neuron_moe.training.memory_estimate import PolicyEstimate

PROGRAM = [sys.executable, "-m", "hf_neuron_moe"]


def called(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )


def test_help_is_there_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = called("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (shown.returncode, shown.stderr) == (0, "") and "--install-completion" in shown.stdout
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 0.4, "of the processor: other processes on the machine do not count"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_options_are_completed(shell, monkeypatch, run):
    words = ["hf-neuron-moe", "esti"] if shell == "bash" else ["hf-neuron-moe", "estimate", "--tok"]
    monkeypatch.setenv("_HF_NEURON_MOE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(words))
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    result = run()
    assert result.code == 0 and ("estimate" if shell == "bash" else "--tokens") in result.out


def test_values_of_options_are_completed(monkeypatch, run):
    monkeypatch.setenv("_HF_NEURON_MOE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "hf-neuron-moe estimate model --device tr")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert run().out.split() == ["trn2", "trn3"]


@pytest.mark.parametrize("columns", [50, 60, 80])
def test_the_estimate_keeps_its_columns_in_a_narrow_terminal(columns):
    table = console_lines(columns)
    assert max(map(len, table)) <= columns
    words = " ".join(table)
    assert all(name in words for name in ("minimal", "12.0 MiB", "KiB", "total"))


def console_lines(columns):
    """The table of the estimate as a terminal of that width shows it."""
    policy = PolicyEstimate("minimal", 12 * 2**20, 2**20, 2048.0, 13 * 2**20)
    out = io.StringIO()
    Console(file=out, width=columns).print(policies_table([policy], {}))
    return out.getvalue().splitlines()


def test_a_reader_that_goes_away_is_no_error():
    for pipe in ("true", "head -c 1"):
        command = f"{' '.join(PROGRAM)} --help | {pipe}"
        result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=300)
        assert (result.returncode, result.stderr) == (0, "")


def test_colours_are_forced_and_forbidden(model_dir, run, monkeypatch):
    arguments = ("estimate", model_dir, "--tokens", 64)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in run(*arguments).out, "into a file or a pipe"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run(*arguments).out
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in run(*arguments).out


@pytest.mark.slow
def test_a_home_that_cannot_be_written_to_ascii_and_thirty_columns(model_dir):
    result = called(
        *("estimate", model_dir, "--tokens", 64),
        HOME="/proc",
        XDG_CACHE_HOME="/proc",
        HF_HOME="/proc/huggingface",
        LC_ALL="C",
        PYTHONCOERCECLOCALE="0",
        PYTHONUTF8="0",
        COLUMNS="30",
    )
    assert (result.returncode, result.stderr) == (0, "") and "mxfp8" not in result.stdout
    assert result.stdout.isascii() and "minimal" in result.stdout

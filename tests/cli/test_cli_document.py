"""docs/convert.md: its worked example runs as it stands, and its tables are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hf_neuron_moe.convert.audit.compare import BF16_FLOOR_DB, MX_FLOORS_DB


@pytest.fixture(scope="module")
def document(repo_root) -> str:
    """The text of docs/convert.md."""
    return (repo_root / "docs" / "convert.md").read_text(encoding="utf-8")


def test_the_worked_example_runs(document, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = document.partition("## A worked example")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", example, re.DOTALL)
    exec(program, {})
    lines = [line for block in re.findall(r"```bash\n(.*?)```", example, re.DOTALL) for line in block.splitlines()]
    reported = {}
    for line in lines:
        words = shlex.split(line, comments=True)
        expected = int(re.findall(r"# exit code (\d)", line)[0]) if "# exit code" in line else 0
        if words[0] == "cmp":
            assert Path(words[1]).read_bytes() == Path(words[2]).read_bytes()
            continue
        assert words[0] == "hf-neuron-moe"
        result = run(*words[1:])
        assert result.code == expected, (line, result)
        reported[line] = result.out
    dry = next(out for line, out in reported.items() if "--dry-run" in line)
    # What the example prints is what the document shows, but for times, memory and what transformers' version decides.
    shown = re.findall(r"```text\n(.*?)```", example, re.DOTALL)
    steady = [line for line in shown[0].splitlines() if re.search(r"weights to convert|neuron-|nothing", line)]
    assert len(steady) == 3 and set(steady) <= set(dry.splitlines())
    assert next(out for line, out in reported.items() if "verify mx" in line) == shown[1]
    inspected = next(out for line, out in reported.items() if "inspect" in line)
    assert set(shown[2].splitlines()) <= set(inspected.splitlines())
    assert json.loads(reported["hf-neuron-moe verify parts --json"])["ok"] is True


def test_the_floors_are_those_of_the_code(document):
    reported = {
        rule.strip(): float(number)
        for line in document.splitlines()
        if line.startswith("| MXFP8")
        for rules, number in re.findall(r"([a-z, ]+) ([\d.]+)", line.split("|")[2])
        for rule in rules.split(",")
    }
    assert reported == MX_FLOORS_DB["mxfp8"]
    assert f"| {BF16_FLOOR_DB:.0f} |" in document
    for rule, floor in MX_FLOORS_DB["mxfp4"].items():
        assert re.search(rf"{rule}[a-z, ]* {floor}\b", document)


def test_every_option_is_documented(document, run):
    table = document.partition("## Options")[2].partition("\n## ")[0]
    offered = set(re.findall(r"--[a-z-]+", run("convert", "--help").out)) - {"--help"}
    assert offered <= set(re.findall(r"--[a-z-]+", table))

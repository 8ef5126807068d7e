"""The progress line of a terminal, the memory it shows, and its absence elsewhere."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_neuron_moe.cli.progress_line import Watch, _logged, duration, in_words, watching


class Terminal(io.StringIO):
    """A standard error that somebody watches."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_bytes_rate_time_left_and_memory(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with watching("converting") as (watch, progress):
        for step in range(1, 5):
            time.sleep(0.15)
            progress(step * 10**6, 10**7)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert re.search(r"converting .*4\.0/10\.0 MB .*\d [kM]B/s .*0:\d\d:\d\d.* peak \d+\.\d [MG]B", shown), shown
    assert watch.done == 4 * 10**6 and watch.seconds >= 0.6


@pytest.mark.parametrize(("columns", "bar"), [(50, False), (79, False), (80, True)])
def test_a_narrow_terminal_has_no_bar_and_one_line(columns, bar, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with watching("converting") as (_, progress):
        progress(36_300_000, 425_100_000)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert all("converting" in line and len(line) <= columns for line in lines), shown
    assert bar or any("36.3/425.1 MB" in line for line in lines)
    assert bar == any("peak" in line for line in lines)


def test_nothing_is_drawn_where_nobody_watches(capsys):
    with watching("converting") as (watch, progress):
        progress(5, 10)
    assert capsys.readouterr() == ("", "")
    assert watch.done == 5


def test_a_log_says_what_is_left(monkeypatch, capsys):
    monkeypatch.setattr("hf_neuron_moe.cli.progress_line.LOG_SECONDS", 0.0)
    with watching("training", unit="steps") as (_, progress):
        progress(1, 10)
        time.sleep(0.1)
        progress(2, 10)
        progress(3, 100_000)
    begun, soon, long = capsys.readouterr().err.splitlines()
    assert begun.startswith("training: 1 of 10 steps (10 %)")
    assert "(20 %), less than a minute left, peak" in soon
    assert re.search(r", about \d\d+ min left, peak", long)


def test_a_log_has_a_line_a_minute_with_the_time_left_at_this_runs_speed(monkeypatch, capsys):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("hf_neuron_moe.cli.progress_line.time", SimpleNamespace(monotonic=lambda: clock.now))
    update = _logged("training", Watch("steps", start=0.0), "steps")
    for clock.now, done in ((1.0, 10), (59.9, 39), (60.0, 40), (119.9, 60), (120.0, 70)):
        update(done, 100)
    first, second = capsys.readouterr().err.splitlines()
    assert "40 of 100 steps (40 %), about 2 min left" in first  # 60 steps at 30 in 59 s
    assert "70 of 100 steps (70 %), about 1 min left" in second  # 30 steps at 60 in 119 s


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_peak_between_two_steps_is_seen():
    with watching("converting", quiet=True) as (watch, _):
        time.sleep(0.1)
        before = watch.peak
        block = bytearray(b"x" * 60_000_000)
        deadline = time.monotonic() + 60  # far more than a look needs, but on a busy machine a thread may have to wait
        while watch.peak < before + 50_000_000 and time.monotonic() < deadline:
            time.sleep(0.02)
        del block
    assert watch.peak >= before + 50_000_000


def test_results_tell_bytes_time_and_memory(model_dir, run, tmp_path):
    text = run("convert", model_dir, tmp_path / "one")
    assert re.search(r"^\d+\.\d kB in \d+\.\d s \(.*B/s\), peak memory \d", text.out, re.MULTILINE), text.out
    reported = json.loads(run("convert", model_dir, tmp_path / "two", "--json").out)
    assert reported["ok"] is True and reported["seconds"] > 0
    assert reported["bytes"] == json.loads(run("inspect", tmp_path / "two", "--json").out)["bytes"]


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1500, "1.5 kB"),
        (2.5e6, "2.5 MB"),
        (7e9, "7.0 GB"),
        (3e12, "3.00 TB"),
    ],
)
def test_sizes_in_words(nbytes, words):
    assert in_words(nbytes) == words


def test_parts_dry_runs_and_resume_through_the_command_line(model_dir, run, tmp_path):
    size = ["--max-shard-size", "20kB"]
    dry = json.loads(run("convert", model_dir, tmp_path / "dst", *size, "--dry-run", "--json").out)
    assert dry["dry_run"] is True and list(tmp_path.iterdir()) == []
    assert run("convert", model_dir, tmp_path / "one", *size, "--workers", "2", "--resume").code == 0
    for part in ("1/3", "3/3"):
        reported = json.loads(run("convert", model_dir, tmp_path / "dst", *size, "--part", part, "--json").out)
        assert (reported["ok"], reported["part"]) == (True, part)
    early = run("finalize", model_dir, tmp_path / "dst")
    assert early.code != 0 and not (tmp_path / "dst").exists()
    assert "finalize" in run("convert", model_dir, tmp_path / "dst", *size, "--part", "2/3").out
    done = run("finalize", model_dir, tmp_path / "dst", "--json")
    assert done.code == 0, done
    written = {path.name: path.read_bytes() for path in (tmp_path / "dst").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert {name: len(content) for name, content in written.items()} == dry["files"]


def test_a_dry_run_says_what_the_disk_cannot_hold(model_dir, run, tmp_path, monkeypatch):
    assert "would fail" not in run("convert", model_dir, tmp_path / "dst", "--dry-run").out
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    dry = run("convert", model_dir, tmp_path / "dst", "--dry-run")
    assert dry.code == 0 and "would fail: the destination's disk has 1,000 free bytes, too few" in dry.out
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    dry = run("convert", model_dir, tmp_path / "dst", "--dry-run")
    assert "would fail: the destination's disk cannot be written to" in dry.out


def test_an_export_that_the_disk_cannot_hold_is_refused_before_it_writes(model_dir, run, tmp_path, monkeypatch):
    assert run("convert", model_dir, tmp_path / "made").code == 0
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    result = run("export", tmp_path / "made", tmp_path / "back")
    assert result.code == 5 and "got one with 1,000" in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


def test_a_number_that_is_none_is_named_in_words(model_dir, run):
    result = run("estimate", model_dir, "--tokens", "8k")
    assert result.code == 2 and "'--tokens': must be a valid integer" in result.err and "parse" not in result.err


def test_a_second_resume_says_that_nothing_was_left(model_dir, run, tmp_path):
    first, again = (run("convert", model_dir, tmp_path / "dst", "--resume") for _ in range(2))
    assert (first.code, again.code) == (0, 0)
    assert "nothing was left to convert" in again.out and "nothing was left" not in first.out


def test_a_stopped_conversion_says_how_to_continue(model_dir, run, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_neuron_moe.convert.convert_checkpoint", stop)
    for more in (["--resume"], ["--part", "1/2"]):
        stopped = run("convert", model_dir, tmp_path / "dst", *more)
        assert stopped.code == 130 and f"{tmp_path / 'dst'}.partial has what is finished" in stopped.err
    assert "partial" not in run("convert", model_dir, tmp_path / "dst").err


def test_times_in_words():
    assert [duration(seconds) for seconds in (0.4, 89, 91, 3600)] == ["0 s", "89 s", "2 min", "60 min"]

"""Break the package in one place at a time, and see whether the tests notice.

    python scripts/mutants.py                      # every entry of tests/mutants.toml
    python scripts/mutants.py --package formats    # those of one package (repeatable)
    python scripts/mutants.py --only NAME          # single ones (repeatable)
    python scripts/mutants.py --list

Runs in copies of the working tree in a temporary folder, with one process per core (--jobs). Before a change, its
tests must pass; with it, one of them must fail. Exit status: 0 if all did so, except entries marked `equivalent`; 1
if an unmarked change survived or a marked one did not; 2 if an entry does not apply or its tests do not run.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = "tests/mutants.toml"
SOURCE = "hf_neuron_moe"
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "demo_output", "build", "dist", "shared")
KILLED, SURVIVED, TIMED_OUT, BROKEN = "killed", "survived", "timed out", "broken"
_OUTCOMES = {0: SURVIVED, 1: KILLED}  # of pytest's exit codes; the others mean that no test was run to its end


@dataclass(frozen=True)
class Mutant:
    """A change of one line, and the tests that must see it.

    Attributes:
        name: unique, for --only.
        file: path below the package.
        before: text of the line or a part of it, which the file holds once.
        after: what stands there instead.
        tests: pytest arguments: files or node ids, of which at least one must fail.
        equivalent: why nothing can see it; empty where something must.
        slow: whether those of the tests run too that are marked slow.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    equivalent: str = ""
    slow: bool = False

    @property
    def package(self) -> str:
        """The package or module directly below hf_neuron_moe; the backends one by one."""
        parts = Path(self.file).with_suffix("").parts
        return "/".join(parts[:2]) if parts[0] == "backends" and len(parts) > 2 else parts[0]


def load(path: Path) -> list[Mutant]:
    """Read the list of changes."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def problems(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Say which entries do not fit the working tree."""
    found = [f"{name}: {count} entries" for name, count in Counter(each.name for each in mutants).items() if count > 1]
    for each in mutants:
        path = root / SOURCE / each.file
        count = path.read_text(encoding="utf-8").count(each.before) if path.is_file() else 0
        if count != 1:
            found.append(f"{each.name}: {each.file} holds the text {count} times, not once: {each.before!r}")
        if each.before == each.after:
            found.append(f"{each.name}: changes nothing")
        missing = [test for test in each.tests if not (root / test.split("::")[0]).exists()]
        if missing or not each.tests:
            found.append(f"{each.name}: no such tests: {', '.join(missing) or 'none is named'}")
    return found


def run_tests(root: Path, tests: Sequence[str], limit: float, slow: bool = False) -> tuple[str, str]:
    """Run tests of a copy; return the outcome and the end of what pytest printed."""
    settings = {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",  # a change within a second of the last one must not meet its bytecode
        "PROPERTY_EXAMPLES": "fixed",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        *(() if slow else ("-m", "not slow")),
        "-p",
        "no:cacheprovider",
        "--tb=line",
        *tests,
    ]
    try:
        result = subprocess.run(
            command, cwd=root, env={**os.environ, **settings}, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"more than {limit:.0f} s"
    lines = (result.stdout + result.stderr).strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return _OUTCOMES.get(result.returncode, BROKEN), (failed or lines or [""])[-1]


@contextmanager
def changed(root: Path, mutant: Mutant) -> Iterator[None]:
    """Apply a change for the duration of the block."""
    path = root / SOURCE / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def verdict(mutant: Mutant, outcome: str) -> str:
    """What an outcome means for an entry: ``"ok"``, or what is wrong with it."""
    if outcome == BROKEN:
        return "TESTS DO NOT RUN"
    if outcome == SURVIVED:
        return "ok" if mutant.equivalent else "SURVIVED"
    return "NOT EQUIVALENT" if mutant.equivalent else "ok"


def run(mutants: Sequence[Mutant], source: Path, jobs: int, limit: float) -> list[str]:
    """Try all changes, and print a line for each.

    Returns:
        The verdicts.
    """
    free: queue.Queue[Path] = queue.Queue()

    def attempt(mutant: Mutant) -> str:
        copy, start = free.get(), time.monotonic()
        try:
            with changed(copy, mutant):
                outcome, line = run_tests(copy, mutant.tests, limit, mutant.slow)
        finally:
            free.put(copy)
        answer = verdict(mutant, outcome)
        why = mutant.equivalent or line.removeprefix("FAILED ").split(" - ")[0]
        print(f"{answer:<8} {outcome:<9} {time.monotonic() - start:4.0f} s  {mutant.name:<44} {why}", flush=True)
        return answer

    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        for number in range(jobs):
            copy = Path(place) / str(number)
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
            free.put(copy)
        for slow in sorted({each.slow for each in mutants}):
            tests = sorted({test for each in mutants for test in each.tests if each.slow is slow})
            outcome, line = run_tests(Path(place) / "0", tests, limit * 10, slow)
            if outcome != SURVIVED:
                print(f"without any change the tests do not pass ({outcome}): {line}")
                return ["TESTS DO NOT RUN"]
            print(f"unchanged: {line}", flush=True)
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(attempt, mutants))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="this change (repeatable)")
    parser.add_argument("--package", action="append", metavar="NAME", help="changes of this package (repeatable)")
    parser.add_argument("--list", action="store_true", help="show the changes and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="per change (default: 300)")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    everything = load(options.root / LIST)
    unknown = set(options.only or ()) - {each.name for each in everything}
    unknown |= set(options.package or ()) - {each.package for each in everything}
    if unknown:
        parser.error(f"not in {LIST}: {', '.join(sorted(unknown))}; --list shows all names")
    mutants = [
        each
        for each in everything
        if (not options.only or each.name in options.only) and (not options.package or each.package in options.package)
    ]
    if wrong := problems(mutants, options.root):
        print("\n".join(wrong))
        return 2
    if options.list:
        for each in mutants:
            print(f"{each.package:<16} {each.name:<44} {each.before.strip()}  ->  {each.after.strip()}")
        return 0
    answers = Counter(run(mutants, options.root, max(1, options.jobs), options.limit))
    print(", ".join(f"{count} {answer}" for answer, count in sorted(answers.items())))
    return 2 if answers["TESTS DO NOT RUN"] else int(answers.total() > answers["ok"])


if __name__ == "__main__":
    sys.exit(main())

"""The list of changes that tests must notice, and the script that tries them."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest

PACKAGES = {
    "formats",
    "backends/torch",
    "backends/neuron",
    "reference",
    "modules",
    "patching",
    "training",
    "convert",
    "quantizers",
    "device",
    "report",
    "explore",
    "cli",
}


def test_every_change_of_the_list_applies(repo_root: Path) -> None:
    entries = mutants.load(repo_root / mutants.LIST)
    assert mutants.problems(entries, repo_root) == []
    assert len(entries) >= 60
    assert {entry.package for entry in entries} >= PACKAGES
    assert all("\n" not in entry.before.strip() for entry in entries), "one line each"


FUNCTION = "def larger(a, b):\n    return a if a >= b else b\n\n\ndef twice(a):\n    return 2 * a\n"
TESTS = "from hf_neuron_moe.parts import larger\n\n\ndef test_larger():\n    assert larger(1, 2) == larger(2, 1) == 2\n"
SWAPPED = ("swapped", ">=", "<", "")
EQUAL = ("equal", ">=", ">", "a and b are the same then")
UNSEEN = ("unseen", "2 * a", "3 * a", "")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with two functions, one of them tested."""
    for folder, files in {
        "hf_neuron_moe": {"__init__.py": "", "parts.py": FUNCTION},
        "tests": {"test_parts.py": TESTS},
    }.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    return tmp_path


def write_list(project: Path, *entries: tuple[str, str, str, str], tests: str = "tests/test_parts.py") -> None:
    (project / mutants.LIST).write_text(
        "".join(
            f"[[mutant]]\nname = '{name}'\nfile = 'parts.py'\nbefore = '{before}'\nafter = '{after}'\n"
            f"tests = ['{tests}']\nequivalent = '{equivalent}'\n"
            for name, before, after, equivalent in entries
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entries", "status", "shown"),
    [
        ([SWAPPED, EQUAL], 0, "2 ok"),
        ([SWAPPED, UNSEEN], 1, "1 SURVIVED, 1 ok"),
        ([(*SWAPPED[:3], "wrongly so")], 1, "1 NOT EQUIVALENT"),
        ([("no python", "return 2", "retur 2", "")], 2, "1 TESTS DO NOT RUN"),
    ],
    ids=["all seen", "survivor", "marked wrongly", "breaks the file"],
)
def test_the_exit_status_says_whether_tests_noticed(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    entries: list[tuple[str, str, str, str]],
    status: int,
    shown: str,
) -> None:
    write_list(project, *entries)
    assert mutants.main(["--root", str(project), "--jobs", "1"]) == status
    assert capsys.readouterr().out.splitlines()[-1] == shown
    assert (project / "hf_neuron_moe" / "parts.py").read_text() == FUNCTION


@pytest.mark.slow
def test_tests_that_fail_anyway_show_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_list(project, SWAPPED)
    (project / "tests" / "test_parts.py").write_text(TESTS.replace("== 2\n", "== 3\n"))
    assert mutants.main(["--root", str(project), "--jobs", "1"]) == 2
    assert "without any change the tests do not pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entries", "tests", "shown"),
    [
        ([("gone", "a <= b", "a < b", "")], "tests/test_parts.py", "0 times"),
        ([("twice", "return", "yield", "")], "tests/test_parts.py", "2 times"),
        ([("same", ">=", ">=", "")], "tests/test_parts.py", "changes nothing"),
        ([SWAPPED, SWAPPED], "tests/test_parts.py", "2 entries"),
        ([SWAPPED], "tests/test_gone.py::test_larger", "no such tests: tests/test_gone.py::test_larger"),
    ],
    ids=["absent text", "text found twice", "no change", "one name twice", "absent test"],
)
def test_entries_that_do_not_fit_the_tree(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    entries: list[tuple[str, str, str, str]],
    tests: str,
    shown: str,
) -> None:
    write_list(project, *entries, tests=tests)
    assert mutants.main(["--root", str(project)]) == 2
    assert shown in capsys.readouterr().out


def test_names_choose_and_unknown_ones_are_errors(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_list(project, SWAPPED, UNSEEN)
    assert mutants.main(["--root", str(project), "--list", "--only", "unseen"]) == 0
    assert "swapped" not in capsys.readouterr().out
    assert mutants.main(["--root", str(project), "--list", "--package", "parts"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    for option in ("--only", "--package"):
        with pytest.raises(SystemExit) as caught:
            mutants.main(["--root", str(project), option, "nobody"])
        assert caught.value.code == 2
        assert "not in tests/mutants.toml: nobody" in capsys.readouterr().err

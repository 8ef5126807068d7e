"""What scripts/code_figures.py counts, each on a few lines."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import code_figures

CHECKS = [
    'def rules(given) -> Iterator[Rule]:\n    fits = given > 2\n    yield Rule(fits, "x", "above 2", given, "")',
    'def rules(given):\n    fits = given > 2\n    yield Rule(fits, "x", "above 2", given, "")',
    'def rules(given) -> list[Rule]:\n    fits = given > 2\n    return [Rule(fits, "x", "above 2", given, "")]',
    'def bad(given) -> ConfigError:\n    text = str(given)\n    return ConfigError.about("x", "above 2", text, "")',
    'raise ConfigError.about("x", "above 2", 1, "").named("f")',
    'error = ConfigError.about("x", "above 2", 1, "").named("f")',
    'if x < 2:\n    raise ValueError\nelse:\n    check_flags({"y": y})',
    "check_rules(rules(1))",
    "def unsupported_reason(block):\n    return 'no' if block else None",
]
WORK = [
    "def total(values) -> int:\n    return sum(values)",
    "if x < 2:\n    raise ValueError\nelse:\n    y = total(x)",
    'table = {"x": ConfigError}',
    "yield total(x)",
]


@pytest.mark.parametrize("source", CHECKS)
def test_checks_are_counted_whole(source: str) -> None:
    assert code_figures.validation_of(ast.parse(source)) == set(range(1, source.count("\n") + 2))


@pytest.mark.parametrize("source", WORK)
def test_work_is_not_a_check(source: str) -> None:
    assert code_figures.validation_of(ast.parse(source)) <= {2}


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("if TYPE_CHECKING:\n    from hf_neuron_moe.cli import main", False),
        ("if typing.TYPE_CHECKING:\n    from hf_neuron_moe.cli import main", False),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from hf_neuron_moe.cli import main", True),
        ("if not TYPE_CHECKING:\n    from hf_neuron_moe.cli import main", True),
        ("if not TYPE_CHECKING:\n    pass\nelse:\n    from hf_neuron_moe.cli import main", False),
        ("if TYPE_CHECKING or windows:\n    from hf_neuron_moe.cli import main", True),
    ],
)
def test_imports_that_run_are_seen(source: str, seen: bool) -> None:
    files = {("cli", "main"), ("formats", "mx")}
    found = set(code_figures.imports_of(ast.parse(source), ("formats", "mx"), files))
    assert found == ({("cli", "main")} if seen else set())


def test_a_name_of_a_documented_kernel_is_one_in_its_own_file_only(tmp_path: Path, repo_root: Path) -> None:
    names = code_figures.documented_names(repo_root)
    assert (("reference", "mlp_mxfp8", "forward"), "mlp_forward_mxfp8") in names
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text("# Architecture\n", encoding="utf-8")
    package, long = tmp_path / "hf_neuron_moe", "def kernel(a, b, c, d, e, f, g, h):\n    return a\n"
    for name, text in {
        "kernels/__init__.py": "from hf_neuron_moe.reference.own import kernel as kernel\n",
        "reference/specification/own.toml": '[[function]]\nname = "kernel"\n',
        "reference/own.py": long + "class Other:\n" + "".join(f"    {line}\n" for line in long.splitlines()),
        "reference/other.py": long,
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    found = code_figures.measure(tmp_path).many_parameters
    assert found == ["reference/other.py: kernel (8)", "reference/own.py: Other.kernel (8)"]


def test_what_is_not_counted_is_said() -> None:
    for word in (".json, .pyi and .css", "by a string", "``cli/``", "behind one call"):
        assert word in str(code_figures.__doc__), word

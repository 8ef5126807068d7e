"""Messages of errors in one file, so that a change of their words is seen as one.

Those of kernels and of the tests listed here as users get them, all others as they stand in the package's source.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import test_config
from tests.convert import test_targets_options
from tests.formats import (
    test_group_fp8,
    test_layouts,
    test_moe_mx,
    test_mx_interface,
    test_mx_natural,
    test_scale_layouts,
    test_swizzle,
)
from tests.kernels import (
    test_blockwise_errors,
    test_errors,
    test_mlp_errors,
    test_mlp_errors_2_30,
    test_mlp_step_errors,
    test_moe_cte_errors,
)
from tests.patching import test_policies
from tests.refusals import RAISED, numbered

SUITES = (
    test_blockwise_errors,
    test_mlp_errors,
    test_mlp_errors_2_30,
    test_mlp_step_errors,
    test_moe_cte_errors,
    test_errors,
)

TESTS: tuple[Callable[..., None], ...] = (
    test_group_fp8.test_refusals,
    test_layouts.test_refusals,
    test_moe_mx.test_refusals,
    test_mx_interface.test_dequantize_and_fake_quantize_refuse,
    test_mx_interface.test_quantize_refuses,
    test_mx_natural.test_what_does_not_fit_is_refused,
    test_scale_layouts.test_refusals,
    test_swizzle.test_refusals,
    test_config.test_refused,
    test_policies.test_refused_forms,
    test_targets_options.test_senseless_combinations_are_refused,
    test_targets_options.test_unknown_values_are_refused_with_the_nearest_known_one,
)
"""Tests without fixtures, whose messages are the same on every machine."""


def messages_of(test: Callable[..., None]) -> dict[str, str]:
    """Run a test with all its parameters and return the messages of the errors that it expected."""
    marks: list[Any] = getattr(test, "pytestmark", [])
    calls = [dict(zip(mark.args[0], values, strict=True)) for mark in marks for values in mark.args[1]] or [{}]
    RAISED.clear()
    for arguments in calls:
        test(**arguments)
    names = numbered(f"{error.where}-{error.argument}" for error in RAISED)
    return dict(zip(names, map(str, RAISED), strict=True))


def template(node: ast.AST) -> str | None:
    """Return a text of the source, with dots for what it inserts; None for what is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def texts_in(node: ast.AST) -> set[str]:
    """Return the texts of more than one word in an expression."""
    text = template(node)
    if text is not None:
        return {text} if " " in text.strip() else set()
    return set().union(*map(texts_in, ast.iter_child_nodes(node)))


def source_texts(package: Path) -> dict[str, list[str]]:
    """Return by file what its errors and reasons say: in what is raised or yielded, and in calls that make errors."""
    trees = {path.relative_to(package).as_posix(): ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    makers = {"about"} | {
        node.name
        for node in (each for found in nodes.values() for each in found)
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns).endswith("Error")
    }

    def said(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "reason"):
            return texts_in(node)
        if isinstance(node, ast.Yield) and node.value is not None and template(node.value) is not None:
            return texts_in(node.value)
        function = node.func if isinstance(node, ast.Call) else None
        name = getattr(function, "attr", getattr(function, "id", None))
        return texts_in(node) if name in makers else set()

    found = {path: sorted(set().union(*map(said, each))) for path, each in sorted(nodes.items())}
    return {path: texts for path, texts in found.items() if texts}


def test_texts_of_the_source_are_found(tmp_path: Path) -> None:
    code = """
def bad(got) -> ConfigError:
    return ConfigError.about("x", "an even number", got, "Add one.")

def reasons(m):
    yield f"{m} has no rows"
    mistakes.append(bad("an odd one"))
    print("not this one")
"""
    (tmp_path / "code.py").write_text(code, encoding="utf-8")
    assert source_texts(tmp_path) == {"code.py": ["Add one.", "an even number", "an odd one", "{...} has no rows"]}


def test_messages_are_those_of_the_snapshot(repo_root: Path, request: pytest.FixtureRequest) -> None:
    path = repo_root / "tests" / "messages.json"
    found: dict[str, dict[str, Any]] = {
        suite.__name__.rpartition(".")[2]: {parameter.id: parameter.values[0].check() for parameter in suite.CALLS}
        for suite in SUITES
    }
    found |= {f"{test.__module__.rpartition('.')[2]}.{test.__name__}": messages_of(test) for test in TESTS}
    found["source"] = source_texts(repo_root / "hf_neuron_moe")
    if request.config.getoption("--update-messages"):
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    known = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{name}:\n  was {known.get(suite, {}).get(name)}\n  is  {messages.get(name)}"
        for suite, messages in found.items()
        for name in sorted(messages.keys() | known.get(suite, {}).keys())
        if messages.get(name) != known.get(suite, {}).get(name)
    ]
    assert not changed, "\n".join(["other messages; if they are better, pass --update-messages:", *changed])
    assert sum(map(len, found.values())) > 400

"""docs/kernels.md says what the signatures say, and the generator notices when it would not."""

from __future__ import annotations

import copy
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from make_kernel_docs import DocumentationError, load, render

from hf_neuron_moe import kernels
from hf_neuron_moe.reference.specification import FAMILIES, constraints


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    return load()


def test_the_page_is_up_to_date(declared: dict[str, Any], repo_root: Path) -> None:
    page = (repo_root / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert page == render(declared), "run python scripts/make_kernel_docs.py"


def test_every_argument_of_every_function_has_a_row(repo_root: Path) -> None:
    """Read the page itself, without the generator's code."""
    page = (repo_root / "docs" / "kernels.md").read_text(encoding="utf-8")
    sections = {part.split("`", 1)[0]: part for part in page.split("\n### `")[1:]}
    functions = [name for name in kernels.__all__ if not inspect.isclass(getattr(kernels, name))]
    assert sorted(sections) == sorted(functions)
    for name in functions:
        rows = [line.split("`")[1] for line in sections[name].split("\n## ")[0].splitlines() if line.startswith("| `")]
        parameters = inspect.signature(getattr(kernels, name)).parameters.values()
        starred = {each.name: f"**{each.name}" for each in parameters if each.kind is each.VAR_KEYWORD}
        assert rows == [starred.get(each.name, each.name) for each in parameters], name
        assert ("| argument |" in sections[name]) == bool(rows)  # no table without a row


def test_every_system_is_there(declared: dict[str, Any]) -> None:
    first = [system["function"][0]["name"] for system in declared["system"]]
    assert first == [
        "mlp_forward_mxfp8", "mlp_backward_mxfp8", "quantize_block_mxfp8_kernel", "moe_cte", "blockwise_mm_bwd",
        "fp8_mul_backward", "router_topk",
    ]  # fmt: skip


PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(code: str) -> None:
    """Each by itself, as a reader would paste it; their own assertions are the test."""
    torch.manual_seed(0)
    assert "assert " in code
    exec(compile(code, "docs/kernels.md", "exec"), {})


def test_every_system_has_an_example(declared: dict[str, Any]) -> None:
    assert ["```python" in system["intro"] for system in declared["system"]] == [True] * 7


def test_every_limit_is_on_the_page_in_its_column(repo_root: Path) -> None:
    """Read the page itself: the figures of a row stand in the cell of the row's column."""
    page = (repo_root / "docs" / "kernels.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| size, dtype or option .*\n\| --- .*\n((?:\|.*\n)+)", page, re.MULTILINE)
    with_limits = [name for name in FAMILIES if constraints(name)]
    assert len(tables) == len(with_limits) == 5
    for name, table in zip(with_limits, tables, strict=True):
        cells = {line.split("`")[1]: line.split(" | ") for line in table.splitlines()}
        for row in constraints(name):
            cell = cells[row.of][1 if row.column == "documented" else 2]
            figures = [row.maximum, *row.one_of, *row.dtypes, *row.implementations, *row.releases]
            figures += [row.multiple_of] if row.multiple_of > 1 else []
            assert all(str(figure) in cell for figure in figures if figure is not None), (name, row)


def test_a_function_without_a_result_is_noticed(declared: dict[str, Any]) -> None:
    other = copy.deepcopy(declared)
    del other["system"][0]["function"][0]["returns"]
    with pytest.raises(DocumentationError, match="mlp_forward_mxfp8: what it returns is not described"):
        render(other)


def changed(declared: dict[str, Any], function: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of the declarations, and the arguments of one function in it."""
    other = copy.deepcopy(declared)
    for system in other["system"]:
        for entry in system["function"]:
            if entry["name"] == function:
                return other, entry.setdefault("arguments", {})
    raise AssertionError(function)


def test_a_missing_argument_is_noticed(declared: dict[str, Any]) -> None:
    other, arguments = changed(declared, "router_topk")
    del arguments["norm_topk_prob"]
    with pytest.raises(DocumentationError, match="router_topk: argument norm_topk_prob is not described"):
        render(other)


def test_an_argument_that_does_not_exist_is_noticed(declared: dict[str, Any]) -> None:
    other, arguments = changed(declared, "router_topk")
    arguments["top_p"] = {"support": "yes", "note": "no such thing"}
    with pytest.raises(DocumentationError, match="router_topk: no such argument"):
        render(other)
    other = copy.deepcopy(declared)
    other["system"][0].setdefault("arguments", {})["nothing"] = {"support": "yes", "note": "no such thing"}
    with pytest.raises(DocumentationError, match="no function has the arguments"):
        render(other)


@pytest.mark.parametrize(
    "entry", [{"support": "maybe", "note": "who knows"}, {"support": "yes"}, {"support": "yes", "note": "", "shap": ""}]
)
def test_an_entry_has_a_known_support_known_keys_and_words(declared: dict[str, Any], entry: dict[str, str]) -> None:
    other, arguments = changed(declared, "router_topk")
    arguments["k"] = entry
    with pytest.raises(DocumentationError, match="router_topk: k is"):
        render(other)


def test_a_new_function_and_a_new_type_are_noticed(declared: dict[str, Any]) -> None:
    values = {name: getattr(kernels, name) for name in kernels.__all__}
    more = types.SimpleNamespace(**values, new=len, __all__=[*kernels.__all__, "new"])
    with pytest.raises(DocumentationError, match=r"functions: not described \['new'\]"):
        render(declared, more)
    more = types.SimpleNamespace(**values, New=int, __all__=[*kernels.__all__, "New"])
    with pytest.raises(DocumentationError, match=r"types: not described \['New'\]"):
        render(declared, more)

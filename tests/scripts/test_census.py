"""The census of transformers' classes: what it reads from sources, what it compares, and the page that it writes."""

from __future__ import annotations

import ast
import os
import re
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import census
import census_judge
import pytest
import torch
import transformers
from census import Row
from census_classes import (
    DENSE,
    EXPERTS,
    OTHER_DENSE,
    OTHER_EXPERTS,
    UNGATED,
    Listed,
    SourceFile,
    kind_of,
    library_classes,
)
from census_judge import DIED, DIFFERENT, IN_PART, NO_GATE, NOT_BUILT, PATCHED, REFUSED, judge
from torch import nn

PAGE = census.PAGE.read_text(encoding="utf-8")
RELEASE = next(iter(re.findall(r"^transformers ([^,]+),", PAGE, re.MULTILINE)), "no release yet")
same_release = pytest.mark.skipif(transformers.__version__ != RELEASE, reason=f"the page is of transformers {RELEASE}")

PARTS = ("self.gate_proj = nn.Linear(2, 3)", "self.up_proj = nn.Linear(2, 3)", "self.down_proj = nn.Linear(3, 2)")
HALVES = ("self.fc1 = nn.Linear(2, 6)", "self.fc2 = nn.Linear(3, 2)")
STACKED = (
    "self.w = nn.Parameter(torch.empty(num_experts, 6, 2))",
    "self.v = nn.Parameter(torch.empty(num_experts, 2, 3))",
)


def kind(
    parts: tuple[str, ...], *forward: str, name: str = "SomeMLP", arguments: str = "x", helper: str = "0"
) -> str | None:
    """The kind of a class with these statements; `helper` is what its method ``gate`` returns."""
    methods = {
        "__init__(self)": parts,
        f"forward(self, {arguments})": forward,
        "gate(self, y)": (f"return {helper}",),
    }
    lines = [f"    def {head}:\n" + "".join(f"        {line}\n" for line in body) for head, body in methods.items()]
    node = ast.parse(f"class {name}(nn.Module):\n" + "".join(lines)).body[0]
    assert isinstance(node, ast.ClassDef)
    return kind_of(SourceFile({name: node}), node)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (["return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))"], DENSE),
        (["return self.down_proj(torch.mul(self.gate_proj(x).clamp(max=7.0), self.up_proj(x)))"], DENSE),
        (["g = self.gate_proj(x)", "g *= self.up_proj(x)", "return self.down_proj(g)"], DENSE),
        (["if self.flag:", "    g = self.gate_proj(x) * self.up_proj(x)", "return self.down_proj(g)"], DENSE),
        (["return self.down_proj(self.gate_proj(x) + self.up_proj(x))"], UNGATED),
        (["return self.gate_proj(x) * self.up_proj(x)"], UNGATED),  # no projection of the product
    ],
)
def test_the_kind_of_three_projections(forward: list[str], expected: str) -> None:
    assert kind(PARTS, *forward) == expected


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (["u, g = self.fc1(x).chunk(2, dim=-1)", "return self.fc2(F.silu(g) * u)"], OTHER_DENSE),
        (["z = self.fc1(x).chunk(2, dim=-1)", "return self.fc2(F.silu(z[0]) * z[1])"], OTHER_DENSE),
        (["z = self.fc1(x)", "return self.fc2(z * torch.sigmoid(z))"], UNGATED),  # one branch
        (["return self.fc2(self.scale * F.gelu(self.fc1(x)))"], UNGATED),
    ],
)
def test_the_kind_of_two_projections(forward: list[str], expected: str) -> None:
    assert kind(HALVES, *forward) == expected
    assert kind(HALVES, *forward, name="Other") == (None if expected == UNGATED else expected)


def test_the_kind_of_other_classes() -> None:
    product = "self.gate_proj(y) * self.up_proj(y)"
    assert kind(PARTS, "return self.down_proj(self.gate(x))", helper=product) == DENSE
    assert kind(PARTS, "return self.down_proj(self.gate(x))", helper="self.gate_proj(y)") == UNGATED
    halves = ("g, u = F.linear(x, self.w[0]).chunk(2, -1)", "return F.linear(g * u, self.v[0])")
    assert kind(STACKED, *halves, name="Some") == OTHER_EXPERTS
    mixed = ("return self.fc2(self.fc1(x) * self.fc2(x))",)
    assert kind(HALVES, *mixed, name="Mixer") == OTHER_DENSE
    assert kind(HALVES, *mixed, name="Mixer", arguments="x, past_key_values=None") is None
    assert kind(HALVES, *mixed, name="SomeAttention") is None


def row_of_page(listed: Listed) -> str:
    return next(line for line in PAGE.splitlines() if line.startswith(f"| {listed.family} | `{listed.name}` |"))


SAMPLES = [
    Listed("llama", "LlamaMLP", DENSE),
    Listed("gemma3", "Gemma3MLP", DENSE),
    Listed("qwen2_5_vl", "Qwen2_5_VLMLP", DENSE),
    Listed("moonshine", "MoonshineDecoderMLP", OTHER_DENSE),
    Listed("mixtral", "MixtralExperts", EXPERTS),
    Listed("gpt_oss", "GptOssExperts", EXPERTS),
    Listed("llama4", "Llama4TextExperts", OTHER_EXPERTS),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("listed", SAMPLES, ids=lambda listed: listed.name)
def test_samples_are_patched_and_equal(listed: Listed) -> None:
    row = judge(listed)
    assert row.result == PATCHED, row
    if transformers.__version__ == RELEASE:
        assert row_of_page(listed) in census.tables([row], RELEASE).splitlines()


def test_an_mlp_without_a_gate_is_no_candidate() -> None:
    assert judge(Listed("clip", "CLIPMLP", UNGATED)).result == NO_GATE


@pytest.mark.parametrize("part", ["down_proj.weight", "up_proj.weight"])
def test_a_wrong_result_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_patch = census_judge.patch_model

    def patch_wrongly(model: nn.Module, config: dict[str, Any]) -> None:
        stock_patch(model, config)
        with torch.no_grad():
            model.get_parameter(f"block.{part}")[0, 0] += 1e-3

    monkeypatch.setattr(census_judge, "patch_model", patch_wrongly)
    row = judge(Listed("llama", "LlamaMLP", DENSE))
    assert row.result == DIFFERENT and "in stock layout" in row.reason


def test_a_class_without_a_configuration_is_not_built() -> None:
    row = judge(Listed("no_such_family", "NoMLP", DENSE))
    assert row.result == NOT_BUILT and census.failed([row]) == [row]
    assert census.failed([row._replace(kind=UNGATED), row._replace(result=REFUSED), row._replace(result=PATCHED)]) == []


def test_only_some_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Row("f", "C", DENSE, PATCHED, "silu"), Row("f", "C", DENSE, REFUSED, reason="it has a bias")])
    monkeypatch.setattr(census_judge, "class_of", lambda listed: nn.Linear)
    monkeypatch.setattr(census_judge, "variants", lambda cls: [("", None), ("bias=True", None)])
    monkeypatch.setattr(census_judge, "_judge_instance", lambda listed, module: next(answers))
    assert judge(Listed("f", "C", DENSE)) == Row("f", "C", DENSE, IN_PART, "silu", "not with bias=True: it has a bias")


def test_the_tables_are_written_between_the_marks() -> None:
    rows = [
        Row("a", "AMLP", DENSE, PATCHED, "silu"),
        Row("b", "BMLP", DENSE, REFUSED, reason="a | b"),
        Row("c", "C", UNGATED, NO_GATE),
        Row("d", "D", UNGATED, NO_GATE, reason="it has no gate"),
        Row("e", "E", UNGATED, NO_GATE, reason="it has no gate"),
        Row("f", "F", UNGATED, NOT_BUILT, reason="TypeError"),
    ]
    page = census.with_tables(f"head\n{census.BEGIN}old\n{census.END}tail\n", census.tables(rows, "9.9"))
    assert page.startswith("head\n") and page.endswith(f"{census.END}tail\n") and "old" not in page
    assert "| a | `AMLP` | patched | `silu` |  |\n| b | `BMLP` | refused |  | a \\| b |\n" in page
    assert "| gated MLP | 1 |  | 1 |  | 2 |\n| MLP without a gate |  | 3 |  | 1 | 4 |\n" in page
    listed = page.partition("## MLP without a gate\n")[2]
    assert "* it has no gate (2): `D`, `E`\n\n* its parts are not named as those of an MLP (1): `C`\n" in listed
    assert "* not built (1): `F`\n" in listed
    assert census.with_tables(page, census.tables(rows, "9.9")) == page


def test_part_of_the_classes_does_not_replace_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        census.main(["--only", "LlamaMLP", "--update-docs"])
    assert "leave out --only" in capsys.readouterr().err


def dies(listed: Listed, sender: Connection) -> None:
    os._exit(7)


def hangs(listed: Listed, sender: Connection) -> None:
    time.sleep(600)


def answers(listed: Listed, sender: Connection) -> None:
    sender.send(Row(*listed, PATCHED))


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_row() -> None:
    classes = [Listed("f", "A", DENSE), Listed("f", "B", DENSE), Listed("f", "C", DENSE)]
    assert [row.result for row in census.census(classes, 2, answer=answers)] == [PATCHED] * 3
    dead = list(census.census(classes, 2, answer=dies))
    assert [row.result for row in dead] == [DIED] * 3 and dead[0].reason == "its process ended with exit code 7"
    assert [row.reason for row in census.census(classes[:1], 2, timeout=0.5, answer=hangs)] == [
        "no answer within 0.5 s"
    ]


def lines_in(text: str) -> set[str]:
    """The rows of classes in a page's tables."""
    return {line for line in text.splitlines() if re.match(r"\| \w+ \| `\w+` \| ", line)}


def ungated_in(text: str) -> dict[str, set[str]]:
    """The classes without a gate on a page, by reason."""
    blocks = (" ".join(block.split()) for block in text.split("\n\n"))
    found = (re.fullmatch(r"\* (.*) \((\d+)\): (`.*`)", block) for block in blocks)
    return {each[1]: set(re.findall(r"`(\w+)`", each[3])) for each in found if each}


@same_release
@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(4))
def test_the_page_is_what_the_census_of_every_class_says(part: int) -> None:
    rows = sorted(census.census(library_classes()[part::4], jobs=2))
    assert len(rows) > 100 and census.failed(rows) == []
    said = census.tables(rows, RELEASE)
    assert len(lines_in(said)) > 50 and lines_in(said) - lines_in(PAGE) == set()
    assert ungated_in(said) and all(names <= ungated_in(PAGE)[reason] for reason, names in ungated_in(said).items())


@same_release
@pytest.mark.slow
def test_the_page_has_the_classes_of_the_library_and_their_number() -> None:
    listed = library_classes()
    gated = {(each.family, f"`{each.name}`") for each in listed if each.kind != UNGATED}
    rows = [line.split(" | ") for line in lines_in(PAGE)]
    assert {(family.removeprefix("| "), name) for family, name, *_ in rows} == gated
    assert set().union(*ungated_in(PAGE).values()) == {each.name for each in listed if each.kind == UNGATED}
    results = Counter(result for _, _, result, *_ in rows)
    (head, *counted) = re.findall(r"^\| (?:kind|decorated|other|gated).*$", PAGE, re.MULTILINE)
    sums = [[int(cell or 0) for cell in map(str.strip, line.split("|")[2:-1])] for line in counted]
    names = [cell.strip() for cell in head.split("|")[2:-1]]
    assert {name: sum(column) for name, column in zip(names, zip(*sums)) if sum(column)} == {
        **results,
        "total": len(rows),
    }

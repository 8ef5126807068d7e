"""Each signature of the documents, of both releases, binds: names, order and defaults are those of the functions."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_neuron_moe import kernels
from hf_neuron_moe.kernels import release_2_30
from hf_neuron_moe.reference.specification import FAMILIES, family, signatures

MODULES = {"2_30": release_2_30, "2_33": kernels}
NAMED = {
    "nl.bfloat16": torch.bfloat16,
    "float8_e4m3fn_x4": torch.float8_e4m3fn,
    "SkipMode(False, False)": kernels.SkipMode(False, False),
}
CASES = [pytest.param(each, name, id=f"{each}-{name}") for each in MODULES for name in signatures(each)]


def meant(text: str, module: Any) -> Any:
    """What a default of the documents stands for, by another way than the package's."""
    if text in NAMED:
        return NAMED[text]
    owner, dot, member = text.partition(".")
    if not dot:
        return ast.literal_eval(text)
    return getattr(getattr(module, owner, None) or getattr(kernels, owner), member)


@pytest.mark.parametrize(("release", "name"), CASES)
def test_names_order_and_defaults_are_the_documents(release: str, name: str) -> None:
    module, entry = MODULES[release], signatures(release)[name]
    parameters = inspect.signature(getattr(module, name)).parameters
    declared = entry["arguments"]
    here = {argument: default for argument, (default, _) in entry.get("other_defaults", {}).items()}
    assert [argument for argument, *_ in declared] == list(parameters)[: len(declared)]
    for argument, *default in declared:
        found, text = parameters[argument], here.get(argument, *default) if default or argument in here else None
        assert found.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, argument
        expected = inspect.Parameter.empty if text is None else meant(text, module)
        assert found.default == expected and type(found.default) is type(expected), argument
    added = list(parameters.values())[len(declared) :]  # this package's, and a host's stand-ins
    assert all(each.default is not inspect.Parameter.empty for each in added)


def arguments_of(line: str) -> list[list[str]]:
    """Name and, where there is one, default of each argument of a signature as a page prints it."""
    inside, parts, depth = line[line.index("(") + 1 : line.rindex(")")], [""], 0
    for letter in inside:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    found = []
    for part in parts:
        declared, equals, default = part.partition("=")
        found.append([declared.partition(":")[0].strip(), *([default.strip()] if equals else [])])
    return found


PAGES = (Path(__file__).parent / "pages_2_30.txt").read_text(encoding="utf-8").splitlines()
"""The signatures as the pages of release 2.30 print them, one in a line."""


@pytest.mark.parametrize("line", PAGES, ids=lambda line: line.partition("(")[0])
def test_the_data_are_the_pages(line: str) -> None:
    recorded = signatures("2_30")[line.partition("(")[0]]["arguments"]
    assert [[name, *(text.replace(" ", "") for text in rest)] for name, *rest in recorded] == [
        [name, *(text.replace(" ", "") for text in rest)] for name, *rest in arguments_of(line)
    ]


def test_the_pages_are_all_there() -> None:
    others = {"get_config_for_shape", "fp8_mul_backward"}  # of a module and of COAT's code, without a page
    assert {line.partition("(")[0] for line in PAGES} == signatures("2_30").keys() - others


@pytest.mark.parametrize("release", MODULES)
def test_every_entry_names_its_document_and_release(release: str) -> None:
    families = {family(name)["document"] for name in FAMILIES} | {"mlp_forward_mxfp8", "mlp_backward_mxfp8", "COAT"}
    for name, entry in signatures(release).items():
        known = entry["document"].removesuffix(" module") in families or entry["document"].startswith(
            "nki-library 2.29, "
        )
        assert known and entry["release"] in ("2.29", "2.30", "2.33", "COAT"), name
        assert set(entry) <= {"document", "release", "arguments", "other_defaults"}
    assert {name for name, entry in signatures(release).items() if entry.get("other_defaults")} <= {
        "blockwise_mm_shard_intermediate_dropping",
        *(name for name in signatures("2_33") if name.startswith(("compute_phase", "recompute_gate_up"))),
    }


def test_since_agrees_with_the_signatures() -> None:
    """What a page of 2.30 has came with no later release; what only the later signature has says when it came."""
    for name in ("moe_cte", "blockwise_mm_bwd"):
        arguments = {
            key: entry
            for each in map(family, FAMILIES)
            for function in each["function"]
            if function["name"] == name
            for key, entry in (each.get("arguments", {}) | function["arguments"]).items()
        }
        old, new = ({argument for argument, *_ in signatures(each)[name]["arguments"]} for each in MODULES)
        assert old < new
        dated = {key for key, entry in arguments.items() if "since" in entry}
        assert not dated & old
        assert {key for key in new - old if key not in dated and not key.endswith("_grad_out")} == set()
        assert {arguments[key]["since"] for key in dated} <= {"2.30", "2.31", "2.33"}

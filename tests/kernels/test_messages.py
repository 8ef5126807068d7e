"""All messages of the kernels' errors in one file, so that a change of their words is seen as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels import (
    test_blockwise_refusals,
    test_mlp_refusals,
    test_mlp_refusals_2_30,
    test_mlp_step_refusals,
    test_moe_cte_refusals,
    test_refusals,
)

SUITES = (
    test_blockwise_refusals,
    test_mlp_refusals,
    test_mlp_refusals_2_30,
    test_mlp_step_refusals,
    test_moe_cte_refusals,
    test_refusals,
)


def test_messages_are_those_of_the_snapshot(repo_root: Path, request: pytest.FixtureRequest) -> None:
    path = repo_root / "tests" / "messages.json"
    found = {
        suite.__name__.rpartition(".")[2]: {parameter.id: parameter.values[0].check() for parameter in suite.CALLS}
        for suite in SUITES
    }
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
    assert sum(map(len, found.values())) > 300

"""Build and judge the model of a configuration once, for tests that convert one checkpoint many times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_neuron_moe.convert import assign, plan


@contextmanager
def remembered_models() -> Iterator[None]:
    """Have conversions take the meta model and its candidates from an earlier one of the same configuration."""
    build, discover = assign._on_meta, plan.discover
    built: dict[str, Any] = {}
    found: dict[int, Any] = {}

    def on_meta(directory: Path, content: dict[str, Any], attention: str | None) -> Any:
        key = json.dumps([content, attention])
        if key not in built:
            built[key] = build(directory, content, attention)
        return built[key]

    def discovered(model: Any) -> Any:  # `built` keeps the models, so that no other one gets the id of one
        if id(model) not in found:
            found[id(model)] = discover(model)
        return found[id(model)]

    assign._on_meta, plan.discover = on_meta, discovered  # type: ignore[assignment]
    try:
        yield
    finally:
        assign._on_meta, plan.discover = build, discover

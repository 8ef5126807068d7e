"""Arguments of the wrong type or name: the package's own error, before anything is read."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.convert import (
    ConvertOptions,
    convert_checkpoint,
    export_checkpoint,
    finalize_checkpoint,
    plan_conversion,
)
from hf_neuron_moe.convert.estimate import estimate_conversion
from hf_neuron_moe.errors import ConfigError
from tests.refusals import refused

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("destination", {"destination": "made"}, "pathlib.Path"),
    ("options", {"options": {}}, "ConvertOptions"),
    ("options", {"options": {"precision": "mxfp8"}}, "ConvertOptions"),
    ("workers", {"workers": "2"}, "one per core"),
    ("workers", {"workers": 0}, "one per core"),
    ("workers", {"workers": True}, "one per core"),
    ("argument name", {"forse": True}, "Did you mean 'force'?"),
]


@pytest.mark.parametrize("function", [convert_checkpoint, finalize_checkpoint, estimate_conversion])
@pytest.mark.parametrize(("argument", "change", "says"), WRONG)
def test_wrong_arguments(function: Any, argument: str, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with refused(ConfigError, argument, says, where="finalize" if function is finalize_checkpoint else "convert"):
        function(**{"source": tmp_path / "none", "destination": tmp_path / "made"} | change)
    assert not list(tmp_path.iterdir())


def test_folders_of_the_other_functions(tmp_path: Path) -> None:
    with refused(ConfigError, "converted", "pathlib.Path", where="export"):
        export_checkpoint("made", tmp_path / "back")  # type: ignore[arg-type]
    with refused(ConfigError, "destination", "pathlib.Path", where="export"):
        export_checkpoint(tmp_path, None)  # type: ignore[arg-type]
    with refused(ConfigError, "directory", "pathlib.Path", where="convert"):
        plan_conversion("made", ConvertOptions())  # type: ignore[arg-type]


def test_misspelt_options() -> None:
    with refused(ConfigError, "argument name", "Did you mean 'precision'?", where="ConvertOptions"):
        ConvertOptions(precison="mxfp8")  # type: ignore[call-arg]
    assert list(inspect.signature(ConvertOptions).parameters)[:3] == ["precision", "layout", "max_shard_bytes"]

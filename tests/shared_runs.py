"""Results that the workers of one test run share: the first to ask makes them, the others wait."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that has this name for all workers of the run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Return what ``make(folder)`` returns, a value that JSON holds; a worker that fails leaves an empty folder."""
    folder = shared_folder(tmp_path_factory, name)
    result = folder.with_suffix(".json")
    with FileLock(folder.with_suffix(".lock")):
        if not result.exists():
            try:
                made = json.dumps(make(folder))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(exist_ok=True)
                raise
            result.write_text(made, encoding="utf-8")
        return json.loads(result.read_text(encoding="utf-8"))


def collected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Return what tests of the fixture's file are given as `argument`, of those that this run has chosen."""
    given = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [each.params[argument] for each in given if each is not None and argument in each.params]

"""Machines for the tests: the contract double installed for one test at a time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_neuron_moe.backends.torch import compute, generation
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed

HAND = "tests.neuron.hand_kernels"


@pytest.fixture(autouse=True)
def fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double multiplies in fp32, and experts add unrounded: PyTorch is compared with it doing the same."""
    monkeypatch.setenv(compute.OPTION, "fp32")
    monkeypatch.setenv(generation.OPTION, "0")
    monkeypatch.setattr(compute, "_option", lambda: "fp32")
    monkeypatch.setattr(generation, "_wanted", lambda: False)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., SimpleNamespace]]:
    """Start a machine, ``machine(release=(2, 33), target="trn3", lnc=2)``, whose packages can be imported.

    One machine at a time: starting another one ends the first.
    """
    with ExitStack() as stack:

        def start(**options: Any) -> SimpleNamespace:
            stack.close()
            folder = tmp_path / f"site{len(list(tmp_path.iterdir()))}"
            found = stack.enter_context(installed(folder, Double(**options)))
            stack.callback(sys.modules.pop, HAND, None)
            return found

        yield start


@pytest.fixture
def hand() -> Callable[[], Any]:
    """Import the hand-written wrapper kernels; only while a machine runs."""

    def load() -> Any:
        sys.modules.pop(HAND, None)
        return importlib.import_module(HAND)

    return load

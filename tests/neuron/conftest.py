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
import torch

from hf_neuron_moe.backends.torch import compute, generation, tiles
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed

HAND = "tests.neuron.hand_kernels"


@pytest.fixture(autouse=True)
def mxfp8_in_fp32() -> Iterator[None]:
    """The mock multiplies in fp32 and adds experts unrounded: in mxfp8 PyTorch is compared with it doing the same."""

    def choose(precision: str, device: torch.device, **sizes: Any) -> compute.Compute:
        if precision == "mxfp8":
            return compute.fp32_products(precision)
        return compute.choose_compute(precision, device, **sizes)

    # Not the tests' own monkeypatch: that has to be undone before the machine is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "choose_compute", choose)
        patch.setattr(generation, "environment_option", lambda *_: "0")
        # For processes that a test starts; in this one they must not be read.
        patch.setattr(compute, "environment_option", lambda *_: "auto")
        patch.setenv(compute.OPTION, "fp32")
        patch.setenv(generation.OPTION, "0")
        yield


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

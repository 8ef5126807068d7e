"""Shared settings of the tests: offline, seeded, and reproducible property tests."""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before transformers is imported anywhere: no test may depend on what a hub answers today.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

from hf_neuron_moe.backends.torch import compute
from tests.browsing import opened_chromium
from tests.thinned import left_out, sample, thin
from tests.unsynced import leave_out_syncs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():  # read when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # until all tests are collected: what is imported stays

_OF_THE_ENGINE = ("distributed_configs", "layout_estimate", "sharded_checkpoints")
if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23):  # whose DistributedConfig lacks some sizes
    collect_ignore = ["distributed", *(f"training/test_{name}.py" for name in _OF_THE_ENGINE)]
    collect_ignore += ["patching/test_distributed_loading.py", "quantizers/test_sharded_loading.py"]
    collect_ignore += ["neuron/test_engine_shards.py"]

# No deadline: a shared CI core makes single examples slow, and that is not what these tests are about.
_COMMON = hypothesis.settings(deadline=None, print_blob=True, max_examples=50)
hypothesis.settings.register_profile("fixed", _COMMON, derandomize=True)
hypothesis.settings.register_profile("fresh", _COMMON, derandomize=False, database=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites tests/messages.json, and those for what whole runs leave out."""
    parser.addoption("--all-layouts", action="store_true", help="run every cell of tests/distributed/cells.py")
    parser.addoption("--all-cases", action="store_true", help="run what tests/thinned.py leaves out of whole runs")
    parser.addoption("--draw-cases", action="store_true", help="draw a quarter of the cases that repeat others")
    parser.addoption("--update-messages", action="store_true", help="write tests/messages.json anew")


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Let property tests draw fresh examples from a random seed, or the same ones always (PROPERTY_EXAMPLES=fixed)."""
    profile = os.environ.get("PROPERTY_EXAMPLES", "fresh")
    hypothesis.settings.load_profile(profile)
    if profile == "fresh" and config.option.hypothesis_seed is None:
        # Workers of pytest-xdist are given the same arguments, and the environment.
        config.option.hypothesis_seed = os.environ.setdefault("TESTS_SEED", str(secrets.randbelow(2**32)))
    leave_out_syncs()


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that repeat others, and leave out those that this run does not draw."""
    thin(items, config.getoption("--all-cases"))
    sample(items)
    if config.getoption("--draw-cases"):
        undrawn = {*left_out(items, str(config.option.hypothesis_seed))}
        config.hook.pytest_deselected(items=undrawn)
        items[:] = [item for item in items if item not in undrawn]


def pytest_collection_finish() -> None:
    """Spare garbage collections the modules and the tests: accelerate collects after every run of a Trainer."""
    gc.collect()
    gc.freeze()
    gc.enable()


_tests_done = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Spare them what the tests have imported and compiled since."""
    yield
    if next(_tests_done) % 10 == 0 and len(gc.get_objects()) > 50_000:
        gc.collect()
        gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    """Say which examples the property tests draw, and how to draw them again."""
    seed = config.option.hypothesis_seed
    return "property tests: " + ("fixed examples" if seed is None else f"fresh examples, --hypothesis-seed={seed}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Repeat the seed below the failures, where it is looked for (and where ``-q`` shows it, too)."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(pytest_report_header(config))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    if torch.accelerator.is_available():
        torch.manual_seed(20)
    else:  # a tenth of the time: the other writes a stack trace for each kind of device that may come
        torch.default_generator.manual_seed(20)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """No test leaves a variable behind that decides what a later one computes."""
    before = dict(os.environ)
    yield
    changed = {
        name
        for name in before.keys() | os.environ.keys()
        if name != "PYTEST_CURRENT_TEST" and before.get(name) != os.environ.get(name)
    }
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    compute.environment_option.cache_clear()
    assert not [name for name in changed if "NEURON" in name], f"left in the environment: {sorted(changed)}"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def golden_dir(repo_root: Path) -> Path:
    """Folder of the recorded reference tensors."""
    return repo_root / "tests" / "golden"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, for pages."""
    with opened_chromium() as opened:
        yield opened

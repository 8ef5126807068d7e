"""Shared settings of the tests: offline, seeded, and reproducible property tests."""

from __future__ import annotations

import os
from pathlib import Path

# Before transformers is imported anywhere: no test may depend on what a hub answers today.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

# No deadline: a shared CI core makes single examples slow, and that is not what these tests are about.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, print_blob=True, max_examples=50)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def golden_dir(repo_root: Path) -> Path:
    """Folder of the recorded reference tensors."""
    return repo_root / "tests" / "golden"

"""Tiny models with a tokenizer of bytes and a chat template, and files of data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from hf_neuron_moe.demo.tiny_model import CHAT_TEMPLATE, make_tiny_model


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


def make_chat_model(family: str, folder: Path) -> Path:
    """Write a model whose tokenizer has a chat template, with few positions."""
    make_tiny_model(family, folder, chat_template=CHAT_TEMPLATE, max_position_embeddings=512)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, three mixtures of experts, and one whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("models")
    made = {family: make_chat_model(family, folder / family) for family in ("llama", "mixtral", "qwen3_moe", "gpt_oss")}
    make_tiny_model("llama", folder / "plain", max_position_embeddings=512)
    return made | {"plain": folder / "plain"}

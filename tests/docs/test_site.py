"""The documentation site builds without a warning, holds what the code has, and asks no other server for anything."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import hf_neuron_moe
from hf_neuron_moe.cli.main import COMMANDS

mkdocs = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is not installed (extra docs)")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, for all that is looked at: an unknown name or link, or an unlisted page, is a warning and so an error."""
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    logger = logging.getLogger("mkdocs")
    counter = _Warnings(level=logging.WARNING)
    logger.addHandler(counter)
    try:
        mkdocs.build(config)
    finally:
        logger.removeHandler(counter)
    assert counter.messages == []

    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    api = set(re.findall(r'<h3 id="hf_neuron_moe\.(\w+)"', pages["api.html"]))
    assert api == set(hf_neuron_moe.__all__) - {"__version__"} and "hf_neuron_moe.__version__" in pages["api.html"]
    assert re.findall(r'<h2 id="hf-neuron-moe-([\w-]+)"', pages["cli.html"]) == list(COMMANDS)
    for option in ("--keep-bf16", "--tokens", "--recipe"):
        assert f"<code>{option}</code>" in pages["cli.html"], option
    for name, page in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="([^"]*)"', page)
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]*)"', page)
        assert not [address for address in loaded if "//" in address], name
        assert not re.search(r":(?:func|class|data):", re.sub("<[^>]*>", "", page)), name
    assert {"contributing.html", "changelog.html", "what-does-mxfp8-do.html"} <= pages.keys()


class _Warnings(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

"""A page in a headless Chromium: offline, at a width and in a colour scheme, with what no page may do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDTHS, SCHEMES = (380, 800, 1280), ("light", "dark")

# What sticks out of the window, and labels that stick out of their figure. Wide tables scroll by themselves.
_CLIPPED = """() => {
    const out = document.documentElement.scrollWidth > innerWidth ? ["the page scrolls sideways"] : [];
    for (const element of document.querySelectorAll("body *")) {
        const box = element.getBoundingClientRect();
        const figure = element.closest("figure") && element.closest("svg") && element.tagName === "text";
        if (!box.width || element.closest(".scroll table") || (element.closest("svg") && !figure)) continue;
        const room = figure ? element.closest("figure").getBoundingClientRect() : { left: 0, right: innerWidth };
        if (box.right > room.right + 1 || box.left < room.left - 1)
            out.push(`${element.tagName} ${element.textContent.slice(0, 60)}`);
    }
    return out;
}"""


@contextmanager
def opened_chromium() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@contextmanager
def visited(browser: Any, path: Path, width: int = 800, scheme: str = "light") -> Iterator[Any]:
    """The page with its figures drawn. At the end: nothing else was loaded, and the console has no error or warning."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page, messages, loaded = context.new_page(), [], []
    page.on("console", lambda message: messages.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(path.resolve().as_uri())
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # draws what is far from the window too
    until(page, "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))")
    yield page
    assert messages == []
    assert [url for url in loaded if not url.startswith(("data:", "blob:"))] == [path.resolve().as_uri()]
    context.close()


def until(page: Any, expression: str, seconds: float = 20.0) -> None:
    """Wait for an expression; Playwright's own waiting evaluates strings in the page, whose policy forbids it."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.05)


def clipped(page: Any) -> list[str]:
    """What does not fit the window."""
    return page.evaluate(_CLIPPED)


def violations(page: Any) -> list[str]:
    """What axe-core finds, with the elements."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]

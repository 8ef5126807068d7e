"""The explorer's page in a headless Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.explore.explore_page import write_explore_page
from hf_neuron_moe.explore.measures import FORMATS
from hf_neuron_moe.explore.run import Options, explore
from tests.browsing import SCHEMES, WIDTHS, clipped, violations, visited
from tests.explore.models import TEXT, plant_in_input, planted

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explored")
    planted(folder / "mixtral", "mixtral", plant_in_input, layer=1, channel=37)
    options = Options(tokens=128, length=32, verify=2, formats=FORMATS, fold=folder / "folded")
    write_explore_page(explore(folder / "mixtral", TEXT, options), folder / "page.html")
    return folder / "page.html"


@pytest.mark.thinned(2, 2)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_is_accessible(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    with visited(browser, page_file, width, scheme) as page:
        figures = page.locator("figure").all()
        assert len(figures) == 9
        for figure in figures:
            assert figure.locator("a[download]").count() and figure.locator("details table").count()
        assert clipped(page) == []
        for table in page.locator("details").all():
            table.locator("summary").click()
        assert clipped(page) == []
        assert violations(page) == []


def test_blocks_stand_in_the_models_order(browser: Any, page_file: Path) -> None:
    with visited(browser, page_file) as page:
        maps = "figure:has(.heatmaplayer) .ytick"
        names = page.locator(f"{maps} text").all_text_contents()
        assert names[:2] == ["layers.0", "layers.1"] and set(names) == set(names[:2])
        assert "-1" not in page.locator("section:has(h2:text('Operands')) > .scroll td").all_text_contents()

"""The report in a headless Chromium: it fits, can be used without a mouse, and follows the colour scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.report import read_runs, write_report
from hf_neuron_moe.report.page import Section, render_page, write_page
from hf_neuron_moe.report.plots import Line, heat_map, line_figure
from tests.browsing import SCHEMES, WIDTHS, clipped, until, violations, visited
from tests.report.pages import write_guard, write_run, write_study

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LOSS = 'figure:has([aria-label^="Training loss of tiny"])'
SQNR = 'figure:has([aria-label^="SQNR per module"])'


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "seed0", steps=40, evaluated=4, seed=0, sampled=False)
    write_run(folder / "seed1", steps=40, evaluated=4, seed=1, shift=0.5)
    write_run(folder / "dense-with-a-long-name", steps=40, kind="mlp", seed=0, sampled=False, learning_rate=5e-4)
    write_study(folder / "study")
    write_guard(folder / "seed1", 40, alarm_in=33)
    file = folder / "seed1" / "neuron_moe" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"sqnr_db": 27.5', '"sqnr_db": 20.5'))
    write_report(read_runs(folder), folder / "page.html")
    return folder / "page.html"


def y_axis(page: Any, figure: str) -> dict[str, Any]:
    return page.evaluate("figure => document.querySelector(figure + ' .plot')._fullLayout.yaxis", figure)


def shown(page: Any, figure: str) -> list[bool]:
    return page.evaluate("figure => document.querySelector(figure + ' .plot').data.map(each => each.visible)", figure)


@pytest.mark.thinned(2, 2)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_is_accessible(browser: Any, report: Path, width: int, scheme: str) -> None:
    with visited(browser, report, width, scheme) as page:
        assert clipped(page) == []
        for table in page.locator("details").all():
            table.locator("summary").click()
        assert clipped(page) == []
        assert violations(page) == []


def test_figures_are_drawn_when_they_come_near(browser: Any, report: Path) -> None:
    context = browser.new_context(viewport={"width": 800, "height": 600})
    page = context.new_page()
    page.goto(report.as_uri())
    drawn = "[...document.querySelectorAll('.plot')].map((plot) => plot.querySelector('svg') !== null)"
    until(page, f"({drawn})[0]")
    first, *_, last = page.evaluate(drawn)
    assert first and not last
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    until(page, f"({drawn}).at(-1)")
    context.close()


def test_lines_raw_values_and_the_log_axis_are_switched_by_keyboard(browser: Any, report: Path) -> None:
    with visited(browser, report) as page:
        assert shown(page, LOSS) == [False, True, True, True, False, False, True]  # raw values are hidden
        page.locator(f"{LOSS} [data-tool=raw]").press("Enter")
        assert shown(page, LOSS) == [True] * 7
        page.locator(f"{LOSS} .key").first.press("Space")
        assert shown(page, LOSS).count(False) == 2 and page.locator(f"{LOSS} .key[aria-pressed=false]").count() == 1
        page.locator(f"{LOSS} [data-tool=log]").press("Enter")
        assert page.evaluate("f => document.querySelector(f + ' .plot').layout.yaxis.type", LOSS) == "log"


def test_zoom_by_keyboard_and_mouse_and_back(browser: Any, report: Path) -> None:
    with visited(browser, report, 1280) as page:
        span = "f => { const [a, b] = document.querySelector(f + ' .plot').layout.xaxis.range; return b - a }"
        whole, plot = page.evaluate(span, LOSS), page.locator(f"{LOSS} .plot")
        plot.press("+")
        assert page.evaluate(span, LOSS) == pytest.approx(whole / 2)
        plot.press("0")
        assert page.evaluate(span, LOSS) == pytest.approx(whole)
        plot.scroll_into_view_if_needed()
        box = page.locator(f"{LOSS} .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + 40, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 140, box["y"] + 120, steps=4)
        page.mouse.up()
        until(page, f"({span})({json.dumps(LOSS)}) < {whole / 2}")
        page.locator(f"{LOSS} [data-tool=reset]").click()
        assert page.evaluate(span, LOSS) == pytest.approx(whole)


def test_the_slider_goes_through_the_steps(browser: Any, report: Path) -> None:
    with visited(browser, report) as page:
        slider, label = page.locator(f"{SQNR} input").first, page.locator(f"{SQNR} output").first
        assert label.inner_text() == "40"
        slider.press("ArrowLeft")
        assert label.inner_text() == "38"
        slider.press("Home")
        assert label.inner_text() == "2"


def test_the_guards_maps_begin_with_the_first_alarm(browser: Any, report: Path) -> None:
    with visited(browser, report, 1280) as page:
        figure = 'figure:has([aria-label^="Largest error of a row"])'
        assert page.locator(f"{figure} output").inner_text() == "33"
        assert page.locator(f"{figure} .shapelayer path").count() == 1
        page.locator(f"{figure} input").press("Home")
        assert page.locator(f"{figure} output").inner_text() == "1"
        assert page.locator(f"{figure} .shapelayer path").count() == 0


def test_hovering_names_the_run_and_its_value(browser: Any, report: Path) -> None:
    with visited(browser, report, 1280) as page:
        page.locator(f"{LOSS} .plot").scroll_into_view_if_needed()
        box = page.locator(f"{LOSS} .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 12)
        page.wait_for_selector(f"{LOSS} .hovertext")
        assert "mxfp8, minimal" in page.locator(f"{LOSS} .hovertext").text_content()


@pytest.mark.parametrize(("width", "written"), [(380, False), (1280, True)])
def test_narrow_cells_have_no_values_in_them(browser: Any, tmp_path: Path, width: int, written: bool) -> None:
    names = [f"p{place}" for place in range(12)]
    figure = heat_map(["a"], names, [[place + 0.25 for place in range(12)]], title="map", alt="map", unit="dB")
    write_page(render_page("Page", "", [Section("Map", [figure])]), tmp_path / "page.html")
    with visited(browser, tmp_path / "page.html", width) as page:
        assert page.locator(".heatmap-label").count() == 12 * written


def test_axes_have_no_prefixes_of_units(browser: Any, tmp_path: Path) -> None:
    rates = [Line("rate", [(1, 1e-5), (2, 5e-5)])]
    figure = line_figure(rates, title="rates", alt="rates", y="%")
    write_page(render_page("Page", "", [Section("Rates", [figure])]), tmp_path / "page.html")
    with visited(browser, tmp_path / "page.html") as page:
        shown = page.locator(".ytick text").all_text_contents()
        assert shown == [f"{number}e\N{MINUS SIGN}5" for number in range(1, 6)]  # and not 10µ


def test_the_data_are_downloaded(browser: Any, report: Path, tmp_path: Path) -> None:
    with visited(browser, report) as page:
        with page.expect_download() as download:
            page.locator(f"{LOSS} a[download]").click()
        assert download.value.suggested_filename.endswith(".csv")
        lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("step,") and len(lines) == 41


def test_colours_follow_the_scheme_while_the_page_is_open(browser: Any, report: Path) -> None:
    with visited(browser, report, scheme="light") as page:
        light = y_axis(page, LOSS)["gridcolor"]
        page.emulate_media(color_scheme="dark")
        until(page, f"document.querySelector({json.dumps(LOSS + ' .plot')})._fullLayout.yaxis.gridcolor !== '{light}'")
        assert y_axis(page, LOSS)["gridcolor"] == "#30363d"


def test_names_of_strangers_neither_run_nor_link(browser: Any, tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)><script>alert(2)</script><a href='https://x.y'>z</a>"
    write_run(tmp_path / "run", steps=4, seed=0)
    file = tmp_path / "run" / "neuron_moe" / "run.json"
    run = json.loads(file.read_text())
    run["config"]["activations"] = name
    file.write_text(json.dumps(run | {"model": name}))
    metrics = tmp_path / "run" / "neuron_moe" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("model.layers.0.mlp", name))
    write_report(read_runs(tmp_path), tmp_path / "page.html")
    with visited(browser, tmp_path / "page.html", 380) as page:
        assert page.locator("svg a").count() == 0 and page.locator("img").count() == 0
        assert clipped(page) == []

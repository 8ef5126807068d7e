"""Figures hold what they were given: as what plotly.js draws, as a table, and escaped."""

from __future__ import annotations

import json
import math

import pytest
from plotly import graph_objects

from hf_neuron_moe.report.plots import (
    Figure,
    Line,
    Threshold,
    bar_figure,
    heat_map,
    labels,
    line_figure,
    scatter_figure,
)

NAME = "<b>&amp;"
TEXTS = {"title": NAME, "alt": NAME}
LIMIT = Threshold(2.0, "below 2")


def drawn(figure: Figure) -> Figure:
    graph_objects.Figure(figure.data, figure.layout)
    json.dumps(figure.drawing, allow_nan=False)
    return figure


def test_curves_have_bands_raw_values_and_thresholds() -> None:
    line = Line("loss", [(1, 3.0), (2, 2.5)], [2.0, 2.0], [4.0, 3.0], {"seed 0": [(0, 9.0), (1, 2.0)]})
    figure = drawn(line_figure([line, Line("b", [(2, 1.0)])], y="nats", thresholds=[LIMIT], **TEXTS))
    low, high, raw, mean, single = figure.data
    assert (low["fill"], high["fill"], low["y"], high["y"]) == ("none", "tonexty", [2.0, 2.0], [4.0, 3.0])
    assert (raw["x"], raw["visible"], raw["meta"], mean["y"]) == ([0, 1], False, "raw", [3.0, 2.5])
    assert [trace["legendgroup"] for trace in figure.data] == ["0", "0", "0", "0", "1"]
    assert (mean["mode"], single["mode"]) == ("lines", "markers")  # of one point no line could be seen
    assert mean["line"]["color"] != single["line"]["color"] and mean["line"]["dash"] != single["line"]["dash"]
    assert (figure.keys, figure.limits, figure.log, figure.raw) == (["loss", "b"], ["below 2"], True, True)
    assert figure.layout["shapes"][0]["y0"] == 2.0
    assert figure.table.columns == ["step", "loss", "loss, lowest", "loss, highest", "loss, raw, seed 0", "b"]
    assert figure.table.rows == [[0, None, None, None, 9.0, None], [1, 3, 2, 4, 2, None], [2, 2.5, 2, 3, None, 1]]


def test_a_log_axis_is_offered_for_positive_values_alone() -> None:
    assert not line_figure([Line("a", [(1, 0.0), (2, 1.0)])], y="", **TEXTS).log
    assert not line_figure([], y="", **TEXTS).log


def test_values_that_are_no_numbers_are_gaps_and_stay_in_the_table() -> None:
    figure = drawn(line_figure([Line("a", [(1, math.nan), (2, math.inf), (3, 1.0)])], y="", **TEXTS))
    assert figure.data[0]["y"] == [None, None, 1.0]
    assert math.isnan(figure.table.rows[0][1])
    figure = drawn(heat_map(["a"], ["b", "c"], [[math.inf, None]], unit="dB", **TEXTS))
    assert figure.data[0]["z"] == [[None, None]] and figure.layout["shapes"] == []


def test_a_heat_map_frames_what_is_beyond_its_threshold() -> None:
    figure = drawn(
        heat_map(["a", "b"], ["0", "1", "2"], [[1, 1, 3], [5, 1.5, None]], unit="x", thresholds=[LIMIT], **TEXTS)
    )
    boxes = [tuple(shape[edge] for edge in ("x0", "x1", "y0", "y1")) for shape in figure.layout["shapes"]]
    assert boxes == [(-0.5, 1.5, -0.5, 0.5), (0.5, 1.5, 0.5, 1.5)]
    above = heat_map(["a"], ["0"], [[3]], unit="x", thresholds=[Threshold(2, "", below=False)], **TEXTS)
    assert len(above.layout["shapes"]) == 1
    equal = heat_map(["a"], ["0"], [[2]], unit="x", thresholds=[LIMIT, Threshold(2, "", below=False)], **TEXTS)
    assert equal.layout["shapes"] == []
    assert figure.table.rows == [["a", 1, 1, 3], ["b", 5, 1.5, None]]


def test_a_heat_map_over_steps_shows_the_last() -> None:
    steps = {"10": [[1.0]], "20": [[3.0]]}
    figure = drawn(heat_map(["a"], ["b"], steps, unit="x", thresholds=[LIMIT], least_range=6.0, **TEXTS))
    assert figure.data[0]["z"] == [[3.0]] and figure.layout["shapes"] == []
    assert [(frame["label"], frame["z"], len(frame["shapes"])) for frame in figure.frames] == [
        ("10", [[1.0]], 1),
        ("20", [[3.0]], 0),
    ]
    assert (figure.data[0]["zmin"], figure.data[0]["zmax"]) == (-3.0, 3.0)
    assert figure.table.rows == [["10", "a", 1.0], ["20", "a", 3.0]]


def test_a_heat_map_over_steps_may_begin_with_another_one() -> None:
    steps = {"10": [[1.0]], "20": [[3.0]]}
    figure = drawn(heat_map(["a"], ["b"], steps, unit="x", thresholds=[LIMIT], first="10", **TEXTS))
    assert (figure.data[0]["z"], len(figure.layout["shapes"]), figure.first) == ([[1.0]], 1, 0)
    assert drawn(heat_map(["a"], ["b"], steps, unit="x", **TEXTS)).first == 1


@pytest.mark.parametrize(
    ("values", "unit", "text"), [([1643.0, 2.0], "tokens", ",d"), ([0.00763], "%", ".2~f"), ([31.44], "dB", ".3~g")]
)
def test_values_in_cells_are_short_and_counts_whole(values: list[float], unit: str, text: str) -> None:
    figure = heat_map(["a"], [str(place) for place in range(len(values))], [values], unit=unit, **TEXTS)
    assert figure.data[0]["texttemplate"] == f"%{{z:{text}}}"


def test_bars_and_points() -> None:
    bars = drawn(bar_figure(["p", "q"], {"KiB": [1.0, 2.0], "MiB": [3.0, 4.0]}, **TEXTS))
    assert [trace["x"] for trace in bars.data] == [[1, 2], [3, 4]] and bars.keys == ["KiB", "MiB"]
    assert bars.table.rows == [("p", 1, 3), ("q", 2, 4)]
    points = drawn(scatter_figure({"g": [(1.0, 2.0, "a"), (3.0, 2.5, "b")]}, x="p", y="m", diagonal=True, **TEXTS))
    assert (points.data[0]["x"], points.data[0]["text"]) == ([1, 3], ["a", "b"])
    assert [points.layout["shapes"][0][end] for end in ("x0", "x1")] == [1.0, 3.0]


def test_names_are_escaped_for_plotly() -> None:
    pictures = (
        heat_map([NAME], [NAME], [[1.0]], unit=NAME, **TEXTS),
        line_figure([Line(NAME, [(0, 0), (1, 1)])], x=NAME, y=NAME, **TEXTS),
        bar_figure([NAME], {NAME: [1.0]}, **TEXTS),
        scatter_figure({NAME: [(0.0, 1.0, NAME)]}, x=NAME, y=NAME, **TEXTS),
    )
    for picture in pictures:
        text = json.dumps(picture.drawing)
        assert "<b>" not in text and "&lt;b&gt;&amp;amp;" in text


def test_long_names_of_rows_are_shortened_beside_the_picture_only() -> None:
    name = "model.layers.17.feed_forward.experts"
    figure = drawn(heat_map([name, "b"], ["c"], [[1], [2]], unit="", **TEXTS))
    axis = figure.layout["yaxis"]
    assert axis["tickvals"] == figure.data[0]["y"] == [name, "b"]
    assert axis["ticktext"] == ["model.laye…ard.experts", "b"] and figure.table.rows[0][0] == name
    blocks = [f"model.language_model.layers.{layer}.block_sparse_moe.experts" for layer in (3, 17)]
    assert labels(blocks) == ["3", "17"]  # what tells them apart is not what is left out
    assert labels([f"model.layers.{layer}.mlp.experts" for layer in (3, 17)]) == ["3.mlp.experts", "17.mlp.experts"]
    assert labels(["3.mlp", "17.mlp"]) == ["3.mlp", "17.mlp"] and labels([]) == []
    wide = heat_map(["a"], ["gate_up activations", "down.dw gradients"], [[1, 2]], unit="", **TEXTS)
    narrow = heat_map(["a"], ["0", "1"], [[1, 2]], unit="", **TEXTS)
    assert wide.layout["height"] > narrow.layout["height"] + 100  # where the names are turned


def test_titles_of_axes_are_broken_into_lines_and_short_negative_bars_have_room() -> None:
    bars = drawn(bar_figure(["p", "q"], {"predicted change of the loss, %": [2.0, -0.1]}, **TEXTS))
    assert bars.layout["xaxis"]["title"]["text"] == "predicted change of the<br>loss, %"
    assert bars.layout["xaxis"]["range"] == pytest.approx([-0.835, 2.42])
    assert bars.data[0]["texttemplate"] == "%{x:.2~g}"  # "-0.00019", and not "-0.0001890", which is cut on a phone

"""The page is whole, self-contained and honest about what is missing; wrong folders are refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.errors import ReportError
from hf_neuron_moe.report import read, read_runs, render, write_report
from hf_neuron_moe.report.curves import band, band_of_runs, differences, smoothed, thinned
from hf_neuron_moe.report.runs import grouped, labels
from hf_neuron_moe.report.sections import short_names
from hf_neuron_moe.report.svg import Line, bar_chart, heat_map, line_chart, shade, ticks

TRAINING = {
    "learning_rate": 1e-3,
    "batch_size_per_process": 4,
    "accumulation_steps": 2,
    "processes": 1,
    "max_steps": 12,
    "seed": 0,
    "resumed_from_step": 0,
    "parameters": 5000,
    "trainable_parameters": 5000,
    "adapter": None,
    "lora_rank": None,
}
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def figures(self) -> list[str]:
        """What the figures show, as a screen reader says it."""
        return [str(attrs["aria-label"]) for tag, attrs in self.tags if tag == "svg"]

    def text(self) -> str:
        return " ".join(self.words)


def entry(layer: int, kind: str, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": f"model.layers.{layer}.mlp",
        "kind": kind,
        "class_name": "MixtralExperts" if kind == "experts" else "LlamaMLP",
        "status": "patched",
        "reason": "",
        "experts": 4 if kind == "experts" else None,
        "hidden_size": 32,
        "intermediate_size": 48,
        "activations": "minimal",
        "saved_bytes_per_token": 2048.0,
    }
    return facts | changes


def health(sqnr: float | None) -> dict[str, Any]:
    figures = {"amax": 1.5, "flushed": 0.01, "saturated": 0.0, "sqnr_db": sqnr}
    return {"weights": {"gate": figures, "down": figures}, "input": figures}


def write_run(
    folder: Path, *, kind: str = "experts", steps: int = 6, sampled: bool = True, shift: float = 0.0, **training: Any
) -> None:
    files = folder / "neuron_moe"
    files.mkdir(parents=True)
    refused = entry(2, kind, status="refused", reason="it has <hooks> & more", activations=None)
    entries = [entry(0, kind), entry(1, kind), refused | {"saved_bytes_per_token": None}]
    run = {
        "patch": {"config": {}, "entries": entries},
        "config": {"precision": "mxfp8", "activations": "minimal"},
        "environment": {"packages": {"torch": "2.13.0"}, "python": "3.11.7", "threads": 2, "date": "2026-11-21"},
        "model": "tiny",
    } | ({"training": TRAINING | training} if training else {})
    (files / "run.json").write_text(json.dumps(run))
    names = [known["name"] for known in entries[:2]]
    with open(files / "metrics.jsonl", "w", encoding="utf-8") as out:
        for step in range(1, steps + 1):
            record: dict[str, Any] = {"step": step, "epoch": 0.1, "loss": 5.0 / step + shift, "learning_rate": 1e-3}
            record |= {"tokens_per_second": 321.0, "saved_bytes_per_token": 4096.0, "padding_overhead": 0.25}
            load = {"entropy": 0.9, "max_over_mean": 1.5, "dead": 1, "load": [0, 10, 20, 10]}
            record["experts"] = dict.fromkeys(names, load) if kind == "experts" else {}
            if sampled and step % 2 == 0:
                record["health"] = {names[0]: health(27.5), names[1]: health(None)}
            out.write(json.dumps(record) + "\n")
        out.write(f'{{"step": {steps + 1}, "lo')  # the run was killed here


def write_study(folder: Path) -> None:
    folder.mkdir(parents=True)
    steps = range(1, 121)
    curves = {
        variant: {str(seed): [3 + 2 / step + 0.01 * seed + gap for step in steps] for seed in range(3)}
        for variant, gap in (("bf16", 0.0), ("mxfp8", 0.003))
    }
    curves["fp32, minimal"] = {"0": [3.0] * 64}
    compared = {"reference": "bf16", "difference_percent": 0.0987, "goal_percent": 0.25, "met": True}
    summary = {
        "variants": {
            "bf16": {"last_mean": 3.04, "seed_spread_percent": 0.3},
            "mxfp8": {"last_mean": 3.043, "seed_spread_percent": 0.3, **compared},
        },
        "fp32": {"steps": 64, "largest_difference": 0.0, "goal": 1e-6, "met": True},
    }
    content = {"models": {"smol": curves}, "summary": {"smol": summary}, "environment": {"date": "today"}}
    content["saved_bytes_per_token"] = {"smol": {"bf16": 9000.0, "mxfp8": 9000.0}}
    (folder / "parity.json").write_text(json.dumps(content))


def test_all_figures_are_there_and_nothing_is_loaded(tmp_path: Path) -> None:
    write_run(tmp_path / "seed0")
    write_run(tmp_path / "seed1", shift=0.5)
    write_run(tmp_path / "dense", kind="mlp")
    write_study(tmp_path / "study")
    contents = read_runs(tmp_path)
    assert [run.name for run in contents.runs] == ["dense", "seed0", "seed1"]
    text = render(contents)
    page = Page(text)
    figures = "\n".join(page.figures())
    for part in (
        "Training loss of smol over the steps, by variant: bf16, mxfp8",
        "Difference of smol's loss between variants in percent",
        "KiB per token that the blocks of smol keep for backward, by policy",
        "Training loss of tiny over the steps",
        "KiB per token that the blocks of tiny keep",
        "SQNR per module and tensor at step 6",
        "SQNR of the modules' inputs over the steps",
        "Load of every expert over its module's mean",
        "Entropy of the expert load",
    ):
        assert part in figures, part
    # Self-contained: no tag that loads anything, no address anywhere, no style that fetches.
    loading = [tag for tag, attrs in page.tags if tag in ("script", "link", "img", "iframe") or "src" in attrs]
    assert loading == []
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "prefers-color-scheme:dark" in text
    for svg in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")  # well-formed on its own
    words = page.text()
    assert "2 patched, 0 skipped, 1 refused." in words
    assert "model.layers.0-1.mlp (2)" in words and "it has <hooks> & more" in words
    assert "+0.0987 % to bf16" in words and "0.25 %: met" in words and "1e-06: met" in words
    assert "25.0 %" in words and "extra multiply-adds of the Neuron kernels" in words
    assert "torch" in words and "2.13.0" in words


def test_two_runs_of_one_configuration_become_a_band(tmp_path: Path) -> None:
    write_run(tmp_path / "seed0")
    write_run(tmp_path / "seed1", shift=0.5)
    text = render(read_runs(tmp_path))
    assert 'class="band c0"' in text
    assert "bands: lowest to highest of up to 2 runs" in text
    assert text.count("<h2>Environment") == 1 and "Environment: seed0, seed1" in text


def test_only_runs_of_one_configuration_share_a_line(tmp_path: Path) -> None:
    write_run(tmp_path / "a0", steps=12, seed=0)
    write_run(tmp_path / "a1", steps=6, seed=1)  # ended early
    write_run(tmp_path / "lora", seed=0, adapter="lora", lora_rank=8, trainable_parameters=100)
    write_run(tmp_path / "rate", seed=0, learning_rate=5e-4)
    write_run(tmp_path / "ranks", seed=0, processes=2)
    write_run(tmp_path / "resumed", seed=0, resumed_from_step=3)
    write_run(tmp_path / "earlier_version")
    contents = read_runs(tmp_path)
    (groups,) = grouped(contents.runs).values()
    assert [[run.name for run in group.runs] for group in groups] == [
        ["a0", "a1"],
        ["earlier_version"],
        ["lora"],
        ["ranks"],
        ["rate"],
        ["resumed"],
    ]
    assert len(set(labels(groups))) == len(groups)
    words = Page(render(contents)).text()
    assert "1 of 2 runs reach step 12" in words and "4 x 2 x 2 = 16" in words and "12 of 12" in words
    for part in ("lora of rank 8: 100 of 5,000", "learning rate 0.0005", "resumed resumed from step 3", "up to 0.001"):
        assert part in words


def test_a_band_goes_on_where_a_run_has_ended() -> None:
    line = band_of_runs("x", [[(1.0, 2.0), (2.0, 4.0)], [(1.0, 4.0), (2.0, 6.0), (3.0, 8.0)]])
    assert line.points == [(1.0, 3.0), (2.0, 5.0), (3.0, 8.0)]
    assert (list(line.low), list(line.high)) == ([2.0, 4.0, 8.0], [4.0, 6.0, 8.0])


def test_missing_pieces_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, kind="mlp", sampled=False)
    words = Page(render(read_runs(tmp_path))).text()
    assert "Not sampled: neuron_health_steps was 0" in words
    assert "No experts: the model's patched blocks are dense" in words
    (tmp_path / "neuron_moe" / "metrics.jsonl").unlink()
    words = Page(render(read_runs(tmp_path / "neuron_moe"))).text()
    assert "No loss was logged." in words


def test_an_environment_shows_what_has_a_value(tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "neuron_moe" / "run.json"
    run = json.loads(file.read_text())
    run["environment"] |= {"accelerator": None, "packages": {"torch": "2.13.0", "peft": None}, "cpu_count": 0}
    file.write_text(json.dumps(run))
    facts = Page(render(read_runs(tmp_path))).text().partition("Environment")[2]
    assert "accelerator" not in facts and "peft" not in facts and "null" not in facts and "None" not in facts
    assert "2.13.0" in facts and "cpu_count 0" in facts


def test_a_page_without_a_single_health_figure(tmp_path: Path) -> None:
    write_run(tmp_path)
    lines = (tmp_path / "neuron_moe" / "metrics.jsonl").read_text().splitlines()[:-1]
    records = [json.loads(line) for line in lines]
    for record in records:
        record["health"] = {"a.0.b": health(None)}
        record["experts"] = {"a.0.b": {"entropy": None, "max_over_mean": None, "dead": 4, "load": [0, 0, 0, 0]}}
    (tmp_path / "neuron_moe" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = Page(render(read_runs(tmp_path))).text()
    assert "lowest SQNR (dB) - largest share flushed to zero 0.01" in words


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "must be JSON in UTF-8"), ("[]", "a JSON object with the objects patch, config"), ('{"patch": 3}', "patch")],
)
def test_damaged_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "neuron_moe").mkdir()
    (tmp_path / "neuron_moe" / "run.json").write_text(content)
    with pytest.raises(ReportError, match=message):
        read_runs(tmp_path)


def test_damaged_metrics_are_refused_with_the_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "neuron_moe" / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ReportError, match="line 2"):
        read_runs(tmp_path)


def test_wrong_places_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ReportError, match=r"neuron_moe/run.json.*got a directory with model.safetensors"):
        read_runs(tmp_path)
    with pytest.raises(ReportError, match="got a file"):
        read_runs(tmp_path / "model.safetensors")
    with pytest.raises(ReportError, match="no such directory"):
        read_runs(tmp_path / "nowhere")


def test_an_unwritable_target_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    contents = read_runs(tmp_path / "run")
    with pytest.raises(OSError):
        write_report(contents, tmp_path / "no" / "such" / "folder.html")
    size = write_report(contents, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size == size
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html"}


def test_smoothing_is_the_trailing_mean_and_bands_enclose_it() -> None:
    assert smoothed([1.0, 2.0, 3.0, 5.0], 2) == [1.0, 1.5, 2.5, 4.0]
    line = band("x", [[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    assert line.points == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert (list(line.low), list(line.high)) == ([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])
    assert band("x", [[1.0, 2.0]]).low == []
    many = thinned([(float(i), 0.0) for i in range(1000)])
    assert many[0] == 0 and many[-1] == 999 and len(many) == len(set(many)) == 160


def test_differences_are_paired_by_seed() -> None:
    line = differences("x", {"0": [2.0, 2.0], "1": [9.0]}, {"0": [1.0, 2.0]})
    assert line is not None and [y for _, y in line.points] == [100.0, 0.0]
    assert differences("x", {"1": [1.0]}, {"0": [1.0]}) is None


@pytest.mark.slow
def test_the_files_of_a_real_run_are_understood(tmp_path: Path) -> None:
    from torch.utils.data import Dataset

    from hf_neuron_moe import NeuronMoETrainer, NeuronMoETrainingArguments
    from hf_neuron_moe.training import run_files
    from tests.tiny_models import tiny_model, tokens

    assert (read.RUN_FOLDER, read.RUN_FILE) == (run_files.FOLDER, run_files.RUN_FILE)
    assert read.METRICS_FILE == run_files.METRICS_FILE

    class Rows(Dataset):
        ids = tokens(8, 16)

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": self.ids[index], "labels": self.ids[index]}

    arguments = NeuronMoETrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=4,
        logging_steps=1,
        neuron_health_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    NeuronMoETrainer(model=tiny_model("mixtral"), args=arguments, train_dataset=Rows()).train()
    contents = read_runs(tmp_path)
    page = Page(render(contents))
    assert len(page.figures()) == 6
    assert "2 patched, 0 skipped, 0 refused." in page.text() and "bf16, minimal" in page.text()
    assert [record["step"] for record in contents.runs[0].metrics] == [1, 2, 3, 4]


def test_axes_colours_and_names() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert ticks(3.0, 3.0) == [3.0]
    assert shade(0.0) == "#440154" and shade(1.0) == "#fde725"
    assert short_names(["m.layers.0.mlp", "m.layers.10.mlp"]) == ["0.mlp", "10.mlp"]
    assert short_names(["m.mlp"]) == ["mlp"]
    assert heat_map(["a"], ["b"], [[None]], alt="empty", unit="dB").count("<rect") == 0


def test_names_of_rows_columns_and_lines_are_escaped() -> None:
    name = "<b>&amp;"
    pictures = (
        heat_map([name], [name], [[1.0]], alt=name, unit=name),
        line_chart([Line(name, [(0, 0), (1, 1)])], alt=name, x_label=name, y_label=name),
        bar_chart({name: 1.0}, alt=name, unit=name),
    )
    for picture in pictures:
        assert "<b>" not in picture
        assert "&lt;b&gt;&amp;amp;" in picture


def test_curves_rise_where_their_values_do() -> None:
    picture = line_chart([Line("loss", [(0, 1), (1, 2), (2, 4)])], alt="", x_label="", y_label="")
    points = picture.split("<polyline")[1].split('points="')[1].split('"')[0].split()
    xs, ys = zip(*(map(float, point.split(",")) for point in points))
    assert xs[0] < xs[1] < xs[2]
    assert ys[0] > ys[1] > ys[2]  # SVG counts from the top

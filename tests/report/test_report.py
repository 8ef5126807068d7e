"""The page is whole, self-contained and honest about what is missing; wrong folders are refused."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe.errors import DestinationError, DiskError, ReportError
from hf_neuron_moe.report import read_runs, render, run_data, write_report
from hf_neuron_moe.report.curves import band, band_of_runs, differences, smoothed, thinned
from hf_neuron_moe.report.runs import grouped, labels
from hf_neuron_moe.report.sections import short_names
from hf_neuron_moe.report.svg import Line, bar_chart, heat_map, line_chart, shade, short, ticks
from tests.refusals import refused
from tests.report.pages import Page, health, write_run, write_study


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
        "Learning rate of tiny over the steps",
        "Gradient norm of tiny over the steps",
        "Throughput of tiny over the steps",
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


def cells(page: str) -> list[dict[str, str]]:
    """The rows of the table of runs, by heading."""
    table = page.partition("<h2>Runs</h2>")[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table.split("</tr>")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if row]


def test_the_results_are_the_first_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "quick", evaluated=3, seed=0)
    write_run(tmp_path / "unevaluated", seed=0)
    first, second = cells(render(read_runs(tmp_path)))
    assert list(first)[:5] == ["run", "loss", "eval loss", "tokens/s", "saved KiB/token"]
    assert list(first.values())[:5] == ["quick", "0.8333", "1.0000", "321", "4.00"]
    assert (first["last step"], second["eval loss"]) == ("6 of 12", "-")


def test_evaluation_learning_rate_norm_and_throughput_are_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "a", evaluated=2)
    write_run(tmp_path / "b", evaluated=2, shift=0.5)
    run, _ = read_runs(tmp_path).runs
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert run.evaluations == {"eval_loss": [(2.0, 3.0), (4.0, 1.5), (6.0, 1.0)]}
    text = render(read_runs(tmp_path))
    assert "Evaluation loss of tiny over the steps, by configuration: mxfp8, minimal" in Page(text).figures()
    drawn = {name: text.partition(f"<title>{name} of tiny")[2].partition("</svg>")[0] for name in COURSE}
    for name, points in COURSE.items():
        (curve,) = re.findall(r'class="curve [^>]*points="([^"]+)"', drawn[name])
        assert len(curve.split()) == points
        assert "band" in drawn[name]  # of the two runs


COURSE = {"Evaluation loss": 3, "Learning rate": 6, "Gradient norm": 6, "Throughput": 6}


def test_evaluations_of_earlier_versions_are_in_the_trainers_state(tmp_path: Path) -> None:
    write_run(tmp_path)
    state = {"log_history": [{"step": 6, "loss": 2.0}, {"step": 6, "eval_a_loss": 2.5}, {"step": 6, "eval_b_loss": 3}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    text = render(read_runs(tmp_path))
    assert cells(text)[0]["eval loss"] == "eval_a_loss 2.5000, eval_b_loss 3.0000"
    assert text.partition("<title>Evaluation loss of tiny")[2].partition("</svg>")[0].count("<circle") == 2
    (tmp_path / "trainer_state.json").write_text('{"log_history": 3}')
    with refused(ReportError, tmp_path / "trainer_state.json"):
        read_runs(tmp_path)


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
    ("content", "got"),
    [("{", "Expecting property name"), ("[]", "one without patch"), ('{"patch": 3}', "one without patch")],
)
def test_damaged_files_are_refused(content: str, got: str, tmp_path: Path) -> None:
    (tmp_path / "neuron_moe").mkdir()
    (tmp_path / "neuron_moe" / "run.json").write_text(content)
    with refused(ReportError, tmp_path / "neuron_moe" / "run.json", got=got):
        read_runs(tmp_path)


def test_damaged_metrics_are_refused_with_the_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "neuron_moe" / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with refused(ReportError, path, "line 2"):
        read_runs(tmp_path)


def test_wrong_places_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with refused(ReportError, tmp_path, got="a directory with model.safetensors"):
        read_runs(tmp_path)
    with refused(ReportError, tmp_path / "model.safetensors", got="a file"):
        read_runs(tmp_path / "model.safetensors")
    with refused(ReportError, tmp_path / "nowhere", got="no such directory"):
        read_runs(tmp_path / "nowhere")


def test_an_unwritable_target_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    contents = read_runs(tmp_path / "run")
    with refused(DestinationError, tmp_path / "no/such/folder.html", got="a name in"):
        write_report(contents, tmp_path / "no" / "such" / "folder.html")
    with refused(DestinationError, tmp_path / "run", got="a folder"):
        write_report(contents, tmp_path / "run")
    if Path("/proc").is_dir():
        with refused(DestinationError, "/proc/x.html", got="a name in /proc, where no file can be created"):
            write_report(contents, Path("/proc/x.html"))
    (tmp_path / "page.html.partial").mkdir()
    with refused(DiskError, tmp_path / "page.html", got="Is a directory"):
        write_report(contents, tmp_path / "page.html")
    (tmp_path / "page.html.partial").rmdir()
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

    assert (run_data.RUN_FOLDER, run_data.RUN_FILE) == (run_files.FOLDER, run_files.RUN_FILE)
    assert (run_data.METRICS_FILE, run_data.EVALUATIONS_FILE) == (run_files.METRICS_FILE, run_files.EVALUATIONS_FILE)

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
        eval_strategy="steps",
        eval_steps=2,
    )
    rows = Rows()
    trainer = NeuronMoETrainer(model=tiny_model("mixtral"), args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    contents = read_runs(tmp_path)
    page = Page(render(contents))
    assert len(page.figures()) == 10
    assert "2 patched, 0 skipped, 0 refused." in page.text() and "bf16, minimal" in page.text()
    (run,) = contents.runs
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    logged = [(record["step"], record["eval_loss"]) for record in trainer.state.log_history if "eval_loss" in record]
    assert list(dict(logged).items()) == run.evaluations["eval_loss"] and run.evaluations["eval_loss"][-1] == (4, last)


def test_axes_colours_and_names() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert ticks(3.0, 3.0) == [3.0]
    labels = {7.5e-4: "7.5e-4", 5e-4: "5e-4", -2.5e5: "-2.5e5", 1e6: "1e6", 0.25: "0.25", 0: "0"}
    assert {value: short(value) for value in labels} == labels
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

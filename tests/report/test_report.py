"""The page is whole, self-contained and honest about what is missing; wrong folders are refused."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects
from typer.testing import CliRunner

from hf_neuron_moe.cli.main import application
from hf_neuron_moe.cli.report import report
from hf_neuron_moe.errors import DestinationError, DiskError, ReportError
from hf_neuron_moe.report import read_runs, render, run_data, write_report
from hf_neuron_moe.report.curves import MOST_POINTS, band, band_of_runs, differences, smoothed, thinned, window_of
from hf_neuron_moe.report.plots import short_names
from hf_neuron_moe.report.runs import grouped, labels
from hf_neuron_moe.report.sections import FLOOR
from tests.refusals import refused
from tests.report.pages import Page, health, write_guard, write_run, write_study


@pytest.fixture(autouse=True)
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page without the megabytes of plotly.js; test_browser.py has them."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "Plotly")


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
        "Peak memory of tiny over the steps",
        "KiB per token that the blocks of tiny keep",
        "SQNR per module and tensor at step 6",
        "SQNR of the modules' inputs over the steps",
        "Load of every expert over its module's mean",
        "Entropy of the expert load",
    ):
        assert part in figures, part
    # Self-contained: no tag that loads anything, no address anywhere, no style that fetches.
    loading = [tag for tag, attrs in page.tags if tag in ("link", "img", "iframe") or "src" in attrs]
    assert loading == []
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert "prefers-color-scheme:dark" in text
    for drawing in page.drawings().values():
        graph_objects.Figure(drawing["data"], drawing["layout"])  # raises where plotly has no such property
    words = page.text()
    assert "2 patched, 0 skipped, 1 refused." in words
    assert "model.layers.0-1.mlp (2)" in words and "it has <hooks> & more" in words
    assert "+0.0987 % to bf16" in words and "0.25 %: met" in words and "1e-06: met" in words
    assert "25.0 %" in words and "extra multiply-adds of the Neuron kernels" in words
    assert "torch" in words and "2.13.0" in words


def cells(page: str) -> list[dict[str, str]]:
    """The rows of the table of runs, by heading."""
    table = page.partition("<h2>Runs</h2>")[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", row) for row in table.split("</tr>")]
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
    drawings = Page(render(read_runs(tmp_path))).drawings()
    for name, points in COURSE.items():
        data = drawings[f"{name} of tiny over the steps, by configuration: mxfp8, minimal"]["data"]
        assert [trace.get("meta") for trace in data] == [None, None, "raw", "raw", None]  # a band, two runs, their mean
        assert [trace["visible"] for trace in data if "meta" in trace] == [False, False]
        assert data[1]["fill"] == "tonexty" and len(data[-1]["x"]) == points
    assert (
        drawings["Peak memory of tiny over the steps, by configuration: mxfp8, minimal"]["data"][-1]["y"] == [1.5] * 6
    )


COURSE = {"Evaluation loss": 3, "Learning rate": 6, "Gradient norm": 6, "Throughput": 6, "Peak memory": 6}


def test_evaluations_of_earlier_versions_are_in_the_trainers_state(tmp_path: Path) -> None:
    write_run(tmp_path)
    state = {"log_history": [{"step": 6, "loss": 2.0}, {"step": 6, "eval_a_loss": 2.5}, {"step": 6, "eval_b_loss": 3}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    text = render(read_runs(tmp_path))
    assert cells(text)[0]["eval loss"] == "eval_a_loss 2.5000, eval_b_loss 3.0000"
    (data,) = [drawn["data"] for alt, drawn in Page(text).drawings().items() if alt.startswith("Evaluation loss")]
    assert [(trace["mode"], trace["x"], trace["y"]) for trace in data] == [
        ("markers", [6], [2.5]),
        ("markers", [6], [3]),
    ]
    (tmp_path / "trainer_state.json").write_text('{"log_history": 3}')
    with refused(ReportError, tmp_path / "trainer_state.json"):
        read_runs(tmp_path)


def test_two_runs_of_one_configuration_become_a_band(tmp_path: Path) -> None:
    write_run(tmp_path / "seed0")
    write_run(tmp_path / "seed1", shift=0.5)
    text = render(read_runs(tmp_path))
    assert "bands: lowest to highest of up to 2 runs" in text
    assert text.count("<h2>Environment") == 1 and "Environment: seed0, seed1" in text


def test_a_run_continued_in_another_precision_has_both(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "neuron_moe" / "run.json"
    before = {"config": {"precision": "bf16", "activations": "full"}, "until": 4}
    file.write_text(json.dumps({**json.loads(file.read_text()), "before": [before]}))
    (run,) = read_runs(tmp_path).runs
    assert (
        run.policy == "bf16, full to step 4, then mxfp8, minimal"
        and run.policy in Page(render(read_runs(tmp_path))).text()
    )


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


def test_losses_of_other_kinds_and_other_data_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, loss_type="nll", rows=10)
    write_run(tmp_path / "b", seed=1, loss_type="nll", rows=10)
    write_run(tmp_path / "more", seed=0, loss_type="nll", rows=20)
    write_run(tmp_path / "dpo", seed=0, loss_type="sigmoid", rows=10)
    contents = read_runs(tmp_path)
    models = grouped(contents.runs)
    assert {name: [[run.name for run in group.runs] for group in groups] for name, groups in models.items()} == {
        "tiny": [["a", "b"], ["more"]],
        "tiny, loss sigmoid": [["dpo"]],
    }
    assert [line for line in labels(models["tiny"]) if "rows 20" in line] == labels(models["tiny"])[1:]
    assert "tiny, loss sigmoid: loss as logged" in Page(render(contents)).text()


def test_a_band_goes_on_where_a_run_has_ended() -> None:
    line = band_of_runs("x", {"a": [(1.0, 2.0), (2.0, 4.0)], "b": [(1.0, 4.0), (2.0, 6.0), (3.0, 8.0)]})
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
    assert "2.13.0" in facts and re.search(r"cpu_count\s+0", facts)


def test_a_page_without_a_single_health_figure(tmp_path: Path) -> None:
    write_run(tmp_path)
    lines = (tmp_path / "neuron_moe" / "metrics.jsonl").read_text().splitlines()[:-1]
    records = [json.loads(line) for line in lines]
    for record in records:
        record["health"] = {"a.0.b": health(None)}
        record["experts"] = {"a.0.b": {"entropy": None, "max_over_mean": None, "dead": 4, "load": [0, 0, 0, 0]}}
    (tmp_path / "neuron_moe" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = Page(render(read_runs(tmp_path))).text()
    assert "lowest SQNR (dB) - largest share flushed to zero 0.01" in " ".join(words.split())


@pytest.mark.parametrize(
    ("content", "got"),
    [("{", "Expecting property name"), ("[]", "[]"), ('{"patch": 3, "config": {}}', "3 (patch)"), ("[" * 99_999, "")],
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


HOSTILE: tuple[Any, ...] = (None, "x", -1, True, [], {}, [[]], {"a": {"b": 1}}, math.inf, 10**400, [None], {"": None})


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of every value in JSON."""
    keys: Any = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from places(content[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "guard.jsonl", "../trainer_state.json", "parity.json"])
def test_a_file_with_another_value_is_shown_or_refused(name: str, tmp_path: Path) -> None:
    """Every value in turn becomes one of another form."""
    write_run(tmp_path)
    record = {"step": 2, "health": {"m.0": health(30.0)}, "experts": {"m.0": {"load": [1, 2], "entropy": 0.5}}}
    alarm = {"step": 2, "block": "m.0", "product": "down", "operand": "w", "result": None, "figure": "amax"}
    alarm |= {"value": 1.0, "low": None, "high": 0.5, "expert": -1, "process": 0}
    figures = {"m.0": {"down": {"w": {"sqnr_db": 30.0, "worst": 1e-3, "amax": 2.0}}}}
    variant = {"last_mean": 2.0, "seed_spread_percent": 1.0, "difference_percent": 0.5, "reference": "stock"}
    exact = {"largest_difference": 0.0, "steps": 2, "goal": 0.1, "met": True}
    contents: dict[str, dict[str, Any]] = {
        "run.json": json.loads((tmp_path / "neuron_moe" / "run.json").read_text()),
        "metrics.jsonl": {**record, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 5.0},
        "guard.jsonl": {"step": 2, "blocks": figures, "alarms": [alarm]},
        "../trainer_state.json": {"log_history": [{"step": 2, "eval_loss": 2.0}]},
        "parity.json": {
            "models": {"m": {"stock": {"0": [2.0, 1.0]}, "mxfp8": {"0": [2.0, 1.1]}}},
            "summary": {"m": {"variants": {"mxfp8": {**variant, "goal_percent": 1.0, "met": True}}, "fp32": exact}},
            "saved_bytes_per_token": {"m": {"stock": 10.0}},
        },
    }
    if name == "../trainer_state.json":
        (tmp_path / "neuron_moe" / "evaluations.jsonl").unlink(missing_ok=True)
    if name == "parity.json":
        shutil.rmtree(tmp_path / "neuron_moe")
    path = tmp_path / name if name == "parity.json" else tmp_path / "neuron_moe" / name
    shown = refusals = 0
    for container, key in list(places(contents[name])):
        right = container[key]
        for wrong in HOSTILE:
            container[key] = wrong
            path.write_text(json.dumps(contents[name]) + "\n")
            try:
                render(read_runs(tmp_path), "json")
                shown += 1
            except ReportError as error:
                assert path.name in str(error)
                refusals += 1
        container[key] = right
    assert shown and refusals


def test_a_name_that_says_no_form_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    result = CliRunner().invoke(application(), ["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.pdf")])
    assert result.exit_code == 2 and "--format" in result.output and not (tmp_path / "page.pdf").exists()


def test_what_is_no_file_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.setattr("hf_neuron_moe.report.read_runs", lambda folder: pytest.fail("it was read"))
    for form in ("html", "md", "json"):
        os.mkfifo(tmp_path / f"page.{form}")
        os.mkfifo(tmp_path / "run" / f"report.{form}")
        for named in (["-o", str(tmp_path / f"page.{form}")], ["--format", form]):
            error = CliRunner().invoke(application(), ["report", str(tmp_path / "run"), *named]).exception
            assert isinstance(error, DestinationError) and "a device, a pipe or a socket" in str(error)
        assert (tmp_path / f"page.{form}").is_fifo()


@pytest.mark.parametrize("name", ["config.json", "README.md", "neuron_moe/run.json"])
def test_files_of_the_run_are_not_replaced(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    file = tmp_path / "run" / name
    file.touch()
    before = file.read_bytes()
    error = CliRunner().invoke(application(), ["report", str(tmp_path / "run"), "-o", str(file)]).exception
    assert isinstance(error, DestinationError) and "a file of the run" in str(error) and file.read_bytes() == before
    for _ in range(2):  # what it wrote itself is replaced
        output = str(tmp_path / "run" / "report.json")
        assert CliRunner().invoke(application(), ["report", str(tmp_path / "run"), "-o", output]).exit_code == 0


def test_the_steps_that_a_studys_mean_is_of_are_those_that_it_has(tmp_path: Path) -> None:
    write_study(tmp_path / "study")
    content = json.loads((tmp_path / "study" / "parity.json").read_text())
    assert "mean of last 100 steps" in render(read_runs(tmp_path / "study"), "json")
    content["models"]["smol"]["mxfp8"] = {"0": [2.0] * 12}
    (tmp_path / "study" / "parity.json").write_text(json.dumps(content))
    assert "mean of last 12 or 100 steps" in render(read_runs(tmp_path / "study"), "json")


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
    (tmp_path / "link.html").symlink_to("page.html")
    assert write_report(contents, tmp_path / "link.html", "md") == (tmp_path / "page.html").stat().st_size < size
    assert (tmp_path / "link.html").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html", "link.html"}


def test_smoothing_is_the_trailing_mean_and_bands_enclose_it() -> None:
    assert smoothed([1.0, 2.0, 3.0, 5.0], 2) == [1.0, 1.5, 2.5, 4.0]
    line = band("x", {"0": [1.0, 2.0, 3.0], "1": [3.0, 4.0, 5.0]})
    assert line.points == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert (list(line.low), list(line.high)) == ([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])
    assert band("x", {"0": [1.0, 2.0]}).low == []
    assert len(band("x", {"0": [1.0, 2.0, 3.0], "1": [3.0, 4.0]}).points) == 2
    assert [window_of(count) for count in (0, 19, 40, 400)] == [1, 1, 2, 20]  # a twentieth
    many = thinned([(float(i), 0.0) for i in range(2500)])
    assert many[0] == 0 and many[-1] == 2499 and len(many) == len(set(many)) == 1000


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
    assert len(page.figures()) == 12
    assert "2 patched, 0 skipped, 0 refused." in page.text() and "bf16, minimal" in page.text()
    (run,) = contents.runs
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]
    logged = [(record["step"], record["eval_loss"]) for record in trainer.state.log_history if "eval_loss" in record]
    assert list(dict(logged).items()) == run.evaluations["eval_loss"] and run.evaluations["eval_loss"][-1] == (4, last)


def declared(parameter: inspect.Parameter) -> tuple[str, ...]:
    """The names of an option of a command."""
    return next((str(each.default), *(each.param_decls or ())) for each in parameter.annotation.__metadata__)


def test_the_documentation_describes_this_report(repo_root: Path) -> None:
    """Options, limits and names of sections of docs/training.md and docs/reference.md are those of the program."""
    page = (repo_root / "docs" / "training.md").read_text(encoding="utf-8").partition("## One page about a run")[2]
    page, commands = " ".join(page.split()), (repo_root / "docs" / "reference.md").read_text(encoding="utf-8")
    options = [
        text for value in inspect.signature(report, eval_str=True).parameters.values() for text in declared(value)
    ]
    for option in ("--open", "--format", "-o"):
        assert option in options and option in page
    assert "hf-neuron-moe report RUN_DIR --open" in commands and "report RUN_DIR --format md" in commands
    assert f"at most {MOST_POINTS:,} points" in page and f"below {FLOOR.value:g} dB" in page
    extras = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert "[report]" in page and all(set(extras["report"]) <= set(extras[of]) for of in ("train", "test"))


def test_module_names_are_shortened() -> None:
    assert short_names(["m.layers.0.mlp", "m.layers.10.mlp"]) == ["0.mlp", "10.mlp"]
    assert short_names(["m.mlp"]) == ["mlp"]


def test_modules_below_the_floor_are_named_with_what_to_do(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert "No module is below 24 dB" in Page(render(read_runs(tmp_path))).text()
    file = tmp_path / "neuron_moe" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"sqnr_db": 27.5', '"sqnr_db": 20.5'))
    page = Page(render(read_runs(tmp_path)))
    assert "model.layers.0.mlp (input, step 6)" in page.text()
    assert 'precision={"*": "mxfp8", "model.layers.0.mlp": "bf16"}' in page.text()
    drawing = page.drawings()["SQNR per module and tensor at step 6, and at earlier steps"]
    assert [frame["label"] for frame in drawing["frames"]] == ["2", "4", "6"]
    (frame,) = drawing["layout"]["shapes"]
    assert [frame[edge] for edge in ("x0", "x1", "y0", "y1")] == [-0.5, 2.5, -0.5, 0.5]
    (line,) = page.drawings()["Lowest SQNR of all modules over the steps, of weights and of inputs"]["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 24.0


def test_the_guards_alarms_are_framed_and_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert "Not watched: neuron_guard was off" in Page(render(read_runs(tmp_path))).text()
    write_guard(tmp_path, 100)
    assert "100 steps were looked at, and nothing left its band." in Page(render(read_runs(tmp_path))).text()
    write_guard(tmp_path, 100, alarm_in=68)
    page = Page(render(read_runs(tmp_path)))
    said = (
        "Alarms: 1, in 100 steps that were looked at. The first: worst, the largest error of a row, was 0.3, expected "
    )
    said += "at most 0.08, in the result y of expert 3 of down in model.layers.1.mlp, step 68."
    assert said in page.text() and "What to do: The result is not what its operands give" in page.text()
    assert f"reproduction {tmp_path.name}/neuron_moe/guard_step68.safetensors" in page.text()
    row = ["68", "down", "result y", "worst", "0.3", "at most 0.08", "3", "0", "model.layers.1.mlp"]
    assert " ".join(row) in " ".join(page.text().split())
    drawings = {
        alt.partition(",")[0]: drawn for alt, drawn in page.drawings().items() if "per block and product" in alt
    }
    columns = {
        "Lowest SQNR of the operands": ["gate_up"],  # of down, nothing was measured
        "Largest error of a row against a second computation": ["down"],
        "Largest magnitude of operands and results": ["gate_up"],
    }
    assert {name: drawing["data"][0]["x"] for name, drawing in drawings.items()} == columns
    for name, drawing in drawings.items():
        assert drawing["data"][0]["y"] == ["0.mlp", "1.mlp"]
        frames = {frame["label"]: frame for frame in drawing["frames"]}
        assert len(frames) <= 42 and {"1", "68", "100"} <= frames.keys()  # every third, the alarm's and the last
        boxes = [[box[edge] for edge in ("x0", "x1", "y0", "y1")] for box in frames["68"]["shapes"]]
        assert boxes == ([[-0.5, 0.5, 0.5, 1.5]] if columns[name] == ["down"] else [])
        assert not any(frame["shapes"] for label, frame in frames.items() if label != "68")
        assert drawing["data"][0]["z"] == frames["68"]["z"]  # the first alarm is what one sees
        assert drawing["layout"]["shapes"] == frames["68"]["shapes"]
    sliders = [attrs for tag, attrs in page.tags if tag == "input" and attrs.get("value") == "23"]
    assert len(sliders) == 3
    sqnr, error, magnitude = ({f["label"]: f["z"] for f in drawn["frames"]}["68"] for drawn in drawings.values())
    assert (sqnr[1], error, magnitude[1]) == ([37.8], [[-3.0], [-2.5]], [2.0])


def test_an_error_that_is_not_finite_is_drawn_as_the_largest_and_none_as_the_least(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_guard(tmp_path, 1, alarm_in=1)
    file = tmp_path / "neuron_moe" / "guard.jsonl"
    file.write_text(file.read_text().replace('"worst": 0.003', '"worst": null').replace("0.001", "0.0"))
    drawings = Page(render(read_runs(tmp_path))).drawings()
    (error,) = (drawn for alt, drawn in drawings.items() if alt.startswith("Largest error"))
    assert error["data"][0]["z"] == [[-8.0], [1.0]]


def test_the_first_expert_is_named_too_and_the_first_alarm_described(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_guard(tmp_path, 1, alarm_in=1)
    file = tmp_path / "neuron_moe" / "guard.jsonl"
    record = json.loads(file.read_text())
    first = record["alarms"][0] | {"expert": 0, "process": 1}
    file.write_text(json.dumps(record | {"alarms": [first, first | {"expert": 2, "product": "gate_up"}]}) + "\n")
    text = " ".join(Page(render(read_runs(tmp_path))).text().split())
    assert "Alarms: 2, in 1 steps" in text and "in the result y of expert 0 of down in model.layers.1.mlp" in text
    assert "1 down result y worst 0.3 at most 0.08 0 1 model.layers.1.mlp" in text
    record["blocks"]["model.layers.1.mlp"]["gate_up"]["weights"]["sqnr_db"] = 20.0
    steps = [record | {"step": step} for step in range(1, 61)]
    file.write_text("".join(json.dumps(step) + "\n" for step in steps))
    drawings = Page(render(read_runs(tmp_path))).drawings().items()
    (sqnr,) = (drawn for alt, drawn in drawings if alt.startswith("Lowest SQNR of the operands"))
    assert {*map(str, range(1, 41)), "60"} <= {frame["label"] for frame in sqnr["frames"]}
    assert sqnr["data"][0]["z"][1] == [20.0], "the lower one of both operands"


def test_names_of_strangers_stay_text(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><a href='https://x.y'>&lt;"
    write_run(tmp_path / "run", seed=0)
    file = tmp_path / "run" / "neuron_moe" / "run.json"
    run = json.loads(file.read_text()) | {"model": name}
    run["config"]["activations"] = name
    run["environment"] = {name: name}
    file.write_text(json.dumps(run))
    metrics = tmp_path / "run" / "neuron_moe" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("model.layers.0.mlp", "=1+1" + name))
    text = render(read_runs(tmp_path))
    page = Page(text)
    assert sum(tag == "script" and not attrs for tag, attrs in page.tags) == 2  # plotly.js and ours
    assert not [attrs for tag, attrs in page.tags if tag == "a" and "download" not in attrs]
    assert name in page.text() and "<script>alert" not in text
    drawn = json.dumps(list(page.drawings().values()))
    assert "alert(1)" in drawn and "<a" not in drawn  # plotly.js makes links of tags
    assert any(cell.startswith("'=1+1") for file in page.files() for row in file for cell in row)
    markdown = render(read_runs(tmp_path), "md")
    assert "alert" in markdown and "<script" not in markdown.replace("\\<", "")


def test_scripts_run_by_their_checksum_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = Page(render(read_runs(tmp_path)))
    (policy,) = [attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs]
    scripts = [text for text in page.data if not text.startswith("{")]
    sums = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(sums) == 2 and " ".join(f"'sha256-{each}'" for each in sums) in str(policy)
    assert str(policy).startswith("default-src 'none';")


def test_the_same_facts_as_markdown_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither needs plotly or jinja2, which the page names where they are missing."""
    write_run(tmp_path, steps=40, evaluated=3)
    contents = read_runs(tmp_path)
    titles = Page(render(contents)).figures()
    for module in ("plotly", "plotly.offline", "jinja2"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused(ReportError, "the HTML page", "pip install plotly jinja2"):
        write_report(contents, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    found = json.loads(render(contents, "json"))
    figures = [figure for section in found["sections"] for figure in section["figures"]]
    assert [figure["alt"] for figure in figures] == titles
    assert figures[0]["columns"][0] == "step" and len(figures[0]["rows"]) == 40
    markdown = render(contents, "md")
    assert "## Runs" in markdown and "(12 of 40 rows)" in markdown
    for block in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """As Python reads names in an ASCII locale: bytes that it cannot decode are halves of surrogates."""
    folder = tmp_path / os.fsdecode(b"run \xff")
    write_run(folder)
    write_report(read_runs(folder), tmp_path / "page.md", "md")
    assert "run ?" in (tmp_path / "page.md").read_text(encoding="utf-8")

"""Patched models on several processes compute what one process computes: losses, gradients, single blocks.

The cells of one number of processes run in one group (layout_driver.py). ``--all-layouts`` adds every model, layout and
precision to those that always run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_neuron_moe import parity
from tests.distributed import cells
from tests.distributed.launch import launch
from tests.distributed.layout_driver import FP32
from tests.shared_runs import collected, made_once

DRIVER = "tests.distributed.layout_driver"
OF_FORMAT = 1.0
"""The layout changes the last bits of a block's input, which makes some values round the other way. Each is then off by
what the format's own rounding is, once for each process that rounds its share of a block's result. Gradients that
nearly cancel magnify that: one process in fp32 is 1e-5 from float64 for scalars of DeepSeek-V4, 150 roundings. So where
a layout is farther off, the limit is how far one process is whose weights were moved by a rounding."""
ROUNDINGS = 2.5e-3
"""A process rounds its share of a sum to bf16; the norm of one such rounding of random values is 1.7e-3 or less."""

Results = dict[str, dict[str, Any]]


def run(repo_root: Path, folder: Path, chosen: list[cells.Cell], processes: int) -> Results:
    """Run cells and their controls; of each, what the processes found."""
    controls = {control["name"]: control for control in map(cells.control, trained(chosen))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cells.json").write_text(json.dumps([*controls.values(), *chosen]), encoding="utf-8")
    ranks = launch(repo_root, DRIVER, folder, processes, seconds=20.0 * (len(chosen) + len(controls)) + 60)
    return {name: {key: value for rank in ranks for key, value in rank[name].items()} for name in ranks[0]}


def trained(chosen: list[cells.Cell]) -> list[cells.Cell]:
    """Those that train."""
    return [each for each in chosen if each.get("kind", "train") == "train"]


@pytest.fixture(scope="module")
def core(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made_once(tmp_path_factory, "core", lambda folder: run(repo_root, folder, cells.CORE, 2))


def chosen(request: pytest.FixtureRequest, among: list[cells.Cell]) -> list[cells.Cell]:
    """Those cells that this run has tests of."""
    names = {each["name"] for each in collected(request, "each")}
    return [each for each in among if each["name"] in names]


@pytest.fixture(scope="module")
def two(repo_root: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    others = [*cells.MEASURED, *cells.BUDGETS, cells.COMPILED, *cells.REFUSED.values()]
    wanted = [*chosen(request, cells.ALWAYS), *others]
    return made_once(tmp_path_factory, "two", lambda folder: run(repo_root, folder, wanted, 2))


@pytest.fixture(scope="module")
def four(repo_root: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    wanted = [*chosen(request, cells.ALWAYS_FOUR), cells.CUT_TWICE]
    return made_once(tmp_path_factory, "four", lambda folder: run(repo_root, folder, wanted, 4))


def check(each: cells.Cell, results: Results) -> None:
    """Compare one cell's figures with its limits."""
    found = results[each["name"]]
    assert not any(found["errors"]), found["errors"]
    if each.get("kind") == "inference":
        assert found["logits"] == 0.0
    elif each.get("kind") == "block":
        check_block(each, found)
    else:
        check_training(each, found, results[cells.control(each)["name"]])


def check_training(each: cells.Cell, found: dict[str, Any], control: dict[str, Any]) -> None:
    if each["precision"] == "fp32":
        assert found["loss"] <= found["loss_of_format"]
        # Where gradients nearly cancel (biases and norms of keys), stock models are farther off too.
        theirs = control.get("gradients", {})  # none of Llama 4: transformers 5.23 cannot train it so
        limits = {name: max(far, 2 * theirs.get(name, 0.0)) for name, far in found["of_format"].items()}
    else:
        shares = OF_FORMAT * each["layout"].get("tp", 1)
        assert found["loss"] <= found["loss_of_format"] * shares
        limits = {name: shares * far for name, far in found["of_format"].items()}
    far = {name: (value, limits[name]) for name, value in found["gradients"].items() if value > limits[name]}
    assert not far, far


def check_block(each: cells.Cell, found: dict[str, Any]) -> None:
    """Affinities and weights get the same gradients to the bit; results and dX are sums of rounded shares."""
    parallel, sums = "ep" in each["layout"], ("y", "dx")
    for name, far in found["gradients"].items():
        if name in sums:
            assert far <= (FP32 if each["precision"] == "fp32" else ROUNDINGS * (1 if parallel else 2)), name
        elif parallel or name != "daffinity":
            assert name in found["equal"], (name, far)
        else:
            assert far <= FP32, name  # its sum over the intermediate axis is cut


@pytest.mark.sampled(2)
@pytest.mark.parametrize("each", cells.CORE, ids=lambda each: each["name"])
def test_core(each: cells.Cell, core: Results) -> None:
    check(each, core)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("each", cells.ALWAYS, ids=lambda each: each["name"])
def test_two_processes(each: cells.Cell, two: Results) -> None:
    check(each, two)


@pytest.mark.slow
def test_metrics_count_every_token_once_and_know_idle_processes(two: Results) -> None:
    ep, both, tp, idle = (two[each["name"]] for each in cells.MEASURED)
    for found in (ep, both, tp):
        assert found["classes"] == ["MixtralExperts"]  # not FSDP's class of it
        assert sum(found["experts"]["load"]) == 4 * 16 * 2  # tokens of all rows, two experts each
        assert len(found["experts"]["load"]) == 8
    assert ep["experts"]["load"] == both["experts"]["load"] == tp["experts"]["load"]
    load = ep["experts"]["load"]
    assert ep["experts"]["process_load"] == [sum(load[:4]), sum(load[4:])]
    assert 1.0 < ep["logs"]["neuron/processes_per_token"] < 2.0
    assert "process_load" not in tp["experts"]
    assert idle["experts"]["process_load"] == [128, 0]
    assert idle["logs"]["neuron/idle_processes"] == 1.0 and idle["logs"]["neuron/processes_per_token"] == 1.0


@pytest.mark.slow
def test_a_compiled_block_computes_with_its_part_at_its_precision(two: Results) -> None:
    found = two[cells.COMPILED["name"]]
    assert not any(found["errors"]), found["errors"]
    assert found["equal"] and not found["warned"]


@pytest.mark.slow
@pytest.mark.parametrize("each", cells.BUDGETS, ids=lambda each: each["name"])
def test_processes_spend_a_budget_alike_on_what_each_saves(each: cells.Cell, two: Results) -> None:
    found = two[each["name"]]
    assert not any(found["errors"]), found["errors"]
    first, second = found["ranks"]
    assert first == second and first["of_report"] == first["of_blocks"] <= 96 * 1024 / 32
    if each["model"] == "llama":  # its parts fit, whole columns would not
        assert set(first["policies"].values()) == {"full"}


@pytest.mark.slow
@pytest.mark.parametrize("message", cells.REFUSED)
def test_what_is_refused_is_refused_on_every_process(message: str, two: Results) -> None:
    errors = two[cells.REFUSED[message]["name"]]["errors"]
    assert message in errors[0] and all(errors), errors


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("each", cells.ALWAYS_FOUR, ids=lambda each: each["name"])
def test_four_processes(each: cells.Cell, four: Results) -> None:
    check(each, four)


@pytest.mark.slow
def test_weights_that_transformers_loads_wrongly_are_refused(four: Results) -> None:
    errors = four[cells.CUT_TWICE["name"]]["errors"]
    assert all("FSDP cuts gate and up a second time" in error for error in errors), errors


@pytest.mark.parametrize(
    ("started", "layout", "message"),
    [
        ("1", "fsdp=8,ep=2", "takes 8 processes, got 1: use torchrun --nproc-per-node 8"),
        ("8", "fsdp=8,ep=2", "--rows must be a multiple of"),
        ("2", "ep=2", "ep must divide tp x fsdp x dp_replicate = 1, got 2: it adds no processes"),
    ],
)
def test_parity_names_the_processes_and_rows_that_a_layout_takes(
    started: str, layout: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", started)
    with pytest.raises(SystemExit):
        parity.main(["folder", "--layout", layout])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_every_other_cell(processes: int, request: pytest.FixtureRequest, repo_root: Path, tmp_path: Path) -> None:
    if not request.config.getoption("--all-layouts"):
        pytest.skip("--all-layouts runs it")
    layouts, done = (cells.TWO, cells.CORE + cells.ALWAYS) if processes == 2 else (cells.FOUR, cells.ALWAYS_FOUR)
    wrong = {}
    for model in cells.MODELS:  # in processes of its own: every mesh leaves threads that wake up all the time
        chosen = [each for each in cells.rest(layouts, done) if each["model"] == model]
        results = run(repo_root, tmp_path / model, chosen, processes)
        for each in chosen:
            try:
                check(each, results)
            except AssertionError as error:
                wrong[each["name"]] = str(error)
    assert not wrong

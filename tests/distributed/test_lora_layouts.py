"""LoRA on attention, dense layers and experts of models that transformers shards while loading: 2 and 4 processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.distributed.lora_driver import (
    ALWAYS,
    ALWAYS_ROUNDED,
    CONVERTED,
    NAMES,
    NAMES_OF_FOUR,
    REFUSED,
    ROUNDED,
    ROUNDED_OF_FOUR,
    TRAINER,
    Rounded,
)
from tests.shared_runs import made_once, shared_folder
from tests.tiny_models import tokens

pytestmark = pytest.mark.slow
ALL = NAMES + NAMES_OF_FOUR
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "lora")


def ranks_of(processes: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what each of so many processes wrote, of all cells."""
    every = request.config.getoption("--all-layouts")
    make = functools.partial(launched, processes=processes, options=("--all-layouts",) if every else ())
    return made_once(tmp_path_factory, "lora" if processes == 2 else "lora-of-four", make)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = ranks_of(2, request, tmp_path_factory)
    return ranks


@pytest.fixture(scope="module")
def found_of_four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = ranks_of(4, request, tmp_path_factory)
    return ranks


@pytest.fixture
def answers(name: str, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each process found in one cell."""
    if name not in ALWAYS and not request.config.getoption("--all-layouts"):
        pytest.skip("--all-layouts runs it")
    return [rank[name] for rank in request.getfixturevalue("found_of_four" if name in NAMES_OF_FOUR else "found")]


def launched(folder: Path, processes: int, options: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run all cells in so many processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.distributed.lora_driver", str(folder)]
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(processes)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(processes), *options],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        end = time.monotonic() + 240
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < end, "the processes wait for each other"
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for log in logs:
            log.seek(0)
    texts = [log.read()[-3000:] for log in logs]
    assert [rank.returncode for rank in ranks] == [0] * processes, "\n".join(texts)
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


@pytest.mark.parametrize("name", ALL)
def test_adapters_train_as_on_one_process(name: str, answers: list[dict[str, Any]]) -> None:
    for cell in answers:
        # The order of fp32 sums; a factor whose gradient is not summed, or averaged twice, is off by its own size.
        assert cell["loss"] <= 2e-6 and cell["worst"][1] <= 2e-6, cell["worst"]
        assert cell["count"] == (14 if "llama" in name else 18 if "qwen2" in name else 12)


@pytest.mark.parametrize("name", ALL)
def test_adapters_are_saved_whole_and_loaded_again(name: str, answers: list[dict[str, Any]]) -> None:
    for cell in answers:
        assert cell["adapters"] == [] and cell["loaded"] == []


@pytest.mark.parametrize("name", ALL)
def test_merged_weights_are_those_of_one_process(name: str, answers: list[dict[str, Any]]) -> None:
    for cell in answers:
        assert cell["names"] and cell["merged"] == [] and cell["merged_file"] == []
        assert cell["logits"] <= 2e-6, "the order of fp32 sums"


@pytest.mark.parametrize("name", ["llama-tp2", "mixtral-ep2-tp2"])
def test_saved_adapters_and_merged_weights_are_opened_in_stock(name: str, folder: Path, found: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / name.partition("-")[0])
    adapters = PeftModel.from_pretrained(base, folder / name / "many").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / name / "merged").eval()
    with torch.no_grad():
        one, other, plain = adapters(tokens()).logits, merged(tokens()).logits, adapters.unload()(tokens()).logits
    assert (one - other).abs().max() <= 2e-6 * other.abs().max(), "the order of fp32 sums"
    assert (plain - other).abs().max() > 1e-2 * other.abs().max()


@pytest.mark.parametrize("processes", ["found", "found_of_four"])
def test_the_trainer_makes_adapters_equal_and_averages_their_gradients(
    processes: str, request: pytest.FixtureRequest
) -> None:
    for answers in request.getfixturevalue(processes):
        one, many = answers[TRAINER]["losses"]
        assert len(one) == 4 and many == pytest.approx(one, rel=2e-6)


@pytest.mark.parametrize("each", ROUNDED + ROUNDED_OF_FOUR, ids="-".join)
def test_rounded_blocks_are_as_near_as_their_format(each: Rounded, request: pytest.FixtureRequest) -> None:
    """As for weights (tests/distributed): each process rounds its share of a block's result, and of its input's.

    Where no block is cut, equal tokens on every process give one process's gradients bit for bit.
    """
    if each not in ALWAYS_ROUNDED and not request.config.getoption("--all-layouts"):
        pytest.skip("--all-layouts runs it")
    family, layout, _ = each
    for rank in request.getfixturevalue("found_of_four" if each in ROUNDED_OF_FOUR else "found"):
        cell = rank["/".join(each)]
        assert len(cell["far"]) == (14 if family == "llama" else 12)
        assert ("unequal" in cell) == (layout in ("fsdp2", "replicate2", "fsdp2-replicate2"))
        far = {name: pair for name, pair in cell["far"].items() if not pair[0] <= 2 * pair[1]}
        assert not far and not cell.get("unequal"), (far, cell.get("unequal"))


def test_adapters_that_were_sized_before_patching_are_refused(found_of_four: list[dict[str, Any]]) -> None:
    for rank in found_of_four:
        assert "which peft took from the part that FSDP stores" in rank[REFUSED]["error"]
        assert "Call patch_model before get_peft_model" in rank[REFUSED]["error"]
        assert not rank[REFUSED]["patched"]


def test_biases_of_cut_factors_are_averaged_too_and_still_after_a_change_of_dtype(
    found_of_four: list[dict[str, Any]],
) -> None:
    for rank in found_of_four:
        gradients = rank[CONVERTED]["gradients"]
        assert len(gradients) == 6 and sum(name.endswith("bias") for name in gradients) == 2
        assert max(gradients.values()) <= 2e-6, gradients

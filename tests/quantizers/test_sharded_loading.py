"""Conversions that transformers shards while loading: each process reads its part, and all compute what one does."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.errors import ConversionError, SourceDamageError, UnsupportedModelError
from hf_neuron_moe.quantizers.placeholders import place
from hf_neuron_moe.quantizers.shard_layouts import read_stored
from hf_neuron_moe.quantizers.sharded import OpenFiles, StockWeight, stock_rows
from tests.quantizers.conftest import SIZES as INNER, UNEVEN, Converted, Source, load
from tests.refusals import refused
from tests.shared_runs import collected, made_once
from tests.tiny_models import tiny_config

pytest.importorskip("transformers.distributed.sharding_utils", reason="this transformers cannot shard while loading")
from tests.quantizers.sharded_driver import CELLS, CELLS_OF_FOUR, DIFFERING, SIZES, Cell

pytestmark = pytest.mark.filterwarnings("ignore:convert. .*left in source form")
LIMIT = 2e-6
"""Relative, of fp32 losses and gradients: sums in another order."""
MX_LIMIT = 5e-3
"""Relative, of gradients beside MX blocks that are divided: what a process returns is rounded to bf16 before it is
summed, which is 2^-9, and changes of this size move some activations to the next MXFP8 code."""
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(repo_root: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two processes saw of the cells that this run has tests of, and of those that others are compared with."""
    compared = [*DIFFERING, *(cell for cell in CELLS if cell.name == "mixtral-mxfp8:fsdp2")]
    cells = [cell for cell in CELLS if cell in [*collected(request, "cell"), *compared]]
    ranks: Ranks = made_once(tmp_path_factory, "sharded-loading", functools.partial(launched, repo_root, cells))
    return ranks


@pytest.fixture(scope="module")
def four(repo_root: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What four processes saw."""
    cells = [cell for cell in CELLS_OF_FOUR if cell in collected(request, "cell")]
    launch = functools.partial(launched, repo_root, cells, processes=4)
    ranks: Ranks = made_once(tmp_path_factory, "sharded-loading-of-four", launch)
    return ranks


def launched(repo_root: Path, cells: list[Cell], home: Path, processes: int = 2) -> Ranks:
    """Convert the sources of cells and load them in so many processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    for cell in cells:
        source = home / f"{cell.family}{cell.changes}"
        if not source.exists():
            torch.manual_seed(7)
            config = tiny_config(cell.family, **cell.config)
            AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(source)
        for each in {cell.folder: cell, cell.alone.folder: cell.alone}.values():
            if not (home / each.folder).exists():
                convert_checkpoint(source, home / each.folder, ConvertOptions(**each.options))
    command = [sys.executable, "-m", "tests.quantizers.sharded_driver", str(home)]
    started = []
    for rank in map(str, range(processes)):
        env = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        options: Any = {"cwd": repo_root, "env": env, "stderr": subprocess.PIPE, "start_new_session": True}
        started.append(
            subprocess.Popen([*command, rank, str(processes), *(cell.name for cell in cells)], text=True, **options)
        )
    try:
        shown = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in started] == [0] * processes, "\n".join(shown)
    return [json.loads((home / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_layout_computes_as_one_process_and_reads_its_part(two: Ranks, cell: Cell) -> None:
    check(cell, two)
    read = bytes_read(cell, two)
    if cell.quantized and cell.family == "mixtral" and "ep" in cell.layout:
        assert 2 * read[0] == sum(two[0]["mixtral-mxfp8:fsdp2"]["read"].values())
    if cell.options.get("tp_degree", 0) == cell.layout.get("tp") and "ep" not in cell.layout:
        assert all(name.endswith(f".tp{rank}") for rank in (0, 1) for name in two[rank][cell.name]["read"])
    if cell.options.get("ep_degree", 0) == cell.layout.get("ep"):
        names = [{name for name in rank[cell.name]["read"] if ".experts." in name} for rank in two]
        assert all(name.endswith(f".ep{rank}") for rank in (0, 1) for name in names[rank])


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS_OF_FOUR, ids=lambda cell: cell.name)
def test_four_processes(four: Ranks, cell: Cell) -> None:
    check(cell, four)


def check(cell: Cell, ranks: Ranks) -> None:
    """Compare weights, what is computed from them, what is saved and how many bytes were read with one process."""
    for rank in ranks:
        found = rank[cell.name]
        assert "error" not in found, found["trace"]
        assert (found["other"], found["names"]) == ([], [])
    first = ranks[0][cell.name]
    divided = cell.quantized and cell.layout != {"fsdp": 2}
    limit = MX_LIMIT if divided else LIMIT
    assert first["loss"] <= limit / (10 if divided else 1) and first["gradient"][1] <= limit, first
    assert ("adapters" in first) is cell.quantized
    assert first.get("adapters", ("", 0.0))[1] <= limit, first
    written, expected = first["saved"]
    assert written and written == expected and ("frozen MX base" in expected) is cell.quantized
    read = bytes_read(cell, ranks)
    assert len(set(read)) == 1
    if not cell.quantized and cell.family != "qwen2_moe":
        experts = 8 if "num_local_experts" in cell.config else 1
        weights = 3 * SIZES["hidden_size"] * SIZES["intermediate_size"] * experts
        assert read[0] == 2 * weights // len(ranks)  # of 2 bytes


def bytes_read(cell: Cell, ranks: Ranks) -> list[int]:
    """Return how many bytes of weights each process read."""
    return [sum(each for name, each in rank[cell.name]["read"].items() if "_bias" not in name) for rank in ranks]


@pytest.mark.slow
def test_ranks_with_different_conversions_end_with_one_error(two: Ranks) -> None:
    first, second = (rank["differing"]["error"] for rank in two)
    assert first == second and "stored form of model.layers.0.mlp.experts.down_proj must be the same" in first


PADDED = {"layout": "kernel", "pad": True}
SINGLE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"layout": "kernel"}),
    ("llama", {"layout": "fused", "tp_degree": 2}),
    ("llama", {**PADDED, "tp_degree": 2}),
    ("qwen2_moe", {**PADDED, "tp_degree": 2, "ep_degree": 2}),
    ("phi3", {**PADDED, "tp_degree": 2}),
    ("phi3", {**PADDED, "swizzle": True}),
    ("mixtral", {**PADDED, "tp_degree": 4}),
    ("gpt_oss", {**PADDED, "tp_degree": 2}),
    ("gpt_oss", {"layout": "fused"}),
    ("llama4", {"layout": "fused", "tp_degree": 2}),
    ("nemotron_h", {"layout": "kernel"}),
]
FAST = [SINGLE[3], SINGLE[4], SINGLE[7], SINGLE[9]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each not in FAST)) for each in SINGLE],
    ids=str,
)
def test_any_slice_of_a_stock_weight_is_read_from_any_conversion(
    source: Source, converted: Converted, family: str, options: dict[str, Any]
) -> None:
    sizes = UNEVEN if "pad" in options else INNER
    original, folder = source(family, sizes), converted(family, sizes, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(original))
    model.config.distributed_config = SimpleNamespace(tp_size=2)
    placement = place(model, read_stored(map(str, sorted(folder.glob("*.safetensors")))))
    assert placement.readings and not placement.loaders
    expected, draw = load(original).state_dict(), random.Random(3)
    with OpenFiles() as slices:
        for reading in placement.readings:
            candidate = reading.candidate
            transposed = candidate.form is not None and candidate.form.transposed
            for name, (role, rows_F) in stock_rows(candidate).items():
                value = expected[f"{candidate.name}.{name}"]
                weight = StockWeight(reading.stored[role], tuple(value.shape), rows_F, transposed, slices)
                assert weight.get_shape() == list(value.shape) and torch.equal(weight[...], value)
                for _ in range(4):
                    ends = [sorted(draw.sample(range(size + 1), 2)) for size in value.shape]
                    key = tuple(slice(*bounds) for bounds in ends)
                    assert torch.equal(weight[key], value[key]), (name, key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {"layout": "kernel", "tp_degree": 2}),
        ("mixtral", {"layout": "fused", "ep_degree": 2}),
        ("mixtral", {"precision": "mxfp8", "ep_degree": 4}),
        ("nemotron_h", {"precision": "mxfp8", "ep_degree": 2}),
    ],
    ids=str,
)
def test_parts_of_ranks_are_put_together_in_one_process(
    converted: Converted, family: str, options: dict[str, Any]
) -> None:
    whole = load(converted(family, **{name: value for name, value in options.items() if "degree" not in name}))
    model, report = AutoModelForCausalLM.from_pretrained(converted(family, **options), output_loading_info=True)
    assert not any(report.values()), report
    for (name, mine), (other, theirs) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert name == other and torch.equal(mine, theirs), name
    assert str(model) == str(whole)


def test_a_missing_part_and_sizes_that_do_not_divide(converted: Converted, tmp_path: Path) -> None:
    folder = converted("llama", tp_degree=2)
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    only_second = {name: each for name, each in read_stored(files).items() if each.tp_rank != 0}
    with refused(SourceDamageError, "tensor model.layers.0.mlp.down_proj.weight", got="those of .tp1"):
        place(model, only_second)
    only_first = {name: each for name, each in read_stored(files).items() if each.tp_rank != 1}
    with refused(ConversionError, "tensor model.layers.0.mlp.gate_up_proj.weight", "belong together"):
        place(model, only_first)


CODES: list[tuple[str, dict[str, Any], dict[str, int], str, str]] = [
    ("llama", {}, {"tp_size": 2}, "tp_degree", "--tp-degree 2"),
    ("mixtral", {}, {"tp_size": 2}, "tp_degree", "--tp-degree 2"),
    ("mixtral", {"tp_degree": 2}, {"tp_size": 4}, "tp_degree", "--tp-degree 4.*tp_size=2"),
    ("mixtral", {"tp_degree": 2}, {"fsdp_size": 2}, "tp_degree", "without --tp-degree"),
    ("mixtral", {"tp_degree": 2}, {"tp_size": 2, "ep_size": 2}, "tp_degree", "without --tp-degree"),
    ("mixtral", {}, {"fsdp_size": 3, "ep_size": 3}, "ep_size", "divides them .2, 4"),
    ("gpt_oss", {"tp_degree": 2}, {"tp_size": 2}, "distributed_config", "without biases"),
    ("llama4", {}, {"fsdp_size": 2, "ep_size": 2}, "distributed_config", "ids and weights"),
    ("llama_biased", {"tp_degree": 2}, {"tp_size": 2}, "distributed_config", "an MLP with biases"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "options", "sizes", "argument", "says"), CODES, ids=str)
def test_codes_that_a_layout_would_have_to_cut_are_refused(
    converted: Converted, family: str, options: dict[str, Any], sizes: dict[str, int], argument: str, says: str
) -> None:
    folder = converted(family, precision="mxfp8", **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.config.distributed_config = SimpleNamespace(**sizes)
    with refused(UnsupportedModelError, argument, says):
        place(model, read_stored(map(str, sorted(folder.glob("*.safetensors")))))

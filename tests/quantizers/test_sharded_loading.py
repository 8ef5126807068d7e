"""Conversions that transformers shards while loading: each process reads its part, and all compute what one does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.errors import ConversionError, SourceDamageError
from hf_neuron_moe.quantizers.placeholders import place
from hf_neuron_moe.quantizers.shard_layouts import read_stored
from hf_neuron_moe.quantizers.sharded import OpenFiles, StockWeight, stock_rows
from tests.quantizers.conftest import SIZES as INNER, UNEVEN, Converted, Source, load
from tests.refusals import refused
from tests.tiny_models import tiny_config

pytest.importorskip("transformers.distributed.sharding_utils", reason="this transformers cannot shard while loading")
from tests.quantizers.sharded_driver import CELLS, SIZES, Cell

LIMIT = 2e-6
"""Relative, of fp32 losses and gradients: sums in another order."""
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two processes saw."""
    home = tmp_path_factory.mktemp("sharded")
    for cell in CELLS:
        source = home / f"{cell.family}{cell.changes}"
        if not source.exists():
            changes = {"num_local_experts": 8, **cell.changes} if cell.family != "llama" else cell.changes
            torch.manual_seed(7)
            config = tiny_config(cell.family, **{**SIZES, **changes})
            AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(source)
        if not (home / cell.folder).exists():
            convert_checkpoint(source, home / cell.folder, ConvertOptions(**cell.options))
    command = [sys.executable, "-m", "tests.quantizers.sharded_driver", str(home)]
    started = []
    for rank in ("0", "1"):
        env = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        options: Any = {"cwd": repo_root, "env": env, "stderr": subprocess.PIPE, "start_new_session": True}
        started.append(subprocess.Popen([*command, rank], text=True, **options))
    try:
        shown = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in started] == [0, 0], "\n".join(shown)
    return [json.loads((home / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if not cell.refused], ids=lambda cell: cell.name)
def test_every_layout_computes_as_one_process_and_reads_its_part(two: Ranks, cell: Cell) -> None:
    for rank in two:
        found = rank[cell.name]
        assert "error" not in found, found["trace"]
        assert (found["other"], found["names"]) == ([], [[]])
        assert set(found["statuses"]) == {"patched"}
    first = two[0][cell.name]
    assert first["loss"] <= LIMIT and first["gradient"][1] <= LIMIT, first
    experts = 1 if cell.family in ("llama", "phi3") else 8
    weights = 3 * SIZES["hidden_size"] * SIZES["intermediate_size"] * experts
    assert [sum(rank[cell.name]["read"].values()) for rank in two] == [weights] * 2  # 2 bytes each, half of them


SINGLE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"layout": "kernel"}),
    ("llama", {"layout": "fused", "tp_degree": 2}),
    ("phi3", {"layout": "kernel", "tp_degree": 2}),
    ("phi3", {"layout": "kernel", "swizzle": True}),
    ("mixtral", {"layout": "kernel", "tp_degree": 4}),
    ("gpt_oss", {"layout": "kernel", "tp_degree": 2}),
    ("gpt_oss", {"layout": "fused"}),
    ("llama4", {"layout": "fused", "tp_degree": 2}),
    ("nemotron_h", {"layout": "kernel"}),
]


@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(("family", "options"), SINGLE, ids=str)
@pytest.mark.parametrize("pad", [False, True])
def test_any_slice_of_a_stock_weight_is_read_from_any_conversion(
    source: Source, converted: Converted, family: str, options: dict[str, Any], pad: bool
) -> None:
    if pad and options["layout"] == "fused":
        pytest.skip("fused layouts have no zeros")
    sizes = UNEVEN if pad else INNER
    original, folder = source(family, sizes), converted(family, sizes, pad=pad, **options)
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


@pytest.mark.parametrize("layout", ["kernel", "fused"])
def test_parts_of_ranks_in_bf16_are_put_together_in_one_process(converted: Converted, layout: str) -> None:
    whole = load(converted("mixtral", layout=layout))
    model = load(converted("mixtral", layout=layout, tp_degree=2))
    for (name, mine), (other, theirs) in zip(model.state_dict().items(), whole.state_dict().items(), strict=True):
        assert name == other and torch.equal(mine, theirs), name
    assert str(model) == str(whole)


def test_a_missing_part_and_sizes_that_do_not_divide(converted: Converted, tmp_path: Path) -> None:
    folder = converted("llama", tp_degree=2)
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    only_second = {name: each for name, each in read_stored(files).items() if each.tp_rank != 0}
    with refused(SourceDamageError, "tensor model.layers.0.mlp.down_proj.weight", got="those of 1"):
        place(model, only_second)
    only_first = {name: each for name, each in read_stored(files).items() if each.tp_rank != 1}
    with refused(ConversionError, "tensor model.layers.0.mlp.gate_up_proj.weight", "belong together"):
        place(model, only_first)

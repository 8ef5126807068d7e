"""Kernels compute with the parts that transformers' engine leaves to a process: columns, experts, sentinels.

The process is the first of two whose collectives do nothing, so that both backends return the same partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from hf_neuron_moe import patch_model, unpatch_model
from tests.neuron.small_runs import CASES, Case, train

distributed = pytest.importorskip("transformers.distributed", reason="this transformers cannot shard while loading")

LAYOUTS = {"tp": {"tp_size": 2}, "ep-tp": {"tp_size": 2, "ep_size": 2}}
WIDER = {"experts-mxfp8": 256, "experts-bf16": 128, "dense": 512, "dense-bf16": 512}
"""Intermediate sizes of which half is a size that the kernels take."""


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def losses(case: Case, folder: Path, layout: dict[str, int], backend: str) -> tuple[list[float], Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=distributed.DistributedConfig(**layout)
    )
    report = patch_model(model, {**case.options, "backend": backend})
    found = train(model.train(), rate=0.0)  # weights of two ranks would drift apart, since nothing is summed
    unpatch_model(model)
    return found, report


CELLS = [(name, layout) for name in WIDER for layout in LAYOUTS if layout == "tp" or "experts" in name]


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*each, marks=[] if each[0] == "experts-bf16" else pytest.mark.slow) for each in CELLS],
)
def test_kernels_compute_a_process_s_part(
    name: str, layout: str, machine: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    case = replace(CASES[name], sizes={**CASES[name].sizes, "intermediate_size": WIDER[name]})
    case.model(layers=1).save_pretrained(tmp_path / "model")
    expected, _ = losses(case, tmp_path / "model", LAYOUTS[layout], "torch")
    double = machine(target=case.target).double
    found, report = losses(case, tmp_path / "model", LAYOUTS[layout], "neuron")
    assert [entry.backend for entry in report.patched] == ["neuron"]
    assert len(double.launches) == 6, "three steps of one layer, forward and backward, on the kernels"
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=max(case.bound, 1e-6), atol=0)
    part = report.patched[0].notes[0]
    assert part == ("2 of 4 experts on each process" if layout == "ep-tp" else _columns(name)), part


def _columns(name: str) -> str:
    return f"{WIDER[name] // 2} of {WIDER[name]} columns of the intermediate axis on each process"

"""One of two processes that load conversions which transformers shards while loading.

    python -m tests.quantizers.sharded_driver FOLDER RANK

FOLDER has the conversions of :data:`CELLS`; what each cell came to goes to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import torch
import transformers.modeling_utils
from torch import Tensor, distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_neuron_moe import parity, patch_model, unpatch_model
from hf_neuron_moe.quantizers import sharded
from hf_neuron_moe.training.blocks import patched_blocks

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64}


@dataclass(frozen=True)
class Cell:
    """A family's conversion and the layout that it is loaded in."""

    family: str
    options: dict[str, Any]
    layout: dict[str, int]
    refused: str = ""  # the beginning of the error's message; empty where it loads
    changes: dict[str, Any] = field(default_factory=dict)  # of the configuration

    @property
    def folder(self) -> str:
        """Name of the conversion's folder."""
        return "-".join(map(str, (self.family, *self.options.values(), *self.changes.values())))

    @property
    def name(self) -> str:
        """Name of the cell."""
        return f"{self.folder}:{','.join(f'{name}{size}' for name, size in self.layout.items())}"


TP, FSDP, EP, EP_TP = {"tp": 2}, {"fsdp": 2}, {"ep": 2, "fsdp": 2}, {"ep": 2, "tp": 2}
KERNEL, FUSED = {"precision": "bf16"}, {"precision": "bf16", "layout": "fused"}
PARTS = {**KERNEL, "tp_degree": 2}
CELLS = (
    *(Cell("mixtral", KERNEL, layout) for layout in (TP, FSDP, EP, EP_TP)),
    Cell("mixtral", FUSED, TP),
    Cell("mixtral", FUSED, EP),
    Cell("llama", KERNEL, TP),
    Cell("llama", FUSED, FSDP),
    Cell("phi3", KERNEL, TP),
    Cell("gpt_oss", KERNEL, EP),
    Cell("mixtral", PARTS, TP),
    Cell("mixtral", PARTS, EP),
    Cell("llama", {**PARTS, "tp_degree": 4}, TP),
    Cell("llama", {**PARTS, "layout": "fused"}, FSDP),
)


class Counting:
    """A safetensors file that counts the bytes of what is read from it, by name."""

    read: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **options: Any) -> None:
        self.file = safetensors.safe_open(*args, **options)

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_slice(self, name: str) -> Any:
        """Return a tensor's slices, which count."""
        return _Slices(name, self.file.get_slice(name))


class _Slices:
    def __init__(self, name: str, slices: Any) -> None:
        self.name, self.slices = name, slices

    def __getattr__(self, name: str) -> Any:
        return getattr(self.slices, name)

    def __getitem__(self, key: Any) -> Tensor:
        found: Tensor = self.slices[key]
        Counting.read[self.name] += found.nbytes
        return found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what is read from checkpoints."""
    Counting.read = Counter()
    homes: tuple[Any, ...] = (sharded, transformers.modeling_utils)
    for home in homes:
        home.safe_open = Counting
    try:
        yield Counting.read
    finally:
        for home in homes:
            home.safe_open = safetensors.safe_open


def load(folder: Path, layout: dict[str, int]) -> Any:
    """Return the patched model, in fp32."""
    options: dict[str, Any] = {"dtype": torch.float32}
    if layout:
        sizes: Any = {f"{name}_size": size for name, size in layout.items()}
        options["distributed_config"] = DistributedConfig(**sizes)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def whole(tensor: Any) -> Tensor:
    """Return a tensor of all processes."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def run(home: Path, cell: Cell, expected: dict[str, Any]) -> dict[str, Any]:
    """Load, compare every weight, train two steps in fp32 and compare with one process."""
    folder, rank = home / cell.folder, dist.get_rank()
    trial = parity.Trial(str(folder), cell.layout, steps=2, rows=2, tokens=24)
    if folder.name not in expected:
        model = load(folder, {})
        assert {block.neuron_config.weights for block in patched_blocks(model).values()} == {
            cell.options.get("layout", "kernel").replace("fused", "stock")
        }
        precision = unpatch_model(model).patched[0].precision
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
        patch_model(model, {"precision": "fp32"})
        expected[folder.name] = precision, values, parity.train(trial, model.train())
    precision, values, alone = expected[folder.name]
    with counted() as read:
        model = load(folder, cell.layout)
    report = unpatch_model(model)
    assert {entry.precision for entry in report.patched} == {precision}
    found = {name: whole(param) for name, param in model.named_parameters()}
    other = [name for name, value in values.items() if not torch.equal(found[name], value)]
    patch_model(model, {"precision": "fp32"})
    together = parity.train(trial, model.train(), rank // cell.layout.get("tp", 1), trial.batches)
    result = parity.compare(alone, together)
    return {
        "other": other,
        "names": [sorted(values.keys() ^ found.keys())],
        "statuses": [entry.status for entry in report.entries],
        "loss": result.loss,
        "gradient": result.worst,
        "read": {name: count for name, count in read.items() if "gate_up" in name or "down_proj" in name},
    }


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` came to, on no process before all are through."""
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - the other process would wait for this one
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    dist.barrier()
    return found


def main(home: Path, rank: int) -> None:
    """Run all cells."""
    options: Any = {"init_method": f"file://{home}/meeting", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)
    expected: dict[str, Any] = {}
    found = {cell.name: attempt(lambda cell=cell: run(home, cell, expected)) for cell in CELLS}  # type: ignore[misc]
    (home / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))

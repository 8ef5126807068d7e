"""One of two or four processes that load conversions which transformers shards while loading.

    python -m tests.quantizers.sharded_driver FOLDER RANK PROCESSES

FOLDER has the conversions of :data:`CELLS` or :data:`CELLS_OF_FOUR`; what each cell came to goes to FOLDER/rank-N.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import torch
import transformers.modeling_utils
from peft import LoraConfig, get_peft_model
from torch import Tensor, distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_neuron_moe import parity, patch_model, unpatch_model
from hf_neuron_moe.errors import NeuronMoEError
from hf_neuron_moe.quantizers import sharded
from tests.distributed.lora_driver import filled

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64}


@dataclass(frozen=True)
class Cell:
    """A family's conversion and the layout that it is loaded in."""

    family: str
    options: dict[str, Any]
    layout: dict[str, int]
    changes: dict[str, Any] = field(default_factory=dict)  # of the configuration

    @property
    def quantized(self) -> bool:
        """Whether the weights are codes."""
        return self.options["precision"] != "bf16"

    @property
    def alone(self) -> Cell:
        """The same with whole weights."""
        return replace(self, options={name: value for name, value in self.options.items() if "degree" not in name})

    @property
    def config(self) -> dict[str, Any]:
        """What is changed in the family's tiny configuration."""
        experts = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "qwen2_moe": "num_experts"}
        count = {experts[self.family]: 8} if self.family in experts else {}
        return {**SIZES, **count, **self.changes}

    @property
    def folder(self) -> str:
        """Name of the conversion's folder."""
        options = (f"{name}_{value}" for name, value in self.options.items() if name != "precision")
        return "-".join(map(str, (self.family, self.options["precision"], *options, *self.changes.values())))

    @property
    def name(self) -> str:
        """Name of the cell."""
        return f"{self.folder}:{','.join(f'{name}{size}' for name, size in self.layout.items())}"


TP, FSDP, EP, EP_TP = {"tp": 2}, {"fsdp": 2}, {"ep": 2, "fsdp": 2}, {"ep": 2, "tp": 2}
KERNEL, FUSED = {"precision": "bf16"}, {"precision": "bf16", "layout": "fused"}
PARTS = {**KERNEL, "tp_degree": 2}
MX = {"precision": "mxfp8"}
WIDE = {"intermediate_size": 1024}  # a part of 512, whose groups are those of the whole
DEALT = {**KERNEL, "ep_degree": 2}
SHARED = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
UNGATED = {"layers_block_type": ["moe", "attention"], "num_hidden_layers": 2, "moe_intermediate_size": 512}
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
    Cell("mixtral", DEALT, EP),
    Cell("mixtral", {**DEALT, "ep_degree": 4}, TP),
    Cell("qwen2_moe", {**DEALT, "tp_degree": 2}, EP_TP, changes=SHARED),
    Cell("mixtral", {**MX, "ep_degree": 2}, EP),
    Cell("mixtral", {**MX, "ep_degree": 4}, EP_TP),
    Cell("mixtral", MX, FSDP),
    Cell("mixtral", MX, EP),
    Cell("mixtral", MX, EP_TP),
    Cell("gpt_oss", {**MX, "purpose": "inference", "pad": True}, EP),
    Cell("nemotron_h", {**MX, "ep_degree": 2}, EP, changes=UNGATED),
    Cell("mixtral", {**MX, "tp_degree": 2}, TP, changes=WIDE),
    Cell("llama", {**MX, "tp_degree": 2}, TP, changes=WIDE),
    Cell("llama_biased", MX, FSDP),
    Cell("llama", {**MX, "layout": "fused", "tp_degree": 2}, TP, changes=WIDE),
)
DIFFERING = (CELLS[0], CELLS[4])
"""Of two conversions, where each process loads one."""

CELLS_OF_FOUR = (
    Cell("mixtral", KERNEL, {"ep": 2, "fsdp": 4}),
    Cell("mixtral", DEALT, {"ep": 2, "tp": 2, "fsdp": 2}),
    Cell("llama", {**PARTS, "layout": "fused"}, {"tp": 2, "fsdp": 2}),
    Cell("mixtral", MX, {"ep": 4, "fsdp": 4}),
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
    """Load, compare every weight, train two steps and compare with one process: bf16 conversions in fp32."""
    rank, alone = dist.get_rank(), cell.alone
    trial = parity.Trial("", cell.layout, steps=2, rows=dist.get_world_size(), tokens=24)
    if alone.folder not in expected:
        model = load(home / alone.folder, {})
        saved = saved_by(model, home / "saved" / f"{alone.folder}-{rank}")
        values = in_fp32(model, alone)
        first = adapted(model, trial) if alone.quantized else None
        model = model if first is None else load(home / alone.folder, {})
        expected[alone.folder] = values, first, parity.train(trial, model.train()), saved
    values, first, one, saved = expected[alone.folder]
    with counted() as read:
        model = load(home / cell.folder, cell.layout)
    written = saved_by(model, home / "saved" / cell.name.replace(":", "-"))
    found = in_fp32(model, cell)
    other = [name for name, value in values.items() if not torch.equal(found[name], value)]
    part = rank // cell.layout.get("tp", 1)
    together = parity.train(trial, model.train(), part, trial.batches)
    result = parity.compare(one, together)
    summary = {
        "other": other,
        "names": sorted(values.keys() ^ found.keys()),
        "loss": result.loss,
        "gradient": result.worst,
        "read": {name: count for name, count in read.items() if "gate_up" in name or "down_proj" in name},
    }
    if rank == 0:  # which writes
        summary["saved"] = [written, saved]
    if first is not None:
        second = adapted(load(home / cell.folder, cell.layout), trial, part)
        summary["adapters"] = parity.compare(first, second).worst
    return summary


def saved_by(model: Any, folder: Path) -> Any:
    """Return names and digests of the files of weights that are saved, or what is said instead."""
    try:
        model.save_pretrained(folder)
    except NeuronMoEError as error:
        return str(error)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}


def in_fp32(model: Any, cell: Cell) -> dict[str, Tensor]:
    """Return the stock parameters of all processes; a bf16 conversion's blocks compute in fp32 afterwards."""
    if cell.quantized:
        return {name: whole(param).clone() for name, param in model.named_parameters()}
    report = unpatch_model(model)
    assert {entry.precision for entry in report.entries} == {"bf16"}
    values = {name: whole(param).clone() for name, param in model.named_parameters()}
    patch_model(model, {"precision": "fp32"})
    return values


def adapted(model: Any, trial: parity.Trial, part: int | None = None) -> parity.Run:
    """Return the gradients of adapters on attention, after one step, averaged as the Trainer does."""
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])).train()
    filled(model)
    alone = part is None
    ids = parity.batch_of(trial, SIZES["vocab_size"], 0, part or 0, 1 if alone else trial.batches)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    for gradient in gradients.values() if not alone else ():
        if not hasattr(gradient, "full_tensor"):
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return parity.Run([1.0], {name: parity.whole(gradient) for name, gradient in gradients.items()})


def differing(home: Path) -> dict[str, Any]:
    """Load another conversion on each rank."""
    cell = DIFFERING[dist.get_rank()]
    load(home / cell.folder, cell.layout)
    return {}


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` came to, on no process before all are through."""
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - the other process would wait for this one
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    dist.barrier()
    return found


def main(home: Path, rank: int, processes: int, names: list[str]) -> None:
    """Run the cells of these names."""
    options: Any = {"init_method": f"file://{home}/meeting", "rank": rank, "world_size": processes}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)
    expected: dict[str, Any] = {}
    chosen = [cell for cell in (CELLS if processes == 2 else CELLS_OF_FOUR) if cell.name in names]
    found = {cell.name: attempt(lambda cell=cell: run(home, cell, expected)) for cell in chosen}  # type: ignore[misc]
    if processes == 2:
        found["differing"] = attempt(lambda: differing(home))
    (home / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])

"""Train a small model sharded by FSDP2, over both backends; also as two processes on the contract double.

    torchrun --nproc-per-node 2 -m tests.neuron.shard_driver FOLDER CASE ...

Every process writes what it saw to FOLDER/CASE-rank-N.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends import get_backend
from tests.neuron.double.contract import Double
from tests.neuron.double.install import installed
from tests.neuron.small_runs import CASES, Case
from tests.tiny_models import tokens


def shard(model: Any) -> None:
    """Shard every decoder layer, then the rest, over all processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def losses_and_copies(
    case: Case, backend: str, wrap: Callable[[nn.Module], None] = shard, **options: Any
) -> tuple[list[float], list[int]]:
    """Losses of three steps of two layers, and the bytes of weight copies after every forward and every backward."""
    model = case.model(layers=2)
    patch_model(model, {**case.options, "backend": backend, **options})
    wrap(model)
    return _train(model, backend)


def _train(model: nn.Module, backend: str) -> tuple[list[float], list[int]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, copies = [], []
    for step in range(3):
        # Tokens of seed 0 have two experts so close (0.105, 0.103) that the processor decides between them.
        ids = tokens(2, 12, seed=10 + step)
        loss = model(input_ids=ids, labels=ids).loss
        copies.append(_copies(backend))
        loss.backward()
        copies.append(_copies(backend))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copies


def _copies(backend: str) -> int:
    return 0 if backend == "torch" else int(get_backend(backend).prepared_bytes)  # type: ignore[attr-defined]


def main(name: str, folder: Path) -> None:
    """Train over the torch backend and over the Neuron backend on a machine of this process's own."""
    rank, case = dist.get_rank(), CASES[name]
    expected, _ = losses_and_copies(case, "torch", weights="stock")
    with installed(folder / f"{name}-site-{rank}", Double(target=case.target)) as machine:
        model: Any = case.model(layers=2)
        patch_model(model, {**case.options, "backend": "neuron", "weights": "stock"})
        shard(model)
        weight = next(param for name, param in model.named_parameters() if "mlp" in name and param.numel() > 2048)
        losses, copies = _train(model, "neuron")
        launches = len(machine.double.launches)
    result = {
        "torch": expected,
        "neuron": losses,
        "copies": copies,
        "launches": launches,
        "local": weight.to_local().numel(),
        "whole": weight.numel(),
    }
    (folder / f"{name}-rank-{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case_name in sys.argv[2:]:
        main(case_name, Path(sys.argv[1]))
    dist.destroy_process_group()

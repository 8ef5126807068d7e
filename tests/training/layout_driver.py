"""One process of a group that loads tiny models under transformers' layouts, trains a step, and measures what it holds.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 python -m tests.training.layout_driver FOLDER CELL [CELL ...]

A cell is a family and a layout in JSON. Every process writes what it measured to FOLDER/rank-N.json. Under expert
parallelism tokens choose all sets of experts in turn, so that each rank's load is known.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_neuron_moe import NeuronMoEConfig, patch_model, unpatch_model
from hf_neuron_moe.training.saved_tensors import noting_saved, storages_of
from tests.tiny_models import tokens

BATCH, LENGTH = 2, 24
PATCHES = {
    f"{precision} {policy}": NeuronMoEConfig(precision=precision, activations=policy)
    for precision in ("bf16", "mxfp8")
    for policy in ("full", "minimal", "fp8", "recompute")
}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages on this rank."""
    return sum(storages_of(tensors).values())


def saved_by(model: nn.Module) -> tuple[int, Tensor]:
    """What the forward saves besides weights, and the loss."""
    ids = tokens(BATCH, LENGTH)
    labels = ids.clone()
    saved: dict[Any, int] = {}

    def note(storages: dict[Any, int]) -> None:
        gathered = storages_of(model.parameters())  # by FSDP, for the layer that runs
        saved.update({ref: size for ref, size in storages.items() if ref not in gathered})

    with noting_saved(storages_of([*model.parameters(), *model.buffers(), ids, labels]), note):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    return sum(saved.values()), loss


def choose_all_sets(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let the tokens choose every set of experts equally often, in turn."""
    hidden, ids, weights = args
    experts = module.get_parameter("gate_up_proj").shape[0]
    sets = torch.tensor(list(combinations(range(experts), ids.shape[1])))
    return hidden, sets[torch.arange(len(ids)) % len(sets)], weights


def measured(path: Path, sizes: dict[str, int]) -> dict[str, int]:
    """What this rank holds of the model at `path` after a training step."""
    layout = DistributedConfig(**{f"{name}_size": size for name, size in sizes.items()})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, distributed_config=layout).train()
    if layout.pp_size > 1:  # has no loss
        return {"parameters": bytes_of([*model.parameters(), *model.buffers()])}
    for module in model.modules():
        if layout.ep_size > 1 and hasattr(module, "gate_up_proj"):
            module.register_forward_pre_hook(choose_all_sets)
    optimizer = torch.optim.AdamW(model.parameters())
    found = {}
    for name, config in PATCHES.items():
        patch_model(model, config)
        found[name], _ = saved_by(model)
        unpatch_model(model)
    saved, loss = saved_by(model)
    loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return found | {
        "parameters": bytes_of([*model.parameters(), *model.buffers()]),
        "gradients": bytes_of(param.grad for param in model.parameters()),
        "states": bytes_of(states),
        "stock": saved,
    }


def main(folder: Path, cells: list[str]) -> None:
    """Measure every cell."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    found = {}
    for cell in cells:
        family, sizes = json.loads(cell)
        found[cell] = measured(folder / family, sizes)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])

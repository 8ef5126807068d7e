"""Runs cells of the layout matrix in one group of processes, each compared with one process.

    python -m tests.distributed.layout_driver FOLDER

FOLDER/cells.json has the cells; every process writes what it found to FOLDER/rank-N.json. The first one computes what
is expected, once for all cells with the same model and precision.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_neuron_moe import parity, patch_model
from hf_neuron_moe.modules.in_place import named_blocks
from hf_neuron_moe.patching import api
from hf_neuron_moe.patching.apply import report_of
from hf_neuron_moe.training.figures import logs_of
from hf_neuron_moe.training.metrics import TrainingMonitor
from tests.same_routing import SameRouting
from tests.tiny_models import tiny_model

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 256},
    "mixtral": {"intermediate_size": 256, "num_local_experts": 8},
    "mixtral_512": {"intermediate_size": 1024, "num_local_experts": 8, "num_hidden_layers": 1},
    "qwen2_moe": {"moe_intermediate_size": 256, "num_experts": 8, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 8},
    "gpt_oss": {"intermediate_size": 256, "num_local_experts": 8},
    "odd": {"intermediate_size": 129, "num_local_experts": 8},
    "phi3": {"intermediate_size": 256},
    "gemma3": {"intermediate_size": 256},
    "gemma4": {"intermediate_size": 256, "moe_intermediate_size": 256, "num_experts": 8},
    "llama4": {"intermediate_size": 256, "intermediate_size_mlp": 256, "num_local_experts": 8},
    "deepseek_v4": {"moe_intermediate_size": 256, "num_local_experts": 8},
    "nemotron_h": {"moe_intermediate_size": 256},
    "longcat_flash": {"expert_ffn_hidden_size": 256, "ffn_hidden_size": 256},
    "olmoe": {"intermediate_size": 256, "num_experts": 8},
}
"""Tiny models: I of a process is 128 where two share it, of ``mixtral_512`` 512, where MX groups stay whole."""
FAMILIES = {"mixtral_512": "mixtral", "odd": "mixtral"}
H = 128
FP32 = 2e-6
"""Sums in another order, relative to the norm."""
DRAWS = 12
"""Runs of one process with other roundings of the weights, where a layout is farther off than the format."""
APART = 2.0
"""Seconds for a rank that patched another model."""


Known = dict[str, tuple[parity.Run, list[Tensor]]]


def checkpoint(home: Path, name: str) -> str:
    """Return the folder of a tiny model, made by the first process."""
    folder = home / name
    if dist.get_rank() == 0 and not folder.exists():
        torch.manual_seed(7)
        tiny_model(FAMILIES.get(name, name), hidden_size=H, **SIZES[name]).save_pretrained(folder)
    dist.barrier()
    return str(folder)


def to_first_experts(model: nn.Module) -> nn.Module:
    """Send every token to experts 0 and 1, whatever its router says: other processes have no tokens."""

    def choose(router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = outputs
        return logits, weights, torch.arange(chosen.shape[1]).expand_as(chosen)

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(choose)
    return model


def trained(cell: dict[str, Any], trial: parity.Trial, known: Known) -> dict[str, Any]:
    """Compare losses and gradients."""
    rank, parts = dist.get_rank(), trial.batches
    told: list[Any] = [None]
    if rank == 0:
        expected, told[0] = alone(cell, trial, known)
    dist.broadcast_object_list(told)
    chosen, part = told[0], rank // trial.layout.get("tp", 1)
    model = parity.load(trial, distributed=True)
    with SameRouting(chosen, part, parts) as routing:
        actual = parity.train(trial, model, part, parts)
    assert len(routing.chosen) == len(chosen)
    changed = sum(routing.changed[: len(chosen) // trial.steps])
    assert cell["precision"] != "fp32" or not changed, f"{changed} choices differ in fp32, in the first step"
    if rank:
        return {}
    found = parity.compare(expected, actual)
    result = {"loss": found.loss, "worst": found.worst, "gradients": found.gradients}
    if cell["precision"] is None:
        return result
    limits, shares, rounding = [parity.Comparison(FP32, dict.fromkeys(found.gradients, FP32), [])], 1, 2**-24
    if cell["precision"] in ("bf16", "mxfp8"):
        other = {**cell, "precision": "fp32", "routing": cell["precision"]}
        exact, _ = alone(other, replace(trial, patch={"precision": "fp32"}), known, chosen)
        limits, shares, rounding = [parity.compare(exact, expected)], trial.layout.get("tp", 1), 2**-9
    if not within(found, limits[0], shares):
        for seed in range(DRAWS):
            moved = functools.partial(moved_weights, trial, rounding, seed)
            run, _ = alone({**cell, "moved": seed}, replace(trial, prepare=moved), known, chosen)
            limits.append(parity.compare(run, expected))
    result |= {"loss_of_format": max(each.loss for each in limits)}
    return result | {"of_format": {name: max(each.gradients[name] for each in limits) for name in found.gradients}}


def within(found: parity.Comparison, limit: parity.Comparison, shares: int) -> bool:
    """Return whether losses and gradients are no farther off than a limit for each share."""
    near = all(far <= shares * limit.gradients[name] for name, far in found.gradients.items())
    return near and found.loss <= shares * limit.loss


def moved_weights(trial: parity.Trial, rounding: float, seed: int, model: nn.Module) -> nn.Module:
    """Move every weight by at most one `rounding`, relative."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + rounding * (2 * torch.rand(param.shape, generator=generator) - 1))
    return model if trial.prepare is None else trial.prepare(model)


def alone(cell: dict[str, Any], trial: parity.Trial, known: Known, chosen: list[Tensor] | None = None) -> Any:
    """Return the run on one process and what its routers chose, the same for all layouts."""
    apart = ("name", "layout", "plan", "exchange")
    key = json.dumps({name: value for name, value in cell.items() if name not in apart}, sort_keys=True)
    if key not in known:
        model = parity.load(trial, distributed=False)
        with SameRouting(chosen) as routing:
            known[key] = (parity.train(trial, model), routing.chosen)
    return known[key]


def block(cell: dict[str, Any], trial: parity.Trial) -> dict[str, Any]:
    """Compare one experts block, given the same tokens, ids and affinities: result and all gradients."""
    rank, parts = dist.get_rank() // trial.layout.get("tp", 1), trial.batches
    generator = torch.Generator().manual_seed(3)
    T, K, E = cell.get("tokens", 64), 2, 8
    x_TH = torch.randn(T, H, generator=generator).to(torch.bfloat16).float()
    dout_TH = torch.randn(T, H, generator=generator).to(torch.bfloat16).float()
    ids_TK = torch.rand(T, E, generator=generator).topk(K).indices
    weight_TK = torch.rand(T, K, generator=generator) + 0.1

    def run(model: Any, part: int, parts: int) -> dict[str, Tensor]:
        experts = model.model.layers[0].mlp.experts
        x, dout, ids, weight = (t.chunk(parts)[part].clone() for t in (x_TH, dout_TH, ids_TK, weight_TK))
        y = experts(x.requires_grad_(), ids, weight.requires_grad_())
        (y.float() * dout).sum().backward()
        assert x.grad is not None and weight.grad is not None
        own = {"y": y.detach(), "dx": x.grad, "daffinity": weight.grad}
        return own | {name: parity.whole(param.grad) * parts for name, param in experts.named_parameters()}

    found = run(parity.load(trial, distributed=True), rank, parts)
    for name in ("y", "dx", "daffinity") if parts > 1 else ():
        gathered = [torch.empty_like(found[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, found[name].contiguous())
        found[name] = torch.cat(gathered[:: dist.get_world_size() // parts])
    if dist.get_rank():
        return {}
    expected = run(parity.load(trial, distributed=False), 0, 1)
    apart = {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected}
    return {"gradients": apart, "equal": [name for name in expected if torch.equal(found[name], expected[name])]}


def inference(trial: parity.Trial) -> dict[str, Any]:
    """Compare logits; pipeline stages but the last return none."""
    ids = parity.batch_of(trial, 64, 0, 0, 1)
    with torch.no_grad():
        found = parity.load(trial, distributed=True).eval()(ids).logits
        if dist.get_rank() != dist.get_world_size() - 1:
            return {}
        expected = parity.load(trial, distributed=False).eval()(ids).logits
    return {"logits": ((found - expected).norm() / expected.norm()).item()}


def compiled(trial: parity.Trial) -> dict[str, Any]:
    """Compare a compiled dense block with itself."""
    mlp = parity.load(trial, distributed=True).model.layers[0].mlp
    x = torch.randn(1, 8, H, generator=torch.Generator().manual_seed(3))
    found = torch.compile(mlp, backend="eager")(x)
    return {"equal": torch.equal(found, mlp(x)), "warned": mlp.neuron_warned}


def measured(trial: parity.Trial) -> dict[str, Any]:
    """Return what is logged of one step."""
    model = parity.load(trial, distributed=True)
    monitor = TrainingMonitor(model)
    monitor.attach()
    ids = parity.batch_of(trial, 64, 0, dist.get_rank() // trial.layout.get("tp", 1), trial.batches)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    monitor.end_step()
    record = monitor.take()
    report = report_of(model)
    assert report is not None
    classes = sorted({entry.class_name for entry in report.entries})
    return {"classes": classes, "logs": logs_of(record), "experts": next(iter(record["experts"].values()))}


def refused(cell: dict[str, Any], trial: parity.Trial, patch: dict[str, Any]) -> dict[str, Any]:
    """Do what every process must raise an error for."""
    model, first = parity.load(trial, distributed=True), dist.get_rank() == 0
    if cell.get("apart") and not first:  # a rank that is elsewhere
        patch_model(parity.load(trial, distributed=False), patch)
        time.sleep(2 * APART + 1)
    patch_model(model, patch if first else {**patch, **cell.get("on_rank_1", {})})
    if cell.get("copied"):
        copy.deepcopy(model)
    return {}


def budgeted(cell: dict[str, Any], trial: parity.Trial) -> dict[str, Any]:
    """Patch within a budget of bytes: which policy each block got, what blocks and report say, what a step saves."""
    model = parity.load(trial, distributed=True)
    report = report_of(model)
    assert report is not None
    blocks = [block for _, block in named_blocks(model)]
    run = parity.train(replace(trial, steps=1), model, dist.get_rank() // trial.layout.get("tp", 1), trial.batches)
    mine = {
        "policies": {entry.name: str(entry.activations) for entry in report.patched},
        "of_report": sum(entry.saved_bytes_per_token or 0.0 for entry in report.patched),
        "of_blocks": sum(block.saved_bytes_per_token for block in blocks),
        "loss": run.losses[0],
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {"ranks": everyones}


def run(cell: dict[str, Any], home: Path, known: Known) -> dict[str, Any]:
    """Return what a cell comes to on this process."""
    patch = None if cell.get("precision") is None else {"precision": cell["precision"], **cell.get("options", {})}
    trial = parity.Trial(
        checkpoint(home, cell["model"]),
        cell["layout"],
        patch,
        cell.get("experts"),
        cell.get("exchange", "auto"),
        cell.get("plan"),
        steps=cell.get("steps", 4),
        rows=cell.get("rows", 4),
        tokens=cell.get("tokens", 16),
        checkpointing=cell.get("checkpointing", False),
        prepare=to_first_experts if cell.get("idle") else None,
    )
    match cell.get("kind", "train"):
        case "block":
            return block(cell, trial)
        case "inference":
            return inference(trial)
        case "compiled":
            return compiled(trial)
        case "measured":
            return measured(trial)
        case "budget":
            return budgeted(cell, trial)
        case "refused":
            return refused(cell, replace(trial, patch=None), patch or {})
    return trained(cell, trial, known)


def main(folder: Path) -> None:
    """Run all cells; a cell that raises on one process is noted on all."""
    cells = json.loads((folder / "cells.json").read_text(encoding="utf-8"))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", os.environ["RENDEZVOUS"], rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    api.APART_SECONDS = APART
    known: Known = {}
    results = {}
    for cell in cells:
        started = time.monotonic()
        try:
            result = run(cell, folder, known)
        except Exception as error:  # whatever it is, the others must hear of it
            logging.getLogger(__name__).exception(cell["name"])
            result = {"error": f"{type(error).__name__}: {error}"}
        everyones: list[Any] = [None] * world
        dist.all_gather_object(everyones, result.get("error"))
        results[cell["name"]] = {**result, "errors": everyones, "seconds": time.monotonic() - started}
    (folder / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

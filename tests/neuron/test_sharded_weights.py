"""FSDP2 over gloo: gathered weights are temporary, and so are the copies that kernels read of them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.experts import register_experts_implementation
from tests.neuron.shard_driver import losses_and_copies, shard
from tests.neuron.small_runs import CASES, DENSE, EXPERTS, EXPERTS_MX, close
from tests.tiny_models import tokens

Start = Callable[..., SimpleNamespace]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weights", ["stock", "kernel"])
@pytest.mark.parametrize("name", ["experts-mxfp8", "experts-bf16", pytest.param("dense", marks=pytest.mark.slow)])
def test_sharded_training_keeps_no_copies(name: str, weights: str, machine: Start, process_group: None) -> None:
    case = CASES[name]
    expected, _ = losses_and_copies(case, "torch", weights=weights)
    double = machine(target=case.target).double
    losses, copies = losses_and_copies(case, "neuron", weights=weights)
    assert close(losses, expected, case.bound), (losses, expected)
    assert len(set(expected)) == 3 and len(double.launches) == 12, "three steps of two layers on the kernels"
    assert copies == [0] * 6, "none after a forward, none after a backward"


def test_without_sharding_the_same_run_keeps_copies(machine: Start, process_group: None) -> None:
    machine()
    sharded, none = losses_and_copies(EXPERTS_MX, "neuron", weights="stock")
    losses, copies = losses_and_copies(EXPERTS_MX, "neuron", wrap=lambda model: None, weights="stock")
    assert losses == sharded
    assert min(copies) > max(none) == 0


def test_the_copies_of_one_block_are_what_a_sharded_run_needs_at_a_time(machine: Start, process_group: None) -> None:
    """The report's figure for FSDP: the most that any one call makes."""
    machine(target="trn2")
    model = EXPERTS.model(layers=2)
    report = patch_model(model, {**EXPERTS.options, "backend": "neuron", "weights": "stock"})
    shard(model)
    made: list[int] = []
    store = get_backend("neuron").without_copies.weights  # type: ignore[attr-defined]

    def counting(form: str, build: Any, *sources: Any, keep: bool = True) -> Any:
        copy = build(*sources)
        made.append(copy.nbytes)
        return copy

    store.get = counting
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    # Two layers, forward and backward, gate_up and down in each.
    assert len(made) == 8 and len(set(map(sum, zip(made[::2], made[1::2])))) == 1
    (of_one,) = {entry.weight_copy_bytes for entry in report.patched}
    assert made[0] + made[1] == of_one
    assert f"those of one block exist at a time: at most {of_one / 2**20:.1f} MiB" in str(report)
    assert f"{2 * of_one / 2**20:.1f} MiB, kept until the optimizer's step" in str(report)


def test_gathered_weights_are_freed_after_a_forward(machine: Start, process_group: None) -> None:
    machine()
    model = EXPERTS_MX.model()
    patch_model(model, {**EXPERTS_MX.options, "backend": "neuron", "weights": "stock"})
    shard(model)
    seen = []
    block = next(module for module in model.modules() if isinstance(module, NeuronBlock))
    block.register_forward_hook(lambda module, *_: seen.append(module.gate_up_proj.untyped_storage()))
    model(input_ids=tokens(1, 12)).logits.sum()
    assert len(seen) == 1 and seen[0].nbytes() == 0, "so that a copy would be all that is left of the full weight"


def test_registered_experts_keep_no_copies_either(machine: Start, process_group: None) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    double = machine().double
    register_experts_implementation({**EXPERTS_MX.options, "backend": "neuron"}, name="neuron_sharded")
    try:
        model = EXPERTS_MX.model()
        model.set_experts_implementation("neuron_sharded")
        shard(model)
        loss = model(input_ids=tokens(2, 12), labels=tokens(2, 12)).loss
        after_forward = get_backend("neuron").prepared_bytes
        loss.backward()
    finally:
        type(ALL_EXPERTS_FUNCTIONS)._global_mapping.pop("neuron_sharded", None)
    assert len(double.launches) == 2
    assert after_forward == get_backend("neuron").prepared_bytes == 0


def adapted(backend: str) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients of the adapters and bytes of copies of a sharded dense model with LoRA on its MLPs."""
    model: Any = DENSE.model(layers=2)
    patch_model(model, {**DENSE.options, "backend": backend, "weights": "stock"})
    torch.manual_seed(5)
    targets = ["gate_proj", "up_proj", "down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    ids = tokens(2, 12)
    loss = wrapped(input_ids=ids, labels=ids).loss
    copies = 0 if backend == "torch" else int(get_backend(backend).prepared_bytes)  # type: ignore[attr-defined]
    loss.backward()
    grads = [p.grad.full_tensor() for p in wrapped.parameters() if isinstance(p.grad, DTensor)]
    return loss.item(), grads, copies


def test_sharded_adapters_keep_no_copies(machine: Start, process_group: None) -> None:
    expected, expected_grads, _ = adapted("torch")
    double = machine().double
    loss, grads, copies = adapted("neuron")
    assert loss == expected and copies == 0 and len(double.launches) == 4
    assert len(grads) == 12 and all(torch.equal(mine, theirs) for mine, theirs in zip(grads, expected_grads))


@pytest.mark.slow
def test_a_compiled_program_keeps_none_either(machine: Start) -> None:
    """The choice is an argument of the operators: it is in the graph. Both marks are those that FSDP2 sets."""
    machine()
    torch._dynamo.reset()
    kept = []
    for sharded in (True, False):
        model = EXPERTS_MX.model()
        patch_model(model, {**EXPERTS_MX.options, "backend": "neuron", "weights": "stock"})
        for module in model.modules() if sharded else ():
            object.__setattr__(module, "_is_fsdp_managed_module", True)
            object.__setattr__(module, "_fsdp_use_orig_params", True)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        compiled(input_ids=tokens(1, 12)).logits.square().mean().backward()
        kept.append(get_backend("neuron").prepared_bytes)
        torch._dynamo.reset()
    assert kept[0] == 0 < kept[1]


@pytest.mark.slow
def test_two_processes_train_as_with_the_torch_backend(tmp_path: Path, repo_root: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.neuron.shard_driver", str(tmp_path), *CASES]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo_root), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, rank in itertools.product(CASES, range(2)):
        found: dict[str, Any] = json.loads((tmp_path / f"{name}-rank-{rank}.json").read_text(encoding="utf-8"))
        assert len(set(found["torch"])) == 3
        assert close(found["neuron"], found["torch"], CASES[name].bound), (name, found)
        assert found["launches"] == 12 and found["copies"] == [0] * 6, (name, found)
        assert 0 < found["local"] < found["whole"], "the weights were divided"

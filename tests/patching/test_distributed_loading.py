"""Models that transformers shards while loading: what is refused, by which words, and what runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.modules.collectives import sum_rows
from hf_neuron_moe.modules.engine import sizes_asked
from hf_neuron_moe.modules.expert_parallel import unsupported_reason_of_exchange
from hf_neuron_moe.modules.experts import register_experts_implementation
from hf_neuron_moe.modules.in_place import block_of
from hf_neuron_moe.training.blocks import patched_blocks
from tests.refusals import refused
from tests.tiny_models import tiny_model, tokens

distributed = pytest.importorskip("transformers.distributed", reason="this transformers cannot shard while loading")

NAME = "neuron_moe_sharded"
sizes_named = pytest.mark.skipif(
    "ep_size" not in inspect.signature(distributed.DistributedConfig).parameters,
    reason="this transformers keeps no distributed_config with sizes",
)


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first of two ranks, whose collectives do nothing."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    register_experts_implementation({"precision": "fp32"}, NAME)
    yield
    dist.destroy_process_group()
    for mapping in (type(ALL_EXPERTS_FUNCTIONS)._global_mapping, ALL_EXPERTS_FUNCTIONS._local_mapping):
        mapping.pop(NAME, None)


def sharded(tmp_path: Path, **sizes: int) -> Any:
    tiny_model("mixtral").save_pretrained(tmp_path)
    config = distributed.DistributedConfig(**sizes)
    return AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config)


LAYOUTS: list[dict[str, int]] = [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "ep_size": 2}]


@sizes_named
@pytest.mark.parametrize("sizes", [*LAYOUTS, {"fsdp_size": 2}])
def test_experts_stay_and_their_blocks_know_their_part(sizes: dict[str, int], tmp_path: Path) -> None:
    model = sharded(tmp_path, **sizes)
    experts = model.model.layers[0].mlp.experts
    forward, config = experts.__dict__.get("forward"), model.config._experts_implementation
    report = patch_model(model, {"precision": "fp32"})
    assert model.model.layers[0].mlp.experts is experts
    assert [entry.weights for entry in report.patched] == ["stock"] * 2
    block = block_of(experts)
    assert block is not None and list(patched_blocks(model)) == [entry.name for entry in report.patched]
    parallel = "ep_size" in sizes
    shape = block.neuron_shape
    assert (shape.experts, shape.intermediate) == (2 if parallel else 4, 24 if sizes == LAYOUTS[0] else 48)
    assert model(tokens()).logits.shape == (2, 9, 64)
    assert patch_model(model, {"precision": "fp32"}) == report
    unpatch_model(model)
    assert block_of(experts) is None and experts.__dict__.get("forward") is forward
    assert model.config._experts_implementation == config


@sizes_named
@pytest.mark.parametrize("sizes", LAYOUTS)
def test_a_registered_implementation_runs_on_the_parts(sizes: dict[str, int], tmp_path: Path) -> None:
    model = sharded(tmp_path, **sizes)
    model.set_experts_implementation(NAME)
    assert model(tokens()).logits.shape == (2, 9, 64)


@sizes_named
def test_kernel_layout_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = sharded(tmp_path, tp_size=2)
    with refused(NothingToPatchError, "model", "sharded while loading.*weights='stock'"):
        patch_model(model, {"weights": "kernel"})
    assert not list(patched_blocks(model))


@sizes_named
def test_a_forward_put_on_experts_later_is_noticed(tmp_path: Path) -> None:
    model = sharded(tmp_path, tp_size=2)
    patch_model(model, {"precision": "fp32"})
    experts = model.model.layers[1].mlp.experts
    experts.forward = lambda hidden, ids, weights: hidden
    with refused(UnsupportedModelError, "model", "exchanged: model.layers.1.mlp.experts"):
        patch_model(model, {"precision": "fp32"})


def test_a_registered_implementation_runs_in_a_model_that_fsdp_shards(tmp_path: Path) -> None:
    model = sharded(tmp_path, fsdp_size=2)
    model.set_experts_implementation(NAME)
    assert model(tokens()).logits.shape == (2, 9, 64)


def test_a_model_that_no_layout_was_asked_for_has_no_sizes() -> None:
    model = tiny_model("llama")
    assert sizes_asked(model) == {}
    model.config.distributed_config = SimpleNamespace(tp_size=1, ep_size=None)
    assert sizes_asked(model) == {}
    model.config.distributed_config = SimpleNamespace(tp_size=2)
    assert sizes_asked(model) == {"tp": 2, "ep": 1, "fsdp": 1, "pp": 1, "dp_replicate": 1}


def test_another_exchange_of_tokens_is_named() -> None:
    class Own:
        """An implementation that hands over no affinities."""

    assert "brought by Own; use ep_implementation='auto'" in unsupported_reason_of_exchange(Own())


def test_the_expert_parallelism_of_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.22 has the module, and one implementation without a name in it."""
    monkeypatch.delattr("transformers.distributed.expert_parallel.AllReduceEP")
    assert "needs transformers 5.23" in unsupported_reason_of_exchange(object())

    def ep_forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> None:
        """What 5.20 and 5.21 put into the instance."""

    model = tiny_model("mixtral")
    model.model.layers[0].mlp.experts.forward = ep_forward
    with refused(UnsupportedModelError, "model", "needs transformers 5.23"):
        patch_model(model)


def test_partial_sums_are_added_in_fp32() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # bf16 has no 257
    total = sum_rows(rows, torch.zeros(3, dtype=torch.int64), 1)
    assert total.dtype == torch.float32 and total.item() == 258

"""Models that transformers shards while loading: what is refused, by which words, and what runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.experts import register_experts_implementation
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


@sizes_named
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2}])
def test_patching_names_what_sharded_the_model_and_a_way_that_exists(sizes: dict[str, int], tmp_path: Path) -> None:
    model = sharded(tmp_path, **sizes)
    named = ", ".join(f"{key}={value}" for key, value in sizes.items())
    with refused(UnsupportedModelError, "model", rf"sharded \({named}\).*distributed_config"):
        patch_model(model)


@sizes_named
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}])
def test_a_registered_implementation_says_that_it_does_not_support_this(sizes: dict[str, int], tmp_path: Path) -> None:
    model = sharded(tmp_path, **sizes)
    model.set_experts_implementation(NAME)
    with refused(UnsupportedModelError, "MixtralExperts", "'grouped_mm'"):
        model(tokens())


def test_a_registered_implementation_runs_in_a_model_that_fsdp_shards(tmp_path: Path) -> None:
    model = sharded(tmp_path, fsdp_size=2)
    model.set_experts_implementation(NAME)
    assert model(tokens()).logits.shape == (2, 9, 64)

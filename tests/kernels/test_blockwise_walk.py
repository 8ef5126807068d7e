"""``blockwise_mm_bwd(execute="tiles")`` against the fast path, for everything that two cores can share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.blockwise_walk import shares
from hf_neuron_moe.reference.moe_types import ActFnType, ClampLimits, ShardOption, ShardOption229, SkipMode
from tests.refusals import refused

T, H, I, E, K, B = 70, 150, 44, 3, 2, 40  # noqa: E741
SHARDS: list[ShardOption | ShardOption229] = [*ShardOption, *ShardOption229]


def whole_call(dtype: torch.dtype, *, skip_token: bool = False, top_k: int = K) -> dict[str, Any]:
    """Operands of whole numbers whose fp32 sums are exact in any order, in ragged shapes."""
    generator = torch.Generator().manual_seed(top_k)

    def draw(*shape: int, most: int = 1) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)

    index = torch.rand(T, E, generator=generator).topk(top_k, 1).indices
    plan = build_block_plan(expert_mask(index, E), B, top_k=top_k, skip_token=skip_token)
    affinities = masked_affinities(index, 0.5 ** (1 + index.float()), E)
    blocks, rows = len(plan.block_to_expert), T if skip_token else T + 1
    hidden = draw(rows, H)
    if not skip_token:
        hidden[T] = 0
    return {
        "hidden_states": hidden,
        "expert_affinities_masked": affinities[: rows * E],
        "gate_up_proj_weight": draw(E, H, 2, I),
        "down_proj_weight": draw(E, I, H),
        "gate_up_proj_act_checkpoint_T": draw(blocks, 2, I, B, most=4),
        "down_proj_act_checkpoint": draw(blocks, B, H, most=8),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "output_hidden_states_grad": draw(rows, H),
        "block_size": B,
        "skip_dma": SkipMode(skip_token),
        "activation_type": ActFnType.SquaredReLU,
        "clamp_limits": ClampLimits(3.0, -3.0, 2.0),
        "bias": True,
        "down_proj_bias": draw(E, H, most=2),
        "device_limits": False,
    }


def assert_same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("option", ["AFFINITY_ON_H", "AFFINITY_ON_I"])
@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: shard.name)
def test_every_division_to_the_bit(shard: Any, option: str, dtype: torch.dtype) -> None:
    skip_token = shard is ShardOption.SHARD_ON_BLOCK
    given = whole_call(dtype, skip_token=skip_token) | {"affinity_option": option, "shard_option": shard}
    assert_same(blockwise_mm_bwd(**given), blockwise_mm_bwd(**given, execute="tiles"))


@pytest.mark.parametrize("change", [{"skip_gate_proj": True}, {"bias": False, "down_proj_bias": None}])
def test_options_to_the_bit(change: dict[str, Any]) -> None:
    given = whole_call(torch.bfloat16) | change
    assert_same(blockwise_mm_bwd(**given)[:2], blockwise_mm_bwd(**given, execute="tiles")[:2])
    assert len(blockwise_mm_bwd(**given, execute="tiles")) == (4 if "bias" in change else 6)


@pytest.mark.parametrize("shard", ["SHARD_ON_FREE", "SHARD_ON_BLOCK"])
@pytest.mark.parametrize("accumulation", ["convention", "device"])
@pytest.mark.parametrize("add", [False, True])
def test_plain_stores_and_buffers_to_the_bit(add: bool, accumulation: str, shard: str) -> None:
    """Whole numbers below 2^24 in fp32 buffers: rounding after every block changes nothing."""
    given = whole_call(torch.float32, top_k=1) | {"is_tensor_update_accumulating": False, "bias": False}
    given["shard_option"] = shard
    results = []
    for options in ({}, {"execute": "tiles", "accumulation": accumulation}):
        buffers = {
            f"{name}_grad_out": torch.full_like(given[name], 3.0)
            for name in ("hidden_states", "expert_affinities_masked", "gate_up_proj_weight", "down_proj_weight")
        }
        result = blockwise_mm_bwd(**given, **buffers, skip_grad_initialization=add, **options)
        assert all(one is other for one, other in zip(result, buffers.values(), strict=True))
        results.append(result)
    assert_same(*results)


def test_unused_slots_of_a_checkpoint_may_hold_anything() -> None:
    given = whole_call(torch.float32)
    unused = given["token_position_to_id"].view(-1, B) == T
    given["gate_up_proj_act_checkpoint_T"].transpose(1, 3)[unused] = torch.nan
    assert_same(blockwise_mm_bwd(**given), blockwise_mm_bwd(**given, execute="tiles"))


def test_blocks_in_any_order_to_the_bit() -> None:
    """Blocks in any order of experts, gaps in blocks, id E on a block without tokens."""
    given = whole_call(torch.float32, top_k=1)
    generator = torch.Generator().manual_seed(6)
    ids = given["token_position_to_id"].view(-1, B)
    order, within = torch.randperm(len(ids), generator=generator), torch.randperm(B, generator=generator)
    given["block_to_expert"] = torch.where((ids == T).all(1), E, given["block_to_expert"])[order]
    given["token_position_to_id"] = ids[order][:, within].reshape(-1)
    assert (given["block_to_expert"] == E).any() and (given["block_to_expert"].diff() < 0).any()
    assert_same(blockwise_mm_bwd(**given), blockwise_mm_bwd(**given, execute="tiles"))


def test_what_the_cores_share() -> None:
    halves = shares(ShardOption229.SHARD_ON_INTERMEDIATE, 8, 6, 5)
    assert halves == [(slice(0, 8), slice(0, 6), slice(0, 3)), (slice(0, 8), slice(0, 6), slice(3, 5))]
    assert [part.slots for part in shares(ShardOption.SHARD_ON_FREE, 8, 6, 5)] == [slice(0, 4), slice(4, 8)]
    assert [part.hidden for part in shares(ShardOption.SHARD_ON_HIDDEN, 8, 6, 5)] == [slice(0, 3), slice(3, 6)]
    assert len(shares(ShardOption.SHARD_ON_BLOCK, 8, 6, 5)) == len(shares(ShardOption229.BASELINE_LNC1, 8, 6, 5)) == 1


@pytest.mark.parametrize("argument", ["execute", "accumulation"])
def test_wrong_options(argument: str) -> None:
    with refused(ConfigError, argument, got="'slow'", where="blockwise_mm_bwd"):
        blockwise_mm_bwd(**whole_call(torch.float32), **{argument: "slow"})

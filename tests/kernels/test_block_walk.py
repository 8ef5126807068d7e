"""``moe_cte(execute="tiles")`` against the fast path, and the order in which blocks and tiles are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.formats import quantize_moe_down, quantize_moe_gate_up
from hf_neuron_moe.formats.block_plan import BlockPlan, build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.block_conditions import block_conditions
from hf_neuron_moe.reference.block_walk import shares, turns
from hf_neuron_moe.reference.moe_cte import MoEForward, moe_cte
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_direct import blockwise_mm_baseline_shard_hidden
from hf_neuron_moe.reference.moe_cte_problem import check_arguments
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    BlockShardStrategy,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    ShardOnBlockConfig,
    ShardOnIConfig,
    SkipMode,
)
from hf_neuron_moe.reference.tiled_product import tiled_product
from tests.refusals import refused

Mode = ExpertAffinityScaleMode
E, K = 3, 2
HI_LO = {"block_sharding_strategy": BlockShardStrategy.HI_LO, "non_overlapping_shards": True}


def whole_numbers(*shape: int, most: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def spec(kind: str, **options: Any) -> MoECTESpec:
    on_i = {name: options.pop(name) for name in list(options) if name in ShardOnIConfig.__dataclass_fields__}
    return MoECTESpec(MoECTEImplementation[kind], ShardOnBlockConfig(**options), ShardOnIConfig(**on_i))


def plan_of(tokens: int, block: int, skip_token: bool) -> tuple[BlockPlan, Tensor]:
    index = torch.rand(tokens, E, generator=torch.Generator().manual_seed(tokens)).topk(K, 1).indices
    plan = build_block_plan(expert_mask(index, E), block, top_k=K, skip_token=skip_token)
    weight = 0.5 ** (1 + index.float())  # powers of two: products are exact
    affinities = masked_affinities(index, weight, E)
    return plan, affinities[: tokens * E] if skip_token else affinities


def whole_call(
    kind: str,
    dtype: torch.dtype,
    *,
    tokens: int = 150,
    hidden: int = 96,
    inner: int = 40,
    skip_token: bool = False,
    block: int = 100,
) -> dict[str, Any]:
    """Operands of whole numbers whose fp32 sums are exact in any order, in ragged shapes."""
    plan, affinities = plan_of(tokens, block, skip_token)
    x = whole_numbers(tokens, hidden, most=1, seed=0)
    gate_up = whole_numbers(E, hidden, 2, inner, most=1, seed=1)
    down = whole_numbers(E, inner, hidden, most=2, seed=2)
    given: dict[str, Any] = {
        "hidden_states": (x if skip_token else torch.cat([x, x.new_zeros(1, hidden)])).to(dtype),
        "expert_affinities_masked": affinities,
        "gate_up_proj_weight": gate_up.to(dtype),
        "down_proj_weight": down.to(dtype),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": block,
        "spec": spec(kind),
        "skip_dma": SkipMode(skip_token),
        "activation_function": ActFnType.SquaredReLU,
        "device_limits": False,
    }
    if "hybrid" in kind or kind == "shard_on_block_mx":
        given["conditions"] = block_conditions(plan, kind)
    if "mx" in kind:
        words = quantize_moe_gate_up(gate_up), quantize_moe_down(down)
        given |= {"gate_up_proj_weight": words[0].words, "gate_up_proj_scale": words[0].scales}
        given |= {"down_proj_weight": words[1].words, "down_proj_scale": words[1].scales}
    elif kind != "shard_on_block":
        given |= {"gate_and_up_proj_bias": whole_numbers(E, 2, inner, most=3, seed=3)}
        given |= {"down_proj_bias": whole_numbers(E, hidden, most=3, seed=4)}
        given |= {"gate_clamp_upper_limit": 8.0, "up_clamp_lower_limit": -4.0, "up_clamp_upper_limit": 5.0}
    return given


def assert_same(left: MoEForward, right: MoEForward) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one is None) is (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))
    assert left.output.abs().max() > 1


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("shard_on_block", {}, {}),
    ("shard_on_block", HI_LO, {"expert_affinities_scaling_mode": Mode.PRE_SCALE}),
    ("shard_on_i", {"checkpoint_activation": True}, {}),
    ("shard_on_i", {"checkpoint_activation": True}, {"expert_affinities_scaling_mode": Mode.PRE_SCALE}),
    ("shard_on_i", {"checkpoint_activation": True, "expert_affinity_multiply_on_I": True}, {}),
    ("shard_on_i", {}, {"skip_gate_proj": True, "gate_clamp_upper_limit": None}),
    ("shard_on_i_hybrid", {"num_static_block": 1}, {"expert_affinities_scaling_mode": Mode.NO_SCALE}),
]
MX_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("shard_on_block_mx", {}, {}),
    ("shard_on_block_mx", {"n_static_blocks": 2, "n_dynamic_blocks": 6}, {}),
    ("shard_on_i_mx", {}, {}),
    ("shard_on_i_mx_hybrid", {}, {}),
]


@pytest.mark.parametrize("skip_token", [False, True], ids=["sink row", "skip_token"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "options", "change"), CASES)
def test_every_implementation_to_the_bit(
    kind: str, options: dict[str, Any], change: dict[str, Any], dtype: torch.dtype, skip_token: bool
) -> None:
    given = whole_call(kind, dtype, skip_token=skip_token) | {"spec": spec(kind, **options)} | change
    assert_same(moe_cte(**given), moe_cte(**given, execute="tiles"))


@pytest.mark.parametrize(("kind", "options", "change"), MX_CASES)
def test_mx_to_the_bit(kind: str, options: dict[str, Any], change: dict[str, Any]) -> None:
    """Also the roundings to MXFP8: of hidden states in two tiles, of the intermediate in two, one of which is short."""
    hidden, inner = (1024, 96) if kind == "shard_on_block_mx" else (512, 544)
    skip = kind == "shard_on_i_mx"
    given = whole_call(kind, torch.bfloat16, tokens=30, hidden=hidden, inner=inner, skip_token=skip, block=10)
    given |= {"spec": spec(kind, **options)} | change
    assert_same(moe_cte(**given), moe_cte(**given, execute="tiles"))


@pytest.mark.parametrize("kind", ["shard_on_block", "shard_on_i"])
def test_slots_in_any_order_to_the_bit(kind: str) -> None:
    """Blocks in any order of experts, gaps in blocks, id E on blocks without tokens, -1 beside a sink row."""
    given = whole_call(kind, torch.bfloat16, tokens=90, block=20)
    generator = torch.Generator().manual_seed(5)
    ids = given["token_position_to_id"].view(-1, 20)[:, torch.randperm(20, generator=generator)]
    order = torch.randperm(len(ids), generator=generator)
    owner = torch.where((ids == 90).all(1), E, given["block_to_expert"])[order]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, torch.where(ids == 90, -1, ids), ids)[order]
    given |= {"token_position_to_id": ids.reshape(-1), "block_to_expert": owner}
    if kind == "shard_on_i":
        given["spec"] = spec(kind, checkpoint_activation=True)
    assert (ids == -1).any() and (owner == E).any() and (owner.diff() < 0).any()
    assert_same(moe_cte(**given), moe_cte(**given, execute="tiles"))


def test_dropping_to_the_bit() -> None:
    given = whole_call("shard_on_i", torch.bfloat16, tokens=90)
    slots = torch.tensor([[2, 0, 90, 5], [7, 90, 90, 89], [90, 90, 90, 90]], dtype=torch.int32)
    change = {"block_size": 4, "token_position_to_id": slots.view(-1), "block_to_expert": torch.arange(3).int()}
    given |= change | {"spec": spec("shard_on_i_dropping"), "expert_affinities_masked": torch.full((91 * E, 1), 0.5)}
    given["expert_affinities_masked"][-E:] = 0
    assert_same(moe_cte(**given), moe_cte(**given, execute="tiles"))


def test_cores_that_divide_h() -> None:
    given = whole_call("shard_on_i", torch.float32)
    names = "hidden_states expert_affinities_masked gate_up_proj_weight down_proj_weight token_position_to_id"
    plain = {name: given[name] for name in (*names.split(), "block_to_expert", "block_size")}
    plain["gate_up_proj_weight"] = plain["gate_up_proj_weight"] / 64
    results = [blockwise_mm_baseline_shard_hidden(**plain, execute=execute) for execute in ("fast", "tiles")]
    # SiLU makes fractions: the sums are those of the fast path up to their order.
    torch.testing.assert_close(results[0].output, results[1].output, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["shard_on_block", "shard_on_i"])
def test_sums_up_to_their_order(kind: str) -> None:
    """Operands over many binades and FP8 scales: fp32 sums of 320 terms differ by their order alone."""
    given = whole_call(kind, torch.float32, tokens=140, hidden=320, inner=288)
    generator = torch.Generator().manual_seed(9)
    for name in ("hidden_states", "down_proj_weight"):
        value = given[name]
        given[name] = value * torch.exp2(torch.randint(-12, 12, value.shape, generator=generator).float())
    given |= {
        "activation_function": ActFnType.SiLU,
        "gate_up_proj_scale": torch.rand(E, 1, 2 * 288, generator=generator) * 1e-3,
        "down_proj_scale": torch.rand(E, 1, 320, generator=generator),
        "gate_up_in_scale": torch.rand(141, 1, generator=generator),
        "down_in_scale": torch.rand(141, 1, generator=generator),
    }
    fast, tiles = (moe_cte(**given, execute=execute).output for execute in ("fast", "tiles"))
    scale = fast.abs().amax(1, keepdim=True)
    assert ((fast - tiles).abs() <= 320 * 2**-24 * scale).all()
    assert scale[:-1].max() / scale[:-1].min() > 10


def order(kind: str, blocks: int, flags: list[int] | None = None, **options: Any) -> list[tuple[int, int]]:
    """Return (block, output) in the order of the walk, for a plan of `blocks` blocks of one token each."""
    given = whole_call(kind, torch.float32, tokens=blocks)
    slots = torch.full((blocks,), blocks) if flags is not None else torch.arange(blocks)
    given |= {"block_size": 1, "token_position_to_id": slots.int(), "block_to_expert": torch.zeros(blocks).int()}
    given |= {"spec": spec(kind, **options), "conditions": None if flags is None else torch.tensor(flags)}
    return [tuple(turn) for turn in turns(check_arguments(Arguments(**given)))]


def test_the_order_of_the_blocks() -> None:
    assert order("shard_on_block", 5) == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]
    assert order("shard_on_block", 5, **HI_LO) == [(0, 0), (3, 0), (1, 0), (4, 0), (2, 0)]
    assert order("shard_on_i", 3) == [(0, 0), (1, 0), (2, 0)]
    flags = [1, 1, 1, 1, 0, 0, 0]
    assert [block for block, _ in order("shard_on_i_hybrid", 6, flags, num_static_block=2)] == [0, 1, 2, 3]
    assert [block for block, _ in order("shard_on_i_hybrid", 6, flags, num_static_block=5)] == [0, 1, 2, 3, 4]
    assert [block for block, _ in order("shard_on_i_hybrid", 6, flags, num_static_block=6)] == [0, 1, 2, 3, 4, 5]
    assert len(order("shard_on_i_hybrid", 6, [1, 0, 0, 0, 0, 0, 0])) == 6 - E


def test_the_order_of_static_and_dynamic_mx_blocks() -> None:
    sizes = {"n_static_blocks": 4, "n_dynamic_blocks": 5}
    given = whole_call("shard_on_block_mx", torch.bfloat16, tokens=30, hidden=512, inner=32)
    given |= {"block_size": 1, "token_position_to_id": torch.full((9,), 30).int()}
    given |= {"block_to_expert": torch.zeros(9).int(), "spec": spec("shard_on_block_mx", **sizes)}
    given["conditions"] = torch.tensor([1] * 7 + [0] * 4)
    static, dynamic = [(0, 0), (2, 1), (1, 0), (3, 1)], [(4, 0), (5, 1), (6, 0)]
    assert list(turns(check_arguments(Arguments(**given)))) == static + dynamic


def test_what_the_cores_share() -> None:
    given = whole_call("shard_on_i_mx", torch.bfloat16, tokens=4, hidden=512, inner=544)
    mx, plain = (check_arguments(Arguments(**call)) for call in (given, whole_call("shard_on_i", torch.float32)))
    assert [part.inner for part in shares(mx, 1536, False)] == [slice(0, 1024), slice(1024, 1536)]
    assert [part.inner for part in shares(plain, 40, False)] == [slice(0, 20), slice(20, 40)]
    assert [part.hidden for part in shares(plain, 40, True)] == [slice(0, 48), slice(48, 96)]


def test_tiles_of_the_contraction_are_added_in_order() -> None:
    """2^24 + 1 is 2^24 in fp32, so that the order of three tiles shows in their sum."""
    left, right = torch.zeros(1, 384), torch.ones(384, 1)
    left[0, [0, 128, 256]] = torch.tensor([2.0**24, 1.0, -(2.0**24)])
    tile = {"rows": 128, "columns": 512}
    assert tiled_product(left, right, **tile) == 0
    turned = [slice(0, 128), slice(256, 384), slice(128, 256)]
    assert tiled_product(left, right, **tile, contraction=turned) == 1


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("execute", {"execute": "tile"}),
        ("accumulation", {"accumulation": "bf16"}),
        ("accumulation", {"accumulation": "device", "convention": "golden"}),
    ],
)
def test_wrong_options(argument: str, change: dict[str, Any]) -> None:
    given = whole_call("shard_on_i", torch.float32)
    with refused(ConfigError, argument, where="moe_cte"):
        moe_cte(**given | change)

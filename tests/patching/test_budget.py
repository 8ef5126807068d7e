"""Byte budgets: the cheapest plan, never above the budget, against trying every plan."""

from __future__ import annotations

import itertools
import random
import time
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from hf_neuron_moe.activation_policy import ActivationBudget, canonical_keep, keep_strings
from hf_neuron_moe.modules.saved_bytes import SavedBlock, recomputed_flops, saved_bytes
from hf_neuron_moe.patching import budget
from hf_neuron_moe.patching.budget import Option, cheapest_plan
from hf_neuron_moe.patching.policies import PlannedBlock, resolve

OPTIONS = st.lists(
    st.builds(Option, keep=st.just(""), saved=st.integers(0, 12).map(float), flops=st.integers(0, 9)),
    min_size=1,
    max_size=5,
)


def cost(plan: tuple[Option, ...]) -> tuple[int, float]:
    return sum(option.flops for option in plan), sum(option.saved for option in plan)


@given(blocks=st.lists(OPTIONS, min_size=0, max_size=4), limit=st.integers(0, 40))
def test_no_plan_is_cheaper(blocks: list[list[Option]], limit: int) -> None:
    allowed = [plan for plan in itertools.product(*blocks) if cost(plan)[1] <= limit]
    plan = cheapest_plan(blocks, limit)
    if plan is None:
        assert not allowed
        return
    assert all(option in options for option, options in zip(plan.options, blocks, strict=True))
    assert (plan.flops, plan.saved) == cost(plan.options) == min(map(cost, allowed))
    assert plan.gap == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_cheaper_where_a_plan_fills_the_limit_to_the_last_byte(seed: int) -> None:
    """Limits that are the sum of some plan: a search that stops short of them misses the best plans."""
    generator = random.Random(seed)
    for _ in range(100):
        blocks = [
            [Option("", float(generator.randrange(60)), generator.randrange(1000)) for _ in range(5)] for _ in range(4)
        ]
        plans = [cost(plan) for plan in itertools.product(*blocks)]
        limit = generator.choice(plans)[1]
        plan = cheapest_plan(blocks, limit)
        assert plan is not None
        assert (plan.flops, plan.saved) == min(one for one in plans if one[1] <= limit)
        assert plan.gap == 0


@given(
    blocks=st.lists(OPTIONS, min_size=1, max_size=4),
    limit=st.integers(0, 40),
    sums=st.sampled_from([(1,), (2,), (1, 3)]),
)
def test_a_thinned_search_is_as_near_as_it_says(blocks: list[list[Option]], limit: int, sums: tuple[int, ...]) -> None:
    allowed = [cost(plan) for plan in itertools.product(*blocks) if cost(plan)[1] <= limit]
    with mock.patch.object(budget, "_SUMS", sums):
        plan = cheapest_plan(blocks, limit)
    assert (plan is None) == (not allowed)
    if plan is not None:
        assert plan.saved <= limit
        assert min(allowed)[0] <= plan.flops <= min(allowed)[0] + plan.gap + 1e-6  # the gap is a float


def lower_bound(blocks: list[list[Option]], limit: float) -> float:
    """No plan repeats fewer operations than if every byte had a price; the best of many prices."""
    prices = [2.0 ** (power / 8) for power in range(-16, 128)]
    return max(
        sum(min(one.flops + price * one.saved for one in options) for options in blocks) - price * limit
        for price in prices
    )


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_no_two_of_64_blocks_are_equal(precision: str, share: float) -> None:
    shapes = [SavedBlock(precision, 4096, 1000 + 61 * number, None) for number in range(64)]
    keeps = sorted(keep_strings(precision) - {"fp8"})
    blocks = [[Option(keep, saved_bytes(s, keep), recomputed_flops(s, keep)) for keep in keeps] for s in shapes]
    floor, most = (sum(pick(one.saved for one in options) for options in blocks) for pick in (min, max))
    limit = floor + share * (most - floor)
    start = time.process_time()
    plan = cheapest_plan(blocks, limit)
    assert time.process_time() - start < 2  # 0.3 s on one core of the machine at hand
    assert plan is not None
    assert plan.saved <= limit
    everything = sum(max(one.flops for one in options) for options in blocks)
    assert plan.gap <= 0.001 * everything
    assert 0 <= plan.flops - lower_bound(blocks, limit) <= 0.001 * everything


def mixed_blocks(precision: str) -> list[PlannedBlock]:
    shapes = [
        SavedBlock(precision, 64, 640, None),
        SavedBlock(precision, 64, 520, 2),
        SavedBlock(precision, 64, 96, None),
    ]
    return [PlannedBlock((f"layers.{number}.mlp",), shape) for number, shape in enumerate(shapes)]


@given(
    share=st.floats(0, 1.2),
    precision=st.sampled_from(["bf16", "mxfp8", "fp32"]),
    allow_fp8=st.booleans(),
)
def test_blocks_keep_as_much_as_the_budget_allows(share: float, precision: str, allow_fp8: bool) -> None:
    blocks = mixed_blocks(precision)
    lossless = keep_strings(precision) - {"fp8"}
    floor = sum(saved_bytes(block.shape, "recompute") for block in blocks)
    most = sum(max(saved_bytes(block.shape, keep) for keep in lossless) for block in blocks)
    limit = floor + share * (most - floor)
    plan = resolve(ActivationBudget(bytes_per_token=limit, allow_fp8=allow_fp8), blocks, [])
    keeps = [canonical_keep(policy, precision) for policy in plan]
    saved = sum(saved_bytes(block.shape, keep) for block, keep in zip(blocks, keeps, strict=True))
    flops = sum(recomputed_flops(block.shape, keep) for block, keep in zip(blocks, keeps, strict=True))
    assert saved <= limit
    known = keep_strings(precision) if allow_fp8 else lossless
    assert set(keeps) <= known
    presets = itertools.product(
        sorted(known & {"minimal", "recompute", "fp8", "gate_pre+up", "up"}), repeat=len(blocks)
    )
    for other in presets:
        pairs = list(zip(blocks, other, strict=True))
        if sum(saved_bytes(block.shape, keep) for block, keep in pairs) <= limit:
            assert flops <= sum(recomputed_flops(block.shape, keep) for block, keep in pairs)


def test_many_layers_are_planned_at_once() -> None:
    """30 layers of experts with a shared expert each, and 6 layers of which no two are equal."""
    shapes = [SavedBlock("mxfp8", 4096, 1536, 8), SavedBlock("mxfp8", 4096, 1536, None)] * 30
    shapes += [SavedBlock("bf16", 2048, 1024 + 128 * number, None) for number in range(6)]
    blocks = [PlannedBlock((f"layers.{number}.mlp",), shape) for number, shape in enumerate(shapes)]
    floor, full = (sum(saved_bytes(shape, keep) for shape in shapes) for keep in ("recompute", "gate_pre+up"))
    limit = (floor + full) / 2
    plan = resolve(ActivationBudget(total_bytes=limit * 8192, tokens=8192), blocks, [])
    keeps = [canonical_keep(policy, shape.precision) for policy, shape in zip(plan, shapes, strict=True)]
    saved = sum(saved_bytes(shape, keep) for shape, keep in zip(shapes, keeps, strict=True))
    # What remains unused is less than the smallest step from one policy of some block to its next.
    assert limit - 2 * 1024 < saved <= limit

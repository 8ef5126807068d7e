"""Block plans against upstream's recorded ones and against their definition, written out with Python lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats.block_plan import (
    build_block_plan,
    build_dropping_plan,
    choose_block_size,
    count_blocks,
    dropping_capacity,
    expert_mask,
    masked_affinities,
)
from hf_neuron_moe.reference.block_conditions import block_conditions
from hf_neuron_moe.reference.moe_types import MoECTEImplementation
from tests.refusals import refused

GOLDEN = Path(__file__).parents[1] / "golden"
PLANS = next(
    entry["call"]["plans"]
    for entry in json.loads((GOLDEN / "manifest.json").read_text())["files"]
    if entry["file"].startswith("routing_plans")
)


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_recorded_plans(number: int) -> None:
    """Identical to upstream's generator for one and two cores, and so are all its condition vectors."""
    call, vectors = PLANS[number], load_file(GOLDEN / "routing_plans.safetensors")
    arguments = {"top_k": call["K"], "skip_token": call["skip_token"]}
    for prefix, multiple in ((f"plan{number}", 1), (f"plan{number}_lnc2", 2)):
        plan = build_block_plan(vectors[f"plan{number}_mask"], call["B"], n_block_per_iter=multiple, **arguments)
        assert torch.equal(plan.token_position_to_id, vectors[f"{prefix}_token_position_to_id"])
        assert torch.equal(plan.block_to_expert, vectors[f"{prefix}_block_to_expert"])
        assert plan.conditions.sum() == call["real_blocks"]
        if multiple == 1:
            assert torch.equal(block_conditions(plan, "shard_on_i_hybrid"), vectors[f"{prefix}_conditions"])
            continue
        recorded = vectors[f"{prefix}_conditions_block_parallel"]
        assert torch.equal(block_conditions(plan, "shard_on_block_upstream"), recorded)
        mx = block_conditions(plan, MoECTEImplementation.shard_on_block_mx)
        assert torch.equal(mx, vectors[f"{prefix}_conditions_mx"])
        odd = (len(plan.block_to_expert) - call["real_blocks"]) % 2
        assert block_conditions(plan, "shard_on_block").sum() == recorded.sum() + odd


def plan_by_hand(
    choices: list[list[int]], experts: int, block: int, blocks: int, sink: int, spare_blocks: str = "last"
) -> tuple[list[int], list[int]]:
    owned = []
    for expert in range(experts):
        tokens = [token for token, chosen in enumerate(choices) if expert in chosen]
        owned.append([tokens[start : start + block] for start in range(0, len(tokens), block)])
    spare = blocks - sum(map(len, owned))
    if spare_blocks == "split":
        owned[(experts - 1) // 2] += [[]] * (spare // 2)
        spare -= spare // 2
    owned.append([])
    owned[experts if spare_blocks == "unassigned" else experts - 1] += [[]] * spare
    owners = [expert for expert, lists in enumerate(owned) for _ in lists]
    return [token for lists in owned for tokens in lists for token in tokens + [sink] * (block - len(tokens))], owners


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_plan_follows_its_definition(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    tokens = data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, experts))
    block = data.draw(st.sampled_from([1, 3, 8, 16]))
    multiple = data.draw(st.sampled_from([1, 2]))
    skip_token = data.draw(st.booleans())
    pool = data.draw(st.integers(top_k, experts))
    spare = data.draw(st.sampled_from(["last", "split", "unassigned"]))
    tighten = data.draw(st.booleans())
    choices = [data.draw(st.permutations(range(pool)))[:top_k] for _ in range(tokens)]
    mask = expert_mask(torch.tensor(choices), experts)
    plan = build_block_plan(
        mask, block, top_k=top_k, n_block_per_iter=multiple, skip_token=skip_token, spare_blocks=spare, tighten=tighten
    )
    blocks = count_blocks(tokens, top_k, experts, block, n_block_per_iter=multiple, tighten=tighten)
    ids, owners = plan_by_hand(choices, experts, block, blocks, -1 if skip_token else tokens, spare)
    assert plan.token_position_to_id.tolist() == ids
    assert plan.block_to_expert.tolist() == owners
    real = [int(any(0 <= t < tokens for t in ids[i * block : (i + 1) * block])) for i in range(blocks)]
    assert plan.conditions.tolist() == [*real, 0]
    pairs = [max(real[i : i + 2]) for i in range(0, blocks, 2)]
    assert block_conditions(plan, "shard_on_block").tolist() == [*pairs, 0]
    half = -(-blocks // 2)
    high = [*real[half:], *[0] * (2 * half - blocks)]
    assert block_conditions(plan, "shard_on_block_hybrid").tolist() == [[*real[:half], 0], [*high, 0]]


def test_block_count_is_the_worst_case() -> None:
    """Every expert but one holds a single token in its last block: no routing needs more blocks than N."""
    for tokens, top_k, experts, block in ((33, 2, 4, 8), (5, 2, 16, 8), (1, 1, 1, 8), (128, 4, 32, 16)):
        pairs, worst = tokens * top_k, 0
        for busy in range(1, experts + 1):
            if pairs >= busy:
                worst = max(worst, (busy - 1) + -(-(pairs - (busy - 1)) // block))
        assert count_blocks(tokens, top_k, experts, block) >= worst


def test_masked_affinities_are_dense_and_token_major() -> None:
    index, weights = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[0.7, 0.3], [0.6, 0.4]])
    flat = masked_affinities(index, weights, 3)
    expected = [[0.3, 0.0, 0.7], [0.0, 0.6, 0.0], [0.0, 0.0, 0.0]]
    assert torch.equal(flat, torch.tensor(expected).reshape(-1, 1))
    assert len(masked_affinities(index, weights, 3, skip_token=True)) == 6


def test_nothing_is_read_back_to_the_host() -> None:
    """The plan of a meta tensor has the right shapes: no value is needed to build it."""
    mask = torch.empty(50, 9, dtype=torch.bool, device="meta")
    plan = build_block_plan(mask, 16, top_k=3, spare_blocks="split")
    assert plan.token_position_to_id.shape == (17 * 16,) and plan.block_to_expert.shape == (17,)
    assert block_conditions(plan, "shard_on_block_upstream").shape == (10,)
    dropping = build_dropping_plan(mask, 8, priority=torch.empty(50, 9, device="meta"))
    assert dropping.token_position_to_id.shape == (72,)


def test_plans_trace_with_fake_tensors_of_the_host() -> None:
    with FakeTensorMode():
        mask = expert_mask(torch.zeros(50, 3, dtype=torch.int64), 9)
        assert build_block_plan(mask, 16, top_k=3).block_to_expert.shape == (17,)


def test_a_compiled_plan_is_the_same() -> None:
    index = torch.rand(50, 9).topk(3).indices

    def plan(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = build_block_plan(expert_mask(index, 9), 16, top_k=3)
        return made.token_position_to_id, made.block_to_expert

    compiled = torch.compile(plan, fullgraph=True, backend="eager")
    assert all(torch.equal(left, right) for left, right in zip(plan(index), compiled(index), strict=True))


def test_tightened_count() -> None:
    assert count_blocks(5, 2, 16, 8) == 15
    assert count_blocks(5, 2, 16, 8, tighten=True) == 10
    assert count_blocks(5, 2, 16, 8, tighten=True, n_block_per_iter=4) == 12
    assert count_blocks(4, 8, 2, 8, tighten=True) == 2  # K > E: every token goes to both experts


def test_local_experts_of_a_rank() -> None:
    index, weights = torch.tensor([[2, 0], [1, 3]]), torch.tensor([[0.7, 0.3], [0.6, 0.4]])
    assert expert_mask(index, 2, first_expert=2).tolist() == [[True, False], [False, True]]
    local = masked_affinities(index, weights, 2, first_expert=2, skip_token=True)
    assert torch.equal(local, torch.tensor([0.7, 0.0, 0.0, 0.4]).view(-1, 1))
    whole = torch.cat([expert_mask(index, 2, first_expert=first) for first in (0, 2)], 1)
    assert torch.equal(whole, expert_mask(index, 4))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((2048, 2, 8), (512, 15)), ((2048, 8, 64), (256, 127)), ((1, 2, 8), (128, 7)), ((1, 1, 1), (128, 1))],
)
def test_automatic_block_size(sizes: tuple[int, int, int], expected: tuple[int, int]) -> None:
    choice = choose_block_size(*sizes)
    assert (choice.block_size, choice.blocks) == expected
    tokens, top_k, experts = sizes
    assert choice.blocks == count_blocks(tokens, top_k, experts, choice.block_size)
    assert choice.padding == 1 - tokens * min(top_k, experts) / (choice.blocks * choice.block_size)


def test_dropping_plan_keeps_the_first_or_the_most_wanted() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 1]])
    plan = build_dropping_plan(mask, 2)
    assert plan.token_position_to_id.tolist() == [0, 1, 0, 3]
    assert plan.block_to_expert.tolist() == [0, 1] and plan.conditions.tolist() == [1, 1, 0]
    wanted = torch.tensor([[0.1, 0.2], [0.5, 9.0], [0.3, 0.0], [9.0, 0.1]])
    assert build_dropping_plan(mask, 2, priority=wanted).token_position_to_id.tolist() == [1, 2, 0, 3]
    roomy = build_dropping_plan(mask, 4, skip_token=True, priority=wanted)
    assert roomy.token_position_to_id.tolist() == [1, 2, 0, -1, 0, 3, -1, -1]


def test_dropping_capacity() -> None:
    assert dropping_capacity(33, 2, 4, 1.25) == 20 and dropping_capacity(33, 2, 4, 1.25, convention="nxd") == 21


@pytest.mark.parametrize(
    ("kind", "argument", "says", "function", "arguments"),
    [
        (ConfigError, "spare_blocks", "'first'", build_block_plan, {"spare_blocks": "first"}),
        (ShapeError, "n_block_per_iter", "", build_block_plan, {"n_block_per_iter": 0}),
        (ShapeError, "capacity", "got 0", build_dropping_plan, {"capacity": 0}),
        (ShapeError, "priority", "", build_dropping_plan, {"priority": torch.ones(3)}),
        (ShapeError, "capacity", "got 0", dropping_capacity, {"experts": 9}),
        (ConfigError, "convention", "", dropping_capacity, {"convention": "x"}),
        (ShapeError, "choices", "got none", choose_block_size, {"choices": ()}),
        (ConfigError, "skip_token", "got 'no'", build_block_plan, {"skip_token": "no"}),
        (ConfigError, "tighten", "got 1", build_block_plan, {"tighten": 1}),
        (DTypeError, "priority", "", build_dropping_plan, {"priority": [1]}),
        (
            DeviceError,
            "priority",
            "got meta",
            build_dropping_plan,
            {"priority": torch.ones(3, 2, device="meta")},
        ),
        (ConfigError, "capacity_factor", "'1'", dropping_capacity, {"capacity_factor": "1"}),
        (ConfigError, "capacity_factor", "got nan", dropping_capacity, {"capacity_factor": float("nan")}),
        (ConfigError, "capacity_factor", "got inf", dropping_capacity, {"capacity_factor": float("inf")}),
        (ShapeError, "choices", "got 'x'", choose_block_size, {"choices": (128, "x")}),
        (ConfigError, "max_padding", "", choose_block_size, {"max_padding": "x"}),
        (ShapeError, "experts", "got 4.0", expert_mask, {"experts": 4.0}),
        (ConfigError, "first_expert", "", expert_mask, {"first_expert": "0"}),
        (DTypeError, "top_k_weights", "got list", masked_affinities, {"top_k_weights": [[1.0]]}),
        (DTypeError, "top_k_weights", "required", masked_affinities, {"top_k_weights": None}),
        (ShapeError, "experts", "got -1", masked_affinities, {"experts": -1}),
        (
            DeviceError,
            "top_k_weights",
            "",
            masked_affinities,
            {"top_k_weights": torch.ones(3, 1, device="meta")},
        ),
        (ConfigError, "consumer", "'shard_on_i'", block_conditions, {"consumer": "shard_on_i"}),
    ],
)
def test_refusals(
    kind: type[NeuronMoEError], argument: str, says: str, function: Callable[..., object], arguments: dict[str, Any]
) -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    good: dict[Callable[..., object], dict[str, Any]] = {
        build_block_plan: {"expert_mask": mask, "block_size": 8, "top_k": 2},
        build_dropping_plan: {"expert_mask": mask, "capacity": 2},
        dropping_capacity: {"tokens": 4, "top_k": 1, "experts": 2, "capacity_factor": 1.0},
        choose_block_size: {"tokens": 4, "top_k": 1, "experts": 2},
        expert_mask: {"top_k_index": torch.zeros(3, 1, dtype=torch.int64), "experts": 2},
        masked_affinities: {
            "top_k_index": torch.zeros(3, 1, dtype=torch.int64),
            "top_k_weights": torch.ones(3, 1),
            "experts": 2,
        },
        block_conditions: {"plan": build_dropping_plan(mask, 2), "consumer": "shard_on_block"},
    }
    assert function(**good[function]) is not None
    with refused(kind, argument, says, where=function.__name__):
        function(**(good[function] | arguments))


def test_affinities_of_an_expert_named_twice_are_refused() -> None:
    """One entry per pair: the table could hold only one of the two weights."""
    weights = torch.full((3, 2), 0.5)
    with refused(ShapeError, "top_k_index", got="row 1 with one twice", where="masked_affinities"):
        masked_affinities(torch.tensor([[0, 1], [2, 2], [1, 0]]), weights, 4)
    # Ids of other ranks select nothing, so they may repeat.
    table = masked_affinities(torch.tensor([[0, 1], [6, 6], [7, 0]]), weights, 4)
    assert table.view(4, 4)[1].tolist() == [0, 0, 0, 0]

"""The block plan against its definition, written out with Python lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_neuron_moe.kernels.routing import build_block_plan, count_blocks, expert_mask, masked_affinities


def plan_by_hand(
    choices: list[list[int]], experts: int, block: int, blocks: int, sink: int
) -> tuple[list[int], list[int]]:
    ids, owners = [], []
    for expert in range(experts):
        tokens = [token for token, chosen in enumerate(choices) if expert in chosen]
        while tokens:
            head, tokens = tokens[:block], tokens[block:]
            ids += head + [sink] * (block - len(head))
            owners.append(expert)
    spare = blocks - len(owners)
    return ids + [sink] * (spare * block), owners + [experts - 1] * spare


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
    choices = [data.draw(st.permutations(range(pool)))[:top_k] for _ in range(tokens)]
    mask = expert_mask(torch.tensor(choices), experts)
    plan = build_block_plan(mask, block, top_k=top_k, blocks_multiple=multiple, skip_token=skip_token)
    blocks = count_blocks(tokens, top_k, experts, block, blocks_multiple=multiple)
    ids, owners = plan_by_hand(choices, experts, block, blocks, -1 if skip_token else tokens)
    assert plan.token_position_to_id.tolist() == ids
    assert plan.block_to_expert.tolist() == owners
    real = sum(any(0 <= t < tokens for t in ids[i * block : (i + 1) * block]) for i in range(blocks))
    assert plan.conditions.tolist() == [1] * real + [0] * (blocks - real + 1)


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
    plan = build_block_plan(torch.empty(50, 9, dtype=torch.bool, device="meta"), 16, top_k=3)
    assert plan.token_position_to_id.shape == (17 * 16,) and plan.block_to_expert.shape == (17,)

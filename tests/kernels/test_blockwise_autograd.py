"""``blockwise_mm_bwd`` against float64 autograd over the option matrix.

Tolerance: relative to the largest gradient 1e-6, a few fp32 rounding steps (2^-24 = 6e-8) for sums of some ten terms.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_neuron_moe.backends.torch import compute
from hf_neuron_moe.formats.block_plan import build_block_plan, build_dropping_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.moe_types import ActFnType, ClampLimits, SkipMode

sys.path.insert(0, str(Path(__file__).parent))
import blockwise_oracle
from blockwise_oracle import Problem

T, H, I, E, K, B = 30, 16, 12, 4, 2, 8  # noqa: E741
NO_LIMITS, LIMITS = ClampLimits(), ClampLimits(0.5, -0.25, 0.75, None)
RELATIVE = 1e-6


def make_problem(seed: int, *, bias: bool = True, pool: int = E, dtype: torch.dtype = torch.float64) -> Problem:
    """Draw a problem whose values fp32 (or `dtype`) holds exactly; only the first `pool` experts get tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.to(dtype if dtype != torch.float64 else torch.float32).double()

    index = torch.rand(T, pool, generator=generator).topk(min(K, pool)).indices
    chosen = torch.zeros(T, E, dtype=torch.float64).scatter_(1, index, 1.0)
    affinity = torch.rand(T, E, generator=generator).to(torch.float32).double() * chosen
    on = 1.0 if bias else 0.0
    return Problem(
        draw(T, H), affinity, chosen, draw(E, H, 2, I, scale=H**-0.5), draw(E, I, H, scale=I**-0.5),
        draw(E, 2, I) * on, draw(E, H) * on, draw(T, H),
    )  # fmt: skip


def call_arguments(
    problem: Problem, kind: ActFnType, limits: ClampLimits, skip_gate: bool, skip_token: bool = False, block: int = B
) -> dict[str, Any]:
    """Return fp32 arguments with the checkpoints a device forward saves."""
    with torch.no_grad():
        _, gate_up_ET2I, down_ETH = blockwise_oracle.experts(problem, kind, limits, skip_gate)
    plan = build_block_plan(problem.chosen_TE.bool(), block, top_k=K, skip_token=skip_token)
    ids = plan.token_position_to_id.view(-1, block).long()
    real = (ids >= 0) & (ids < T)
    owner, token = plan.block_to_expert.long()[:, None], ids.clamp(0, T - 1)
    gate_up_NB2I = gate_up_ET2I[owner, token] * real[..., None, None]
    sink = (lambda t: t) if skip_token else (lambda t: torch.cat([t, t.new_zeros(1, t.shape[1])]))
    return {
        "hidden_states": sink(problem.x_TH.detach()).float(),
        "expert_affinities_masked": sink(problem.affinity_TE.detach()).reshape(-1, 1).float(),
        "gate_up_proj_weight": problem.gate_up_EH2I.detach().float(),
        "down_proj_weight": problem.down_EIH.detach().float(),
        "gate_up_proj_act_checkpoint_T": gate_up_NB2I.permute(0, 2, 3, 1).float().contiguous(),
        "down_proj_act_checkpoint": (down_ETH[owner, token] * real[..., None]).float(),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "output_hidden_states_grad": sink(problem.dout_TH).float(),
        "block_size": block,
        "skip_dma": SkipMode(skip_token),
        "clamp_limits": limits,
        "activation_type": kind,
        "skip_gate_proj": skip_gate,
    }


def assert_gradients(result: tuple[Tensor, ...], truth: list[Tensor], relative: float = RELATIVE) -> None:
    assert len(result) in (4, 6)
    for value, expected in zip(result, truth, strict=False):
        real = value.double().reshape(-1)[: expected.numel()].view(expected.shape)
        assert (real - expected).abs().max() <= relative * expected.abs().max() + 1e-30
        assert not value.reshape(-1)[expected.numel() :].any()


@pytest.mark.parametrize("option", ["AFFINITY_ON_H", "AFFINITY_ON_I"])
@pytest.mark.parametrize("limits", [NO_LIMITS, LIMITS], ids=["free", "clamped"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("skip_gate", [False, True], ids=["gated", "ungated"])
@pytest.mark.parametrize("kind", list(ActFnType), ids=lambda kind: kind.name)
def test_option_matrix(kind: ActFnType, skip_gate: bool, bias: bool, limits: ClampLimits, option: str) -> None:
    if skip_gate:
        limits = NO_LIMITS  # without a gate upstream does not mask, so a clamped forward has no exact gradient
    problem = make_problem(kind.value * 16 + bias, bias=bias)
    arguments = call_arguments(problem, kind, limits, skip_gate)
    if bias:
        arguments |= {"bias": True, "down_proj_bias": problem.down_bias_EH.float()}
    result = blockwise_mm_bwd(**arguments, affinity_option=option)
    assert len(result) == (6 if bias else 4)
    truth = blockwise_oracle.gradients(problem, kind, limits, skip_gate)
    assert_gradients(result, truth)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    block=st.sampled_from([1, 3, 8, 64]),
    pool=st.integers(1, E),
    skip_token=st.booleans(),
    option=st.sampled_from(["AFFINITY_ON_H", "AFFINITY_ON_I"]),
)
def test_any_plan(seed: int, block: int, pool: int, skip_token: bool, option: str) -> None:
    """Zero-token experts, partly filled and full blocks, with and without a sink row."""
    problem = make_problem(seed, pool=pool)
    arguments = call_arguments(problem, ActFnType.Swish, LIMITS, False, skip_token, block)
    arguments |= {"bias": True, "down_proj_bias": problem.down_bias_EH.float(), "affinity_option": option}
    truth = blockwise_oracle.gradients(problem, ActFnType.Swish, LIMITS, False)
    assert_gradients(blockwise_mm_bwd(**arguments), truth, 2e-6)  # drawn at will: now and then one step more


def test_slots_in_any_order_and_place_give_the_same_gradients() -> None:
    """Blocks of any expert order, gaps within blocks, and id E on blocks without tokens are legal plans."""
    problem = make_problem(3)
    arguments = call_arguments(problem, ActFnType.SiLU, NO_LIMITS, False)
    plain = blockwise_mm_bwd(**arguments)
    blocks, generator = len(arguments["block_to_expert"]), torch.Generator().manual_seed(4)
    order, within = torch.randperm(blocks, generator=generator), torch.randperm(B, generator=generator)
    ids = arguments["token_position_to_id"].view(blocks, B)[order][:, within]
    arguments["block_to_expert"] = torch.where((ids == T).all(1), E, arguments["block_to_expert"][order])
    arguments["token_position_to_id"] = ids.reshape(-1)
    arguments["gate_up_proj_act_checkpoint_T"] = arguments["gate_up_proj_act_checkpoint_T"][order][..., within]
    arguments["down_proj_act_checkpoint"] = arguments["down_proj_act_checkpoint"][order][:, within]
    for left, right in zip(plain, blockwise_mm_bwd(**arguments), strict=True):
        assert (left - right).abs().max() <= RELATIVE * left.abs().max()  # rows are summed in another order


def test_a_dropping_plan() -> None:
    """One block per expert with unsorted tokens; tokens beyond an expert's capacity do not count."""
    problem, capacity = make_problem(5, bias=False), 9
    plan = build_dropping_plan(problem.chosen_TE.bool(), capacity)
    ids = plan.token_position_to_id.view(E, capacity).flip(1)
    kept = torch.zeros(T + 1, E, dtype=torch.float64).scatter_(0, ids.T.long(), 1.0)[:T]
    problem.chosen_TE, problem.affinity_TE = problem.chosen_TE * kept, problem.affinity_TE * kept
    arguments = call_arguments(problem, ActFnType.SiLU, NO_LIMITS, False, block=capacity)
    _, gate_up, down = blockwise_oracle.experts(problem, ActFnType.SiLU, NO_LIMITS, False)
    owner, token = torch.arange(E)[:, None], ids.long().clamp(max=T - 1)
    arguments |= {
        "token_position_to_id": ids.reshape(-1),
        "block_to_expert": plan.block_to_expert,
        "gate_up_proj_act_checkpoint_T": gate_up[owner, token].permute(0, 2, 3, 1).float(),
        "down_proj_act_checkpoint": down[owner, token].float(),
        "kernel_type_option": "DROPPING",
    }
    truth = blockwise_oracle.gradients(problem, ActFnType.SiLU, NO_LIMITS, False)
    assert kept.sum(0).max() == capacity
    for option in ("AFFINITY_ON_H", "AFFINITY_ON_I"):
        assert_gradients(blockwise_mm_bwd(**arguments, affinity_option=option), truth)


def test_options_without_effect_on_values() -> None:
    problem = make_problem(6)
    arguments = call_arguments(problem, ActFnType.SiLU, NO_LIMITS, False)
    plain = blockwise_mm_bwd(**arguments)
    changes: list[dict[str, Any]] = [
        *({"shard_option": name} for name in ("SHARD_ON_FREE", "SHARD_ON_BLOCK", "AUTO", "BASELINE_LNC1")),
        {"block_tile_size": 4},
        {"skip_dma": SkipMode(False, True)},
        {"compute_dtype": torch.float32},
        {},
    ]
    for change in changes:
        result = blockwise_mm_bwd(**arguments | change)
        assert all(torch.equal(left, right) for left, right in zip(plain, result, strict=True)), change


def buffers_like(result: tuple[Tensor, ...], value: float) -> dict[str, Tensor]:
    names = ("hidden_states", "expert_affinities_masked", "gate_up_proj_weight", "down_proj_weight")
    return {f"{name}_grad_out": torch.full_like(t, value) for name, t in zip(names, result, strict=False)}


def test_gradient_buffers_are_overwritten_or_added_to() -> None:
    problem = make_problem(7, pool=3)
    arguments = call_arguments(problem, ActFnType.SiLU, NO_LIMITS, False)
    plain = blockwise_mm_bwd(**arguments)
    buffers = buffers_like(plain, 7.0)
    for value, buffer, expected in zip(blockwise_mm_bwd(**arguments, **buffers), buffers.values(), plain, strict=True):
        assert value.data_ptr() == buffer.data_ptr() and torch.equal(value, expected)
    buffers = buffers_like(plain, 1.0)
    added = blockwise_mm_bwd(**arguments, **buffers, skip_grad_initialization=True)
    for number in (0, 2, 3):
        assert torch.allclose(added[number], plain[number] + 1, atol=1e-5, rtol=0)  # one rounding of the sum near 10
    chosen = torch.cat([problem.chosen_TE, torch.zeros(1, E)]).reshape(-1, 1).bool()
    assert torch.equal(added[1], torch.where(chosen, plain[1], 1.0))


def test_bf16_gradients_accumulate_in_fp32_buffers() -> None:
    problem = make_problem(8, bias=False, dtype=torch.bfloat16)
    arguments = call_arguments(problem, ActFnType.SiLU, NO_LIMITS, False)
    arguments = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    narrow = blockwise_mm_bwd(**arguments, device_limits=False)
    wide = blockwise_mm_bwd(**arguments, device_limits=False, accumulation_dtype=torch.float32)
    assert narrow[2].dtype == torch.bfloat16 and wide[2].dtype == wide[3].dtype == torch.float32
    assert torch.equal(wide[2].bfloat16(), narrow[2]) and torch.equal(wide[0], narrow[0])
    exact = blockwise_mm_bwd(**arguments, device_limits=False, compute_dtype=torch.float32)
    truth = blockwise_oracle.gradients(problem, ActFnType.SiLU, NO_LIMITS, False)
    # Checkpoints and results are bf16 (2^-9 each); rounding between the matmuls adds a few more such steps.
    assert_gradients(exact, [truth[0], truth[1], *truth[2:4]], 8e-3)
    assert_gradients(narrow, [truth[0], truth[1], *truth[2:4]], 2e-2)


def test_plain_stores_for_one_expert_per_token() -> None:
    problem = make_problem(9, pool=1)
    arguments = call_arguments(problem, ActFnType.SiLU, NO_LIMITS, False)
    plain = blockwise_mm_bwd(**arguments)
    stored = blockwise_mm_bwd(**arguments, is_tensor_update_accumulating=False)
    assert all(torch.equal(left, right) for left, right in zip(plain, stored, strict=True))
    buffers = buffers_like(plain, 1.0)
    added = blockwise_mm_bwd(**arguments, **buffers, is_tensor_update_accumulating=False, skip_grad_initialization=True)
    assert torch.equal(added[0][:T], plain[0][:T]) and (added[0][T] == 1).all()


class LargestFp32(TorchDispatchMode):
    """Records the largest fp32 tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                self.largest = max(self.largest, value.numel())
        return result


@pytest.mark.parametrize("native", [False, True], ids=["fp32_products", "bf16_products"])
@pytest.mark.parametrize("option", ["AFFINITY_ON_H", "AFFINITY_ON_I"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1024, 8, 4), (6000, 1, 1)])
def test_no_fp32_copy_of_the_whole_problem(
    tokens: int, experts: int, top_k: int, option: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporaries are tiles of one expert: nothing fp32 is as large as the intermediates, even of a single expert."""
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: native)
    hidden, inner, block = 64, 64, 128
    index = torch.rand(tokens, experts).topk(top_k).indices
    plan = build_block_plan(expert_mask(index, experts), block, top_k=top_k)
    blocks, table = len(plan.block_to_expert), masked_affinities(index, torch.rand(tokens, top_k), experts)
    shapes = [(tokens + 1, hidden), (experts, hidden, 2, inner), (experts, inner, hidden)]
    x, gate_up, down = (torch.randn(shape).bfloat16() for shape in shapes)
    x[-1] = 0  # the sink row
    checkpoints = [torch.randn(blocks, 2, inner, block).bfloat16(), torch.randn(blocks, block, hidden).bfloat16()]
    compute.release_scratch()
    with LargestFp32() as recorded:
        blockwise_mm_bwd(
            x, table, gate_up, down, *checkpoints, plan.token_position_to_id, plan.block_to_expert, x, block,
            affinity_option=option, bias=True, upstream_affinity_grad=True,
        )  # fmt: skip
    chunk = compute.choose_compute("bf16", x.device, rows_per_expert=tokens, weight_dtype=torch.bfloat16).row_chunk
    rows = min(int(torch.bincount(index.reshape(-1)).max()), chunk)
    assert recorded.largest <= max((tokens + 1) * hidden, (rows + 2 * block) * 3 * inner)
    assert recorded.largest < tokens * top_k * 2 * inner

"""``moe_cte`` in fp32 against the float64 model over its option matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.moe_cte import MoEForward, moe_cte
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    ShardOnIConfig,
    SkipMode,
)
from tests.kernels.moe_oracle import Model

FP32 = 1e-6
"""fp32 sums against float64, relative to the terms' absolute values: 2,500 random cases reached 2.6e-7."""
ON_I = MoECTESpec(MoECTEImplementation.shard_on_i, shard_on_I=ShardOnIConfig(checkpoint_activation=True))
MODES = {"nothing": "NO_SCALE", "output": "POST_SCALE", "input": "PRE_SCALE", "pre_activations": "PRE_SCALE"}


@dataclasses.dataclass
class Case:
    """Random operands of a call, fp32."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    block: int
    skip_token: bool
    seed: int

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        rand = lambda *shape: torch.rand(*shape, generator=g) * 2 - 1  # noqa: E731
        # A skewed routing leaves experts without tokens.
        scores = torch.rand(self.tokens, self.experts, generator=g) * torch.rand(self.experts, generator=g) ** 4
        index = scores.topk(min(self.top_k, self.experts), 1).indices
        self.plan = build_block_plan(
            expert_mask(index, self.experts), self.block, top_k=self.top_k, skip_token=self.skip_token
        )
        weights = torch.rand(index.shape, generator=g) + 0.1
        self.affinities = masked_affinities(index, weights, self.experts, skip_token=self.skip_token)
        x = rand(self.tokens, self.hidden)
        self.x = x if self.skip_token else torch.cat([x, torch.zeros(1, self.hidden)])
        self.gate_up, self.down = (
            rand(self.experts, self.hidden, 2, self.inner),
            rand(self.experts, self.inner, self.hidden),
        )
        self.bias = (rand(self.experts, 2, self.inner), rand(self.experts, self.hidden))
        self.rand = rand

    def arguments(self) -> dict[str, Any]:
        return {
            "hidden_states": self.x,
            "expert_affinities_masked": self.affinities,
            "gate_up_proj_weight": self.gate_up,
            "down_proj_weight": self.down,
            "token_position_to_id": self.plan.token_position_to_id,
            "block_to_expert": self.plan.block_to_expert,
            "block_size": self.block,
            "spec": ON_I,
            "skip_dma": SkipMode(skip_token=self.skip_token),
        }

    def expected(self, model: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plan = self.plan
        return model.run(x, self.affinities, plan.token_position_to_id, plan.block_to_expert, self.block)


def check(result: MoEForward, model: Model, case: Case) -> None:
    expected, magnitudes = case.expected(model, case.x), case.expected(model.magnitude(), case.x.abs())
    for name, value, reference, magnitude in zip(result._fields, result, expected, magnitudes, strict=True):
        if value is None:
            continue
        rows = case.tokens if name == "output" else None
        assert value[:rows].shape == reference[:rows].shape
        assert ((value - reference).abs() <= FP32 * magnitude)[:rows].all(), name
    if not case.skip_token:
        assert not result.output[-1].any()


cases = st.builds(
    Case,
    tokens=st.integers(1, 40),
    hidden=st.sampled_from([4, 24]),
    inner=st.sampled_from([2, 20]),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 3),
    block=st.sampled_from([1, 8, 16]),
    skip_token=st.booleans(),
    seed=st.integers(0, 2**31),
)
limits = st.one_of(st.none(), st.sampled_from([-0.7, -0.1, 0.0, 0.2, 0.9]))


@settings(max_examples=120)
@given(
    case=cases,
    activation=st.sampled_from(list(ActFnType)),
    place=st.sampled_from([*MODES, "intermediate"]),
    bias=st.booleans(),
    clamps=st.tuples(limits, limits, limits, limits),
    golden=st.booleans(),
)
def test_options(
    case: Case,
    activation: ActFnType,
    place: str,
    bias: bool,
    clamps: tuple[float | None, ...],
    golden: bool,
) -> None:
    """Biases, clamps, activations, affinity places, both conventions, zero-token experts, spare blocks, skip_token."""
    if place == "input":
        golden = True
    if place == "pre_activations":
        golden = False
    model = Model(
        case.gate_up.double(),
        case.down.double(),
        activation.name,
        place,
        tuple(b.double() for b in case.bias) if bias else None,
        clamps,
        bias_in_down_checkpoint=golden,
    )
    spec = ON_I
    if place == "intermediate":
        spec = MoECTESpec(MoECTEImplementation.shard_on_i, shard_on_I=ShardOnIConfig(True, True))
    result = moe_cte(
        **case.arguments()
        | {
            "spec": spec,
            "activation_function": activation,
            "expert_affinities_scaling_mode": ExpertAffinityScaleMode[MODES.get(place, "POST_SCALE")],
            "gate_and_up_proj_bias": case.bias[0] if bias else None,
            "down_proj_bias": case.bias[1] if bias else None,
            "gate_clamp_upper_limit": clamps[0],
            "gate_clamp_lower_limit": clamps[1],
            "up_clamp_upper_limit": clamps[2],
            "up_clamp_lower_limit": clamps[3],
            "convention": "golden" if golden else "device",
        }
    )
    assert (result.down_activations is None) is (place == "intermediate")
    check(result, model, case)


ROW, TENSOR, TENSOR_LAST, SHARED = "row", "tensor", "tensor_last", "shared"


@settings(max_examples=60)
@given(case=cases, kind=st.sampled_from([ROW, TENSOR, TENSOR_LAST, SHARED]), inputs=st.sampled_from([None, "T", "E"]))
def test_fp8_scales_of_every_shape(case: Case, kind: str, inputs: str | None) -> None:
    experts, inner, hidden = case.experts, case.inner, case.hidden
    shapes = {
        ROW: ((experts, 1, 2 * inner), (experts, 1, hidden)),
        TENSOR: ((experts, 1, 2), (experts, 1, 1)),
        TENSOR_LAST: ((experts, 2, 1), (experts, 1)),
        SHARED: ((1, 1, 2 * inner), (1, 1, hidden)),
    }
    gate_up_scale, down_scale = (case.rand(*shape) for shape in shapes[kind])
    gate_up, down = (w.mul(16).round() for w in (case.gate_up, case.down))
    per_output = gate_up_scale.double().reshape(-1, 2, inner if kind in (ROW, SHARED) else 1)
    down_factor = down_scale.double().reshape(down_scale.shape[0], -1).expand(experts, hidden)
    model = Model(
        gate_up.double(),
        down.double(),
        bias=(case.bias[0].double(), case.bias[1].double()),
        gate_up_factor=per_output.expand(experts, 2, inner),
        down_factor=down_factor,
    )
    given_scales = {}
    rows = case.x.shape[0]
    if inputs == "T":
        given_scales = {"gate_up_in_scale": case.rand(rows, 1), "down_in_scale": case.rand(rows, 1)}
        model.token_factors = (given_scales["gate_up_in_scale"].double(), given_scales["down_in_scale"].double())
        if case.skip_token:
            # Slots without a token do not read a scale; the model has one for token 0 there.
            given_scales |= {"spec": MoECTESpec(MoECTEImplementation.shard_on_i)}
    elif inputs == "E":
        given_scales = {"gate_up_in_scale": case.rand(experts, 2, 1), "down_in_scale": case.rand(experts, 1)}
        model.gate_up_factor = model.gate_up_factor * given_scales["gate_up_in_scale"].double()
        model.down_factor = model.down_factor * given_scales["down_in_scale"].double()
    result = moe_cte(
        **case.arguments()
        | {
            "gate_up_proj_weight": gate_up.to(torch.float8_e4m3fn),
            "down_proj_weight": down.to(torch.float8_e4m3fn),
            "gate_up_proj_scale": gate_up_scale,
            "down_proj_scale": down_scale,
            "gate_and_up_proj_bias": case.bias[0],
            "down_proj_bias": case.bias[1],
        }
        | given_scales
    )
    check(result, model, case)


def test_fp8_block_scales_multiply_the_weights() -> None:
    case = Case(20, 512, 256, 3, 2, 8, skip_token=False, seed=3)
    gate_up, down = (w.mul(16).round() for w in (case.gate_up, case.down))
    gate_up_scale, down_scale = case.rand(3, 2, 2, 1), case.rand(3, 1, 2)
    wide = gate_up_scale.repeat_interleave(256, 1).repeat_interleave(256, 3).double()
    down_wide = down_scale.repeat_interleave(256, 1).repeat_interleave(256, 2).double()
    model = Model(gate_up.double() * wide, down.double() * down_wide)
    result = moe_cte(
        **case.arguments()
        | {
            "gate_up_proj_weight": gate_up.to(torch.float8_e4m3fn),
            "down_proj_weight": down.to(torch.float8_e4m3fn),
            "gate_up_proj_scale": gate_up_scale[..., None].expand(-1, -1, -1, -1, 128),
            "down_proj_scale": down_scale[..., None].expand(-1, -1, -1, 128),
        }
    )
    check(result, model, case)


@pytest.mark.parametrize("activation", [ActFnType.SiLU, ActFnType.SquaredReLU])
@pytest.mark.parametrize("mode", ["NO_SCALE", "POST_SCALE", "PRE_SCALE"])
def test_skip_gate_uses_up_alone(activation: ActFnType, mode: str) -> None:
    case = Case(30, 16, 12, 4, 2, 8, skip_token=False, seed=11)
    place = {"NO_SCALE": "nothing", "POST_SCALE": "output", "PRE_SCALE": "pre_activations"}[mode]
    model = Model(case.gate_up.double(), case.down.double(), activation.name, place, skip_gate=True)
    options = {
        "skip_gate_proj": True,
        "activation_function": activation,
        "expert_affinities_scaling_mode": ExpertAffinityScaleMode[mode],
    }
    kept = moe_cte(**case.arguments() | options)
    check(kept, model, case)
    bare = moe_cte(**case.arguments() | options | {"spec": MoECTESpec(MoECTEImplementation.shard_on_i)})
    assert torch.equal(bare.output, kept.output)
    assert bare.gate_up_activations_T is None


def test_a_plan_with_gaps_descending_experts_and_marked_spare_blocks() -> None:
    """The device only looks ids up: any order of blocks and slots is the same computation."""
    case = Case(37, 16, 12, 4, 2, 8, skip_token=False, seed=5)
    model = Model(case.gate_up.double(), case.down.double(), bias=(case.bias[0].double(), case.bias[1].double()))
    g = torch.Generator().manual_seed(0)
    ids = case.plan.token_position_to_id.view(-1, 8)
    ids = torch.stack([row[torch.randperm(8, generator=g)] for row in ids])
    order = torch.randperm(len(ids), generator=g)
    ids, experts = ids[order].reshape(-1), case.plan.block_to_expert[order]
    case.plan = case.plan._replace(token_position_to_id=ids, block_to_expert=experts)
    changes = {"gate_and_up_proj_bias": case.bias[0], "down_proj_bias": case.bias[1]}
    check(moe_cte(**case.arguments() | changes), model, case)
    spare = (ids.view(-1, 8) == case.tokens).all(1)
    marked = torch.where(spare, 4, experts)
    result = moe_cte(**case.arguments() | changes | {"block_to_expert": marked})
    assert torch.equal(result.output, moe_cte(**case.arguments() | changes).output)


def test_no_token_at_all() -> None:
    case = Case(4, 8, 6, 3, 1, 4, skip_token=False, seed=0)
    ids = torch.full_like(case.plan.token_position_to_id, case.tokens)
    result = moe_cte(**case.arguments() | {"token_position_to_id": ids})
    assert not result.output.any()
    assert result.gate_up_activations_T is not None
    assert not result.gate_up_activations_T.any()


def test_skip_token_changes_the_layout_and_no_value() -> None:
    sink, none = (Case(33, 16, 12, 4, 2, 8, skip_token=skip, seed=9) for skip in (False, True))
    with_sink, without = moe_cte(**sink.arguments()), moe_cte(**none.arguments())
    assert torch.equal(with_sink.output[:-1], without.output)
    for name in ("gate_up_activations_T", "down_activations"):
        assert torch.equal(getattr(with_sink, name), getattr(without, name))


def test_a_repeated_call_gives_the_same_bits_and_changes_no_argument() -> None:
    case = Case(33, 16, 12, 4, 2, 8, skip_token=False, seed=9)
    given_arguments = case.arguments() | {"gate_and_up_proj_bias": case.bias[0], "down_proj_bias": case.bias[1]}
    before = {k: v.clone() for k, v in given_arguments.items() if isinstance(v, Tensor)}
    first, second = moe_cte(**given_arguments), moe_cte(**given_arguments)
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)
    for name, tensor in before.items():
        assert torch.equal(tensor, given_arguments[name])

"""The seven implementations and the direct kernels compute the same thing; bf16 roundings and memory are as stated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_neuron_moe.backends.torch.compute import release_scratch
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference import moe_cte_direct as direct
from hf_neuron_moe.reference.moe_cte import MoEForward, moe_cte
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationConfig,
    ShardOnBlockConfig,
    ShardOnIConfig,
    SkipMode,
)
from tests.kernels.moe_oracle import ACTIVATIONS, Model
from tests.kernels.test_moe_cte_mx import MXCase

Arguments = dict[str, Any]
Kind = MoECTEImplementation
Mode = ExpertAffinityScaleMode
PRE, POST = Mode.PRE_SCALE, Mode.POST_SCALE


def case(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, block: int, dtype: torch.dtype = torch.float32
) -> Arguments:
    g = torch.Generator().manual_seed(tokens + inner)
    rand = lambda *shape: (torch.rand(*shape, generator=g) * 2 - 1).to(dtype)  # noqa: E731
    index = torch.rand(tokens, experts, generator=g).topk(top_k).indices
    plan = build_block_plan(expert_mask(index, experts), block, top_k=top_k)
    return {
        "hidden_states": torch.cat([rand(tokens, hidden), torch.zeros(1, hidden, dtype=dtype)]),
        "expert_affinities_masked": masked_affinities(index, torch.rand(tokens, top_k, generator=g), experts),
        "gate_up_proj_weight": rand(experts, hidden, 2, inner) * 0.25,
        "down_proj_weight": rand(experts, inner, hidden) * 0.25,
        "block_size": block,
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "gate_and_up_proj_bias": rand(experts, 2, inner),
        "down_proj_bias": rand(experts, hidden),
        "activation_function": ActFnType.Swish,
        "gate_clamp_upper_limit": 0.5,
        "gate_clamp_lower_limit": -0.6,
        "up_clamp_upper_limit": 0.7,
        "up_clamp_lower_limit": -0.8,
    }


def conditions(arguments: Arguments, tail: int = 1) -> Tensor:
    ids = arguments["token_position_to_id"].view(-1, arguments["block_size"])
    real = (ids < len(arguments["hidden_states"]) - 1).any(1).int()
    return torch.nn.functional.pad(real, (0, tail))


def spec(kind: Kind, **on_i: Any) -> MoECTESpec:
    return MoECTESpec(kind, shard_on_I=ShardOnIConfig(**on_i))


def assert_same(left: MoEForward, right: MoEForward) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one is None) is (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("mode", [Mode.POST_SCALE, Mode.NO_SCALE])
def test_implementations_agree(mode: Mode) -> None:
    given = case(40, 16, 12, 4, 2, 8) | {"expert_affinities_scaling_mode": mode}
    reference = moe_cte(**given, spec=spec(Kind.shard_on_i))
    block = moe_cte(**given, spec=spec(Kind.shard_on_block))
    hybrid = moe_cte(**given, spec=spec(Kind.shard_on_i_hybrid), conditions=conditions(given))
    assert_same(reference, block)
    assert_same(reference, hybrid)
    kept = moe_cte(**given, spec=spec(Kind.shard_on_i, checkpoint_activation=True))
    assert torch.equal(kept.output, reference.output)


def test_the_two_pre_scales_of_the_device_differ_with_bias_and_clamp() -> None:
    given = case(40, 16, 12, 4, 2, 8) | {"expert_affinities_scaling_mode": PRE}
    on_i, on_block = (moe_cte(**given, spec=spec(kind)) for kind in (Kind.shard_on_i, Kind.shard_on_block))
    golden = moe_cte(**given, spec=spec(Kind.shard_on_i), convention="golden")
    delayed = moe_cte(**given | {"expert_affinities_scaling_mode": Mode.PRE_SCALE_DELAYED}, spec=spec(Kind.shard_on_i))
    assert_same(on_block, golden)
    assert_same(on_i, delayed)
    assert (on_i.output - on_block.output).abs().max() > 0.05 * on_block.output.abs().max()


def test_multiplying_on_the_intermediate_is_post_scale_with_the_bias_too() -> None:
    """4e-7: the same sums in another order."""
    given = case(40, 16, 12, 4, 2, 8)
    post = moe_cte(**given, spec=spec(Kind.shard_on_i))
    on_inner = moe_cte(**given, spec=spec(Kind.shard_on_i, expert_affinity_multiply_on_I=True))
    assert (post.output - on_inner.output).abs().max() <= 4e-7 * post.output.abs().max()


def test_dropping_takes_any_tokens_and_returns_its_activations() -> None:
    given = case(48, 16, 12, 3, 2, 24)
    g = torch.Generator().manual_seed(0)
    ids = torch.full((3, 24), 48, dtype=torch.int32)
    table = given["expert_affinities_masked"].view(49, 3)
    for expert in range(3):
        chosen = table[:48, expert].nonzero().reshape(-1)
        kept = chosen[torch.randperm(len(chosen), generator=g)][:20]
        ids[expert, : len(kept)] = kept.int()
    given |= {"token_position_to_id": ids.reshape(-1), "block_to_expert": torch.arange(3, dtype=torch.int32)}
    result = moe_cte(**given, spec=spec(Kind.shard_on_i_dropping))
    model = Model(
        given["gate_up_proj_weight"].double(),
        given["down_proj_weight"].double(),
        "Swish",
        bias=(given["gate_and_up_proj_bias"].double(), given["down_proj_bias"].double()),
        limits=(0.5, -0.6, 0.7, -0.8),
    )
    expected = model.run(given["hidden_states"], table, ids.reshape(-1), torch.arange(3), 24)
    for value, reference in zip(result, expected, strict=True):
        # fp32 sums of 16 and 12 terms.
        assert (value - reference).abs().max() <= 2e-6 * reference.abs().max()
    on_inner = moe_cte(**given, spec=spec(Kind.shard_on_i_dropping, expert_affinity_multiply_on_I=True))
    assert on_inner.gate_up_activations_T is not None
    assert on_inner.down_activations is None


DIRECT: list[tuple[Callable[..., MoEForward], MoECTESpec, Arguments, Arguments]] = [
    (direct.bwmm_shard_on_block, MoECTESpec(Kind.shard_on_block), {"n_block_per_iter": 2}, {}),
    (
        direct.blockwise_mm_baseline_shard_intermediate,
        spec(Kind.shard_on_i, checkpoint_activation=True),
        {"checkpoint_activation": True},
        {"expert_affinities_scaling_mode": PRE},
    ),
    (
        direct.blockwise_mm_baseline_shard_intermediate,
        spec(Kind.shard_on_i, expert_affinity_multiply_on_I=True),
        {"expert_affinity_multiply_on_I": True, "expert_affinities_scaling_mode": POST},
        {},
    ),
    (
        direct.blockwise_mm_baseline_shard_intermediate_hybrid,
        spec(Kind.shard_on_i_hybrid, num_static_block=3),
        {"num_static_block": 3},
        {},
    ),
]


@pytest.mark.parametrize(("kernel", "options", "own", "same"), DIRECT)
def test_direct_kernels_equal_moe_cte(
    kernel: Callable[..., MoEForward], options: MoECTESpec, own: Arguments, same: Arguments
) -> None:
    given = case(40, 16, 12, 4, 2, 8)
    if "conditions" in inspect.signature(kernel).parameters:
        given["conditions"] = conditions(given)
    assert_same(kernel(**given, **own), moe_cte(**given, spec=options, **same))


def test_direct_positions_swap_the_up_limits() -> None:
    """shard_on_block takes (upper, lower), the I-sharded kernels (lower, upper)."""
    block, on_i = (
        [name for name in inspect.signature(kernel).parameters if name.startswith("up_clamp")]
        for kernel in (direct.bwmm_shard_on_block, direct.blockwise_mm_baseline_shard_intermediate)
    )
    assert block == ["up_clamp_upper_limit", "up_clamp_lower_limit"]
    assert on_i == block[::-1]
    first = list(inspect.signature(direct.bwmm_shard_on_block).parameters)[:7]
    assert first[4:] == ["block_size", "token_position_to_id", "block_to_expert"]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (direct.bwmm_shard_on_block_mx, "shard_on_block_mx"),
        (direct.blockwise_mm_shard_intermediate_mx, "shard_on_i_mx"),
        (direct.blockwise_mm_shard_intermediate_mx_hybrid, "shard_on_i_mx_hybrid"),
    ],
)
def test_direct_mx_kernels_equal_moe_cte(kernel: Callable[..., MoEForward], kind: str) -> None:
    problem = MXCase(512, 64, "e5m2")
    given = problem.arguments(kind) | problem.biases() | {"expert_affinities_scaling_mode": POST}
    if kind.endswith("hybrid"):
        given["conditions"] = problem.plan.conditions
    expected = moe_cte(**given)
    given.pop("spec")
    assert_same(kernel(**given, weight_dtype=torch.float8_e5m2), expected)


def test_shard_hidden_fills_the_buffers_it_is_given() -> None:
    given = case(40, 16, 12, 4, 2, 8)
    plain = {name: value for name, value in given.items() if not any(part in name for part in ("bias", "clamp", "act"))}
    reference = moe_cte(**plain, spec=spec(Kind.shard_on_i, checkpoint_activation=True))
    assert reference.gate_up_activations_T is not None
    buffers = [torch.full_like(kept, torch.nan) for kept in reference[1:] if kept is not None]
    result = direct.blockwise_mm_baseline_shard_hidden(
        **plain, gate_up_activations_T=buffers[0], down_activations=buffers[1]
    )
    assert_same(result, reference)
    assert result.gate_up_activations_T is buffers[0]
    alone = direct.blockwise_mm_baseline_shard_hidden(**plain, down_activations=buffers[1])
    assert alone.gate_up_activations_T is None
    assert alone.down_activations is buffers[1]
    assert direct.blockwise_mm_baseline_shard_hidden(**plain).down_activations is None


def test_the_default_expert_equals_the_general_path_in_bf16() -> None:
    """Zero biases change nothing but the path through the code: the same roundings in the same places."""
    given = case(300, 64, 48, 3, 2, 128, torch.bfloat16)
    given = {k: v for k, v in given.items() if "clamp" not in k} | {"activation_function": ActFnType.SiLU}
    options = {"spec": spec(Kind.shard_on_i, checkpoint_activation=True), "device_limits": False}
    zeros = {name: torch.zeros_like(given[name]) for name in ("gate_and_up_proj_bias", "down_proj_bias")}
    general = moe_cte(**given | zeros, **options)
    default = moe_cte(**given | dict.fromkeys(zeros), **options)
    for one, other in zip(general, default, strict=True):
        # Native bf16 matmuls round every contribution as well: one bf16 step, at most 2^-7 of the largest value.
        assert (one.double() - other.double()).abs().max() <= 2**-7 * other.double().abs().max()


def test_bf16_rounds_pre_activations_and_intermediate_once() -> None:
    given = case(100, 32, 24, 2, 1, 128, torch.bfloat16) | {"expert_affinities_scaling_mode": Mode.NO_SCALE}
    options = {"spec": spec(Kind.shard_on_i, checkpoint_activation=True), "device_limits": False}
    result = moe_cte(**given, **options)
    ids = given["token_position_to_id"].view(-1, 128)
    for number, expert in enumerate(given["block_to_expert"].tolist()):
        x = given["hidden_states"][ids[number].long()].double()
        halves = []
        for half, (high, low) in enumerate(((0.5, -0.6), (0.7, -0.8))):
            sums = x @ given["gate_up_proj_weight"][expert, :, half].double()
            biased = sums + given["gate_and_up_proj_bias"][expert, half].double()
            halves.append(biased.clamp(low, high).bfloat16())
        assert result.gate_up_activations_T is not None
        kept = result.gate_up_activations_T[number].transpose(1, 2)
        differing = torch.stack([kept[half] != halves[half] for half in range(2)]).double().mean()
        # Only sums that fp32 and float64 see on two sides of a rounding border may differ.
        assert differing <= 2e-3
        product = (ACTIVATIONS["Swish"](kept[0].double()) * kept[1].double()).bfloat16().double()
        down = product @ given["down_proj_weight"][expert].double()
        assert result.down_activations is not None
        difference = result.down_activations[number].double() - down
        # One bf16 rounding of the result, and rare flips of a product's rounding.
        assert difference.abs().max() <= 2**-8 * down.abs().max()


def test_fp32_compute_dtype_leaves_out_the_roundings() -> None:
    given = case(100, 32, 24, 2, 1, 128, torch.bfloat16)
    exact = {name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
             for name, value in given.items()}  # fmt: skip
    options = {"spec": spec(Kind.shard_on_i), "device_limits": False}
    left = moe_cte(**given, **options, compute_dtype=torch.float32, accumulation_dtype=torch.float32)
    assert torch.equal(left.output, moe_cte(**exact, **options).output)


def test_the_direct_scales_win_over_the_configuration() -> None:
    given = case(40, 16, 12, 4, 2, 8)
    scales = [torch.rand(4, 1, 24), torch.rand(4, 1, 16)]
    names = ("gate_up_proj_scale", "down_proj_scale")
    direct_scales = dict(zip(names, scales, strict=True))
    config = QuantizationConfig(*scales)
    other = QuantizationConfig(*(scale + 1 for scale in scales))
    on_i = spec(Kind.shard_on_i)
    expected = moe_cte(**given, spec=on_i, **direct_scales)
    assert_same(moe_cte(**given, spec=on_i, quantization_config=config), expected)
    assert_same(moe_cte(**given, spec=on_i, quantization_config=other, **direct_scales), expected)


def test_scheduling_options_have_no_effect_on_values() -> None:
    given = case(40, 16, 12, 4, 2, 8)
    plain = moe_cte(**given, spec=MoECTESpec(Kind.shard_on_block))
    tuned = MoECTESpec(Kind.shard_on_block, ShardOnBlockConfig(n_block_per_iter=4, top_k=2, ep_degree=2))
    skipping = {"skip_dma": SkipMode(skip_weight=True), "conditions": conditions(given)}
    assert_same(moe_cte(**given, spec=tuned, **skipping), plain)


class LargestTensor(TorchDispatchMode):
    """Records the largest fp32 storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("general", [False, True])
def test_no_fp32_temporary_grows_with_the_whole_problem(general: bool) -> None:
    tokens, hidden, inner, experts = 4096, 32, 512, 16
    given = case(tokens, hidden, inner, experts, 4, 256, torch.bfloat16)
    if not general:
        given = {k: v for k, v in given.items() if not any(part in k for part in ("bias", "clamp", "function"))}
    whole = len(given["token_position_to_id"]) * 2 * inner
    release_scratch()
    with LargestTensor() as seen:
        moe_cte(**given, spec=spec(Kind.shard_on_i, checkpoint_activation=True), device_limits=False)
    release_scratch()
    assert 0 < seen.elements <= whole / 16

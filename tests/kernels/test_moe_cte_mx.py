"""The MX implementations of ``moe_cte``: formats, group maps, scale layouts, rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.formats import (
    MoEWeightMX,
    dequantize_moe_down,
    dequantize_moe_gate_up,
    moe_bias_to_lanes,
    pack_moe_scales,
    quantize_moe_down,
    quantize_moe_gate_up,
)
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.moe_cte import MoEForward, moe_cte
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationType,
    ShardOnBlockConfig,
    SkipMode,
)
from hf_neuron_moe.reference.mx_experts import quantize_static_, unpack_moe_scales
from tests.kernels.moe_oracle import Model

DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": None}
FLIPS = 1e-3
"""Frobenius bound: quantized operands are the same bits, but where fp32 and float64 differ in the last place of an
intermediate, one in some thousands of its elements rounds to the neighboring bf16 or e4m3 value."""


def groups(size: int, *, hidden: bool) -> list[list[int]]:
    """The documented group maps: 8 partitions x 4 lanes."""
    if hidden:
        places = [(tile * 128, size // 4) for tile in range(size // 512)]
        width = 128
    else:
        width = 128 if size >= 512 else size // 4
        places = [(tile * 512, width) for tile in range(-(-size // 512))]
    return [
        [first + lane * step + 8 * j + i for lane in range(4) for i in range(8)]
        for first, step in places
        for j in range(width // 8)
    ]


def mx_round(values: Tensor, *, hidden: bool, rule: str) -> Tensor:
    """MXFP8 e4m3 of float64 rows, one group after the other."""
    columns = values.shape[1]
    size = columns if hidden or columns < 512 else -(-columns // 512) * 512
    padded = torch.nn.functional.pad(values, (0, size - columns))
    out = padded.clone()
    for index in groups(size, hidden=hidden):
        block = padded[:, index]
        largest = block.abs().amax(1, keepdim=True)
        exponent = torch.floor(torch.log2(largest.clamp(min=1e-30))) - (7 if rule == "neuron" else 8)
        codes = (block / 2**exponent).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        out[:, index] = codes.double() * 2**exponent
    return out[:, :columns]


class MXCase:
    """Random bf16 operands with quantized weights."""

    def __init__(self, hidden: int, inner: int, fmt: str = "e4m3fn", tokens: int = 20, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.rand(*shape, generator=g) * 2 - 1  # noqa: E731
        index = torch.rand(tokens, 3, generator=g).topk(2, 1).indices
        self.block, self.tokens, self.fmt = 16, tokens, fmt
        self.plan = build_block_plan(expert_mask(index, 3), self.block, top_k=2)
        self.affinities = masked_affinities(index, torch.rand(tokens, 2, generator=g), 3).bfloat16()
        self.x = torch.cat([rand(tokens, hidden), torch.zeros(1, hidden)]).bfloat16()
        self.gate_up = quantize_moe_gate_up(rand(3, hidden, 2, inner) * 0.2, fmt=fmt)
        self.down = quantize_moe_down(rand(3, inner, hidden) * 0.2, fmt=fmt)
        self.bias = (rand(3, 2, inner).bfloat16(), rand(3, hidden).bfloat16())
        self.inner, self.rand = inner, rand

    def arguments(self, kind: str = "shard_on_block_mx") -> dict[str, Any]:
        return {
            "hidden_states": self.x,
            "expert_affinities_masked": self.affinities,
            "gate_up_proj_weight": self.gate_up.words,
            "down_proj_weight": self.down.words,
            "gate_up_proj_scale": self.gate_up.scales,
            "down_proj_scale": self.down.scales,
            "token_position_to_id": self.plan.token_position_to_id,
            "block_to_expert": self.plan.block_to_expert,
            "block_size": self.block,
            "spec": MoECTESpec(MoECTEImplementation[kind], ShardOnBlockConfig(weight_dtype=DTYPES[self.fmt])),
            "device_limits": False,
            "accumulation_dtype": torch.float32,
        }

    def biases(self) -> dict[str, Tensor]:
        return {"gate_and_up_proj_bias": moe_bias_to_lanes(self.bias[0]), "down_proj_bias": self.bias[1]}

    def model(self, rule: str, *, bf16: bool) -> Model:
        def inner(h: Tensor) -> Tensor:
            return mx_round(h.bfloat16().double() if bf16 else h, hidden=False, rule=rule)

        return Model(
            dequantize_moe_gate_up(self.gate_up).double(),
            dequantize_moe_down(self.down)[:, : self.inner].double(),
            quantize_hidden=lambda x: mx_round(x, hidden=True, rule=rule),
            quantize_inner=inner,
        )

    def check(self, result: MoEForward, model: Model) -> None:
        plan = self.plan
        expected, *_ = model.run(self.x, self.affinities, plan.token_position_to_id, plan.block_to_expert, self.block)
        difference = result.output.double() - expected
        assert difference.norm() <= FLIPS * expected.norm()
        assert expected.norm() > 1


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("convention", ["device", "golden"])
@pytest.mark.parametrize("rule", ["neuron", "floor"])
@pytest.mark.parametrize(
    ("hidden", "inner", "fmt"),
    [(512, 32, "e4m3fn"), (1024, 96, "e5m2"), (512, 512, "e2m1"), (512, 1024, "e4m3fn"), (512, 544, "e2m1")],
)
def test_against_the_model(hidden: int, inner: int, fmt: str, rule: str, convention: str) -> None:
    case = MXCase(hidden, inner, fmt)
    model = case.model(rule, bf16=convention == "device")
    model.bias = (case.bias[0].double(), case.bias[1].double())
    model.activation, model.limits = "Swish", (1.5, None, 2.0, -1.0)
    options = {
        "activation_function": ActFnType.Swish,
        "gate_clamp_upper_limit": 1.5,
        "up_clamp_upper_limit": 2.0,
        "up_clamp_lower_limit": -1.0,
        "mx_scale_rule": rule,
        "convention": convention,
    }
    case.check(moe_cte(**case.arguments() | case.biases() | options), model)


@pytest.mark.parametrize("kind", ["shard_on_block_mx", "shard_on_i_mx", "shard_on_i_mx_hybrid"])
@pytest.mark.parametrize("activation", ["SiLU", "GELU", "GELU_Tanh_Approx", "Swish"])
def test_every_implementation_and_activation_without_biases(kind: str, activation: str) -> None:
    case = MXCase(512, 64)
    model = case.model("neuron", bf16=True)
    model.activation = activation
    changes = {"activation_function": ActFnType[activation], "conditions": case.plan.conditions}
    if kind == "shard_on_block_mx":
        changes["conditions"] = torch.nn.functional.pad(case.plan.conditions, (0, 1))
    case.check(moe_cte(**case.arguments(kind) | changes), model)


def test_the_rules_differ_and_the_default_is_the_newer_one() -> None:
    case = MXCase(512, 64)
    default, newer, earlier = (
        moe_cte(**case.arguments() | change).output
        for change in ({}, {"mx_scale_rule": "neuron"}, {"mx_scale_rule": "floor"})
    )
    assert torch.equal(default, newer)
    assert not torch.equal(default, earlier)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("hidden", "inner"), [(1024, 1024), (512, 64), (512, 384), (2560, 480), (512, 512), (512, 544)]
)
def test_packed_scales_are_a_layout_only(hidden: int, inner: int) -> None:
    case = MXCase(hidden, inner)
    spec = MoECTESpec(MoECTEImplementation.shard_on_block_mx, ShardOnBlockConfig(use_packed_scales=True))
    packed = {
        "spec": spec,
        "gate_up_proj_scale": pack_moe_scales(case.gate_up.scales),
        "down_proj_scale": pack_moe_scales(case.down.scales),
    }
    plain = moe_cte(**case.arguments())
    assert torch.equal(moe_cte(**case.arguments() | packed).output, plain.output)


@pytest.mark.parametrize("tiles", [1, 3, 4, 6])
def test_unpacking_inverts_packing(tiles: int) -> None:
    scales = torch.randint(0, 255, (2, 16, 2, tiles, 5), dtype=torch.uint8)
    assert torch.equal(unpack_moe_scales(pack_moe_scales(scales), tiles), scales)
    assert torch.equal(unpack_moe_scales(pack_moe_scales(scales[:, :, 0]), tiles), scales[:, :, 0])


def test_block128_scales_stand_for_their_groups() -> None:
    case = MXCase(512, 320)
    coarse = torch.randint(118, 124, (3, 4, 2, 1, 3), dtype=torch.uint8)
    fine = coarse.repeat_interleave(4, 1).repeat_interleave(128, 4)[..., :320]
    arguments = case.arguments("shard_on_i_mx")
    left = moe_cte(**arguments | {"gate_up_proj_scale": coarse})
    right = moe_cte(**arguments | {"gate_up_proj_scale": fine})
    assert torch.equal(left.output, right.output)
    down = torch.randint(118, 124, (3, 4, 1, 4), dtype=torch.uint8)
    rows = case.down.scales.shape[1]
    wide = down.repeat_interleave(4, 1)[:, :rows].repeat_interleave(128, 3)
    left, right = (moe_cte(**arguments | {"down_proj_scale": scale}) for scale in (down, wide))
    assert torch.equal(left.output, right.output)


def test_static_activations_saturate() -> None:
    values = torch.tensor([1000.0, -1000.0, 464.1, 3.0, float("inf")])
    assert (quantize_static_(values * 0.5, 0.5) / 0.5).tolist() == [448.0, -448.0, 448.0, 3.0, 448.0]


def test_static_mx_uses_tensor_scales_and_no_block_scales() -> None:
    case = MXCase(512, 64)
    unit = [
        MoEWeightMX(weight.words, torch.full_like(weight.scales, 127), weight.fmt)
        for weight in (case.gate_up, case.down)
    ]
    weight_scales = {"gate_up_proj_scale": case.rand(3, 2, 1) * 0.01, "down_proj_scale": case.rand(3, 1) * 0.01}
    hidden_scale, inner_scale = torch.tensor([0.01, 0.02, 0.005]), torch.tensor([0.1, 0.03, 0.2])
    spec = MoECTESpec(
        MoECTEImplementation.shard_on_block_mx,
        ShardOnBlockConfig(quantization_type=QuantizationType.STATIC_MX, weight_dtype=torch.float8_e4m3fn),
    )
    result = moe_cte(
        **case.arguments()
        | weight_scales
        | {
            "spec": spec,
            "gate_up_in_scale": hidden_scale.view(3, 1, 1).expand(3, 2, 1),
            "down_in_scale": inner_scale.view(3, 1),
        }
    )
    outputs = torch.zeros(case.tokens + 1, 512, dtype=torch.float64)
    for expert in range(3):

        def static(x: Tensor, scale: Tensor) -> Tensor:
            return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()

        model = Model(
            dequantize_moe_gate_up(unit[0]).double(),
            dequantize_moe_down(unit[1]).double(),
            gate_up_factor=weight_scales["gate_up_proj_scale"].double().expand(3, 2, 64),
            down_factor=weight_scales["down_proj_scale"].double().expand(3, 512),
            quantize_hidden=lambda x, s=hidden_scale[expert]: static(x, s),
            quantize_inner=lambda h, s=inner_scale[expert]: static(h.bfloat16(), s),
        )
        plan, only = case.plan, case.affinities.view(-1, 3).clone()
        only[:, [other for other in range(3) if other != expert]] = 0
        outputs += model.run(case.x, only, plan.token_position_to_id, plan.block_to_expert, case.block)[0]
    assert (result.output - outputs).norm() <= FLIPS * outputs.norm()


def test_skip_token_and_unsigned_words() -> None:
    case = MXCase(512, 64)
    ids = case.plan.token_position_to_id
    skipped = {
        "hidden_states": case.x[:-1],
        "expert_affinities_masked": case.affinities[:-3],
        "token_position_to_id": torch.where(ids == case.tokens, -1, ids),
        "skip_dma": SkipMode(skip_token=True, skip_weight=True),
        "gate_up_proj_weight": case.gate_up.words.view(torch.uint32),
        "down_proj_weight": case.down.words.view(torch.uint32),
        "gate_up_proj_scale": case.gate_up.scales.view(torch.float8_e8m0fnu),
    }
    left, right = moe_cte(**case.arguments()), moe_cte(**case.arguments() | skipped)
    assert torch.equal(left.output[:-1], right.output)


def test_the_output_is_bf16_unless_asked_otherwise() -> None:
    case = MXCase(512, 64)
    exact = moe_cte(**case.arguments())
    rounded = moe_cte(**case.arguments() | {"accumulation_dtype": None})
    assert rounded.output.dtype == torch.bfloat16
    assert torch.equal(rounded.output, exact.output.bfloat16())

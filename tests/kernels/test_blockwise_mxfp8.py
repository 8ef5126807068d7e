"""The MXFP8 training pair against a readable float64 oracle, block by block.

Tolerance: quantized operands are the same bits in both, so results agree to fp32 summation order before one bf16
rounding (2^-9). Where that order flips the rounding of an intermediate, one of a sum's terms moves by an MX step (1/16
of it): 8e-3 of the largest value bounds that, and the Frobenius bound of 2e-3 keeps such flips rare.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.blockwise_mxfp8 import blockwise_mm_bwd_mxfp8, blockwise_mm_fwd_mxfp8
from hf_neuron_moe.reference.moe_types import ClampLimits, SkipMode
from tests.refusals import refused

sys.path.insert(0, str(Path(__file__).parent))
import mx_oracle

Arguments = dict[str, Any]
NO_LIMITS, GPT_OSS = ClampLimits(), ClampLimits(0.5, -0.5, 0.75, None)
H, I, E, K = 128, 256, 3, 2  # noqa: E741


def assert_close(actual: Tensor, expected: Tensor) -> None:
    difference = actual.double() - expected
    assert difference.norm() <= 2e-3 * expected.norm()
    assert difference.abs().max() <= 8e-3 * expected.abs().max() + 1e-12


def rows_of(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def make(tokens: int, block: int, skip_token: bool = False) -> tuple[Arguments, Tensor]:
    """Return the forward's arguments and an output gradient."""
    torch.manual_seed(block + tokens)
    x, dout = rows_of(tokens + 1, H), rows_of(tokens + 1, H)
    x[-1] = dout[-1] = 0
    index = torch.rand(tokens, E).topk(K).indices
    plan = build_block_plan(expert_mask(index, E), block, top_k=K, skip_token=skip_token)
    rows = tokens if skip_token else tokens + 1
    return {
        "hidden_states": x[:rows],
        "expert_affinities_masked": masked_affinities(
            index, torch.rand(tokens, K).softmax(-1), E, skip_token=skip_token
        ),
        "gate_up_proj_weight": rows_of(E, 2, I, H, scale=H**-0.5),
        "down_proj_weight": rows_of(E, H, I, scale=I**-0.5),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": block,
        "skip_dma": SkipMode(skip_token),
    }, dout[:rows]


def backward_arguments(forward: Arguments, gate_up: Tensor, dout: Tensor) -> Arguments:
    return forward | {
        "gate_up_proj_weight": forward["gate_up_proj_weight"].permute(0, 3, 1, 2).contiguous(),
        "down_proj_weight": forward["down_proj_weight"].transpose(1, 2).contiguous(),
        "gate_up_proj_act_checkpoint_T": gate_up,
        "output_hidden_states_grad": dout,
    }


def clamp(values: Tensor, upper: float | None, lower: float | None) -> Tensor:
    values = values if upper is None else values.clamp(max=upper)
    return values if lower is None else values.clamp(min=lower)


def inside(values: Tensor, upper: float | None, lower: float | None) -> Tensor:
    return (values < (upper or torch.inf)) & (values > (lower or -torch.inf))


@pytest.mark.sampled(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("limits", [NO_LIMITS, GPT_OSS], ids=["plain", "clamped"])
@pytest.mark.parametrize(("block", "skip_token"), [(128, False), (256, True), (512, False), (1024, False)])
def test_pair(block: int, skip_token: bool, limits: ClampLimits) -> None:
    """Groups along the token axis are formed block by block; a partly filled block is zero padded."""
    tokens = 700
    arguments, dout = make(tokens, block, skip_token)
    forward = blockwise_mm_fwd_mxfp8(**arguments, clamp_limits=limits)
    backward = blockwise_mm_bwd_mxfp8(
        **backward_arguments(arguments, forward.gate_up_activations_T, dout), clamp_limits=limits
    )
    up_limits = (limits.linear_clamp_upper_limit, limits.linear_clamp_lower_limit)
    gate_limits = (limits.non_linear_clamp_upper_limit, limits.non_linear_clamp_lower_limit)
    q, bf16 = mx_oracle.q, mx_oracle.bf16
    x, grad = (torch.cat([t[:tokens], t.new_zeros(1, H)]).double() for t in (arguments["hidden_states"], dout))
    table = arguments["expert_affinities_masked"].view(-1, E)[:tokens].double()
    gate_up, down = arguments["gate_up_proj_weight"].double(), arguments["down_proj_weight"].double()
    output, d_x, d_table = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(table)
    d_gate_up, d_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    for number, expert in enumerate(arguments["block_to_expert"].tolist()):
        slots = arguments["token_position_to_id"][number * block : (number + 1) * block].long()
        real = (slots >= 0) & (slots < tokens)
        if not real.any():
            assert not forward.intermediate_T[number].any()
            continue
        ids = torch.where(real, slots, tokens)
        scale = torch.where(real, table[ids.clamp(max=tokens - 1), expert], 0.0)[:, None]
        gate, up = (
            clamp(q(x[ids], 1) @ q(gate_up[expert, half], 1).T, *side)
            for half, side in enumerate((gate_limits, up_limits))
        )
        inter = bf16(torch.nn.functional.silu(gate) * up * scale)
        output.index_add_(0, ids, q(inter, 1) @ q(down[expert], 1).T)
        saved_gate, saved_up = forward.gate_up_activations_T[number].transpose(1, 2).double()
        assert_close(saved_gate[real], bf16(gate)[real])
        assert_close(saved_up[real], bf16(up)[real])
        assert_close(forward.intermediate_T[number].T, inter)
        d_int = q(grad[ids], 1) @ q(down[expert], 0)
        sigmoid = torch.sigmoid(saved_gate)
        act, slope = bf16(saved_gate * sigmoid), bf16(sigmoid * (1 + saved_gate * (1 - sigmoid)))
        product = bf16(act * saved_up)
        d_table[ids[real], expert] = (d_int * product).sum(1)[real]
        d_int = d_int * scale
        d_gate = bf16(d_int * bf16(slope * saved_up)) * inside(saved_gate, *gate_limits)
        d_up = bf16(d_int * act) * inside(saved_up, *up_limits)
        both = torch.cat([d_gate, d_up], 1)
        d_x.index_add_(0, ids, q(both, 1) @ q(gate_up[expert].reshape(2 * I, H), 0))
        d_gate_up[expert] += (q(both, 0).T @ q(x[ids], 0)).view(2, I, H)
        d_down[expert] += q(grad[ids], 0).T @ q(bf16(product * scale), 0)
    assert_close(forward.output[:tokens], output[:tokens])
    assert_close(backward.hidden_states_grad[:tokens], d_x[:tokens])
    assert_close(backward.gate_up_proj_weight_grad.permute(0, 2, 3, 1), d_gate_up)
    assert_close(backward.down_proj_weight_grad.transpose(1, 2), d_down)
    assert_close(backward.expert_affinities_masked_grad.view(-1, E)[:tokens], d_table)


REFUSED: list[tuple[type[NeuronMoEError], str, str, Arguments]] = [
    (ConfigError, "gate_up_proj_scale", "layout of pre-quantized", {"gate_up_proj_scale": torch.ones(1)}),
    (ConfigError, "down_proj_scale", "", {"down_proj_scale": torch.ones(1)}),
    (ShapeError, "block_size", "", {"block_size": 64}),
    (DTypeError, "hidden_states", "", {"hidden_states": torch.ones(21, H)}),
    (DTypeError, "down_proj_weight", "", {"down_proj_weight": torch.ones(E, I, H)}),
    (DTypeError, "gate_up_proj_weight", "", {"gate_up_proj_weight": torch.ones(1, dtype=torch.int32)}),
    (ShapeError, "token_position_to_id", "", {"gap": True}),
    (
        ConfigError,
        "clamp_limits.non_linear_clamp_upper_limit",
        "got 0.7.*0.69921875",
        {"clamp_limits": ClampLimits(non_linear_clamp_upper_limit=0.7)},
    ),
    (ConfigError, "clamp_limits", "got a tuple", {"clamp_limits": (1.0, -1.0, 1.0, -1.0)}),
    (ConfigError, "skip_dma", "got True", {"skip_dma": True}),
    (ConfigError, "device_limits", "got 'off'", {"device_limits": "off"}),
]
FORWARD_ONLY: list[tuple[type[NeuronMoEError], str, str, Arguments]] = [
    (ConfigError, "gate_and_up_proj_bias", "no biases", {"gate_and_up_proj_bias": torch.ones(1)}),
    (ConfigError, "down_proj_bias", "", {"down_proj_bias": torch.ones(1)}),
    (ConfigError, "activation_function", "", {"activation_function": "Swish"}),
    (ShapeError, "gate_up_proj_weight", "", {"gate_up_proj_weight": rows_of(E, H, 2, I)}),
    (ShapeError, "H of hidden_states", "", {"narrow": True}),
]
BACKWARD_ONLY: list[tuple[type[NeuronMoEError], str, str, Arguments]] = [
    (ConfigError, "bias", "got True", {"bias": True}),
    (ConfigError, "bias", "got a tensor", {"bias": torch.ones(1)}),
    (ConfigError, "activation_type", "", {"activation_type": "GELU"}),
    (ConfigError, "shard_option", "", {"shard_option": "SHARD_ON_HIDDEN"}),
    (ConfigError, "affinity_option", "", {"affinity_option": "AFFINITY_ON_H"}),
    (
        DTypeError,
        "gate_up_proj_act_checkpoint_T",
        "is required",
        {"gate_up_proj_act_checkpoint_T": None},
    ),
    (ShapeError, "gate_up_proj_weight", "", {"gate_up_proj_weight": rows_of(E, 2, I, H)}),
]


def spoil(arguments: Arguments, change: Arguments) -> Arguments:
    if change.pop("gap", False):
        arguments["token_position_to_id"] = arguments["token_position_to_id"].clone()
        arguments["token_position_to_id"][0] = 20
    if change.pop("narrow", False):
        change = {
            "hidden_states": rows_of(21, 64),
            "gate_up_proj_weight": rows_of(E, 2, I, 64),
            "down_proj_weight": rows_of(E, 64, I),
        }
    return arguments | change


@pytest.mark.parametrize(("kind", "argument", "says", "change"), [*REFUSED, *FORWARD_ONLY])
def test_forward_refusals(kind: type[NeuronMoEError], argument: str, says: str, change: Arguments) -> None:
    with refused(kind, argument, says, where="blockwise_mm_fwd_mxfp8"):
        blockwise_mm_fwd_mxfp8(**spoil(make(20, 128)[0], dict(change)))


@pytest.mark.parametrize(("kind", "argument", "says", "change"), [*REFUSED, *BACKWARD_ONLY])
def test_backward_refusals(kind: type[NeuronMoEError], argument: str, says: str, change: Arguments) -> None:
    arguments, dout = make(20, 128)
    blocks = len(arguments["block_to_expert"])
    arguments = backward_arguments(arguments, rows_of(blocks, 2, I, 128), dout)
    with refused(kind, argument, says, where="blockwise_mm_bwd_mxfp8"):
        blockwise_mm_bwd_mxfp8(**spoil(arguments, dict(change)))


def test_the_bf16_value_of_a_limit_masks_what_was_clamped() -> None:
    """0.69921875 is bf16(0.7): saturated pre-activations equal it and get no gradient; next to 0.7 they are inside."""
    arguments, dout = make(40, 128)

    def gate_gradient(limit: float, device_limits: bool | None) -> Tensor:
        given = {"clamp_limits": ClampLimits(non_linear_clamp_upper_limit=limit, non_linear_clamp_lower_limit=-limit)}
        given |= {"device_limits": device_limits}
        kept = blockwise_mm_fwd_mxfp8(**arguments, **given).gate_up_activations_T
        saturated = kept[:, 0].abs() == 0.69921875
        assert saturated.any()
        # Gradients only where the gate saturates: whatever is left comes from values taken for inside.
        only = torch.where(saturated, kept[:, 0], 0.69921875)
        kept = torch.stack([only, kept[:, 1]], 1)
        return blockwise_mm_bwd_mxfp8(**backward_arguments(arguments, kept, dout), **given)[2][:, :, 0]

    assert not gate_gradient(0.69921875, None).any()
    assert gate_gradient(0.7, False).any()

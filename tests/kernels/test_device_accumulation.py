"""``accumulation="device"`` against models of plain loops: float64 products, bf16 where the kernels round.

The models share no code with the package. Products are exact in float64 and rounded to fp32 once; the kernels' fp32
sums differ from that by their order, so that now and then a value lies on the other side of a bf16 rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import MoECTEImplementation, MoECTESpec, ShardOnIConfig

T, H, I, E, K, B = 96, 64, 64, 4, 2, 8  # noqa: E741
FLIPPED = 0.01
"""Part of the values that may differ, by one bf16 step: fp32 sums of 64 terms decide about some roundings."""


def bf16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).double()


def operands(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(T, E, generator=generator).topk(K, 1).indices
    plan = build_block_plan(expert_mask(index, E), B, top_k=K)
    draw = lambda *shape: (torch.rand(*shape, generator=generator) * 2 - 1).bfloat16()  # noqa: E731
    return {
        "hidden_states": torch.cat([draw(T, H), torch.zeros(1, H).bfloat16()]),
        "expert_affinities_masked": masked_affinities(index, torch.rand(T, K, generator=generator), E).bfloat16(),
        "gate_up_proj_weight": draw(E, H, 2, I) * 0.25,
        "down_proj_weight": draw(E, I, H) * 0.25,
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": B,
        "gate_and_up_proj_bias": draw(E, 2, I),
        "down_proj_bias": draw(E, H),
        "device_limits": False,
    }


def model(given: dict[str, Any], kind: str, *, saves: bool) -> tuple[Tensor, Tensor]:
    """Return the output of the kernel's loops, and that without any rounding between blocks and cores."""
    hidden, table = given["hidden_states"].double(), given["expert_affinities_masked"].double().view(-1, E)
    gate_up, down = given["gate_up_proj_weight"].double(), given["down_proj_weight"].double()
    bias, down_bias = given["gate_and_up_proj_bias"].double(), given["down_proj_bias"].double()
    outputs, exact = torch.zeros(2, T + 1, H).double(), torch.zeros(T + 1, H).double()
    for block, expert in enumerate(given["block_to_expert"].tolist()):
        ids = given["token_position_to_id"][block * B : (block + 1) * B].tolist()
        sums = torch.einsum("bh,hki->kbi", hidden[ids], gate_up[expert]) + bias[expert][:, None]
        gate, up = bf16(sums) if saves else sums.float().double()
        inter = bf16(gate / (1 + torch.exp(-gate)) * up)
        parts = [inter[:, half] @ down[expert, half] for half in (slice(0, I // 2), slice(I // 2, I))]
        core = block % 2 if kind == "shard_on_block" else 0
        rounded = sum(parts) if kind == "shard_on_block" else bf16(parts[0]) + bf16(parts[1])
        a = table[ids, expert][:, None]
        for slot, token in enumerate(ids):
            if token < T:
                outputs[core, token] = bf16(outputs[core, token] + (rounded[slot] + down_bias[expert]) * a[slot])
                exact[token] += (sum(parts)[slot] + down_bias[expert]) * a[slot]
    return bf16(outputs.sum(0)), exact


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("kind", ["shard_on_block", "shard_on_i"])
def test_forward_is_the_model_of_the_kernel(kind: str, saves: bool) -> None:
    if saves and kind == "shard_on_block":
        pytest.skip("it saves nothing")
    given = operands() | {
        "spec": MoECTESpec(MoECTEImplementation[kind], shard_on_I=ShardOnIConfig(checkpoint_activation=saves))
    }
    device, convention = (moe_cte(**given, accumulation=name) for name in ("device", "convention"))
    expected, _ = model(given, kind, saves=saves)
    assert_model(device.output, expected, convention.output)
    if saves:
        assert device.gate_up_activations_T is not None and convention.gate_up_activations_T is not None
        assert torch.equal(device.gate_up_activations_T, convention.gate_up_activations_T)


def assert_model(device: Tensor, expected: Tensor, convention: Tensor) -> None:
    """`device` is the model's but for flipped roundings, and is not what `convention` has."""
    device, convention = device.double(), convention.double()
    different = device != expected
    assert different.double().mean() <= FLIPPED
    assert ((device - expected).abs() <= 2**-7 * expected.abs() + 1e-30)[different].all()
    assert (convention != expected).double().mean() > 10 * FLIPPED


@pytest.mark.parametrize("kind", ["shard_on_block", "shard_on_i"])
@pytest.mark.parametrize("change", ["fp32 operands", "accumulation_dtype"])
def test_wide_sums_are_those_of_the_convention(kind: str, change: str) -> None:
    """Running outputs in fp32 differ by the order of sums alone, and of unsaved pre-activations by their rounding."""
    given = operands() | {"spec": MoECTESpec(MoECTEImplementation[kind])}
    if change == "fp32 operands":
        given |= {name: value.float() for name, value in given.items() if getattr(value, "dtype", 0) == torch.bfloat16}
    given |= {"accumulation_dtype": torch.float32, "compute_dtype": torch.float32}
    device, convention = (moe_cte(**given, accumulation=name).output for name in ("device", "convention"))
    torch.testing.assert_close(device, convention, rtol=1e-6, atol=2e-6)

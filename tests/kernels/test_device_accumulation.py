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
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
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


@pytest.mark.parametrize(("kind", "saves"), [("shard_on_block", False), ("shard_on_i", False), ("shard_on_i", True)])
def test_forward_is_the_model_of_the_kernel(kind: str, saves: bool) -> None:
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
    assert (device - expected).abs().max() <= 2**-7 * expected.abs().max()  # a step of a running sum
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


def backward_operands(seed: int = 1) -> dict[str, Any]:
    """The backward's operands with the checkpoints of a forward that saves them."""
    forward = operands(seed) | {
        "spec": MoECTESpec(MoECTEImplementation.shard_on_i, shard_on_I=ShardOnIConfig(checkpoint_activation=True))
    }
    saved = moe_cte(**forward)
    generator = torch.Generator().manual_seed(seed + 1)
    gradient = (torch.rand(T + 1, H, generator=generator) * 2 - 1).bfloat16()
    given = {name: value for name, value in forward.items() if name not in ("spec", "gate_and_up_proj_bias")}
    return given | {
        "gate_up_proj_act_checkpoint_T": saved.gate_up_activations_T,
        "down_proj_act_checkpoint": saved.down_activations,
        "output_hidden_states_grad": gradient,
        "bias": True,
    }


def backward_model(given: dict[str, Any], *, on_hidden: bool, by_block: bool) -> list[Tensor]:
    """Return the gradients of the kernel's loops, in its order; `by_block`: each core has every other block."""
    x, dout = given["hidden_states"].double(), given["output_hidden_states_grad"].double()
    table = given["expert_affinities_masked"].double().view(-1, E)
    gate_up, down = given["gate_up_proj_weight"].double(), given["down_proj_weight"].double()
    down_bias = given["down_proj_bias"].double()
    shapes = [(T + 1, H), (T + 1, E), (E, H, 2, I), (E, I, H), (E, 2, I), (E, H)]
    cores = [[torch.zeros(shape).double() for shape in shapes] for _ in range(2)]
    for block, expert in enumerate(given["block_to_expert"].tolist()):
        d_x, d_a, d_gate_up, d_down, d_bias, d_down_bias = cores[block % 2 if by_block else 0]
        ids = [token for token in given["token_position_to_id"][block * B : (block + 1) * B].tolist() if token < T]
        gate, up = given["gate_up_proj_act_checkpoint_T"][block].double().transpose(1, 2)[:, : len(ids)]
        a = table[ids, expert][:, None]
        sigmoid = 1 / (1 + torch.exp(-gate))
        h = gate * sigmoid * up
        dy = bf16(dout[ids] * a) if on_hidden else dout[ids]
        dh = bf16(dy @ down[expert].T)
        if on_hidden:
            d_a[ids, expert] = (dout[ids] * given["down_proj_act_checkpoint"][block, : len(ids)].double()).sum(1)
        else:
            d_a[ids, expert] = (dh * h).sum(1)
            dh, h = dh * a, h * a
        d_a[ids, expert] += dout[ids] @ down_bias[expert]
        inner = torch.stack([bf16(dh * up * sigmoid * (1 + gate * (1 - sigmoid))), bf16(dh * gate * sigmoid)])
        d_gate_up[expert] = bf16(d_gate_up[expert] + torch.einsum("bh,kbi->hki", x[ids], inner))
        d_down[expert] = bf16(d_down[expert] + bf16(h).T @ dy)
        d_bias[expert] = bf16(d_bias[expert] + inner.sum(1))
        d_down_bias[expert] = bf16(d_down_bias[expert] + (dy if on_hidden else dy * a).sum(0))
        d_x[ids] = bf16(d_x[ids] + torch.einsum("kbi,hki->bh", inner, gate_up[expert]))
    return [bf16(one + other) for one, other in zip(*cores, strict=True)]


@pytest.mark.parametrize("by_block", [False, True], ids=["every block on both cores", "blocks in turn"])
@pytest.mark.parametrize("on_hidden", [False, True], ids=["on I", "on H"])
def test_backward_is_the_model_of_the_kernel(on_hidden: bool, by_block: bool) -> None:
    given = backward_operands()
    given |= {
        "affinity_option": "AFFINITY_ON_H" if on_hidden else "AFFINITY_ON_I",
        "shard_option": "SHARD_ON_BLOCK" if by_block else "SHARD_ON_FREE",
    }
    device, convention = (blockwise_mm_bwd(**given, accumulation=name) for name in ("device", "convention"))
    expected = backward_model(given, on_hidden=on_hidden, by_block=by_block)
    for number in (0, 2, 3, 4, 5):
        assert_model(device[number], expected[number], convention[number])
    # A pair is in one block: the kernel assigns the affinity's gradient, it never adds.
    close = {"rtol": 2**-7, "atol": 2**-7 * float(expected[1].abs().max())}
    torch.testing.assert_close(device[1].view(T + 1, E).double(), expected[1], **close)


def test_weight_gradients_in_fp32_are_those_of_the_convention() -> None:
    """``accumulation_dtype`` of 2.33: sums in fp32 after every block differ by their order alone."""
    given = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in backward_operands().items()
    }
    device, convention = (blockwise_mm_bwd(**given, accumulation=name) for name in ("device", "convention"))
    for one, other in zip(device, convention, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))

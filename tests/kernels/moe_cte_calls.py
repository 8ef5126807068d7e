"""Legal bf16 calls of every implementation of ``moe_cte``, for tests that break one rule of them at a time."""

from __future__ import annotations

from typing import Any

import torch

from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    ExpertAffinityScaleMode,
    MoECTEImplementation,
    MoECTESpec,
    QuantizationType,
    ShardOnBlockConfig,
    ShardOnIConfig,
)

Arguments = dict[str, Any]
T, H, I, E, B = 128, 512, 16, 2, 256  # noqa: E741
Mode = ExpertAffinityScaleMode


def bf16(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def with_sink_row(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def fp8(*shape: int, value: float = 240.0) -> torch.Tensor:
    return torch.full(shape, value).to(torch.float8_e4m3fn)


def spec(kind: str = "shard_on_i", **options: Any) -> MoECTESpec:
    on_i = {name: options.pop(name) for name in list(options) if name in ShardOnIConfig.__dataclass_fields__}
    return MoECTESpec(MoECTEImplementation[kind], ShardOnBlockConfig(**options), ShardOnIConfig(**on_i))


def arguments(block: int = B, hidden: int = H, inner: int = I, tokens: int = T, top_k: int = 1) -> Arguments:
    """A legal bf16 call of shard_on_i (and of shard_on_block)."""
    index = torch.arange(tokens * top_k).view(tokens, top_k) % E
    plan = build_block_plan(expert_mask(index, E), block, top_k=top_k)
    return {
        "hidden_states": with_sink_row(bf16(tokens, hidden)),
        "expert_affinities_masked": masked_affinities(index, torch.full((tokens, top_k), 0.5), E),
        "gate_up_proj_weight": bf16(E, hidden, 2, inner),
        "down_proj_weight": bf16(E, inner, hidden),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": block,
        "spec": spec(),
        "activation_function": ActFnType.SiLU,
    }


def mx_arguments(kind: str = "shard_on_block_mx", block: int = B, inner: int = 64, **options: Any) -> Arguments:
    """A legal bf16 call of an MX implementation."""
    partitions, tiles = min(128, inner // 4), -(-inner // 512)
    words = {
        "gate_up_proj_weight": torch.zeros(E, 128, 2, 1, inner, dtype=torch.int32),
        "gate_up_proj_scale": torch.full((E, 16, 2, 1, inner), 127, dtype=torch.uint8),
        "down_proj_weight": torch.zeros(E, partitions, tiles, H, dtype=torch.int32),
        "down_proj_scale": torch.full((E, partitions // 8, tiles, H), 127, dtype=torch.uint8),
    }
    return arguments(block) | words | {"spec": spec(kind, **options)}


def fp8_scales() -> Arguments:
    return {"gate_up_proj_scale": torch.ones(E, 1, 2 * I), "down_proj_scale": torch.ones(E, 1, H)}


def static_mx() -> Arguments:
    return mx_arguments(quantization_type=QuantizationType.STATIC_MX) | {
        "gate_up_proj_scale": torch.ones(E, 2, 1),
        "down_proj_scale": torch.ones(E, 1),
        "gate_up_in_scale": torch.ones(E, 2, 1),
        "down_in_scale": torch.ones(E, 1),
    }


def conditions(length: int, ones: int) -> torch.Tensor:
    return (torch.arange(length) < ones).int()


BIASES = {"gate_and_up_proj_bias": bf16(E, 2, I), "down_proj_bias": bf16(E, H)}

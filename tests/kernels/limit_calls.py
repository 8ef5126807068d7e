"""Calls at the edge of the limits, made of operands that are expanded from one element.

The documents' sizes go up to gigabytes, and an error comes before any product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe import kernels
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.moe_types import MoECTEImplementation
from hf_neuron_moe.reference.specification import Constraint
from tests.kernels.moe_cte_calls import spec

Call = dict[str, Any]
ALL = tuple(kind.name for kind in MoECTEImplementation)
MX = {kind for kind in ALL if "mx" in kind}
MEMBERS = {
    "activation_function": [each.name for each in kernels.ActFnType],
    "activation_type": [each.name for each in kernels.ActFnType],
    "expert_affinities_scaling_mode": [each.name for each in kernels.ExpertAffinityScaleMode],
    "kernel_type_option": ["DROPLESS", "DROPPING"],
    "shard_option": [*kernels.ShardOption.__members__, *kernels.ShardOption229.__members__],
    "affinity_option": ["AFFINITY_ON_H", "AFFINITY_ON_I"],
}


def filled(value: float, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((), value, dtype=dtype).expand(shape)


def routing(T: int, H: int, E: int, B: int) -> Call:
    index = (torch.arange(T) % E)[:, None]
    plan = build_block_plan(expert_mask(index, E), B, top_k=1)
    return {
        "hidden_states": filled(0, T + 1, H),
        "expert_affinities_masked": masked_affinities(index, torch.full((T, 1), 0.5).bfloat16(), E),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": B,
    }


def moe_call(kind: str, *, T: int = 128, H: int = 512, I: int = 0, E: int = 2, B: int = 0) -> Call:  # noqa: E741
    """A call that the kernel of `kind` takes, but for the sizes that are given."""
    I = I or (1024 if "shard_on_i_mx" in kind else 64)  # noqa: E741
    given = routing(T, H, E, B or (1024 if kind == "shard_on_i_dropping" else 256)) | {"spec": spec(kind)}
    blocks = len(given["block_to_expert"])
    given["conditions"] = torch.tensor([1] * blocks + [0] * (2 if kind == "shard_on_block_mx" else 1))
    partitions, tiles, byte = min(128, I // 4), -(-I // 512), {"dtype": torch.uint8}
    if kind.endswith(("mx", "mx_hybrid")):
        return given | {
            "gate_up_proj_weight": filled(0, E, 128, 2, H // 512, I, dtype=torch.int32),
            "gate_up_proj_scale": filled(127, E, 16, 2, H // 512, I, **byte),
            "down_proj_weight": filled(0, E, partitions, tiles, H, dtype=torch.int32),
            "down_proj_scale": filled(127, E, partitions // 8, tiles, H, **byte),
        }
    return given | {"gate_up_proj_weight": filled(0, E, H, 2, I), "down_proj_weight": filled(0, E, I, H)}


def page_call(kind: str, **sizes: int) -> Call:
    """A call within the bounds of the page."""
    return moe_call(kind, **{"I": 2048, "E": 8, "T": 256} | sizes)


def sizes_of(row: Constraint) -> tuple[list[int], list[int]]:
    """Sizes just inside and just outside of a row's bounds."""
    if row.one_of:
        known = sorted(int(str(size)) for size in row.one_of)
        return known, [known[0] // 2, known[-1] * 2, known[0] + known[1] // 4]
    if row.symbol == "I" and row.implementations and set(row.implementations) <= MX:  # its words hold whole MX groups
        first = max(row.applies_from, row.multiple_of)
        return [first, first + row.multiple_of], [first + 32] if row.multiple_of > 32 else []
    step = row.multiple_of
    first = max(row.minimum, step)
    inside, outside = [first], [] if step == 1 else [first + step // 2]
    if row.minimum > 1:
        outside.append(row.minimum - step)
    if row.maximum is not None:
        beyond = row.maximum + max(step, {"B": 256, "T": 128}.get(row.symbol, 1))  # what the kernels take
        inside, outside = [*inside, row.maximum], [*outside, beyond]
    return [size for size in inside if size > 1], [size for size in outside if size > 0]


def options_of(row: Constraint) -> tuple[list[Any], list[Any]]:
    """Values of an option within and outside of a row's list."""
    if row.one_of == (False,):
        return [False], [True]
    if row.one_of == ("None",):
        return [None], [torch.ones(2, 1, 128)]
    return list(row.one_of), [name for name in dict.fromkeys(MEMBERS[row.of]) if name not in row.one_of]


def backward_call(**changes: Any) -> Call:
    """A call of ``blockwise_mm_bwd`` that the kernels of both releases take, with sizes and options changed."""
    T, E = 20, 2
    H, I, B = (changes.pop(name, size) for name, size in (("H", 128), ("I", 64), ("B", 256)))  # noqa: E741
    given = routing(T, H, E, B)
    blocks = len(given["block_to_expert"])
    return given | {
        "gate_up_proj_weight": filled(0, E, H, 2, I),
        "down_proj_weight": filled(0, E, I, H),
        "gate_up_proj_act_checkpoint_T": filled(0, blocks, 2, I, B),
        "down_proj_act_checkpoint": filled(0, blocks, B, H),
        "output_hidden_states_grad": filled(0, T + 1, H),
        **changes,
    }

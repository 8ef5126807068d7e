"""What autograd differentiates: ``router_topk`` and the table made of its affinities, and no other kernel function.

The others would otherwise return gradients of their emulation's steps (of roundings, say) instead of what the backward
functions define.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import kernels
from hf_neuron_moe.formats import group_quantize_fp8

T, H, I, E, B = 20, 128, 128, 3, 128  # noqa: E741


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16, sink: int = 0) -> Tensor:
    values = torch.randn(shape).to(dtype)
    values[shape[0] - sink :] = 0
    return values.requires_grad_()


def routing() -> tuple[Tensor, dict[str, Any]]:
    index = torch.rand(T, E).topk(2).indices
    plan = kernels.build_block_plan(kernels.expert_mask(index, E), B, top_k=2)
    return index, {
        "hidden_states": leaf(T + 1, H, sink=1),
        "expert_affinities_masked": leaf((T + 1) * E, 1, sink=E),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": B,
    }


def experts() -> Any:
    spec = kernels.MoECTESpec("shard_on_i", shard_on_I=kernels.ShardOnIConfig(checkpoint_activation=True))
    weights = {"gate_up_proj_weight": leaf(E, H, 2, I), "down_proj_weight": leaf(E, I, H)}
    shared = routing()[1] | weights
    kept = kernels.moe_cte(**shared, spec=spec, device_limits=False)
    checkpoints = {
        "gate_up_proj_act_checkpoint_T": kept[1].requires_grad_(),
        "down_proj_act_checkpoint": kept[2].requires_grad_(),
        "output_hidden_states_grad": leaf(T + 1, H, sink=1),
    }
    return [kept[0], kernels.blockwise_mm_bwd(**shared, **checkpoints, device_limits=False)]


def experts_mxfp8() -> Any:
    weights = {"gate_up_proj_weight": leaf(E, 2, I, H), "down_proj_weight": leaf(E, H, I)}
    return kernels.blockwise_mm_fwd_mxfp8(**routing()[1], **weights)


def mlp() -> Any:
    operands = leaf(128, H), leaf(2 * I, H), leaf(H, I)
    return [kernels.mlp_forward_mxfp8(*operands), kernels.mlp_backward_mxfp8(leaf(128, H), *operands)]


def coat() -> Any:
    one, other = (group_quantize_fp8(torch.randn(32, 64).bfloat16(), 16) for _ in range(2))
    return [
        kernels.fp8_mul_backward(*one, *other, leaf(32, 64), 16, "E5M2"),
        kernels.fp8_silu_backward(*one, leaf(32, 64), 16, "E5M2"),
        kernels.fp8_division_transpose(leaf(32, 64), 16, "E4M3"),
    ]


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


@pytest.mark.parametrize("call", [experts, experts_mxfp8, mlp, coat], ids=lambda call: call.__name__)
def test_no_graph(call: Callable[[], Any]) -> None:
    found = list(tensors(call()))
    assert found
    assert not any(tensor.requires_grad for tensor in found)


def test_the_router_and_its_table_have_gradients() -> None:
    x, w = leaf(T, H, dtype=torch.float32), leaf(H, E, dtype=torch.float32)
    _, index, affinities = kernels.router_topk(x, w, act_fn="SOFTMAX", k=2, x_hbm_layout=1)
    assert index is not None and affinities is not None
    table = kernels.masked_affinities(index, affinities.gather(1, index.long()), E)
    table.square().sum().backward()
    assert x.grad is not None and w.grad is not None
    assert x.grad.abs().sum() > 0 and w.grad.abs().sum() > 0

"""The MXFP8 training pair of the experts. Letters: T' token rows, H hidden, I intermediate, E experts, N blocks of B.

Sources: nki-library 2.31 ``blockwise_mm_bwd_mxfp8``, 2.32 ``blockwise_mm_fwd_mxfp8``.
"""

from __future__ import annotations

from typing import Any

from hf_neuron_moe import kernels
from tests.neuron.double.checks import (
    BF16,
    FP32,
    check_member,
    check_multiple,
    check_operand,
    check_read,
    check_target,
    give,
)
from tests.neuron.double.contract import Double, need
from tests.neuron.double.memory import KernelTensor, Launch
from tests.neuron.double.plan import Sizes, check_block_size, check_plan, check_sink, check_tokens, count_blocks
from tests.neuron.double.records import Library, to_package

Arguments = dict[str, Any]


def _checked(
    double: Double, library: Library, launch: Launch, call: Arguments, where: str, gate_up: tuple[Any, ...],
    blocks: tuple[int, ...], activation: str,
) -> Sizes:  # fmt: skip
    """What both directions share; `gate_up` names the axes of the fused weight."""
    check_target(double, "trn3", where)
    need(launch.cores == 2, where, "runs on two cores")
    records = library.backward
    check_member(call[activation], records.ActFnType, where, activation)
    need(call[activation].name == "SiLU", where, f"SiLU only, got {call[activation].name}")
    check_member(call["affinity_option"], records.AffinityOption, where, "affinity_option")
    check_member(call["shard_option"], records.ShardOption, where, "shard_option")
    need(call["affinity_option"].name == "AFFINITY_ON_I", where, "AFFINITY_ON_I only")
    skip = call["skip_dma"]
    need(skip is None or hasattr(skip, "skip_token"), where, f"skip_dma is a SkipMode, got {skip!r}")
    need(call["compute_dtype"] is BF16, where, "compute_dtype is bfloat16")
    block = check_block_size(call["block_size"], where)
    need(block in blocks, where, f"block_size is one of {blocks}, got {block}")
    shape = check_operand(call["gate_up_proj_weight"], gate_up, (BF16,), where, "gate_up_proj_weight")
    forward = gate_up[1] == 2
    experts, hidden, inner = (shape[0], shape[3], shape[2]) if forward else (shape[0], shape[1], shape[3])
    down = (experts, hidden, inner) if forward else (experts, inner, hidden)
    check_operand(call["down_proj_weight"], down, (BF16,), where, "down_proj_weight")
    for name in ("gate_up_proj_weight", "down_proj_weight"):
        check_read(call[name], launch, where, name)
    rows, width = check_tokens(call, experts, launch, where, (FP32,))
    need(width == hidden, where, f"hidden_states have H={hidden}, got {width}")
    check_multiple(hidden, 128, where, "H")
    check_multiple(inner, 128, where, "I")
    tokens = rows if skip is not None and skip.skip_token else rows - 1
    return Sizes(rows, tokens, hidden, inner, experts, count_blocks(call, block, where), block)


def forward(double: Double, library: Library, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """Rules and result of ``blockwise_mm_fwd_mxfp8``."""
    where = "blockwise_mm_fwd_mxfp8"
    blocks = (128, 256, 512, 1024, 2048, 4096)
    sizes = _checked(double, library, launch, call, where, (None, 2, None, None), blocks, "activation_function")
    need(call["shard_option"].name == "SHARD_ON_BLOCK", where, "SHARD_ON_BLOCK only")
    for name in ("gate_and_up_proj_bias", "down_proj_bias"):
        need(call[name] is None, where, f"{name} is reserved")
    need(call["checkpoint_config"] is None, where, "checkpoint_config's fields are not documented")
    skip = call["skip_dma"]
    plan = check_plan(call, sizes, skip is not None and skip.skip_token, launch, where)
    out = gate_up = inter = None
    if not launch.fake:
        values = {name: to_package(call[name]) for name in _POSITIONAL}
        sides = {"linear": "up", "non_linear": "gate"}
        limits = {
            f"{branch}_clamp_{side}_limit": call[f"{half}_clamp_{side}_limit"]
            for branch, half in sides.items() for side in ("upper", "lower")
        }  # fmt: skip
        result = kernels.blockwise_mm_fwd_mxfp8(
            **values, skip_dma=to_package(skip), clamp_limits=kernels.ClampLimits(**limits), device_limits=False
        )
        out, gate_up, inter = result.output.clone(), result.gate_up_activations_T, result.intermediate_T
        out[sizes.tokens :] = float("nan")
        if not call["is_tensor_update_accumulating"]:
            need(len(plan.token_R.unique()) == len(plan.token_R), where, "a plan of several experts accumulates")
    return (
        give(launch, out, (sizes.rows, sizes.hidden), BF16),
        give(launch, gate_up, (sizes.blocks, 2, sizes.inner, sizes.block), BF16),
        give(launch, inter, (sizes.blocks, sizes.inner, sizes.block), BF16),
    )


_POSITIONAL = (
    "hidden_states", "expert_affinities_masked", "gate_up_proj_weight", "down_proj_weight", "token_position_to_id",
    "block_to_expert", "block_size",
)  # fmt: skip


def backward(double: Double, library: Library, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """Rules and result of ``blockwise_mm_bwd_mxfp8``."""
    where = "blockwise_mm_bwd_mxfp8"
    blocks = (128, 256, 512, 1024) + ((2048, 4096) if double.release >= (2, 32) else ())
    sizes = _checked(double, library, launch, call, where, (None, None, 2, None), blocks, "activation_type")
    need(call["shard_option"].name == "SHARD_ON_FREE", where, "SHARD_ON_FREE only")
    need(call["bias"] is False, where, "no biases")
    need(call["scaled_intermediate_checkpoint_T"] is None, where, "scaled_intermediate_checkpoint_T is None")
    limits = call["clamp_limits"]
    need(limits is None or isinstance(limits, library.backward.ClampLimits), where, "clamp_limits are their record")
    shape = (sizes.blocks, 2, sizes.inner, sizes.block)
    check_operand(call["gate_up_proj_act_checkpoint_T"], shape, (BF16,), where, "gate_up_proj_act_checkpoint_T")
    grad = call["output_hidden_states_grad"]
    check_operand(grad, (sizes.rows, sizes.hidden), (BF16,), where, "output_hidden_states_grad")
    for name in ("gate_up_proj_act_checkpoint_T", "output_hidden_states_grad"):
        check_read(call[name], launch, where, name)
    skip = call["skip_dma"]
    skip_token = skip is not None and skip.skip_token
    check_plan(call, sizes, skip_token, launch, where)
    if not skip_token and not launch.fake:
        check_sink(grad, where, "output_hidden_states_grad")
    grads: Any = [None] * 4
    if not launch.fake:
        names = (*_POSITIONAL, "gate_up_proj_act_checkpoint_T", "output_hidden_states_grad", "clamp_limits", "skip_dma")
        grads = kernels.blockwise_mm_bwd_mxfp8(**{n: to_package(call[n]) for n in names}, device_limits=False)
    shapes = (
        (sizes.rows, sizes.hidden), (sizes.rows * sizes.experts, 1),
        (sizes.experts, sizes.hidden, 2, sizes.inner), (sizes.experts, sizes.inner, sizes.hidden),
    )  # fmt: skip
    return tuple(give(launch, g, s, d) for g, s, d in zip(grads, shapes, (BF16, FP32, BF16, BF16)))

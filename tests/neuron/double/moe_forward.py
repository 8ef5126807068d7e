"""``moe_cte`` and the kernels behind it. Letters: T' token rows, H hidden, I intermediate, E experts, N blocks of B.

Sources: nki-library 2.29 to 2.33 ``core.moe.moe_cte``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe import kernels
from tests.neuron.double.checks import (
    BF16,
    FP8,
    FP32,
    INT32,
    check_member,
    check_operand,
    check_read,
    check_target,
    give,
)
from tests.neuron.double.contract import Double, need
from tests.neuron.double.memory import KernelTensor, Launch
from tests.neuron.double.moe_mx import check_mx_operands
from tests.neuron.double.moe_rules import RULES, check_options, check_sizes
from tests.neuron.double.plan import Plan, Sizes, check_block_size, check_plan, check_tokens, count_blocks
from tests.neuron.double.records import Library, to_package

Arguments = dict[str, Any]
CONDITION_TAILS = {"shard_on_i_hybrid": 1, "shard_on_i_mx_hybrid": 1, "shard_on_block_mx": 2}


def unified(double: Double, library: Library, launch: Launch, call: Arguments) -> Any:
    """``moe_cte``: dispatch by the spec."""
    where = "moe_cte"
    spec = call["spec"]
    need(isinstance(spec, library.forward.MoECTESpec), where, f"spec is a MoECTESpec, got {type(spec).__name__}")
    check_member(spec.implementation, library.forward.MoECTEImplementation, where, "spec.implementation")
    kind = spec.implementation.name
    if kind in ("shard_on_i_mx", "shard_on_i_mx_hybrid"):
        return None  # the enum has them, the dispatch has no branch
    block, inner = spec.shard_on_block, spec.shard_on_I
    for value, record in ((block, "ShardOnBlockConfig"), (inner, "ShardOnIConfig")):
        fits = value is None or isinstance(value, getattr(library.forward, record))
        need(fits, where, f"the spec's options are a {record}, got {type(value).__name__}")
    config = call["quantization_config"]
    if config is not None:
        need(isinstance(config, library.forward.QuantizationConfig), where, "quantization_config is its record")
        for name in ("gate_up_proj_scale", "down_proj_scale"):
            call.setdefault(name, None)
            call[name] = getattr(config, name) if call[name] is None else call[name]
    on_inner = inner is not None and inner.expert_affinity_multiply_on_I
    checkpoint = inner is not None and inner.checkpoint_activation
    checkpoint = checkpoint if kind == "shard_on_i" else kind == "shard_on_i_dropping"
    return run(double, library, launch, call, kind, where, on_inner=on_inner, checkpoint=checkpoint)


DIRECT = {
    "bwmm_shard_on_block": "shard_on_block",
    "blockwise_mm_baseline_shard_intermediate": "shard_on_i",
    "blockwise_mm_baseline_shard_intermediate_hybrid": "shard_on_i_hybrid",
    "blockwise_mm_shard_intermediate_dropping": "shard_on_i_dropping",
    "blockwise_mm_baseline_shard_hidden": "shard_on_hidden",
    "bwmm_shard_on_block_mx": "shard_on_block_mx",
    "blockwise_mm_shard_intermediate_mx": "shard_on_i_mx",
    "blockwise_mm_shard_intermediate_mx_hybrid": "shard_on_i_mx_hybrid",
}


def direct(double: Double, library: Library, launch: Launch, call: Arguments, name: str) -> Any:
    """One of the kernels behind ``moe_cte`` under its own name."""
    kind = DIRECT[name]
    on_inner = bool(call.get("expert_affinity_multiply_on_I", False))
    checkpoint = bool(call.get("checkpoint_activation", kind == "shard_on_i_dropping"))
    return run(double, library, launch, call, kind, name, on_inner=on_inner, checkpoint=checkpoint)


def run(
    double: Double, library: Library, launch: Launch, call: Arguments, kind: str, where: str, *,
    on_inner: bool, checkpoint: bool,
) -> Any:  # fmt: skip
    """Check a call of one implementation and compute it."""
    rule = RULES[kind]
    if rule.mx:
        check_target(double, "trn3", where)
    need(launch.cores == 2 or not rule.two_cores, where, f"{kind} runs on two cores")
    check_member(call["expert_affinities_scaling_mode"], library.forward.ExpertAffinityScaleMode, where, "the mode")
    if "activation_function" in call:
        check_member(call["activation_function"], library.forward.ActFnType, where, "activation_function")
    skip = call["skip_dma"]
    need(isinstance(skip, library.forward.SkipMode), where, f"skip_dma is the forward's SkipMode, got {skip!r}")
    need(call["compute_dtype"] is BF16, where, f"compute_dtype is nki.language.bfloat16, got {call['compute_dtype']!r}")
    block = check_block_size(call["block_size"], where)
    if rule.mx:
        experts, hidden, inner = check_mx_operands(double, library, call, kind, launch, where)
    else:
        experts, hidden, inner = _weights(call, launch, where)
    rows, width = check_tokens(call, experts, launch, where)
    need(width == hidden, where, f"hidden_states have H={hidden}, got {width}")
    tokens = rows if skip.skip_token else rows - 1
    sizes = Sizes(rows, tokens, hidden, inner, experts, count_blocks(call, block, where), block)
    check_sizes(kind, sizes, where)
    check_options(kind, double.release, call, sizes, on_inner, where)
    plan = check_plan(call, sizes, skip.skip_token, launch, where)
    _conditions(call, kind, sizes, plan, launch, where)
    if not rule.mx:
        _biases(call, sizes, where)
    result = None if launch.fake else _compute(call, where)
    output = None if result is None else _poisoned(result.output, call, sizes, plan, skip.skip_token)
    return _device_result(double, launch, call, kind, sizes, output, result, checkpoint, on_inner)


def _weights(call: Arguments, launch: Launch, where: str) -> tuple[int, int, int]:
    dtypes = (BF16,) if call.get("gate_up_proj_scale") is None else (FP8,)
    experts, hidden, _, inner = check_operand(
        call["gate_up_proj_weight"], (None, None, 2, None), dtypes, where, "gate_up_proj_weight"
    )
    check_operand(call["down_proj_weight"], (experts, inner, hidden), dtypes, where, "down_proj_weight")
    for name in ("gate_up_proj_weight", "down_proj_weight"):
        check_read(call[name], launch, where, name)
    return experts, hidden, inner


def _biases(call: Arguments, sizes: Sizes, where: str) -> None:
    if call.get("gate_and_up_proj_bias") is not None:
        shape = (sizes.experts, 2, sizes.inner)
        check_operand(call["gate_and_up_proj_bias"], shape, (BF16, FP32), where, "gate_and_up_proj_bias")
        check_operand(call["down_proj_bias"], (sizes.experts, sizes.hidden), (BF16, FP32), where, "down_proj_bias")


def _conditions(call: Arguments, kind: str, sizes: Sizes, plan: Plan, launch: Launch, where: str) -> None:
    """N flags and the documented zeros after them."""
    value, tail = call.get("conditions"), CONDITION_TAILS.get(kind)
    need(value is not None or not RULES[kind].hybrid, where, f"{kind} needs conditions")
    if value is None or tail is None:
        return
    check_operand(value, (sizes.blocks + tail,), (INT32,), where, "conditions")
    if not launch.fake:
        wanted = torch.cat([plan.used_NB.any(dim=1).int(), torch.zeros(tail, dtype=torch.int32)])
        need(torch.equal(value.data, wanted), where, f"conditions are {wanted.tolist()}, got {value.data.tolist()}")


def _compute(call: Arguments, where: str) -> Any:
    values = {name: to_package(value) for name, value in call.items()}
    return getattr(kernels, where)(**values)


def _poisoned(output: Tensor, call: Arguments, sizes: Sizes, plan: Plan, skip_token: bool) -> Tensor:
    """The sink row is scratch; without accumulation nobody fills rows that no block has."""
    values = output.clone()
    if not skip_token:
        values[sizes.tokens] = float("nan")
    if not call["is_tensor_update_accumulating"]:
        unused = torch.ones(sizes.tokens, dtype=torch.bool)
        unused[plan.token_R] = False
        values[: sizes.tokens][unused] = float("nan")
    return values


def _device_result(
    double: Double, launch: Launch, call: Arguments, kind: str, sizes: Sizes, output: Tensor | None, result: Any,
    checkpoint: bool, on_inner: bool,
) -> Any:  # fmt: skip
    """Put the result into the shape that the kernel returns."""
    shape = (sizes.rows, sizes.hidden)
    if kind == "shard_on_block" and call["is_tensor_update_accumulating"]:
        extra = sizes.experts if double.release >= (2, 30) else 0
        out = launch.allocate((sizes.rows, 2, sizes.hidden + extra), BF16)
        if output is not None:
            out.data[:, 0, : sizes.hidden] = output
        return out
    if kind == "shard_on_block_mx":
        out = launch.allocate((2, *shape), BF16)
        if output is not None:
            out.data[0] = output
        return out
    out = give(launch, output, shape, BF16)
    if not checkpoint:
        return out
    kept: list[KernelTensor] = [out]
    gate_up = None if result is None else result.gate_up_activations_T
    kept.append(give(launch, gate_up, (sizes.blocks, 2, sizes.inner, sizes.block), BF16))
    if not on_inner:
        down = None if result is None else result.down_activations
        kept.append(give(launch, down, (sizes.blocks, sizes.block, sizes.hidden), BF16))
    return tuple(kept)

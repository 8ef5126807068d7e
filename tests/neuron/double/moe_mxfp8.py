"""The MXFP8 training pair of the experts. Letters: T' token rows, H hidden, I intermediate, E experts, N blocks of B.

Sources: nki-library 2.31 ``blockwise_mm_bwd_mxfp8``, 2.32 ``blockwise_mm_fwd_mxfp8``, and the generation after that,
whose options are fields of a record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
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
FORWARD, BACKWARD = "blockwise_mm_fwd_mxfp8", "blockwise_mm_bwd_mxfp8"
_BLOCKS = (128, 256, 512, 1024)
_LARGE = (2048, 4096)
_ROUTING = ("hidden_states", "expert_affinities_masked", "token_position_to_id", "block_to_expert", "block_size")
_DENSE = (
    "fast_dma_transpose", "reuse_spilled_weights", "use_1x32_pe_swizzle", "pe_transpose_only", "no_indirect_load",
    "single_expert_dense",
)  # fmt: skip
_ORDERS = {"E2IH": (0, 1, 2, 3), "EI2H": (0, 2, 1, 3), "EH2I": (0, 1, 2, 3)}
"""Axes of the fused weight as the kernel has it: the permutation to what this package's function takes."""


def _checked(
    double: Double, library: Library, launch: Launch, call: Arguments, where: str, axes: str, blocks: tuple[int, ...]
) -> Sizes:
    """What both directions and generations share; `axes` are those of the fused weight."""
    check_target(double, "trn3", where)
    need(launch.cores == 2, where, "runs on two cores")
    need(call.get("run_with_lnc2", True) is True, where, "runs on two cores only")
    records = library.backward
    for name, kind in (
        ("activation_type", records.ActFnType), ("affinity_option", records.AffinityOption),
        ("shard_option", records.ShardOption),
    ):  # fmt: skip
        check_member(call[name], kind, where, name)
    need(call["activation_type"].name == "SiLU", where, f"SiLU only, got {call['activation_type'].name}")
    need(call["affinity_option"].name == "AFFINITY_ON_I", where, "AFFINITY_ON_I only")
    for name, record in (("skip_dma", records.SkipMode), ("clamp_limits", records.ClampLimits)):
        fits = call[name] is None or isinstance(call[name], record)
        need(fits, where, f"{name} is the backward package's {record.__name__}, got {call[name]!r}")
    need(call["compute_dtype"] is BF16, where, "compute_dtype is bfloat16")
    need(call["bias"] is False, where, "biases are reserved")
    for name in ("gate_up_weight_scales", "down_weight_scales"):
        need(call[name] is None, where, f"{name}: pre-quantized weights are not part of the double")
    dense = call.get("single_expert_dense", call.get("no_indirect_load", False))
    need(dense is False, where, "routed calls switch the single dense expert off")
    for name in _DENSE[:-2]:
        need(call.get(name, False) is False, where, f"{name} needs the single dense expert")
    block = check_block_size(call["block_size"], where)
    need(block in blocks, where, f"block_size is one of {blocks}, got {block}")
    shape = check_operand(
        call["gate_up_proj_weight"],
        [2 if axis == "2" else None for axis in axes],
        (BF16,),
        where,
        "gate_up_proj_weight",
    )
    experts, hidden, inner = (shape[axes.index(letter)] for letter in "EHI")
    down = (experts, inner, hidden) if axes == "EH2I" else (experts, hidden, inner)
    check_operand(call["down_proj_weight"], down, (BF16,), where, "down_proj_weight")
    for name in ("gate_up_proj_weight", "down_proj_weight"):
        check_read(call[name], launch, where, name)
    rows, width = check_tokens(call, experts, launch, where, (FP32,))
    need(width == hidden, where, f"hidden_states have H={hidden}, got {width}")
    check_multiple(hidden, 128, where, "H")
    check_multiple(inner, 128, where, "I")
    skip = call["skip_dma"]
    tokens = rows if skip is not None and skip.skip_token else rows - 1
    sizes = Sizes(rows, tokens, hidden, inner, experts, count_blocks(call, block, where), block)
    need(call["block_to_expert"].shape == (sizes.blocks, 1), where, f"block_to_expert has shape [{sizes.blocks}, 1]")
    return sizes


def _skips(call: Arguments) -> bool:
    return call["skip_dma"] is not None and bool(call["skip_dma"].skip_token)


def absent(double: Double, library: Library, names: Iterable[str]) -> Arguments:
    """What a kernel does whose argument set or record has no option for it: the routed case, over T rows."""
    routed = {
        "skip_dma": library.backward.SkipMode(True),
        "is_tensor_update_accumulating": True,
        "accumulate_hidden_states_grad": True,
        "gate_up_proj_act_td": library.pair.TensorDescriptor(orientation=library.pair.TensorOrientation.K_BY_F),
    } | dict.fromkeys(_DENSE, False)
    modes = {name: library.pair.SwizzleMode.DGT for name in names if name.endswith("_swizzle_mode")}
    return {name: value for name, value in (routed | modes).items() if name in names and name in double.without}


def _with_config(double: Double, library: Library, call: Arguments, name: str, where: str) -> Arguments:
    """The call with the fields of its configuration record as arguments."""
    config, record, whole = call["config"], getattr(library.pair, name), getattr(library.whole_pair, name)
    need(isinstance(config, record), where, f"config is a {record.__name__}: its default is one dense expert")
    shape = tuple(call["gate_up_proj_weight"].shape), call["block_size"]
    need(double.configured.setdefault(id(config), (config, shape))[1] == shape, where, "a record is for one shape")
    need(call.get("num_valid_tokens") is None, where, "num_valid_tokens is not part of the double")
    names = [field.name for field in fields(whole)]
    known = {name: getattr(config, name) for name in names if name not in double.without}
    defaults = {field.name: field.default for field in fields(whole)}
    return call | defaults | absent(double, library, names) | known


def forward(double: Double, library: Library, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """``blockwise_mm_fwd_mxfp8`` of 2.32: output, gate and up, the scaled intermediate."""
    out, *kept = _forward(double, library, launch, call, "E2IH")
    return out, *(_turned(launch, kept) if double.layout == "DIRECT" else kept)


def _turned(launch: Launch, kept: Iterable[KernelTensor]) -> tuple[KernelTensor, ...]:
    """Checkpoints with B before I."""
    return tuple(
        give(launch, None if launch.fake else tensor.data.mT, (*tensor.shape[:-2], *tensor.shape[:-3:-1]), BF16)
        for tensor in kept
    )


def forward_config(double: Double, library: Library, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """The same of the later generation: weights ``[E, I, 2, H]``, one checkpoint, in the orientation asked for."""
    flat = _with_config(double, library, call, "MXFP8MOEFwdConfig", FORWARD)
    out, gate_up, _ = _forward(double, library, launch, flat, "EI2H")
    descriptor = flat["gate_up_proj_act_td"]
    need(isinstance(descriptor, library.pair.TensorDescriptor), FORWARD, "gate_up_proj_act_td is a TensorDescriptor")
    if descriptor.orientation is library.pair.TensorOrientation.K_BY_F:
        return out, gate_up
    return out, *_turned(launch, [gate_up])


def _forward(double: Double, library: Library, launch: Launch, call: Arguments, axes: str) -> tuple[KernelTensor, ...]:
    sizes = _checked(double, library, launch, call, FORWARD, axes, (*_BLOCKS, *_LARGE))
    need(call["shard_option"].name == "SHARD_ON_BLOCK", FORWARD, "SHARD_ON_BLOCK only")
    need(sizes.blocks >= launch.cores, FORWARD, "every core owns a block")
    need(call["checkpoint_config"] is None, FORWARD, "checkpoint_config is left at its default, which saves")
    plan = check_plan(call, sizes, _skips(call), launch, FORWARD)
    if not launch.fake and call["is_tensor_update_accumulating"] is not True:
        need(len(plan.token_R.unique()) == len(plan.token_R), FORWARD, "a plan of several experts accumulates")
    out = gate_up = inter = None
    if not launch.fake:
        result = kernels.blockwise_mm_fwd_mxfp8(
            **{name: to_package(call[name]) for name in _ROUTING},
            gate_up_proj_weight=call["gate_up_proj_weight"].data.permute(_ORDERS[axes]).contiguous(),
            down_proj_weight=call["down_proj_weight"].data, skip_dma=to_package(call["skip_dma"]),
            clamp_limits=to_package(call["clamp_limits"]), device_limits=False,
        )  # fmt: skip
        out, gate_up, inter = result.output.clone(), result.gate_up_activations_T, result.intermediate_T
        out[sizes.tokens :] = float("nan")
    return (
        give(launch, out, (sizes.rows, sizes.hidden), BF16),
        give(launch, gate_up, (sizes.blocks, 2, sizes.inner, sizes.block), BF16),
        give(launch, inter, (sizes.blocks, sizes.inner, sizes.block), BF16),
    )


def backward(double: Double, library: Library, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """``blockwise_mm_bwd_mxfp8`` of 2.31."""
    blocks = _BLOCKS + (_LARGE if double.release >= (2, 32) else ())
    return _backward(double, library, launch, call, blocks)


def backward_config(double: Double, library: Library, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """The same of the later generation."""
    flat = _with_config(double, library, call, "MXFP8MOEBwdConfig", BACKWARD)
    for name in ("gate_up_weight_swizzle_mode", "down_weight_swizzle_mode"):
        need(flat[name].name == "DGT", BACKWARD, f"{name} PE works for one expert only")
    flat["is_tensor_update_accumulating"] = flat["accumulate_hidden_states_grad"]
    return _backward(double, library, launch, flat, (*_BLOCKS, *_LARGE))


def _backward(
    double: Double, library: Library, launch: Launch, call: Arguments, blocks: tuple[int, ...]
) -> tuple[KernelTensor, ...]:
    sizes = _checked(double, library, launch, call, BACKWARD, "EH2I", blocks)
    need(call["shard_option"].name == "SHARD_ON_FREE", BACKWARD, "SHARD_ON_FREE only")
    for name in ("scaled_intermediate_checkpoint_T", "down_proj_act_checkpoint"):
        need(call[name] is None, BACKWARD, f"{name} is None with AFFINITY_ON_I")
    need(call["skip_grad_initialization"] is False, BACKWARD, "gradients are initialized")
    shape = (sizes.blocks, 2, sizes.inner, sizes.block)
    check_operand(call["gate_up_proj_act_checkpoint_T"], shape, (BF16,), BACKWARD, "gate_up_proj_act_checkpoint_T")
    grad = call["output_hidden_states_grad"]
    check_operand(grad, (sizes.rows, sizes.hidden), (BF16,), BACKWARD, "output_hidden_states_grad")
    for name in ("gate_up_proj_act_checkpoint_T", "output_hidden_states_grad"):
        check_read(call[name], launch, BACKWARD, name)
    plan = check_plan(call, sizes, _skips(call), launch, BACKWARD)
    if not launch.fake:
        alone = len(plan.token_R.unique()) == len(plan.token_R)
        need(alone or call["is_tensor_update_accumulating"] is True, BACKWARD, "several experts per token accumulate")
        if not _skips(call):
            check_sink(grad, BACKWARD, "output_hidden_states_grad")
    grads: Any = [None] * 4
    if not launch.fake:
        names = (
            *_ROUTING, "gate_up_proj_weight", "down_proj_weight", "gate_up_proj_act_checkpoint_T",
            "output_hidden_states_grad", "clamp_limits", "skip_dma",
        )  # fmt: skip
        grads = kernels.blockwise_mm_bwd_mxfp8(**{n: to_package(call[n]) for n in names}, device_limits=False)
    shapes = (
        (sizes.rows, sizes.hidden), (sizes.rows * sizes.experts, 1),
        (sizes.experts, sizes.hidden, 2, sizes.inner), (sizes.experts, sizes.inner, sizes.hidden),
    )  # fmt: skip
    return tuple(give(launch, g, s, d) for g, s, d in zip(grads, shapes, (BF16, FP32, BF16, BF16)))

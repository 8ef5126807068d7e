"""``blockwise_mm_bwd``. Letters: T' token rows, H hidden, I intermediate, E experts, N blocks of B.

Sources: nki-library 2.29 to 2.33 ``experimental.moe.bwd``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe import kernels
from tests.neuron.double.checks import BF16, check_flag, check_member, check_operand, check_read, give
from tests.neuron.double.contract import Double, Release, need
from tests.neuron.double.memory import KernelTensor, Launch
from tests.neuron.double.plan import Plan, Sizes, check_block_size, check_plan, check_sink, check_tokens, count_blocks
from tests.neuron.double.records import Library, to_package

Arguments = dict[str, Any]
_WHERE = "blockwise_mm_bwd"
_BUFFERS = (
    "hidden_states_grad_out", "expert_affinities_masked_grad_out", "gate_up_proj_weight_grad_out",
    "down_proj_weight_grad_out",
)  # fmt: skip


def backward(double: Double, library: Library, launch: Launch, call: Arguments) -> tuple[KernelTensor, ...]:
    """Rules and result of ``blockwise_mm_bwd``."""
    need(launch.cores == 2, _WHERE, "assumes two cores")
    on_hidden = _options(double.release, library, call)
    block = check_block_size(call["block_size"], _WHERE)
    experts, hidden, _, inner = check_operand(
        call["gate_up_proj_weight"], (None, None, 2, None), (BF16,), _WHERE, "gate_up_proj_weight"
    )
    check_operand(call["down_proj_weight"], (experts, inner, hidden), (BF16,), _WHERE, "down_proj_weight")
    rows, width = check_tokens(call, experts, launch, _WHERE)
    need(width == hidden, _WHERE, f"hidden_states have H={hidden}, got {width}")
    skip_token = call["skip_dma"] is not None and call["skip_dma"].skip_token
    tokens = rows if skip_token else rows - 1
    sizes = Sizes(rows, tokens, hidden, inner, experts, count_blocks(call, block, _WHERE), block)
    _check_sizes(double.release, sizes)
    grad = call["output_hidden_states_grad"]
    check_operand(grad, (rows, hidden), (BF16,), _WHERE, "output_hidden_states_grad")
    kept = {"gate_up_proj_act_checkpoint_T": (sizes.blocks, 2, inner, block)}
    if on_hidden:
        kept["down_proj_act_checkpoint"] = (sizes.blocks, block, hidden)
    for name, shape in kept.items():
        check_operand(call[name], shape, (BF16,), _WHERE, name)
    for name in (*kept, "gate_up_proj_weight", "down_proj_weight", "output_hidden_states_grad"):
        check_read(call[name], launch, _WHERE, name)
    plan = check_plan(call, sizes, skip_token, launch, _WHERE)
    if not skip_token and not launch.fake:
        check_sink(grad, _WHERE, "output_hidden_states_grad")
    return _result(double, launch, call, sizes, plan)


def _options(release: Release, library: Library, call: Arguments) -> bool:
    """Check the options; return whether the affinity sits on H."""
    records = library.backward
    kinds = {
        "shard_option": records.ShardOption, "affinity_option": records.AffinityOption,
        "kernel_type_option": records.KernelTypeOption, "activation_type": records.ActFnType,
    }  # fmt: skip
    for name, kind in kinds.items():
        check_member(call[name], kind, _WHERE, name)
    for name, record in (("skip_dma", records.SkipMode), ("clamp_limits", records.ClampLimits)):
        fits = call[name] is None or isinstance(call[name], record)
        need(fits, _WHERE, f"{name} is the backward's own {record.__name__}, got {call[name]!r}")
    for name in ("bias", "is_tensor_update_accumulating", "skip_grad_initialization", "skip_gate_proj"):
        if name in call:
            check_flag(call[name], _WHERE, name)
    need(call["compute_dtype"] is BF16, _WHERE, f"compute_dtype is bfloat16, got {call['compute_dtype']!r}")
    need(call["kernel_type_option"].name == "DROPLESS", _WHERE, "no release has a dropping backward")
    on_hidden = bool(call["affinity_option"].name == "AFFINITY_ON_H")
    activations = {"SiLU", "Swish"} | ({"SquaredReLU"} if release >= (2, 33) else set())
    need(call["activation_type"].name in activations, _WHERE, f"activation {call['activation_type'].name} is not SiLU")
    if release < (2, 31):
        need(on_hidden, _WHERE, "AFFINITY_ON_I is ignored before 2.31")
    else:
        alone = call["shard_option"].name == "SHARD_ON_HIDDEN" and on_hidden
        need(not alone, _WHERE, "SHARD_ON_HIDDEN is allowed with AFFINITY_ON_I only: pass SHARD_ON_FREE")
    for name in (*_BUFFERS, "accumulation_dtype", "blocking_params"):
        need(call.get(name) is None, _WHERE, f"{name} is not part of the double: gradients are returned")
    need(not call.get("skip_grad_initialization", False), _WHERE, "skip_grad_initialization needs gradient buffers")
    return on_hidden


def _check_sizes(release: Release, sizes: Sizes) -> None:
    blocks = (128, 256, 512, 1024) + ((2048, 4096) if release >= (2, 32) else ())
    need(sizes.block in blocks, _WHERE, f"block_size is one of {blocks}, got {sizes.block}")
    for letter, size in (("H", sizes.hidden), ("I", sizes.inner)):
        need(size % 2 == 0, _WHERE, f"{letter} is even, got {size}")
    need(sizes.hidden % 64 == 0, _WHERE, f"H per core is a multiple of 32, got {sizes.hidden // 2}")
    free = release >= (2, 31) and sizes.block == 128
    need(free or sizes.inner % 64 == 0, _WHERE, f"I per core is a multiple of 32, got {sizes.inner // 2}")


def _result(double: Double, launch: Launch, call: Arguments, sizes: Sizes, plan: Plan) -> tuple[KernelTensor, ...]:
    rows, experts, hidden, inner = sizes.rows, sizes.experts, sizes.hidden, sizes.inner
    affinity = call["expert_affinities_masked"].dtype
    made: list[tuple[tuple[int, ...], Any]] = [
        ((rows, hidden), BF16), ((rows * experts, 1), affinity), ((experts, hidden, 2, inner), BF16),
        ((experts, inner, hidden), BF16),
    ]  # fmt: skip
    if call["bias"]:
        made += [((experts, 2, inner), BF16), ((experts, hidden), BF16)]
    grads: Any = [None] * len(made)
    if not launch.fake:
        values = {name: to_package(value) for name, value in call.items()}
        grads = list(kernels.blockwise_mm_bwd(**values, upstream_affinity_grad=True, device_limits=False))
        if double.release < (2, 30):
            grads[1] = _never_zeroed(grads[1], sizes, plan)
    return tuple(give(launch, grad, shape, dtype) for grad, (shape, dtype) in zip(grads, made))


def _never_zeroed(grad: Tensor, sizes: Sizes, plan: Plan) -> Tensor:
    """2.29 zeroes E // 2 chunks of T' entries per core: an odd E leaves the last T' entries to what was there."""
    if sizes.experts % 2 == 0 or sizes.experts == 1:
        return grad
    values = grad.clone().reshape(-1)
    written = torch.zeros(values.shape, dtype=torch.bool)
    written[plan.token_R * sizes.experts + plan.expert_R] = True
    tail = torch.arange(len(values)) >= len(values) - sizes.rows
    values[tail & ~written] = float("nan")
    return values.reshape(grad.shape)

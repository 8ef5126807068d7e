"""The gradients' memory: new tensors, or the caller's ``*_grad_out`` buffers (nki-library 2.31 and later).

Letters: T' rows of the token tensors, H hidden, I intermediate, E experts, R real (token, expert) pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import ExpertStack
from hf_neuron_moe.checks import Rule, check_dtype, check_layouts, check_rules, check_same_device
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.reference.block_rows import FLOATS, BlockRows
from hf_neuron_moe.reference.blockwise_arguments import BUFFERS, BackwardArguments


def grad_weights(given: BackwardArguments) -> ExpertStack:
    """Return the weight gradients' memory as the experts write it."""
    gate_up, down = given.gate_up_proj_weight_grad_out, given.down_proj_weight_grad_out
    new = functools.partial(torch.empty_like, dtype=given.accumulation_dtype, memory_format=torch.contiguous_format)
    gate_up = new(given.gate_up_proj_weight) if gate_up is None else gate_up
    down = new(given.down_proj_weight) if down is None else down
    return ExpertStack(gate_up.flatten(2), down, transposed=True)


def store_hidden(given: BackwardArguments, d_hidden: Tensor, rows: BlockRows) -> Tensor:
    """Return the fp32 hidden gradient in the operand's dtype, or write it to the buffer and return that."""
    out = given.hidden_states_grad_out
    if out is None:
        return d_hidden.to(given.hidden_states.dtype)
    if not given.skip_grad_initialization:
        return out.copy_(d_hidden)
    if not given.is_tensor_update_accumulating:
        out[rows.token_R] = d_hidden[rows.token_R].to(out.dtype)
        return out
    return out.add_(d_hidden)


def store_affinity(given: BackwardArguments, d_scale_R: Tensor, rows: BlockRows) -> Tensor:
    """Assign the pairs' gradients to a dense zero ``[T' * E, 1]``, or to the buffer, and return it."""
    out = given.expert_affinities_masked_grad_out
    if out is None:
        out = torch.zeros_like(given.expert_affinities_masked, memory_format=torch.contiguous_format)
    elif not given.skip_grad_initialization:
        out.zero_()
    out[rows.token_R * len(given.down_proj_weight) + rows.expert_R, 0] = d_scale_R.to(out.dtype)
    return out


def check_buffers(given: BackwardArguments, rows: BlockRows, sizes: dict[str, int]) -> None:
    """Raise for buffers that do not fit their operands, and combinations that would compute something else."""
    buffers = {name: getattr(given, name) for name in BUFFERS if getattr(given, name) is not None}
    for name, buffer in buffers.items():
        check_dtype(buffer, FLOATS, name)
        check_layouts(buffers, {name: BUFFERS[name]}, **sizes)
        fix = "Allocate it with torch.empty of that shape."
        strides = f"strides {buffer.stride()}"
        check_rules([Rule(buffer.is_contiguous(), name, "contiguous", strides, fix, ShapeError)])
    check_same_device({"hidden_states": given.hidden_states, **buffers})
    check_rules(_accumulation_rules(given, buffers, rows))


def _accumulation_rules(given: BackwardArguments, buffers: dict[str, Tensor], rows: BlockRows) -> Iterator[Rule]:
    missing = [name for name in BUFFERS if name not in buffers] if given.skip_grad_initialization else []
    fix = "Pass all four *_grad_out buffers to add to."
    yield Rule(not missing, "skip_grad_initialization", f"False without {''.join(missing[:1])}", "True", fix)
    name, dtype, rule = "accumulation_dtype", given.accumulation_dtype, "None, torch.bfloat16 or torch.float32"
    yield Rule(dtype in (None, *FLOATS), name, rule, repr(dtype), "Use torch.float32.")
    wide = [name for name, buffer in buffers.items() if buffer.dtype == torch.float32]
    fits = not wide or dtype != torch.bfloat16
    rule = f"not lower than the buffers' ({''.join(wide[:1])} is fp32)"
    yield Rule(fits, name, rule, "torch.bfloat16", "Leave it None or pass torch.float32.")
    name, rule = "is_tensor_update_accumulating", "True where a token goes to more than one expert"
    fix = "Plain stores keep the last expert's part only; they are for top_k = 1."
    fits = given.is_tensor_update_accumulating or rows.token_R.numel() == rows.token_R.unique().numel()
    yield Rule(fits, name, rule, "False", fix)

"""The gradients' memory: new tensors, or the caller's ``*_grad_out`` buffers (nki-library 2.31 and later).

Letters: T' rows of the token tensors, H hidden, I intermediate, E experts, R real (token, expert) pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import ExpertStack
from hf_neuron_moe.checks import Rule, check_dtype, check_rules, check_same_device, check_shape
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.reference.block_rows import FLOATS, BlockRows
from hf_neuron_moe.reference.blockwise_checks import Operands

BUFFERS = {
    "hidden_states_grad_out": "[T', H]",
    "expert_affinities_masked_grad_out": "[T' * E, 1]",
    "gate_up_proj_weight_grad_out": "[E, H, 2, I]",
    "down_proj_weight_grad_out": "[E, I, H]",
}
"""Arguments for buffers, each of the shape of the operand in its name."""


@dataclass(frozen=True)
class GradBuffers:
    """Where results go: the ``*_grad_out`` arguments, None for a new tensor."""

    hidden_states_grad_out: Tensor | None = None  # [T', H]
    expert_affinities_masked_grad_out: Tensor | None = None  # [T' * E, 1]
    gate_up_proj_weight_grad_out: Tensor | None = None  # [E, H, 2, I]
    down_proj_weight_grad_out: Tensor | None = None  # [E, I, H]
    add: bool = False  # add to the buffers
    assign_rows: bool = False  # store the hidden gradient's rows instead of adding them
    dtype: torch.dtype | None = None  # of new weight and bias gradients; None is that of the weights

    def weights(self, operands: Operands) -> ExpertStack:
        """Return the weight gradients' memory as the experts write it."""
        gate_up, down = self.gate_up_proj_weight_grad_out, self.down_proj_weight_grad_out
        new = functools.partial(torch.empty_like, dtype=self.dtype, memory_format=torch.contiguous_format)
        gate_up = new(operands.gate_up_proj_weight) if gate_up is None else gate_up
        down = new(operands.down_proj_weight) if down is None else down
        return ExpertStack(gate_up.flatten(2), down, transposed=True)

    def store_hidden(self, d_hidden: Tensor, rows: BlockRows, dtype: torch.dtype) -> Tensor:
        """Return the fp32 hidden gradient in `dtype`, or write it to the buffer and return that."""
        out = self.hidden_states_grad_out
        if out is None:
            return d_hidden.to(dtype)
        if not self.add:
            return out.copy_(d_hidden)
        if self.assign_rows:
            out[rows.token_R] = d_hidden[rows.token_R].to(out.dtype)
            return out
        return out.add_(d_hidden)

    def store_affinity(self, d_scale_R: Tensor, rows: BlockRows, affinities: Tensor, experts: int) -> Tensor:
        """Assign the pairs' gradients to a dense zero ``[T' * E, 1]``, or to the buffer, and return it."""
        out = self.expert_affinities_masked_grad_out
        if out is None:
            out = torch.zeros(affinities.shape, dtype=affinities.dtype, device=affinities.device)
        elif not self.add:
            out.zero_()
        out[rows.token_R * experts + rows.expert_R, 0] = d_scale_R.to(out.dtype)
        return out


def check_buffers(buffers: GradBuffers, operands: Operands, rows: BlockRows) -> None:
    """Raise for buffers that do not fit their operands, and combinations that would compute something else."""
    given = {name: getattr(buffers, name) for name in BUFFERS if getattr(buffers, name) is not None}
    for name, buffer in given.items():
        check_dtype(buffer, FLOATS, name)
        check_shape(buffer, getattr(operands, name.removesuffix("_grad_out")).shape, BUFFERS[name], name)
        fix = "Allocate it with torch.empty of that shape."
        strides = f"strides {buffer.stride()}"
        check_rules([Rule(buffer.is_contiguous(), name, "contiguous", strides, fix, ShapeError)])
    check_same_device({"hidden_states": operands.hidden_states, **given})
    check_rules(_accumulation_rules(buffers, given, rows))


def _accumulation_rules(buffers: GradBuffers, given: dict[str, Tensor], rows: BlockRows) -> Iterator[Rule]:
    missing = [name for name in BUFFERS if name not in given] if buffers.add else []
    fix = "Pass all four *_grad_out buffers to add to."
    yield Rule(not missing, "skip_grad_initialization", f"False without {''.join(missing[:1])}", "True", fix)
    name, rule = "accumulation_dtype", "None, torch.bfloat16 or torch.float32"
    yield Rule(buffers.dtype in (None, *FLOATS), name, rule, repr(buffers.dtype), "Use torch.float32.")
    wide = [name for name, buffer in given.items() if buffer.dtype == torch.float32]
    fits = not wide or buffers.dtype != torch.bfloat16
    rule = f"not lower than the buffers' ({''.join(wide[:1])} is fp32)"
    yield Rule(fits, name, rule, "torch.bfloat16", "Leave it None or pass torch.float32.")
    name, rule = "is_tensor_update_accumulating", "True where a token goes to more than one expert"
    fix = "Plain stores keep the last expert's part only; they are for top_k = 1."
    fits = not buffers.assign_rows or rows.token_R.numel() == rows.token_R.unique().numel()
    yield Rule(fits, name, rule, "False", fix)

"""The experts: ``moe_cte`` and ``blockwise_mm_bwd`` in bf16, ``blockwise_mm_fwd_mxfp8`` and its backward in MXFP8.

Letters: T tokens, K experts per token, E experts, H hidden, I intermediate, N blocks of B slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import BF16_CHECKPOINTS, Keep
from hf_neuron_moe.backends.base import Grads, Saved
from hf_neuron_moe.backends.neuron.fp8_checkpoints import pack, unpack
from hf_neuron_moe.backends.neuron.launch import Kernels
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.neuron.orientation import pad_axes, split_axes, stock_gradient
from hf_neuron_moe.backends.neuron.static_plan import Routed, block_count, route, routing_gradient
from hf_neuron_moe.backends.prepared import kept_for
from hf_neuron_moe.backends.spec import Routing
from hf_neuron_moe.backends.torch.saved import fp8_storage
from hf_neuron_moe.errors import BackendUnavailableError

_BACKWARD_AXES = ("EH2I", "EIH")
"""Orientation of both weights in every backward and in the bf16 forward."""


@dataclass(frozen=True)
class Experts:
    """A stack of experts as the operator has it."""

    gate_up: Tensor  # [E, 2I, H], or [E, H, 2I] if `transposed`
    down: Tensor  # [E, H, I], or [E, I, H] if `transposed`
    transposed: bool
    block: Block  # their sizes and options

    @property
    def count(self) -> int:
        """E."""
        return self.gate_up.shape[0]


def keeps_checkpoints(keep: Keep) -> bool:
    """Whether a policy keeps the kernels' checkpoint: it holds gate and up together, or is made again."""
    return keep.names.issuperset(BF16_CHECKPOINTS)


class ExpertKernels(Kernels):
    """Forward and backward of the experts."""

    def fake_saved(self, x_TH: Tensor, top_k: int, experts: int, block: Block, keep: Keep) -> Saved:
        """Return uninitialized tensors like those that :meth:`forward` keeps."""
        nothing = x_TH.new_empty(0), x_TH.new_empty(0), x_TH.new_empty(0), x_TH.new_empty(0)
        if not keeps_checkpoints(keep):
            return nothing
        (hidden, inner), size, tokens, blocks = block.padded, block.block_size, x_TH.shape[0], 0
        if not (isinstance(tokens, int) and tokens == 0):
            blocks = block_count(tokens * min(top_k, experts), experts, size, _per_iteration(block))
        shape = (blocks, 2, inner, size)
        if keep.fp8:
            return *fp8_storage(x_TH, shape[:-1], size), *fp8_storage(x_TH, (tokens,), block.hidden)
        down = x_TH.new_empty((blocks, size, hidden)) if self._on_output(block) else nothing[1]
        return x_TH.new_empty(shape), down, nothing[2], nothing[3]

    def prepare(self, experts: Experts) -> None:
        """Make every copy that forward and backward read."""
        for axes in {self._forward_axes(experts.block), _BACKWARD_AXES}:
            self._weights(experts, axes)

    def _weights(self, experts: Experts, wanted: tuple[str, str], *, training: bool = True) -> dict[str, Tensor]:
        """The kernels' weight arguments in the wanted orientations."""
        own, block = split_axes(experts.transposed), experts.block
        return {
            "gate_up_proj_weight": self.weight(experts.gate_up, own[0], wanted[0], block, training=training),
            "down_proj_weight": self.weight(experts.down, own[1], wanted[1], block, training=training),
        }

    def _forward_axes(self, block: Block) -> tuple[str, str]:
        if block.precision == "bf16":
            return _BACKWARD_AXES
        return ("EI2H" if self.adapter.generation("moe_forward_mxfp8") == "2.33" else "E2IH"), "EHI"

    def _on_output(self, block: Block) -> bool:
        """Whether the affinity multiplies the output: then the backward reads a checkpoint of the down projection."""
        return block.precision == "bf16" and self.adapter.generation("moe_backward") == "2.29"

    def _route(self, routing: Routing, experts: Experts, *, sink: bool) -> Routed:
        block, each = experts.block, _per_iteration(experts.block)
        # The bf16 pair documents one float dtype for all its tensors, the MXFP8 pair fp32 affinities.
        dtype = torch.bfloat16 if block.precision == "bf16" else torch.float32
        return route(routing, experts.count, block.block_size, sink=sink, per_iteration=each, dtype=dtype)

    def forward(self, x_TH: Tensor, routing: Routing, experts: Experts, keep: Keep) -> tuple[Tensor, Saved]:
        """Return ``y [T, H]`` and what is kept: gate and up ``[N, 2, I, B]`` and, for 2.29, down ``[N, B, H]``."""
        saved = self.fake_saved(x_TH, routing.index_TK.shape[1], experts.count, experts.block, keep)
        if not x_TH.shape[0]:
            return torch.zeros_like(x_TH), saved
        keeps = keeps_checkpoints(keep)
        out_TH, checkpoints = self._run_forward(x_TH, routing, experts, checkpoint=keeps, training=kept_for(keep))
        out_TH = out_TH[:, : experts.block.hidden].contiguous()
        if not keeps:
            return out_TH, saved
        if keep.fp8:
            return out_TH, (*pack(self._used_slots(checkpoints[0], routing, experts)), *pack(x_TH))
        down = checkpoints[1] if self._on_output(experts.block) else saved[1]
        return out_TH, (checkpoints[0], down, saved[2], saved[3])

    def _run_forward(
        self, x_TH: Tensor, routing: Routing, experts: Experts, *, checkpoint: bool, training: bool = True
    ) -> tuple[Tensor, list[Tensor]]:
        """Return y ``[T, H]``, padded, and the checkpoints that the kernel returned, gate and up ``[N, 2, I, B]``."""
        block, tokens, bf16 = experts.block, x_TH.shape[0], experts.block.precision == "bf16"
        routed = self._route(routing, experts, sink=bf16)
        rows = (tokens + 1 if bf16 else tokens, block.padded[0])  # the sink row is the last one
        options = {"checkpoint": checkpoint, "affinity_on_i": not self._on_output(block)} if bf16 else {}
        out_TH, *checkpoints = self.run(
            block.needs[0],
            "moe_forward",
            hidden_states=pad_axes(x_TH, rows),
            block_size=block.block_size,
            **routed._asdict(),
            **self._weights(experts, self._forward_axes(block), training=training),
            **options,
        )
        if checkpoint:
            turned, slots = self.adapter.turned(block.needs[0]), (block.padded[1], block.block_size)
            expected = (routed.block_to_expert.shape[0], 2, *(slots[::-1] if turned else slots))
            _check_checkpoints(checkpoints, expected)
            checkpoints = [checkpoints[0].mT.contiguous(), *checkpoints[1:]] if turned else checkpoints
        return out_TH[:tokens], checkpoints

    def _used_slots(self, checkpoint_N2IB: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Zero the slots without a token: they share FP8 groups with others, and no document says what is in them."""
        ids = self._route(routing, experts, sink=False).token_position_to_id
        used = (ids >= 0).view(checkpoint_N2IB.shape[0], 1, 1, -1)
        return torch.where(used, checkpoint_N2IB, 0)

    def backward(
        self, dout_TH: Tensor, x_TH: Tensor, routing: Routing, experts: Experts, saved: Saved, keep: Keep
    ) -> Grads:
        """Return the gradients of x, the routing weights, gate_up and down for at least one token; all are made."""
        block, rows = experts.block, (dout_TH.shape[0], experts.block.padded[0])
        gate_up_ckpt, down_ckpt, x_TH = self._checkpoints(x_TH, routing, experts, saved, keep)
        d_x, d_affinities, d_gate_up, d_down = self.run(
            block.needs[1],
            "moe_backward",
            hidden_states=pad_axes(x_TH, rows),
            gate_up_proj_act_checkpoint_T=gate_up_ckpt.mT if self.adapter.turned(block.needs[1]) else gate_up_ckpt,
            down_proj_act_checkpoint=down_ckpt,
            output_hidden_states_grad=pad_axes(dout_TH, rows),
            block_size=block.block_size,
            **self._route(routing, experts, sink=False)._asdict(),
            **self._weights(experts, _BACKWARD_AXES),
        )
        own, sizes = split_axes(experts.transposed), (block.hidden, block.inner)
        d_gate_up = stock_gradient(d_gate_up, _BACKWARD_AXES[0], own[0], *sizes, experts.gate_up.dtype)
        d_down = stock_gradient(d_down, _BACKWARD_AXES[1], own[1], *sizes, experts.down.dtype)
        d_weight = routing_gradient(d_affinities, routing.index_TK, experts.count, routing.weight_TK.dtype)
        return d_x[:, : block.hidden].contiguous(), d_weight, d_gate_up, d_down

    def _checkpoints(
        self, x_TH: Tensor, routing: Routing, experts: Experts, saved: Saved, keep: Keep
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gate and up, the down projection where the backward reads it, and the input."""
        on_output = self._on_output(experts.block)
        if keep.fp8:
            x_TH = unpack(saved[2], saved[3])
            if not on_output:
                return unpack(saved[0], saved[1]), None, x_TH
        elif keeps_checkpoints(keep):
            return saved[0], saved[1] if on_output else None, x_TH
        _, made = self._run_forward(x_TH, routing, experts, checkpoint=True)
        return made[0], made[1] if on_output else None, x_TH


def _check_checkpoints(found: list[Tensor], shape: tuple[int, ...]) -> None:
    """Refuse a forward that keeps less than documented, or in another order: the backward would read nonsense."""
    got, expected = tuple(found[0].shape) if found else "the output alone", f"gate and up {shape} behind the output"
    if got != shape:
        fix = "Install the nki-library of SDK 2.33, or use fallback='torch'."
        raise BackendUnavailableError.about("the experts' forward kernel", expected, got, fix).named("neuron backend")


def _per_iteration(block: Block) -> int:
    """The MXFP8 forward gives whole blocks to two cores; the bf16 pair divides every block."""
    return 2 if block.precision == "mxfp8" else 1

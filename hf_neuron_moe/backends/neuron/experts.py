"""The experts: ``moe_cte`` and ``blockwise_mm_bwd`` in bf16, ``blockwise_mm_fwd_mxfp8`` and its backward in MXFP8.

A dense MLP in bf16 is one expert to which every token goes with affinity 1.

Letters: T tokens, K experts per token, E experts, H hidden, I intermediate, N blocks of B slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import BF16_CHECKPOINTS, Keep
from hf_neuron_moe.backends.base import Saved
from hf_neuron_moe.backends.neuron.fp8_checkpoints import (
    Limits,
    pack,
    pack_clamped,
    split_scales,
    unpack,
    unpack_clamped,
)
from hf_neuron_moe.backends.neuron.gates import PLAIN, kernel_gate
from hf_neuron_moe.backends.neuron.launch import Kernels
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.neuron.orientation import kernel_weight, pad_axes, split_axes, stock_gradient
from hf_neuron_moe.backends.neuron.static_plan import block_count, plan_blocks, route, routing_gradient
from hf_neuron_moe.backends.prepared import kept_for
from hf_neuron_moe.backends.spec import BlockSpec, ExpertWeights, FFNWeights, Routing
from hf_neuron_moe.backends.torch.saved import fp8_storage
from hf_neuron_moe.errors import BackendUnavailableError

_BACKWARD_AXES = ("EH2I", "EIH")
"""Orientation of both weights in every backward and in the bf16 forward."""


@dataclass(frozen=True)
class Experts:
    """A stack of experts, or a dense MLP, as the operator has it."""

    gate_up: tuple[Tensor, ...]  # one tensor, or gate and up of a dense MLP
    down: Tensor
    axes: tuple[str, str]  # of both, as orientation.py has them
    block: Block  # their sizes and options
    gate_up_bias: tuple[Tensor | None, ...] = (None,)  # as `gate_up`, without H
    down_bias: Tensor | None = None

    @classmethod
    def of(cls, weights: ExpertWeights, spec: BlockSpec, block: Block) -> Experts:
        """Return the experts of an operator's call."""
        axes = split_axes(spec.transposed, spec.interleaved, spec.gate.gated)
        return cls((weights.gate_up,), weights.down, axes, block, (weights.gate_up_bias,), weights.down_bias)

    @classmethod
    def of_dense(cls, weights: FFNWeights, block: Block) -> Experts:
        """Return a dense MLP as one expert."""
        return cls(weights[:2], weights.down_HI, ("IH", "HI"), block, weights[3:5], weights.down_bias_H)

    @property
    def count(self) -> int:
        """E."""
        return self.down.shape[0] if "E" in self.axes[1] else 1

    @property
    def has_biases(self) -> bool:
        """Whether any bias is a parameter."""
        return any(bias is not None for bias in (*self.gate_up_bias, self.down_bias))

    @property
    def adds_biases(self) -> bool:
        """Whether the kernels are given biases."""
        return self.has_biases or self.block.gate.up_offset != 0

    @property
    def limits(self) -> Limits:
        """The limits of gate and up."""
        return kernel_gate(self.block.gate).pairs

    def kernel_biases(self) -> tuple[Tensor, Tensor] | None:
        """Return the biases ``[E, 2, I]`` and ``[E, H]`` in fp32, up's with the gate's offset; None if all are zero.

        The kernels take both or neither. Their sums are fp32, so the offset is added before anything is rounded.
        """
        offset, (hidden, inner) = self.block.gate.up_offset, self.block.padded
        if not self.adds_biases:
            return None
        turn = partial(kernel_weight, hidden=hidden, inner=inner, dtype=torch.float32)
        gate_up_E2I = self.down.new_zeros((self.count, 2, inner), dtype=torch.float32)
        down_EH = self.down.new_zeros((self.count, hidden), dtype=torch.float32)
        if any(bias is not None for bias in self.gate_up_bias):
            rows = self.block.inner
            parts = [self.down.new_zeros(rows) if bias is None else bias for bias in self.gate_up_bias]
            gate_up_E2I = turn(*parts, axes=self.axes[0].replace("H", ""), wanted="E2I")
        if self.down_bias is not None:
            down_EH = turn(self.down_bias, axes=self.axes[1].replace("I", ""), wanted="EH")
        if offset:
            gate_up_E2I = torch.stack([gate_up_E2I[:, 0], gate_up_E2I[:, 1] + offset], dim=1)
        return gate_up_E2I, down_EH

    def parts_gradients(self, gradient: Tensor, axes: str) -> tuple[Tensor, ...]:
        """Return the gradients of `gate_up` or, without H in `axes`, of its biases, from the kernels' joint one."""
        own, sizes = self.axes[0], (self.block.hidden, self.block.inner)
        parts: tuple[Tensor | None, ...] = self.gate_up
        if "H" not in axes:
            own, parts = own.replace("H", ""), self.gate_up_bias
        halves = gradient.split(1, axes.index("2")) if len(parts) == 2 else (gradient,)
        return tuple(
            gradient.new_empty(0) if part is None else stock_gradient(half, axes, own, *sizes, part.dtype)
            for half, part in zip(halves, parts, strict=True)
        )


class ExpertGrads(NamedTuple):
    """Gradients of a call; empty ones of biases that are not there."""

    x: Tensor
    routing_weight: Tensor
    gate_up: tuple[Tensor, ...]
    down: Tensor
    gate_up_bias: tuple[Tensor, ...]
    down_bias: Tensor


def keeps_checkpoints(keep: Keep) -> bool:
    """Whether a policy keeps the kernels' checkpoint: it holds gate and up together, or is made again."""
    return keep.names.issuperset(BF16_CHECKPOINTS)


class ExpertKernels(Kernels):
    """Forward and backward of the experts."""

    def fake_saved(self, x_TH: Tensor, top_k: int, experts: int, block: Block, keep: Keep) -> Saved:
        """Return uninitialized tensors like those that :meth:`forward` keeps."""
        (hidden, inner), size, tokens, blocks = block.padded, block.block_size, x_TH.shape[0], 0
        if not (isinstance(tokens, int) and tokens == 0):
            blocks = block_count(tokens * min(top_k, experts), experts, size, _per_iteration(block))
        first, second, third = (x_TH.new_empty(0) for _ in range(3))
        plan = x_TH.new_empty((blocks, size + 1) if keep.backward else 0, dtype=torch.int32)
        if keep.fp8:
            first, scales = fp8_storage(x_TH, (blocks, 2, inner), size)
            third, of_input = fp8_storage(x_TH, (tokens,), block.hidden)
            second = x_TH.new_empty(scales.numel() + of_input.numel(), dtype=scales.dtype)
        elif keeps_checkpoints(keep):
            first = x_TH.new_empty((blocks, 2, inner, size))
            second = x_TH.new_empty((blocks, size, hidden)) if self._on_output(block) else second
        return first, second, third, plan

    def prepare(self, experts: Experts) -> None:
        """Make every copy that forward and backward read."""
        for axes in {self._forward_axes(experts.block), _BACKWARD_AXES}:
            self._weights(experts, axes)

    def _weights(self, experts: Experts, wanted: tuple[str, str], *, training: bool = True) -> dict[str, Tensor]:
        """The kernels' weight arguments in the wanted orientations."""
        turn = partial(self.weight, block=experts.block, training=training)
        return {
            "gate_up_proj_weight": turn(*experts.gate_up, axes=experts.axes[0], wanted=wanted[0]),
            "down_proj_weight": turn(experts.down, axes=experts.axes[1], wanted=wanted[1]),
        }

    def _forward_axes(self, block: Block) -> tuple[str, str]:
        if block.precision == "bf16":
            return _BACKWARD_AXES
        return ("EI2H" if self.adapter.generation("moe_forward_mxfp8") == "2.33" else "E2IH"), "EHI"

    def _on_output(self, block: Block) -> bool:
        """Whether the affinity multiplies the output: then the backward reads a checkpoint of the down projection."""
        return block.precision == "bf16" and self.adapter.generation("moe_backward") == "2.29"

    def _route(self, plan_NB1: Tensor, routing: Routing, experts: Experts, *, sink: bool) -> dict[str, Tensor]:
        # The bf16 pair documents one float dtype for all its tensors, the MXFP8 pair fp32 affinities.
        dtype = torch.bfloat16 if experts.block.precision == "bf16" else torch.float32
        return route(plan_NB1, routing, experts.count, sink=sink, dtype=dtype)._asdict()

    def forward(self, x_TH: Tensor, routing: Routing, experts: Experts, keep: Keep) -> tuple[Tensor, Saved]:
        """Return ``y [T, H]`` and what is saved.

        That is gate and up ``[N, 2, I, B]``, for 2.29 down ``[N, B, H]``, and the block plan ``[N, B + 1]``. In FP8
        codes of gate and up, their scales with those of the input behind them, the input's codes, and the plan.
        """
        block = experts.block
        saved = self.fake_saved(x_TH, routing.index_TK.shape[1], experts.count, block, keep)
        if not x_TH.shape[0]:
            return torch.zeros_like(x_TH), saved
        keeps, plan = (
            keeps_checkpoints(keep),
            plan_blocks(routing.index_TK, experts.count, block.block_size, _per_iteration(block)),
        )
        out_TH, made = self._run_forward(x_TH, (plan, routing), experts, checkpoint=keeps, training=kept_for(keep))
        out_TH = out_TH[:, : block.hidden].contiguous()
        first, second, third, unplanned = saved
        if keep.fp8:
            turn = partial(pack_clamped, limits=experts.limits) if block.gate.clamped else pack
            first, scales = turn(_used_slots(made[0], plan))
            third, of_input = pack(x_TH)
            second = torch.cat([scales.flatten(), of_input.flatten()])
        elif keeps:
            first, second = made[0], made[1] if self._on_output(block) else second
        return out_TH, (first, second, third, plan if keep.backward else unplanned)

    def _run_forward(
        self,
        x_TH: Tensor,
        planned: tuple[Tensor, Routing],
        experts: Experts,
        *,
        checkpoint: bool,
        training: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return y ``[T, H]``, padded, and the checkpoints that the kernel returned, gate and up ``[N, 2, I, B]``."""
        block, tokens, bf16 = experts.block, x_TH.shape[0], experts.block.precision == "bf16"
        rows = (tokens + 1 if bf16 else tokens, block.padded[0])  # the sink row is the last one
        options = {"checkpoint": checkpoint, "affinity_on_i": not self._on_output(block)} if bf16 else {}
        name, gating = self._gating(experts, "moe_forward")
        if (biases := experts.kernel_biases()) is not None:
            gating |= {"gate_and_up_proj_bias": biases[0], "down_proj_bias": biases[1]}
        out_TH, *checkpoints = self.run(
            block.needs[0],
            name,
            hidden_states=pad_axes(x_TH, rows),
            block_size=block.block_size,
            **self._route(*planned, experts, sink=bf16),
            **self._weights(experts, self._forward_axes(block), training=training),
            **options,
            **gating,
        )
        if checkpoint:
            turned, slots = self.adapter.turned(block.needs[0]), (block.padded[1], block.block_size)
            expected = (planned[0].shape[0], 2, *(slots[::-1] if turned else slots))
            _check_checkpoints(checkpoints, expected)
            checkpoints = [checkpoints[0].mT.contiguous(), *checkpoints[1:]] if turned else checkpoints
        return out_TH[:tokens], checkpoints

    def _gating(self, experts: Experts, name: str) -> tuple[str, dict[str, Any]]:
        """Return the wrapper kernel for the block's gate, and its arguments but for biases; none for a SwiGLU."""
        gate = kernel_gate(experts.block.gate)
        if experts.block.precision == "mxfp8":
            clamped = any(limit is not None for limit in gate.limits.values())
            return (f"{name}_clamped", gate.limits) if clamped else (name, {})
        if gate.ungated:
            return f"{name}_ungated", {"skip_gate_proj": True}
        if gate == PLAIN and not experts.adds_biases:
            return name, {}
        return f"{name}_gated", {"swish": gate.swish, **gate.limits}

    def backward(
        self, dout_TH: Tensor, x_TH: Tensor, routing: Routing, experts: Experts, saved: Saved, keep: Keep
    ) -> ExpertGrads:
        """Return the gradients for at least one token; all are made."""
        block, rows = experts.block, (dout_TH.shape[0], experts.block.padded[0])
        gate_up_ckpt, down_ckpt, x_TH = self._checkpoints(x_TH, routing, experts, saved, keep)
        name, gating = self._gating(experts, "moe_backward")
        if experts.has_biases:
            gating |= {"bias": True}
        d_x, d_affinities, d_gate_up, d_down, *d_biases = self.run(
            block.needs[1],
            name,
            hidden_states=pad_axes(x_TH, rows),
            gate_up_proj_act_checkpoint_T=gate_up_ckpt.mT if self.adapter.turned(block.needs[1]) else gate_up_ckpt,
            down_proj_act_checkpoint=down_ckpt,
            output_hidden_states_grad=pad_axes(dout_TH, rows),
            block_size=block.block_size,
            **self._route(saved[3], routing, experts, sink=False),
            **self._weights(experts, _BACKWARD_AXES),
            **gating,
        )
        own, sizes = experts.axes[1], (block.hidden, block.inner)
        if experts.down_bias is not None:
            d_affinities = _with_bias_term(d_affinities, dout_TH, experts.down_bias)
        bias_grads, down_bias_grad = tuple(x_TH.new_empty(0) for _ in experts.gate_up_bias), x_TH.new_empty(0)
        if experts.has_biases:
            bias_grads = experts.parts_gradients(d_biases[0], "E2I")
        if experts.down_bias is not None:
            axes, dtype = own.replace("I", ""), experts.down_bias.dtype
            down_bias_grad = stock_gradient(d_biases[1], "EH", axes, *sizes, dtype)
        return ExpertGrads(
            d_x[:, : block.hidden].contiguous(),
            routing_gradient(d_affinities, routing.index_TK, experts.count, routing.weight_TK.dtype),
            experts.parts_gradients(d_gate_up, _BACKWARD_AXES[0]),
            stock_gradient(d_down, _BACKWARD_AXES[1], own, *sizes, experts.down.dtype),
            bias_grads,
            down_bias_grad,
        )

    def _checkpoints(
        self, x_TH: Tensor, routing: Routing, experts: Experts, saved: Saved, keep: Keep
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gate and up, the down projection where the backward reads it, and the input."""
        on_output = self._on_output(experts.block)
        if keep.fp8:
            scales, of_input = split_scales(saved[1], saved[0])
            x_TH = unpack(saved[2], of_input.view(saved[2].shape[0], -1))
            if not on_output:
                turn = partial(unpack_clamped, limits=experts.limits) if experts.block.gate.clamped else unpack
                return turn(saved[0], scales), None, x_TH
        elif keeps_checkpoints(keep):
            return saved[0], saved[1] if on_output else None, x_TH
        _, made = self._run_forward(x_TH, (saved[3], routing), experts, checkpoint=True)
        return made[0], made[1] if on_output else None, x_TH


def _used_slots(checkpoint_N2IB: Tensor, plan_NB1: Tensor) -> Tensor:
    """Zero the slots without a token: they share FP8 groups with others, and no document says what is in them."""
    return torch.where((plan_NB1[:, :-1] >= 0).view(plan_NB1.shape[0], 1, 1, -1), checkpoint_N2IB, 0)


def _with_bias_term(d_affinities: Tensor, dout_TH: Tensor, down_bias: Tensor) -> Tensor:
    """Add ``dO . bd``: the kernels' backward knows the down projection without its bias only."""
    down_bias_EH = down_bias.float().reshape(-1, dout_TH.shape[1])
    return d_affinities.reshape(len(dout_TH), -1).float() + dout_TH.float() @ down_bias_EH.t()


def _check_checkpoints(found: list[Tensor], shape: tuple[int, ...]) -> None:
    """Refuse a forward that keeps less than documented, or in another order: the backward would read nonsense."""
    got, expected = tuple(found[0].shape) if found else "the output alone", f"gate and up {shape} behind the output"
    if got != shape:
        fix = "Install the nki-library of SDK 2.33, or use fallback='torch'."
        raise BackendUnavailableError.about("the experts' forward kernel", expected, got, fix).named("neuron backend")


def _per_iteration(block: Block) -> int:
    """The MXFP8 forward gives whole blocks to two cores; the bf16 pair divides every block."""
    return 2 if block.precision == "mxfp8" else 1

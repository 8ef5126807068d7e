"""Frozen MX weights through the kernels that take pre-quantized operands: inference only.

Dense MLPs go through ``mlp_fwd_mxfp8`` with codes and packed scales. Experts whose weights are words go through
``moe_cte`` shard_on_block_mx, or, where H is above what that takes, the kernel of shard_on_i_mx itself. Training goes
through the torch backend (:data:`NO_BACKWARD`); how the experts' MXFP8 backward takes such weights no document says.

Letters: T tokens, K experts per token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.backends.mx_weights import NATURAL, SWIZZLED, WORDS, MXExpertStack, MXMatrix
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.gates import (
    kernel_gate,
    mx_activation,
    unsupported_reason_dense,
    unsupported_reason_words,
)
from hf_neuron_moe.backends.neuron.launch import Kernels
from hf_neuron_moe.backends.neuron.limits import BF16_HIDDEN, BF16_HIDDEN_STEP, ON_TRN3, Device
from hf_neuron_moe.backends.neuron.orientation import pad_axes
from hf_neuron_moe.backends.neuron.static_plan import plan_blocks, route
from hf_neuron_moe.backends.spec import Routing
from hf_neuron_moe.formats.block_plan import choose_block_size
from hf_neuron_moe.formats.constants import SwizzleScheme
from hf_neuron_moe.formats.moe_mx import moe_bias_to_lanes
from hf_neuron_moe.formats.padding import LANES, padded_size
from hf_neuron_moe.formats.scales import to_packed
from hf_neuron_moe.formats.swizzle import swizzle, tile_segments

_WORD_FORMATS = ("e4m3fn", "e2m1")  # by the width of words; e5m2 words need an option that not every release has
_UNSIGNED = {torch.int32: torch.uint32, torch.int16: torch.uint16}
"""By the dtype that words are held in the one that the kernels document: 32 bits for fp8, 16 for fp4."""
NO_BACKWARD = (
    "this backend has no input gradient through pre-quantized weights (the dense kernel's backward needs operands "
    "quantized along the other axis, which a loaded model does not hold)"
)
_INNER_STEP, _SMALL_INNER_STEP = 512, 32
WIDE, _WIDE_INNER_STEP = "moe_forward_mx_wide", 1024
"""shard_on_i_mx: no largest H is documented, and I is divided in halves of whole tiles of 512."""


class QuantizedKernels(Kernels):
    """Forward of blocks with MX weights, for which :func:`unsupported_reason_quantized` is None."""

    def forward(self, x_TH: Tensor, routing: Routing | None, stack: MXExpertStack) -> Tensor:
        """Return ``y [T, H]``."""
        tokens = x_TH.shape[0]
        if not tokens:
            return torch.zeros_like(x_TH)
        out_TH = self._dense(x_TH, stack) if routing is None else self._experts(x_TH, routing, stack)
        return out_TH[:tokens].contiguous()

    def _dense(self, x_TH: Tensor, stack: MXExpertStack) -> Tensor:
        gate_up, gate_up_scales = self._operand("gate_up", stack.gate_up)
        down, down_scales = self._operand("down", stack.down)
        out_TH, *_ = self.run(
            "mlp_forward_quantized",
            "mlp_forward_quantized",
            hidden=pad_axes(x_TH, (padded_size(x_TH.shape[0]), x_TH.shape[1])),
            gate_up_weights=gate_up,
            down_weights=down,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
            run_with_lnc2=self.launch.lnc == 2,
        )
        return out_TH

    def _operand(self, name: str, matrix: MXMatrix) -> tuple[Tensor, Tensor]:
        """Codes as float8_e4m3fn ``[K/4, 4F]`` and scales as ``use_scale_packing`` asks for them."""
        codes, scheme = matrix.codes, matrix.layout.scheme
        if matrix.layout.arrangement == NATURAL:
            codes = self.weights.get(f"frozen {name} {scheme}", lambda own: swizzle(own, scheme), codes)
        # Raw bytes would be read as e5m2: the kernel goes by the dtype's name.
        return codes.view(torch.float8_e4m3fn), self.weights.get(f"frozen {name} scales", to_packed, matrix.scales)

    def _experts(self, x_TH: Tensor, routing: Routing, stack: MXExpertStack) -> Tensor:
        (tokens, hidden), top_k, wide = x_TH.shape, routing.index_TK.shape[1], kernel_need(stack) == WIDE
        count, gate = len(stack.down_codes), kernel_gate(stack.gate, trained=False)
        sizes, each = ((256, 512), 1) if wide else ((128, 256, 512), 2)
        block_size = choose_block_size(tokens, top_k, count, choices=sizes, n_block_per_iter=each).block_size
        plan = plan_blocks(routing.index_TK, count, block_size, each)
        routed = route(plan, routing, count, sink=True, dtype=torch.bfloat16)
        gate_up_bias, down_bias = _biases(stack, x_TH)
        biases = {"gate_and_up_proj_bias": moe_bias_to_lanes(gate_up_bias), "down_proj_bias": down_bias}
        out, *_ = self.run(
            kernel_need(stack),
            "moe_forward",
            hidden_states=pad_axes(x_TH, (tokens + 1, hidden)),
            gate_up_proj_weight=stack.gate_up_codes.view(_UNSIGNED[stack.gate_up_codes.dtype]),
            down_proj_weight=stack.down_codes.view(_UNSIGNED[stack.down_codes.dtype]),
            gate_up_proj_scale=stack.gate_up_scales,
            down_proj_scale=stack.down_scales,
            block_size=block_size,
            activation=mx_activation(stack.gate),
            **gate.limits,
            **routed._asdict(),
            **({} if wide else biases),
        )
        return out if wide else out[0]  # shard_on_block_mx returns one slot per core, the first one filled


def _biases(stack: MXExpertStack, x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biases ``[E, 2, I]`` and ``[E, H]``, zeros where there are none, up's with the gate's offset.

    Those with values are fp32, as the kernels' sums are: the offset would round away low bits.
    """
    count, offset = len(stack.down_codes), stack.gate.up_offset
    given = ((stack.gate_up_bias, (count, 2, stack.inner)), (stack.down_bias, (count, stack.hidden)))
    plain = offset == 0 and all(bias is None for bias, _ in given)
    dtype = x_TH.dtype if plain else torch.float32
    gate_up_E2I, down_EH = (
        x_TH.new_zeros(shape, dtype=dtype) if bias is None else bias.view(shape).to(dtype) for bias, shape in given
    )
    if offset:
        gate_up_E2I = torch.stack([gate_up_E2I[:, 0], gate_up_E2I[:, 1] + offset], dim=1)
    return gate_up_E2I, down_EH


def kernel_need(stack: MXExpertStack) -> str:
    """Return the adapter's name of the forward kernel for a block with MX weights."""
    if stack.gate_up_codes.dim() == 2:
        return "mlp_forward_quantized"
    return WIDE if stack.hidden > BF16_HIDDEN[1] else "moe_forward_mx"


def unsupported_reason_quantized(
    stack: MXExpertStack, device: Device, adapter: Adapter, *, training: bool
) -> str | None:
    """Return why the kernels that `adapter` finds cannot compute `stack` on `device`, or None; reads no values."""
    if training:
        return NO_BACKWARD
    if device.platform != "trn3":
        return f"{ON_TRN3}, and this is {device.platform}"
    biased = stack.gate_up_bias is not None or stack.down_bias is not None
    if stack.gate_up_codes.dim() == 2:
        reason = unsupported_reason_dense(stack.gate, biased) or _unsupported_reason_codes(stack)
    else:
        reason = unsupported_reason_words(stack.gate, biased, wide=kernel_need(stack) == WIDE)
        reason = reason or _unsupported_reason_words(stack, device)
    return reason or adapter.unsupported_reason(kernel_need(stack))


def _unsupported_reason_words(stack: MXExpertStack, device: Device) -> str | None:
    layouts, hidden, inner = (stack.gate_up_layout, stack.down_layout), stack.hidden, stack.inner
    if device.lnc != 2:
        return "moe_cte shard_on_block_mx needs two physical cores per logical core (LNC 2), and LNC is 1"
    if any(layout.arrangement != WORDS or layout.fmt not in _WORD_FORMATS for layout in layouts):
        held = ", ".join(f"{layout.fmt} {layout.arrangement}" for layout in layouts)
        return f"the experts' kernel takes words of e4m3fn or e2m1 codes, and these are {held}"
    if layouts[0].fmt != layouts[1].fmt:
        fmts = " and ".join(layout.fmt for layout in layouts)
        return f"the experts' kernel takes one element format for both projections, and these are {fmts}"
    if hidden % BF16_HIDDEN_STEP:
        return f"the experts' kernels take hidden sizes in steps of {BF16_HIDDEN_STEP}, and it is {hidden}"
    if kernel_need(stack) == WIDE and inner % _WIDE_INNER_STEP:
        return (
            f"at hidden sizes above {BF16_HIDDEN[1]}, here {hidden}, the experts' kernel takes multiples of "
            f"{_WIDE_INNER_STEP} of the intermediate size, and it is {inner}"
        )
    if inner % (_INNER_STEP if inner >= _INNER_STEP else _SMALL_INNER_STEP):
        return f"moe_cte takes multiples of 512, or of 32 below, of the intermediate size, and it is {inner}"
    return None


def _unsupported_reason_codes(stack: MXExpertStack) -> str | None:
    sides = {"gate_up_proj": (stack.gate_up_layout, stack.hidden), "down_proj": (stack.down_layout, stack.inner)}
    for name, (layout, size) in sides.items():
        kernel = f"{name}: the kernel"
        if layout.fmt != "e4m3fn" or layout.arrangement not in (NATURAL, SWIZZLED):
            return f"{kernel} takes e4m3fn codes of a matrix, and these are {layout.fmt}, {layout.arrangement}"
        if size % LANES:
            return f"{kernel} quantizes activations in tiles of {LANES}, and the contraction axis is {size}"
        if size == 384:
            return f"{name}: at a contraction axis of exactly 384 the kernel groups activations and codes differently"
        if tile_segments(size, layout.scheme) != tile_segments(size, SwizzleScheme.WRAPX):
            return f"{kernel} groups activations as {SwizzleScheme.WRAPX.value}, and the codes are {layout.scheme}"
    if stack.down.shape[1] != stack.inner:
        return "down_proj holds more columns than the network has"
    return None

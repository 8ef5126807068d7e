"""A layer of experts with MX codes, all experts at once: the results of ``quantized.py`` without a value on the host.

The codes' values are exact in bf16, in which the weights of a layer are held for the call.

Legend: E experts, R rows, H hidden, I intermediate, T tokens, F free axis of a matrix, K its contraction axis.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_neuron_moe.backends.mx_weights import NATURAL, WORDS, MXExpertStack, MXMatrix
from hf_neuron_moe.backends.spec import Wants
from hf_neuron_moe.backends.torch.compute import FreshScratch, grouped_operands
from hf_neuron_moe.backends.torch.device_backward import DeviceBackward
from hf_neuron_moe.backends.torch.device_products import grouped_product
from hf_neuron_moe.backends.torch.experts import GroupedWeights, Rows, sum_over_experts
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
from hf_neuron_moe.backends.torch.gating import Gating, gating_of
from hf_neuron_moe.backends.torch.saved import put_tile
from hf_neuron_moe.backends.torch.tiles import Loader

DECODED = 1 << 25  # elements of a projection that are decoded at a time
_EVERY = slice(None)


def forward_at_once(x_TH: Tensor, rows: Rows, stack: MXExpertStack, save: Checkpoints) -> Tensor:
    """Return the sum of each token's rows without down biases, fp32 ``[T, H]``; save gate and up, either or none."""
    loader, gating, inner = _loader(x_TH), gating_of(stack.gate, True), stack.inner
    assert rows.on_device is not None
    assert rows.token_R is not None
    assert rows.scale_R is not None
    ends_E, scale_R1 = rows.on_device.ends_G, rows.scale_R[:, None]
    x_RH = _quantized(x_TH, stack, loader).index_select(0, rows.token_R)
    halves, weights = [], _gate_and_up(stack)
    for number, (weight_EIH, kept) in enumerate(zip(weights, (save.gate, save.up)[-len(weights) :], strict=True)):
        sums_RI = grouped_product(x_RH, weight_EIH, ends_E, torch.float32)
        if stack.gate_up_bias is not None:
            sums_RI.add_(rows.on_device.of_rows(stack.gate_up_bias.unflatten(1, (-1, inner))[:, number].float()))
        if number == 1 and gating.up_offset:
            sums_RI.add_(gating.up_offset)
        if kept is not None:
            put_tile(kept, _EVERY, slice(0, inner), sums_RI)
        halves.append(sums_RI)
    product_RI = gating.intermediate_(halves[0], halves[-1])
    afterwards = stack.down_layout.arrangement == WORDS
    if not afterwards:
        product_RI.mul_(scale_R1)
    down_EHI = _down(stack)
    operand_RI = x_TH.new_zeros((len(product_RI), down_EHI.shape[2]), dtype=torch.bfloat16)
    operand_RI[:, :inner].copy_(product_RI)
    loader.quantize(operand_RI, 1, stack.down_layout.scheme)
    out_RH = grouped_product(operand_RI, down_EHI, ends_E, torch.float32)
    if afterwards:
        out_RH.mul_(torch.where(rows.on_device.of_a_group_R[:, None], scale_R1, 0))
    return sum_over_experts(out_RH, rows)


def backward_at_once(
    dout_TH: Tensor,
    x_TH: Tensor,
    rows: Rows,
    stack: MXExpertStack,
    saved: Checkpoints,
    wants: Wants,
    gating: Gating,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the tokens ``[T, H]`` and of the rows' factors ``[R]``, fp32; there are no others.

    `x_TH` is empty where gate and up were saved; a missing one is made again.
    """
    d_scale_R = torch.zeros_like(rows.scale_R) if wants.routing and rows.scale_R is not None else None
    loader, inner = _loader(dout_TH), stack.inner
    *gate, up_EIH = _gate_and_up(stack)
    gate_EIH, both = (gate[0], None) if gate else (up_EIH[:, :0], up_EIH)
    gate_bias = up_bias = None
    if stack.gate_up_bias is not None:
        *rest, up_bias = stack.gate_up_bias.unflatten(1, (-1, inner)).unbind(1)
        gate_bias = rest[0] if rest else None
    weights = GroupedWeights(gate_EIH, up_EIH, _down(stack)[:, :, :inner], both, gate_bias, up_bias)
    x_TH = _quantized(x_TH, stack, loader) if len(x_TH) else x_TH
    backward = DeviceBackward(
        dout_TH, x_TH, rows, weights, loader, saved, None, d_scale_R, None, wants.input, gating=gating
    )
    return backward.run(), d_scale_R


def _loader(anchor: Tensor) -> Loader:
    return Loader(grouped_operands("bf16"), FreshScratch(anchor.device), on_device=True)


def _quantized(x_TH: Tensor, stack: MXExpertStack, loader: Loader) -> Tensor:
    """Return the tokens as products see them; they are quantized once, whatever experts they have."""
    return loader.quantize(x_TH.to(torch.bfloat16, copy=True), 1, stack.gate_up_layout.scheme)


def _gate_and_up(stack: MXExpertStack) -> tuple[Tensor, ...]:
    """Return the values of both projections, or of up alone, bf16 ``[E, I, H]`` each."""
    experts, inner, hidden, halves = len(stack.gate_up_codes), stack.inner, stack.hidden, stack.gate.halves
    both = stack.gate_up_codes.new_empty((halves, experts, inner, hidden), dtype=torch.bfloat16)
    for part in _parts(experts, halves * inner * hidden):
        matrix, count = _merged(stack.gate_up, part), len(range(experts)[part])
        values = both.new_empty((halves * count * inner, hidden), dtype=torch.float32)
        if stack.gate_up_layout.arrangement == WORDS:  # gate and up lie apart
            for half, half_FK in enumerate(values.chunk(halves)):
                rows = slice(half * count * inner, (half + 1) * count * inner)
                matrix.values(rows, slice(0, hidden), half_FK)
            both[:, part].copy_(values.view(halves, count, inner, hidden))
        else:
            matrix.values(slice(0, len(values)), slice(0, hidden), values)
            both[:, part].copy_(values.view(count, halves, inner, hidden).transpose(0, 1))
    return both.unbind(0)


def _down(stack: MXExpertStack) -> Tensor:
    """Return down's values, bf16 ``[E, H, K]``; columns from I on are zeros."""
    experts = len(stack.down_codes)
    hidden, width = stack.down.shape
    down = stack.down_codes.new_empty((experts, hidden, width), dtype=torch.bfloat16)
    for part in _parts(experts, hidden * width):
        values = down.new_empty((len(range(experts)[part]) * hidden, width), dtype=torch.float32)
        _merged(stack.down, part).values(slice(0, len(values)), slice(0, width), values)
        down[part].copy_(values.view(-1, hidden, width))
    return down


def _parts(experts: int, elements: int) -> list[slice]:
    step = max(DECODED // elements, 1)
    return [slice(first, min(first + step, experts)) for first in range(0, experts, step)]


def _merged(matrix: MXMatrix, part: slice) -> MXMatrix:
    """Return the matrices of some experts as one, their F axes joined."""
    codes, scales = matrix.codes[part], matrix.scales[part]
    if matrix.layout.arrangement == WORDS:
        return replace(matrix, codes=_joined(codes, -1), scales=_joined(scales, -1))
    free = 1 if matrix.layout.arrangement == NATURAL else 2
    return replace(matrix, codes=_joined(codes, free), scales=_joined(scales, 2))


def _joined(tensor_E: Tensor, axis: int) -> Tensor:
    """Return `tensor_E` with its first axis in front of `axis`, as one with it."""
    axis %= tensor_E.ndim
    return tensor_E.movedim(0, axis - 1).flatten(axis - 1, axis)

"""Weight layouts of Hugging Face and of the kernels, and the way between them.

Letters: E experts, H hidden, I intermediate (per tensor-parallel rank where sharded). The expert layouts:

============ ========= ================================================================================
name         gate_up   who
============ ========= ================================================================================
hf           [E,2I,H]  transformers 5 experts modules: gate rows first, then up rows; down [E,H,I]
stacked      [E,2,I,H] hf with its second axis split: index 0 gate, 1 up
kernel       [E,H,2,I] nki-library 2.29 ``moe_cte``: index 0 gate, 1 up; ``x @ W``; down [E,I,H]
interleaved  [E,H,2I]  gpt-oss: even columns gate, odd columns up; down [E,I,H], as the kernels' already
============ ========= ================================================================================

Functions return views wherever the strides allow it: always, unless they say otherwise. Gradients flow through them,
dtypes and values never change. Layouts are not guessed from shapes: [E,H,2I] and [E,2I,H] are alike when H == 2I.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import (
    check_axes,
    check_dtype,
    check_equal_shape,
    check_multiple,
    check_same_device,
    check_tensor,
    is_whole,
)
from hf_neuron_moe.errors import ShapeError, public

_HF, _STACKED, _KERNEL, _INTERLEAVED = ("E", "2I", "H"), ("E", "2", "I", "H"), ("E", "H", "2", "I"), ("E", "H", "2I")
_BIAS = ("E", "2", "I")


@public
def split_gate_up(gate_up_2IH: Tensor) -> tuple[Tensor, Tensor]:
    """Split a dense fused projection ``[2I, H]`` into gate ``[I, H]`` and up ``[I, H]``."""
    gate_IH, up_IH = _checked(gate_up_2IH, ("2I", "H"), "gate_up").chunk(2, dim=0)
    return gate_IH, up_IH


@public
def fuse_gate_up(gate_IH: Tensor, up_IH: Tensor) -> Tensor:
    """Copy gate ``[I, H]`` and up ``[I, H]`` of one dtype and device into one ``[2I, H]``, gate first."""
    check_axes(gate_IH, ("I", "H"), "gate")
    check_equal_shape(up_IH, tuple(gate_IH.shape), "up", "the shape of gate")
    check_dtype(up_IH, (gate_IH.dtype,), "up")
    check_same_device({"gate": gate_IH, "up": up_IH})
    return torch.cat([gate_IH, up_IH])


@public
def gate_up_hf_to_stacked(gate_up_hf: Tensor) -> Tensor:
    """View hf ``[E, 2I, H]`` as stacked ``[E, 2, I, H]``."""
    return _checked(gate_up_hf, _HF, "gate_up").unflatten(1, (2, -1))


@public
def gate_up_stacked_to_hf(gate_up_E2IH: Tensor) -> Tensor:
    """Merge stacked ``[E, 2, I, H]`` to hf ``[E, 2I, H]``: a copy unless the input is contiguous."""
    return _checked(gate_up_E2IH, _STACKED, "gate_up").flatten(1, 2)


def gate_up_hf_to_kernel(gate_up_hf: Tensor) -> Tensor:
    """View hf ``[E, 2I, H]`` as kernel ``[E, H, 2, I]``; call ``contiguous()`` to own it."""
    return gate_up_stacked_to_kernel(gate_up_hf_to_stacked(gate_up_hf))


def gate_up_kernel_to_hf(gate_up_EH2I: Tensor) -> Tensor:
    """Return kernel ``[E, H, 2, I]`` as hf ``[E, 2I, H]``: a copy unless :func:`gate_up_hf_to_kernel` made the view."""
    return gate_up_stacked_to_hf(gate_up_kernel_to_stacked(gate_up_EH2I))


@public
def gate_up_stacked_to_kernel(gate_up_E2IH: Tensor) -> Tensor:
    """View stacked ``[E, 2, I, H]`` as kernel ``[E, H, 2, I]``."""
    return _checked(gate_up_E2IH, _STACKED, "gate_up").permute(0, 3, 1, 2)


@public
def gate_up_kernel_to_stacked(gate_up_EH2I: Tensor) -> Tensor:
    """View kernel ``[E, H, 2, I]`` as stacked ``[E, 2, I, H]``."""
    return _checked(gate_up_EH2I, _KERNEL, "gate_up").permute(0, 2, 3, 1)


@public
def down_hf_to_kernel(down_EHI: Tensor) -> Tensor:
    """View hf ``[E, H, I]`` as kernel ``[E, I, H]``."""
    return _checked(down_EHI, ("E", "H", "I"), "down").transpose(1, 2)


@public
def down_kernel_to_hf(down_EIH: Tensor) -> Tensor:
    """View kernel ``[E, I, H]`` as hf ``[E, H, I]``."""
    return _checked(down_EIH, ("E", "I", "H"), "down").transpose(1, 2)


@public
def gate_up_interleaved_to_kernel(gate_up_interleaved: Tensor) -> Tensor:
    """View gpt-oss ``[E, H, 2I]`` (even columns gate, odd up) as kernel ``[E, H, 2, I]``."""
    return _checked(gate_up_interleaved, _INTERLEAVED, "gate_up").unflatten(2, (-1, 2)).transpose(2, 3)


@public
def gate_up_kernel_to_interleaved(gate_up_EH2I: Tensor) -> Tensor:
    """Return kernel ``[E, H, 2, I]`` as gpt-oss ``[E, H, 2I]``: a copy unless it is a view of the latter."""
    return _checked(gate_up_EH2I, _KERNEL, "gate_up").transpose(2, 3).flatten(2, 3)


@public
def bias_interleaved_to_kernel(bias_interleaved: Tensor) -> Tensor:
    """View the gpt-oss bias ``[E, 2I]`` as ``[E, 2, I]``; the kernels expect :func:`absorb_up_offset` of it."""
    return _checked(bias_interleaved, ("E", "2I"), "bias").unflatten(1, (-1, 2)).transpose(1, 2)


@public
def bias_kernel_to_interleaved(bias_E2I: Tensor) -> Tensor:
    """Return kernel bias ``[E, 2, I]`` as gpt-oss ``[E, 2I]``: a copy unless it is a view of the latter."""
    return _checked(bias_E2I, _BIAS, "bias").transpose(1, 2).flatten(1, 2)


@public
def slice_intermediate(tensor: Tensor, axis: int, rank: int, world_size: int) -> Tensor:
    """View one tensor-parallel rank's part of the I axis `axis`, which `world_size` divides; 0 <= rank < world_size.

    In kernel layouts the axis is 3 of gate_up, 2 of its bias and 1 of down; a fused axis 2I cannot be sliced. The down
    bias has no I axis: outputs of the ranks are summed, so one rank adds it, or each a share.
    """
    check_tensor(tensor, "tensor")
    whole = all(map(is_whole, (axis, rank, world_size)))
    if not whole or not -tensor.ndim <= axis < tensor.ndim or not 0 <= rank < world_size:
        expected = f"an axis of a {tensor.ndim}-D tensor and 0 <= rank < world_size"
        got = f"axis {axis}, rank {rank}, world_size {world_size}"
        fix = "Pass this rank's index in its tensor-parallel group."
        raise ShapeError.about("axis, rank and world_size", expected, got, fix)
    remedy = "Choose a tensor-parallel degree that divides I, or zero-pad I (padding does not change the output)."
    check_multiple(tensor.shape[axis], world_size, f"shape[{axis}]", remedy=remedy)
    width = tensor.shape[axis] // world_size
    return tensor.narrow(axis, rank * width, width)


@public
def absorb_up_offset(bias_E2I: Tensor, offset: float = 1.0) -> Tensor:
    """Add gpt-oss's ``up + 1`` to the up half of a kernel bias ``[E, 2, I]``, since the kernels add nothing themselves.

    Shift the up clamp limits with :func:`absorb_up_limits` too. The bias gradient needs no correction. Returns an fp32
    copy: bf16 loses the low bits of small biases, so round it only for a kernel, and save the original.
    """
    bias = _checked(bias_E2I, _BIAS, "bias").to(torch.float32)
    return bias + bias.new_tensor([[0.0], [offset]])


def release_up_offset(bias_E2I: Tensor, offset: float = 1.0) -> Tensor:
    """Invert :func:`absorb_up_offset` up to fp32 rounding of ``up + offset`` (2**-24 for offset 1 and |up| < 1)."""
    return absorb_up_offset(bias_E2I, -offset)


def absorb_up_limits(
    lower: float | None, upper: float | None, offset: float = 1.0
) -> tuple[float | None, float | None]:
    """Shift the up clamp limits, None for no limit, as :func:`absorb_up_offset` does: gpt-oss's (-7, 7) to (-6, 8)."""
    return (None if lower is None else lower + offset, None if upper is None else upper + offset)


def release_up_limits(
    lower: float | None, upper: float | None, offset: float = 1.0
) -> tuple[float | None, float | None]:
    """Invert :func:`absorb_up_limits`."""
    return absorb_up_limits(lower, upper, -offset)


def _checked(tensor: Tensor, names: tuple[str, ...], argument: str) -> Tensor:
    """Return a tensor whose axes fit: one named 2I holds two halves, one named 2 exactly (gate, up)."""
    check_axes(tensor, names, argument)
    for axis, name in enumerate(names):
        if name == "2I":
            remedy = "The axis holds gate and up halves of equal size."
            check_multiple(tensor.shape[axis], 2, f"{argument}.shape[{axis}]", remedy=remedy)
        if name == "2" and tensor.shape[axis] != 2:
            expected, fix = f"2 (gate and up) in layout [{', '.join(names)}]", "Check which layout the tensor is in."
            raise ShapeError.about(f"{argument}.shape[{axis}]", expected, list(tensor.shape), fix)
    return tensor

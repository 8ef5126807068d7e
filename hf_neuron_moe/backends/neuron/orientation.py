"""Weights and rows in the kernels' orientations and sizes, and gradients back out of them.

An orientation is a string of axes: E experts, H hidden, 2 gate and up, I intermediate; "I2" where gate and up
alternate. Padding is with zeros, which changes no result. A padded column of H meets a zero in the weight, and what a
padded row of I makes meets a zero in down.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.prepared import is_traced


def pad_axes(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Zero-pad every axis of `tensor` at its end to `sizes`; the tensor itself where nothing is missing."""
    missing = [size - have for size, have in zip(sizes, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [side for lack in reversed(missing) for side in (0, lack)])


def split_axes(transposed: bool, interleaved: bool = False, gated: bool = True) -> tuple[str, str]:
    """Return the axes of the experts' ``gate_up`` and ``down``; stored tensors have 2 and I as one axis."""
    joint = ("I2" if interleaved else "2I") if gated else "I"
    return (f"EH{joint}", "EIH") if transposed else (f"E{joint}H", "EHI")


def kernel_weight(
    *parts: Tensor, axes: str, wanted: str, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return a weight in `dtype`, contiguous, padded to the kernel's H and I, with its `axes` in the `wanted` order.

    That is the weight itself, or a view of it, where it is so already. Where gate and up are wanted as an axis 2 that
    `axes` lack, `parts` are both of them, or up alone, before which the gate is zero. A missing axis E has one entry.
    """
    if "2" in wanted and "2" not in axes:
        apart, axes = torch.stack(parts if len(parts) == 2 else (torch.zeros_like(parts[0]), parts[0])), f"2{axes}"
    else:
        apart = parts[0].unflatten(*_joint(axes)) if "2" in axes else parts[0]
    if "E" in wanted and "E" not in axes:
        apart, axes = apart[None], f"E{axes}"
    turned = apart.permute([axes.index(axis) for axis in wanted])
    full = {"H": hidden, "I": inner}
    sizes = tuple(full.get(axis, size) for axis, size in zip(wanted, turned.shape, strict=True))
    return pad_axes(turned.to(dtype), sizes).contiguous()


def _joint(axes: str) -> tuple[int, tuple[int, int]]:
    """Return where a stored tensor has 2 and I as one axis, and the sizes of both."""
    first = min(axes.index("2"), axes.index("I"))
    return first, ((2, -1) if axes[first] == "2" else (-1, 2))


def stock_gradient(gradient: Tensor, axes: str, wanted: str, hidden: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Invert :func:`kernel_weight` for a gradient of one tensor: contiguous, with H, I, axes and dtype of a parameter.

    Without an axis 2 in `wanted` it is up's; without an axis E it is the only expert's.
    """
    own = {"H": hidden, "I": inner}
    cut = gradient[tuple(slice(0, own[axis]) if axis in own else slice(None) for axis in axes)]
    one_of_two = "2" in axes and "2" not in wanted
    for axis in set(axes).difference(wanted):
        cut, axes = cut.select(axes.index(axis), -1), axes.replace(axis, "")
    turned = cut.permute([axes.index(axis) for axis in wanted])
    # Results of an operator must not share memory, as both halves of one gradient would.
    turned = turned.to(dtype, copy=one_of_two, memory_format=torch.contiguous_format).contiguous()
    return turned.flatten(_joint(wanted)[0], _joint(wanted)[0] + 1) if "2" in wanted else turned


def fuse_gate_up(gate_IH: Tensor, up_IH: Tensor) -> Tensor:
    """Return ``[2I, H]``, gate first: a view of halves of one tensor, else (and while a program is traced) a copy."""
    if is_traced(gate_IH) or is_traced(up_IH):
        return torch.cat([gate_IH, up_IH])
    first, second = gate_IH.untyped_storage()._cdata, up_IH.untyped_storage()._cdata
    follows = up_IH.storage_offset() == gate_IH.storage_offset() + gate_IH.numel()
    if first == second and follows and gate_IH.is_contiguous() and up_IH.is_contiguous():
        rows, columns = gate_IH.shape
        return gate_IH.as_strided((2 * rows, columns), (columns, 1))
    return torch.cat([gate_IH, up_IH])


def fused_for_kernel(gate_IH: Tensor, up_IH: Tensor, hidden: int, inner: int) -> Tensor:
    """Return gate and up as one bf16 ``[2I, H]``, each half padded."""
    sizes = (inner, hidden)
    if tuple(gate_IH.shape) == sizes and gate_IH.dtype == up_IH.dtype == torch.bfloat16:
        return fuse_gate_up(gate_IH, up_IH)
    return torch.cat([pad_axes(half.to(torch.bfloat16), sizes) for half in (gate_IH, up_IH)])

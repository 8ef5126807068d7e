"""Weights and rows in the kernels' orientations and sizes, and gradients back out of them.

An orientation is a string of axes: E experts, H hidden, 2 gate and up, I intermediate. Padding is with zeros, which
changes no result: a padded column of H meets a zero in the weight, a padded row of I makes silu(0) * 0.
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


def split_axes(transposed: bool) -> tuple[str, str]:
    """Return the axes of the experts' ``gate_up`` and ``down``; stored tensors have 2 and I as one axis ``2I``."""
    return ("EH2I", "EIH") if transposed else ("E2IH", "EHI")


def kernel_weight(weight: Tensor, axes: str, wanted: str, hidden: int, inner: int) -> Tensor:
    """Return a weight in bf16, contiguous, padded to the kernel's H and I, with its `axes` in the `wanted` order.

    That is `weight` itself, or a view of it, where it is so already.
    """
    apart = weight.unflatten(axes.index("2"), (2, -1)) if "2" in axes else weight
    turned = apart.permute([axes.index(axis) for axis in wanted])
    full = {"H": hidden, "I": inner}
    sizes = tuple(full.get(axis, size) for axis, size in zip(wanted, turned.shape, strict=True))
    return pad_axes(turned.to(torch.bfloat16), sizes).contiguous()


def stock_gradient(gradient: Tensor, axes: str, wanted: str, hidden: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Invert :func:`kernel_weight` for a gradient: contiguous, with H, I, axes and dtype of a parameter."""
    own = {"H": hidden, "I": inner}
    cut = gradient[tuple(slice(0, own[axis]) if axis in own else slice(None) for axis in axes)]
    turned = cut.permute([axes.index(axis) for axis in wanted]).to(dtype).contiguous()
    return turned.flatten(wanted.index("2"), wanted.index("2") + 1) if "2" in wanted else turned


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

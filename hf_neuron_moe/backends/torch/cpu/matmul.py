"""Matrix products ``out (+)= left @ right`` by the library of torch's that is fastest on this processor.

torch gives fp32 products to MKL, which uses at most AVX2 on processors that are not Intel's. oneDNN, also a part of
torch, was faster on an AMD processor with AVX2 and about twice as fast with AVX-512 (``benchmarks/products.py``). There
it gets the products that are large enough. Processor, shapes and strides decide, never a measurement: an fp32 sum's
last bits depend on the library, and a resumed run must have those of the run that it continues.

oneDNN is reached by the operator that ``torch.compile`` uses for linear layers, which torch does not document.
``torch.backends.mkldnn.enabled = False`` leaves everything to torch's default. oneDNN generates code for every shape,
and it and torch keep that of the last 1024, half a MiB each, while routing makes other numbers of rows in every step.
So buffers have a multiple of 16 rows (:func:`padded_rows`), which oneDNN multiplies whole, MKL only the real ones.

Legend: M, K, N as in ``[M, K] @ [K, N]``; R tokens.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TOKENS = 16  # oneDNN multiplies whole multiples of so many tokens

FEW_TOKENS = 32  # most rows of `linear_of_few`; they are not padded: each number of them is a shape of its own
SMALL_WEIGHT = 1 << 17  # elements below which a weight is read so fast that calls take most of the time
LARGE_WEIGHT = 1 << 19  # elements from which reading a weight still is most of the time at 5 rows and more


@dataclass(frozen=True)
class OneDNNRule:
    """Which fp32 products oneDNN takes, by their shapes and the order of `left`, whatever the weights' order is.

    oneDNN's sums do not depend on that order; MKL's do for few rows or columns.
    """

    size: int  # least M * K * N. Generating code takes about half a millisecond.
    rows: int  # least M, so that bringing a `right` with gaps together, which oneDNN asks for, costs little
    columns: int  # least N for which a `left` that is not contiguous is worth copying, for the same reason
    every_shape: bool
    """False leaves out shapes for which a `right` that lies row by row may be slow. With AVX2 they have 0.6 to 1.1 of
    MKL's speed where K is large and N no power of two."""

    def takes(self, rows: int, inner: int, columns: int, *, straight: bool = True) -> bool:
        """Whether oneDNN gets ``[rows, inner] @ [inner, columns]``.

        Tokens are counted without padding, which two ways of computing the same may do differently. `straight` is a
        left operand that lies row by row, without gaps.
        """
        if rows < self.rows or rows * inner * columns < self.size or (columns < self.columns and not straight):
            return False
        return self.every_shape or inner <= 640 or (columns >= 512 and columns.bit_count() == 1)


_RULES = {
    "AVX2": OneDNNRule(1 << 28, 128, 1024, every_shape=False),
    "AVX512": OneDNNRule(1 << 25, 64, 256, every_shape=True),
}


@functools.cache
def onednn_rule() -> OneDNNRule | None:
    """Return this processor's rule, or None where torch's own choice stays."""
    built = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    if not built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    return _RULES.get(torch.backends.cpu.get_cpu_capability()) if "AuthenticAMD" in _processor() else None


@functools.cache
def tanh_is_fast() -> bool:
    """Whether torch's tanh takes less than a sigmoid: Intel's library computes it, fast on Intel's processors only."""
    return torch.backends.mkl.is_available() and "GenuineIntel" in _processor()


def _processor() -> str:
    """Return a text with the name of the processor's maker."""
    cpuinfo = Path("/proc/cpuinfo")  # elsewhere, Windows has the name in platform.processor()
    return cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else platform.processor()


def padded_rows(rows: int, weight: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows a buffer of that many tokens should have; `weight` is K * N of the largest products.

    It is a multiple of :data:`TOKENS` where products may go to oneDNN.
    """
    rule = _rule_for(dtype, device)
    if rule is None or rows < rule.rows or rows * weight < rule.size:
        return rows
    return -(-rows // TOKENS) * TOKENS


def matmul(left: Tensor, right: Tensor, out: Tensor, rows: int) -> Tensor:
    """Return ``left @ right`` in `out`, or in memory of the library's own, which saves a copy.

    Operands are ``[M, K]`` and ``[K, N]`` of one dtype, `out` is dense ``[M, N]``; rows after `rows` may hold anything.
    """
    if _goes_to_onednn(left, right, rows):
        return _by_onednn(left, right)
    _by_torch(out[:rows], left[:rows], right, accumulate=False)
    return out


def matmul_into(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """``out (+)= left @ right``; rows of `left` beyond those of `out` are left out.

    `out` is ``[M, N]``, fp32 or of the operands' dtype, and may be a slice with unit column stride.
    """
    rows = len(out)
    if _goes_to_onednn(left, right, rows):
        _put(out, _by_onednn(left, right)[:rows], accumulate=accumulate)
    else:
        _by_torch(out, left[:rows], right, accumulate=accumulate)


def matmul_over_rows_into(out: Tensor, left: Tensor, right: Tensor, rows: int, *, accumulate: bool) -> None:
    """``out (+)= left[:rows].T @ right[:rows]``, the sum over tokens that makes a weight's gradient.

    `out` is as in :func:`matmul_into`, or its transpose is. `left` ``[R, M]`` and `right` ``[R, N]`` are zero after
    `rows`.
    """
    (held, size), columns = left.shape, right.shape[1]
    rule = _rule_for(left.dtype, left.device)
    if held % TOKENS or rule is None or not rule.takes(size, rows, columns, straight=False):
        _by_torch(out, left[:rows].t(), right[:rows], accumulate=accumulate)
    elif out.stride(0) < out.stride(1):  # oneDNN's product lies row by row; to turn it takes as long as to make it
        _put(out.t(), _by_onednn(right.t(), left), accumulate=accumulate)
    else:
        _put(out, _by_onednn(left.t(), right), accumulate=accumulate)


def linear_into(out_RF: Tensor, x_RK: Tensor, weight_FK: Tensor) -> None:
    """``out = x W^T`` of operands that were just made in fp32 and still lie in the caches.

    oneDNN takes any number of rows here, of which the caller has few different ones. torch's own products change the
    number of their threads with the shape, for which the others of the process wait, at times for longer than the
    product takes. All are fp32; rows of `x_RK` beyond those of `out_RF` are left out; `weight_FK` lies row by row or
    column by column.
    """
    if weight_FK.numel() >= SMALL_WEIGHT and _rule_for(weight_FK.dtype, weight_FK.device) is not None:
        out_RF.copy_(_by_onednn(x_RK, weight_FK.t())[: len(out_RF)])
    else:
        torch.mm(x_RK[: len(out_RF)], weight_FK.t(), out=out_RF)


def linear_of_few(x_RK: Tensor, weight_FK: Tensor) -> Tensor | None:
    """Return ``x W^T`` of a few fp32 rows, in any order of memory, by what is faster than torch's choice; else None.

    Where reading the weight is most of the time, oneDNN reads it faster than MKL's products with a vector. MKL's
    product with the weight on the left is faster than with it on the right (2 to 4 columns).
    """
    rows, size = len(x_RK), weight_FK.numel()
    if rows > FEW_TOKENS or size < SMALL_WEIGHT or not weight_FK.is_contiguous():
        return None
    if _rule_for(weight_FK.dtype, weight_FK.device) is None:
        return None
    if 2 <= rows <= 4 and weight_FK.shape[1] <= 2048:
        return torch.mm(weight_FK, x_RK.t()).t()
    if rows == 1 or size >= LARGE_WEIGHT:
        return _by_onednn(x_RK.contiguous(), weight_FK.t())
    return None


def _put(out: Tensor, product: Tensor, *, accumulate: bool) -> None:
    out.add_(product) if accumulate else out.copy_(product)


def _by_torch(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    if out.dtype != left.dtype:
        _put(out, torch.mm(left, right), accumulate=accumulate)
    elif accumulate:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def uses_onednn(device: torch.device) -> bool:
    """Whether oneDNN gets fp32 products on `device` at all."""
    return device.type == "cpu" and bool(torch.backends.mkldnn.enabled) and onednn_rule() is not None


def _rule_for(dtype: torch.dtype, device: torch.device) -> OneDNNRule | None:
    return onednn_rule() if dtype == torch.float32 and uses_onednn(device) else None


def _goes_to_onednn(left: Tensor, right: Tensor, rows: int) -> bool:
    rule = _rule_for(left.dtype, left.device)
    if rule is None or left.shape[0] % TOKENS:
        return False
    return rule.takes(rows, *right.shape, straight=left.is_contiguous())


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    weight = right.t()
    if not (weight.is_contiguous() or right.is_contiguous()):
        weight = weight.contiguous() if weight.stride(1) == 1 else right.contiguous().t()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")
    return product

"""Matrix products ``out (+)= left @ right`` by the library of torch's that is fastest on this processor.

torch gives fp32 products to MKL, whose code for processors that are not Intel's ends at AVX2. oneDNN, which torch
carries too, generates its code for what the processor has: on an AMD processor it was faster with AVX2 and about twice
as fast with AVX-512 (``benchmarks/products.py``). There it gets the products that are large enough.

The choice depends on the processor and on the operands' shapes and strides, never on a measurement: an fp32 sum's last
bits depend on the library, and a resumed run must find those of the run it goes on with. oneDNN is reached by the
operator that ``torch.compile`` uses for linear layers. It is not in torch's documentation, so it is looked for first;
``torch.backends.mkldnn.enabled = False`` leaves everything to torch's default.

oneDNN generates code for every shape, and it and torch keep that of the last 1024, half a MiB each. Routing makes other
numbers of rows in every step; so oneDNN gets the rows up to a multiple of 64, and torch.mm the rest.

Legend: M, K, N as in ``[M, K] @ [K, N]``.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TOKENS = 64
"""oneDNN multiplies whole multiples of so many tokens."""


@dataclass(frozen=True)
class OneDNNRule:
    """Which fp32 products oneDNN takes, by their shapes and the order of `left`.

    The order of the weights in memory does not matter here, so that it does not decide who multiplies. oneDNN's sums do
    not depend on it either; MKL's do for few rows or columns.

    Attributes:
        size: least M * K * N. Generating code takes about half a millisecond.
        rows: least M, so that bringing a `right` with gaps together, which oneDNN asks for, costs little.
        columns: least N for which a `left` that is not contiguous is worth copying, for the same reason.
        every_shape: False leaves out shapes for which a `right` that lies row by row may be slow: with AVX2 between 0.6
            and 1.1 of MKL's speed where K is large and N no power of two.
    """

    size: int
    rows: int
    columns: int
    every_shape: bool

    def takes(self, left: Tensor, columns: int) -> bool:
        """Whether oneDNN gets the product of `left`, cut already, and a right operand of that many columns."""
        rows, inner = left.shape
        if rows < self.rows or rows * inner * columns < self.size:
            return False
        if columns < self.columns and not left.is_contiguous():
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
    if not built or not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not _is_amd():
        return None
    return _RULES.get(torch.backends.cpu.get_cpu_capability())


def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        return "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace")
    return "AuthenticAMD" in platform.processor()  # Windows tells it there


def matmul_into(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """``out (+)= left @ right``.

    Args:
        out: ``[M, N]``, fp32 or the operands' dtype; may be a slice with unit column stride.
        left: ``[M, K]``.
        right: ``[K, N]`` of the same dtype.
        accumulate: add to `out` instead of overwriting it.
    """
    rows, inner = _cut(left)
    by_onednn = _by_onednn(left[:rows, :inner], right[:inner])
    if by_onednn is None:
        _by_torch(out, left, right, accumulate=accumulate)
        return
    if accumulate:
        out[:rows].add_(by_onednn)
    else:
        out[:rows].copy_(by_onednn)
    if inner < left.shape[1]:
        _by_torch(out, left[:, inner:], right[inner:], accumulate=True)
    if rows < left.shape[0]:
        _by_torch(out[rows:], left[rows:], right, accumulate=accumulate)


def _cut(left: Tensor) -> tuple[int, int]:
    """How many rows and columns of `left` may go to oneDNN: whole multiples where tokens are counted.

    Tokens are the rows of a `left` that lies row by row, and the columns of a transposed one (of a weight gradient).
    """
    rows, inner = left.shape
    if left.stride(1) == 1:
        return rows // TOKENS * TOKENS, inner
    return rows, inner // TOKENS * TOKENS


def _by_torch(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    if out.dtype != left.dtype:
        product = torch.mm(left, right)
        out.add_(product) if accumulate else out.copy_(product)
    elif accumulate:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def _by_onednn(left: Tensor, right: Tensor) -> Tensor | None:
    if left.dtype != torch.float32 or left.device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return None
    rule = onednn_rule()
    if rule is None or not rule.takes(left, right.shape[1]):
        return None
    weight = right.t()
    if not (weight.is_contiguous() or right.is_contiguous()):
        weight = weight.contiguous() if weight.stride(1) == 1 else right.contiguous().t()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")
    return product

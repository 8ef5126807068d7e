"""Matrix products ``out (+)= left @ right`` by the library of torch's that is fastest on this processor.

torch gives fp32 products to MKL, whose code for processors that are not Intel's ends at AVX2. oneDNN, which torch
carries too, generates its code for what the processor has: on AMD processors it is faster with AVX2 and more than twice
as fast with AVX-512 (``benchmarks/products.py``). There it gets the products that are large enough.

The choice depends on the processor and on the operands' shapes and strides, never on a measurement: an fp32 sum's last
bits depend on the library, and a resumed run must find those of the run it goes on with. oneDNN is reached by the
operator that ``torch.compile`` uses for linear layers. It is not in torch's documentation, so it is looked for first;
``torch.backends.mkldnn.enabled = False`` leaves everything to torch's default.

oneDNN and torch each keep the code of the last 1024 shapes, about half a MiB per shape, and small pieces of it lie
between large tensors in memory. A routing that gives every step other numbers of rows fills both: four experts of
H=256, I=768 grew by 0.9 GiB over 200 numbers of rows and 1.2 GiB over 560, or 0.1 GiB (over 530) with both
``ONEDNN_PRIMITIVE_CACHE_CAPACITY`` and ``LRU_CACHE_CAPACITY`` at 64; one of them alone does not help.

Legend: M, K, N as in ``[M, K] @ [K, N]``.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class OneDNNRule:
    """Which fp32 products oneDNN takes, by their shapes and the order of `left`.

    The order of the weights in memory must not matter: models patched with either home of the weights shall have the
    same sums. For products of such sizes neither library's depend on it; MKL's do for few rows or columns.

    Attributes:
        size: least M * K * N. Code is generated for every new shape, about half a millisecond each.
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
        """Whether oneDNN gets the product of `left` and a right operand of that many columns."""
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
    by_onednn = _by_onednn(left, right)
    if out.dtype == left.dtype and by_onednn is None:
        if accumulate:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)
        return
    product = torch.mm(left, right) if by_onednn is None else by_onednn
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


def matmul(left: Tensor, right: Tensor, buffer: Tensor) -> Tensor:
    """Return ``left @ right``, in `buffer` (``[M, N]``, the operands' dtype) or in memory of its own."""
    product = _by_onednn(left, right)
    return torch.mm(left, right, out=buffer) if product is None else product


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

"""Matrix products ``out (+)= left @ right`` by the library of torch's that is fastest on this processor.

torch gives fp32 products to MKL, whose code for processors that are not Intel's ends at AVX2. oneDNN, which torch
carries too, generates its code for what the processor has: on an AMD processor it was faster with AVX2 and about twice
as fast with AVX-512 (``benchmarks/products.py``). There it gets the products that are large enough.

The choice depends on the processor and on the operands' shapes and strides, never on a measurement: an fp32 sum's last
bits depend on the library, and a resumed run must find those of the run it goes on with. oneDNN is reached by the
operator that ``torch.compile`` uses for linear layers. It is not in torch's documentation, so it is looked for first;
``torch.backends.mkldnn.enabled = False`` leaves everything to torch's default.

oneDNN generates code for every shape, and it and torch keep that of the last 1024, half a MiB each. Routing makes other
numbers of rows in every step. So operands are held in buffers of a multiple of 16 rows (:func:`padded_rows`), which
oneDNN multiplies whole; MKL multiplies the real rows only.

Legend: M, K, N as in ``[M, K] @ [K, N]``; R tokens.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TOKENS = 16
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
        """Whether oneDNN gets the product of `left`, as it is, and a right operand of that many columns."""
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


def padded_rows(rows: int, weight: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows a buffer of that many tokens should have for its products to go to oneDNN.

    Args:
        rows: number of tokens.
        weight: K * N of the largest products with them.
        dtype: the products' operands'.
        device: where they are.

    Returns:
        The next multiple of :data:`TOKENS`, or `rows` where oneDNN would not multiply them anyway.
    """
    rule = _rule_for(dtype, device)
    if rule is None or rows < rule.rows or rows * weight < rule.size:
        return rows
    return -(-rows // TOKENS) * TOKENS


def matmul(left: Tensor, right: Tensor, out: Tensor, rows: int) -> Tensor:
    """Return ``left @ right`` in `out`, or in memory of the library's own, which saves a copy.

    Args:
        left: ``[M, K]``.
        right: ``[K, N]`` of the same dtype.
        out: ``[M, N]`` of the same dtype, dense.
        rows: how many rows are wanted.

    Returns:
        Dense ``[M, N]``; the rows after `rows` may hold anything.
    """
    if left.shape[0] % TOKENS == 0 and _goes_to_onednn(left, right):
        return _by_onednn(left, right)
    _by_torch(out[:rows], left[:rows], right, accumulate=False)
    return out


def matmul_into(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    """``out (+)= left @ right``.

    Args:
        out: ``[M, N]``, fp32 or the operands' dtype; may be a slice with unit column stride.
        left: ``[M, K]``, or more rows (:func:`padded_rows`) with any values, which are left out.
        right: ``[K, N]`` of the same dtype.
        accumulate: add to `out` instead of overwriting it.
    """
    rows = len(out)
    if left.shape[0] % TOKENS == 0 and _goes_to_onednn(left, right):
        _put(out, _by_onednn(left, right)[:rows], accumulate=accumulate)
    else:
        _by_torch(out, left[:rows], right, accumulate=accumulate)


def matmul_over_rows_into(out: Tensor, left: Tensor, right: Tensor, rows: int, *, accumulate: bool) -> None:
    """``out (+)= left[:rows].T @ right[:rows]``, the sum over tokens that makes a weight's gradient.

    Args:
        out: ``[M, N]``, as in :func:`matmul_into`.
        left: ``[R, M]``, R at least `rows`; zero after these.
        right: ``[R, N]`` of the same dtype, zero after `rows` too.
        rows: number of tokens.
        accumulate: add to `out` instead of overwriting it.
    """
    if left.shape[0] % TOKENS == 0 and _goes_to_onednn(left.t(), right):
        _put(out, _by_onednn(left.t(), right), accumulate=accumulate)
    else:
        _by_torch(out, left[:rows].t(), right[:rows], accumulate=accumulate)


def _put(out: Tensor, product: Tensor, *, accumulate: bool) -> None:
    out.add_(product) if accumulate else out.copy_(product)


def _by_torch(out: Tensor, left: Tensor, right: Tensor, *, accumulate: bool) -> None:
    if out.dtype != left.dtype:
        _put(out, torch.mm(left, right), accumulate=accumulate)
    elif accumulate:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def _rule_for(dtype: torch.dtype, device: torch.device) -> OneDNNRule | None:
    if dtype != torch.float32 or device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return None
    return onednn_rule()


def _goes_to_onednn(left: Tensor, right: Tensor) -> bool:
    rule = _rule_for(left.dtype, left.device)
    return rule is not None and rule.takes(left, right.shape[1])


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    weight = right.t()
    if not (weight.is_contiguous() or right.is_contiguous()):
        weight = weight.contiguous() if weight.stride(1) == 1 else right.contiguous().t()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")
    return product

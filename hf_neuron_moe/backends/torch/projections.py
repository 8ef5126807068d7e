"""The products that make gate and up: the same for the forward and for a backward that makes them again.

Legend: R rows, H hidden, I intermediate.

A matrix product's fp32 sums depend on how it is cut and how its operands lie in memory. Whoever multiplies again what a
forward did not keep therefore comes here, and gets the same bits.
"""

from __future__ import annotations

from torch import Tensor

from hf_neuron_moe.backends.torch.products import matmul, matmul_into
from hf_neuron_moe.backends.torch.tiling import Loader, Span
from hf_neuron_moe.formats.padding import padded_size


def first_columns(span: Span, columns: int | None) -> int:
    """How many columns of `span` are among the first `columns` of the whole axis; all of them for None."""
    return span.length if columns is None else min(max(columns - span.start, 0), span.length)


class Projections:
    """Gate and up of one span of the intermediate axis as matmul operands.

    Up is multiplied in two parts where `up_cut` lies within the span: those columns of it that ``"minimal"`` keeps, and
    the rest. Every policy cuts there, so that all have the same sums.

    Args:
        gate_IH: the whole gate projection, or None if no product with it is wanted.
        up_IH: the whole up projection.
        loader: the forward's loader, or one that forms the same operands.
        span: the columns.
        up_cut: number of columns of the whole up that are multiplied first; None for one product per span.
        up_from: first column of the span that is wanted of up: 0, the place of the cut, or the span's length.
    """

    def __init__(
        self,
        gate_IH: Tensor | None,
        up_IH: Tensor,
        loader: Loader,
        span: Span,
        up_cut: int | None = None,
        up_from: int = 0,
    ) -> None:
        hidden = up_IH.shape[1]
        self.width = padded_size(hidden) if loader.compute.mx else hidden
        self.gate_IH: Tensor | None = None
        if gate_IH is not None:
            part = slice(span.start, span.stop)
            self.gate_IH = loader.load("gate", gate_IH[part], (span.size, self.width), mx_axis=1)[: span.length]
        self.up_parts: list[tuple[int, int, Tensor]] = []
        cut = first_columns(span, up_cut)
        for name, begin, end in (("up", 0, cut), ("up_tail", cut, span.length)):
            if begin < end and begin >= up_from:
                rows = end - begin
                if loader.compute.mx:
                    rows = span.size if rows == span.length else padded_size(rows)
                source = up_IH[span.start + begin : span.start + end]
                operand_IH = loader.load(name, source, (rows, self.width), mx_axis=1)[: end - begin]
                self.up_parts.append((begin, end, operand_IH))

    def operand(self, x_RH: Tensor, rows: Span, loader: Loader) -> Tensor:
        """Return `x_RH`, the rows of `rows`, as the left operand of both products: ``[rows.size, H]``, zero padded."""
        return loader.load("x", x_RH, (rows.size, self.width), mx_axis=1)

    def gate(self, x_RH: Tensor, out_RI: Tensor, rows: int) -> Tensor:
        """Return the gate's sums, as :func:`~hf_neuron_moe.backends.torch.products.matmul` does with `out_RI`."""
        assert self.gate_IH is not None
        return matmul(x_RH, self.gate_IH.t(), out_RI, rows)

    def up_into(self, out_RI: Tensor, x_RH: Tensor) -> None:
        """Write the wanted columns of up into their places in `out_RI`, as wide as the span."""
        for begin, end, operand_IH in self.up_parts:
            matmul_into(out_RI[:, begin:end], x_RH, operand_IH.t(), accumulate=False)

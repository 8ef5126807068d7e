"""Which part of a fused weight a tensor-parallel rank holds, and which zeros are added to it.

Gate and up are split by output rows, down by columns: every rank computes a whole SwiGLU block of I/ranks intermediate
values, and the outputs are summed. Zeros at the end of H or I change no result (:mod:`hf_neuron_moe.formats.padding`).

H hidden, I intermediate of the model, F and K rows and columns of a matrix: gate_up [2I, H], down [H, I].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_neuron_moe.convert.io.encoded import mx_kind
from hf_neuron_moe.convert.io.source import Encoding
from hf_neuron_moe.convert.manifest import Piece
from hf_neuron_moe.errors import ConversionError

PadRule = Callable[[str, int], int]  # Gives the size that an axis, ``"H"`` or ``"I"``, of some size is padded to


@dataclass(frozen=True)
class FusedWeight:
    """One weight to convert."""

    name: str  # Its name in the converted checkpoint
    shape: tuple[int, ...]  # ``[F, K]`` or ``[E, F, K]``
    pieces: tuple[Piece, ...]  # The source tensors that fill it; all of one dtype
    codes: str = ""
    """``"mxfp8"`` or ``"mxfp4"`` where this and the block's other weight are such codes in the source, with a power of
    two for each 32 adjacent values of the contraction axis."""

    @property
    def halves(self) -> int:
        """How often its rows go through the I axis: twice for gate and up, once for up alone, never for down."""
        return halves_in(self.name)

    @property
    def has_experts(self) -> bool:
        """Whether it has the experts' axis."""
        return len(self.shape) == 3

    @property
    def hidden(self) -> int:
        """H."""
        return self.shape[-1] if self.halves else self.shape[-2]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.shape[-2] // self.halves if self.halves else self.shape[-1]


def is_gate_up(name: str) -> bool:
    """Whether a fused weight's name is that of gate and up: conversions name them themselves."""
    return halves_in(name) == 2


def halves_in(name: str) -> int:
    """Do what :attr:`FusedWeight.halves` does for a weight of this name."""
    return {"gate_up_proj": 2, "up_proj": 1}.get(name.removesuffix(".weight").rpartition(".")[2], 0)


def experts_in(pieces: Sequence[Piece]) -> int | None:
    """Number of experts whose weight these pieces fill; None for a weight without them."""
    if pieces[0].holds_experts:
        return pieces[0].experts
    return None if pieces[0].expert is None else 1 + max(piece.expert or 0 for piece in pieces)


def codes_kept(pieces: Sequence[Piece], encodings: Mapping[str, Encoding]) -> str:
    """The precision whose words can hold the codes of all these pieces, whose rows lie along the contraction axis."""

    def kind(piece: Piece) -> str:
        encoding = encodings.get(piece.source)
        along = encoding is not None and encoding.transposed is piece.transposed and not piece.stacked
        return mx_kind(encoding) if encoding is not None and along else ""

    kinds = {kind(piece) for piece in pieces}
    return kinds.pop() if len(kinds) == 1 else ""


class Block(NamedTuple):
    """Where values of a source piece go: rows and columns in the piece, and the first's row in the matrix, column 0."""

    rows: slice
    columns: slice
    row: int


@dataclass(frozen=True)
class Part:
    """The matrix of one rank: a range of the I axis, zeros behind it up to `width`, and zeros behind H."""

    halves: int  # How often rows go through the I axis: 2 (gate, up), 1 (up alone), 0 where it is that of columns
    hidden: int  # H of the model
    padded_hidden: int  # Rows or columns of the matrix for it
    intermediate: int  # I of the model
    start: int  # First intermediate value of this rank
    stop: int  # One past its last
    width: int  # Intermediate values of the matrix, zeros included
    rank: int | None = None  # None where nothing is split

    @property
    def gate_up(self) -> bool:
        """Whether the I axis is that of rows."""
        return self.halves > 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return (self.halves * self.width, self.padded_hidden) if self.halves else (self.padded_hidden, self.width)

    @property
    def padding(self) -> dict[str, int]:
        """Zeros at the end of each axis, by its letter."""
        zeros = {"H": self.padded_hidden - self.hidden, "I": self.width - (self.stop - self.start)}
        return {axis: count for axis, count in zeros.items() if count}

    def blocks(self, piece_rows: slice) -> Iterator[Block]:
        """Give the places of a piece that fills the rows `piece_rows` of the whole weight's matrix."""
        if not self.halves:
            yield Block(slice(0, piece_rows.stop - piece_rows.start), slice(self.start, self.stop), piece_rows.start)
            return
        for half in range(self.halves):
            first = max(piece_rows.start, half * self.intermediate + self.start)
            last = min(piece_rows.stop, half * self.intermediate + self.stop)
            if first < last:
                row = half * self.width + first - half * self.intermediate - self.start
                yield Block(slice(first - piece_rows.start, last - piece_rows.start), slice(0, self.hidden), row)


def part_of(weight: FusedWeight, rank: int | None, ranks: int, padded: PadRule | None) -> Part:
    """Cut one of `ranks` parts out of a weight; `rank` is None for a single one.

    `padded` gives the size that H and each rank's I are padded to; None pads nothing.
    """
    hidden, inner = weight.hidden, weight.intermediate
    share = -(-inner // ranks)
    if (inner % ranks and padded is None) or share * (ranks - 1) >= inner > 0:
        expected = f"divisible among {ranks} tensor-parallel ranks"
        fix = "Choose a --tp-degree that divides it" + (
            ", or pad it with --pad." if share * (ranks - 1) < inner else "."
        )
        raise ConversionError.about(f"intermediate size of {weight.name}", expected, inner, fix)
    start = share * (rank or 0)
    stop = min(start + share, inner)
    rows, width = (padded("H", hidden), padded("I", share)) if padded else (hidden, share)
    return Part(weight.halves, hidden, rows, inner, start, stop, width, rank)

"""How far a result of the kernels is from PyTorch's, whether rounding explains it, and if not, what is wrong where.

tolerances.toml has the bounds and their reasons.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

EQUAL, PASS, CLOSE, FAIL, ERROR, NOT_RUN = "equal", "pass", "close", "fail", "error", "not run"

SHAPE, MISSING, NOT_FINITE, NOT_WRITTEN = "shape", "missing", "not finite", "not written"
LAST_ROW, PART, SCALED, NOISE, OTHER = "last row", "part", "scaled", "noise", "other function"
"""What can be wrong with a result: the values of :attr:`TensorResult.fault`; verdicts.toml says what they look like."""

_CHUNK = 1 << 24
"""Values looked at together: gradients of large experts have a thousand million."""


class Bounds(NamedTuple):
    """Where a comparison stops being good."""

    good_db: float  # from this signal-to-noise ratio on, rounding at the documented points explains the difference
    least_db: float  # below this one, the two are different functions
    relative: float  # largest difference, relative to the largest value, that rounding explains
    slice_db: float
    """Least ratio of a token, an expert or a column alone, against the mean energy of one if that is larger."""
    factor: float  # largest deviation from 1 of the factor between the two; rounding to nearest has no bias


_DATA = tomllib.loads(Path(__file__).with_name("tolerances.toml").read_text(encoding="utf-8"))
BOUNDS = {precision: Bounds(**figures) for precision, figures in _DATA["bounds"].items()}
"""By precision; both sides of a comparison follow the same rules, and only the order of sums may differ."""
EMULATED = Bounds(**_DATA["emulated"])
"""For bf16 results beside a reference that rounds where the kernels do, so that only the order of fp32 sums differs."""


@dataclass(frozen=True)
class TensorResult:
    """One result of both backends."""

    name: str  # "output", "grad input", "grad routing weights" or "grad " and the parameter's name
    max_relative: float | None  # largest difference divided by the reference's largest value; None if not finite
    sqnr_db: float | None  # signal-to-noise ratio in dB; None where not finite, infinite ("inf" in JSON) where equal
    verdict: str  # EQUAL, PASS (rounding explains the difference), CLOSE (it does not) or FAIL
    note: str = ""  # what is wrong, and where
    fault: str = ""  # the same as one of a few words, for programs; empty where nothing is

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; JSON has no infinity."""
        equal = self.sqnr_db == math.inf
        return asdict(self) | {"sqnr_db": "inf" if equal else self.sqnr_db}


class _Slices(NamedTuple):
    """Sums over everything but one axis, fp64; the last two are None where they were not summed."""

    word: str  # what the axis counts
    signal: Tensor  # of the reference's squares
    noise: Tensor  # of the difference's squares
    power: Tensor | None = None  # of the result's squares
    bad: Tensor | None = None  # number of values that are not finite


@dataclass(frozen=True)
class _Sums:
    """What a judgement needs to know of two tensors, from one pass over them."""

    axes: tuple[_Slices, ...]
    signal: float
    noise: float
    cross: float
    count: int
    largest: float
    difference: float

    @property
    def sqnr_db(self) -> float:
        return 10 * math.log10(self.signal / self.noise)


_AXES = {
    "output": ("token", "column"),
    "grad input": ("token", "column"),
    "grad routing weights": ("token", "choice"),
}
"""What the axes of a result count; those of a weight's gradient are expert, row and column."""


def compare(name: str, found: Tensor, expected: Tensor, bounds: Bounds) -> TensorResult:
    """Compare a result of the kernels with PyTorch's, on the CPU and in fp64; `name` decides what an axis is called."""
    if found.shape != expected.shape:
        note = f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
        return TensorResult(name, None, None, FAIL, note, SHAPE)
    if found.dtype == expected.dtype and torch.equal(found, expected):
        return TensorResult(name, 0.0, math.inf, EQUAL)
    sums = _sum_up(found, expected, _AXES.get(name, ("expert", "row", "column")[-found.dim() :]))
    first = sums.axes[0]
    assert first.bad is not None
    if bool(first.bad.any()):
        where = _listed(first.bad > 0, first.word)
        note = f"{int(first.bad.sum())} of {sums.count} values not finite: {where}"
        return TensorResult(name, None, None, FAIL, note, NOT_FINITE)
    if not math.isfinite(sums.signal):
        note = "the reference itself is not finite: look at the weights"
        return TensorResult(name, None, None, FAIL, note, NOT_FINITE)
    if sums.signal == 0.0:
        return TensorResult(name, None, None, FAIL, "not zero where the reference is", OTHER)
    if sums.noise == 0.0:  # zeros of different signs
        return TensorResult(name, 0.0, math.inf, EQUAL)
    relative, sqnr = sums.difference / sums.largest, sums.sqnr_db
    note, fault = _fault(sums, bounds)
    if fault:
        return TensorResult(name, relative, sqnr, FAIL, note, fault)
    if sqnr >= bounds.good_db and relative <= bounds.relative:
        return TensorResult(name, relative, sqnr, PASS)
    note = f"more than rounding explains: {bounds.good_db:.0f} dB and {bounds.relative:.0e} of the largest value"
    return TensorResult(name, relative, sqnr, CLOSE, note, NOISE)


def _fault(sums: _Sums, bounds: Bounds) -> tuple[str, str]:
    """What is systematically wrong, in words and as a fault; empty if the difference looks like noise."""
    first = sums.axes[0]
    if first.power is not None and not bool(first.power.any()):
        return "all zeros: nothing was written", NOT_WRITTEN
    for axis in sums.axes:
        # Small slices are measured against the mean slice.
        off = axis.noise > torch.maximum(axis.signal, axis.signal.mean()) * 10 ** (-bounds.slice_db / 10)
        total = len(axis.signal)
        if not 0 < int(off.sum()) <= total // 2:
            continue
        where = f"{_listed(off, axis.word)} of {total}"
        unwritten = axis.power is not None and not bool(axis.power[off].any())
        where = f"nothing was written: {where} zero" if unwritten else f"{where} off, the others agree"
        if axis is first and axis.word == "token" and off.nonzero().flatten().tolist() == [total - 1]:
            return f"{where} (the last row)", LAST_ROW
        return where, PART
    # By least squares, the result is this factor times the reference, and a remainder (relative root of its energy).
    factor = sums.cross / sums.signal
    remainder = math.sqrt(max(0.0, sums.noise / sums.signal - (factor - 1) ** 2))
    spread = 4 * remainder / math.sqrt(sums.count)
    if abs(factor - 1) > bounds.factor + spread and remainder < 10 ** (-bounds.least_db / 20):
        return f"{factor:.4g} times the reference", SCALED
    if sums.sqnr_db < bounds.least_db:
        return f"below {bounds.least_db:.0f} dB everywhere: another function or another layout", OTHER
    return "", ""


def _listed(chosen: Tensor, word: str) -> str:
    """``"tokens 3, 5, 8 and 4 more"``, ``"tokens 3 to 9"``, ``"every token"``."""
    indices: list[int] = chosen.nonzero().flatten().tolist()
    if len(indices) == len(chosen) > 1:
        return f"every {word}"
    if len(indices) == 1:
        return f"{word} {indices[0]}"
    if indices[-1] - indices[0] == len(indices) - 1 and len(indices) > 2:
        return f"{word}s {indices[0]} to {indices[-1]}"
    more = f" and {len(indices) - 4} more" if len(indices) > 4 else ""
    return f"{word}s {', '.join(map(str, indices[:4]))}{more}"


def _sum_up(found: Tensor, expected: Tensor, words: tuple[str, ...]) -> _Sums:
    """Sum along every axis, a chunk of rows (all axes but the last) at a time."""
    shape = found.shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    # Per row: signal, noise, power of the result, values that are not finite, product of the two.
    per_row = torch.zeros((5, rows), dtype=torch.float64)
    per_column = torch.zeros((2, columns), dtype=torch.float64)
    largest = difference = 0.0
    step, pair = max(1, _CHUNK // max(1, columns)), (found.reshape(rows, columns), expected.reshape(rows, columns))
    for part in (slice(start, start + step) for start in range(0, rows, step)):
        mine, theirs = (values[part].detach().to("cpu", torch.float64) for values in pair)
        apart = mine - theirs
        products = (theirs.square(), apart.square(), mine.square(), (~torch.isfinite(mine)).double(), mine * theirs)
        for index, product in enumerate(products):
            per_row[index, part] = product.sum(1)
        per_column += torch.stack([products[0].sum(0), products[1].sum(0)])
        largest = max(largest, float(theirs.abs().max()))
        difference = max(difference, float(apart.abs().max()))
    axes = []
    for axis in range(len(shape) - 1):
        others = [other for other in range(len(shape) - 1) if other != axis]
        sums = (values.view(shape[:-1]).sum(others) if others else values for values in per_row[:4])
        axes.append(_Slices(words[axis], *sums))
    axes.append(_Slices(words[-1], *per_column))
    signal, noise, _, _, cross = (float(values.sum()) for values in per_row)
    return _Sums(tuple(axes), signal, noise, cross, found.numel(), largest, difference)

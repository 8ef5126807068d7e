"""What is measured of one operand or result, and how its rows are picked.

Legend: R rows, C channels, T tokens, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.training.blocks import spread_rows
from hf_neuron_moe.training.figures import quantization_health
from hf_neuron_moe.training.guard.second import Product

SAMPLED_ROWS = 32


class Evidence(NamedTuple):
    """Rows that show what is wrong: a product with what was observed of it, or rows of an operand alone."""

    observed_RC: Tensor
    product: Product | None = None


@dataclass
class Finding:
    """Figures of one operand or result of a product."""

    product: str
    name: str
    figures: dict[str, float]
    expert: int = -1
    evidence: Callable[[], Evidence] | None = None
    is_operand: bool = field(kw_only=True, default=False)


def operand(product: str, name: str, values: Tensor, rows: Tensor | None = None) -> Finding:
    """Measure an operand ``[R, K]`` or of all experts ``[E, R, K]``; `rows` are a sample along the contraction axis.

    Of experts the figures are the worst ones: the largest magnitude, the smallest root mean square.
    """
    figures, expert = magnitudes(values)
    sample = (
        spread_rows(values, max(SAMPLED_ROWS, values.shape[0] if values.dim() == 3 else 0)) if rows is None else rows
    )
    _, flushed, _, sqnr = quantization_health(sample).tolist()
    return Finding(
        product,
        name,
        figures | {"sqnr_db": sqnr, "flushed": flushed},
        expert,
        lambda: _largest(values),
        is_operand=True,
    )


def weights(product: str, parts: Sequence[Tensor]) -> Finding:
    """Measure projections ``[E, R, K]`` of one input as one operand, by their worst figures."""
    found = [operand(product, "weights", part) for part in parts]
    worst = max(found, key=lambda each: (each.figures["nonfinite"], each.figures["amax"]))
    lowest = {name: min(each.figures[name] for each in found) for name in ("rms", "sqnr_db")}
    highest = {name: max(each.figures[name] for each in found) for name in ("nonfinite", "amax", "flushed")}
    return replace(worst, figures={name: (lowest | highest)[name] for name in worst.figures})


def magnitudes(values: Tensor, *, by_expert: bool = True) -> tuple[dict[str, float], int]:
    """Return the figures that need no sample, and the expert with the largest magnitude; -1 without experts.

    The root mean square is the smallest of the experts', or not `by_expert` that of all: some experts have no gradient.
    """
    if not values.numel():
        return {}, -1
    parts = values.detach() if values.dim() == 3 else values.detach().unsqueeze(0)
    amax_E = torch.maximum(parts.amin((1, 2)).abs(), parts.amax((1, 2)).abs()).float()
    wrong_E = ~amax_E.isfinite()
    nonfinite = int((~parts[wrong_E].isfinite()).sum()) if wrong_E.any() else 0
    rms_E = torch.linalg.vector_norm(parts, dim=(1, 2), dtype=torch.float32) / math.sqrt(parts[0].numel())
    largest = int(wrong_E.int().argmax()) if nonfinite else int(amax_E.argmax())
    if not nonfinite and len(parts) > 1 and not rms_E.all():
        largest = int(rms_E.argmin())
    figures = {
        "nonfinite": float(nonfinite),
        "amax": float(amax_E.max()),
        "rms": float(rms_E.min() if by_expert else rms_E.square().mean().sqrt()),
    }
    return figures, largest if values.dim() == 3 else -1


def _largest(values: Tensor) -> Evidence:
    """Return the rows with the largest or non-finite values."""
    flat_RK = values.detach().reshape(-1, values.shape[-1])
    score_R = torch.where(flat_RK.isfinite().all(1), flat_RK.float().abs().amax(1), torch.inf)
    return Evidence(flat_RK[score_R.topk(min(8, len(score_R))).indices])


def picked(error_N: Tensor, generator: torch.Generator, worst: int, drawn: int) -> Tensor:
    """Return places of the largest errors and as many random ones as `drawn` says, each once, in order."""
    N = len(error_N)
    top = error_N.topk(min(worst, N)).indices
    some = torch.randint(N, (drawn,), generator=generator).to(top.device)
    return torch.cat([top, some]).unique()


class RowErrors(NamedTuple):
    """Relative errors of rows: infinite where a value is not finite."""

    worst: float
    rounding: float  # the median, which a single value on the border of two roundings does not move
    row: int  # that has the worst

    @property
    def figures(self) -> dict[str, float]:
        """The figures of a result."""
        return {"worst": self.worst, "rounding": self.rounding}


def row_errors(found_RC: Tensor, expected_RC: Tensor) -> RowErrors:
    """Compare rows; what is expected is rounded to the dtype of what was found."""
    found, expected = found_RC.double(), expected_RC.to(found_RC.dtype).double()
    error_R = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    return errors_of(torch.where(error_R.isfinite(), error_R, torch.inf))


def errors_of(error_R: Tensor) -> RowErrors:
    """Return the summary of errors."""
    row = int(error_R.argmax())
    return RowErrors(float(error_R[row]), float(error_R.median()), row)

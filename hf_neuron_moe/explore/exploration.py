"""What exploring a model came to: measures, ranking, plan and advice as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_neuron_moe.explore.explain import Reason
from hf_neuron_moe.explore.measured_changes import rank_correlation
from hf_neuron_moe.explore.measures import BlockMeasures, Measures
from hf_neuron_moe.explore.operand_sums import decibels
from hf_neuron_moe.explore.precision_plan import Plan, Total


@dataclass(frozen=True)
class Ranked:
    """A block's place."""

    block: str
    predicted: float  # change of this text's loss in nats per token
    deviation: float  # its standard deviation over texts
    reason: Reason
    products: Mapping[str, float]  # share of the prediction
    measured: float | None = None
    measured_error: float | None = None  # standard error over rows


@dataclass
class Exploration:
    """The result of :func:`hf_neuron_moe.explore.run.explore`."""

    model: str
    text: str
    formats: tuple[str, ...]
    measures: Measures
    ranking: dict[str, list[Ranked]]  # by format that blocks can have
    plan: Plan  # of training: bf16 and mxfp8
    convert_plan: Plan | None  # of a conversion, mxfp4 too; None where that was not measured
    advice: list[str]
    measured: dict[str, float] = field(default_factory=dict)  # loss of uniform maps and of the plan, nats per token
    measured_errors: dict[str, float] = field(default_factory=dict)  # standard errors of their changes over rows
    folds: list[str] = field(default_factory=list)
    not_folded: list[str] = field(default_factory=list)  # why, of blocks or of all
    folded: dict[str, float] = field(default_factory=dict)  # the same losses after folding
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean loss of the text in bf16."""
        return self.measures.loss / self.measures.tokens

    @property
    def uniform(self) -> Mapping[str, Total]:
        """What one precision for all blocks comes to."""
        return self.plan.uniform | (self.convert_plan or self.plan).uniform

    @property
    def totals(self) -> Mapping[str, Total]:
        """The same by the name of a row of a table, with the plans."""
        found = {f"uniform {kind}": each for kind, each in self.uniform.items()} | {"plan": self.plan.total}
        return found if self.convert_plan is None else found | {"convert plan": self.convert_plan.total}

    @property
    def correlation(self) -> float:
        """Rank correlation of predicted and measured changes of the verified blocks."""
        pairs = [(row.predicted, row.measured) for row in self.ranking.get("mxfp8", []) if row.measured is not None]
        return rank_correlation([one for one, _ in pairs], [float(other) for _, other in pairs])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; what is not a finite number is None."""
        main = next(iter(self.ranking), "")
        facts = {
            "model": self.model,
            "text": self.text,
            "tokens": self.measures.tokens,
            "rows": self.measures.rows,
            "loss": self.loss,
            "loss_error": standard_error(self.measures.losses),
            "formats": list(self.formats),
            "ranking": [self._row(row) for row in self.ranking.get(main, [])],
            "rankings": {form: [self._row(row) for row in rows] for form, rows in self.ranking.items()},
            "rank_correlation": self.correlation,
            "plan": self.plan.recipe,
            "plan_details": {
                "device": self.plan.device,
                "step_tokens": self.plan.step_tokens,
                "limit": self.plan.limit,
                "estimate": "times and bytes are estimates from published figures; nothing ran on a device",
                **self.plan.total.to_dict(self.loss),
            },
            "convert_plan": self.convert_plan.recipe if self.convert_plan is not None else None,
            "convert_plan_details": (
                self.convert_plan.total.to_dict(self.loss) if self.convert_plan is not None else None
            ),
            "uniform": {kind: total.to_dict(self.loss) for kind, total in self.uniform.items()},
            "measured_losses": self.measured,
            "measured_errors": self.measured_errors,
            "advice": self.advice,
            "folds": self.folds,
            "not_folded": self.not_folded,
            "folded_losses": self.folded,
            "blocks": {name: block_facts(block) for name, block in self.measures.blocks.items()},
            "environment": dict(self.environment),
        }
        found: dict[str, Any] = finite(facts)
        return found

    def _row(self, row: Ranked) -> dict[str, Any]:
        return {
            "block": row.block,
            "predicted": row.predicted,
            "predicted_percent": 100 * row.predicted / self.loss,
            "deviation": row.deviation,
            "measured": row.measured,
            "measured_percent": None if row.measured is None else 100 * row.measured / self.loss,
            "measured_error": row.measured_error,
            "products": dict(row.products),
            "reason": row.reason.text,
            "remedy": row.reason.remedy,
            "remedy_kind": row.reason.remedy_kind,
            "outliers": [asdict(outlier) for outlier in row.reason.outliers],
        }


def block_facts(block: BlockMeasures) -> dict[str, Any]:
    """Return a block's operands and products as plain values; of experts also by expert."""
    operands = {}
    for key, operand in block.operands.items():
        operands[key] = operand.figures()
        if block.experts > 1:
            operands[key]["sqnr_db_by_expert"] = operand.sqnr_by_expert()
            operands[key]["amax_by_expert"] = operand.amax_EC.amax(1).tolist()
    return {
        "kind": block.kind,
        "experts": block.experts,
        "hidden_size": block.hidden,
        "intermediate_size": block.inner,
        "tokens_by_expert": block.tokens_E.tolist(),
        "operands": operands,
        "products": {name: {"sqnr_db": decibels(*pair)} for name, pair in block.products.items()},
    }


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean; NaN of fewer than two values."""
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def finite(value: object) -> Any:
    """Return plain values with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

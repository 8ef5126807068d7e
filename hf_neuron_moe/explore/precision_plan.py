"""Which blocks stay in bf16, so that the expected loss stays below a limit at the least cost on a device.

Times are estimates from published figures; nothing was measured on a device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_neuron_moe.activation_policy import canonical_keep
from hf_neuron_moe.device.roofline import TorchBlock
from hf_neuron_moe.device.roofline_math import CHIPS, GPUS, GPUBlock, Step, chip_of, floor_of
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.explore.measures import PRODUCTS, BlockMeasures, Measures
from hf_neuron_moe.precision_map import DEFAULT_GLOB

DEVICES = (*CHIPS, *GPUS)
"""Names of the devices that a plan can be made for."""

BYTES_PER_WEIGHT = {"bf16": 2.0, "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32}
"""Of a converted checkpoint: a code, and a scale byte for 32 of them."""

MXFP4_PRODUCTS = tuple(f"mxfp4 {product}" for product in PRODUCTS)
"""One product's weights in mxfp4 and the other's in mxfp8, which no Neuron kernel computes."""

LEAST = 1e-12
"""The smallest limit; the loss itself has fewer digits."""

STEPS = 4096
"""Parts of the limit that damages are rounded up to: the plan is optimal for those."""


@dataclass(frozen=True)
class Cost:
    """What one block takes at one precision."""

    seconds: float  # of a training step's forward and backward, on the device
    bytes: float  # of its weights in a converted checkpoint


@dataclass(frozen=True)
class Total:
    """A map of precisions with what it is predicted to cost."""

    loss_change: float  # expected, nats per token
    seconds: float
    bytes: float

    def to_dict(self, loss: float) -> dict[str, float]:
        """Return plain values, with the change in percent of `loss`."""
        percent = 100 * self.loss_change / loss
        return {"loss_change": self.loss_change, "percent": percent, "seconds": self.seconds, "bytes": self.bytes}


@dataclass(frozen=True)
class Plan:
    """The result of :func:`make_plan`."""

    precisions: dict[str, str]  # by block
    limit: float  # nats per token
    device: str
    step_tokens: int
    total: Total
    uniform: dict[str, Total]  # by precision
    ungated: frozenset[str] = frozenset()  # blocks whose first product is up's alone

    @property
    def recipe(self) -> dict[str, str]:
        """The plan as ``NeuronMoEConfig(precision=...)`` takes it: the commonest precision for all, and exceptions.

        Products of experts, which only a plan of frozen weights names, are what a conversion takes.
        """
        names = [precision.partition(" ")[0] for precision in self.precisions.values()]
        common = max(dict.fromkeys(names), key=names.count)
        own: dict[str, str] = {}
        for block, precision in self.precisions.items():
            each = {block: precision}
            if precision in MXFP4_PRODUCTS:
                first = "up_proj" if block in self.ungated else "gate_up_proj"
                kinds = ("mxfp4", "mxfp8") if precision == MXFP4_PRODUCTS[0] else ("mxfp8", "mxfp4")
                each = dict(zip((f"{block}.{first}", f"{block}.down_proj"), kinds, strict=True))
            own |= {name: precision for name, precision in each.items() if precision != common}
        return {DEFAULT_GLOB: common} | own


def costs_of(
    blocks: Mapping[str, BlockMeasures], tokens: int, device: str, step_tokens: int, precisions: Sequence[str]
) -> dict[str, dict[str, Cost]]:
    """Return each block's costs by precision, those that the device has.

    `tokens` is how many tokens the blocks were measured on: of experts it says how many a token has.
    """
    chip, step = chip_of(device), Step(step_tokens)
    costs: dict[str, dict[str, Cost]] = {}
    for name, block in blocks.items():
        top_k = max(1, round(block.tokens_E.sum().item() / max(tokens, 1)))
        routed = {"top_k": top_k, "experts": block.experts} if block.kind == "experts" else {}
        projections, weights = block.halves + 1, block.experts * block.hidden * block.inner
        costs[name] = {}
        for precision in precisions:
            computed = "bf16" if precision == "bf16" else "mxfp8"
            if computed in chip.flops and (routed or not precision.startswith("mxfp4")):
                kind = GPUBlock if device in GPUS else TorchBlock
                shape = kind(block.kind, computed, block.hidden, block.inner, step.block_size)
                seconds = floor_of(shape, chip, step, canonical_keep("minimal", computed), **routed).seconds
                form, _, product = precision.partition(" ")
                count = {"": projections, PRODUCTS[0]: block.halves, PRODUCTS[1]: 1}[product]
                each = count * BYTES_PER_WEIGHT[form] + (projections - count) * BYTES_PER_WEIGHT["mxfp8"]
                costs[name][precision] = Cost(seconds, weights * each)
    return costs


def make_plan(
    measures: Measures,
    costs: Mapping[str, Mapping[str, Cost]],
    limit: float,
    device: str,
    step: int,
    *,
    frozen: bool = False,
    missing: Collection[tuple[str, str]] = (),
) -> Plan:
    """Return the assignment with the least time whose expected change of the loss is below `limit`.

    Blocks and precisions that are `missing` a kernel come last: the fewest of them, then the least time. Of `frozen`
    weights, which a conversion stores, it is the one with the least bytes.

    `limit` is in nats per token. Damages of blocks are taken to add up. Solved exactly, by dynamic programming over
    blocks and damage in :data:`STEPS` parts of the limit, rounded up, so that the sum never exceeds it.
    """
    tokens = measures.tokens
    names = list(measures.blocks)
    options: list[list[tuple[str, int, float]]] = []
    longest = max(cost.seconds for name in names for cost in costs[name].values())
    heaviest = sum(max(cost.bytes for cost in costs[name].values()) for name in names)
    for name in names:
        rows = []
        for precision, cost in costs[name].items():
            damage = damage_of(measures.blocks[name], precision) / tokens
            parts = -int(-damage * STEPS // limit) if damage else 0
            seconds, stored = cost.seconds / longest, cost.bytes / heaviest
            # Trained weights have the same bytes whatever they compute with: where no time is gained, bf16 is exacter.
            seconds += 1e-6 * (precision != "bf16") + 2.0 * len(names) * ((name, precision) in missing)
            rows.append((precision, parts, stored if frozen else seconds))
        options.append(rows)
    chosen = _cheapest(options)
    precisions = dict(zip(names, chosen, strict=True))
    kinds = [kind for kind in BYTES_PER_WEIGHT if all(kind in row for row in costs.values())]
    uniform = {kind: total_of(measures, costs, dict.fromkeys(names, kind)) for kind in kinds}
    ungated = frozenset(name for name, block in measures.blocks.items() if block.halves == 1)
    return Plan(precisions, limit, device, step, total_of(measures, costs, precisions), uniform, ungated)


def damage_of(block: BlockMeasures, precision: str) -> float:
    """Return the expected change of the summed loss on other text; 0 in bf16, with which all are compared."""
    return 0.0 if precision == "bf16" else block.scores[precision].expected


def total_of(measures: Measures, costs: Mapping[str, Mapping[str, Cost]], precisions: Mapping[str, str]) -> Total:
    """Return what blocks at these precisions come to together."""
    damage = sum(damage_of(measures.blocks[name], precision) for name, precision in precisions.items())
    taken = [costs[name][precision] for name, precision in precisions.items()]
    return Total(damage / measures.tokens, sum(cost.seconds for cost in taken), sum(cost.bytes for cost in taken))


def _cheapest(options: Sequence[Sequence[tuple[str, int, float]]]) -> list[str]:
    """Return for each block the option of the cheapest choice whose parts come to at most :data:`STEPS`."""
    best = torch.zeros(STEPS + 1, dtype=torch.float64)
    taken: list[torch.Tensor] = []
    for rows in options:
        ways = torch.full((len(rows), STEPS + 1), torch.inf, dtype=torch.float64)
        for way, (_, parts, cost) in enumerate(rows):
            if parts <= STEPS:
                ways[way, parts:] = best[: STEPS + 1 - parts] + cost
        best, way_P = ways.min(dim=0)
        taken.append(way_P)
    left, chosen = STEPS, []
    for rows, way_P in zip(reversed(options), reversed(taken), strict=True):
        precision, parts, _ = rows[int(way_P[left])]
        chosen.append(precision)
        left -= parts
    return chosen[::-1]


def limit_of(text: str, loss: float) -> float:
    """Return ``"0.25%"`` of `loss`, or a number of nats such as ``"0.01"``, in nats per token."""
    bare = text.strip()
    try:
        value = float(bare.removesuffix("%"))
    except ValueError:
        value = 0.0
    if not LEAST <= value < float("inf"):
        fix = "Write --budget 0.25% for a quarter of a percent of the loss, or --budget 0.01 for nats per token."
        raise ConfigError.about("budget", f"a share of the loss or a number of nats, at least {LEAST}", repr(text), fix)
    return value / 100 * loss if bare.endswith("%") else value


def as_yaml(plan: Plan, model: str) -> str:
    """Return the plan as a file that ``--recipe`` takes."""
    import yaml

    head = (
        f"# Precision by block for {model}, made by hf-neuron-moe explore for {plan.device}.\n"
        f"# Expected change of the loss {plan.total.loss_change:.2g} nats per token, limit {plan.limit:.2g}.\n"
    )
    body: Any = yaml.safe_dump(plan.recipe, sort_keys=False, width=120)
    return head + body

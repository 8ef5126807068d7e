"""Search for a layout and an activation policy under which a training step fits on every device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import Any

from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.training.memory_estimate import STOCK, PolicyEstimate, TrainingEstimate, estimate_training
from hf_neuron_moe.training.one_rank import Held, Layout, LayoutError, OneRank, uneven


@dataclass(frozen=True)
class Fit:
    """The layout that fits, of those that send the fewest bytes per token."""

    layout: Layout
    policy: PolicyEstimate
    estimate: TrainingEstimate
    refused: Mapping[str, int]  # how many layouts each reason excludes
    layouts: int  # how many transformers' sizes allow for the devices; those that send more were not looked at


@public("fit_layout")
def fit_layout(model: Any, configs: Mapping[str, NeuronMoEConfig], *, memory: int, devices: int, **options: Any) -> Fit:
    """Return the layout that sends the fewest bytes per token, of those that leave each rank within `memory` bytes.

    Of the activation policies, in the order of `configs`, the first that fits is taken. Raises ConfigError where
    nothing fits. `options` are those of :func:`estimate_training`.
    """
    refused: Counter[str] = Counter()
    shape, frozen = {name: options[name] for name in ("batch", "length")}, bool(options.get("lora_rank"))
    times = 1 if frozen else 4 if options.get("optimizer", "adamw") == "adamw" else 2

    def computing(tp: int, ep: int) -> OneRank:  # FSDP divides what tp and ep leave
        layout = Layout(tp=tp, ep=ep, fsdp=max(1, ep // tp))
        return OneRank(model, lambda other: other, shape, layout, Held(0, 0, (), (0, 0)))

    @cache
    def weights(tp: int, ep: int) -> tuple[int, int]:
        with computing(tp, ep) as rank:
            return rank.full

    @cache  # after layouts that do not fit are gone
    def exchanged(tp: int, ep: int) -> float:
        with computing(tp, ep) as rank:
            return rank.exchange.sent

    layouts = list(_layouts(devices, experts=bool(model.ep_plan)))
    candidates: list[
        tuple[float, float, int, bool]
    ] = []  # bytes sent at least, held, place in layouts, all are counted
    for place, layout in enumerate(layouts):
        if reason := uneven(model, layout):
            refused[reason] += 1
            continue
        dense, experts = weights(layout.tp, layout.ep)
        held = dense / layout.fsdp + experts / (layout.fsdp * layout.tp // layout.ep if layout.ep > 1 else layout.fsdp)
        if times * held > memory:
            refused["parameters, gradients and optimizer states alone do not fit"] += 1
            continue
        fetched = (2 if frozen else 3) * (dense + experts - held)
        reduced = 0 if frozen else 2 * held * (layout.dp_replicate - 1) / layout.dp_replicate
        heappush(candidates, (layout.tp * (fetched + reduced), times * held, place, False))
    least: dict[tuple[int, int], float] = {}  # of what the policies save under equal tp and ep
    while candidates:
        sent, fixed, place, counted = heappop(candidates)
        layout = layouts[place]
        if not counted:  # the engine runs for layouts only that may come next
            sent += layout.tp * exchanged(layout.tp, layout.ep)
            heappush(candidates, (sent, fixed, place, True))
            continue
        if fixed + least.get((layout.tp, layout.ep), 0) <= memory:
            try:
                result = estimate_training(model, configs, layout=layout, **options)
            except LayoutError as error:
                refused[error.reason] += 1
                continue
            policies = [each for each in result.policies if each.name != STOCK or len(result.policies) == 1]
            fitting = next((policy for policy in policies if policy.total <= memory), None)
            if fitting is not None:
                return Fit(layout, fitting, result, refused, len(layouts))
            least[layout.tp, layout.ep] = min(policy.saved for policy in policies)
        refused["no activation policy saves little enough"] += 1
    reasons = "; ".join(f"{reason} ({count})" for reason, count in refused.most_common())
    fix = "Take more devices or fewer tokens, add --gradient-checkpointing, or train adapters (--lora-rank)."
    raise ConfigError.about("memory", f"enough for a rank on {devices} devices", f"{memory:,} bytes: {reasons}", fix)


def _layouts(devices: int, *, experts: bool) -> Iterator[Layout]:
    """All sizes with which transformers trains on so many devices."""
    for tp in _divisors(devices):
        for fsdp in _divisors(devices // tp):
            for ep in _divisors(fsdp * tp) if experts else [1]:
                if ep == 1 or ep % tp == 0:
                    yield Layout(tp=tp, ep=ep, fsdp=fsdp, dp_replicate=devices // tp // fsdp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

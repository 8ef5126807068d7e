"""A random probe: some layers of a conversion, computed from what is stored, against the same layers of the source."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from hf_neuron_moe.convert.audit.compare import Block, Comparison, Pair, blocks_of, floor_db, sqnr_db
from hf_neuron_moe.convert.io.tensors import TensorReader
from hf_neuron_moe.convert.manifest import Manifest
from hf_neuron_moe.convert.options import FORWARD

TOKENS = 4
"""Random input vectors of a probed layer."""

LAYER_MARGIN_DB = 7.0
"""A layer's output passes three rounded matrices, which triples the noise (4.8 dB); the rest is the gate's slope."""


@dataclass(frozen=True)
class LayerProbe:
    """One MLP, or one expert, compared with the source."""

    layer: str
    expert: int | None  # Which expert, None for an MLP
    weights: dict[str, float]  # Signal to noise in dB of every stored matrix, by tensor name
    floors: dict[str, float]  # The least that is right, by tensor name
    output: float  # Signal to noise of the layer's output for random inputs
    output_floor: float  # The least that is right
    stray: dict[str, int]  # Values in the padding that are not zero, by tensor name

    @property
    def faults(self) -> list[str]:
        """What is below its floor, in words."""
        place = "" if self.expert is None else f"expert {self.expert}: "
        faults = [
            f"{place}{name} has {in_db(value)}, at least {in_db(self.floors[name])} expected"
            for name, value in self.weights.items()
            if not value >= self.floors[name]
        ]
        faults += [f"{place}{name} has {count} values in its padding" for name, count in self.stray.items() if count]
        if not self.output >= self.output_floor:
            faults.append(f"{place}output has {in_db(self.output)}, at least {in_db(self.output_floor)} expected")
        return faults

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints; numbers are dB, or ``exact``, or ``undefined`` with NaN."""
        return {
            "layer": self.layer,
            "expert": self.expert,
            "weights_db": {name: number(value) for name, value in self.weights.items()},
            "floors_db": {name: number(value) for name, value in self.floors.items()},
            "output_db": number(self.output),
            "output_floor_db": number(self.output_floor),
            "ok": not self.faults,
        }

    def __str__(self) -> str:
        place = self.layer if self.expert is None else f"{self.layer} expert {self.expert}"
        weights = ", ".join(
            f"{name.removeprefix(self.layer + '.')} {in_db(value)}" for name, value in self.weights.items()
        )
        return f"{place}: {weights}; output {in_db(self.output)} (at least {in_db(self.output_floor)})"


def probe_layers(
    manifest: Manifest, source: TensorReader, converted: TensorReader, count: int, seed: int
) -> list[LayerProbe]:
    """Compare layers with the source.

    Args:
        manifest: of the conversion.
        source: reads the source's tensors.
        converted: reads the conversion's tensors.
        count: number of layers, chosen by `seed`, and one expert of each that has any; 0 for every expert of every
            layer.
        seed: chooses layers, experts and inputs.
    """
    chooser = random.Random(seed)
    blocks = blocks_of(manifest)
    chosen = blocks if not count or count >= len(blocks) else chooser.sample(blocks, count)
    comparison = Comparison(manifest, source, converted)
    results = []
    for block in chosen:
        experts = comparison.experts_of(block.gate_up)
        if experts is None:
            looked_at: Iterable[int | None] = (None,)
        else:
            looked_at = (chooser.randrange(experts),) if count else range(experts)
        for expert in looked_at:
            results.append(_probe(block, expert, comparison, chooser.randrange(2**31)))
    return results


def _probe(block: Block, expert: int | None, comparison: Comparison, seed: int) -> LayerProbe:
    gate_up, down = comparison.original(block.gate_up, expert), comparison.original(block.down, expert)
    pairs: dict[tuple[str, int | None], dict[str, Pair]] = {}
    weights, floors, stray = {}, {}, {}
    for weight, original in ((block.gate_up, gate_up), (block.down, down)):
        for operand in comparison.operands(weight):
            pair = comparison.pair(operand, original, expert)
            weights[pair.name], stray[pair.name] = pair.sqnr, pair.stray
            floors[pair.name] = floor_db(comparison.manifest, operand)
            pairs.setdefault((operand.values.orientation, operand.values.tp_rank), {})[weight] = pair
    x_TH = torch.randn(TOKENS, gate_up.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    forward = [group for (orientation, _), group in pairs.items() if orientation == FORWARD]
    wanted = _output(x_TH, [(gate_up, down)])
    held = _output(x_TH, [(group[block.gate_up].held, group[block.down].held) for group in forward])
    floor = min(floors.values())
    # Ranks add up in another order than one matrix product, so an exact layer is exact only to float64's rounding.
    output_floor = 200.0 if math.isinf(floor) else floor - LAYER_MARGIN_DB
    return LayerProbe(block.name, expert, weights, floors, sqnr_db(wanted, held), output_floor, stray)


def _output(x_TH: Tensor, ranks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """A SwiGLU layer's output: every rank's gate_up ``[2I, H]`` and down ``[H, I]``, added up as all-reduce does."""
    output_TH = torch.zeros_like(x_TH)
    for gate_up_FH, down_HI in ranks:
        gate_TI, up_TI = (x_TH @ gate_up_FH.double().t()).chunk(2, dim=1)
        output_TH += (silu(gate_TI) * up_TI) @ down_HI.double().t()
    return output_TH


def in_db(value: float) -> str:
    """A signal to noise for people."""
    if math.isfinite(value):
        return f"{value:.1f} dB"
    return "exact" if value == math.inf else "undefined (NaN or infinite values)"


def number(value: float) -> float | str:
    """A signal to noise for JSON, which knows neither infinity nor NaN."""
    if math.isfinite(value):
        return round(value, 2)
    return "exact" if value == math.inf else "undefined"

"""Compares a conversion with its source, matrix by matrix and layer by layer, and knows how good each format has to be.

F, K rows and contraction axis of a matrix; H hidden size, I intermediate size, of one tensor-parallel rank where there
are several.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from hf_neuron_moe.convert.audit.operands import StoredOperand, read_operand
from hf_neuron_moe.convert.io.tensors import TensorReader
from hf_neuron_moe.convert.layout.orientations import SCALES, SOURCE
from hf_neuron_moe.convert.layout.tensor_parallel import is_gate_up
from hf_neuron_moe.convert.manifest import Manifest, WrittenTensor, grouped
from hf_neuron_moe.convert.options import BACKWARD, FORWARD

GATE_UP, DOWN = "gate_up_proj", "down_proj"

BF16_FLOOR_DB = 48.0
"""A bf16 value differs from the original by at most 1/257 of it: 20 log10(257) = 48.2 dB."""

MX_FLOORS_DB = {
    "mxfp8": {"neuron": 24.0, "ceil": 24.0, "rceil": 24.0, "even": 19.9, "floor": 17.7},
    "mxfp4": {"neuron": 4.7, "ceil": 4.7, "rceil": 7.3, "even": 7.9, "floor": 9.4},
}
"""Signal to noise that no data can fall below, by scale rule.

MXFP8: e4m3 rounds by at most 1/17 of a value (24.6 dB); values that become subnormal add less than 2**-17 of the
block's largest. FLOOR clips up to 1/8 of a block's largest value (18.1 dB), EVEN up to 3/31 (20.3 dB). MXFP4: the worst
block has one value at the lower end of what its scale is for (2 for NEURON and CEIL, 3 for RCEIL, 3.5 for EVEN, 4 for
FLOOR, in units of the scale) and 31 values of a quarter, which become zero. All figures leave 0.1 to 0.6 dB for the
rounding of fp32 and fp16 sources to bf16 on the way. Gaussian values have 30.6 to 31.5 dB and 16.8 to 19.0 dB.
"""

TOKENS = 4
"""Random input vectors of a probed layer."""

LAYER_MARGIN_DB = 7.0
"""A layer's output passes three rounded matrices, which triples the noise (4.8 dB); the rest is the gate's slope."""


def floor_db(manifest: Manifest, operand: StoredOperand) -> float:
    """The signal to noise, in dB, that a correctly stored operand has at least; infinite where bf16 holds it all."""
    options = manifest.options
    if operand.scales is not None:
        return MX_FLOORS_DB[options.precision][options.rule]
    rounded = any(map(manifest.was_rounded, manifest.weights[operand.values.weight]))
    return BF16_FLOOR_DB if rounded else math.inf


def sqnr_db(expected: Tensor, got: Tensor) -> float:
    """Ratio of the energies of `expected` and of the difference, in dB: infinite where they are equal, NaN with NaN."""
    noise = float((expected.double() - got.double()).square().sum())
    signal = float(expected.double().square().sum())
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise) if math.isfinite(noise) and math.isfinite(signal) else math.nan


@dataclass(frozen=True)
class Pair:
    """What should be stored and what is."""

    name: str  # Tensor that stores it
    wanted: Tensor  # The original's values ``[F, K]`` in the operand's orientation, in the source's dtype
    held: Tensor  # The operand's values without its padding, fp32 ``[F, K]``
    stray: int  # Number of values in the padding that are not zero

    @property
    def sqnr(self) -> float:
        """Signal to noise of what is held, in dB."""
        return sqnr_db(self.wanted, self.held)


@dataclass(frozen=True)
class Block:
    """A gate_up and a down weight that belong together: one MLP, or the experts of one layer."""

    name: str  # Their common prefix, without the last dot
    gate_up: str  # Name of the gate_up weight
    down: str  # Name of the down weight


def blocks_of(manifest: Manifest) -> list[Block]:
    """List the converted MLPs and experts in the manifest's order."""
    converted = dict.fromkeys(tensor.weight for tensor in manifest.tensors if tensor.layout != SOURCE)
    blocks = []
    for name in converted:
        prefix, found, suffix = name.rpartition(GATE_UP)
        if found and prefix + DOWN + suffix in converted:
            blocks.append(Block(prefix.rstrip("."), name, prefix + DOWN + suffix))
    return blocks


class Comparison:
    """A conversion beside its source."""

    def __init__(self, manifest: Manifest, source: TensorReader, converted: TensorReader) -> None:
        self.manifest = manifest
        self._source = source
        self._converted = converted
        self._tensors = manifest.by_weight()

    def experts_of(self, weight: str) -> int | None:
        """Number of experts, None for a weight without them."""
        pieces = self.manifest.weights[weight]
        if pieces[0].holds_experts:
            return pieces[0].shape[0]
        return None if pieces[0].expert is None else 1 + max(piece.expert or 0 for piece in pieces)

    def original(self, weight: str, expert: int | None) -> Tensor:
        """One matrix ``[F, K]`` of the source, in its dtype."""
        rows = []
        for piece in sorted(self.manifest.weights[weight], key=lambda piece: piece.start):
            if piece.holds_experts or piece.expert == expert:
                matrix = self._source.read(piece.file, piece.source, expert if piece.holds_experts else None)
                rows.append(matrix.t() if piece.transposed else matrix)
        return torch.cat(rows)

    def operands(self, weight: str) -> list[StoredOperand]:
        """What stores a weight, one entry per orientation and rank."""
        has_experts = self.experts_of(weight) is not None
        groups = grouped(self._tensors[weight], lambda tensor: (tensor.orientation, tensor.tp_rank))
        operands = []
        for tensors in groups.values():
            scales = [tensor for tensor in tensors if tensor.layout in SCALES]
            (values,) = [tensor for tensor in tensors if tensor.layout not in SCALES]
            operands.append(StoredOperand(values, scales[0] if scales else None, has_experts))
        return operands

    def pair(self, operand: StoredOperand, original_FK: Tensor, expert: int | None) -> Pair:
        """Put the part of the original that an operand stands for beside what it holds."""
        wanted = _part_of(original_FK, operand.values, self._ranks(operand.values.weight))
        stored = read_operand(operand, expert, self._read)
        held = _unpadded(stored, wanted.shape, operand.values)
        stray = int(torch.count_nonzero(stored)) - int(torch.count_nonzero(held))
        return Pair(operand.values.name, wanted, held, stray)

    def _ranks(self, weight: str) -> int:
        return len({tensor.tp_rank for tensor in self._tensors[weight]})

    def _read(self, tensor: WrittenTensor, expert: int | None) -> Tensor:
        return self._converted.read(tensor.file, tensor.name, expert)


def _part_of(original_FK: Tensor, tensor: WrittenTensor, ranks: int) -> Tensor:
    """Cut a rank's part of the I axis out of a matrix, and turn it where the operand is the backward one."""
    part = original_FK
    if tensor.tp_rank is not None:
        if is_gate_up(tensor.weight):
            part = torch.cat([half.chunk(ranks)[tensor.tp_rank] for half in original_FK.chunk(2)])
        else:
            part = original_FK.chunk(ranks, dim=1)[tensor.tp_rank]
    return part.t() if tensor.orientation == BACKWARD else part


def _unpadded(held: Tensor, shape: tuple[int, ...], tensor: WrittenTensor) -> Tensor:
    """View the values of a stored matrix that are not padding, for an unpadded shape; gate and up are padded each."""
    if not is_gate_up(tensor.weight):
        return held[: shape[0], : shape[1]]
    if tensor.orientation == FORWARD:
        halves = held.view(2, held.shape[0] // 2, held.shape[1])[:, : shape[0] // 2, : shape[1]]
        return halves.reshape(shape)
    halves = held.view(held.shape[0], 2, held.shape[1] // 2)[: shape[0], :, : shape[1] // 2]
    return halves.reshape(shape)


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

"""Compares a conversion with its source, matrix by matrix and layer by layer, and knows how good each format has to be.

F, K rows and contraction axis of a matrix; H hidden, I intermediate size, of one tensor-parallel rank of several.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.convert.audit.networks import intermediate
from hf_neuron_moe.convert.audit.operands import read_operand
from hf_neuron_moe.convert.io.tensors import TensorReader
from hf_neuron_moe.convert.layout.orientations import PERMUTED_WORDS, SCALES, SOURCE
from hf_neuron_moe.convert.layout.tensor_parallel import experts_in, halves_in
from hf_neuron_moe.convert.manifest import Manifest, Network, WrittenTensor, grouped
from hf_neuron_moe.convert.options import BACKWARD, FORWARD

BF16_FLOOR_DB = 48.0  # A bf16 value differs from the original by at most 1/257 of it: 20 log10(257) = 48.2 dB

MX_FLOORS_DB = {
    "mxfp8": {"neuron": 24.0, "ceil": 24.0, "rceil": 24.0, "even": 19.9, "floor": 17.7},
    "mxfp4": {"neuron": 4.7, "ceil": 4.7, "rceil": 7.3, "even": 7.9, "floor": 9.4},
}
"""Signal to noise that no data can fall below, by scale rule.

MXFP8: e4m3 rounds by at most 1/17 of a value (24.6 dB); values that become subnormal add less than 2**-17 of the
block's largest. FLOOR clips up to 1/8 of a block's largest value (18.1 dB), EVEN up to 3/31 (20.3 dB). MXFP4: the worst
block has one value at the lower end of what its scale is for, and 31 values of a quarter, which become zero. In units
of the scale that end is 2 for NEURON and CEIL, 3 for RCEIL, 3.5 for EVEN and 4 for FLOOR. All figures leave 0.1 to 0.6
dB for the rounding of fp32 and fp16 sources to bf16 on the way. Gaussian values have 30.6 to 31.5 dB and 16.8 to 19.0
dB.
"""

TOKENS = 4  # Random input vectors of a probed layer
# A layer's output passes three rounded matrices, which triples the noise (4.8 dB); the rest is the gate's slope.
LAYER_MARGIN_DB = 7.0


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
    """What should be stored and what is: ``[F, K]``, both in the orientation in which it is stored."""

    tensor: WrittenTensor  # Stores the values
    wanted: Tensor  # The original's values, in the source's dtype
    held: Tensor  # The stored values without padding, fp32
    stray: int  # Number of values in the padding that are not zero
    floor: float  # Least signal to noise, in dB, of what is stored correctly; infinite where bf16 holds it all

    @property
    def sqnr(self) -> float:
        """Signal to noise of what is held, in dB."""
        return sqnr_db(self.wanted, self.held)


@dataclass(frozen=True)
class Block:
    """A gate_up and a down weight that belong together: one MLP, or the experts of one layer."""

    name: str  # Their common prefix, without the last dot
    gate_up: str  # Name of the gate_up weight, or of up alone
    down: str  # Name of the down weight
    network: Network  # What it computes with them


def blocks_of(manifest: Manifest) -> list[Block]:
    """List the converted MLPs and experts in the manifest's order."""
    converted = dict.fromkeys(tensor.weight for tensor in manifest.tensors if tensor.layout != SOURCE)
    blocks = []
    for name in (name for name in converted if halves_in(name)):
        suffix = ".weight" if name.endswith(".weight") else ""
        module, dot, _ = name.removesuffix(suffix).rpartition(".")
        down = f"{module}{dot}down_proj{suffix}"
        if down in converted:
            blocks.append(Block(module, name, down, manifest.networks.get(module, Network({}))))
    return blocks


class Comparison:
    """A conversion next to its source."""

    def __init__(self, manifest: Manifest, source: TensorReader, converted: TensorReader) -> None:
        self._manifest = manifest
        self._source = source
        self._converted = converted
        self._tensors = manifest.by_weight()

    def experts_of(self, weight: str) -> Sequence[int | None]:
        """Indices of a weight's experts; None alone for a weight without them."""
        count = experts_in(self._manifest.weights[weight])
        return (None,) if count is None else range(count)

    def original(self, weight: str, expert: int | None) -> Tensor:
        """One matrix ``[F, K]`` of the source, in its dtype."""
        rows = []
        for piece in sorted(self._manifest.weights[weight], key=lambda piece: piece.start):
            if piece.holds_experts or piece.expert == expert:
                index, part = piece.place(expert if piece.holds_experts else None, slice(0, piece.matrix[0]))
                matrix = self._source.read(piece.file, piece.source, index, None, part)
                matrix = matrix.t() if piece.transposed else matrix
                rows += [matrix[0::2], matrix[1::2]] if piece.interleaved else [matrix]
                if piece.up_first:
                    rows = [*matrix.chunk(2)][::-1]
        return torch.cat(rows)

    def pairs(self, weight: str, expert: int | None, original_FK: Tensor) -> Iterator[Pair]:
        """Put what stores a matrix next to what it stands for: one pair per orientation and rank."""
        held_by = (tensor for tensor in self._tensors[weight] if tensor.holds(expert))
        groups = grouped(held_by, lambda tensor: (tensor.orientation, tensor.tp_rank))
        ranks = len({rank for _, rank in groups})
        manifest = self._manifest
        bf16_floor = BF16_FLOOR_DB if any(map(manifest.was_rounded, manifest.weights[weight])) else math.inf
        options = manifest.options.of(weight)
        mx_floor = MX_FLOORS_DB.get(options.precision, {}).get(options.rule, math.inf)
        for tensors in groups.values():
            scales = next((tensor for tensor in tensors if tensor.layout in SCALES), None)
            (values,) = [tensor for tensor in tensors if tensor is not scales]
            wanted = _part_of(original_FK, values, ranks)
            stored = read_operand(values, scales, expert, self._read)
            held = _unpadded(stored, wanted.shape, values)
            stray = int(torch.count_nonzero(stored)) - int(torch.count_nonzero(held))
            rounds = scales is not None and values.layout not in PERMUTED_WORDS.values()
            yield Pair(values, wanted, held, stray, mx_floor if rounds else bf16_floor)

    def biases(self, block: Block, expert: int | None, widths: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """A block's biases in the order of the fused weights' rows, zeros where it has none; `widths` are theirs."""
        names = block.network.biases or ("", "")
        inputs = len(names) - 1
        sizes = (*[widths[0] // inputs] * inputs, widths[1])
        *parts, down_H = (self._bias(name, expert, size) for name, size in zip(names, sizes))
        gate_up_F, first = torch.cat(parts), self._manifest.weights[block.gate_up][0]
        if first.interleaved:
            gate_up_F = torch.cat([gate_up_F[0::2], gate_up_F[1::2]])
        return (gate_up_F.roll(len(gate_up_F) // 2) if first.up_first else gate_up_F), down_H

    def changed_biases(self, block: Block) -> tuple[str, ...]:
        """Names of a block's biases whose copies do not have the source's values."""
        changed = []
        for name in filter(None, block.network.biases):
            (piece,), (stored,) = self._manifest.weights[name], self._tensors[name]
            both = self._source.read(piece.file, name), self._converted.read(stored.file, stored.name)
            if not torch.allclose(*both, rtol=0, atol=0, equal_nan=True):
                changed.append(name)
        return tuple(changed)

    def _bias(self, name: str, expert: int | None, size: int) -> Tensor:
        if not name:
            return torch.zeros(size, dtype=torch.float64)
        (piece,) = self._manifest.weights[name]
        whole = self._source.read(piece.file, name).double()
        return whole if whole.dim() == 1 or expert is None else whole[expert]

    def _read(self, tensor: WrittenTensor, expert: int | None) -> Tensor:
        index = None if expert is None else expert - tensor.first_expert
        return self._converted.read(tensor.file, tensor.name, index)


def _part_of(original_FK: Tensor, tensor: WrittenTensor, ranks: int) -> Tensor:
    """Cut a rank's part of the I axis out of a matrix, and turn it where the operand is the backward one."""
    part = original_FK
    halves = halves_in(tensor.weight)
    if tensor.tp_rank is not None and halves:
        part = torch.cat([half.chunk(ranks)[tensor.tp_rank] for half in original_FK.chunk(halves)])
    elif tensor.tp_rank is not None:
        part = original_FK.chunk(ranks, dim=1)[tensor.tp_rank]
    return part.t() if tensor.orientation == BACKWARD else part


def _unpadded(stored: Tensor, shape: tuple[int, ...], tensor: WrittenTensor) -> Tensor:
    """View the values of a stored matrix that are not padding; gate and up are padded each."""
    F, K = shape
    halves = halves_in(tensor.weight)
    if not halves:
        return stored[:F, :K]
    if tensor.orientation == FORWARD:
        return stored.unflatten(0, (halves, -1))[:, : F // halves, :K].reshape(shape)
    return stored.unflatten(1, (halves, -1))[:F, :, : K // halves].reshape(shape)


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
    changed: tuple[str, ...] = ()  # Biases whose copies are not the source's

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
        faults += [f"{place}{name} is not the source's" for name in self.changed]
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
        weights = (f"{name.removeprefix(self.layer + '.')} {in_db(value)}" for name, value in self.weights.items())
        return f"{place}: {', '.join(weights)}; output {in_db(self.output)} (at least {in_db(self.output_floor)})"


def probe_layers(
    manifest: Manifest, source: TensorReader, converted: TensorReader, count: int, seed: int
) -> list[LayerProbe]:
    """Compare layers of a conversion with the source.

    `seed` chooses `count` layers, one expert of each that has any, and inputs; 0 takes every expert of every layer.
    """
    chooser = random.Random(seed)
    blocks = blocks_of(manifest)
    chosen = blocks if not count or count >= len(blocks) else chooser.sample(blocks, count)
    comparison = Comparison(manifest, source, converted)
    results = []
    for block in chosen:
        experts = comparison.experts_of(block.down)
        if count and isinstance(experts, range):
            experts = (chooser.randrange(len(experts)),)
        results += [_probe(block, expert, comparison, chooser.randrange(2**31)) for expert in experts]
    return results


def _probe(block: Block, expert: int | None, comparison: Comparison, seed: int) -> LayerProbe:
    gate_up, down = comparison.original(block.gate_up, expert), comparison.original(block.down, expert)
    pairs = [*comparison.pairs(block.gate_up, expert, gate_up), *comparison.pairs(block.down, expert, down)]
    forward = [pair for pair in pairs if pair.tensor.orientation == FORWARD]
    ranks = grouped(forward, lambda pair: pair.tensor.tp_rank)  # gate_up, then down
    gate, biases = block.network.gate, comparison.biases(block, expert, (len(gate_up), len(down)))
    halves = halves_in(block.gate_up)
    x_TH = torch.randn(TOKENS, gate_up.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    held = [[pair.held for pair in rank] for rank in ranks.values()]
    floor = min(pair.floor for pair in pairs)
    return LayerProbe(
        block.name,
        expert,
        weights={pair.tensor.name: pair.sqnr for pair in pairs},
        floors={pair.tensor.name: pair.floor for pair in pairs},
        output=sqnr_db(*(_output(x_TH, each, halves, gate, biases) for each in ([(gate_up, down)], held))),
        # Ranks add up in another order than one matrix product, so an exact layer is exact only to float64's rounding.
        output_floor=200.0 if math.isinf(floor) else floor - LAYER_MARGIN_DB,
        stray={pair.tensor.name: pair.stray for pair in pairs},
        changed=comparison.changed_biases(block),
    )


def _output(
    x_TH: Tensor, ranks: Iterable[Sequence[Tensor]], halves: int, gate: Mapping[str, Any], biases: tuple[Tensor, Tensor]
) -> Tensor:
    """A layer's output: every rank's gate_up ``[2I, H]`` and down ``[H, I]``, added up as all-reduce does."""
    bias_parts, start = biases[0].chunk(halves), 0
    output_TH = torch.zeros_like(x_TH) + biases[1]
    for gate_up_FH, down_HI in ranks:
        products, part = (x_TH @ gate_up_FH.double().t()).chunk(halves, dim=1), slice(start, start + down_HI.shape[1])
        parts = [product_TI + bias[part] for product_TI, bias in zip(products, bias_parts)]
        output_TH += intermediate(gate, parts) @ down_HI.double().t()
        start = part.stop
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

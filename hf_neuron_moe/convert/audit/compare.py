"""Compares a converted weight with its source, matrix by matrix, and knows how good each format has to be.

F, K rows and contraction axis of a matrix; H hidden size, I intermediate size, of one tensor-parallel rank where there
are several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.convert.audit.operands import StoredOperand, read_operand
from hf_neuron_moe.convert.io.tensors import TensorReader
from hf_neuron_moe.convert.layout.orientations import SCALES, SOURCE
from hf_neuron_moe.convert.layout.tensor_parallel import is_gate_up
from hf_neuron_moe.convert.manifest import Manifest, WrittenTensor
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


def floor_db(manifest: Manifest, operand: StoredOperand) -> float:
    """The signal to noise, in dB, that a correctly stored operand has at least; infinite where bf16 holds it all."""
    options = manifest.options
    if operand.scales is not None:
        return MX_FLOORS_DB[options.precision][options.rule]
    for piece in manifest.weights[operand.values.weight]:
        if piece.dtype != "BF16" if manifest.rounded is None else piece.source in manifest.rounded:
            return BF16_FLOOR_DB
    return math.inf


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
        self._tensors: dict[str, list[WrittenTensor]] = {}
        for tensor in manifest.tensors:
            self._tensors.setdefault(tensor.weight, []).append(tensor)

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
        groups: dict[tuple[str, int | None], list[WrittenTensor]] = {}
        for tensor in self._tensors[weight]:
            groups.setdefault((tensor.orientation, tensor.tp_rank), []).append(tensor)
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

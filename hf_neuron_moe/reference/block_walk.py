"""The loops of the blockwise MoE forward as the kernels run them: block after block, core by core, tile by tile.

Legend: T' rows of the token tensors, B slots of a block, N blocks, H hidden, I intermediate, E experts.

Every block, with its expert's weights::

    gather the B rows of the block, a zero row for a slot without a token
    gate, up = rows x weights        PSUM tiles of 128 of I by 512 slots, sums over H in tiles of 128 (MX: 512)
    scale, bias, clamp, round        (expert_rows.ExpertRows.pre_activations_)
    act(gate) * up, round            (.intermediate)
    down     = intermediate x weight PSUM tiles of 128 slots by 512 of H, sums over I in tiles of 128 (MX: 512)
    scale, bias, affinity            (.finish_), for each tile of 128 slots
    read the running output's B rows, add, round, write them back (or write only, without accumulation)

Two cores share the work. What they share depends on the implementation:

======================  ==========================================================================================
implementation          cores
======================  ==========================================================================================
shard_on_block          PING_PONG: even blocks to core 0, odd ones to core 1, each with an output of its own.
                        The two outputs are added at the end. HI_LO: halves of the blocks, which write one output.
shard_on_block_mx       static blocks: the first half to core 0, the other to core 1; the remaining blocks in turn,
                        only where ``conditions`` has a flag. Outputs as in shard_on_block
shard_on_i, _dropping   every block on both cores, each with half of I: the two down sums are added
shard_on_i_hybrid       likewise: ``num_static_block`` blocks, then a loop that ends at ``sum(conditions)``
shard_on_i_mx, _hybrid  likewise; the halves are whole tiles of 512
baseline_shard_hidden   every block on both cores, each with half of H: the gate and up sums are added
======================  ==========================================================================================

Sums that leave a core or a block are fp32 and rounded once at the end. With ``accumulation="device"`` they are rounded
to the output's dtype each time: a core's down sums before the other's are added, and the running output after each
block.

The documents do not say which blocks are static if ``n_static_blocks`` is -1: here all but ``n_dynamic_blocks``, and
without conditions all. Nor do they say whether a core's sums are rounded before or after the weight scale: here before.
They do not say whether half sums of gate and up are rounded: here they are not.

Sources: nki-library 2.29 ``core.moe.moe_cte``; 2.31 for HI_LO. Nothing here has run on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_neuron_moe.backends.torch.ffn_forward import FFNWeights
from hf_neuron_moe.backends.torch.tiles import Span
from hf_neuron_moe.formats.constants import LANES
from hf_neuron_moe.formats.moe_mx import TILE
from hf_neuron_moe.reference.expert_rows import ExpertRows, epilogue_loader, quantized_hidden
from hf_neuron_moe.reference.moe_cte_problem import Problem
from hf_neuron_moe.reference.moe_cte_rules import BLOCK, HYBRID, MX
from hf_neuron_moe.reference.moe_cte_saved import saved_buffers
from hf_neuron_moe.reference.moe_types import BlockShardStrategy
from hf_neuron_moe.reference.tiled_product import BANK, PARTITIONS, cut, tiled_product
from hf_neuron_moe.reference.upstream_bugs import reduced_rows, with_down_bias

CORES = 2


class Turn(NamedTuple):
    """One block, and the output that it is added to."""

    block: int
    output: int = 0


class Share(NamedTuple):
    """What one core has of the axes."""

    hidden: slice
    inner: slice


@torch.no_grad()
def walk(problem: Problem, *, shard_hidden: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the output ``[T', H]`` and, where they are saved, ``[N, 2, I, B]`` and ``[N, B, H]``, or None."""
    loop = BlockWalk(with_sink_row(problem), shard_hidden)
    for turn in turns(problem):
        loop.run(turn)
    return loop.reduced()[: len(problem.hidden)], loop.gate_up_N2IB, loop.down_NBH


def with_sink_row(problem: Problem) -> Problem:
    """Return the call with a zero row T in the token tensors: skip_token reads zeros where it skips a load."""
    given, scales = problem.given, problem.scales
    if not given.skip_dma.skip_token:
        return problem
    affinities_TE = given.expert_affinities_masked.reshape(-1, problem.experts)
    hidden, affinities = (pad(rows, (0, 0, 0, 1)) for rows in (problem.hidden, affinities_TE))
    factors = (scales.gate_up_in_T, scales.down_in_T)
    gate_up_in_T, down_in_T = (None if factor is None else pad(factor, (0, 0, 0, 1)) for factor in factors)
    return replace(
        problem,
        given=replace(given, hidden_states=hidden, expert_affinities_masked=affinities),
        scales=replace(scales, gate_up_in_T=gate_up_in_T, down_in_T=down_in_T),
    )


def turns(problem: Problem) -> Iterator[Turn]:
    """Yield the blocks in the order in which the cores take them."""
    given, blocks = problem.given, problem.rows.blocks
    flags = [True] * blocks if given.conditions is None else (given.conditions.reshape(-1) != 0).tolist()
    options = given.spec.shard_on_block
    if given.kind in HYBRID:
        static = given.spec.shard_on_I.num_static_block
        first = max(blocks - problem.experts, 0) if static is None else static
        yield from map(Turn, range(max(first, min(sum(flags), blocks))))
    elif given.kind not in BLOCK:
        yield from map(Turn, range(blocks))
    elif given.kind in MX:
        first = blocks if given.conditions is None else max(blocks - options.n_dynamic_blocks, 0)
        first = first if options.n_static_blocks < 0 else options.n_static_blocks
        yield from _side_by_side(*(range(first)[half] for half in cut(first, -(-first // CORES) or 1)))
        dynamic = [range(first + core, blocks, CORES) for core in range(CORES)]
        yield from (turn for turn in _side_by_side(*dynamic) if flags[turn.block])
    elif options.block_sharding_strategy is BlockShardStrategy.HI_LO:
        halves = (range(blocks)[half] for half in cut(blocks, -(-blocks // CORES) or 1))
        yield from (turn._replace(output=0) for turn in _side_by_side(*halves))
    else:
        yield from _side_by_side(*(range(core, blocks, CORES) for core in range(CORES)))


def _side_by_side(*blocks: range) -> Iterator[Turn]:
    """Yield the first block of every core, then the second ones, and so on."""
    for step in range(max(map(len, blocks), default=0)):
        yield from (Turn(own[step], core) for core, own in enumerate(blocks) if step < len(own))


def shares(problem: Problem, inner: int, shard_hidden: bool) -> list[Share]:
    """Return what each core has of H and of I (`inner`, with MX padded to whole tiles)."""
    hidden = problem.hidden.shape[1]
    if shard_hidden:
        return [Share(half, slice(0, inner)) for half in cut(hidden, -(-hidden // CORES))]
    if problem.given.kind in BLOCK:
        return [Share(slice(0, hidden), slice(0, inner))]
    unit = TILE if problem.mx else 1
    return [Share(slice(0, hidden), half) for half in cut(inner, -(-inner // (CORES * unit)) * unit)]


@dataclass
class BlockWalk:
    """The state of the loop: the running outputs and the saved activations."""

    problem: Problem  # with a sink row
    shard_hidden: bool

    def __post_init__(self) -> None:
        problem, given = self.problem, self.problem.given
        loader = epilogue_loader(problem)
        self.scratch, self.operand = loader.scratch, loader.compute.rounded
        self.hidden_TH = quantized_hidden(problem, loader.scratch)
        self.sink = len(self.hidden_TH) - 1  # T
        self.device = given.accumulation == "device"
        self.dtype = given.accumulation_dtype or given.hidden_states.dtype
        outputs = CORES if given.kind in BLOCK else 1
        running = self.dtype if self.device else torch.float32
        self.total_CTH = self.hidden_TH.new_zeros((outputs, *self.hidden_TH.shape), dtype=running)
        self.gate_up_N2IB, self.down_NBH = saved_buffers(problem)
        self.loaded: tuple[int, FFNWeights] | None = None

    def run(self, turn: Turn) -> None:
        """Compute one block and add it to its output."""
        rows = self.rows(turn.block)
        weights = self.weights(rows.expert)
        parts = shares(self.problem, len(weights.up_IH), self.shard_hidden)
        inter_BI = self.intermediate(turn.block, rows, weights, parts)
        out_BH = self.down(inter_BI, weights, parts)
        for tile in cut(len(out_BH), PARTITIONS):
            self.finish_(turn.block, rows, out_BH, tile)
        self.scatter_(turn.output, rows.token_R, out_BH)

    def rows(self, block: int) -> ExpertRows:
        """Return the slots of a block; those without a token point to the sink row."""
        given, experts = self.problem.given, self.problem.experts
        slots = slice(block * given.block_size, (block + 1) * given.block_size)
        token_B = given.token_position_to_id.reshape(-1)[slots].long()
        token_B = torch.where(token_B < 0, self.sink, token_B)
        expert = min(int(given.block_to_expert.reshape(-1)[block]), experts - 1)
        affinity_B1 = given.expert_affinities_masked.reshape(-1, experts)[token_B, expert, None].float()
        if "pre_scale_first_tile" in given.upstream_bugs:
            affinity_B1 = affinity_B1[torch.arange(len(affinity_B1)) % BANK]
        if "skip_token_pre_scale_zero" in given.upstream_bugs:
            affinity_B1 = torch.zeros_like(affinity_B1)
        return ExpertRows(self.problem, self.scratch, expert, token_B, affinity_B1)

    def weights(self, expert: int) -> FFNWeights:
        """Return the projections as fp32 operands; a block of the same expert reuses them (skip_weight)."""
        if self.loaded is None or self.loaded[0] != expert:
            parts = (part.to(self.operand).float() for part in self.problem.weights(expert)[:3])
            self.loaded = (expert, FFNWeights(*parts))
        return self.loaded[1]

    def intermediate(self, block: int, rows: ExpertRows, weights: FFNWeights, parts: Sequence[Share]) -> Tensor:
        """Return the down projection's operand ``[B, I]``, and save the pre-activations."""
        x = rows.inputs(self.hidden_TH)
        whole = Span(0, len(rows.token_R), len(rows.token_R))
        x_BH = x.take(whole).to(self.operand).float()
        gate_BI, up_BI = (x_BH.new_zeros((len(x_BH), len(weights.up_IH))) for _ in range(2))
        for share in parts:
            contraction = None
            if self.problem.mx:  # a tile is 128 partitions of 4 lanes that lie H / 4 apart
                place_H = torch.arange(x_BH[:, share.hidden].shape[1], device=x_BH.device).view(LANES, -1, PARTITIONS)
                contraction = [place_H[:, tile].reshape(-1) for tile in range(place_H.shape[1])]
            for half, (sums_BI, weight_IH) in enumerate(zip((gate_BI, up_BI), weights[:2])):
                if half == 1 or rows.needs_gate:
                    left_BH, right_HI = x_BH[:, share.hidden], weight_IH[share.inner, share.hidden].t()
                    product = tiled_product(left_BH, right_HI, rows=BANK, columns=PARTITIONS, contraction=contraction)
                    sums_BI[:, share.inner] += product
        columns = Span(0, len(weights.up_IH), len(weights.up_IH))
        rows.pre_activations_(gate_BI, up_BI, whole, columns)
        if self.gate_up_N2IB is not None:
            for half, values_BI in enumerate((gate_BI, up_BI)):
                self.gate_up_N2IB[block, half] = values_BI[:, : self.problem.inner].t()
        return rows.intermediate(gate_BI, up_BI, whole, columns)

    def down(self, inter_BI: Tensor, weights: FFNWeights, parts: Sequence[Share]) -> Tensor:
        """Return the down sums ``[B, H]``: the cores' parts along I added, those along H side by side."""
        out_BH = inter_BI.new_zeros((len(inter_BI), len(weights.down_HI)))
        for share in parts:
            left_BI, right_IH = inter_BI[:, share.inner], weights.down_HI[:, share.inner].t()
            columns = share.hidden if self.shard_hidden else slice(None)
            contraction = cut(left_BI.shape[1], TILE) if self.problem.mx else None
            product = tiled_product(
                left_BI, right_IH[:, columns], rows=PARTITIONS, columns=BANK, contraction=contraction
            )
            partial = self.device and share.inner != slice(0, len(weights.up_IH))
            out_BH[:, columns] += product.to(self.dtype) if partial else product
        return out_BH

    def finish_(self, block: int, rows: ExpertRows, out_BH: Tensor, tile: slice) -> None:
        """Turn the down sums of one tile of slots into what is added to the output, and save them, in place."""
        down_NBH = self.down_NBH
        save = None if down_NBH is None else down_NBH[block, tile].copy_
        first_of_a_core = tile.start in (0, len(out_BH) // CORES)
        if "no_affinity_bias_first_tile" in self.problem.given.upstream_bugs and not first_of_a_core:
            rows = replace(rows, problem=with_down_bias(self.problem, 0))
        rows.part(tile).finish_(out_BH[tile], save)

    def scatter_(self, output: int, token_B: Tensor, out_BH: Tensor) -> None:
        """Add the rows to the running output, which is rounded, or store them; the sink row's are never read."""
        total_TH = self.total_CTH[output]
        if self.problem.given.is_tensor_update_accumulating:
            out_BH = out_BH + total_TH[token_B]
        total_TH[token_B] = out_BH.to(total_TH.dtype)

    def reduced(self) -> Tensor:
        """Return the sum of the cores' outputs, with a zero sink row."""
        total_TH = self.total_CTH.float().sum(0)
        total_TH[self.sink] = 0
        if "last_rows_not_reduced" in self.problem.given.upstream_bugs:
            rows = reduced_rows(self.sink, self.problem.given.skip_dma.skip_token)
            total_TH[rows:] = self.total_CTH[0, rows:]
        return total_TH.to(self.dtype)

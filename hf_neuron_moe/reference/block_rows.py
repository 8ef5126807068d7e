"""The real slots of a block plan as rows in expert order, ready for the tiled experts.

Letters: N blocks of B slots, E experts, R real (token, expert) pairs, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_neuron_moe.checks import Rule, shown
from hf_neuron_moe.config import ACCUMULATIONS
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.reference.moe_types import SkipMode

FLOATS = (torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
ROUTING = {"expert_affinities_masked": FLOATS, "token_position_to_id": INTEGERS, "block_to_expert": INTEGERS}
"""Dtypes of a routing."""
EXECUTIONS = ("fast", "tiles")
LAYOUTS = {
    "hidden_states": "[T', H]",
    "gate_up_proj_weight": "[E, H, 2, I]",
    "down_proj_weight": "[E, I, H]",
    "expert_affinities_masked": "[T' * E, 1]",
}
"""Shapes of what all blockwise functions have; T' are the rows of the token tensors."""


@dataclass(frozen=True)
class BlockRows:
    """The real slots of a plan."""

    slot_R: Tensor  # position of each pair among the N * B slots
    token_R: Tensor  # its token
    expert_R: Tensor  # its expert
    runs: list[tuple[int, int, int]]  # (expert, first row, end row) of every expert with rows
    blocks: int  # N
    block_size: int  # B
    # Of every run, its first slot if its rows fill consecutive slots from the start of a block on (as in every plan of
    # build_block_plan), else -1.
    first_slots: list[int]

    def affinity(self, expert_affinities_masked: Tensor, experts: int) -> Tensor:
        """Return each pair's routing weight, fp32 ``[R]``."""
        return expert_affinities_masked.reshape(-1, experts)[self.token_R, self.expert_R].float()

    def used_blocks(self) -> Tensor:
        """Return which blocks have real tokens, bool ``[N]``."""
        used = torch.zeros(self.blocks, dtype=torch.bool, device=self.slot_R.device)
        used[self.slot_R // self.block_size] = True
        return used

    def places(self, run: int) -> tuple[Tensor, Tensor]:
        """Return block and place in it of every row of a run."""
        _, start, end = self.runs[run]
        return self.slot_R[start:end] // self.block_size, self.slot_R[start:end] % self.block_size


def block_rows(
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    block_size: int,
    tokens: int,
    experts: int,
    *,
    without_gaps: bool = False,
) -> BlockRows:
    """Check a plan and collect its real slots.

    `token_position_to_id` is int ``[N * B]``, where -1 and T mark unused slots, `block_to_expert` int ``[N]`` or
    ``[N, 1]``, where the id E is allowed for blocks without tokens. With `without_gaps`, unused slots before used ones
    of the same expert are an error: MX groups are formed by slot, so such gaps would change the values.
    """
    owner_N, ids = block_to_expert.reshape(-1).long(), token_position_to_id.reshape(-1).long()
    blocks, name = len(owner_N), "token_position_to_id"
    fits = len(ids) == blocks * block_size
    _require(fits, name, f"of size N * block_size = {blocks * block_size}", list(token_position_to_id.shape))
    slot_R = ((ids >= 0) & (ids < tokens)).nonzero().reshape(-1)
    expert_R = owner_N[slot_R // block_size]
    in_range = bool(((ids >= -1) & (ids <= tokens)).all())
    _require(in_range, name, f"made of ids -1..{tokens}", "an id outside of that")
    known = bool(((owner_N >= 0) & (owner_N <= experts)).all()) and bool((expert_R < experts).all())
    rule = f"made of ids 0..{experts - 1} (and {experts} for blocks without tokens)"
    _require(known, "block_to_expert", rule, owner_N.tolist())
    if bool((expert_R.diff() < 0).any()):
        expert_R, order = expert_R.sort(stable=True)
        slot_R = slot_R[order]
    token_R = ids[slot_R]
    pairs = torch.bincount(token_R * experts + expert_R, minlength=1)
    _require(int(pairs.max()) <= 1, name, "made of tokens that occur once per expert", "a repeated pair")
    count_E = torch.bincount(expert_R, minlength=experts)
    end_E = count_E.cumsum(0)
    padded = torch.nn.functional.pad(slot_R, (0, 1))  # so that an idle last expert reads something
    first_E, last_E = padded[end_E - count_E], padded[(end_E - 1).clamp(min=0)]
    dense_E = (last_E - first_E == count_E - 1) & (first_E % block_size == 0)
    table = torch.stack([count_E, end_E, torch.where(dense_E, first_E, -1)], 1).tolist()  # one copy to the host
    busy = [(expert, *row) for expert, row in enumerate(table) if row[0]]
    runs, first_slots = [(expert, end - count, end) for expert, count, end, _ in busy], [row[3] for row in busy]
    if without_gaps and -1 in first_slots:
        expert = runs[first_slots.index(-1)][0]
        _require(False, name, "filled without gaps per expert", f"gaps at expert {expert}")
    return BlockRows(slot_R, token_R, expert_R, runs, blocks, block_size, first_slots)


def check_block_size(size: object, argument: str = "block_size") -> None:
    """Raise ShapeError for what is not a positive int."""
    if type(size) is not int or size <= 0:
        raise ShapeError.about(argument, "a positive int", repr(size), "Pass the block size the plan was made with.")


def execution_rules(execute: object, accumulation: object, bugs: object) -> Iterator[Rule]:
    """Rules of the options that both functions have; ``upstream_bugs`` looks at the names themselves."""
    fix = "'tiles' walks the documented loops, slowly; 'fast' computes the same expert by expert."
    yield Rule(execute in EXECUTIONS, "execute", f"one of {', '.join(EXECUTIONS)}", repr(execute), fix)
    fix = "'device' rounds sums between blocks and cores as the kernels do; 'convention' rounds each sum once."
    fits = accumulation in ACCUMULATIONS
    yield Rule(fits, "accumulation", f"one of {', '.join(ACCUMULATIONS)}", repr(accumulation), fix)
    fits = isinstance(bugs, tuple) and all(isinstance(name, str) for name in bugs)
    yield Rule(fits, "upstream_bugs", "a tuple of names", shown(bugs), "known_bugs returns such a tuple.")


def check_sink_row(given: Mapping[str, Any], skip_dma: SkipMode | None) -> None:
    """Raise ShapeError for token tensors without a zero sink row, unless `skip_dma` says that there is none.

    The last token of such a call would be taken for the sink row, and get neither output nor gradients. The output
    gradient's row may hold anything finite: its affinity is zero. Traced, fake and meta tensors are not read.
    """
    if skip_dma is not None and skip_dma.skip_token:
        return
    rows = len(given["hidden_states"])
    for name in ("hidden_states", "expert_affinities_masked"):
        tensor = given[name]
        if torch.compiler.is_compiling():  # first: the rest cannot be traced
            continue
        if tensor.is_meta or isinstance(tensor, FakeTensor) or torch._is_functional_tensor(tensor):
            continue
        last = tensor[-(len(tensor) // max(rows, 1)) :]  # one row, or a row's E affinities
        if not last.numel() or bool(last.any()):
            got = f"row {rows - 1} with nonzero values" if rows else "no rows"
            fix = "Append a row of zeros, or pass SkipMode(skip_token=True) and a plan built with skip_token=True."
            raise ShapeError.about(name, "given with a sink row of zeros as its last row", got, fix)


def check_one_block_per_expert(block_to_expert: Tensor, experts: int, expected: str, fix: str) -> None:
    """Raise ShapeError, with these words, for a dropping plan that is not one block per expert, in order."""
    owners = block_to_expert.reshape(-1)
    if owners.numel() != experts or not bool((owners == torch.arange(experts, device=owners.device)).all()):
        raise ShapeError.about("block_to_expert", expected, owners.tolist(), fix)


def _require(holds: bool, argument: str, expected: str, got: object) -> None:
    if not holds:
        raise ShapeError.about(argument, expected, got, "Use build_block_plan.")

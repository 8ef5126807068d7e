"""``moe_cte``: the forward of the blockwise MoE kernels, all seven implementations, as one function.

Legend: T tokens, T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), R rows of one
expert, H hidden, I intermediate, E experts, N blocks of B slots.

Per block of expert e, with gathered rows X and affinities a, matmuls accumulating in fp32::

    g, u = X Wg, X Wu;  times the FP8 scales;  plus the biases;  min with the upper, then max with the lower limits
    h = act(g) * u;     y = (h Wd) times the FP8 scale, plus the down bias;     out += a * y

Only real rows are computed, expert by expert over tiles. Between the matmuls: dequantization scale, activation scale,
bias, clamp, then the pre-activations are rounded and saved; affinity of PRE_SCALE, activation, product, affinity of
multiply-on-I, rounding, MX quantization. ``block_walk`` computes the same in the kernels' order. docs/kernels.md has
what the devices return, how to read it off the result here, and what upstream gets wrong.

Sources: nki-library 2.29 ``core.moe.moe_cte``, its torch reference and the shard_on_i kernel; 2.30 direct scales, 2.31
activation scales and MX storage options, 2.33 ``accumulation_dtype``, ``skip_gate_proj`` and SquaredReLU.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, ffn_forward
from hf_neuron_moe.backends.torch.tiles import tile_loader
from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.block_walk import walk
from hf_neuron_moe.reference.expert_rows import ExpertRows, epilogue_loader, quantized_hidden
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_problem import Place, Problem, check_arguments
from hf_neuron_moe.reference.moe_cte_saved import saved_blocks
from hf_neuron_moe.reference.moe_types import ActFnType, taking
from hf_neuron_moe.reference.upstream_bugs import with_bugs


class MoEForward(NamedTuple):
    """What the forward returns; the activations are None unless the implementation returns them.

    By the golden convention PRE_SCALE multiplies the input, so that the pre-activations contain the affinity, and the
    down activations contain the down bias.
    """

    output: Tensor  # [T', H], a sink row is zero
    gate_up_activations_T: Tensor | None  # [N, 2, I, B] pre-activations after scale, bias and clamp, before PRE_SCALE
    down_activations: Tensor | None  # [N, B, H] after the scale, before bias and affinity; None with the affinity on I


@public
@taking(Arguments)
def moe_cte(arguments: Arguments) -> MoEForward:
    """Forward of the experts over a block plan: the output, and the activations that the implementation returns.

    docs/kernels.md says what is refused where.
    """
    return forward(arguments)


@torch.no_grad()
def forward(arguments: Arguments, *, shard_hidden: bool = False) -> MoEForward:
    """Check and compute a call; :func:`moe_cte` and the direct kernels end here.

    `shard_hidden` says that the two cores of the kernel divide H, which only the tiles show.
    """
    problem = with_bugs(check_arguments(arguments))
    if arguments.walks:
        return MoEForward(*walk(problem, shard_hidden=shard_hidden))
    plain = _is_plain(problem)
    loader, saved = epilogue_loader(problem), saved_blocks(problem)
    if plain:
        loader = tile_loader("fp32" if problem.rounded == torch.float32 else "bf16", problem.hidden.device)
    total_TH = torch.zeros(problem.hidden.shape, dtype=torch.float32, device=problem.hidden.device)
    hidden = quantized_hidden(problem, loader.scratch)
    for number, (expert, start, end) in enumerate(problem.rows.runs):
        part = slice(start, end)
        rows = ExpertRows(problem, loader.scratch, expert, problem.rows.token_R[part], problem.affinity_R[part, None])
        out_RH = loader.scratch.get("expert_out", (end - start, hidden.shape[1]), torch.float32)
        halves = [
            loader.scratch.get(name, (end - start, problem.inner), problem.saved_dtype)
            for name in ("saved_gate", "saved_up")
            if saved is not None
        ]
        ffn_forward(
            rows.inputs(hidden),
            problem.weights(expert),
            loader,
            out_RH,
            save=Checkpoints(*halves),
            scale_R1=rows.affinity_R1 if problem.place is Place.INTERMEDIATE else None,
            epilogue=None if plain else rows,
        )
        if saved is not None:
            saved.put_gate_up(number, *halves)
        rows.finish_(out_RH, None if saved is None else partial(saved.put_down, number))
        total_TH.index_add_(0, rows.token_R, out_RH)
    output = total_TH.to(problem.given.accumulation_dtype or problem.hidden.dtype)
    return MoEForward(output, *((None, None) if saved is None else saved.finish()))


def _is_plain(problem: Problem) -> bool:
    """Whether the experts are ``silu(gate) * up`` with nothing in between, which the tiles do by themselves."""
    return (
        problem.given.activation_function is ActFnType.SiLU
        and not problem.given.skip_gate_proj
        and not problem.mx
        and problem.bias_E2I is None
        and problem.scales.gate_up_E2X is None
        and problem.scales.gate_up_block is None
        and problem.place is not Place.PRE_ACTIVATIONS
        and not problem.given.clamped
    )

"""``moe_cte``: the forward of the blockwise MoE kernels, all seven implementations, as one function.

Legend: T tokens, T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), H hidden, I
intermediate, E experts, N blocks of B slots.

Per block of expert e, with gathered rows X and affinities a, matmuls accumulating in fp32::

    g, u = X Wg, X Wu;  times the FP8 scales;  plus the biases;  min with the upper, then max with the lower limits
    h = act(g) * u;     y = (h Wd) times the FP8 scale, plus the down bias;     out += a * y

docs/kernels.md has what the devices return, how to read it off the result here, and what upstream gets wrong.

Sources: nki-library 2.29 ``core.moe.moe_cte``; 2.30 direct scales, 2.31 activation scales and MX storage options, 2.33
``accumulation_dtype``, ``skip_gate_proj`` and SquaredReLU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.errors import public
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_problem import check_arguments
from hf_neuron_moe.reference.moe_cte_run import run
from hf_neuron_moe.reference.moe_types import taking


class MoEForward(NamedTuple):
    """What the forward returns; the activations are None unless the implementation returns them.

    By the golden convention PRE_SCALE multiplies the input, so that the pre-activations contain the affinity, and the
    down activations contain the down bias.
    """

    output: Tensor  # [T', H], a sink row is zero
    gate_up_activations_T: Tensor | None  # [N, 2, I, B] pre-activations after scale, bias and clamp, before PRE_SCALE
    down_activations: Tensor | None  # [N, B, H] after the scale, before bias and affinity; None with the affinity on I


@torch.no_grad()
def forward(arguments: Arguments) -> MoEForward:
    """Check and compute a call; :func:`moe_cte` and the direct kernels end here."""
    return MoEForward(*run(check_arguments(arguments)))


@public
@taking(Arguments)
def moe_cte(arguments: Arguments) -> MoEForward:
    """Forward of the experts over a block plan: the output, and the activations that the implementation returns.

    The arguments are the fields of :class:`~hf_neuron_moe.reference.moe_cte_arguments.Arguments`, described there and
    in docs/kernels.md.
    """
    return forward(arguments)

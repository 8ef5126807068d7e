"""FP8 scales of the blockwise MoE forward: weight scales of every documented shape, activation scales.

Legend: E experts, H hidden, I intermediate, T' rows of the token tensors. A scale multiplies the fp32 result of its
matmul before the bias; only 256 x 256 block scales multiply the weights, because they change along the contraction.

================  ============================================  =========================================
meaning           gate_up_proj_scale                            down_proj_scale
================  ============================================  =========================================
output channel    ``[E,1,2I]`` or ``[1,1,2I]``, gate first      ``[E,1,H]`` or ``[1,1,H]``
tensor            ``[E,1,2]``, ``[1,1,2]`` or ``[E,2,1]``       ``[E,1,1]``, ``[1,1,1]`` or ``[E,1]``
256 x 256 block   ``[E,H/256,2,I/256,128]``, copies at the end  ``[E,I/256,H/256,128]``
================  ============================================  =========================================

Upstream's generator also knows a down scale pre-permuted to ``[E,128,H/128]``; no kernel takes it, so it is refused.

Sources: nki-library 2.29 ``bwmm_shard_on_I`` (row), 2.31 (tensor, block, activation scales).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_neuron_moe.checks import Rule, check_dtype, check_multiple, check_rules
from hf_neuron_moe.errors import ConfigError, ShapeError

SCALE_BLOCK = 256
_FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Scales:
    """All scales of a call in one form, fp32."""

    gate_up_E2X: Tensor | None = None  # on the gate and up sums, X = I or 1
    down_EX: Tensor | None = None  # on the down sums, X = H or 1
    gate_up_block: Tensor | None = None  # [E, H/256, 2, I/256], on the weights
    down_block: Tensor | None = None  # [E, I/256, H/256], on the weights
    gate_up_in_T: Tensor | None = None  # activation scale [T', 1] on the gate and up sums of a token
    down_in_T: Tensor | None = None  # the same on the down sums


def require_pair(first: Tensor | None, second: Tensor | None, names: tuple[str, str]) -> bool:
    """Return whether both of a pair are given; raise ConfigError if only one is, where upstream ignores both."""
    if (first is None) != (second is None):
        missing, given = names if first is None else names[::-1]
        fix = f"Pass both or neither; zeros (for biases) or ones (for scales) stand for a missing {missing}."
        raise ConfigError.about(missing, f"given together with {given}", "None", fix)
    return first is not None


def read_scales(
    weights: tuple[Tensor | None, Tensor | None],
    inputs: tuple[Tensor | None, Tensor | None],
    experts: int,
    hidden: int,
    inner: int,
    rows: int,
) -> Scales:
    """Check FP8 scales and bring them into one form.

    `weights` are of one kind of the table at the top of this file. `inputs` are activation scales per token
    ``[T', 1]`` or per expert, ``[E, 2, 1]`` and ``[E, 1]``. They multiply after the weight scale: the caller has
    divided the hidden states by the first. No value is quantized here.
    """
    (gate_up, down), (gate_up_in, down_in) = weights, inputs
    weighted = require_pair(gate_up, down, ("gate_up_proj_scale", "down_proj_scale"))
    if require_pair(gate_up_in, down_in, ("gate_up_in_scale", "down_in_scale")) and not weighted:
        expected, fix = (
            "given together with gate_up_proj_scale and down_proj_scale",
            "Activation scales multiply after the weight scales; pass both weight scales.",
        )
        raise ConfigError.about("gate_up_in_scale", expected, "an activation scale alone", fix)
    if gate_up is None or down is None:
        return Scales()
    check_dtype(gate_up, _FLOATS, "gate_up_proj_scale")
    check_dtype(down, _FLOATS, "down_proj_scale")
    read = _block_scales if gate_up.dim() == 5 or down.dim() == 4 else _weight_scales
    scales = read(gate_up.float(), down.float(), experts, hidden, inner)
    if gate_up_in is None or down_in is None:
        return scales
    return _with_inputs(scales, gate_up_in, down_in, experts, rows)


def _weight_scales(gate_up: Tensor, down: Tensor, experts: int, hidden: int, inner: int) -> Scales:
    leads = ((experts, 1), (1, 1))
    shapes = [(experts, 2, 1), *((*lead, last) for lead in leads for last in (2 * inner, 2))]
    words = f"[E,1,2I], [1,1,2I], [E,1,2], [1,1,2] or [E,2,1], E={experts}, I={inner}"
    down_shapes = [(experts, 1), *((*lead, last) for lead in leads for last in (hidden, 1))]
    down_words = f"[E,1,H], [1,1,H], [E,1,1], [1,1,1] or [E,1], E={experts}, H={hidden}"
    check_rules(
        [
            _shape_rule("gate_up_proj_scale", gate_up, shapes, words),
            _shape_rule("down_proj_scale", down, down_shapes, down_words),
        ]
    )
    gate_up_E2X = gate_up.view(len(gate_up), 2, -1)
    return Scales(gate_up_E2X.expand(experts, -1, -1), down.view(len(down), -1).expand(experts, -1))


def _block_scales(gate_up: Tensor, down: Tensor, experts: int, hidden: int, inner: int) -> Scales:
    rule = "scales are per 256 x 256 block"
    check_multiple(hidden, SCALE_BLOCK, "H of gate_up_proj_scale", rule)
    check_multiple(inner, SCALE_BLOCK, "I of gate_up_proj_scale", rule)
    h_blocks, i_blocks = hidden // SCALE_BLOCK, inner // SCALE_BLOCK
    for name, scale, shape, words in (
        ("gate_up_proj_scale", gate_up, (experts, h_blocks, 2, i_blocks, 128), "[E, H/256, 2, I/256, 128]"),
        ("down_proj_scale", down, (experts, i_blocks, h_blocks, 128), "[E, I/256, H/256, 128]"),
    ):
        check_rules([_shape_rule(name, scale, [shape], f"{words} = {list(shape)}")])
        if not torch.equal(scale, scale[..., :1].expand_as(scale)):
            expected = "128 copies of each block's scale along its last axis"
            raise ShapeError.about(name, expected, list(scale.shape), _RESHAPE)
    return Scales(gate_up_block=gate_up[..., 0], down_block=down[..., 0])


def _with_inputs(scales: Scales, gate_up_in: Tensor, down_in: Tensor, experts: int, rows: int) -> Scales:
    check_dtype(gate_up_in, _FLOATS, "gate_up_in_scale")
    check_dtype(down_in, _FLOATS, "down_in_scale")
    per_token = gate_up_in.dim() == 2
    for name, scale, per_expert, words in (
        ("gate_up_in_scale", gate_up_in, (experts, 2, 1), "[T', 1] or [E, 2, 1]"),
        ("down_in_scale", down_in, (experts, 1), "[T', 1] or [E, 1], as gate_up_in_scale"),
    ):
        shape = (rows, 1) if per_token else per_expert
        check_rules([_shape_rule(name, scale, [shape], f"{words}, here {list(shape)}")])
    gate_up_E2X, down_EX = gate_up_in.float(), down_in.float()
    if per_token:
        return replace(scales, gate_up_in_T=gate_up_E2X, down_in_T=down_EX)
    # One factor per expert folds into the weight scales, but for blocks, where there is none to fold into.
    if scales.gate_up_E2X is not None and scales.down_EX is not None:
        gate_up_E2X, down_EX = scales.gate_up_E2X * gate_up_E2X, scales.down_EX * down_EX
    return replace(scales, gate_up_E2X=gate_up_E2X, down_EX=down_EX)


_RESHAPE = "Reshape or expand the scale to one of the documented layouts."


def _shape_rule(argument: str, scale: Tensor, shapes: Sequence[tuple[int, ...]], words: str) -> Rule:
    return Rule(tuple(scale.shape) in shapes, argument, f"of shape {words}", list(scale.shape), _RESHAPE, ShapeError)

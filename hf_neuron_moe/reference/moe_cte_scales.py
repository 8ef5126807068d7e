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

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_dtype, check_multiple
from hf_neuron_moe.errors import ConfigError, ShapeError

SCALE_BLOCK = 256
_FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Scales:
    """All scales of a call in one form, fp32.

    Attributes:
        gate_up_E2X: on the gate and up sums, X = I or 1.
        down_EX: on the down sums, X = H or 1.
        gate_up_block: ``[E, H/256, 2, I/256]``, on the weights.
        down_block: ``[E, I/256, H/256]``, on the weights.
        gate_up_in_T: activation scale ``[T', 1]`` on the gate and up sums of a token.
        down_in_T: the same on the down sums.
    """

    gate_up_E2X: Tensor | None = None
    down_EX: Tensor | None = None
    gate_up_block: Tensor | None = None
    down_block: Tensor | None = None
    gate_up_in_T: Tensor | None = None
    down_in_T: Tensor | None = None


def require_pair(first: Tensor | None, second: Tensor | None, names: tuple[str, str]) -> bool:
    """Return whether both of a pair are given.

    Raises:
        ConfigError: only one is. Upstream ignores both then.
    """
    if (first is None) != (second is None):
        missing, given = names if first is None else names[::-1]
        raise ConfigError.about(
            missing,
            f"given together with {given}",
            "None",
            f"Pass both or neither; zeros (for biases) or ones (for scales) stand for a missing {missing}.",
        )
    return first is not None


def read_scales(
    gate_up: Tensor | None,
    down: Tensor | None,
    gate_up_in: Tensor | None,
    down_in: Tensor | None,
    sizes: tuple[int, int, int, int],
) -> Scales:
    """Bring FP8 scales into one form.

    Args:
        gate_up: weight scale of the gate and up projections, see the table at the top of this file.
        down: weight scale of the down projection, of the same kind.
        gate_up_in: activation scale per token ``[T', 1]`` or per expert ``[E, 2, 1]``, multiplied after the weight
            scale. Whoever passes one has divided the hidden states by it.
        down_in: per token ``[T', 1]`` or per expert ``[E, 1]``, likewise. No value is quantized here.
        sizes: E, H, I, T'.

    Raises:
        ConfigError: a scale without its partner.
        ShapeError, DTypeError: none of the documented shapes.
    """
    experts, hidden, inner, rows = sizes
    weights = require_pair(gate_up, down, ("gate_up_proj_scale", "down_proj_scale"))
    inputs = require_pair(gate_up_in, down_in, ("gate_up_in_scale", "down_in_scale"))
    if inputs and not weights:
        raise ConfigError.about(
            "gate_up_in_scale",
            "given together with gate_up_proj_scale and down_proj_scale",
            "an activation scale alone",
            "Activation scales multiply after the weight scales; pass both weight scales.",
        )
    if gate_up is None or down is None:
        return Scales()
    scales = _weight_scales(gate_up, down, experts, hidden, inner)
    if gate_up_in is None or down_in is None:
        return scales
    return _with_inputs(scales, gate_up_in, down_in, experts, rows)


def _weight_scales(gate_up: Tensor, down: Tensor, experts: int, hidden: int, inner: int) -> Scales:
    check_dtype(gate_up, _FLOATS, argument="gate_up_proj_scale")
    check_dtype(down, _FLOATS, argument="down_proj_scale")
    gate_up, down = gate_up.float(), down.float()
    if gate_up.dim() == 5 or down.dim() == 4:
        return _block_scales(gate_up, down, experts, hidden, inner)
    shape = tuple(gate_up.shape)
    leads = ((experts, 1), (1, 1))
    if shape[:2] in leads and shape[2:] == (2 * inner,):
        gate_up_E2X = gate_up.view(-1, 2, inner)
    elif shape[:2] in leads and shape[2:] == (2,):
        gate_up_E2X = gate_up.view(-1, 2, 1)
    elif shape == (experts, 2, 1):
        gate_up_E2X = gate_up
    else:
        expected = f"of shape [E,1,2I], [1,1,2I], [E,1,2], [1,1,2] or [E,2,1], E={experts}, I={inner}"
        raise _shape("gate_up_proj_scale", expected, gate_up)
    shape = tuple(down.shape)
    if shape == (experts, 1) or (shape[:2] in leads and shape[2:] in ((hidden,), (1,))):
        down_EX = down.view(shape[0], -1)
    else:
        expected = f"of shape [E,1,H], [1,1,H], [E,1,1], [1,1,1] or [E,1], E={experts}, H={hidden}"
        raise _shape("down_proj_scale", expected, down)
    return Scales(gate_up_E2X.expand(experts, -1, -1), down_EX.expand(experts, -1))


def _block_scales(gate_up: Tensor, down: Tensor, experts: int, hidden: int, inner: int) -> Scales:
    rule = "scales are per 256 x 256 block"
    check_multiple(hidden, SCALE_BLOCK, "H of gate_up_proj_scale", rule)
    check_multiple(inner, SCALE_BLOCK, "I of gate_up_proj_scale", rule)
    h_blocks, i_blocks = hidden // SCALE_BLOCK, inner // SCALE_BLOCK
    wanted = (
        ("gate_up_proj_scale", gate_up, (experts, h_blocks, 2, i_blocks, 128), "[E, H/256, 2, I/256, 128]"),
        ("down_proj_scale", down, (experts, i_blocks, h_blocks, 128), "[E, I/256, H/256, 128]"),
    )
    for name, scale, shape, words in wanted:
        if tuple(scale.shape) != shape:
            raise _shape(name, f"of shape {words} = {list(shape)}", scale)
        if not torch.equal(scale, scale[..., :1].expand_as(scale)):
            raise _shape(name, "128 copies of each block's scale along its last axis", scale)
    return Scales(gate_up_block=gate_up[..., 0], down_block=down[..., 0])


def _with_inputs(scales: Scales, gate_up_in: Tensor, down_in: Tensor, experts: int, rows: int) -> Scales:
    check_dtype(gate_up_in, _FLOATS, argument="gate_up_in_scale")
    check_dtype(down_in, _FLOATS, argument="down_in_scale")
    per_token = gate_up_in.dim() == 2
    for name, scale, shape, words in (
        ("gate_up_in_scale", gate_up_in, (rows, 1) if per_token else (experts, 2, 1), "[T', 1] or [E, 2, 1]"),
        ("down_in_scale", down_in, (rows, 1) if per_token else (experts, 1), "[T', 1] or [E, 1], as gate_up_in_scale"),
    ):
        if tuple(scale.shape) != shape:
            raise _shape(name, f"of shape {words}, here {list(shape)}", scale)
    if per_token:
        given = scales.__dict__ | {"gate_up_in_T": gate_up_in.float(), "down_in_T": down_in.float()}
        return Scales(**given)
    # One factor per expert folds into the weight scales, but for blocks, where there is none to fold into.
    gate_up_E2X, down_EX = gate_up_in.float(), down_in.float()
    if scales.gate_up_E2X is not None and scales.down_EX is not None:
        gate_up_E2X, down_EX = scales.gate_up_E2X * gate_up_E2X, scales.down_EX * down_EX
    return Scales(**(scales.__dict__ | {"gate_up_E2X": gate_up_E2X, "down_EX": down_EX}))


def _shape(argument: str, expected: str, got: Tensor) -> ShapeError:
    return ShapeError.about(
        argument, expected, str(list(got.shape)), "Reshape or expand the scale to one of the documented layouts."
    )

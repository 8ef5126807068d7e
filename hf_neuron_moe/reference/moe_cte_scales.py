"""FP8 scales of the blockwise MoE forward: weight scales of every documented shape, activation scales.

Legend: E experts, H hidden, I intermediate, T' rows of the token tensors. A scale multiplies the fp32 result of its
matmul before the bias; only 256 x 256 block scales multiply the weights, because they change along the contraction.
docs/kernels.md has a table of the shapes. Upstream's generator also knows a down scale pre-permuted to
``[E,128,H/128]``; no kernel takes it, so it is an error.

Activation scales are per token, ``[T', 1]``, or per expert, ``[E, 2, 1]`` and ``[E, 1]``. They multiply after the
weight scale: the caller has divided the hidden states by the first. With STATIC_MX activations are quantized with them.

Sources: nki-library 2.29 ``bwmm_shard_on_I`` (row), 2.31 (tensor, block, activation scales).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_neuron_moe.checks import Rule, check_dtype, check_multiple, check_rules, check_shape
from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.reference.moe_cte_arguments import Arguments, require_pair
from hf_neuron_moe.reference.moe_cte_rules import MX
from hf_neuron_moe.reference.moe_types import QuantizationType

FP8 = torch.float8_e4m3fn
SCALE_BLOCK = 256
_FLOATS = (torch.float32, torch.bfloat16)
_RESHAPE = "Reshape or expand the scale to one of the documented layouts."


@dataclass(frozen=True)
class Scales:
    """All scales of a call in one form, fp32."""

    gate_up_E2X: Tensor | None = None  # on the gate and up sums, X = I or 1
    down_EX: Tensor | None = None  # on the down sums, X = H or 1
    gate_up_block: Tensor | None = None  # [E, H/256, 2, I/256], on the weights
    down_block: Tensor | None = None  # [E, I/256, H/256], on the weights
    gate_up_in_T: Tensor | None = None  # activation scale [T', 1] on the gate and up sums of a token
    down_in_T: Tensor | None = None  # the same on the down sums
    static_inputs: tuple[list[float], list[float]] | None = None  # STATIC_MX: of hidden states and intermediate, [E]


def read_scales(given: Arguments, experts: int, inner: int) -> Scales:
    """Check a call's FP8 scales and bring them into one form; MX weights have none but with STATIC_MX."""
    gate_up, down, inputs = given.gate_up_proj_scale, given.down_proj_scale, ("gate_up_in_scale", "down_in_scale")
    gate_up_in, down_in = given.gate_up_in_scale, given.down_in_scale
    static = given.kind in MX and given.spec.shard_on_block.quantization_type is QuantizationType.STATIC_MX
    if given.kind in MX and not static:
        fix = "Activations are quantized online; static scales need quantization_type=STATIC_MX."
        check_rules(Rule(getattr(given, name) is None, name, "None with MX weights", "a scale", fix) for name in inputs)
        return Scales()
    require_pair(gate_up_in, down_in, inputs)
    if gate_up is None or down is None:
        fix = "Activation scales multiply after the weight scales; pass both weight scales."
        expected = "given together with gate_up_proj_scale and down_proj_scale"
        alone = Rule(gate_up_in is None, inputs[0], expected, "an activation scale alone", fix)
        fix = "Pass gate_up_proj_scale and down_proj_scale, or weights in bf16."  # upstream multiplies the bare codes
        plain = given.gate_up_proj_weight.dtype != FP8
        check_rules([alone, Rule(plain, "gate_up_proj_scale", "given with float8 weights", "None", fix)])
        return Scales()
    check_dtype(gate_up, _FLOATS, "gate_up_proj_scale")
    check_dtype(down, _FLOATS, "down_proj_scale")
    read = _block_scales if gate_up.dim() == 5 or down.dim() == 4 else _weight_scales
    scales = read(gate_up.float(), down.float(), experts, given.hidden_states.shape[1], inner)
    if gate_up_in is None or down_in is None:
        fix = "Pass the per-tensor scales the activations are quantized with."
        expected = "given with quantization_type=STATIC_MX"
        check_rules([Rule(not static, "gate_up_in_scale", expected, "None", fix)])
        return scales
    if static:
        return replace(scales, static_inputs=_static_inputs(gate_up_in, down_in, experts))
    return _with_inputs(scales, gate_up_in, down_in, experts, given.hidden_states.shape[0])


def _weight_scales(gate_up: Tensor, down: Tensor, experts: int, hidden: int, inner: int) -> Scales:
    leads = ((experts, 1), (1, 1))
    shapes = [(experts, 2, 1), *((*lead, last) for lead in leads for last in (2 * inner, 2))]
    words = f"[E,1,2I], [1,1,2I], [E,1,2], [1,1,2] or [E,2,1], E={experts}, I={inner}"
    _check_shape("gate_up_proj_scale", gate_up, shapes, words)
    down_shapes = [(experts, 1), *((*lead, last) for lead in leads for last in (hidden, 1))]
    words = f"[E,1,H], [1,1,H], [E,1,1], [1,1,1] or [E,1], E={experts}, H={hidden}"
    _check_shape("down_proj_scale", down, down_shapes, words)
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
        _check_shape(name, scale, [shape], f"{words} = {list(shape)}")
        if not torch.equal(scale, scale[..., :1].expand_as(scale)):
            expected = "128 copies of each block's scale along its last axis"
            raise ShapeError.about(name, expected, list(scale.shape), _RESHAPE)
    return Scales(gate_up_block=gate_up[..., 0], down_block=down[..., 0])


def _static_inputs(gate_up_in: Tensor, down_in: Tensor, experts: int) -> tuple[list[float], list[float]]:
    check_shape(gate_up_in, (experts, 2, 1), "[E, 2, 1]", "gate_up_in_scale")
    check_shape(down_in, (experts, 1), "[E, 1]", "down_in_scale")
    if not torch.equal(gate_up_in[:, 0], gate_up_in[:, 1]):
        expected = "equal for gate and up (they multiply the same quantized hidden states)"
        raise ShapeError.about("gate_up_in_scale", expected, "two scales", "Use the larger of them for both.")
    return gate_up_in[:, 0, 0].float().tolist(), down_in[:, 0].float().tolist()


def _with_inputs(scales: Scales, gate_up_in: Tensor, down_in: Tensor, experts: int, rows: int) -> Scales:
    check_dtype(gate_up_in, _FLOATS, "gate_up_in_scale")
    check_dtype(down_in, _FLOATS, "down_in_scale")
    per_token = gate_up_in.dim() == 2
    for name, scale, per_expert, words in (
        ("gate_up_in_scale", gate_up_in, (experts, 2, 1), "[T', 1] or [E, 2, 1]"),
        ("down_in_scale", down_in, (experts, 1), "[T', 1] or [E, 1], as gate_up_in_scale"),
    ):
        shape = (rows, 1) if per_token else per_expert
        _check_shape(name, scale, [shape], f"{words}, here {list(shape)}")
    gate_up_E2X, down_EX = gate_up_in.float(), down_in.float()
    if per_token:
        return replace(scales, gate_up_in_T=gate_up_E2X, down_in_T=down_EX)
    # One factor per expert folds into the weight scales, but for blocks, where there is none to fold into.
    if scales.gate_up_E2X is not None and scales.down_EX is not None:
        gate_up_E2X, down_EX = scales.gate_up_E2X * gate_up_E2X, scales.down_EX * down_EX
    return replace(scales, gate_up_E2X=gate_up_E2X, down_EX=down_EX)


def _check_shape(argument: str, scale: Tensor, shapes: Sequence[tuple[int, ...]], words: str) -> None:
    if tuple(scale.shape) not in shapes:
        raise ShapeError.about(argument, f"of shape {words}", list(scale.shape), _RESHAPE)

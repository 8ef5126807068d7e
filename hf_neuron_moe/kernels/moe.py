"""Blockwise MoE kernels of nki-library as functions: what Mixtral-style models need of them.

Legend: T' rows of the token tensors (T + 1 with a zero sink row, or T with ``skip_token``), H hidden, I intermediate,
E experts, N blocks of B slots. Weights are ``[E, H, 2, I]`` (0 gate, 1 up) and ``[E, I, H]``.

Per block of expert e with gathered rows X and affinities a: ``h = silu(X Wg) * (X Wu)``; ``out += a * (h Wd)``, or with
``expert_affinity_multiply_on_I`` the factor a sits on h, which is the same number. Matmuls accumulate in fp32.

Sources: nki-library 2.29 ``core.moe.moe_cte`` and ``experimental.moe.bwd.blockwise_mm_backward`` (AFFINITY_ON_I: 2.31),
2.32 ``experimental.moe_mxfp8``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch.experts import (
    ExpertGrads,
    ExpertStack,
    add_rows,
    rows_per_run,
    run_experts_backward,
    run_experts_forward,
)
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource
from hf_neuron_moe.backends.torch.tiling import make_loader
from hf_neuron_moe.errors import ConfigError, ShapeError, refuse
from hf_neuron_moe.kernels.block_rows import BlockRows, block_rows
from hf_neuron_moe.kernels.checks import check_dtype, check_multiple, check_same_device, check_shape

_FLOATS = (torch.bfloat16, torch.float32)
AFFINITY_OPTIONS = ("AFFINITY_ON_H", "AFFINITY_ON_I")


class MoEForward(NamedTuple):
    """``output [T', H]`` (a sink row is zero); checkpoints are None unless asked for.

    ``gate_up_activations_T [N, 2, I, B]`` are pre-activations; ``down_activations [N, B, H]`` is the down projection
    before the affinity and is None where the affinity sits on I. Slots without a token are zero.
    """

    output: Tensor
    gate_up_activations_T: Tensor | None
    down_activations: Tensor | None


class MoEBackward(NamedTuple):
    """``[T', H]``, ``[T' * E, 1]``, ``[E, H, 2, I]`` and ``[E, I, H]`` in their operands' dtypes."""

    hidden_states_grad: Tensor
    expert_affinities_masked_grad: Tensor
    gate_up_proj_weight_grad: Tensor
    down_proj_weight_grad: Tensor


def moe_cte(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    block_size: int,
    *,
    skip_token: bool = False,
    expert_affinity_multiply_on_I: bool = False,
    checkpoint_activation: bool = False,
    precision: str = "bf16",
) -> MoEForward:
    """Forward of the experts over a block plan: SiLU gate, no bias, affinity after the down projection or on I.

    Args:
        hidden_states: bf16 or fp32 ``[T', H]``; bf16 for mxfp8.
        expert_affinities_masked: ``[T' * E, 1]``, dense and masked, token-major.
        gate_up_proj_weight: ``[E, H, 2, I]``.
        down_proj_weight: ``[E, I, H]``.
        token_position_to_id: int ``[N * B]``; T (or -1 with `skip_token`) marks unused slots.
        block_to_expert: int ``[N]``.
        block_size: B.
        skip_token: the token tensors have no sink row.
        expert_affinity_multiply_on_I: multiply the intermediate instead of the output by the affinity.
        checkpoint_activation: return the pre-activations (and the down projection, unless multiplied on I).
        precision: ``"bf16"``, ``"fp32"``, or ``"mxfp8"`` (which multiplies on I; see the 2.32 MXFP8 pair).

    Returns:
        The output in the dtype of `hidden_states`, and the checkpoints asked for.

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule above.
    """
    where = "moe_cte"
    rows, stack = _check(
        hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight,
        token_position_to_id, block_to_expert, block_size, skip_token, precision, where,
    )  # fmt: skip
    _check_affinity_place(expert_affinity_multiply_on_I, precision, where)
    experts, inner = gate_up_proj_weight.shape[0], gate_up_proj_weight.shape[3]
    scale = rows.affinity(expert_affinities_masked, experts)
    pairs, device = len(rows.token_R), hidden_states.device
    save = Checkpoints()
    if checkpoint_activation:
        save = Checkpoints(*(hidden_states.new_empty((pairs, inner)) for _ in range(2)))
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=device)
    add, on_hidden = add_rows(total, rows.token_R), not expert_affinity_multiply_on_I
    down_RH = None
    if checkpoint_activation and on_hidden:
        down_RH = down_proj_weight.new_empty((pairs, hidden_states.shape[1]))

    def emit(start: int, end: int, rows_RH: Tensor) -> None:
        if down_RH is not None:
            down_RH[start:end].copy_(rows_RH)
        add(start, end, rows_RH.mul_(scale[start:end, None]) if on_hidden else rows_RH)

    loader = make_loader(precision, device, rows_per_run(rows.runs), gate_up_proj_weight.dtype)
    with torch.no_grad():
        run_experts_forward(
            RowSource(hidden_states, rows.token_R), rows.runs, stack, loader, emit,
            save=save, scale_R=None if on_hidden else scale, block_size=block_size,
        )  # fmt: skip
        down = None if down_RH is None else rows.to_blocks(down_RH)
    return MoEForward(total.to(hidden_states.dtype), _blocked_gate_up(rows, save), down)


def _blocked_gate_up(rows: BlockRows, save: Checkpoints) -> Tensor | None:
    """Return the kept pre-activations as ``[N, 2, I, B]``."""
    if save.gate is None or save.up is None:
        return None
    return torch.stack([rows.to_blocks(save.gate), rows.to_blocks(save.up)], 1).transpose(2, 3).contiguous()


def _check_affinity_place(multiply_on_I: bool, precision: str, where: str) -> None:
    if precision == "mxfp8" and not multiply_on_I:
        raise refuse(
            ConfigError,
            where=where,
            argument="expert_affinity_multiply_on_I",
            expected="True with precision='mxfp8'",
            got="False",
            remedy="The MXFP8 training kernels only have the affinity on I.",
        )


def blockwise_mm_bwd(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    gate_up_proj_act_checkpoint_T: Tensor,
    down_proj_act_checkpoint: Tensor | None,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    output_hidden_states_grad: Tensor,
    block_size: int,
    *,
    skip_token: bool = False,
    affinity_option: str = "AFFINITY_ON_H",
    precision: str = "bf16",
) -> MoEBackward:
    """Gradients of :func:`moe_cte` from its checkpoints: SiLU gate, no bias, no clamp.

    Args:
        hidden_states: bf16 or fp32 ``[T', H]``; bf16 for mxfp8.
        expert_affinities_masked: ``[T' * E, 1]``.
        gate_up_proj_weight: ``[E, H, 2, I]``.
        down_proj_weight: ``[E, I, H]``.
        gate_up_proj_act_checkpoint_T: ``[N, 2, I, B]`` pre-activations.
        down_proj_act_checkpoint: ``[N, B, H]``, needed for AFFINITY_ON_H, unused for AFFINITY_ON_I.
        token_position_to_id: int ``[N * B]``.
        block_to_expert: int ``[N]``.
        output_hidden_states_grad: ``[T', H]``.
        block_size: B.
        skip_token: the token tensors have no sink row.
        affinity_option: ``"AFFINITY_ON_H"`` (affinity gradient from the down checkpoint) or ``"AFFINITY_ON_I"`` (from
            the intermediate; the only one of mxfp8).
        precision: ``"bf16"``, ``"fp32"`` or ``"mxfp8"``.

    Returns:
        The four gradients. Affinity entries of experts that were not chosen are zero.

    Raises:
        DTypeError, ShapeError, DeviceError, ConfigError: an argument breaks a rule above.
    """
    where = "blockwise_mm_bwd"
    rows, stack = _check(
        hidden_states, expert_affinities_masked, gate_up_proj_weight, down_proj_weight,
        token_position_to_id, block_to_expert, block_size, skip_token, precision, where,
    )  # fmt: skip
    on_hidden = _check_affinity_option(affinity_option, down_proj_act_checkpoint, precision, where)
    experts, hidden, _, inner = gate_up_proj_weight.shape
    _check_backward_operands(
        output_hidden_states_grad,
        gate_up_proj_act_checkpoint_T,
        down_proj_act_checkpoint if on_hidden else None,
        hidden_states,
        (rows.blocks, 2, inner, block_size),
        where,
    )
    gate, up = (rows.from_blocks(gate_up_proj_act_checkpoint_T[:, half].transpose(1, 2)) for half in range(2))
    scale = rows.affinity(expert_affinities_masked, experts)
    dout = RowSource(output_hidden_states_grad, rows.token_R)
    d_scale = torch.zeros(len(rows.token_R), dtype=torch.float32, device=hidden_states.device)
    with torch.no_grad():
        if on_hidden and down_proj_act_checkpoint is not None:
            dout_RH = output_hidden_states_grad[rows.token_R].float()
            d_scale = torch.linalg.vecdot(dout_RH, rows.from_blocks(down_proj_act_checkpoint).float())
            dout = RowSource(dout_RH.mul_(scale[:, None]).to(output_hidden_states_grad.dtype))
        d_gate_up = torch.empty((experts, hidden, 2 * inner), dtype=gate_up_proj_weight.dtype, device=d_scale.device)
        d_down = torch.empty_like(down_proj_weight)
        dx = torch.zeros(hidden_states.shape, dtype=torch.float32, device=d_scale.device)
        run_experts_backward(
            dout,
            RowSource(hidden_states, rows.token_R),
            rows.runs,
            stack,
            make_loader(precision, d_scale.device, rows_per_run(rows.runs), gate_up_proj_weight.dtype),
            ExpertGrads(
                ExpertStack(d_gate_up, d_down, transposed=True),
                add_rows(dx, rows.token_R),
                None if on_hidden else d_scale,
                rounded=torch.bfloat16 if precision == "mxfp8" else torch.float32,
            ),
            saved=Checkpoints(gate, up),
            scale_R=None if on_hidden else scale,
            block_size=block_size,
        )
        d_affinity = torch.zeros_like(expert_affinities_masked).reshape(-1)
        d_affinity[rows.token_R * experts + rows.expert_R] = d_scale.to(d_affinity.dtype)
    return MoEBackward(
        dx.to(hidden_states.dtype), d_affinity[:, None], d_gate_up.view(experts, hidden, 2, inner), d_down
    )


def _check_backward_operands(
    grad: Tensor,
    gate_up_checkpoint: Tensor,
    down_checkpoint: Tensor | None,
    hidden_states: Tensor,
    checkpoint_shape: tuple[int, int, int, int],
    where: str,
) -> None:
    """Check the backward's own operands against the hidden states and the plan's ``(N, 2, I, B)``."""
    blocks, _, _, block_size = checkpoint_shape
    hidden = hidden_states.shape[1]
    expected: list[tuple[str, Tensor | None, tuple[int, ...], str]] = [
        ("output_hidden_states_grad", grad, tuple(hidden_states.shape), "[T', H]"),
        ("gate_up_proj_act_checkpoint_T", gate_up_checkpoint, checkpoint_shape, "[N, 2, I, B]"),
    ]
    if down_checkpoint is not None:
        expected.append(("down_proj_act_checkpoint", down_checkpoint, (blocks, block_size, hidden), "[N, B, H]"))
    for name, tensor, shape, words in expected:
        check_dtype(tensor, _FLOATS, where=where, argument=name)  # type: ignore[arg-type]
        check_shape(tensor, shape, words, where=where, argument=name)  # type: ignore[arg-type]
    operands = {name: tensor for name, tensor, _, _ in expected}
    check_same_device({"hidden_states": hidden_states, **operands}, where=where)


def _check_affinity_option(option: str, down_checkpoint: Tensor | None, precision: str, where: str) -> bool:
    """Check the affinity option and its checkpoint; return whether the affinity sits on H."""
    allowed = AFFINITY_OPTIONS[1:] if precision == "mxfp8" else AFFINITY_OPTIONS
    if option not in allowed:
        raise refuse(
            ConfigError,
            where=where,
            argument="affinity_option",
            expected=f"one of {', '.join(allowed)} with precision={precision!r}",
            got=repr(option),
            remedy="Multiply by the affinity where the forward did.",
        )
    if option == "AFFINITY_ON_H" and down_checkpoint is None:
        raise refuse(
            ConfigError,
            where=where,
            argument="down_proj_act_checkpoint",
            expected="given with AFFINITY_ON_H",
            got="None",
            remedy="Keep it in the forward (checkpoint_activation=True), or use AFFINITY_ON_I on both sides.",
        )
    return option == "AFFINITY_ON_H"


def _check(
    hidden_states: Tensor,
    expert_affinities_masked: Tensor,
    gate_up_proj_weight: Tensor,
    down_proj_weight: Tensor,
    token_position_to_id: Tensor,
    block_to_expert: Tensor,
    block_size: int,
    skip_token: bool,
    precision: str,
    where: str,
) -> tuple[BlockRows, ExpertStack]:
    """Check what forward and backward share; return the plan's rows and the weights as a stack."""
    if precision not in ("bf16", "fp32", "mxfp8"):
        raise refuse(
            ConfigError,
            where=where,
            argument="precision",
            expected="one of bf16, fp32, mxfp8",
            got=repr(precision),
            remedy="Choose one of these.",
        )
    if type(block_size) is not int or block_size <= 0:
        raise refuse(
            ShapeError,
            where=where,
            argument="block_size",
            expected="a positive int",
            got=repr(block_size),
            remedy="Pass the block size the plan was made with.",
        )
    floats = (torch.bfloat16,) if precision == "mxfp8" else _FLOATS
    tensors: dict[str, Tensor | None] = {
        "hidden_states": hidden_states,
        "gate_up_proj_weight": gate_up_proj_weight,
        "down_proj_weight": down_proj_weight,
    }
    for name, tensor in tensors.items():
        check_dtype(tensor, floats, where=where, argument=name)  # type: ignore[arg-type]
    check_dtype(down_proj_weight, (gate_up_proj_weight.dtype,), where=where, argument="down_proj_weight")
    check_dtype(expert_affinities_masked, _FLOATS, where=where, argument="expert_affinities_masked")
    plan = {"token_position_to_id": token_position_to_id, "block_to_expert": block_to_expert}
    for name, ids in plan.items():
        check_dtype(ids, (torch.int32, torch.int64), where=where, argument=name)
    check_same_device({**tensors, "expert_affinities_masked": expert_affinities_masked, **plan}, where=where)
    check_shape(hidden_states, (None, None), "[T', H]", where=where, argument="hidden_states")
    table_rows, hidden = hidden_states.shape
    shape = (None, hidden, 2, None)
    check_shape(gate_up_proj_weight, shape, "[E, H, 2, I]", where=where, argument="gate_up_proj_weight")
    experts, inner = gate_up_proj_weight.shape[0], gate_up_proj_weight.shape[3]
    check_shape(down_proj_weight, (experts, inner, hidden), "[E, I, H]", where=where, argument="down_proj_weight")
    name = "expert_affinities_masked"
    check_shape(expert_affinities_masked, (table_rows * experts, 1), "[T' * E, 1]", where=where, argument=name)
    if precision == "mxfp8":
        check_multiple(hidden, 128, "H", "MX groups need whole tiles", where=where, argument="hidden_states")
        check_multiple(inner, 128, "I", "MX groups need whole tiles", where=where, argument="gate_up_proj_weight")
        check_multiple(block_size, 128, "block_size", "MX groups need whole tiles", where=where, argument="the plan")
    tokens = table_rows if skip_token else table_rows - 1
    rows = block_rows(token_position_to_id, block_to_expert, block_size, tokens, experts, where=where)
    stack = ExpertStack(gate_up_proj_weight.reshape(experts, hidden, 2 * inner), down_proj_weight, transposed=True)
    return rows, stack

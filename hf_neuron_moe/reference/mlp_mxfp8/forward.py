"""The MXFP8 MLP forward of nki-library (``experimental.mlp_mxfp8``, releases 2.30 to 2.33).

Legend: S tokens, H hidden, I intermediate. ``Q_K`` quantizes to MXFP8 e4m3 along K; every product accumulates in fp32.

    gate = Q_H(X) Q_H(Wg)^T    up = Q_H(X) Q_H(Wu)^T    intermediate = bf16(silu(gate) * up)
    Y = Q_I(intermediate) Q_I(Wd)^T

Tile counts, spilling and LNC change no value: :func:`~hf_neuron_moe.reference.launch_record.record_launches`. With
``execute="tiles"`` the counts set the order of the sums: :mod:`~hf_neuron_moe.reference.mlp_mxfp8.tile_walk`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.torch.compute import call_scratch
from hf_neuron_moe.checks import Rule, check_flags, check_multiple, check_rules, check_same_device
from hf_neuron_moe.errors import ConfigError, public
from hf_neuron_moe.reference.described_operand import MXOperand, TensorDescriptor, check_raw_axis
from hf_neuron_moe.reference.mlp_mxfp8.matmul_config import get_forward_config_for_shape
from hf_neuron_moe.reference.mlp_mxfp8.operand_checks import (
    BF16,
    STORED,
    KernelCall,
    check_buffer,
    check_grouping,
    check_logical,
    check_no_mix_at_384,
)
from hf_neuron_moe.reference.mlp_mxfp8.product_tiles import gate_up_tiles, product_tiles
from hf_neuron_moe.reference.mlp_mxfp8.tile_walk import TileWalk
from hf_neuron_moe.reference.specification import multiples
from hf_neuron_moe.reference.tiled_product import cut

_MULTIPLES = multiples("mlp_forward")
get_config_for_shape = get_forward_config_for_shape
"""Upstream's name for it in the forward's module."""


class MLPForward(NamedTuple):
    """``output [S, H]``; the checkpoints ``[S, I]`` are None unless asked for."""

    output: Tensor
    gate_pre: Tensor | None
    gate_act: Tensor | None
    up: Tensor | None
    hidden: Tensor | None


@public
def mlp_forward_mxfp8(
    hidden: Tensor, gate_up_weights: Tensor, down_weights: Tensor,
    *,
    save_gate_pre: bool = False, save_gate_act: bool = False, save_up: bool = False, save_hidden: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    use_scale_packing: bool = True,
    hidden_scales: Tensor | None = None, gate_up_scales: Tensor | None = None, down_scales: Tensor | None = None,
    hidden_is_swizzled: bool = False, gate_up_is_swizzled: bool = False, down_is_swizzled: bool = False,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> MLPForward:  # fmt: skip
    """Compute what ``mlp_forward_mxfp8_nki`` computes; every buffer is returned, no argument is written to.

    Each operand comes raw (hidden ``[S, H]``, gate_up_weights ``[2I, H]``, down_weights ``[H, I]``), pre-swizzled
    (``*_is_swizzled``) or pre-quantized (``*_scales``), in the layouts of
    :mod:`~hf_neuron_moe.reference.described_operand`, independently of the others.

    * S is a multiple of 8, I of 128, and H of 128 unless both its users are prepared. Raw tensors are bf16 or fp16,
      gate rows before up rows. Raw and prepared operands are never mixed on a contraction of 384 (upstream: garbage).
    * save_*: return the pre-activations, ``silu(gate)`` and ``silu(gate) * up``, each rounded once from fp32.
    * dtype: of the output and the checkpoints (down reads a bf16 intermediate either way).
    * execute: ``"tiles"`` walks the loops of one core with the kernel's default tile counts.
    """
    kernel = KernelCall("mlp_forward_mxfp8", locals())
    call, saves = kernel.call, ("save_gate_pre", "save_gate_act", "save_up", "save_hidden")
    expected = "True or False: this function returns what it saves"
    fix = "Pass True, or call mlp_forward_mxfp8_nki, which fills its caller's buffers."
    check_rules(Rule(not isinstance(call[name], Tensor), name, expected, "a tensor", fix) for name in saves)
    check_flags({name: call[name] for name in saves})
    tds = _describe(kernel)
    tokens, hidden_size, inner = _check_operands(tds, dtype)
    kept = {"gate_pre": save_gate_pre, "gate_act": save_gate_act, "up": save_up}
    kept["product"] = save_hidden and dtype != torch.bfloat16
    saved = {name: hidden.new_empty(tokens, inner, dtype=dtype) for name, want in kept.items() if want}
    intermediate = hidden.new_empty(tokens, inner, dtype=torch.bfloat16)
    output = hidden.new_empty(tokens, hidden_size, dtype=dtype)
    kernel.call |= _DEFAULT_COUNTS
    walks = _walks(kernel, (tokens, hidden_size, inner))
    _run(_operands(tds, kernel), intermediate, output, saved, slice(0, tokens), walks)
    product = saved.get("product", intermediate) if save_hidden else None
    return MLPForward(output, saved.get("gate_pre"), saved.get("gate_act"), saved.get("up"), product)


@public
def mlp_forward_mxfp8_nki(
    hidden: Tensor, gate_up_weights: Tensor, down_weights: Tensor, intermediate_hbm: Tensor,
    run_with_lnc2: bool = True,
    gate_up_tiles_m: int = 8, gate_up_tiles_n: int = 1, gate_up_tiles_k: int = 8,
    down_tiles_m: int = 8, down_tiles_n: int = 1, down_tiles_k: int = 8,
    fp8_x4_dtype: object = torch.float8_e4m3fn,
    save_gate_pre: Tensor | None = None, save_gate_act: Tensor | None = None, save_up: Tensor | None = None,
    save_hidden: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spill_reload: bool = True, use_scale_packing: bool = True,
    hidden_scales: Tensor | None = None, gate_up_scales: Tensor | None = None, down_scales: Tensor | None = None,
    hidden_is_swizzled: bool = False, gate_up_is_swizzled: bool = False, down_is_swizzled: bool = False,
    *,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> Tensor:  # fmt: skip
    """Run the forward as documented for nki-library 2.30 to 2.33; return the output ``[S, H]`` of `dtype`.

    Operands and errors are those of :func:`mlp_forward_mxfp8`. intermediate_hbm, bf16 ``[S, I]``, receives the
    intermediate, or save_hidden where it is given; save_gate_pre, save_gate_act and save_up, ``[S, I]`` bf16 or fp32,
    receive the fp32 values, cast once. run_with_lnc2 needs an even S, fp8_x4_dtype is e4m3.

    Upstream is silent and wrong about operands that do not fit each other, which are errors here.
    """
    kernel = KernelCall("mlp_forward_mxfp8_nki", locals())
    call, tds = kernel.call, _describe(kernel)
    kernel.check_even({"S of hidden": tds["hidden"].logical_shape[1]})
    tokens, hidden_size, inner = _check_operands(tds, dtype)
    saves = ("save_gate_pre", "save_gate_act", "save_up")
    given = ["intermediate_hbm", *(name for name in (*saves, "save_hidden") if call[name] is not None)]
    for name in given:
        check_buffer(call[name], (tokens, inner), "[S, I]", name, STORED if name in saves else BF16)
    check_same_device({name: call[name] for name in ("hidden", *given)})
    share = tokens // 2 if run_with_lnc2 else tokens
    walks = _walks(kernel, (share, hidden_size, inner))
    kernel.launch()
    output = hidden.new_empty(tokens, hidden_size, dtype=dtype)
    saved = {name.removeprefix("save_"): call[name] for name in given if name in saves}
    intermediate = intermediate_hbm if save_hidden is None else save_hidden
    operands = _operands(tds, kernel)
    for rows in cut(tokens, share if execute == "tiles" else tokens):
        _run(operands, intermediate, output, saved, rows, walks)
    return output


@public
def compute_fused_gate_up_down_mxfp8(
    hidden_td: TensorDescriptor, gate_up_td: TensorDescriptor, down_w_td: TensorDescriptor,
    int_td: TensorDescriptor, output_td: TensorDescriptor,
    s_base_offset: int, dtype: torch.dtype,
    TILES_IN_BLOCK_M: int = 8, TILES_IN_BLOCK_N_GU: int = 1, TILES_IN_BLOCK_K_GU: int = 8,
    TILES_IN_BLOCK_M_DOWN: int = 8, TILES_IN_BLOCK_N_DOWN: int = 1, TILES_IN_BLOCK_K_DOWN: int = 8,
    save_gate_pre_td: TensorDescriptor | None = None, save_gate_act_td: TensorDescriptor | None = None,
    save_up_td: TensorDescriptor | None = None,
    spill_reload: bool = True, use_scale_packing: bool = True, run_with_lnc2: bool = True,
    *,
    mx_scale_rule: str = "neuron", execute: str = "fast",
) -> None:  # fmt: skip
    """Run one core's share of the forward: rows from s_base_offset on, half of S under LNC2, otherwise all of S.

    * hidden_td (F = S, K = H), gate_up_td (F = 2I, K = H), down_w_td (F = H, K = I): operands in any mode.
    * int_td (bf16 ``[S, I]``) and output_td (``[S, H]`` of `dtype`, bf16 or fp32): this core's rows are overwritten.
      Under LNC2 output_td may also be this core's slice, ``[S/2, H]``.
    * save_*_td: ``[S, I]`` bf16 or fp32, likewise; None is not kept.
    """
    step = KernelCall("compute_fused_gate_up_down_mxfp8", locals(), lone_384=True)
    names = ("hidden_td", "gate_up_td", "down_w_td")
    operands = [step.operand(name) for name in names]
    tokens, hidden_size, inner = _check_operands({name: step.call[name] for name in names}, dtype)
    check_grouping({"hidden_td": operands[0], "gate_up_td": operands[1]})
    rows, square = step.rows("s_base_offset", tokens), (tokens, inner)
    intermediate = step.buffer("int_td", square, "[S, I]")
    check_grouping({"down_w_td": operands[2], "int_td": _left_of_down(intermediate, operands[2])})
    share = rows.stop - rows.start
    local = run_with_lnc2 and output_td.data is not None and len(output_td.data) == share
    shape = (share if local else tokens, hidden_size)
    output = step.buffer("output_td", shape, "[S/2, H]" if local else "[S, H]", (dtype,))
    saves = {name: f"save_{name}_td" for name in ("gate_pre", "gate_act", "up")}
    saved = step.optional_buffers(saves, square, STORED)
    walks = _walks(step, (share, hidden_size, inner))
    step.launch()
    _run(operands, intermediate, output, saved, rows, walks, output_base=rows.start if local else 0)


def _describe(kernel: KernelCall) -> dict[str, TensorDescriptor]:
    """Check and describe the operands among the arguments of a whole forward."""
    shapes = {"hidden": "[S, H]", "gate_up_weights": "[2I, H]", "down_weights": "[H, I]"}
    return {name: kernel.describe(name, name.removesuffix("_weights"), shape) for name, shape in shapes.items()}


def _operands(tds: Mapping[str, TensorDescriptor], kernel: KernelCall) -> list[MXOperand]:
    """Return the operands as the engine loads them."""
    return [MXOperand(td, argument=name, lone_384=True, rule=kernel.rule) for name, td in tds.items()]


def _check_operands(tds: Mapping[str, TensorDescriptor], dtype: torch.dtype) -> tuple[int, int, int]:
    """Check hidden, gate_up and down, by argument, against each other and the result's dtype; return S, H and I."""
    (hidden_name, hidden), (gate_up_name, gate_up), (down_name, down) = tds.items()
    if dtype not in STORED:
        fix = "The kernel stores bf16; fp32 shows the accumulators."
        raise ConfigError.about("dtype", "torch.bfloat16 or torch.float32", str(dtype), fix)
    (hidden_size, tokens), both = hidden.logical_shape, gate_up.logical_shape[1]
    check_raw_axis(hidden, "H", hidden_name)
    check_raw_axis(gate_up, "H", gate_up_name)
    check_logical(gate_up, hidden_size, both, "[2I, H]", gate_up_name)
    check_multiple(both, 2, f"2I of {gate_up_name}", "gate rows, then up rows")
    inner = both // 2
    rule = "the contraction axis of down, whose left operand the kernel always quantizes itself"
    check_multiple(inner, _MULTIPLES["I"], f"I of {gate_up_name}", rule)
    check_logical(down, inner, hidden_size, "[H, I]", down_name)
    check_multiple(tokens, _MULTIPLES["S"], f"S of {hidden_name}", "the loader reads groups of 8 rows")
    check_no_mix_at_384({hidden_name: hidden, gate_up_name: gate_up}, hidden_size)
    check_no_mix_at_384({down_name: down, "the intermediate, which is always raw": TensorDescriptor()}, inner)
    data = {name: td.data for name, td in tds.items()}
    check_same_device(data | {f"scales of {name}": td.scales for name, td in tds.items()})
    return tokens, hidden_size, inner


@torch.no_grad()
def _run(
    operands: Sequence[MXOperand],
    intermediate: Tensor,
    output: Tensor,
    saved: Mapping[str, Tensor],
    rows: slice,
    walks: Sequence[TileWalk | None],
    output_base: int = 0,
) -> None:
    """Fill the rows of all buffers: gate, up and the activation first, then one down product over all of them.

    `saved` are those of the buffers `gate_pre`, `gate_act`, `up` and `product` ``[S, I]`` that are wanted; they receive
    fp32 values, each cast once. `walks` are those of gate and up and of down. Row 0 of `output` is `output_base`.
    """
    hidden, gate_up, down = operands
    scratch = call_scratch(output.device)
    for part, columns, made in gate_up_tiles(hidden, gate_up, scratch, rows=rows, walk=walks[0]):
        views = {name: buffer[part, columns] for name, buffer in saved.items()}
        gate, up = made["gate"], made["up"]
        _store(views, gate_pre=gate, up=up)
        act = F.silu(gate, inplace=True)
        _store(views, gate_act=act)
        product = act.mul_(up)
        _store(views, product=product)
        intermediate[part, columns].copy_(product)
    pair = (_left_of_down(intermediate, down), down)
    for part, columns, values in product_tiles([pair], scratch, rows=rows, walk=walks[1]):
        output[part.start - output_base : part.stop - output_base, columns].copy_(values)


_COUNTS = {
    "gate_up": ("TILES_IN_BLOCK_M", "TILES_IN_BLOCK_N_GU", "TILES_IN_BLOCK_K_GU"),
    "down": tuple(f"TILES_IN_BLOCK_{axis}_DOWN" for axis in "MNK"),
}
"""Arguments of the step for the tile counts along M, N and K."""
_WHOLE_COUNTS = {name: tuple(f"{name}_tiles_{axis}" for axis in "mnk") for name in _COUNTS}
_DEFAULT_COUNTS = {name: 1 if name.endswith("n") else 8 for three in _WHOLE_COUNTS.values() for name in three}


def _walks(step: KernelCall, size: tuple[int, int, int]) -> list[TileWalk | None]:
    """Check the tile counts of a call for one core's S, H and I; return the walks of gate and up and of down."""
    S, H, inner = size
    names = _COUNTS if "TILES_IN_BLOCK_M" in step.call else _WHOLE_COUNTS
    return [step.counted_walk((S, H, inner), names["gate_up"]), step.counted_walk((S, inner, H), names["down"])]


def _store(views: Mapping[str, Tensor], **made: Tensor) -> None:
    for name, values in made.items():
        if name in views:
            views[name].copy_(values)


def _left_of_down(intermediate: Tensor, down: MXOperand) -> MXOperand:
    """Return the left operand of down, which the kernel always quantizes itself."""
    return MXOperand(TensorDescriptor(intermediate), argument="intermediate", lone_384=True, rule=down.rule)

"""Operands of the MX forward kernels. Letters: E experts, H hidden, I intermediate, pI partitions of I.

Source: nki-library 2.29 ``bwmm_shard_on_block_mx`` and ``bwmm_shard_on_I_mx``; packed scales of 2.31.
"""

from __future__ import annotations

from typing import Any

from tests.neuron.double.checks import BF16, FP32, UINT8, check_operand
from tests.neuron.double.contract import Double, need
from tests.neuron.double.memory import DTYPES, X4_FP8, Launch
from tests.neuron.double.records import Library

X4 = (*X4_FP8, *(DTYPES[name] for name in ("float8_e5m2_x4", "float4_e2m1fn_x4", "uint16", "int16")))


def check_mx_operands(
    double: Double, library: Library, call: dict[str, Any], kind: str, launch: Launch, where: str
) -> tuple[int, int, int]:
    """Packed weights, scales and biases; return E, H and I."""
    experts, _, _, tiles, inner = check_operand(
        call["gate_up_proj_weight"], (None, 128, 2, None, None), X4, where, "gate_up_proj_weight"
    )
    hidden = 512 * tiles
    part = 128 if inner >= 512 else inner // 4
    columns = -(-inner // 512)
    check_operand(call["down_proj_weight"], (experts, part, columns, hidden), X4, where, "down_proj_weight")
    spec = call.get("spec")
    packed = bool(call.get("use_packed_scales", False))
    if spec is not None and spec.shard_on_block is not None:
        packed = bool(getattr(spec.shard_on_block, "use_packed_scales", False))
    gate_up_scale: tuple[int, ...] = (experts, 16, 2, tiles, inner)
    down_scale: tuple[int, ...] = (experts, part // 8, columns, hidden)
    if packed:
        gate_up_scale = (experts, 128, -(-tiles // 4), 2, inner)
        down_scale = (experts, 128, -(-columns // 4), hidden)
    need(not call.get("use_block128_scales", False), where, "block-128 scales are not part of the double")
    for name, shape in (("gate_up_proj_scale", gate_up_scale), ("down_proj_scale", down_scale)):
        need(call.get(name) is not None, where, f"{name} is given: MX weights have scales")
        check_operand(call[name], shape, (UINT8,), where, name)
    if call.get("gate_and_up_proj_bias") is not None:
        shape = (experts, part, 2, columns, 4)
        check_operand(call["gate_and_up_proj_bias"], shape, (BF16, FP32), where, "gate_and_up_proj_bias")
        check_operand(call["down_proj_bias"], (experts, hidden), (BF16, FP32), where, "down_proj_bias")
    return experts, hidden, inner

"""One block's operands and products, as the kernels' products see them.

Legend: E experts, R rows of one expert, O outputs and K inputs of a projection, H hidden, I intermediate, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.explore.measures import (
    ACTIVATIONS,
    DW,
    DX,
    GRADIENTS,
    OTHER_RULE,
    SAVED,
    WEIGHTS,
    WEIGHTS_MXFP4,
    BlockMeasures,
)
from hf_neuron_moe.explore.operand_sums import MXFP4, MXFP8, mx_values
from hf_neuron_moe.formats.group_fp8 import DEFAULT_GROUP_SIZE, group_dequantize_fp8, group_quantize_fp8
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.training.block_calls import Call, ExpertRows, intermediate, rounded_product


def measure_weights(block: BlockMeasures, call: Call, formats: Sequence[str]) -> None:
    """Gather the weights as operands of the forward and of the input's gradient; channels are those of the input."""
    gate_EIH, up_EIH, down_EHI = call.projections
    for expert in range(block.experts):
        for weight_EIH in (gate_EIH, up_EIH):
            if weight_EIH is not None:
                _add_weight(block, "gate_up", expert, weight_EIH[expert], formats)
        _add_weight(block, "down", expert, down_EHI[expert], formats)


def _add_weight(block: BlockMeasures, product: str, expert: int, weight_OK: Tensor, formats: Sequence[str]) -> None:
    values, channels = weight_OK.detach().bfloat16().float(), weight_OK.shape[1]
    block.operand(product, WEIGHTS, channels).add(expert, values, mx_values(values, 1))
    block.operand(product + DX, WEIGHTS, channels).add(expert, values, mx_values(values, 0))
    fmts = {WEIGHTS: MXFP8} | ({WEIGHTS_MXFP4: MXFP4} if "mxfp4" in formats else {})
    for kind, fmt in fmts.items():
        if fmt == MXFP4:
            block.operand(product, kind, channels).add(expert, values, mx_values(values, 1, fmt))
        other = block.operand(product, f"{kind}, {OTHER_RULE}", channels)
        other.add(expert, values, mx_values(values, 1, fmt, OTHER_RULE))


def measure_rows(
    block: BlockMeasures, call: Call, rows: ExpertRows, formats: Sequence[str], start: int, *, products: bool
) -> None:
    """Gather one expert's activations and gradients as operands, and if asked the products themselves.

    The call begins at token `start` of the text.
    """
    with torch.enable_grad():
        pre = [value if value is None else value.requires_grad_() for value in call.pre_activations(rows)]
        leaves = [value for value in pre if value is not None]
        made_RI = intermediate(call.spec.gate, pre[0], leaves[-1])
    down_HI = call.projections.down_EHI[rows.expert].bfloat16()
    dout_RH = rows.dout_RH.bfloat16()
    slopes = torch.autograd.grad(made_RI, leaves, rounded_product(dout_RH, down_HI).float())
    operands = {
        "gate_up": [rows.x_RH.float()],
        "down": [made_RI.detach().bfloat16().float()],
        "d gate_up": [slope.bfloat16().float() for slope in slopes],
        "d down": [dout_RH.float()],
    }
    seen: dict[tuple[str, int], list[Tensor]] = {}
    for product in ("gate_up", "down"):
        for of, behind, kind, axis in (
            (product, "", ACTIVATIONS, 1),
            (f"d {product}", DX, GRADIENTS, 1),
            (product, DW, ACTIVATIONS, 0),
            (f"d {product}", DW, GRADIENTS, 0),
        ):
            found = seen[of, axis] = [mx_values(values, axis) for values in operands[of]]
            for values, mx in zip(operands[of], found, strict=True):
                home = block.operand(product + behind, kind, values.shape[1])
                home.add(rows.expert, values, mx, rows.token_R + start)
    if "fp8-saved" in formats:
        for product, values in (("gate_up", operands["gate_up"][0]), *(("down", leaf.detach()) for leaf in leaves)):
            home = block.operand(product, SAVED, values.shape[1])
            home.add(rows.expert, values, _in_groups(values), rows.token_R + start)
    if products:
        _measure_products(block, call, rows.expert, operands, seen)


def _measure_products(
    block: BlockMeasures,
    call: Call,
    expert: int,
    operands: dict[str, list[Tensor]],
    seen: dict[tuple[str, int], list[Tensor]],
) -> None:
    """Add signal and noise of the six products of an expert."""
    inputs = [weight[expert].bfloat16().float() for weight in call.projections[:2] if weight is not None]
    for product, weights in (("gate_up", inputs), ("down", [call.projections.down_EHI[expert].bfloat16().float()])):
        (x, xk, xt), grads = (operands[product][0], seen[product, 1][0], seen[product, 0][0]), f"d {product}"
        for weight in weights:
            _add_product(block, product, x @ weight.t(), xk @ mx_values(weight, 1).t())
        pairs = zip(operands[grads], seen[grads, 1], weights, strict=True)
        parts = [(grad @ weight, mx @ mx_values(weight, 0)) for grad, mx, weight in pairs]
        _add_product(block, product + DX, sum(part for part, _ in parts), sum(part for _, part in parts))  # type: ignore[arg-type]
        for grad, mx in zip(operands[grads], seen[grads, 0], strict=True):
            _add_product(block, product + DW, grad.t() @ x, mx.t() @ xt)


def _add_product(block: BlockMeasures, name: str, exact: Tensor, actual: Tensor) -> None:
    signal, noise = block.products.get(name, (0.0, 0.0))
    signal += exact.double().square().sum().item()
    block.products[name] = signal, noise + (exact - actual).double().square().sum().item()


def _in_groups(values_RC: Tensor) -> Tensor:
    """Return what the backward reads of values that are saved in FP8 groups."""
    size = values_RC.shape[1]
    padded = F.pad(values_RC.bfloat16(), (0, padded_size(size) - size))
    return group_dequantize_fp8(*group_quantize_fp8(padded, DEFAULT_GROUP_SIZE))[:, :size]

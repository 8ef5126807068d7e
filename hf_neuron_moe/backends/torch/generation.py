"""Generation in mxfp8: few rows, no gradients, and weights that are quantized once instead of for every token.

The copies are in bf16, which holds the values exactly: as many bytes as bf16 weights have. Codes would take half, but
decoding them would cost more than a token's products. A copy is made in the first such call and dropped when its weight
changes (``backends/prepared.py``), when the module changes between training and evaluation, and by ``refresh_weights``.

Legend: G groups, N columns of a product's result, K its contraction axis, I intermediate, H hidden, E experts.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hf_neuron_moe.backends.prepared import PreparedWeights
from hf_neuron_moe.backends.torch.compute import bf16_matmul_is_fast, call_scratch, environment_option, operands_in_bf16
from hf_neuron_moe.backends.torch.cpu.decode import MOST_ROWS
from hf_neuron_moe.backends.torch.experts import ExpertStack, Rows
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.grouped_forward import ReadyWeights, grouped_forward
from hf_neuron_moe.backends.torch.grouped_products import Operand, PackedWeight
from hf_neuron_moe.backends.torch.tiles import Loader

OPTION = "HF_NEURON_MOE_GENERATION_COPIES"
"""Environment variable: ``0`` quantizes the weights in every call, ``1`` or unset keeps them quantized."""
MOST_ROWS_OF_FP32 = 64  # where bf16 products are slow; beyond, tiles of fp32 are faster although they quantize anew
_ROWS = 1 << 18  # elements that are quantized at a time


@functools.cache
def generation_copies() -> PreparedWeights:
    """Return the copies of this process."""
    return PreparedWeights()


def suits(precision: str, rows: int, weight: Tensor) -> bool:
    """Whether a call without gradients reads quantized copies of its weights."""
    most = MOST_ROWS if bf16_matmul_is_fast(weight.device) else MOST_ROWS_OF_FP32
    few = precision == "mxfp8" and 0 < rows <= most and not weight.is_meta
    return few and environment_option(OPTION, "1", "0") == "1"


def mlp(x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, gating: Gating = SILU) -> Tensor:
    """Return the dense MLP's output, bf16 ``[S, H]``."""
    loader = Loader(operands_in_bf16("mxfp8"), call_scratch(x_SH.device), lone_384=True, ready_weights=True)
    gate, up = (_copy(weight[None], weight, "summed", loader) for weight in (gate_IH, up_IH))
    ready = ReadyWeights(gate, up, _copy(down_HI[None], down_HI, "packed", loader))
    return grouped_forward(x_SH, Rows.of_dense(len(x_SH)), ready, loader, Checkpoints(), gating)


def experts(x_TH: Tensor, rows: Rows, stack: ExpertStack, gating: Gating = SILU) -> Tensor:
    """Return the experts' weighted sum, bf16 ``[T, H]``."""
    loader = Loader(operands_in_bf16("mxfp8"), call_scratch(x_TH.device), ready_weights=True)
    gate_up = _copy(stack.both(loader.scratch), stack.stacked.gate_up, "summed", loader)
    assert isinstance(gate_up, Tensor)
    gate, up = gate_up.chunk(2, dim=1)
    ready = ReadyWeights(gate, up, _copy(stack.down_GHI, stack.stacked.down, "packed", loader))
    return grouped_forward(x_TH, rows, ready, loader, Checkpoints(), gating).to(x_TH.dtype)


def _copy(weight_GNK: Tensor, source: Tensor, form: str, loader: Loader) -> Operand:
    """The operand of a view of `source`: ``"packed"`` or ``"summed"``; the view's strides say its orientation."""

    def build(_: Tensor) -> Operand:
        groups, columns, size = weight_GNK.shape
        operand_GNK = weight_GNK.new_zeros((groups, columns, loader.width(size)), dtype=torch.bfloat16)
        operand_GNK[..., :size].copy_(weight_GNK)
        rows_RK = operand_GNK.flatten(0, 1)
        for part in rows_RK.split(max(_ROWS // rows_RK.shape[1], 1)):
            loader.quantize(part, axis=1)
        return PackedWeight(operand_GNK) if form == "packed" and PackedWeight.suits(operand_GNK) else operand_GNK

    key = f"{form}:{weight_GNK.stride()}:{loader.lone_384}"
    return generation_copies().get(key, build, source, sampled=True)

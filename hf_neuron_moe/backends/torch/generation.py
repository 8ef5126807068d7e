"""Generation in mxfp8: few rows, no gradients, and weights that are quantized once instead of for every token.

The copies are in bf16, which holds the values exactly: as many bytes as bf16 weights have. Codes would take half, but
decoding them would cost more than a token's products. A copy is made in the first such call and dropped when its weight
changes (``backends/prepared.py``), when the module changes between training and evaluation, and by ``refresh_weights``.

Legend: G groups, N columns of a product's result, K its contraction axis, I intermediate, H hidden, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hf_neuron_moe.backends.prepared import PreparedWeights
from hf_neuron_moe.backends.spec import FFNWeights
from hf_neuron_moe.backends.torch.compute import (
    bf16_matmul_is_fast,
    call_scratch,
    never_waits,
    operands_in_bf16,
)
from hf_neuron_moe.backends.torch.cpu.decode import MOST_ROWS
from hf_neuron_moe.backends.torch.experts import ExpertStack, Rows, split_gate_up
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.grouped_forward import ReadyWeights, grouped_forward
from hf_neuron_moe.backends.torch.grouped_products import Operand, PackedWeight
from hf_neuron_moe.backends.torch.tiles import Loader
from hf_neuron_moe.environment import GENERATION_COPIES, environment_option

OPTION = GENERATION_COPIES
"""Environment variable: ``0`` quantizes the weights in every call, ``1`` or unset keeps them quantized."""
MOST_ROWS_OF_FP32 = 64  # where bf16 products are slow; beyond, tiles of fp32 are faster although they quantize anew
_ROWS = 1 << 18  # elements that are quantized at a time


@functools.cache
def generation_copies() -> PreparedWeights:
    """Return the copies of this process."""
    return PreparedWeights()


def holds_copies(backend: str, precision: str, device: torch.device) -> bool:
    """Whether calls without gradients make copies at all; not where all experts are computed at once on every call."""
    here = backend == "torch" and precision == "mxfp8" and not never_waits(device)
    return here and environment_option(OPTION) == "1"


def suits(precision: str, rows: int, weight: Tensor) -> bool:
    """Whether a call without gradients reads quantized copies of its weights."""
    most = MOST_ROWS if bf16_matmul_is_fast(weight.device) else MOST_ROWS_OF_FP32
    few = precision == "mxfp8" and 0 < rows <= most and not weight.is_meta
    return few and environment_option(OPTION) == "1"


def mlp(x_SH: Tensor, weights: FFNWeights, gating: Gating = SILU) -> Tensor:
    """Return the dense MLP's output, bf16 ``[S, H]``."""
    loader = Loader(operands_in_bf16("mxfp8"), call_scratch(x_SH.device), lone_384=True, ready_weights=True)
    gate, up = (_summed(weight[None], weight, loader) for weight in weights[:2])
    # A bias is added to sums, which packed weights do not give.
    down_HI, bias_H = weights.down_HI, weights.down_bias_H
    down = (_packed if bias_H is None else _summed)(down_HI[None], down_HI, loader)
    biases = (None if bias is None else bias[None] for bias in weights[3:])
    ready = ReadyWeights(gate, up, down, *biases)
    return grouped_forward(x_SH, Rows.of_dense(len(x_SH)), ready, loader, Checkpoints(), gating).to(x_SH.dtype)


def experts(x_TH: Tensor, rows: Rows, stack: ExpertStack, gating: Gating = SILU) -> Tensor:
    """Return the experts' weighted sum without their down biases, fp32 ``[T, H]``."""
    loader = Loader(operands_in_bf16("mxfp8"), call_scratch(x_TH.device), ready_weights=True)
    gate_up = _summed(stack.both(loader.scratch), stack.stacked.gate_up, loader)
    gate, up = split_gate_up(gate_up, stack.spec)
    down = _packed(stack.down_GHI, stack.stacked.down, loader)
    ready = ReadyWeights(gate, up, down, stack.gate_bias_GI, stack.up_bias_GI)
    return grouped_forward(x_TH, rows, ready, loader, Checkpoints(), gating)


def _packed(weight_GNK: Tensor, source: Tensor, loader: Loader) -> Operand:
    """The operand of :func:`_copy`, packed where the processor has such an order."""

    def build(operand_GNK: Tensor) -> Operand:
        return PackedWeight(operand_GNK) if PackedWeight.suits(operand_GNK) else operand_GNK

    return _copy("packed", build, weight_GNK, source, loader)


def _summed(weight_GNK: Tensor, source: Tensor, loader: Loader) -> Tensor:
    """The operand of :func:`_copy` for fp32 sums."""
    operand = _copy("summed", lambda operand_GNK: operand_GNK, weight_GNK, source, loader)
    assert isinstance(operand, Tensor)
    return operand


def _copy(
    form: str, finish: Callable[[Tensor], Operand], weight_GNK: Tensor, source: Tensor, loader: Loader
) -> Operand:
    """The operand of a view of `source`, kept under its `form`; the view's strides say its orientation."""

    def build(_: Tensor) -> Operand:
        groups, columns, size = weight_GNK.shape
        operand_GNK = weight_GNK.new_zeros((groups, columns, loader.width(size)), dtype=torch.bfloat16)
        operand_GNK[..., :size].copy_(weight_GNK)
        rows_RK = operand_GNK.flatten(0, 1)
        for part in rows_RK.split(max(_ROWS // rows_RK.shape[1], 1)):
            loader.quantize(part, axis=1)
        return finish(operand_GNK)

    key = f"{form}:{weight_GNK.stride()}:{loader.lone_384}"
    return generation_copies().get(key, build, source, sampled=True)

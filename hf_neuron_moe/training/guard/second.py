"""A second computation of a block's products for a few rows: in float64, rounded where the kernels round.

It shares no rounding with the backend: MX operands come from :mod:`hf_neuron_moe.formats.mx`, slopes are differences.
The rounding points are listed in ``backends/torch/ffn_forward.py`` and ``ffn_backward.py``, and for MX codes in
``quantized.py``.

Legend: R rows, H hidden, I intermediate, K contraction axis, C channels of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.mx_weights import WORDS, MXExpertStack, MXMatrix
from hf_neuron_moe.backends.spec import FFNWeights
from hf_neuron_moe.backends.torch.saved import GROUP
from hf_neuron_moe.formats.constants import E4M3FN
from hf_neuron_moe.formats.group_fp8 import scale_of_groups
from hf_neuron_moe.formats.mx import fake_quantize_mx
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.training.block_calls import Call, activated, softcapped

_CHUNK = 1024  # rows that are computed together
_DIFFERENCE = 1e-7  # of the two values whose difference is a slope


class Product(NamedTuple):
    """``sum_s left_s right_s^T`` over segments of the contraction axis; in MX each operand is quantized along it."""

    left_RK: Sequence[Tensor]
    right_CK: Sequence[Tensor]
    precision: str
    width: int = 0  # to which every segment is padded at least
    lone_384: bool = False  # an axis of 384 is one tile
    scheme: str = ""  # of values of MX codes on the right: in which the left operand alone is quantized, at `width`

    def value(self, *, quantized: bool = True) -> Tensor:
        """Return the product ``[R, C]`` in float64; not `quantized`, that of the operands before MX."""
        total = None
        for left_RK, right_CK in zip(self.left_RK, self.right_CK, strict=True):
            right = rounded(right_CK, self.precision) if self.scheme else self.operand(right_CK, quantized)
            part = self.operand(left_RK, quantized) @ right.t()
            total = part if total is None else total + part
        assert total is not None
        return total

    def operand(self, values_RK: Tensor, quantized: bool = True) -> Tensor:
        """Return an operand as the product sees it."""
        if not (quantized and (self.scheme or self.precision == "mxfp8")):
            return rounded(values_RK, self.precision)
        size = values_RK.shape[1]
        whole = self.width if self.scheme else max(self.width, padded_size(size))
        padded = F.pad(values_RK.float().bfloat16(), (0, whole - size))
        scheme = self.scheme or ("wrapX_single" if self.lone_384 and whole == 384 else "wrapX")
        return fake_quantize_mx(padded, scheme=scheme)[:, :size].double()


Pre = tuple[Tensor | None, Tensor]
"""Gate (None without one) and up pre-activations of the rows of all experts, or of some."""


def rounded(values: Tensor, precision: str) -> Tensor:
    """Return values as they stand between products, float64."""
    return values.double() if precision == "fp32" else values.float().bfloat16().double()


def fp8_groups(values_GQ: Tensor) -> Tensor:
    """Return values as COAT rounds the activation that a backward reads, each last axis being a group, float64."""
    scale_G1 = scale_of_groups(values_GQ.float(), E4M3FN).unsqueeze(-1)
    return (values_GQ.float() / scale_G1).to(torch.float8_e4m3fn).double() * scale_G1.bfloat16().double()


class Forward(NamedTuple):
    """What a network's forward makes of rows, float64; gate and up as they are saved."""

    gate_RI: Tensor | None
    up_RI: Tensor
    act_RI: Tensor  # as mxfp8 saves it, as `product_RI`
    product_RI: Tensor
    down: Product
    out_RH: Tensor


class Inner(NamedTuple):
    """What a network's backward makes of rows between its products, float64."""

    d_scale_R: Tensor
    d_gate_RI: Tensor | None
    d_up_RI: Tensor
    inter_RI: Tensor


class Network(NamedTuple):
    """One expert, or a dense block."""

    gate_IH: Tensor | None
    up_IH: Tensor
    down_HI: Tensor
    added: tuple[Tensor | float, Tensor | float]  # to the sums of gate and of up
    down_bias_H: Tensor | None
    gate: Gate
    precision: str
    dense: bool
    fp8: bool  # whether the backward rounds as COAT does
    codes: MXExpertStack | None  # that the weights are the values of

    @classmethod
    def of(cls, call: Call, expert: int, *, fp8: bool = False) -> Network:
        """Return an expert of a call."""
        gate, up, down = (None if weight is None else weight[expert] for weight in call.projections)
        biases = [0.0 if bias is None else bias[expert].double() for bias in call.biases]
        down_bias = call.weights.down_bias_H if isinstance(call.weights, FFNWeights) else call.weights.down_bias
        if down_bias is not None and call.routing is not None:
            down_bias = down_bias[expert]
        assert up is not None and down is not None
        added = (biases[0], biases[1] + call.spec.gate.up_offset)
        form = (call.spec.gate, call.spec.precision, call.routing is None, fp8, call.codes)
        return cls(gate, up, down, added, down_bias, *form)

    def channels(self, index_C: Tensor) -> Network:
        """Return the network with some intermediate channels alone."""
        gate, up = (part if isinstance(part, float) else part[index_C] for part in self.added)
        gate_IH = None if self.gate_IH is None else self.gate_IH[index_C]
        return self._replace(
            gate_IH=gate_IH, up_IH=self.up_IH[index_C], down_HI=self.down_HI[:, index_C], added=(gate, up)
        )

    def product(self, left_RK: Tensor, right_CK: Tensor) -> Product:
        """Return a product of the backward."""
        return Product([left_RK], [right_CK], self.precision)

    def project(self, x_RH: Tensor, weight_IH: Tensor) -> Product:
        """Return the product of the input with rows of gate or up."""
        return self._of_forward(x_RH, weight_IH, None if self.codes is None else self.codes.gate_up)

    def output(self, inter_RI: Tensor, after_R1: Tensor | None) -> Product:
        """Return the down projection; the factors `after_R1` multiply its rows, which then are quantized before."""
        product = self._of_forward(inter_RI, self.down_HI, None if self.codes is None else self.codes.down)
        if after_R1 is None:
            return product
        return Product([product.operand(inter_RI) * after_R1], [self.down_HI], "fp32")

    def _of_forward(self, left_RK: Tensor, right_CK: Tensor, matrix: MXMatrix | None) -> Product:
        if matrix is None:
            return Product([left_RK], [right_CK], self.precision, lone_384=self.dense)
        scheme = matrix.layout.scheme
        return Product([left_RK], [right_CK], self.precision, width=matrix.shape[1], scheme=scheme)

    def sums(self, x_RH: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return gate and up with what is added to them."""
        gate = None if self.gate_IH is None else self.project(x_RH, self.gate_IH).value() + self.added[0]
        return gate, self.project(x_RH, self.up_IH).value() + self.added[1]

    def activation(self, gate_RI: Tensor | None, up_RI: Tensor) -> Tensor:
        """Return what multiplies up's value."""
        return activated(self.gate, up_RI if gate_RI is None else gate_RI)

    def up_value(self, up_RI: Tensor) -> Tensor:
        """Return what the activation is multiplied by, of up with its offset."""
        if self.gate_IH is None:
            return torch.ones_like(up_RI)
        gate = self.gate
        low, high = (None if limit is None else limit + gate.up_offset for limit in (gate.up_min, gate.up_max))
        return softcapped(gate, up_RI if low is None and high is None else up_RI.clamp(low, high))

    def forward(self, x_RH: Tensor, scale_R: Tensor | None) -> Forward:
        """Return the forward of rows with the factors `scale_R` on the intermediate."""
        sums = self.sums(x_RH)
        gate, up = (None if part is None else rounded(part, self.precision) for part in sums)
        assert up is not None
        act, product = self._products(gate, up)
        read = sums if self.precision == "mxfp8" or self.codes is not None else (gate, up)
        inter = self.activation(*read) * self.up_value(read[1])
        before = after = None if scale_R is None else scale_R.double().unsqueeze(1)
        if self.codes is not None and self.codes.down_layout.arrangement == WORDS:
            before = None
        else:
            after = None
        inter = rounded(inter if before is None else inter * before, self.precision)
        down = self.output(inter, after)
        return Forward(gate, up, act, product, down, down.value())

    def _products(self, gate: Tensor | None, up: Tensor) -> tuple[Tensor, Tensor]:
        act = self.activation(gate, up)
        if self.precision == "mxfp8" and gate is not None:
            act = rounded(act, self.precision)
            return act, rounded(act * self.up_value(up), self.precision)
        return act, act * self.up_value(up)

    def fp8_activation(self, gate_RI: Tensor, index_C: Tensor) -> Tensor:
        """Return the activation of some channels, rounded with those that share their groups' scales ``[R, C]``."""
        inside = torch.arange(GROUP, device=index_C.device)
        # The last group may be shorter: its last value once more changes no scale.
        columns_CQ = (index_C[:, None] // GROUP * GROUP + inside).clamp(max=gate_RI.shape[1] - 1)
        values_RCQ = self.activation(gate_RI[:, columns_CQ].double(), gate_RI)
        return fp8_groups(values_RCQ)[:, torch.arange(len(index_C), device=index_C.device), index_C % GROUP]

    def inner(
        self, dout_RH: Tensor, gate: Tensor | None, up: Tensor, scale_R: Tensor | None, act: Tensor | None = None
    ) -> Inner:
        """Return what the backward makes of the gradient of rows; gate and up are the saved ones.

        `act` is :meth:`fp8_activation` of a network of some channels.
        """
        precision, slopes_round = self.precision, self.precision == "mxfp8" and gate is not None and not self.fp8
        d_inter = self.product(dout_RH, self.down_HI.t()).value()
        if self.fp8 and gate is not None:
            act = self.fp8_activation(gate, torch.arange(gate.shape[1], device=gate.device)) if act is None else act
            product = act * self.up_value(up)
        else:
            act, product = self._products(gate, up)
        d_scale = (d_inter * product).sum(1)
        if scale_R is not None:
            d_inter, product = (part * scale_R.double().unsqueeze(1) for part in (d_inter, product))
        inter = rounded(product, precision)
        if gate is None:
            slope = _slope(lambda values: activated(self.gate, values), up)
            d_inter = d_inter.float().bfloat16().double() if self.fp8 else d_inter
            return Inner(d_scale, None, rounded(slope * d_inter, precision), inter)
        d_up = rounded(act * d_inter * _slope(self.up_value, up), precision)
        slope = _slope(lambda values: activated(self.gate, values), gate)
        if self.fp8:
            d_act = (d_inter * self.up_value(up)).float().bfloat16().double()
            return Inner(d_scale, rounded(slope * d_act, precision), d_up, inter)
        slope = rounded(slope, precision) if slopes_round else slope
        slope = slope * self.up_value(up)
        slope = rounded(slope, precision) if slopes_round else slope
        return Inner(d_scale, rounded(slope * d_inter, precision), d_up, inter)

    def input_gradient(self, inner: Inner) -> Product:
        """Return the product that the gradient of the input is; in MX gate and up are one axis."""
        if inner.d_gate_RI is None or self.gate_IH is None:
            return self.product(inner.d_up_RI, self.up_IH.t())
        pairs = [(inner.d_gate_RI, self.gate_IH.t()), (inner.d_up_RI, self.up_IH.t())]
        if self.precision != "mxfp8":
            return Product([left for left, _ in pairs], [right for _, right in pairs], self.precision)
        missing = padded_size(len(self.up_IH)) - len(self.up_IH)
        left, right = (torch.cat([F.pad(part, (0, missing)) for part in side], 1) for side in zip(*pairs, strict=True))
        return self.product(left, right)

    def inner_of_channels(
        self,
        index_C: Tensor,
        x_RH: Tensor,
        dout_RH: Tensor,
        pre: Pre | None,
        scale: Tensor | None,
    ) -> Inner:
        """Return :meth:`inner` of all rows for some channels; `pre` are gate and up where they are given."""
        few, parts = self.channels(index_C), []
        for start in range(0, len(dout_RH), _CHUNK):
            rows, act = slice(start, start + _CHUNK), None
            if pre is None:
                gate, up = (None if part is None else rounded(part, self.precision) for part in few.sums(x_RH[rows]))
            else:
                gate, up = (None if part is None else part[rows][:, index_C].double() for part in pre)
                if self.fp8 and pre[0] is not None:
                    act = self.fp8_activation(pre[0][rows], index_C)
            assert up is not None
            parts.append(few.inner(dout_RH[rows], gate, up, None if scale is None else scale[rows], act))
        joined = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        return Inner(*joined)  # type: ignore[arg-type]


def over_rows(left_RA: Tensor, right_RB: Tensor, precision: str, block_size: int | None) -> Product:
    """Return the product that sums over rows; in MX a block of the blockwise kernels is a segment of its own."""
    size = len(left_RA) if block_size is None or precision != "mxfp8" else block_size
    lefts, rights = (list(part.t().split(max(size, 1), dim=1)) for part in (left_RA, right_RB))
    return Product(lefts, rights, precision, width=0 if block_size is None else block_size)


def _slope(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return a derivative; 0 on a limit as beyond it, which is how the kernels mask."""
    below, here, above = (function(values + step) for step in (-_DIFFERENCE, 0.0, _DIFFERENCE))
    left, right = here - below, above - here  # of which one is too small where a limit is nearer than the step
    slope = torch.where(left.abs() > right.abs(), left, right) / _DIFFERENCE
    return torch.where((left == 0) | (right == 0), 0.0, slope)

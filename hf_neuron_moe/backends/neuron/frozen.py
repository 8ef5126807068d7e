"""Frozen MX weights through the kernels that take pre-quantized operands: inference only.

Dense MLPs go through ``mlp_fwd_mxfp8`` with codes and packed scales. No documented kernel gives the input's gradient
alone, and none takes codes that are quantized along the other axis; so training goes through the torch backend.

Letters: S tokens, H hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.backends.mx_weights import NATURAL, SWIZZLED, MXExpertStack, MXLayout
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.launch import Launcher
from hf_neuron_moe.backends.neuron.layouts import pad_axes
from hf_neuron_moe.backends.neuron.limits import Device
from hf_neuron_moe.backends.neuron.prepared import PreparedWeights
from hf_neuron_moe.formats.constants import SwizzleScheme
from hf_neuron_moe.formats.padding import LANES, padded_size
from hf_neuron_moe.formats.scales import to_packed
from hf_neuron_moe.formats.swizzle import swizzle, tile_segments


@dataclass(frozen=True)
class FrozenKernels:
    """Forward of blocks with MX weights.

    Attributes:
        adapter: finds the wrapper kernels.
        launch: calls them.
        weights: prepared copies.
    """

    adapter: Adapter
    launch: Launcher
    weights: PreparedWeights

    def why_not(self, stack: MXExpertStack, device: Device, training: bool) -> str | None:
        """Return why the kernels cannot compute `stack` on `device`, or None."""
        if training:
            return "no documented kernel gives the input's gradient through pre-quantized weights"
        if device.platform != "trn3":
            return f"the MXFP8 kernels run on Trn3 only, and this is {device.platform}"
        if stack.gate_up_codes.dim() > 2:
            return "this package calls no kernel for experts with MX weights"
        for name, layout, size in (
            ("gate_up_proj", stack.gate_up_layout, stack.hidden),
            ("down_proj", stack.down_layout, stack.inner),
        ):
            reason = _why_not_operand(layout, size)
            if reason is not None:
                return f"{name}: {reason}"
        if stack.down_layout.matrix_shape(stack.down_codes.shape)[1] != stack.inner:
            return "down_proj holds more columns than the network has"
        return self.adapter.why_not("mlp_forward")

    def forward(self, x_SH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, stack: MXExpertStack) -> Tensor:
        """Return ``y [S, H]``; :meth:`why_not` was None."""
        tokens = x_SH.shape[0]
        if not tokens:
            return torch.zeros_like(x_SH)
        gate_up = self._operand("gate_up", stack.gate_up_codes, stack.gate_up_scales, stack.gate_up_layout)
        down = self._operand("down", stack.down_codes, stack.down_scales, stack.down_layout)
        out_SH, *_ = self.launch(
            self.adapter.kernel("mlp_forward", "mlp_forward_quantized"),
            hidden=pad_axes(x_SH, (padded_size(tokens), x_SH.shape[1])),
            gate_up_weights=gate_up[0],
            down_weights=down[0],
            gate_up_scales=gate_up[1],
            down_scales=down[1],
            run_with_lnc2=self.launch.lnc == 2,
        )
        return out_SH[:tokens].contiguous()

    def _operand(self, name: str, codes: Tensor, scales: Tensor, layout: MXLayout) -> tuple[Tensor, Tensor]:
        """Codes as float8_e4m3fn ``[K/4, 4F]`` and scales as ``use_scale_packing`` asks for them."""
        if layout.arrangement == NATURAL:
            codes = self.weights.get(f"frozen {name} {layout.scheme}", lambda own: swizzle(own, layout.scheme), codes)
        # Raw bytes would be read as e5m2: the kernel goes by the dtype's name.
        return codes.view(torch.float8_e4m3fn), self.weights.get(f"frozen {name} scales", to_packed, scales)


def _why_not_operand(layout: MXLayout, size: int) -> str | None:
    if layout.fmt != "e4m3fn" or layout.arrangement not in (NATURAL, SWIZZLED):
        return f"the kernel takes e4m3fn codes of a matrix, and these are {layout.fmt}, {layout.arrangement}"
    if size % LANES:
        return f"the kernel quantizes activations in tiles of {LANES}, and the contraction axis is {size}"
    if size == 384:
        return "at a contraction axis of exactly 384 the kernel groups activations and codes differently"
    if tile_segments(size, layout.scheme) != tile_segments(size, SwizzleScheme.WRAPX):
        return f"the kernel groups activations as {SwizzleScheme.WRAPX.value}, and the codes are {layout.scheme}"
    return None

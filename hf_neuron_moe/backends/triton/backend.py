"""The backend ``"triton"``: layers of experts by the kernels of this folder, all else as ``"torch-grouped"``.

The kernels compute ``bf16`` and ``mxfp8``. Dense blocks, ``fp32`` and frozen MX weights are torch's operations.

Legend: T tokens, R rows sorted by expert, G experts, H hidden, I intermediate, N columns of a result, K contraction
axis.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, Support
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.backends.torch.device_backward import DeviceBackward, of_a_product
from hf_neuron_moe.backends.torch.experts import ExpertStack, GroupedWeights, Rows, sum_over_experts
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, added_to_sums
from hf_neuron_moe.backends.torch.gating import SILU, Gating
from hf_neuron_moe.backends.torch.grouped_forward import ReadyWeights, grouped_forward
from hf_neuron_moe.backends.torch.saved import FP8Gating
from hf_neuron_moe.backends.torch.tiles import Loader
from hf_neuron_moe.errors import BackendUnavailableError
from hf_neuron_moe.formats.constants import MX_BLOCK

if TYPE_CHECKING:
    from hf_neuron_moe.backends.triton.expert_gemm import Operand

_OTHERWISE = "Use backend='torch': it computes the same contract on any device."


def _forward(
    x_TH: Tensor,
    rows: Rows,
    weights: GroupedWeights | ReadyWeights,
    loader: Loader,
    save: Checkpoints,
    gating: Gating,
) -> Tensor:
    """Compute what ``grouped_forward`` does, and fill `save`."""
    from hf_neuron_moe.backends.triton.expert_gemm import grouped_product
    from hf_neuron_moe.backends.triton.gate_epilogue import gate_forward

    assert isinstance(weights, ExpertStack) and rows.on_device is not None and weights.gate_up_G2IH is not None
    ends_G, precision = rows.on_device.ends_G, _rounding(loader)
    both_RN = grouped_product(
        _columns(x_TH, loader),
        _weight(weights.gate_up_G2IH, loader),
        ends_G,
        token_R=rows.token_R,
        added_EN=_added(weights, gating),
        dtype=torch.float32 if loader.compute.mx else torch.bfloat16,
    )
    gate_RI, up_RI = _halves(both_RN, weights)
    inter_RI = gate_forward(gate_RI, up_RI, weights.spec.gate, rounding=precision, scale_R=rows.scale_R, saved=save)
    down = _weight(weights.down_GHI, loader)
    return sum_over_experts(grouped_product(_columns(inter_RI, loader), down, ends_G, dtype=torch.bfloat16), rows)


class TritonBackward(DeviceBackward):
    """The backward of :func:`_forward`; of ``fp32`` its parent's."""

    def run(self) -> Tensor | None:
        """Write the gradients that are wanted; return that of the tokens ``[T, H]``."""
        if self.loader.compute.operand != torch.bfloat16:
            return super().run()
        d_gate_up, inter_RI = self._inner_gradients()
        both = d_gate_up.shape[1] == self.weights.inner * (1 if self.gating.skip_gate else 2)
        as_one = self.grads is not None and both and (self._in_pairs or not self._stack.interleaved)
        by_columns, by_rows = self._quantized(d_gate_up, columns=self.wants_input, rows=as_one)
        dx_TH = self._input_gradient(by_columns, d_gate_up.shape[1]) if self.wants_input else None
        del by_columns
        if self.grads is not None:
            self._bias_grad(d_gate_up)
            self._put_down(inter_RI[:, : self.weights.inner])
            self._put_gate_up(d_gate_up, by_rows if as_one else None)
        return dx_TH

    def _input_gradient(self, d_gate_up: Operand, columns: int) -> Tensor:
        from hf_neuron_moe.backends.triton.expert_gemm import grouped_product

        both_G2IH = self._padded_weights(slice(None), columns) if self._rearranged else self._stack.gate_up_G2IH
        assert both_G2IH is not None
        weight_GHN = _weight(both_G2IH.transpose(1, 2), self.loader)
        dx_RH = grouped_product(d_gate_up, weight_GHN, self._runs.ends_G, dtype=torch.bfloat16)
        return sum_over_experts(dx_RH, self.rows).to(self.x_TH.dtype)

    def _inner_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up as one ``[R, N]`` (:meth:`_halves`), and the scaled intermediate."""
        from hf_neuron_moe.backends.triton.expert_gemm import grouped_product
        from hf_neuron_moe.backends.triton.gate_epilogue import gate_backward

        loader, rows, stack = self.loader, self.rows, self._stack
        down_GIH = _weight(stack.down_GHI.transpose(1, 2), loader)
        dout_TK = _columns(self.dout_TH, loader)
        d_int_RI = grouped_product(dout_TK, down_GIH, self._runs.ends_G, token_R=rows.token_R)
        columns = loader.width(stack.inner) * (1 if self.gating.skip_gate else 2)
        d_gate_up = d_int_RI.new_empty((rows.count, columns), dtype=torch.bfloat16)
        gate, up = self._halves(d_gate_up)
        rounding = "fp8" if isinstance(self.gating, FP8Gating) else _rounding(loader)
        into = (None if self.gating.skip_gate else gate, up)
        inter_RI, d_scale_R = gate_backward(
            d_int_RI, self._kept(), stack.spec.gate, into, rounding=rounding, scale_R=rows.scale_R
        )
        if self.d_scale_R is not None and d_scale_R is not None:
            self.d_scale_R.add_(d_scale_R)
        return d_gate_up, inter_RI

    def _kept(self) -> Checkpoints:
        """Return what was saved with the whole of gate and up; what is missing is made again by the forward's product.

        A value has the forward's bits: a product's columns do not depend on each other.
        """
        saved, weights = self.saved, self.weights
        saved_up = 0 if saved.up is None else saved.up.shape[1]
        parts = {} if saved_up == weights.inner else {"up": weights.up_GIH[:, saved_up:]}
        if saved.gate is None and not self.gating.skip_gate:
            parts["gate"] = weights.gate_GIH
        if not parts:
            return saved
        gate_added, up_added = added_to_sums(weights.up_GIH, (weights.gate_bias_GI, weights.up_bias_GI), self.gating)
        added = {"gate": gate_added, "up": None if up_added is None else up_added[:, saved_up:]}
        x_TK = _columns(self.x_TH, self.loader)
        made = {name: self._product(x_TK, part_GNH, added[name]) for name, part_GNH in parts.items()}
        if isinstance(saved.up, Tensor) and "up" in made:
            made["up"] = torch.cat([saved.up, made["up"]], dim=1)
        return replace(saved, gate=made.get("gate", saved.gate), up=made.get("up", saved.up))

    def _product(self, x_TK: Operand, weight_GNH: Tensor, added_GN: Tensor | None) -> Tensor:
        from hf_neuron_moe.backends.triton.expert_gemm import grouped_product

        weight, token_R = _weight(weight_GNH, self.loader), self.rows.token_R
        return grouped_product(
            x_TK, weight, self._runs.ends_G, token_R=token_R, added_EN=added_GN, dtype=torch.bfloat16
        )

    def _quantized(self, values_RN: Tensor, *, columns: bool, rows: bool) -> tuple[Operand, Operand]:
        """Return an operand of a product along N, and one of a sum over rows; in MX both of one read."""
        if not self.loader.compute.mx or not (columns or rows):
            return values_RN, values_RN
        from hf_neuron_moe.backends.triton.mx_both_ways import quantize

        of_rows, values = self._blocks if rows else None, not multiplies_codes(values_RN.device)
        return quantize(values_RN, of_rows, values=values, columns=columns)

    @property
    def _blocks(self) -> tuple[Tensor, int]:
        assert self.rows.block_size is not None, "rows of experts lie in blocks"
        return self._runs.ends_G, self.rows.block_size

    def _of_tokens(self, values_TH: Tensor) -> tuple[Operand, Tensor | None]:
        """Return an operand of a sum over rows, and which of its rows are those; in MX they are gathered."""
        values_TH = values_TH.to(torch.bfloat16)
        if not self.loader.compute.mx:
            return values_TH, self.rows.token_R
        from hf_neuron_moe.backends.triton.mx_both_ways import quantize

        values, token_R = not multiplies_codes(values_TH.device), self.rows.token_R
        return quantize(values_TH, self._blocks, values=values, columns=False, token_R=token_R)[1], None

    def _sum(self, left: tuple[Operand, Tensor | None], right: tuple[Operand, Tensor | None], like: Tensor) -> Tensor:
        """Return ``left^T @ right`` over each expert's rows, of the shape of `like` and as the weights lie."""
        from hf_neuron_moe.backends.triton.expert_gemm import weight_gradient

        (a, a_token_R), (b, b_token_R) = left, right
        made = torch.empty_like(like, dtype=torch.bfloat16 if self.loader.compute.mx else of_a_product(like.dtype))
        out_GMN = made.transpose(1, 2) if self._stack.spec.transposed else made
        tokens, block_size = (a_token_R, b_token_R), self.rows.block_size or MX_BLOCK
        weight_gradient(a, b, self._runs.ends_G, out_GMN, tokens=tokens, block_size=block_size)
        return made

    def _put_down(self, inter_RI: Tensor) -> None:
        assert self.grads is not None
        right = self._quantized(inter_RI, columns=False, rows=True)[1]
        self.grads.put(1, self._sum(self._of_tokens(self.dout_TH), (right, None), self._stack.stacked.down))

    def _put_gate_up(self, d_gate_up: Tensor, as_one: Operand | None) -> None:
        """Write the gradient from `as_one`, or from gate's and up's part apart where these are padded or rearranged."""
        assert self.grads is not None
        weight, tokens = self._stack.stacked.gate_up, self._of_tokens(self.x_TH)
        if as_one is not None:
            self.grads.put(0, self._sum((as_one, None), tokens, weight))
            return
        made, transposed = self.grads.grouped(), self._stack.spec.transposed
        for part, target_GIH in zip(self._halves(d_gate_up), (made.gate_GIH, made.up_GIH), strict=True):
            if part.shape[1]:
                left = self._quantized(part[:, : self.weights.inner], columns=False, rows=True)[1]
                like = (target_GIH.transpose(1, 2) if transposed else target_GIH).contiguous()
                sums = self._sum((left, None), tokens, like)
                target_GIH.copy_(sums.transpose(1, 2) if transposed else sums)


class TritonBackend(TorchBackend):
    """Implements :class:`hf_neuron_moe.backends.base.Backend` on CUDA devices. No GPU has run it."""

    universal = False
    at_once_backward = TritonBackward

    @classmethod
    def instance(cls, name: str) -> TritonBackend:
        return _BACKEND

    @classmethod
    def unavailable_reason(cls, name: str) -> BackendUnavailableError | None:
        expected = "one that can run here"
        if importlib.util.find_spec("triton") is None:
            fix = f"Install it: pip install triton. {_OTHERWISE}"
            return BackendUnavailableError.about("backend", expected, "'triton', and Triton is not installed", fix)
        from hf_neuron_moe.backends.triton.device_functions import INTERPRETED

        if torch.cuda.is_available() or INTERPRETED.value:
            return None
        fix = f"{_OTHERWISE} TRITON_INTERPRET=1, set before Python starts, runs small blocks in Triton's interpreter."
        return BackendUnavailableError.about("backend", expected, "'triton' without a CUDA device", fix)

    def support(
        self, shape: BlockShape, spec: BlockSpec, *, tokens: int | None = None, training: bool = True
    ) -> Support:
        from hf_neuron_moe.backends.triton.gate_functions import ACTIVATIONS

        if shape.experts is None or spec.precision == "fp32" or spec.gate.act in ACTIVATIONS:
            return Support()
        return Support(f"its activation is {spec.gate.act}, and the Triton kernels have {', '.join(ACTIVATIONS)}")

    def describe_products(self, precision: str, device: torch.device, shape: BlockShape | None = None) -> str:
        if shape is None or shape.experts is None or precision == "fp32":
            return super().describe_products(precision, device, shape)
        return "bf16 products of all experts at once, in Triton kernels"

    def at_once_forward(
        self,
        x_TH: Tensor,
        rows: Rows,
        weights: GroupedWeights | ReadyWeights,
        loader: Loader,
        save: Checkpoints,
        gating: Gating = SILU,
    ) -> Tensor:
        if loader.compute.operand != torch.bfloat16:
            return grouped_forward(x_TH, rows, weights, loader, save, gating)
        return _forward(x_TH, rows, weights, loader, save, gating)


_BACKEND = TritonBackend("triton")


def _rounding(loader: Loader) -> str:
    return "mxfp8" if loader.compute.mx else "bf16"


def multiplies_codes(device: torch.device) -> bool:
    """Whether `device` multiplies MX codes itself: Blackwell. Elsewhere their bf16 values are multiplied."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _columns(values_RK: Tensor, loader: Loader) -> Operand:
    """Return rows as an operand with K as contraction axis: rounded to bf16, and then in MX."""
    values_RK = values_RK.to(torch.bfloat16)
    if not loader.compute.mx:
        return values_RK
    from hf_neuron_moe.backends.triton.mx_both_ways import quantize

    return quantize(values_RK, values=not multiplies_codes(values_RK.device))[0]


def _weight(weight_GNK: Tensor, loader: Loader) -> Operand:
    """Return a weight as an operand with K as contraction axis; in MX a copy is in K's order first."""
    if loader.compute.mx:
        return _columns(weight_GNK.contiguous().flatten(0, 1), loader)
    return weight_GNK if weight_GNK.dtype == torch.float32 else weight_GNK.to(torch.bfloat16)


def _added(weights: ExpertStack, gating: Gating) -> Tensor | None:
    """Return what is added to the sums of gate and up, fp32 ``[G, N]`` in the order of their columns."""
    gate_GI, up_GI = added_to_sums(weights.up_GIH, (weights.gate_bias_GI, weights.up_bias_GI), gating)
    if gating.skip_gate:
        return up_GI
    if gate_GI is None and up_GI is None:
        return None
    shape = weights.up_GIH.shape[:2]
    parts = [
        weights.up_GIH.new_zeros(shape, dtype=torch.float32) if part is None else part for part in (gate_GI, up_GI)
    ]
    return torch.stack(parts, dim=2).flatten(1) if weights.interleaved else torch.cat(parts, dim=1)


def _halves(both_RN: Tensor, weights: ExpertStack) -> tuple[Tensor | None, Tensor]:
    """Return views of gate and up as the weights' columns lie; gate is None where there is none."""
    if not weights.spec.gate.gated:
        return None, both_RN
    if weights.interleaved:
        return both_RN[:, ::2], both_RN[:, 1::2]
    return both_RN[:, : weights.inner], both_RN[:, weights.inner :]

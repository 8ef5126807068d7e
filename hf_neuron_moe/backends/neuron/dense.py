"""The dense MLP through ``mlp_fwd_mxfp8`` and ``mlp_bwd_mxfp8``.

Letters: S tokens, H hidden, I intermediate. Tokens, H and I are padded to multiples of 128 for the kernels.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep
from hf_neuron_moe.backends.base import Grads, Saved
from hf_neuron_moe.backends.neuron.fp8_checkpoints import coat_checkpoints, pack, unpack
from hf_neuron_moe.backends.neuron.launch import Kernels
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.neuron.orientation import fused_for_kernel, pad_axes, stock_gradient
from hf_neuron_moe.backends.prepared import kept_for
from hf_neuron_moe.backends.spec import FFNWeights
from hf_neuron_moe.backends.torch.saved import fp8_storage
from hf_neuron_moe.formats.padding import padded_size

_ORDER = ("gate_pre", "up", "gate_act", "intermediate")
"""Order of the checkpoints in :data:`~hf_neuron_moe.backends.base.Saved`."""

Checkpoints = dict[str, Tensor]


def fake_saved(x_SH: Tensor, tokens: int, block: Block, keep: Keep) -> Saved:
    """Return uninitialized tensors like those that :meth:`DenseKernels.forward` keeps of `tokens` rows."""
    (hidden, inner), rows = block.padded, padded_size(tokens)
    if keep.fp8:
        return *fp8_storage(x_SH, (2, rows), inner), *fp8_storage(x_SH, (padded_size(x_SH.shape[0]),), hidden)
    gate, up, act, inter = (x_SH.new_empty((rows, inner) if name in keep.names else 0) for name in _ORDER)
    return gate, up, act, inter


class DenseKernels(Kernels):
    """Forward and backward of the dense MLP."""

    def prepare(self, weights: FFNWeights, block: Block) -> None:
        """Make every copy that forward and backward read."""
        self._operands(weights, block)
        if self._reads_transposes:
            self._transposes(weights, block)

    def _operands(self, weights: FFNWeights, block: Block, *, training: bool = True) -> tuple[Tensor, Tensor]:
        """Gate and up ``[2I, H]`` and down ``[H, I]``, bf16 and padded."""
        hidden, inner = block.padded
        fuse = partial(fused_for_kernel, hidden=hidden, inner=inner)
        gate_up_2IH = self.weights.get(f"2IH {hidden}x{inner}", fuse, weights.gate_IH, weights.up_IH, keep=training)
        return gate_up_2IH, self.weight(weights.down_HI, axes="HI", wanted="HI", block=block, training=training)

    @property
    def _reads_transposes(self) -> bool:
        return self.adapter.generation("mlp_backward") == "2.30"

    def _transposes(self, weights: FFNWeights, block: Block) -> dict[str, Tensor]:
        """The copies that 2.30 reads: gate and up ``[H, I]``, down ``[I, H]``."""
        return {
            "gate_proj_weight_T": self.weight(weights.gate_IH, axes="IH", wanted="HI", block=block),
            "up_proj_weight_T": self.weight(weights.up_IH, axes="IH", wanted="HI", block=block),
            "down_proj_weight_T": self.weight(weights.down_HI, axes="HI", wanted="IH", block=block),
        }

    def forward(self, x_SH: Tensor, weights: FFNWeights, block: Block, keep: Keep) -> tuple[Tensor, Saved]:
        """Return ``y [S, H]`` and what is saved: checkpoints ``[S, I]``, padded as the kernels have them."""
        tokens = x_SH.shape[0]
        if not tokens:
            return torch.zeros_like(x_SH), fake_saved(x_SH, 0, block, keep)
        padded = pad_axes(x_SH, (padded_size(tokens), block.padded[0]))
        operands = self._operands(weights, block, training=kept_for(keep))
        out_SH, checkpoints = self._run_forward(padded, operands, keep.names)
        out_SH = out_SH[:tokens, : block.hidden].contiguous()
        if keep.fp8:
            both = torch.stack([checkpoints["gate_pre"], checkpoints["up"]])
            return out_SH, (*pack(both), *pack(padded))
        gate, up, act, inter = (checkpoints[name] if name in keep.names else x_SH.new_empty(0) for name in _ORDER)
        return out_SH, (gate, up, act, inter)

    def _run_forward(
        self, x_SH: Tensor, operands: tuple[Tensor, Tensor], names: frozenset[str]
    ) -> tuple[Tensor, Checkpoints]:
        """Return y and the checkpoints in `names` (and those that they are made from), all padded."""
        out_SH, _, *pre_activations = self.run(
            "mlp_forward",
            "mlp_forward_keeping" if names else "mlp_forward",
            hidden=x_SH,
            gate_up_weights=operands[0],
            down_weights=operands[1],
            run_with_lnc2=self.launch.lnc == 2,
        )
        return out_SH, _with_products(dict(zip(("gate_pre", "up"), pre_activations)), names)

    def backward(
        self, dout_SH: Tensor, x_SH: Tensor, weights: FFNWeights, saved: Saved, block: Block, keep: Keep
    ) -> Grads:
        """Return the gradients of x, gate, up and down for at least one token; the kernel makes all of them."""
        tokens, (hidden, inner) = dout_SH.shape[0], block.padded
        rows = (padded_size(tokens), hidden)
        dout = pad_axes(dout_SH, rows)
        if keep.fp8:
            checkpoints, x = coat_checkpoints(saved[0], saved[1]), unpack(saved[2], saved[3])
        else:
            checkpoints = {name: tensor for name, tensor in zip(_ORDER, saved) if name in keep.names}
            x = pad_axes(x_SH, rows)
        operands = self._operands(weights, block)
        if self._reads_transposes:
            further = self._arguments_2_30(dout, x, operands, checkpoints) | self._transposes(weights, block)
        else:
            further = {"output_grad": dout, "down_proj_weight": operands[1], **checkpoints}
        d_x, d_gate_up, d_down, *_ = self.run(
            "mlp_backward",
            "mlp_backward",
            hidden_states=x,
            gate_up_weights=operands[0],
            run_with_lnc2=self.launch.lnc == 2,
            **further,
        )
        # Never views of the kernel's one output: results of an operator must not share memory.
        found = zip((*(half.clone() for half in d_gate_up.split(inner)), d_down), ("IH", "IH", "HI"), weights[:3])
        d_gate, d_up, d_down = (
            stock_gradient(grad, axes, axes, block.hidden, block.inner, weight.dtype) for grad, axes, weight in found
        )
        return d_x[:tokens, : block.hidden].contiguous(), d_gate, d_up, d_down

    def _arguments_2_30(
        self, dout_SH: Tensor, x_SH: Tensor, operands: tuple[Tensor, Tensor], checkpoints: Checkpoints
    ) -> dict[str, Tensor]:
        """What the kernel of 2.30 reads instead: transposes, and the caller's own intermediate.

        The down gradient is made from that: what the kernel recomputes does not enter it.
        """
        if not checkpoints.keys() >= {"gate_pre", "up"}:
            _, made = self._run_forward(x_SH, operands, frozenset({"gate_pre", "up"}))
            checkpoints = {name: made[name] for name in ("gate_pre", "up")} | checkpoints
        checkpoints = _with_products(checkpoints, frozenset({"intermediate"}))
        inner = checkpoints.pop("intermediate")
        rows = {"output_hidden_states_grad": dout_SH, "hidden": inner}
        turned = {"hidden_states_T": x_SH.t(), "output_grad_T": dout_SH.t(), "hidden_T": inner.t()}
        return rows | turned | checkpoints


def _with_products(checkpoints: Checkpoints, names: frozenset[str]) -> Checkpoints:
    """Add the gate's activation and the intermediate where `names` has them, as the backward kernel would make them.

    The forward kernel would save them rounded from its fp32 sums; then gradients would depend on what is saved.
    """
    if names.isdisjoint({"gate_act", "intermediate"} - checkpoints.keys()):
        return checkpoints
    act = checkpoints.get("gate_act")
    if act is None:
        act = F.silu(checkpoints["gate_pre"].float()).to(torch.bfloat16)
    return {"gate_act": act, "intermediate": act * checkpoints["up"]} | checkpoints

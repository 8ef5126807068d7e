"""The dense MLP through ``mlp_fwd_mxfp8`` and ``mlp_bwd_mxfp8``.

Letters: S tokens, H hidden, I intermediate. Tokens, H and I are padded to multiples of 128 for the kernels.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.base import Saved
from hf_neuron_moe.backends.neuron.fp8_checkpoints import coat_checkpoints, fake_pack, pack, unpack
from hf_neuron_moe.backends.neuron.launch import Kernels
from hf_neuron_moe.backends.neuron.limits import Block
from hf_neuron_moe.backends.neuron.orientation import fused_for_kernel, kernel_weight, pad_axes, stock_gradient
from hf_neuron_moe.backends.prepared import kept_for
from hf_neuron_moe.formats.padding import padded_size

_ORDER = ("gate_pre", "up", "gate_act", "intermediate")
"""Order of the checkpoints in :data:`~hf_neuron_moe.backends.base.Saved`."""


def fake_saved(x_SH: Tensor, tokens: int, block: Block, keep: str) -> Saved:
    """Return uninitialized tensors like those that :meth:`DenseKernels.forward` keeps of `tokens` rows."""
    policy, (hidden, inner), rows = parse_keep(keep), block.padded, padded_size(tokens)
    if policy.fp8:
        return *fake_pack(x_SH, (2, rows, inner)), *fake_pack(x_SH, (padded_size(x_SH.shape[0]), hidden))
    gate, up, act, inter = (x_SH.new_empty((rows, inner) if name in policy.names else 0) for name in _ORDER)
    return gate, up, act, inter


class DenseKernels(Kernels):
    """Forward and backward of the dense MLP."""

    def _operands(
        self, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, block: Block, *, training: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Gate and up ``[2I, H]`` and down ``[H, I]``, bf16 and padded; copies are kept while training."""
        hidden, inner = block.padded
        fuse = partial(fused_for_kernel, hidden=hidden, inner=inner)
        turn = partial(kernel_weight, axes="HI", wanted="HI", hidden=hidden, inner=inner)
        gate_up_2IH = self.weights.get(f"2IH {hidden}x{inner}", fuse, gate_IH, up_IH, keep=training)
        return gate_up_2IH, self.weights.get(f"HI {hidden}x{inner}", turn, down_HI, keep=training)

    def prepare(self, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, block: Block) -> None:
        """Make every copy that forward and backward read."""
        self._operands(gate_IH, up_IH, down_HI, block)
        if self._reads_transposes:
            self._transposed(gate_IH, up_IH, down_HI, block)

    @property
    def _reads_transposes(self) -> bool:
        return self.adapter.generation("mlp_backward") == "2.30"

    def _run_forward(
        self, x_SH: Tensor, gate_up_2IH: Tensor, down_HI: Tensor, names: frozenset[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return y and the checkpoints in `names` (and those that they are made from), all padded."""
        out_SH, _, *pre_activations = self.launch(
            self.adapter.kernel("mlp_forward", "mlp_forward_keeping" if names else "mlp_forward"),
            hidden=x_SH,
            gate_up_weights=gate_up_2IH,
            down_weights=down_HI,
            run_with_lnc2=self.launch.lnc == 2,
        )
        return out_SH, _with_products(dict(zip(("gate_pre", "up"), pre_activations)), names)

    def forward(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, block: Block, keep: str
    ) -> tuple[Tensor, Saved]:
        """Return ``y [S, H]`` and what is kept: checkpoints ``[S, I]``, padded as the kernels have them."""
        tokens, policy = x_SH.shape[0], parse_keep(keep)
        if not tokens:
            return torch.zeros_like(x_SH), fake_saved(x_SH, 0, block, keep)
        padded = pad_axes(x_SH, (padded_size(tokens), block.padded[0]))
        weights = self._operands(gate_IH, up_IH, down_HI, block, training=kept_for(keep))
        out_SH, checkpoints = self._run_forward(padded, *weights, policy.names)
        out_SH = out_SH[:tokens, : block.hidden].contiguous()
        if policy.fp8:
            both = torch.stack([checkpoints["gate_pre"], checkpoints["up"]])
            return out_SH, (*pack(both), *pack(padded))
        gate, up, act, inter = (checkpoints[name] if name in policy.names else x_SH.new_empty(0) for name in _ORDER)
        return out_SH, (gate, up, act, inter)

    def backward(
        self,
        dout_SH: Tensor,
        x_SH: Tensor,
        gate_IH: Tensor,
        up_IH: Tensor,
        down_HI: Tensor,
        saved: Saved,
        block: Block,
        keep: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of x, gate, up and down; the kernel makes all of them."""
        tokens, policy, (hidden, inner) = dout_SH.shape[0], parse_keep(keep), block.padded
        if not tokens:
            zeros = [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in (gate_IH, up_IH, down_HI)]
            return torch.zeros_like(dout_SH), zeros[0], zeros[1], zeros[2]
        rows = (padded_size(tokens), hidden)
        dout = pad_axes(dout_SH, rows)
        if policy.fp8:
            checkpoints, x = coat_checkpoints(saved[0], saved[1]), unpack(saved[2], saved[3])
        else:
            x = pad_axes(x_SH, rows)
            checkpoints = {name: tensor for name, tensor in zip(_ORDER, saved) if name in policy.names}
        operands = self._operands(gate_IH, up_IH, down_HI, block)
        if self._reads_transposes:
            transposed = self._transposed(gate_IH, up_IH, down_HI, block)
            d_x, d_gate_up, d_down = self._backward_2_30(dout, x, *operands, transposed, checkpoints)
        else:
            d_x, d_gate_up, d_down = self.launch(
                self.adapter.kernel("mlp_backward", "mlp_backward"),
                output_grad=dout,
                hidden_states=x,
                down_proj_weight=operands[1],
                gate_up_weights=operands[0],
                run_with_lnc2=self.launch.lnc == 2,
                **checkpoints,
            )
        sizes = {"hidden": block.hidden, "inner": block.inner}
        d_gate, d_up = (
            # Never views of the kernel's one output: results of an operator must not share memory.
            stock_gradient(half.clone(), "IH", "IH", dtype=weight.dtype, **sizes)
            for half, weight in zip(d_gate_up.split(inner), (gate_IH, up_IH))
        )
        d_down = stock_gradient(d_down, "HI", "HI", dtype=down_HI.dtype, **sizes)
        return d_x[:tokens, : block.hidden].contiguous(), d_gate, d_up, d_down

    def _transposed(self, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, block: Block) -> dict[str, Tensor]:
        """The transposed copies that 2.30 reads: gate and up ``[H, I]``, down ``[I, H]``."""
        hidden, inner = block.padded
        turned = {}
        for name, weight, axes in (("gate", gate_IH, "IH"), ("up", up_IH, "IH"), ("down", down_HI, "HI")):
            turn = partial(kernel_weight, axes=axes, wanted=axes[::-1], hidden=hidden, inner=inner)
            turned[f"{name}_proj_weight_T"] = self.weights.get(f"{axes[::-1]} of {axes} {hidden}x{inner}", turn, weight)
        return turned

    def _backward_2_30(
        self,
        dout_SH: Tensor,
        x_SH: Tensor,
        gate_up_2IH: Tensor,
        down_HI: Tensor,
        transposed: dict[str, Tensor],
        checkpoints: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call the kernel of 2.30, which reads transposed copies and the caller's own intermediate."""
        if not checkpoints.keys() >= {"gate_pre", "up"}:
            # The down gradient is made from the caller's intermediate: what the kernel recomputes does not enter it.
            _, made = self._run_forward(x_SH, gate_up_2IH, down_HI, frozenset({"gate_pre", "up"}))
            checkpoints = {name: made[name] for name in ("gate_pre", "up")} | checkpoints
        checkpoints = _with_products(checkpoints, frozenset({"intermediate"}))
        inner = checkpoints.pop("intermediate")
        d_x, d_gate_up, d_down, *_ = self.launch(
            self.adapter.kernel("mlp_backward", "mlp_backward"),
            output_hidden_states_grad=dout_SH,
            hidden_states=x_SH,
            gate_up_weights=gate_up_2IH,
            hidden_states_T=x_SH.t(),
            output_grad_T=dout_SH.t(),
            hidden_T=inner.t(),
            run_with_lnc2=self.launch.lnc == 2,
            hidden=inner,
            **transposed,
            **checkpoints,
        )
        return d_x, d_gate_up, d_down


def _with_products(checkpoints: dict[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
    """Add the gate's activation and the intermediate where `names` has them, as the backward kernel would make them.

    The forward kernel would save them rounded from its fp32 sums; then gradients would depend on what is kept.
    """
    if names.isdisjoint({"gate_act", "intermediate"} - checkpoints.keys()):
        return checkpoints
    act = checkpoints.get("gate_act")
    if act is None:
        act = F.silu(checkpoints["gate_pre"].float()).to(torch.bfloat16)
    return {"gate_act": act, "intermediate": act * checkpoints["up"]} | checkpoints

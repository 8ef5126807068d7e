"""The torch backend: the dense MLP and the experts as runs of one tiled feed-forward network.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_neuron_moe.backends.torch import few_rows
from hf_neuron_moe.backends.torch.experts import (
    ExpertGrads,
    ExpertStack,
    add_rows,
    rows_per_run,
    run_experts_backward,
    run_experts_forward,
)
from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.routing import SortedPairs, sort_pairs
from hf_neuron_moe.backends.torch.tiling import make_loader


class TorchBackend:
    """Implements :class:`hf_neuron_moe.backends.base.Backend` with PyTorch operations."""

    name = "torch"

    def kept_up_columns(self, intermediate: int) -> int:
        """Keep seven eighths of the up columns.

        One eighth recomputed costs 1/72 of a step's multiplications and brings the kept bytes of a Mixtral-shaped
        block below 0.45 of what the stock experts keep.
        """
        if intermediate < 512:
            return intermediate
        return intermediate - -(-intermediate // 512) * 64

    def mlp_forward(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not keep:
            out = self.mlp_few_rows(x_SH, gate_IH, up_IH, down_HI, precision)
            if out is not None:
                return out, x_SH.new_empty(0), x_SH.new_empty(0)
        tokens = x_SH.shape[0]
        save = self._checkpoints(x_SH, tokens, gate_IH.shape[0], keep)
        out = torch.zeros(x_SH.shape, dtype=torch.float32, device=x_SH.device)
        if tokens:
            loader = make_loader(precision, x_SH.device, tokens, down_HI.dtype, lone_384=True)
            ffn_forward(RowSource(x_SH), FFNWeights(gate_IH, up_IH, down_HI), loader, out, save=save)
        return _results(out.to(x_SH.dtype), x_SH, save)

    def mlp_few_rows(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str
    ) -> Tensor | None:
        rows, dtype = x_SH.shape[0], x_SH.dtype
        if not (gate_IH.dtype is up_IH.dtype is down_HI.dtype is dtype) or gate_IH.shape != up_IH.shape:
            return None
        if not few_rows.suit(precision, dtype, x_SH.device, rows, rows):
            return None
        return few_rows.mlp(x_SH, gate_IH, up_IH, down_HI)

    def mlp_backward(
        self,
        dout_SH: Tensor,
        x_SH: Tensor,
        gate_IH: Tensor,
        up_IH: Tensor,
        down_HI: Tensor,
        gate_pre_SI: Tensor,
        up_pre_SI: Tensor,
        precision: str,
        wants_input: bool,
        wants_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = x_SH.shape[0]
        weights = (gate_IH, up_IH, down_HI)
        grads = [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in weights] if wants_weights else []
        d_gate, d_up, d_down = grads or (None, None, None)
        dx = torch.zeros(x_SH.shape, dtype=torch.float32, device=x_SH.device) if wants_input else None
        if tokens:
            rounded = torch.bfloat16 if precision == "mxfp8" else torch.float32
            target = FFNGrads(d_gate, d_up, d_down, dx, rounded=rounded)
            loader = make_loader(precision, x_SH.device, tokens, down_HI.dtype)
            saved = Checkpoints(gate_pre_SI, up_pre_SI)
            FFNBackward(
                RowSource(dout_SH),
                RowSource(x_SH),
                FFNWeights(*weights),
                loader,
                target,
                saved,
                recompute_loader=replace(loader, lone_384=True),
            ).run()
        dx_out = None if dx is None else dx.to(x_SH.dtype)
        return _or_empty(dx_out, x_SH), _or_empty(d_gate, x_SH), _or_empty(d_up, x_SH), _or_empty(d_down, x_SH)

    def experts_forward(
        self,
        x_TH: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        transposed: bool,
        precision: str,
        block_size: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stack = ExpertStack(gate_up, down, transposed)
        if not keep and index_TK.numel():
            # An estimate that needs no look at the routing: pairs spread evenly over as many experts as possible.
            rows = index_TK.numel() / min(index_TK.numel(), gate_up.shape[0])
            if few_rows.suit(precision, gate_up.dtype, x_TH.device, index_TK.numel(), rows):
                out = few_rows.experts(x_TH, index_TK, weight_TK, stack)
                return out, x_TH.new_empty(0), x_TH.new_empty(0)
        pairs = sort_pairs(index_TK, gate_up.shape[0])
        scale = _sorted_scale(pairs, weight_TK)
        save = self._checkpoints(x_TH, index_TK.numel(), _intermediate(down, transposed), keep)
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        loader = make_loader(precision, x_TH.device, rows_per_run(pairs.runs), gate_up.dtype)
        stack = ExpertStack(gate_up, down, transposed)
        run_experts_forward(
            RowSource(x_TH, pairs.token_R),
            pairs.runs,
            stack,
            loader,
            add_rows(out_TH, pairs.token_R),
            save=save,
            scale_R=scale,
            block_size=block_size,
        )
        return _results(out_TH.to(x_TH.dtype), x_TH, save)

    def experts_backward(
        self,
        dout_TH: Tensor,
        x_TH: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_pre_RI: Tensor,
        up_pre_RI: Tensor,
        transposed: bool,
        precision: str,
        block_size: int,
        wants_input: bool,
        wants_routing: bool,
        wants_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pairs = sort_pairs(index_TK, gate_up.shape[0])
        scale, device = _sorted_scale(pairs, weight_TK), x_TH.device
        d_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=device) if wants_weights else None
        d_down = torch.empty(down.shape, dtype=down.dtype, device=device) if wants_weights else None
        dx_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=device) if wants_input else None
        d_scale = torch.zeros(index_TK.numel(), dtype=torch.float32, device=device) if wants_routing else None
        run_experts_backward(
            RowSource(dout_TH, pairs.token_R),
            RowSource(x_TH, pairs.token_R),
            pairs.runs,
            ExpertStack(gate_up, down, transposed),
            make_loader(precision, device, rows_per_run(pairs.runs), gate_up.dtype),
            ExpertGrads(
                None if d_gate_up is None or d_down is None else ExpertStack(d_gate_up, d_down, transposed),
                None if dx_TH is None else add_rows(dx_TH, pairs.token_R),
                d_scale,
                rounded=torch.bfloat16 if precision == "mxfp8" else torch.float32,
            ),
            saved=Checkpoints(gate_pre_RI, up_pre_RI),
            scale_R=scale,
            block_size=block_size,
        )
        return (
            _or_empty(None if dx_TH is None else dx_TH.to(x_TH.dtype), x_TH),
            _or_empty(
                None
                if d_scale is None
                else d_scale.index_select(0, pairs.slot_TK.reshape(-1)).view(weight_TK.shape).to(weight_TK.dtype),
                x_TH,
            ),
            _or_empty(d_gate_up, x_TH),
            _or_empty(d_down, x_TH),
        )

    def _checkpoints(self, x: Tensor, rows: int, intermediate: int, keep: bool) -> Checkpoints:
        if not keep:
            return Checkpoints()
        kept = self.kept_up_columns(intermediate)
        return Checkpoints(x.new_empty((rows, intermediate)), x.new_empty((rows, kept)))


def _or_empty(result: Tensor | None, anchor: Tensor) -> Tensor:
    """An operator cannot return None: what was not wanted is an empty tensor of its own."""
    return anchor.new_empty(0) if result is None else result


def _intermediate(down: Tensor, transposed: bool) -> int:
    return int(down.shape[1] if transposed else down.shape[2])


def _sorted_scale(pairs: SortedPairs, weight_TK: Tensor) -> Tensor:
    return weight_TK.reshape(-1).index_select(0, pairs.order_R).float()


def _results(out: Tensor, x: Tensor, save: Checkpoints) -> tuple[Tensor, Tensor, Tensor]:
    if save.gate is None or save.up is None:
        return out, x.new_empty(0), x.new_empty(0)
    return out, save.gate, save.up

"""The torch backend: the dense MLP and the experts as runs of one tiled feed-forward network.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import kept_up_columns, parse_keep
from hf_neuron_moe.backends.base import Saved
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.torch import generation
from hf_neuron_moe.backends.torch.cpu import decode
from hf_neuron_moe.backends.torch.experts import (
    Emit,
    ExpertGrads,
    ExpertStack,
    SortedPairs,
    add_rows,
    rows_per_run,
    run_experts_backward,
    run_experts_forward,
    sort_pairs,
)
from hf_neuron_moe.backends.torch.ffn_backward import FFNBackward, FFNGrads
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, FFNWeights, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.gradient_memory import gradient_memory
from hf_neuron_moe.backends.torch.grouped_backward import GroupedBackward, GroupedGrads
from hf_neuron_moe.backends.torch.grouped_forward import GroupedWeights, Rows, grouped_forward, sum_over_experts
from hf_neuron_moe.backends.torch.quantized import Runs, frozen_backward, frozen_forward
from hf_neuron_moe.backends.torch.saved import FP8Gating, FP8Rows, fp8_storage
from hf_neuron_moe.backends.torch.tiles import make_loader


class TorchBackend:
    """Implements :class:`hf_neuron_moe.backends.base.Backend` with PyTorch operations."""

    name = "torch"

    def fake_saved(self, x: Tensor, rows: int, intermediate: int, keep: str) -> Saved:
        kept = parse_keep(keep)
        if kept.fp8:
            return *fp8_storage(x, (2, rows), intermediate), *fp8_storage(x, (x.shape[0],), x.shape[1])
        up = intermediate if kept.whole_up else kept_up_columns(intermediate)
        columns = {"gate_pre": intermediate, "up": up, "gate_act": intermediate, "intermediate": intermediate}
        gate, up_, act, inter = (
            x.new_empty((rows, size) if name in kept.names else 0) for name, size in columns.items()
        )
        return gate, up_, act, inter

    def mlp_forward(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, keep: str
    ) -> tuple[Tensor, Saved]:
        if not keep:
            out = self.mlp_few_rows(x_SH, gate_IH, up_IH, down_HI, precision)
            if out is not None:
                return out, _nothing(x_SH)
            if generation.suits(precision, len(x_SH), gate_IH):
                return generation.mlp(x_SH, gate_IH, up_IH, down_HI), _nothing(x_SH)
        tokens = x_SH.shape[0]
        saved = self.fake_saved(x_SH, tokens, gate_IH.shape[0], keep)
        loader = make_loader(precision, x_SH.device, tokens, down_HI.dtype, lone_384=True)
        save, up_cut = _checkpoints(saved, keep), _up_cut(len(gate_IH), keep)
        if loader.compute.operand == torch.bfloat16:
            weights = GroupedWeights.of_dense(gate_IH, up_IH, down_HI)
            out = grouped_forward(x_SH, Rows.of_dense(tokens), weights, loader, save=save, up_cut=up_cut)
        else:
            out = torch.zeros(x_SH.shape, dtype=torch.float32, device=x_SH.device)
            if tokens:
                views = FFNWeights(gate_IH, up_IH, down_HI)
                ffn_forward(RowSource(x_SH), views, loader, out, save=save, up_cut=up_cut)
        return out.to(x_SH.dtype), _with_input(saved, x_SH, keep)

    mlp_few_rows = staticmethod(decode.mlp)

    def mlp_backward(
        self,
        dout_SH: Tensor,
        x_SH: Tensor,
        gate_IH: Tensor,
        up_IH: Tensor,
        down_HI: Tensor,
        saved: Saved,
        precision: str,
        keep: str,
        wants_input: bool,
        wants_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_SH = _input(saved, x_SH, keep, dout_SH.dtype)
        tokens = x_SH.shape[0]
        weights = (gate_IH, up_IH, down_HI)
        grads = [gradient_memory().empty_like(weight) for weight in weights] if wants_weights else []
        for grad in grads if not tokens else ():  # without rows nothing is written
            grad.zero_()
        d_gate, d_up, d_down = grads or (None, None, None)
        loader = make_loader(precision, x_SH.device, tokens, down_HI.dtype)
        dx: Tensor | None
        if loader.compute.operand == torch.bfloat16:
            dx = torch.empty(x_SH.shape, dtype=torch.bfloat16, device=x_SH.device) if wants_input else None
            GroupedBackward(
                dout_SH,
                x_SH,
                Rows.of_dense(tokens),
                GroupedWeights.of_dense(*weights),
                loader,
                GroupedGrads(GroupedWeights.of_dense(*grads) if grads else None, dx),
                _checkpoints(saved, keep),
                _up_cut(len(gate_IH), keep),
                recompute_loader=replace(loader, lone_384=True),
                gating=_gating(keep),
            ).run()
        else:
            dx = torch.zeros(x_SH.shape, dtype=torch.float32, device=x_SH.device) if wants_input else None
        if tokens and loader.compute.operand == torch.float32:
            rounded = torch.bfloat16 if precision == "mxfp8" else torch.float32
            target = FFNGrads(d_gate, d_up, d_down, dx, rounded=rounded)
            FFNBackward(
                RowSource(dout_SH),
                RowSource(x_SH),
                FFNWeights(*weights),
                loader,
                target,
                _checkpoints(saved, keep),
                recompute_loader=replace(loader, lone_384=True),
                gating=_gating(keep),
                up_cut=_up_cut(len(gate_IH), keep),
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
        keep: str,
    ) -> tuple[Tensor, Saved]:
        stack = ExpertStack(gate_up, down, transposed)
        if not keep and index_TK.numel():
            # An estimate that needs no look at the routing: pairs spread evenly over as many experts as possible.
            spread = index_TK.numel() / min(index_TK.numel(), gate_up.shape[0])
            one_dtype = gate_up.dtype is down.dtype is x_TH.dtype
            if one_dtype and decode.suit(precision, gate_up.dtype, x_TH.device, index_TK.numel(), spread):
                return decode.experts(x_TH, index_TK, weight_TK, stack), _nothing(x_TH)
        pairs = sort_pairs(index_TK, gate_up.shape[0])
        scale = _sorted_scale(pairs, weight_TK)
        if not keep and generation.suits(precision, index_TK.numel(), gate_up):
            return generation.experts(x_TH, pairs, scale, stack), _nothing(x_TH)
        saved = self.fake_saved(x_TH, index_TK.numel(), _intermediate(down, transposed), keep)
        loader = make_loader(precision, x_TH.device, rows_per_run(pairs.runs), gate_up.dtype)
        save, up_cut = _checkpoints(saved, keep), _up_cut(_intermediate(down, transposed), keep)
        if loader.compute.operand == torch.bfloat16:
            rows = Rows(pairs.runs, index_TK.numel(), pairs.token_R, scale, block_size)
            out_RH = grouped_forward(x_TH, rows, GroupedWeights.of_experts(stack), loader, save=save, up_cut=up_cut)
            out_TH = sum_over_experts(out_RH, pairs.slot_TK)
        else:
            out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
            run_experts_forward(
                RowSource(x_TH, pairs.token_R),
                pairs.runs,
                stack,
                loader,
                add_rows(out_TH, pairs.token_R),
                save=save,
                scale_R=scale,
                block_size=block_size,
                up_cut=up_cut,
            )
        return out_TH.to(x_TH.dtype), _with_input(saved, x_TH, keep)

    def experts_backward(
        self,
        dout_TH: Tensor,
        x_TH: Tensor,
        index_TK: Tensor,
        weight_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        saved: Saved,
        transposed: bool,
        precision: str,
        block_size: int,
        keep: str,
        wants_input: bool,
        wants_routing: bool,
        wants_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pairs = sort_pairs(index_TK, gate_up.shape[0])
        scale, device = _sorted_scale(pairs, weight_TK), dout_TH.device
        x_TH = _input(saved, x_TH, keep, dout_TH.dtype)
        d_gate_up = gradient_memory().empty_like(gate_up) if wants_weights else None
        d_down = gradient_memory().empty_like(down) if wants_weights else None
        d_scale = torch.zeros(index_TK.numel(), dtype=torch.float32, device=device) if wants_routing else None
        stack = ExpertStack(gate_up, down, transposed)
        loader = make_loader(precision, device, rows_per_run(pairs.runs), gate_up.dtype)
        grads = None if d_gate_up is None or d_down is None else ExpertStack(d_gate_up, d_down, transposed)
        save, up_cut = _checkpoints(saved, keep), _up_cut(_intermediate(down, transposed), keep)
        dx_TH: Tensor | None = None
        if loader.compute.operand == torch.bfloat16:
            dx_RH = x_TH.new_empty((index_TK.numel(), x_TH.shape[1]), dtype=torch.bfloat16) if wants_input else None
            if grads is not None:
                grads.zero_without(pairs.runs)
            GroupedBackward(
                dout_TH,
                x_TH,
                Rows(pairs.runs, index_TK.numel(), pairs.token_R, scale, block_size),
                GroupedWeights.of_experts(stack),
                loader,
                GroupedGrads(None if grads is None else GroupedWeights.of_experts(grads), dx_RH, d_scale),
                save,
                up_cut,
                recompute_loader=loader,
                gating=_gating(keep),
            ).run()
            if dx_RH is not None:
                dx_RH[pairs.offsets[-1] :].zero_()
                dx_TH = sum_over_experts(dx_RH, pairs.slot_TK)
        else:
            dx_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=device) if wants_input else None
            run_experts_backward(
                RowSource(dout_TH, pairs.token_R),
                RowSource(x_TH, pairs.token_R),
                pairs.runs,
                stack,
                loader,
                ExpertGrads(
                    grads,
                    None if dx_TH is None else add_rows(dx_TH, pairs.token_R),
                    d_scale,
                    rounded=torch.bfloat16 if precision == "mxfp8" else torch.float32,
                ),
                saved=save,
                scale_R=scale,
                block_size=block_size,
                gating=_gating(keep),
                up_cut=up_cut,
            )
        d_weight = None
        if d_scale is not None:
            d_weight = d_scale.index_select(0, pairs.slot_TK.reshape(-1)).view(weight_TK.shape).to(weight_TK.dtype)
        return (
            _or_empty(None if dx_TH is None else dx_TH.to(x_TH.dtype), x_TH),
            _or_empty(d_weight, x_TH),
            _or_empty(d_gate_up, x_TH),
            _or_empty(d_down, x_TH),
        )

    def fake_experts_saved(
        self,
        x_TH: Tensor,
        index_TK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        transposed: bool,
        precision: str,
        block_size: int,
        keep: str,
    ) -> Saved:
        return self.fake_saved(x_TH, index_TK.numel(), _intermediate(down, transposed), keep)

    def frozen_fake_saved(self, x: Tensor, rows: int, intermediate: int, keep: str) -> tuple[Tensor, Tensor]:
        kept = parse_keep(keep)
        if kept.fp8:
            return fp8_storage(x, (2, rows), intermediate)
        gate, up = (x.new_empty((rows, intermediate) if name in kept.names else 0) for name in ("gate_pre", "up"))
        return gate, up

    def frozen_forward(
        self, x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, stack: MXExpertStack, keep: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        pairs, runs, scale = _frozen_runs(x_TH, index_TK, weight_TK, stack)
        token_R = None if pairs is None else pairs.token_R
        rows = x_TH.shape[0] if index_TK is None else index_TK.numel()
        saved = self.frozen_fake_saved(x_TH, rows, stack.inner, keep)
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        save = _frozen_checkpoints(saved, keep)
        frozen_forward(RowSource(x_TH, token_R), runs, stack, _emit(out_TH, token_R), save=save, scale_R=scale)
        return out_TH.to(x_TH.dtype), *saved

    def frozen_backward(
        self,
        dout_TH: Tensor,
        x_TH: Tensor,
        index_TK: Tensor | None,
        weight_TK: Tensor | None,
        stack: MXExpertStack,
        saved: tuple[Tensor, Tensor],
        keep: str,
        wants_input: bool,
        wants_routing: bool,
    ) -> tuple[Tensor, Tensor]:
        pairs, runs, scale = _frozen_runs(dout_TH, index_TK, weight_TK, stack)
        token_R = None if pairs is None else pairs.token_R
        dx_TH = torch.zeros(dout_TH.shape, dtype=torch.float32, device=dout_TH.device) if wants_input else None
        d_scale = None
        if wants_routing and index_TK is not None:
            d_scale = torch.zeros(index_TK.numel(), dtype=torch.float32, device=dout_TH.device)
        frozen_backward(
            RowSource(dout_TH, token_R),
            RowSource(x_TH, token_R) if len(x_TH) else None,
            runs,
            stack,
            saved=_frozen_checkpoints(saved, keep),
            scale_R=scale,
            d_x=None if dx_TH is None else _emit(dx_TH, token_R),
            d_scale_R=d_scale,
            gating=_gating(keep),
        )
        d_weight = None
        if d_scale is not None and pairs is not None and weight_TK is not None:
            d_weight = d_scale.index_select(0, pairs.slot_TK.reshape(-1)).view(weight_TK.shape).to(weight_TK.dtype)
        return _or_empty(None if dx_TH is None else dx_TH.to(dout_TH.dtype), dout_TH), _or_empty(d_weight, dout_TH)


def _frozen_checkpoints(saved: tuple[Tensor, Tensor], keep: str) -> Checkpoints:
    """What a frozen network keeps; without weight gradients there is no use for more."""
    return _checkpoints((*saved, saved[0], saved[0]), keep)


def _frozen_runs(
    rows: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, stack: MXExpertStack
) -> tuple[SortedPairs | None, Runs, Tensor | None]:
    """The pairs, the runs of rows and the rows' factors; one run without an expert for a dense MLP."""
    if index_TK is None or weight_TK is None:
        return None, [(None, 0, len(rows))] if len(rows) else [], None
    pairs = sort_pairs(index_TK, len(stack.gate_up_codes))
    return pairs, pairs.runs, _sorted_scale(pairs, weight_TK)


def _emit(total: Tensor, token_R: Tensor | None) -> Emit:
    """Add each run's rows to their tokens' rows of `total`, or, for a dense MLP, put them there."""
    if token_R is not None:
        return add_rows(total, token_R)

    def put(start: int, end: int, rows: Tensor) -> None:
        total[start:end].copy_(rows)

    return put


def _up_cut(intermediate: int, keep: str) -> int | None:
    """Where the product of up is cut: in one place for every policy, so that all multiply the same."""
    return kept_up_columns(intermediate) if keep else None


def _nothing(x: Tensor) -> Saved:
    return x.new_empty(0), x.new_empty(0), x.new_empty(0), x.new_empty(0)


def _checkpoints(saved: Saved, keep: str) -> Checkpoints:
    """What is kept as the tiles read and write it."""
    kept = parse_keep(keep)
    if kept.fp8:
        codes, scales = saved[0], saved[1]
        return Checkpoints(FP8Rows(codes[0], scales[0]), FP8Rows(codes[1], scales[1]))
    names = ("gate_pre", "up", "gate_act", "intermediate")
    return Checkpoints(*(tensor if name in kept.names else None for name, tensor in zip(names, saved, strict=True)))


def _with_input(saved: Saved, x: Tensor, keep: str) -> Saved:
    """Keep the block's input in FP8 where the policy says so."""
    if parse_keep(keep).fp8:
        FP8Rows(saved[2], saved[3]).put(slice(None), slice(0, x.shape[1]), x)
    return saved


def _input(saved: Saved, x: Tensor, keep: str, dtype: torch.dtype) -> Tensor:
    """The block's input as the backward sees it."""
    if not parse_keep(keep).fp8:
        return x
    return FP8Rows(saved[2], saved[3]).take(slice(None), slice(0, saved[2].shape[1])).to(dtype)


def _gating(keep: str) -> Gating | None:
    return FP8Gating() if parse_keep(keep).fp8 else None


def _or_empty(result: Tensor | None, anchor: Tensor) -> Tensor:
    """An operator cannot return None: what was not wanted is an empty tensor of its own."""
    return anchor.new_empty(0) if result is None else result


def _intermediate(down: Tensor, transposed: bool) -> int:
    return int(down.shape[1] if transposed else down.shape[2])


def _sorted_scale(pairs: SortedPairs, weight_TK: Tensor) -> Tensor:
    return weight_TK.reshape(-1).index_select(0, pairs.order_R).float()

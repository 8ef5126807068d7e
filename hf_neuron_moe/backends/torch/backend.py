"""The torch backend: the dense MLP and the experts as runs of one tiled feed-forward network.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K pairs in expert order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep, kept_up_columns
from hf_neuron_moe.backends.base import Saved
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Support, Wants
from hf_neuron_moe.backends.torch import generation
from hf_neuron_moe.backends.torch.compute import describe_products
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
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints, RowSource, ffn_forward
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.gradient_memory import gradient_memory
from hf_neuron_moe.backends.torch.grouped_backward import GroupedBackward, GroupedGrads
from hf_neuron_moe.backends.torch.grouped_forward import GroupedWeights, Rows, grouped_forward, sum_over_experts
from hf_neuron_moe.backends.torch.quantized import Runs, quantized_backward, quantized_forward
from hf_neuron_moe.backends.torch.saved import FP8Gating, FP8Rows, fp8_storage
from hf_neuron_moe.backends.torch.tiles import make_loader


class TorchBackend:
    """Implements :class:`hf_neuron_moe.backends.base.Backend` with PyTorch operations, on any device."""

    name = "torch"
    traceable = False
    universal = True
    default_layout = "stock"

    @classmethod
    def instance(cls, name: str) -> TorchBackend:
        return _BACKEND

    @classmethod
    def unavailable_reason(cls, name: str) -> None:
        return None

    @classmethod
    def drop_weight_copies(cls, weights: Iterable[Tensor]) -> int:
        return generation.generation_copies().drop(weights)

    @property
    def without_copies(self) -> TorchBackend:
        return self

    def support(
        self, shape: BlockShape, spec: BlockSpec, *, tokens: int | None = None, training: bool = True
    ) -> Support:
        return Support()

    def quantized_support(self, stack: MXExpertStack, *, tokens: int | None = None, training: bool = True) -> Support:
        return Support()

    def describe_products(self, precision: str, device: torch.device) -> str:
        return describe_products(precision, device)

    def fake_saved(self, x: Tensor, shape: BlockShape, spec: BlockSpec, keep: Keep) -> Saved:
        return _storage(x, x.shape[0] * (1 if shape.top_k is None else shape.top_k), shape.inner, keep)

    def quantized_fake_saved(self, x: Tensor, rows: int, inner: int, keep: Keep) -> tuple[Tensor, Tensor]:
        return _storage(x, rows, inner, replace(keep, whole_up=True), with_input=False)[:2]

    mlp_decode = staticmethod(decode.mlp)

    def mlp_forward(self, x_SH: Tensor, weights: FFNWeights, spec: BlockSpec, keep: Keep) -> tuple[Tensor, Saved]:
        gate_IH, up_IH, down_HI = weights
        if not keep.backward:
            out = decode.mlp(x_SH, gate_IH, up_IH, down_HI, spec.precision)
            if out is not None:
                return out, _nothing(x_SH)
            if generation.suits(spec.precision, len(x_SH), gate_IH):
                return generation.mlp(x_SH, gate_IH, up_IH, down_HI), _nothing(x_SH)
        tokens = x_SH.shape[0]
        saved = _storage(x_SH, tokens, len(gate_IH), keep)
        loader = make_loader(spec.precision, x_SH.device, tokens, down_HI.dtype, lone_384=True)
        save, up_cut = _checkpoints(saved, keep), _up_cut(len(gate_IH), keep)
        if loader.compute.operand == torch.bfloat16:
            grouped = GroupedWeights.of_dense(gate_IH, up_IH, down_HI)
            out = grouped_forward(x_SH, Rows.of_dense(tokens), grouped, loader, save=save, up_cut=up_cut)
        else:
            out = torch.zeros(x_SH.shape, dtype=torch.float32, device=x_SH.device)
            if tokens:
                ffn_forward(RowSource(x_SH), weights, loader, out, save=save, up_cut=up_cut)
        return out.to(x_SH.dtype), _with_input(saved, x_SH, keep)

    def mlp_backward(
        self,
        dout_SH: Tensor,
        x_SH: Tensor,
        weights: FFNWeights,
        saved: Saved,
        spec: BlockSpec,
        keep: Keep,
        wants: Wants,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_SH = _input(saved, x_SH, keep, dout_SH.dtype)
        tokens = x_SH.shape[0]
        grads = [gradient_memory().empty_like(weight) for weight in weights] if wants.weights else []
        for grad in grads if not tokens else ():  # without rows nothing is written
            grad.zero_()
        d_gate, d_up, d_down = grads or (None, None, None)
        loader = make_loader(spec.precision, x_SH.device, tokens, weights[2].dtype)
        recompute, up_cut = replace(loader, lone_384=True), _up_cut(len(weights[0]), keep)
        dx: Tensor | None
        if loader.compute.operand == torch.bfloat16:
            dx = torch.empty(x_SH.shape, dtype=torch.bfloat16, device=x_SH.device) if wants.input else None
            GroupedBackward(
                dout_SH,
                x_SH,
                Rows.of_dense(tokens),
                GroupedWeights.of_dense(*weights),
                loader,
                GroupedGrads(GroupedWeights.of_dense(*grads) if grads else None, dx),
                _checkpoints(saved, keep),
                up_cut,
                recompute,
                _gating(keep),
            ).run()
        else:
            dx = torch.zeros(x_SH.shape, dtype=torch.float32, device=x_SH.device) if wants.input else None
        if tokens and loader.compute.operand == torch.float32:
            FFNBackward(
                RowSource(dout_SH),
                RowSource(x_SH),
                weights,
                loader,
                FFNGrads(d_gate, d_up, d_down, dx, rounded=_rounded(spec)),
                _checkpoints(saved, keep),
                recompute_loader=recompute,
                gating=_gating(keep),
                up_cut=up_cut,
            ).run()
        dx_out = None if dx is None else dx.to(x_SH.dtype)
        return _or_empty(dx_out, x_SH), _or_empty(d_gate, x_SH), _or_empty(d_up, x_SH), _or_empty(d_down, x_SH)

    def experts_forward(
        self, x_TH: Tensor, routing: Routing, weights: ExpertWeights, spec: BlockSpec, keep: Keep
    ) -> tuple[Tensor, Saved]:
        index_TK, weight_TK = routing
        gate_up, down = weights
        precision, rows = spec.precision, index_TK.numel()
        stack = ExpertStack(gate_up, down, spec.transposed)
        if not keep.backward and rows:
            # An estimate that needs no look at the routing: pairs spread evenly over as many experts as possible.
            spread = rows / min(rows, gate_up.shape[0])
            one_dtype = gate_up.dtype is down.dtype is x_TH.dtype
            if one_dtype and decode.suit(precision, gate_up.dtype, x_TH.device, rows, spread):
                return decode.experts(x_TH, index_TK, weight_TK, stack), _nothing(x_TH)
        pairs = sort_pairs(index_TK, gate_up.shape[0])
        scale = _sorted_scale(pairs, weight_TK)
        if not keep.backward and generation.suits(precision, rows, gate_up):
            return generation.experts(x_TH, pairs, scale, stack), _nothing(x_TH)
        saved = _storage(x_TH, rows, stack.inner, keep)
        loader = make_loader(precision, x_TH.device, rows_per_run(pairs.runs), gate_up.dtype)
        save, up_cut = _checkpoints(saved, keep), _up_cut(stack.inner, keep)
        if loader.compute.operand == torch.bfloat16:
            in_order = Rows(pairs.runs, rows, pairs.token_R, scale, spec.block_size)
            grouped = GroupedWeights.of_experts(stack)
            out_RH = grouped_forward(x_TH, in_order, grouped, loader, save=save, up_cut=up_cut)
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
                block_size=spec.block_size,
                up_cut=up_cut,
            )
        return out_TH.to(x_TH.dtype), _with_input(saved, x_TH, keep)

    def experts_backward(
        self,
        dout_TH: Tensor,
        x_TH: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        saved: Saved,
        spec: BlockSpec,
        keep: Keep,
        wants: Wants,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        index_TK, weight_TK = routing
        stack, rows, device = ExpertStack(*weights, spec.transposed), index_TK.numel(), dout_TH.device
        pairs = sort_pairs(index_TK, len(stack.down))
        scale = _sorted_scale(pairs, weight_TK)
        x_TH = _input(saved, x_TH, keep, dout_TH.dtype)
        d_gate_up, d_down = (gradient_memory().empty_like(weight) if wants.weights else None for weight in weights)
        d_scale = torch.zeros(rows, dtype=torch.float32, device=device) if wants.routing else None
        loader = make_loader(spec.precision, device, rows_per_run(pairs.runs), stack.gate_up.dtype)
        grads = None if d_gate_up is None or d_down is None else ExpertStack(d_gate_up, d_down, spec.transposed)
        save, up_cut = _checkpoints(saved, keep), _up_cut(stack.inner, keep)
        dx_TH: Tensor | None = None
        if loader.compute.operand == torch.bfloat16:
            dx_RH = x_TH.new_empty((rows, x_TH.shape[1]), dtype=torch.bfloat16) if wants.input else None
            if grads is not None:
                grads.zero_without(pairs.runs)
            GroupedBackward(
                dout_TH,
                x_TH,
                Rows(pairs.runs, rows, pairs.token_R, scale, spec.block_size),
                GroupedWeights.of_experts(stack),
                loader,
                GroupedGrads(None if grads is None else GroupedWeights.of_experts(grads), dx_RH, d_scale),
                save,
                up_cut,
                loader,
                _gating(keep),
            ).run()
            if dx_RH is not None:
                dx_RH[pairs.offsets[-1] :].zero_()
                dx_TH = sum_over_experts(dx_RH, pairs.slot_TK)
        else:
            dx_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=device) if wants.input else None
            emit = None if dx_TH is None else add_rows(dx_TH, pairs.token_R)
            run_experts_backward(
                RowSource(dout_TH, pairs.token_R),
                RowSource(x_TH, pairs.token_R),
                pairs.runs,
                stack,
                loader,
                ExpertGrads(grads, emit, d_scale, rounded=_rounded(spec)),
                saved=save,
                scale_R=scale,
                block_size=spec.block_size,
                gating=_gating(keep),
                up_cut=up_cut,
            )
        return (
            _or_empty(None if dx_TH is None else dx_TH.to(x_TH.dtype), x_TH),
            _or_empty(_routing_grad(d_scale, pairs, weight_TK), x_TH),
            _or_empty(d_gate_up, x_TH),
            _or_empty(d_down, x_TH),
        )

    def quantized_forward(
        self, x_TH: Tensor, routing: Routing | None, stack: MXExpertStack, keep: Keep
    ) -> tuple[Tensor, Tensor, Tensor]:
        pairs, runs, scale = _quantized_runs(x_TH, routing, stack)
        token_R = None if pairs is None else pairs.token_R
        rows = x_TH.shape[0] if routing is None else routing.index_TK.numel()
        saved = self.quantized_fake_saved(x_TH, rows, stack.inner, keep)
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        save = _quantized_checkpoints(saved, keep)
        quantized_forward(RowSource(x_TH, token_R), runs, stack, _emit(out_TH, token_R), save=save, scale_R=scale)
        return out_TH.to(x_TH.dtype), *saved

    def quantized_backward(
        self,
        dout_TH: Tensor,
        x_TH: Tensor,
        routing: Routing | None,
        stack: MXExpertStack,
        saved: tuple[Tensor, Tensor],
        keep: Keep,
        wants: Wants,
    ) -> tuple[Tensor, Tensor]:
        pairs, runs, scale = _quantized_runs(dout_TH, routing, stack)
        token_R = None if pairs is None else pairs.token_R
        dx_TH = torch.zeros(dout_TH.shape, dtype=torch.float32, device=dout_TH.device) if wants.input else None
        d_scale = d_weight = None
        if wants.routing and routing is not None:
            d_scale = torch.zeros(routing.index_TK.numel(), dtype=torch.float32, device=dout_TH.device)
        quantized_backward(
            RowSource(dout_TH, token_R),
            RowSource(x_TH, token_R) if len(x_TH) else None,
            runs,
            stack,
            saved=_quantized_checkpoints(saved, keep),
            scale_R=scale,
            d_x=None if dx_TH is None else _emit(dx_TH, token_R),
            d_scale_R=d_scale,
            gating=_gating(keep),
        )
        if routing is not None and pairs is not None:
            d_weight = _routing_grad(d_scale, pairs, routing.weight_TK)
        return _or_empty(None if dx_TH is None else dx_TH.to(dout_TH.dtype), dout_TH), _or_empty(d_weight, dout_TH)


_BACKEND = TorchBackend()


def _storage(x: Tensor, rows: int, inner: int, keep: Keep, *, with_input: bool = True) -> Saved:
    """Return uninitialized tensors for what the policy keeps of so many rows; the rest is empty."""
    if keep.fp8:
        codes, scales = fp8_storage(x, (2, rows), inner)
        return codes, scales, *(fp8_storage(x, (x.shape[0],), x.shape[1]) if with_input else (codes, scales))
    up = inner if keep.whole_up else kept_up_columns(inner)
    columns = {"gate_pre": inner, "up": up, "gate_act": inner, "intermediate": inner}
    gate, up_, act, inter = (x.new_empty((rows, size) if name in keep.names else 0) for name, size in columns.items())
    return gate, up_, act, inter


def _quantized_checkpoints(saved: tuple[Tensor, Tensor], keep: Keep) -> Checkpoints:
    """What a quantized network saves; without weight gradients there is no use for more."""
    return _checkpoints((*saved, saved[0], saved[0]), keep)


def _quantized_runs(
    rows: Tensor, routing: Routing | None, stack: MXExpertStack
) -> tuple[SortedPairs | None, Runs, Tensor | None]:
    """The pairs, the runs of rows and the rows' factors; one run without an expert for a dense MLP."""
    if routing is None:
        return None, [(None, 0, len(rows))] if len(rows) else [], None
    pairs = sort_pairs(routing.index_TK, len(stack.gate_up_codes))
    return pairs, pairs.runs, _sorted_scale(pairs, routing.weight_TK)


def _emit(total: Tensor, token_R: Tensor | None) -> Emit:
    """Add each run's rows to their tokens' rows of `total`, or, for a dense MLP, put them there."""
    if token_R is not None:
        return add_rows(total, token_R)

    def put(start: int, end: int, rows: Tensor) -> None:
        total[start:end].copy_(rows)

    return put


def _rounded(spec: BlockSpec) -> torch.dtype:
    """What the fp32 sums of weight gradients are rounded to before they are stored."""
    return torch.bfloat16 if spec.precision == "mxfp8" else torch.float32


def _up_cut(inner: int, keep: Keep) -> int | None:
    """Where the product of up is cut: in one place for every policy, so that all multiply the same."""
    return kept_up_columns(inner) if keep.backward else None


def _nothing(x: Tensor) -> Saved:
    return x.new_empty(0), x.new_empty(0), x.new_empty(0), x.new_empty(0)


def _checkpoints(saved: Saved, keep: Keep) -> Checkpoints:
    """What is saved as the tiles read and write it."""
    if keep.fp8:
        codes, scales = saved[0], saved[1]
        return Checkpoints(FP8Rows(codes[0], scales[0]), FP8Rows(codes[1], scales[1]))
    names = ("gate_pre", "up", "gate_act", "intermediate")
    return Checkpoints(*(tensor if name in keep.names else None for name, tensor in zip(names, saved, strict=True)))


def _with_input(saved: Saved, x: Tensor, keep: Keep) -> Saved:
    """Save the block's input in FP8 where the policy says so."""
    if keep.fp8:
        FP8Rows(saved[2], saved[3]).put(slice(None), slice(0, x.shape[1]), x)
    return saved


def _input(saved: Saved, x: Tensor, keep: Keep, dtype: torch.dtype) -> Tensor:
    """The block's input as the backward sees it."""
    if not keep.fp8:
        return x
    return FP8Rows(saved[2], saved[3]).take(slice(None), slice(0, saved[2].shape[1])).to(dtype)


def _gating(keep: Keep) -> Gating | None:
    return FP8Gating() if keep.fp8 else None


def _or_empty(result: Tensor | None, anchor: Tensor) -> Tensor:
    """An operator cannot return None: what was not wanted is an empty tensor of its own."""
    return anchor.new_empty(0) if result is None else result


def _sorted_scale(pairs: SortedPairs, weight_TK: Tensor) -> Tensor:
    return weight_TK.reshape(-1).index_select(0, pairs.order_R).float()


def _routing_grad(d_scale_R: Tensor | None, pairs: SortedPairs, weight_TK: Tensor) -> Tensor | None:
    """The factors' gradients as those of the routing weights they came from."""
    if d_scale_R is None:
        return None
    return d_scale_R.index_select(0, pairs.slot_TK.reshape(-1)).view(weight_TK.shape).to(weight_TK.dtype)

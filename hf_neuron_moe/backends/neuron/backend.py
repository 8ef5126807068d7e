"""The Neuron backend: nkilib's kernels behind the :class:`~hf_neuron_moe.backends.base.Backend` protocol.

Letters: S or T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep
from hf_neuron_moe.backends.base import Backend, BackwardCall, ExpertsGrads, MLPGrads, Saved
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.neuron import limits, versions
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.dense import DenseKernels, fake_saved
from hf_neuron_moe.backends.neuron.experts import ExpertKernels, Experts
from hf_neuron_moe.backends.neuron.generations import BF16_OPEN
from hf_neuron_moe.backends.neuron.launch import Launcher
from hf_neuron_moe.backends.neuron.limits import Block, most_tokens, unsupported_reason_tokens
from hf_neuron_moe.backends.neuron.quantized_experts import QuantizedKernels, unsupported_reason_quantized
from hf_neuron_moe.backends.prepared import CountedWeights, FreshWeights, PreparedWeights
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Support
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.errors import BackendUnavailableError

SIMULATOR = "nki-sim"


class NeuronBackend(Backend):
    """Implements :class:`~hf_neuron_moe.backends.base.Backend` with the installed nkilib.

    What a policy keeps differs from the protocol's description in form, not in meaning. Dense checkpoints in MXFP8 are
    ``[S, I]`` padded to multiples of 128, all columns of up. Experts, and dense MLPs in bf16 as one expert, keep gate
    and up in the kernels' blocks ``[N, 2, I, B]``, and only together. Their kernels have no other checkpoint, so a
    policy that keeps one of the two keeps none. ``"fp8"`` rounds what the kernels wrote and read; experts then have no
    FP8 rounding of the gate's activation, which COAT has. A value on a clamp limit stays on it.
    """

    traceable = True
    universal = trains_quantized = False
    default_layout = "kernel"

    def __init__(self, name: str = "neuron") -> None:
        self.name, self.fixed_rows = name, name != SIMULATOR
        toolchain = versions.toolchain(simulator=name == SIMULATOR)
        self.adapter, self.device, self._torch = Adapter(), limits.this_device(), TorchBackend()
        self._launch = Launcher(toolchain, self.device.lnc)
        self._without_copies: NeuronBackend = copy.copy(self)
        self._without_copies._without_copies = self._without_copies
        self._without_copies._keep_copies(FreshWeights())
        self._keep_copies(PreparedWeights())

    @classmethod
    def instance(cls, name: str) -> NeuronBackend:
        """Return the backend for the Neuron stack that is installed now."""
        known = _backends.get(name)
        if known is not None and torch.compiler.is_compiling():  # looking at the machine cannot be traced
            return known[1]
        if known is None or known[0] != _machine():
            made = cls(name)  # first: it imports what the machine is known by
            known = _backends[name] = _machine(), made
        return known[1]

    @classmethod
    def unavailable_reason(cls, name: str) -> BackendUnavailableError | None:
        try:
            versions.toolchain(simulator=name == SIMULATOR)
        except BackendUnavailableError as error:
            return error
        return None

    @classmethod
    def drop_weight_copies(cls, weights: Iterable[Tensor]) -> int:
        sources = list(weights)
        return sum(backend.weights.drop(sources) for _, backend in _backends.values())

    @property
    def without_copies(self) -> NeuronBackend:
        return self._without_copies

    def _keep_copies(self, weights: PreparedWeights) -> None:
        """Let `weights` hold the copies that calls of this object make."""
        self.weights, parts = weights, (self.adapter, self._launch, weights)
        self._dense, self._experts, self._quantized = (
            DenseKernels(*parts),
            ExpertKernels(*parts),
            QuantizedKernels(*parts),
        )

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weight copies in kernel orientation that exist now; at most one optimizer step old."""
        return self.weights.nbytes

    def support(
        self, shape: BlockShape, spec: BlockSpec, *, tokens: int | None = None, training: bool = True
    ) -> Support:
        block = Block.of(shape, spec)
        most = most_tokens(block)
        reason = limits.unsupported_reason(block, self.device, self.adapter) or unsupported_reason_tokens(
            most, tokens or 0
        )
        if reason is not None or tokens is not None:
            return Support(reason, most)
        stored = (shape.experts, shape.ordered, shape.dtype, spec.interleaved)
        copies = weight_copy_bytes(self.adapter, block, *stored)
        open_points = (BF16_OPEN,) if block.precision == "bf16" else ()
        in_vain = (block.in_vain(shape.experts or 1),) if shape.frozen else ()
        return Support(None, most, copies, (*open_points, *block.notes, *in_vain), block.padded)

    def quantized_support(self, stack: MXExpertStack, *, tokens: int | None = None, training: bool = True) -> Support:
        most = limits.BF16_TOKENS if stack.gate_up_codes.dim() > 2 else None
        reason = unsupported_reason_quantized(stack, self.device, self.adapter, training=training)
        return Support(reason or unsupported_reason_tokens(most, tokens or 0), most)

    def fake_saved(self, x: Tensor, shape: BlockShape, spec: BlockSpec, keep: Keep) -> Saved:
        block = Block.of(shape, spec)
        if block.blockwise:
            return self._experts.fake_saved(x, shape.top_k or 1, shape.experts or 1, block, keep)
        return fake_saved(x, x.shape[0], block, keep)

    def quantized_fake_saved(
        self, x: Tensor, rows: int, inner: int, keep: Keep, gate: Gate = SWIGLU
    ) -> tuple[Tensor, Tensor]:
        return self._torch.quantized_fake_saved(x, rows, inner, keep, gate)

    def mlp_forward(self, x_SH: Tensor, weights: FFNWeights, spec: BlockSpec, keep: Keep) -> tuple[Tensor, Saved]:
        block = self._checked_dense(weights, spec, x_SH)
        if not block.blockwise:
            return self._dense.forward(x_SH, weights, block, keep)
        return self._experts.forward(x_SH, only_expert(x_SH), Experts.of_dense(weights, block), keep)

    def mlp_backward(
        self, dout_SH: Tensor, x_SH: Tensor, weights: FFNWeights, saved: Saved, call: BackwardCall
    ) -> MLPGrads:
        block, wants = self._checked_dense(weights, call.spec, dout_SH), call.wants
        if not dout_SH.shape[0]:
            grads: Sequence[Tensor | None] = _zeros(dout_SH, *weights)
        elif block.blockwise:
            experts = Experts.of_dense(weights, block)
            found = self._experts.backward(dout_SH, x_SH, only_expert(dout_SH), experts, saved, call.keep)
            grads = (found.x, *found.gate_up, found.down, *found.gate_up_bias, found.down_bias)
        else:
            grads = self._dense.backward(dout_SH, x_SH, weights, saved, block, call.keep)
        return cast(MLPGrads, _only((wants.input, *[wants.weights] * 6), grads, dout_SH))

    def experts_forward(
        self, x_TH: Tensor, routing: Routing, weights: ExpertWeights, spec: BlockSpec, keep: Keep
    ) -> tuple[Tensor, Saved]:
        return self._experts.forward(x_TH, routing, self._checked_experts(weights, spec, x_TH), keep)

    def experts_backward(
        self, dout_TH: Tensor, x_TH: Tensor, routing: Routing, weights: ExpertWeights, saved: Saved, call: BackwardCall
    ) -> ExpertsGrads:
        experts, wants = self._checked_experts(weights, call.spec, dout_TH), call.wants
        if dout_TH.shape[0]:
            found = self._experts.backward(dout_TH, x_TH, routing, experts, saved, call.keep)
            grads: Sequence[Tensor | None] = (
                *found[:2],
                *found.gate_up,
                found.down,
                *found.gate_up_bias,
                found.down_bias,
            )
        else:
            grads = _zeros(dout_TH, routing.weight_TK, *weights)
        return cast(ExpertsGrads, _only((wants.input, wants.routing, *[wants.weights] * 4), grads, dout_TH))

    def quantized_forward(
        self, x_TH: Tensor, routing: Routing | None, stack: MXExpertStack, keep: Keep
    ) -> tuple[Tensor, Tensor, Tensor]:
        support = self.quantized_support(stack, training=keep.backward)
        if support.reason is not None:
            raise _no_quantized_kernel(support.reason)
        limits.check_length(support.most_tokens, x_TH.shape[0])
        return self._quantized.forward(x_TH, routing, stack), x_TH.new_empty(0), x_TH.new_empty(0)

    def quantized_backward(
        self, dout_TH: Tensor, x_TH: Tensor, routing: Routing | None, stack: MXExpertStack, *rest: object
    ) -> NoReturn:
        raise _no_quantized_kernel(str(self.quantized_support(stack).reason))

    def _checked(self, block: Block, rows: Tensor) -> Block:
        """Return `block`; what the kernels would not take is refused before one is called."""
        limits.check_call(block, rows.shape[0], str(rows.dtype), self.device, self.adapter)
        return block

    def _checked_dense(self, weights: FFNWeights, spec: BlockSpec, rows: Tensor) -> Block:
        biased = any(bias is not None for bias in weights[3:5]), weights.down_bias_H is not None
        hidden, inner = weights.down_HI.shape
        return self._checked(Block.of(BlockShape("mlp", hidden, inner, biased=biased), spec), rows)

    def _checked_experts(self, weights: ExpertWeights, spec: BlockSpec, rows: Tensor) -> Experts:
        down, biased = weights.down, (weights.gate_up_bias is not None, weights.down_bias is not None)
        inner, hidden = down.shape[1:] if spec.transposed else down.shape[:0:-1]
        block = Block.of(BlockShape("experts", hidden, inner, biased=biased), spec)
        return Experts.of(weights, spec, self._checked(block, rows))


def weight_copy_bytes(
    adapter: Adapter,
    block: Block,
    experts: int | None,
    ordered: bool,
    dtype: torch.dtype,
    interleaved: bool = False,
) -> int:
    """Return the bytes of the weight copies that the kernels' forward and backward of `block` need; runs nothing.

    `adapter` decides which generation's kernels read them; `experts` is E, None for a dense MLP. The parameters have
    `dtype`, and are `ordered` where gate and up are one tensor (dense), or weights ``[E, H, 2I]`` and ``[E, I, H]``.
    With `interleaved` gate and up alternate in the experts' weights.
    """
    counted, H, I = CountedWeights(), block.hidden, block.inner  # noqa: E741
    no_launcher: Any = None

    def weight(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if experts is not None:
        joint = 2 * I if block.gate.gated else I
        gate_up, down = ((H, joint), (I, H)) if ordered else ((joint, H), (H, I))
        spec = BlockSpec(block.precision, transposed=ordered, gate=block.gate, interleaved=interleaved)
        stack = Experts.of(ExpertWeights(weight(experts, *gate_up), weight(experts, *down)), spec, block)
        ExpertKernels(adapter, no_launcher, counted).prepare(stack)
        return counted.nbytes
    gate, up = weight(2 * I, H).chunk(2) if ordered else (weight(I, H), weight(I, H))
    weights = FFNWeights(gate, up, weight(H, I))
    if block.blockwise:
        ExpertKernels(adapter, no_launcher, counted).prepare(Experts.of_dense(weights, block))
    else:
        DenseKernels(adapter, no_launcher, counted).prepare(weights, block)
    return counted.nbytes


_backends: dict[str, tuple[tuple[Any, ...], NeuronBackend]] = {}
"""By name: the machine that it was made for, and the backend."""


def _machine() -> tuple[Any, ...]:
    """What a backend depends on: the imported modules, the platform and the logical cores."""
    modules = (sys.modules.get(module) for module in ("nki", "nkilib", "torch_neuronx"))
    return *modules, versions.platform(), versions.lnc()


def only_expert(rows: Tensor) -> Routing:
    """Return the routing of a dense MLP: every row to expert 0 with weight 1."""
    index = torch.zeros((rows.shape[0], 1), dtype=torch.int64, device=rows.device)
    return Routing(index, torch.ones_like(index, dtype=torch.float32))


def _zeros(*like: Tensor | None) -> list[Tensor | None]:
    """Gradients of a call without tokens; None for what is not there."""
    return [None if t is None else torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in like]


def _only(wanted: Sequence[bool], grads: Sequence[Tensor | None], dout: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients that are wanted, and empty tensors for others; `grads` may end before them."""
    given = (*grads, *[None] * (len(wanted) - len(grads)))
    return tuple(
        dout.new_empty(0) if grad is None or not want else grad for grad, want in zip(given, wanted, strict=True)
    )


def _no_quantized_kernel(reason: str) -> BackendUnavailableError:
    argument, fix = "a block with MX weights", "Use fallback='torch' to compute such blocks without the kernels."
    error = BackendUnavailableError.about(argument, "one that the installed kernels compute", reason, fix)
    return error.named("neuron backend")

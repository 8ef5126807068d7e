"""The Neuron backend: nkilib's kernels behind the :class:`~hf_neuron_moe.backends.base.Backend` protocol.

Letters: S or T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep
from hf_neuron_moe.backends.base import Saved
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.copies import weight_copy_bytes
from hf_neuron_moe.backends.neuron.dense import DenseKernels, fake_saved
from hf_neuron_moe.backends.neuron.experts import ExpertKernels, Experts
from hf_neuron_moe.backends.neuron.launch import Launcher
from hf_neuron_moe.backends.neuron.limits import (
    Block,
    check_call,
    most_tokens,
    open_points,
    this_device,
    why_not,
    why_not_tokens,
)
from hf_neuron_moe.backends.neuron.quantized_experts import FROZEN_TOKENS, FrozenKernels
from hf_neuron_moe.backends.prepared import FreshWeights, PreparedWeights
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Support, Wants
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.errors import BackendUnavailableError

NEURON, SIMULATOR = "neuron", "nki-sim"


class NeuronBackend:
    """Implements :class:`~hf_neuron_moe.backends.base.Backend` with the installed nkilib.

    :attr:`without_copies` is the same backend for weights that exist for one call only: it keeps no copies of them.

    What a policy keeps differs from the protocol's description in form, not in meaning: dense checkpoints are
    ``[S, I]`` padded to multiples of 128, all columns of up; experts keep gate and up in the kernels' blocks
    ``[N, 2, I, B]``, and only together: their kernels have no other checkpoint, so a policy that keeps one of the two
    keeps none. ``"fp8"`` rounds what the kernels wrote and read; experts then have no FP8 rounding of the gate's
    activation, which COAT has.
    """

    traceable = True
    universal = False
    default_layout = "kernel"

    def __init__(self, name: str = NEURON) -> None:
        self.name = name
        toolchain = versions.toolchain(simulator=name == SIMULATOR)
        self.adapter = Adapter()
        self.device = this_device()
        self.weights = PreparedWeights()
        launch = Launcher(toolchain, self.device.lnc)
        self._dense = DenseKernels(self.adapter, launch, self.weights)
        self._experts = ExpertKernels(self.adapter, launch, self.weights)
        self._quantized = FrozenKernels(self.adapter, launch, self.weights)
        self._torch = TorchBackend()
        self._without_copies = self._with(FreshWeights())

    @classmethod
    def instance(cls, name: str) -> NeuronBackend:
        """Return the backend for the Neuron stack that is installed now, the same object while that stays the same."""
        if name in _backends and torch.compiler.is_compiling():  # looking at the machine cannot be traced
            return _backends[name]
        if name not in _backends or _machines[name] != _machine():
            _backends[name] = cls(name)
            _machines[name] = _machine()
        return _backends[name]

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
        return sum(backend.weights.drop(sources) for backend in _backends.values())

    @property
    def without_copies(self) -> NeuronBackend:
        return self._without_copies

    def _with(self, weights: PreparedWeights) -> NeuronBackend:
        """Return this backend with another store of copies; kernels, launcher and device are shared."""
        twin = copy.copy(self)
        twin.weights = weights
        twin._dense = replace(self._dense, weights=weights)
        twin._experts = replace(self._experts, weights=weights)
        twin._quantized = replace(self._quantized, weights=weights)
        twin._without_copies = twin
        return twin

    @property
    def prepared_bytes(self) -> int:
        """Bytes of the weight copies in kernel orientation that exist now; at most one optimizer step old."""
        return self.weights.nbytes

    def support(
        self, shape: BlockShape, spec: BlockSpec, *, tokens: int | None = None, training: bool = True
    ) -> Support:
        block = Block(shape.kind, spec.precision, shape.hidden, shape.inner, spec.block_size)
        most = most_tokens(block)
        reason = why_not(block, self.device, self.adapter) or why_not_tokens(most, tokens or 0)
        if reason is not None or tokens is not None:
            return Support(reason, most)
        copies = weight_copy_bytes(self.adapter, block, shape.experts, shape.ordered, shape.dtype)
        return Support(None, most, copies, open_points(block), block.padded)

    def quantized_support(self, stack: MXExpertStack, *, tokens: int | None = None, training: bool = True) -> Support:
        most = FROZEN_TOKENS if stack.gate_up_codes.dim() > 2 else None
        reason = self._quantized.why_not(stack, self.device, training) or why_not_tokens(most, tokens or 0)
        return Support(reason, most)

    def describe_products(self, precision: str, device: torch.device) -> str:
        return ""

    def fake_saved(self, x: Tensor, shape: BlockShape, spec: BlockSpec, keep: Keep) -> Saved:
        block = Block(shape.kind, spec.precision, shape.hidden, shape.inner, spec.block_size)
        if shape.experts is None or shape.top_k is None:
            return fake_saved(x, x.shape[0] * (shape.top_k or 1), block, keep.text)
        gate_up = x.new_empty((shape.experts, 2 * shape.inner, shape.hidden), device="meta")
        down = x.new_empty((shape.experts, shape.hidden, shape.inner), device="meta")
        return self._experts.fake_saved(x, shape.top_k, Experts(gate_up, down, False, block), keep.text)

    def quantized_fake_saved(self, x: Tensor, rows: int, inner: int, keep: Keep) -> tuple[Tensor, Tensor]:
        return self._torch.quantized_fake_saved(x, rows, inner, keep)

    def mlp_decode(self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str) -> None:
        return None

    def mlp_forward(self, x_SH: Tensor, weights: FFNWeights, spec: BlockSpec, keep: Keep) -> tuple[Tensor, Saved]:
        block = self._checked(Block("mlp", spec.precision, *weights[2].shape), x_SH)
        return self._dense.forward(x_SH, *weights, block, keep.text)

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
        block = self._checked(Block("mlp", spec.precision, *weights[2].shape), dout_SH)
        d_x, *d_weights = self._dense.backward(dout_SH, x_SH, *weights, saved, block, keep.text)
        d_gate, d_up, d_down = (_wanted(grad, wants.weights, dout_SH) for grad in d_weights)
        return _wanted(d_x, wants.input, dout_SH), d_gate, d_up, d_down

    def experts_forward(
        self, x_TH: Tensor, routing: Routing, weights: ExpertWeights, spec: BlockSpec, keep: Keep
    ) -> tuple[Tensor, Saved]:
        experts = _experts(weights, spec)
        self._checked(experts.block, x_TH)
        return self._experts.forward(x_TH, *routing, experts, keep.text)

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
        experts = _experts(weights, spec)
        self._checked(experts.block, dout_TH)
        grads = self._experts.backward(dout_TH, x_TH, *routing, experts, saved, keep.text)
        wanted = (wants.input, wants.routing, wants.weights, wants.weights)
        d_x, d_weight, d_gate_up, d_down = (_wanted(grad, want, dout_TH) for grad, want in zip(grads, wanted))
        return d_x, d_weight, d_gate_up, d_down

    def quantized_forward(
        self, x_TH: Tensor, routing: Routing | None, stack: MXExpertStack, keep: Keep
    ) -> tuple[Tensor, Tensor, Tensor]:
        reason = self.quantized_support(stack, training=keep.backward).reason
        if reason is not None:
            raise _no_quantized_kernel(reason)
        index_TK, weight_TK = routing or (None, None)
        out_TH = self._quantized.forward(x_TH, index_TK, weight_TK, stack)
        return out_TH, x_TH.new_empty(0), x_TH.new_empty(0)

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
        raise _no_quantized_kernel(str(self.quantized_support(stack).reason))

    def _checked(self, block: Block, rows: Tensor) -> Block:
        """Refuse what the kernels would not take, before one is called."""
        check_call(block, rows.shape[0], str(rows.dtype), self.device, self.adapter)
        return block


_machines: dict[str, tuple[Any, ...]] = {}
_backends: dict[str, NeuronBackend] = {}


def _machine() -> tuple[Any, ...]:
    """What a backend depends on: the imported modules, the platform and the logical cores."""
    modules = (sys.modules.get(module) for module in ("nki", "nkilib", "torch_neuronx"))
    return *modules, versions.platform(), versions.lnc()


def _experts(weights: ExpertWeights, spec: BlockSpec) -> Experts:
    gate_up, down = weights
    inner, hidden = down.shape[1:] if spec.transposed else down.shape[:0:-1]
    return Experts(gate_up, down, spec.transposed, Block("experts", spec.precision, hidden, inner, spec.block_size))


def _wanted(grad: Tensor, wanted: bool, anchor: Tensor) -> Tensor:
    return grad if wanted else anchor.new_empty(0)


def _no_quantized_kernel(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError.about(
        "a block with MX weights",
        "one that the installed kernels compute",
        reason,
        "Use fallback='torch' to compute such blocks without the kernels.",
    ).named("neuron backend")

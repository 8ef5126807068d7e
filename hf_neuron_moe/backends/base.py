"""What a backend is: a folder with a class of this protocol, and a row in :data:`hf_neuron_moe.config.BACKENDS`.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K token-expert pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep, parse_keep
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, ExpertWeights, FFNWeights, Routing, Support, Wants
from hf_neuron_moe.errors import BackendUnavailableError

NOTHING = parse_keep("")
"""Policy of a forward whose backward will not come."""

Saved = tuple[Tensor, Tensor, Tensor, Tensor]
"""What a forward saved for its backward: four tensors whose meaning is the policy's; unused ones are empty."""

Grads = tuple[Tensor, Tensor, Tensor, Tensor]
MLPGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
ExpertsGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of a backward; those that nobody wants, and those of biases that are not there, are empty."""


class BackwardCall(NamedTuple):
    """What a backward computes: the block and policy of its forward, and which gradients."""

    spec: BlockSpec
    keep: Keep
    wants: Wants


class Backend(Protocol):
    """Forward and backward of the blocks; all functional, results are returned and never written into arguments.

    Activations arrive and leave in bf16 (fp32 for the precision ``"fp32"``); weights have any float dtype and are read
    in the precision asked for; weight gradients have the weights' dtype.

    ``keep`` is the activation policy, or :data:`NOTHING`. A forward returns its result and :data:`Saved` (R = S for the
    dense MLP):

    * in FP8: codes ``[2, R, I]`` and scales ``[2, R, G]`` of gate and up, codes ``[S, H]`` and scales of the input;
      the backward ignores its ``x``;
    * otherwise gate, up, gate_act and intermediate ``[R, I]`` in the compute dtype, of ``"minimal"`` only the first
      columns of up. What the policy does not keep is empty, and the backward makes it again.

    Every policy but FP8 gives the same gradients, and all give the same ``y``: in the torch backend bit for bit. On
    Neuron the bf16 experts' forward rounds gate and up to bf16 before it uses them only where it saves them, so that
    ``y`` differs by that rounding. The backward always reads saved ones.
    """

    name: str
    fixed_rows: bool
    """Whether its device takes no tensors whose number of rows depends on values."""
    traceable: ClassVar[bool]
    """Whether ``torch.compile`` may trace into forward and backward, where the plugin's ``nki_op`` does that."""
    universal: ClassVar[bool]
    """Whether it computes every block on every device, so that :meth:`support` need not be asked."""
    trains_quantized: ClassVar[bool]
    """Whether it computes the backward of every block with MX weights."""
    default_layout: ClassVar[str]
    """Weight layout of ``weights="auto"``: ``"stock"`` or ``"kernel"``."""

    @classmethod
    def instance(cls, name: str) -> Self:
        """Return the backend for a name of the table: the same object while the machine stays the same."""

    @classmethod
    def unavailable_reason(cls, name: str) -> BackendUnavailableError | None:
        """Return the error that says why it cannot run here, or None."""

    @classmethod
    def drop_weight_copies(cls, weights: Iterable[Tensor]) -> int:
        """Drop the copies of `weights` that are kept between calls; return their bytes."""

    @property
    def without_copies(self) -> Self:
        """The same backend for weights that are gathered for one call: it keeps no copies of them."""

    def support(
        self, shape: BlockShape, spec: BlockSpec, *, tokens: int | None = None, training: bool = True
    ) -> Support:
        """Say whether forward and backward of a block are computed; with `tokens`, before a call, without the costs."""

    def quantized_support(self, stack: MXExpertStack, *, tokens: int | None = None, training: bool = True) -> Support:
        """Say the same for a block with MX weights; without `training` its forward is enough."""

    def describe_products(self, precision: str, device: torch.device, shape: BlockShape | None = None) -> str:
        """Return in words how PyTorch multiplies many rows in a block of `shape`; empty where kernels do."""
        return ""

    def fake_saved(self, x: Tensor, shape: BlockShape, spec: BlockSpec, keep: Keep) -> Saved:
        """Return what a forward saves of the tokens `x` as uninitialized tensors, made with ``x.new_empty``."""

    def quantized_fake_saved(
        self, x: Tensor, rows: int, inner: int, keep: Keep, gate: Gate = SWIGLU
    ) -> tuple[Tensor, Tensor]:
        """Return the same for :meth:`quantized_forward`; `rows` is R."""

    def mlp_decode(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, gate: Gate
    ) -> Tensor | None:
        """Return ``y [S, H]`` for inference if there is a shorter way for so few rows; None for anything unusual.

        Called for every token, before arguments are checked or converted.
        """
        return None

    def mlp_forward(self, x_SH: Tensor, weights: FFNWeights, spec: BlockSpec, keep: Keep) -> tuple[Tensor, Saved]:
        """Return ``y [S, H]`` and what is saved."""

    def mlp_backward(
        self, dout_SH: Tensor, x_SH: Tensor, weights: FFNWeights, saved: Saved, call: BackwardCall
    ) -> MLPGrads:
        """Return the gradients of x, then of each field of `weights`."""

    def experts_forward(
        self, x_TH: Tensor, routing: Routing, weights: ExpertWeights, spec: BlockSpec, keep: Keep
    ) -> tuple[Tensor, Saved]:
        """Return ``y [T, H]`` and what is saved."""

    def experts_backward(
        self, dout_TH: Tensor, x_TH: Tensor, routing: Routing, weights: ExpertWeights, saved: Saved, call: BackwardCall
    ) -> ExpertsGrads:
        """Return the gradients of x, the routing weights, then of each field of `weights`."""

    def quantized_forward(
        self, x_TH: Tensor, routing: Routing | None, stack: MXExpertStack, keep: Keep
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``y [T, H]`` of an MX network, of a dense MLP without routing, and two tensors that are saved.

        They are gate and up pre-activations ``[R, I]`` in bf16, empty where `keep` does not name them, or the codes and
        scales of both in FP8. ``"minimal"`` keeps both whole and needs no input.
        """

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
        """Return the gradients of x, which may be empty where gate and up were saved, and of the routing weights."""

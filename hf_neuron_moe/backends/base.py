"""What a backend computes. One implementation per way to compute; chosen once, visibly, from device and availability.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K token-expert pairs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hf_neuron_moe.backends.mx_weights import MXExpertStack

NOTHING = ""
"""Policy of a forward whose backward will not come."""

Saved = tuple[Tensor, Tensor, Tensor, Tensor]
"""What a forward kept for its backward: four tensors whose meaning is the policy's; unused ones are empty."""


class Backend(Protocol):
    """Forward and backward of the two blocks; all functional, results are returned and never written into arguments.

    ``precision`` is ``"bf16"``, ``"mxfp8"`` or ``"fp32"``. Activations arrive and leave in bf16 (fp32 for ``"fp32"``);
    weights have any float dtype and are read in the precision asked for; weight gradients have the weights' dtype.

    ``keep`` is the activation policy as a canonical string (:func:`~hf_neuron_moe.activation_policy.parse_keep` reads
    it), or :data:`NOTHING`. A forward returns its result and :data:`Saved`:

    * ``"fp8"``: codes ``[2, R, I]`` and scales ``[2, R, G]`` of gate and up, codes ``[S, H]`` and scales of the input,
      which then need not be kept itself: the backward ignores its ``x``;
    * otherwise gate, up, gate_act and intermediate ``[R, I]`` in the compute dtype, of ``"minimal"`` only the first
      columns of up; what the policy does not keep is empty, and the backward makes it again.

    Every policy but ``"fp8"`` gives the same gradients, and all give the same ``y``: in the torch backend bit for bit.
    On Neuron the bf16 experts' forward rounds gate and up to bf16 before it uses them where it saves them, and has them
    in fp32 where it does not, so that ``y`` of the two differs by that rounding; the backward always reads saved ones.

    R is S for the dense MLP and the token-expert pairs in expert order for experts.
    """

    name: str

    def fake_saved(self, x: Tensor, rows: int, intermediate: int, keep: str) -> Saved:
        """Return uninitialized tensors of the shapes and dtypes that :meth:`mlp_forward` keeps of `rows` rows.

        They are made with ``x.new_empty``.
        """
        ...

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
        """Return the same for :meth:`experts_forward`; arguments as there."""
        ...

    def frozen_fake_saved(self, x: Tensor, rows: int, intermediate: int, keep: str) -> tuple[Tensor, Tensor]:
        """Return the same for :meth:`frozen_forward`."""
        ...

    def mlp_forward(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, keep: str
    ) -> tuple[Tensor, Saved]:
        """Return ``y [S, H]`` and what is kept."""
        ...

    def mlp_few_rows(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str
    ) -> Tensor | None:
        """Return ``y [S, H]`` for inference if the backend has a shorter way for so few rows, else None.

        Called for every token generated, before any argument is checked or converted: anything unusual is None.
        """
        ...

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
        """Return the gradients of x, gate, up and down; those not wanted are empty."""
        ...

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
        """Return ``y [T, H]`` and what is kept.

        `gate_up` and `down` are ``[E, 2I, H]`` and ``[E, H, I]``, or ``[E, H, 2I]`` and ``[E, I, H]`` if `transposed`.
        Pairs whose expert id is E or larger belong to other ranks and contribute nothing.
        """
        ...

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
        """Return the gradients of x, the routing weights, gate_up and down; those not wanted are empty."""
        ...

    def frozen_forward(
        self, x_TH: Tensor, index_TK: Tensor | None, weight_TK: Tensor | None, stack: MXExpertStack, keep: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``y [T, H]`` of an MX network and two tensors that are kept.

        They are gate and up pre-activations ``[R, I]`` in bf16, each empty where `keep` does not name it, or the codes
        and scales of both in FP8. ``"minimal"`` keeps both whole and needs no input. `index_TK` and `weight_TK` are
        None for a dense MLP; otherwise as in :meth:`experts_forward`.
        """
        ...

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
        """Return the gradients of x and of the routing weights; those not wanted are empty. The weights have none.

        `x_TH` may be empty where gate and up were kept.
        """
        ...

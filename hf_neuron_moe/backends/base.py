"""What a backend computes. One implementation per way to compute; chosen once, visibly, from device and availability.

Legend: S or T tokens, H hidden, I intermediate, E experts, K experts per token, R = T * K token-expert pairs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Backend(Protocol):
    """Forward and backward of the two blocks; all functional, results are returned and never written into arguments.

    ``precision`` is ``"bf16"``, ``"mxfp8"`` or ``"fp32"``. Activations arrive and leave in bf16 (fp32 for ``"fp32"``);
    weights have any float dtype and are read in the precision asked for; weight gradients have the weights' dtype.
    """

    name: str

    def kept_up_columns(self, intermediate: int) -> int:
        """How many of the I columns of the up pre-activations the forward keeps; the backward recomputes the rest."""
        ...

    def mlp_forward(
        self, x_SH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, precision: str, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``y [S, H]`` and, if `keep`, gate ``[S, I]`` and up ``[S, kept]`` pre-activations (else empty)."""
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
        gate_pre_SI: Tensor,
        up_pre_SI: Tensor,
        precision: str,
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
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``y [T, H]`` and, if `keep`, gate ``[R, I]`` and up ``[R, kept]`` pre-activations (else empty).

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
        gate_pre_RI: Tensor,
        up_pre_RI: Tensor,
        transposed: bool,
        precision: str,
        block_size: int,
        wants_input: bool,
        wants_routing: bool,
        wants_weights: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of x, the routing weights, gate_up and down; those not wanted are empty."""
        ...

"""What an operator computes, as objects, and as the one string that stands for them in ``torch.library``'s schemas.

Legend: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep, parse_keep
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import MXLayout


class FFNWeights(NamedTuple):
    """Views of the three projections in ``nn.Linear`` orientation, and biases; any strides, any float dtype."""

    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor
    gate_bias_I: Tensor | None = None
    up_bias_I: Tensor | None = None
    down_bias_H: Tensor | None = None


class ExpertWeights(NamedTuple):
    """The projections of all experts, and biases; a :class:`BlockSpec` says how they lie."""

    gate_up: Tensor  # [E, 2I, H], or [E, I, H] without a gate; the last two dimensions exchanged if ``transposed``
    down: Tensor  # [E, H, I], likewise
    gate_up_bias: Tensor | None = None  # [E, 2I] or [E, I], in the order of gate_up's rows
    down_bias: Tensor | None = None  # [E, H]


class Routing(NamedTuple):
    """Which experts a token goes to; pairs whose id is E or larger belong to other ranks and contribute nothing."""

    index_TK: Tensor
    weight_TK: Tensor


class Wants(NamedTuple):
    """Which gradients somebody reads."""

    input: bool = True
    routing: bool = True
    weights: bool = True


class BlockSpec(NamedTuple):
    """What is computed."""

    precision: str
    """``"bf16"``, ``"mxfp8"`` or ``"fp32"``."""
    block_size: int = 512
    """Tokens per block of the blockwise kernels; read for experts only."""
    transposed: bool = False
    """Experts' weights are ``[E, H, 2I]`` and ``[E, I, H]``; never guessed from shapes."""
    gate: Gate = SWIGLU
    interleaved: bool = False
    """Rows of the experts' gate_up (columns if ``transposed``) alternate: even ones are the gate's, odd ones up's.
    Otherwise the gate's come first."""


class BlockShape(NamedTuple):
    """Sizes of a block and of its weights, without values."""

    kind: str  # "mlp" or "experts"
    hidden: int
    inner: int
    experts: int | None = None
    top_k: int | None = None  # K; None for a dense MLP
    ordered: bool = False  # the weights lie as kernels read them: gate and up in one tensor, or experts transposed
    dtype: torch.dtype = torch.bfloat16  # of the weights
    biased: tuple[bool, bool] = (False, False)  # whether gate or up, and whether down has a bias
    frozen: bool = False  # no weight has a gradient


class Support(NamedTuple):
    """A backend's answer to whether it computes a block."""

    reason: str | None = None  # why it does not; None where it does
    most_tokens: int | None = None  # tokens of one call that it takes; None for any number
    weight_copy_bytes: int = 0  # copies of the weights that it needs, in its own orientation, sizes and dtype
    notes: tuple[str, ...] = ()  # for the report
    kernel_sizes: tuple[int, int] | None = None  # H and I as its kernels get them; None where nothing is padded


class BlockCall(NamedTuple):
    """One operator call."""

    spec: BlockSpec
    keep: Keep
    backend: str
    cache_weights: bool = True  # whether the backend may keep copies of the weights for the next call
    layouts: tuple[MXLayout, ...] = ()  # of quantized weights: how gate_up and down are stored

    def encode(self) -> str:
        """Return the call as the string argument of an operator; :meth:`decode` is the inverse."""
        spec = self.spec
        weights = f"{spec.block_size}|{spec.transposed:d}|{spec.interleaved:d}"
        options = f"{spec.precision}|{weights}|{spec.gate.text}|{self.keep.text}"
        layouts = "".join([f"|{layout.key}" for layout in self.layouts])
        return f"{options}|{self.backend}|{self.cache_weights:d}{layouts}"

    @staticmethod
    @functools.cache
    def decode(text: str) -> BlockCall:
        """Read what :meth:`encode` wrote."""
        precision, block_size, transposed, interleaved, gate, keep, backend, cache_weights, *layouts = text.split("|")
        spec = BlockSpec(precision, int(block_size), transposed == "1", Gate.read(gate), interleaved == "1")
        layout_pair = tuple(MXLayout.from_key(key) for key in layouts)
        return BlockCall(spec, parse_keep(keep), backend, cache_weights == "1", layout_pair)

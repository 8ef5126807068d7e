"""A readable float64 model of the blockwise MoE forward: one block after the other, as the documentation states it.

Nothing is shared with the package: no tiling, no sorting, no tables of activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU": lambda x: x / (1 + torch.exp(-x)),
    "Swish": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "GELU": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "GELU_Tanh_Approx": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "SquaredReLU": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
}


MAGNITUDES = {"SquaredReLU": "SquaredReLU"} | dict.fromkeys(set(ACTIVATIONS) - {"SquaredReLU"}, "keep")
"""What bounds each activation for positive values, by name."""


def keep(x: Tensor) -> Tensor:
    return x


@dataclass
class Model:
    """Options of the forward; weights ``[E, H, 2, I]`` and ``[E, I, H]`` dequantized, everything float64.

    ``place``: what the affinity multiplies: nothing, output, input, pre_activations or intermediate.
    ``gate_up_factor [E, 2, I]``, ``down_factor [E, H]``, ``token_factors``: FP8 scales and activation scales.
    ``quantize_hidden``, ``quantize_inner``: rounding of the matmuls' left operands.
    """

    gate_up: Tensor
    down: Tensor
    activation: str = "SiLU"
    place: str = "output"
    bias: tuple[Tensor, Tensor] | None = None
    limits: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None)
    gate_up_factor: Tensor | None = None
    down_factor: Tensor | None = None
    token_factors: tuple[Tensor, Tensor] | None = None
    skip_gate: bool = False
    bias_in_down_checkpoint: bool = False
    quantize_hidden: Callable[[Tensor], Tensor] = field(default=keep)
    quantize_inner: Callable[[Tensor], Tensor] = field(default=keep)

    def clamp(self, x: Tensor, upper: float | None, lower: float | None) -> Tensor:
        x = x if upper is None else torch.minimum(x, torch.tensor(upper, dtype=x.dtype))
        return x if lower is None else torch.maximum(x, torch.tensor(lower, dtype=x.dtype))

    def block(self, x: Tensor, a: Tensor, e: int, factors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return contribution ``[B, H]``, pre-activations ``[2, I, B]`` and down checkpoint ``[B, H]`` of a block."""
        if self.place == "input":
            x = x * a
        x = self.quantize_hidden(x)
        halves = []
        for half in range(2):
            z = x @ self.gate_up[e, :, half]
            if self.gate_up_factor is not None:
                z = z * self.gate_up_factor[e, half]
            z = z * factors[0]
            if self.bias is not None:
                z = z + self.bias[0][e, half]
            halves.append(self.clamp(z, *self.limits[2 * half : 2 * half + 2]))
        gate, up = (z * a if self.place == "pre_activations" else z for z in halves)
        act = ACTIVATIONS.get(self.activation, keep)
        h = act(up) if self.skip_gate else act(gate) * up
        if self.place == "intermediate":
            h = h * a
        y = self.quantize_inner(h) @ self.down[e]
        if self.down_factor is not None:
            y = y * self.down_factor[e]
        y = y * factors[1]
        bare = y
        if self.bias is not None:
            y = y + self.bias[1][e] * (a if self.place == "intermediate" else 1)
        checkpoint = y if self.bias_in_down_checkpoint else bare
        return y * a if self.place == "output" else y, torch.stack(halves).transpose(1, 2), checkpoint

    def magnitude(self) -> Model:
        """Return the model whose results, for positive rows, bound the sums of all terms' absolute values.

        Rounding is relative to these: where terms cancel, a result is small and its error is not.
        """

        def bounds(limits: tuple[float | None, ...]) -> tuple[None, float]:
            return None, max((abs(limit) for limit in limits if limit is not None), default=0.0)

        absolute = {
            name: torch.abs(value)
            for name in ("gate_up", "down", "gate_up_factor", "down_factor")
            if (value := getattr(self, name)) is not None
        }
        pairs = {
            name: (pair[0].abs(), pair[1].abs())
            for name in ("bias", "token_factors")
            if (pair := getattr(self, name)) is not None
        }
        limits = (*bounds(self.limits[:2]), *bounds(self.limits[2:]))
        return replace(self, activation=MAGNITUDES[self.activation], limits=limits, **absolute, **pairs)

    def run(
        self, hidden: Tensor, affinities: Tensor, ids: Tensor, block_to_expert: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return output ``[T', H]`` (rows that are no token are zero), gate/up ``[N, 2, I, B]``, down ``[N, B, H]``."""
        experts = self.gate_up.shape[0]
        tokens, width = hidden.shape
        table = affinities.double().view(tokens, experts)
        out, kept, down = torch.zeros(tokens, width, dtype=torch.float64), [], []
        ones = torch.ones(tokens, 1, dtype=torch.float64)
        factors = self.token_factors or (ones, ones)
        for number, expert in enumerate(block_to_expert.tolist()):
            slots = ids[number * block_size : (number + 1) * block_size].tolist()
            # Slots without a token read zeros (with a sink row: that row, which is zero).
            real = [t >= 0 and bool(hidden[t].any() or table[t].any()) for t in slots]
            take = [t if t >= 0 else 0 for t in slots]
            mask = torch.tensor(real)[:, None]
            x, a = hidden.double()[take] * mask, table[take, expert][:, None] * mask
            y, pre, checkpoint = self.block(x, a, expert, (factors[0][take], factors[1][take]))
            for slot, token in enumerate(slots):
                if real[slot]:
                    out[token] += y[slot]
            kept.append(pre)
            down.append(checkpoint)
        return out, torch.stack(kept), torch.stack(down)

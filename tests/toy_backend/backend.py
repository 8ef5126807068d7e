"""Lets the torch backend compute, and counts the calls; dense MLPs wider than :data:`WIDEST` are beyond it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import Keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.base import Saved
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, Support

WIDEST = 64
calls: Counter[str] = Counter()


class ToyBackend:
    """Implements :class:`hf_neuron_moe.backends.base.Backend`."""

    fixed_rows = False
    traceable = False
    universal = trains_quantized = False
    default_layout = "stock"

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch = get_backend("torch")

    @classmethod
    def instance(cls, name: str) -> ToyBackend:
        return _instances.setdefault(name, cls(name))

    @classmethod
    def unavailable_reason(cls, name: str) -> None:
        return None

    @classmethod
    def drop_weight_copies(cls, weights: Iterable[Tensor]) -> int:
        return 0

    @property
    def without_copies(self) -> ToyBackend:
        return self

    def support(
        self, shape: BlockShape, spec: BlockSpec, *, tokens: int | None = None, training: bool = True
    ) -> Support:
        if shape.kind == "mlp" and shape.inner > WIDEST:
            return Support(f"the toy takes an intermediate size of at most {WIDEST}, and it is {shape.inner}")
        return Support(notes=("a toy",))

    def quantized_support(self, stack: MXExpertStack, *, tokens: int | None = None, training: bool = True) -> Support:
        return Support("the toy reads no MX weights")

    def describe_products(self, precision: str, device: torch.device, shape: BlockShape | None = None) -> str:
        return ""

    def fake_saved(self, x: Tensor, shape: BlockShape, spec: BlockSpec, keep: Keep) -> Saved:
        return self.torch.fake_saved(x, shape, spec, keep)

    def quantized_fake_saved(
        self, x: Tensor, rows: int, inner: int, keep: Keep, gate: Gate = SWIGLU
    ) -> tuple[Tensor, Tensor]:
        return self.torch.quantized_fake_saved(x, rows, inner, keep, gate)

    def mlp_decode(self, *operands: Any) -> None:
        return None

    def mlp_forward(self, *arguments: Any) -> Any:
        return self._counted("mlp_forward", arguments)

    def mlp_backward(self, *arguments: Any) -> Any:
        return self._counted("mlp_backward", arguments)

    def experts_forward(self, *arguments: Any) -> Any:
        return self._counted("experts_forward", arguments)

    def experts_backward(self, *arguments: Any) -> Any:
        return self._counted("experts_backward", arguments)

    def quantized_forward(self, *arguments: Any) -> Any:
        return self._counted("quantized_forward", arguments)

    def quantized_backward(self, *arguments: Any) -> Any:
        return self._counted("quantized_backward", arguments)

    def _counted(self, name: str, arguments: tuple[Any, ...]) -> Any:
        calls[name] += 1
        return getattr(self.torch, name)(*arguments)


_instances: dict[str, ToyBackend] = {}

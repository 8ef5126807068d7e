"""The projections of a layer's experts, or of one dense MLP, and their gradients, as views in one orientation.

Legend: G groups (the experts of a layer, or one dense MLP), E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_neuron_moe.backends.spec import BlockSpec, ExpertWeights, FFNWeights
from hf_neuron_moe.backends.torch.compute import Scratch
from hf_neuron_moe.backends.torch.gradient_memory import gradient_memory


@dataclass
class GroupedWeights:
    """Projections, or their gradients, as views in ``nn.Linear`` orientation: any strides, any float dtype."""

    gate_GIH: Tensor
    up_GIH: Tensor
    down_GHI: Tensor
    gate_up_G2IH: Tensor | None = None  # both where they lie in one tensor, one after the other or interleaved
    gate_bias_GI: Tensor | None = None
    up_bias_GI: Tensor | None = None
    down_bias_GH: Tensor | None = None
    interleaved: bool = False

    @classmethod
    def of_dense(cls, weights: FFNWeights) -> GroupedWeights:
        """Return a dense MLP's projections as those of one group."""
        gate_IH, up_IH, down_HI, *biases = weights
        both, inner, stride = None, gate_IH.shape[0], gate_IH.stride()
        one_storage = gate_IH.untyped_storage()._cdata == up_IH.untyped_storage()._cdata
        behind = up_IH.storage_offset() - gate_IH.storage_offset() == inner * stride[0]
        if one_storage and behind and up_IH.stride() == stride:
            both = gate_IH.as_strided((1, 2 * inner, gate_IH.shape[1]), (0, *stride))
        gate_bias, up_bias, down_bias = (None if bias is None else bias[None] for bias in biases)
        return cls(gate_IH[None], up_IH[None], down_HI[None], both, gate_bias, up_bias, down_bias)

    @property
    def inner(self) -> int:
        return self.up_GIH.shape[1]

    @property
    def biased(self) -> bool:
        """Whether gate or up has a bias."""
        return self.gate_bias_GI is not None or self.up_bias_GI is not None

    def expert(self, number: int) -> FFNWeights:
        """Return one group's projections."""
        parts = (self.gate_GIH, self.up_GIH, self.down_GHI, self.gate_bias_GI, self.up_bias_GI, self.down_bias_GH)
        gate_IH, up_IH, down_HI, *biases = (None if part is None else part[number] for part in parts)
        assert gate_IH is not None and up_IH is not None and down_HI is not None
        return FFNWeights(gate_IH, up_IH, down_HI, *biases)

    def both(self, scratch: Scratch) -> Tensor:
        """Return gate and up as ``[G, 2I, H]``, in the order in which they lie if that is one tensor."""
        if self.gate_up_G2IH is not None:
            return self.gate_up_G2IH
        groups, inner, hidden = self.gate_GIH.shape
        both = scratch.get("gate_up", (groups, 2 * inner, hidden), self.gate_GIH.dtype)
        both[:, :inner].copy_(self.gate_GIH)
        both[:, inner:].copy_(self.up_GIH)
        return both

    def zero_without(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Write zeros to the groups that have no rows."""
        gate_up = (self.gate_GIH, self.up_GIH) if self.gate_up_G2IH is None else (self.gate_up_G2IH,)
        for number in set(range(len(self.down_GHI))) - {group for group, _, _ in runs}:
            for part in (*gate_up, self.down_GHI):
                part[number].zero_()


class ExpertStack(GroupedWeights):
    """Stacked projections of experts, lying as `spec` says; without a gate, its part has no rows."""

    def __init__(self, weights: ExpertWeights, spec: BlockSpec) -> None:
        self.stacked, self.spec = weights, spec
        gate_up, down = weights.gate_up, weights.down
        if spec.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        gate, up = split_gate_up(gate_up, spec)
        gate_bias, up_bias = (None, None) if weights.gate_up_bias is None else split_gate_up(weights.gate_up_bias, spec)
        interleaved = spec.interleaved and spec.gate.gated
        super().__init__(gate, up, down, gate_up, gate_bias, up_bias, weights.down_bias, interleaved)


class WeightGrads:
    """Gradients of a block's weights in their layouts, each in memory that is taken when it is first written to."""

    def __init__(self, weights: Sequence[Tensor], view: Callable[..., GroupedWeights]) -> None:
        self._weights, self._view = weights, view
        self._made: list[Tensor | None] = [None] * len(weights)

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients; what was not made before is not initialized."""
        for number, weight in enumerate(self._weights):
            if self._made[number] is None:
                self._made[number] = gradient_memory().empty_like(weight)
        return [made for made in self._made if made is not None]

    def grouped(self) -> GroupedWeights:
        """Return views of all of them."""
        return self._view(*self.tensors)

    def put(self, number: int, gradient: Tensor) -> None:
        """Take `gradient` as it is for that of a weight."""
        assert gradient.shape == self._weights[number].shape
        self._made[number] = gradient.to(self._weights[number].dtype)


def stacked(gate_up: Tensor, down: Tensor, *, transposed: bool) -> ExpertStack:
    """Return the stack of plain gated experts: ``[E, 2I, H]`` and ``[E, H, I]``, or the transposes of both."""
    return ExpertStack(ExpertWeights(gate_up, down), BlockSpec("bf16", transposed=transposed))


def split_gate_up(both: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor]:
    """Return views of the gate's and up's part of ``[E, 2I, ...]``; without a gate, of an empty one and the whole."""
    if not spec.gate.gated:
        return both[:, :0], both
    if spec.interleaved:
        return both[:, ::2], both[:, 1::2]
    inner = both.shape[1] // 2
    return both[:, :inner], both[:, inner:]

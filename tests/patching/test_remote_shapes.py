"""Gated MLPs of remote code that join the input's leading dimensions, or reshape halves; and near misses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import NothingToPatchError, ShapeError
from tests.patching import test_gate_sources
from tests.patching.test_gate_sources import BaseMLP, H, I
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS


class ViewMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        batch_size, length, hidden_dim = x.shape
        x = x.view(-1, hidden_dim)
        y = self.d(self.act(self.g(x)) * self.u(x))
        return y.view(batch_size, length, hidden_dim)


class ShapeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        y = self.d(self.act(self.g(x)) * self.u(x))
        return y.reshape(shape)


class SizeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        original, h = x.size(), x.contiguous().view(-1, x.size(-1))
        return self.d(self.act(self.g(h)) * self.u(h)).view(*original)


class FlattenMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(0, -2)
        return self.d(self.act(self.g(h)) * self.u(h)).view(*x.shape[:-1], -1)


class FlattenTwoMLP(BaseMLP):
    """Flattens the products of the first layers, and separates before the last."""

    def forward(self, x: Tensor) -> Tensor:
        g, u = torch.flatten(self.g(x), 0, 1), torch.flatten(self.u(x), end_dim=1)
        h = (F.silu(g) * u).unflatten(0, x.shape[:-1])
        return self.d(h)


class AttributeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        b, s = x.shape[:2]
        hidden = self.hidden_size
        x = torch.reshape(x, (b * s, hidden))
        return self.d(self.act(self.g(x)) * self.u(x)).view(b, s, self.config.hidden_size)


class LeadingMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        *leading, _ = x.shape
        x = x.view(-1, x.shape[2])
        y = self.d(F.silu(x @ self.g.weight.T) * (x @ self.u.weight.T))
        return y.view((*leading, -1))


class ViewAsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(x.size(0) * x.size(1), -1)
        g, u = self.gu(rows).chunk(2, dim=1)
        return self.d(self.act(g) * u).view_as(x)


class FollowingMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        length, hidden = x.size(1), x.size(-1)
        rows = y = x.view(-1, hidden)
        z, two = self.gu(rows), 2
        width = z.shape[-1]
        g, u = z.split(width // two, dim=-1)
        y = self.d(self.act(g) * u)
        return y.view(-1, length, hidden)


class SumOfShapesMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        z = self.gu(x.view(-1, self.hidden_size))
        return self.d(self.act(z[:, : self.size]) * z[:, self.size :]).reshape(lead + (self.hidden_size,))  # noqa: RUF005


class NarrowMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z.narrow(-1, 0, self.size)) * torch.narrow(z, 2, self.size, self.size))


class SelectMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.size()
        z = self.gu(x).view(b, s, 2, self.size)
        return self.d(F.silu(z.select(-2, 0)) * torch.select(z, 2, -1))


class IndexMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x).view(*x.shape[:-1], self.size, 2)
        return self.d(F.silu(z[:, :, :, 0]) * z[:, :, :, 1])


class RowIndexMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x).view(-1, 2, self.size)
        return self.d(F.silu(z[:, 1]) * z[:, 0, :]).view(x.shape)


class RowUnbindMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gu(x.flatten(0, 1)).unflatten(-1, (2, -1)).unbind(dim=1)
        return self.d(self.act(gate) * up).reshape_as(x)


class Config:
    """Plain values."""

    def __init__(self, hidden_size: int = H) -> None:
        self.hidden_size = hidden_size


SIZES: dict[str, Any] = {"hidden_size": H, "config": Config()}
ACCEPTED = [
    (ViewMLP(), 3),
    (ShapeMLP(bias=True), None),
    (SizeMLP(), None),
    (FlattenMLP(), None),
    (FlattenTwoMLP(), 3),
    (AttributeMLP(**SIZES), 3),
    (LeadingMLP(), 3),
    (ViewAsMLP(fused=True), 3),
    (FollowingMLP(fused=True), 3),
    (SumOfShapesMLP(fused=True, **SIZES), None),
    (NarrowMLP(fused=True), 3),
    (SelectMLP(fused=True), 3),
    (IndexMLP(fused=True), 3),
    (RowIndexMLP(fused=True), None),
    (RowUnbindMLP(fused=True), 3),
]
IDS = [type(block).__name__ for block, _ in ACCEPTED]


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize(("block", "rank"), ACCEPTED, ids=IDS)
def test_rows_are_computed_as_they_are_in_any_shape(block: nn.Module, rank: int | None, home: str) -> None:
    test_gate_sources.test_a_source_is_read_as_its_gate_and_computes_the_same(block, Gate(), home)
    model = nn.ModuleDict({"mlp": copy.deepcopy(block)})
    patch_model(model, {"precision": "fp32", "weights": home})
    for shape in ((2, 3, H), (2, 1, 4, H)):
        x = torch.randn(shape)
        if rank is not None and len(shape) != rank:
            with refused(ShapeError, "hidden_states", got=str(len(shape)), where="mlp"):
                model["mlp"](x)
        else:
            torch.testing.assert_close(model["mlp"](x), block(x), rtol=1e-5, atol=1e-5)


class StillJoinedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, x.shape[-1])
        return self.d(self.act(self.g(x)) * self.u(x))


class ExchangedMLP(BaseMLP):
    """Batch and sequence change places."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        x = x.view(-1, h)
        return self.d(self.act(self.g(x)) * self.u(x)).view(s, b, h)


class OtherRowsMLP(BaseMLP):
    """Its rows have half of the input's features."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(-1, 4)
        return self.d(self.act(self.g(y)) * self.u(y)).view(x.shape)


class InnerSizeMLP(BaseMLP):
    """Rows of H entries of a tensor that has I in a row."""

    def forward(self, x: Tensor) -> Tensor:
        h = (self.act(self.g(x)) * self.u(x)).view(-1, x.shape[-1])
        return self.d(h).view(x.shape)


class InnerFollowsMLP(BaseMLP):
    """Halves of rows of H entries, which are put together again."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        g, u = self.gu(x).view(b, -1, h).chunk(2, dim=-1)
        return self.d((self.act(g) * u).view(b, s, -1))


class MixedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x.flatten(0, -2))) * self.u(x)).view(x.shape)


class FirstMLP(BaseMLP):
    """A batch norm takes a dimension of the input for its channels."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.view(-1, x.shape[-1]))
        return self.d(self.act(self.g(h)) * self.u(h)).view(x.shape)


class FirstFusedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(self.norm(x.view(-1, x.shape[-1]))).chunk(2, dim=-1)
        return self.d(self.act(g) * u).view(x.shape)


class PooledMLP(BaseMLP):
    """Two rows become one, of which the view would make two halves."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.pool(x)
        return self.d(self.act(self.g(h)) * self.u(h)).view(b, s, -1)


class FlattenAllMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x.flatten(0, 1))) * self.u(x.flatten(0))).view(x.shape)


class TwoRanksMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        a, b, c, h = x.shape
        g, u = self.gu(x).chunk(2, dim=2)
        return self.d(self.act(g) * u).view(a, b, c, h)


class JoinedDim2MLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x.flatten(0, 1)).chunk(2, dim=2)
        return self.d(self.act(g) * u).view(x.shape)


class ChangedInputMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        g, u = self.g(rows), self.u(rows)
        rows *= 2
        return self.d(self.act(g) * u).view(x.shape)


class RowsLinear(nn.Module):
    """A layer that takes three dimensions only."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.linear = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1)).unflatten(0, x.shape[:-1])


def with_rows_linear() -> nn.Module:
    block = ViewMLP()
    block.g = RowsLinear(block.g)
    return block


class NarrowOtherMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z.narrow(-1, 0, self.size)) * z.narrow(-1, self.start, self.size))


class SelectOtherMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x).view(*x.shape[:-1], 2, self.size)
        return self.d(F.silu(z.select(-1, 0)) * z.select(-1, 1))


class ChangedRowsMLP(BaseMLP):
    """The rows are the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        rows = g.flatten(0, -2)
        rows.clamp_(max=1e3)
        return self.d(self.act(g) * self.u(x))


class ChangedHalvesMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        both = z.view(-1, 2, self.size)
        z.clamp_(max=1e3)
        return self.d(self.act(both[:, 0]) * both[:, 1]).view(x.shape)


REFUSED = [
    (ChangedRowsMLP(), "its forward computes `g`"),
    (ChangedHalvesMLP(fused=True), "its forward computes `both`"),
    (StillJoinedMLP(), "with the leading dimensions joined, not with its input's shape"),
    (ExchangedMLP(), r"\.view\(s, b, h\)`"),
    (OtherRowsMLP(), r"computes `x\.view\(-1, 4\)`"),
    (InnerSizeMLP(), r"\.view\(-1, x\.shape\[-1\]\)`"),
    (InnerFollowsMLP(fused=True), r"computes `self\.gu\(x\)\.view\(b, -1, h\)`"),
    (MixedMLP(), "combines its input with one whose leading dimensions are joined"),
    (FirstMLP(norm=nn.BatchNorm1d(H)), r"not down\(act\(gate"),
    (FirstFusedMLP(fused=True, norm=nn.BatchNorm1d(H)), r"not down\(act\(gate"),
    (PooledMLP(pool=nn.MaxPool2d((2, 1))), "gives shapes, but pool in front of the layers may change them"),
    (FlattenAllMLP(), r"computes `x\.flatten\(0\)`"),
    (TwoRanksMLP(fused=True), "counts 3 and 4 dimensions of its input"),
    (JoinedDim2MLP(fused=True), r"chunk\(2, dim=2\)`"),
    (ChangedInputMLP(), r"may change its input in place: `rows \*= 2`"),
    (NarrowOtherMLP(fused=True, start=5), "splits by size and start"),
    (with_rows_linear(), r"g is a tests\.patching\.test_remote_shapes\.RowsLinear, not a plain"),
    (SelectOtherMLP(fused=True), r"computes `z\.select\(-1, 0\)`"),
    (AttributeMLP(hidden_size=I, config=Config()), "takes hidden_size=12 for the number of its input's features"),
    (AttributeMLP(hidden_size=H, config=Config(4)), r"takes config\.hidden_size=4 for the number"),
]


@pytest.mark.parametrize(("block", "reason"), REFUSED, ids=[type(block).__name__ for block, _ in REFUSED])
def test_other_rows_and_shapes_are_refused(block: nn.Module, reason: str) -> None:
    with refused(NothingToPatchError, "model", reason):
        patch_model(nn.ModuleDict({"mlp": block}))

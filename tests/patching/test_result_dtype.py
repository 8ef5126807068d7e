"""Casts in remote code: the block returns the dtype that stock returns, or the cast is refused with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import NothingToPatchError
from tests.patching.test_gate_sources import BaseMLP, H
from tests.refusals import refused


class Fp32Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (H,)) * self.weight


class CastMLP(BaseMLP):
    """Each subclass casts the result otherwise; the norm is beside the path."""

    def forward(self, x: Tensor) -> Tensor:
        return self.cast(self.d(self.act(self.g(x)) * self.u(x)), x)

    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class NormDtypeMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        n = self.norm(x)
        return y.to(n.dtype)


class NamedNormDtypeMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        n = self.norm(x)
        dtype = n.dtype
        return y.to(dtype)


class ToNormMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        n = self.norm(x)
        return y.to(n)


class TypeAsNormMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        n = self.norm(x)
        return y.type_as(n)


class InnerNormDtypeMLP(BaseMLP):
    """A norm that returns bf16 rounds what the kernels do not round."""

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        g, u = self.g(x).to(n.dtype), self.u(x).to(n.dtype)
        return self.d((self.act(g) * u).to(x.dtype))


class EmptyLikeMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        empty = torch.empty_like(x)
        return y.to(empty.dtype)


class FloatDtypeMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(x.float().dtype)


class TypeAsFloatMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        wide = x.float()
        return y.type_as(wide)


class HeldDtypeMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(self.dtype)


class PromotedMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(torch.promote_types(x.dtype, torch.float32))


class DefaultDtypeMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(torch.get_default_dtype())


class WeightDtypeMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(self.d.weight.dtype)


class WeightDtypeIfOtherMLP(BaseMLP):
    """Under autocast the condition holds."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.d(self.act(self.g(x)) * self.u(x))
        if y.dtype != self.d.weight.dtype:
            y = y.to(self.d.weight.dtype)
        return y


class NormToWeightDtypeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if x.dtype != self.d.weight.dtype:
            x = x.to(self.d.weight.dtype)
        return self.d(self.act(self.g(x)) * self.u(x))


_OF_NORM = r"casts to the dtype of what its norm \(Fp32Norm\) returns"
_RESULT = "its result is cast to a dtype that may not be its input's"
REFUSED = [
    (NormDtypeMLP(norm=Fp32Norm()), _OF_NORM),
    (NormDtypeMLP(norm=nn.LayerNorm(H)), r"casts to the dtype of what its norm \(LayerNorm\) returns"),
    (NamedNormDtypeMLP(norm=Fp32Norm()), _OF_NORM),
    (ToNormMLP(norm=Fp32Norm()), _OF_NORM),
    (TypeAsNormMLP(norm=Fp32Norm()), _OF_NORM),
    (InnerNormDtypeMLP(norm=Fp32Norm()), _OF_NORM),
    (EmptyLikeMLP(), r"computes `torch\.empty_like\(x\)`"),
    (FloatDtypeMLP(), r"computes `y\.to\(x\.float\(\)\.dtype\)`"),
    (TypeAsFloatMLP(), _RESULT),
    (HeldDtypeMLP(dtype=torch.float32), r"computes `y\.to\(self\.dtype\)`"),
    (PromotedMLP(), r"computes `y\.to\(torch\.promote_types"),
    (DefaultDtypeMLP(), r"computes `y\.to\(torch\.get_default_dtype\(\)\)`"),
    (WeightDtypeMLP(), _RESULT),
    (WeightDtypeIfOtherMLP(), _RESULT),
    (NormToWeightDtypeMLP(norm=Fp32Norm()), r"its forward is not down\(act\(gate"),
]


@pytest.mark.parametrize(("block", "reason"), REFUSED, ids=[type(block).__name__ for block, _ in REFUSED])
def test_a_cast_to_a_dtype_that_is_not_known_is_refused(block: nn.Module, reason: str) -> None:
    with refused(NothingToPatchError, "model", reason):
        patch_model(nn.ModuleDict({"mlp": block.to(torch.bfloat16)}))


class TypeAsMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        return y.type_as(x)


class ToTensorMLP(CastMLP):
    def cast(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(x)


class LayersDtypeMLP(BaseMLP):
    """What a layer, an activation of the instance and a cast back return has the layers' dtype."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        n = self.norm(x).to(x.dtype)
        a = self.act(self.u(x))
        return self.d(h.to(a.dtype)).to(n.dtype)


class NormFirstMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.d(self.act(self.g(x)) * self.u(x))


class NormFirstCastMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return self.d(self.act(self.g(n)) * self.u(n)).to(x.dtype)


ACCEPTED = [
    TypeAsMLP(),
    ToTensorMLP(),
    LayersDtypeMLP(norm=Fp32Norm()),
    NormFirstMLP(norm=Fp32Norm()),
    NormFirstCastMLP(norm=Fp32Norm()),
]


@pytest.mark.parametrize("block", ACCEPTED, ids=lambda block: type(block).__name__)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "as it is"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_result_has_the_dtype_that_stock_returns(block: nn.Module, dtype: torch.dtype, autocast: bool) -> None:
    stock, model = copy.deepcopy(block), nn.ModuleDict({"mlp": copy.deepcopy(block)})
    before = isinstance(block, NormFirstMLP | NormFirstCastMLP)  # after it weights are fp32, or autocast makes them fit
    if dtype == torch.bfloat16 and not before and not autocast:
        stock, model = stock.to(dtype), model.to(dtype)
    patch_model(model, {"precision": "fp32"})
    x = torch.randn(2, 3, H).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected, found = stock(x), model["mlp"](x)
    # Under autocast a block keeps its input's dtype, where a stock layer at the end returns autocast's.
    assert found.dtype == (dtype if autocast else expected.dtype)
    assert expected.dtype in ({dtype, torch.bfloat16} if autocast else {dtype, torch.float32})
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.03, atol=0.03 * expected.abs().max().item())

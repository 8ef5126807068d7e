"""Spellings of the SwiGLU formula beyond the usual one: patched where the instance bears them out, else refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import SeedOssConfig, T5Config
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS

H, I = 8, 12  # noqa: E741


class BaseMLP(nn.Module):
    """Layers for all spellings; each uses some."""

    def __init__(self, fused: bool = False, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        if fused:
            self.gu = nn.Linear(H, 2 * I, bias=False)
        else:
            self.g, self.u = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False)
        self.d = nn.Linear(I, H, bias=False)
        self.act, self.size = nn.SiLU(), I
        for name, value in attributes.items():
            setattr(self, name, value)


class SigmoidMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(torch.sigmoid(g) * g * self.u(x))


class SigmoidMethodMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.u(x) * (self.g(x) * self.g(x).sigmoid()))


class SplitMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = torch.split(self.gu(x), self.size, dim=-1)
        return self.d(self.act(g) * u)


class SplitMethodMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x).split([self.size, self.size], -1)
        return self.d(F.silu(g) * u)


class SplitTwelveMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = torch.split(self.gu(x), 12, dim=-1)
        return self.d(self.act(g) * u)


class SplitTwelveMethodMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x).split(12, -1)
        return self.d(self.act(g) * u)


class SplitNumberMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x).split(13, -1)
        return self.d(self.act(g) * u)


class ExtraMLP(BaseMLP):
    def forward(self, x: Tensor, layer_idx: Any = None, *args: Any, scale: float = 2.0, **kwargs: Any) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x))


class DropoutMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.d(self.drop(self.act(self.g(x)) * self.u(x))))


class FunctionalDropoutMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.act(self.g(x)) * self.u(x), p=self.p, training=self.training)
        return F.dropout(self.d(h), 0.0, self.training)


class HalfSizeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        half = z.shape[-1] // 2
        return self.d(self.act(z[..., :half]) * z[..., half:])


class HalfInlineMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[..., : z.size(-1) // 2]) * z[..., z.shape[-1] // 2 :])


class EitherMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        if (self.width or self.size) != self.size:
            x = x * 2
        return self.d(self.act(self.g(x)) * self.u(x))


def gated_t5(p: float) -> nn.Module:
    """wi_0, wi_1 and wo, with dropout before wo and a cast to wo's dtype."""
    return T5DenseGatedActDense(T5Config(d_model=H, d_ff=I, dropout_rate=p, feed_forward_proj="gated-gelu"))


ACCEPTED = [
    SigmoidMLP(),
    SigmoidMethodMLP(),
    SplitMLP(fused=True),
    SplitMethodMLP(fused=True),
    SplitTwelveMLP(fused=True),
    SplitTwelveMethodMLP(fused=True),
    ExtraMLP(),
    DropoutMLP(drop=nn.Dropout(0.0)),
    DropoutMLP(drop=nn.Identity()),
    FunctionalDropoutMLP(p=0.0),
    SeedOssMLP(SeedOssConfig(hidden_size=H, intermediate_size=I, residual_dropout=0.0)),
    HalfSizeMLP(fused=True),
    HalfInlineMLP(fused=True),
    EitherMLP(width=None),
    gated_t5(0.0),
]


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("block", ACCEPTED, ids=lambda block: type(block).__name__)
def test_equivalent_spellings_are_patched_and_equal(block: nn.Module, home: str) -> None:
    model = nn.ModuleDict({"mlp": copy.deepcopy(block)}).train()
    x = torch.randn(5, H)
    expected = model["mlp"](x)
    assert len(patch_model(model, {"precision": "fp32", "weights": home}).patched) == 1
    torch.testing.assert_close(model["mlp"](x), expected, rtol=1e-5, atol=1e-6)


class ReadExtraMLP(BaseMLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x)) * scale


class ShadowMLP(BaseMLP):
    def forward(self, x: Tensor, F: Any = None) -> Tensor:
        return self.d(F.silu(self.g(x)) * self.u(x))


class NeededExtraMLP(BaseMLP):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x))


class OtherSigmoidMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.g(x) * torch.sigmoid(self.u(x)))


class AlwaysDropoutMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.dropout(self.act(self.g(x)) * self.u(x), self.p))


class OwnDtypeMLP(BaseMLP):
    """In bf16 its result is fp32."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.d(self.act(self.g(x)) * self.u(x)).to(y.dtype)


class NamedDtypeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x).float()) * self.u(x).float()
        dtype = h.dtype
        return self.d(h.to(x.dtype)).to(dtype)


class OtherHalfMLP(BaseMLP):
    """Its slices are halves for 12 columns only."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[..., : 24 - z.shape[-1] // 2]) * z[..., z.shape[-1] - 24 + z.shape[-1] // 2 :])


class InputHalfMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[..., : x.shape[-1] // 2]) * z[..., x.shape[-1] // 2 :])


class AssigningTestMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        if len(x) > 99 and (h := h * 2) is not None:
            h = h.to(self.d.weight.dtype)
        return self.d(h)


class CallingTestMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        if len(x) > 99 and h.mul_(2).dtype != self.d.weight.dtype:
            h = h.to(self.d.weight.dtype)
        return self.d(h)


REFUSED = [
    (OwnDtypeMLP(), "its result is cast to a dtype that may not be its input's"),
    (NamedDtypeMLP(), "its result is cast to a dtype that may not be its input's"),
    (OtherHalfMLP(fused=True), r"computes `z\[\.\.\., :24 - z\.shape\[-1\] // 2\]`"),
    (InputHalfMLP(fused=True), r"computes `z\[\.\.\., :x\.shape\[-1\] // 2\]`"),
    (AssigningTestMLP(), r"the statement `if len\(x\) > 99 and \(h := "),
    (CallingTestMLP(), r"the statement `if len\(x\) > 99 and h\.mul_\(2\)"),
    (EitherMLP(width=I + 1), r"computes `x \* 2`, a factor of 2"),
    (ReadExtraMLP(), "computes `scale`"),
    (ShadowMLP(), r"computes `F\.silu"),
    (NeededExtraMLP(), r"takes \(self, x: Tensor, y: Tensor\), not one tensor"),
    (OtherSigmoidMLP(), r"not down\(act\(gate"),
    (AlwaysDropoutMLP(p=0.0), r"computes `F\.dropout"),
    (SplitMLP(fused=True, size=2), "splits by size=2, not in halves of 12"),
    (SplitNumberMLP(fused=True), "splits by 13, not in halves of 12"),
    (DropoutMLP(drop=nn.Dropout(0.1)), r"it has dropout, .*: drop with p=0\.1"),
    (FunctionalDropoutMLP(p=0.1), r"it has dropout, .*: p with p=0\.1"),
    (gated_t5(0.1), r"it has dropout, .*: dropout with p=0\.1; set it to 0 before you patch"),
]


@pytest.mark.parametrize(("block", "reason"), REFUSED, ids=[type(block).__name__ for block, _ in REFUSED])
def test_near_misses_are_refused(block: nn.Module, reason: str) -> None:
    with refused(NothingToPatchError, "model", reason):
        patch_model(nn.ModuleDict({"mlp": block}))


def test_arguments_that_the_original_ignores_are_ignored_and_others_are_errors() -> None:
    model = nn.ModuleDict({"extra": ExtraMLP(), "plain": SigmoidMLP()})
    patch_model(model)
    x = torch.randn(3, H)
    assert torch.equal(model["extra"](x, 3, scale=1.5, cache=None), model["extra"](x))
    with pytest.raises(TypeError, match="plain: forward takes hidden_states only"):
        model["plain"](x, scale=1.5)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_a_dropout_that_is_switched_on_later_is_an_error_in_training(home: str) -> None:
    model = nn.ModuleDict({"module": DropoutMLP(drop=nn.Dropout(0.0)), "number": FunctionalDropoutMLP(p=0.0)}).train()
    patch_model(model, {"weights": home})
    x = torch.randn(3, H)
    model["module"].drop.p = model["number"].p = 0.1
    for name, attribute in (("module", "drop"), ("number", "p")):
        with refused(UnsupportedModelError, attribute, r"got .*0\.1", where=name):
            model[name](x)
        model.eval()[name](x)  # where dropout does nothing
        model.train()

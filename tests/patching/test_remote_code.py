"""Gated MLPs as remote code spells them: patched where they are the same function, refused where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import NothingToPatchError, ShapeError
from tests.patching import test_gate_sources
from tests.patching.test_gate_sources import BaseMLP, H
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS


class TimesInPlaceMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x))
        h *= self.u(x)
        return self.d(h)


class MulInPlaceMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.silu(self.g(x)).mul_(self.u(x)))


class SiluInPlaceMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(F.silu(g, inplace=True) * self.u(x))


class LimitsInPlaceMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.g(x), self.u(x)
        g.clamp_(max=2.0)
        u = u.clamp_(min=-2.0, max=2.0)
        u += 1
        return self.d(g.mul(torch.sigmoid(g)) * u)


class ContiguousMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x.contiguous()).chunk(2, dim=-1)
        return self.d((self.act(g.contiguous()) * u.contiguous()).contiguous()).contiguous()


class ChunkDim2MLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x).chunk(2, dim=2)
        return self.d(self.act(g) * u)


class ChunkIndexMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.chunk(self.gu(x), 2, dim=-1)
        return self.d(F.silu(z[0]) * z[-1])


class SplitIndexMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        z = z.split(z.shape[-1] // 2, dim=-1)
        return self.d(F.silu(z[-2]) * z[1])


class ExpSiluMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(g / (1 + torch.exp(-g)) * self.u(x))


class ExpSigmoidMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        s = 1.0 / (1.0 + (-1.702 * g).exp())
        return self.d(g * s * self.u(x))


class WalrusMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d((g := self.g(x)) * torch.sigmoid(g) * self.u(x))


class TransposedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(x @ self.g.weight.T) * torch.matmul(x, self.u.weight.t())
        return torch.matmul(h, self.d.weight.transpose(0, 1))


class TensorSplitMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = torch.tensor_split(self.gu(x), 2, dim=-1)
        return self.d(self.act(g) * u)


class Slices3MLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[:, :, : self.size]) * z[:, :, self.size :])


class TpMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        if self.config.pretraining_tp > 1:
            size = self.size // self.config.pretraining_tp
            gates = torch.cat([F.linear(x, w) for w in self.g.weight.split(size, dim=0)], dim=-1)
            y = sum(F.linear(gates, w) for w in self.d.weight.split(size, dim=1))
        else:
            y = self.d(self.act(self.g(x)) * self.u(x))
        return y


class DivOneMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x)) / self.scale


class ExpitMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(g * torch.special.expit(g) * self.u(x))


class MulStatementMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h, u = self.act(self.g(x)), self.u(x)
        h.mul_(u)
        return self.d(h)


class OwnFactorMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        g *= torch.sigmoid(g)
        g *= self.u(x)
        return self.d(g)


class NamedInputMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.mul(input=F.silu(input=self.g(x)), other=self.u(x)))


class WeightDtypeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        return self.d(h.to(self.d.weight.dtype))


class TwiceNegatedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = -self.g(x)
        return self.d(self.act(-g) * self.u(x))


class Config:
    """Plain values."""

    pretraining_tp = 1


ACCEPTED = [
    (TimesInPlaceMLP(), Gate()),
    (TimesInPlaceMLP(act=nn.GELU(), bias=True), Gate("gelu")),
    (MulInPlaceMLP(bias=True), Gate()),
    (MulStatementMLP(), Gate()),
    (OwnFactorMLP(), Gate()),
    (SiluInPlaceMLP(), Gate()),
    (LimitsInPlaceMLP(), Gate(gate_max=2.0, up_max=2.0, up_min=-2.0, up_offset=1.0)),
    (ContiguousMLP(fused=True), Gate()),
    (ChunkDim2MLP(fused=True), Gate()),
    (Slices3MLP(fused=True), Gate()),
    (ChunkIndexMLP(fused=True), Gate()),
    (SplitIndexMLP(fused=True), Gate()),
    (TensorSplitMLP(fused=True), Gate()),
    (ExpSiluMLP(), Gate()),
    (ExpSigmoidMLP(), Gate("swish", 1.702)),
    (ExpitMLP(), Gate()),
    (WalrusMLP(), Gate()),
    (NamedInputMLP(), Gate()),
    (TransposedMLP(), Gate()),
    (TpMLP(config=Config()), Gate()),
    (DivOneMLP(scale=1), Gate()),
    (WeightDtypeMLP(), Gate()),
    (TwiceNegatedMLP(), Gate()),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize(("block", "gate"), ACCEPTED, ids=[f"{type(b).__name__} {g.text}" for b, g in ACCEPTED])
def test_the_same_function_is_patched_with_its_values_and_gradients(block: nn.Module, gate: Gate, home: str) -> None:
    test_gate_sources.test_a_source_is_read_as_its_gate_and_computes_the_same(block, gate, home)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("kind", [ChunkDim2MLP, Slices3MLP])
@pytest.mark.parametrize("shape", [(3, H), (1, 1, 3, H)], ids=["2-D", "4-D"])
def test_dim_2_is_the_last_of_three_at_each_call(kind: type[BaseMLP], shape: tuple[int, ...], home: str) -> None:
    model = nn.ModuleDict({"mlp": kind(fused=True)})
    patch_model(model, {"weights": home})
    with refused(ShapeError, "hidden_states", got=str(len(shape)), where="mlp"):
        model["mlp"](torch.randn(shape))
    with refused(ShapeError, "hidden_states", got=str(len(shape)), where="mlp"), torch.no_grad():
        model.eval()["mlp"](torch.randn(shape))


class InputInPlaceMLP(BaseMLP):
    """Its caller sees the change."""

    def forward(self, x: Tensor) -> Tensor:
        g, u = self.g(x), self.u(x)
        x *= 2
        return self.d(self.act(g) * u)


class InputCallMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        same = x.contiguous()
        g, u = self.g(x), self.u(x)
        same.add_(1)
        return self.d(self.act(g) * u)


class ModuleInPlaceMLP(BaseMLP):
    """Its norm may return its input, and a module's dropout of 0 does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(x))
        g, u = self.g(h), self.u(h)
        h += 1
        return self.d(self.act(g) * u)


class ReadLaterMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        same = g
        same += 1
        return self.d(self.act(g) * self.u(x))


class ReadBeforeMLP(BaseMLP):
    """Python has g when F.silu changes it: the product is silu(g) sigmoid(silu(g))."""

    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(g * torch.sigmoid(F.silu(g, inplace=True)) * self.u(x))


class TwiceChangedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        g *= torch.sigmoid(g.add_(1))
        return self.d(g * self.u(x))


class HalfInPlaceMLP(BaseMLP):
    """The second slice is one of changed values."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        g = z[..., : self.size]
        g *= torch.sigmoid(g)
        return self.d(g * z[..., self.size :])


class SavedMLP(BaseMLP):
    """Autograd needs the sigmoid's own result."""

    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        h = torch.sigmoid(g)
        h *= g
        h *= self.u(x)
        return self.d(h)


class OtherOperatorMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        h -= self.u(x)
        return self.d(h)


class ThirdPartMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x).chunk(2, dim=-1)
        return self.d(self.act(z[0]) * z[-3])


class SamePartMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x).chunk(2, dim=2)
        return self.d(self.act(z[1]) * z[-1])


class Dim1MLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x).chunk(2, dim=1)
        return self.d(self.act(g) * u)


class DroppedMLP(BaseMLP):
    """Rows are left out, not channels."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[:, 1:, : self.size]) * z[:, 1:, self.size :])


class FewerMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[:, :, :6]) * z[:, :, 6:])


class QuotientMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(g / (self.one + torch.exp(self.sign * g)) * self.u(x))


class OtherQuotientMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.g(x) * self.u(x) / (1 + torch.exp(-self.u(x) - 1)))


class DividedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x)) / 2


class UntransposedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.silu(x @ self.g.weight) * (x @ self.u.weight.transpose(0, 0)))


class TupleResultMLP(BaseMLP):
    def forward(self, x: Tensor) -> Any:
        return self.d(self.act(self.g(x)) * self.u(x)), None


class InputCastMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.g.weight.dtype)
        return self.d(self.act(self.g(x)) * self.u(x))


class ResultCastMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        y = self.d(self.act(self.g(x)) * self.u(x))
        return y.to(self.d.weight.dtype)


REFUSED = [
    (InputInPlaceMLP(), r"may change its input in place: `x \*= 2`"),
    (InputCallMLP(), r"may change its input in place: `same\.add_\(1\)`"),
    (ModuleInPlaceMLP(norm=nn.LayerNorm(H), drop=nn.Dropout(0.0)), r"may change its input in place: `h \+= 1`"),
    (ReadLaterMLP(), r"computes `g`"),
    (ReadBeforeMLP(), r"may change a tensor that it reads in place: `return self\.d\(g \* "),
    (TwiceChangedMLP(), r"may change a tensor that it reads in place: `g \*= torch\.sigmoid"),
    (HalfInPlaceMLP(fused=True), r"computes `z`"),
    (SavedMLP(), "does not run on a small example: RuntimeError"),
    (OtherOperatorMLP(), r"computes `h - self\.u\(x\)`"),
    (ThirdPartMLP(fused=True), r"computes `z\[-3\]`"),
    (SamePartMLP(fused=True), r"not down\(act\(gate"),
    (Dim1MLP(fused=True), r"chunk\(2, dim=1\)`"),
    (DroppedMLP(fused=True), r"computes `z\[:, 1:, :self\.size\]`"),
    (FewerMLP(fused=True), "splits by 6, not in halves of 12"),
    (QuotientMLP(one=2, sign=-1), r"computes `g / \(self\.one"),
    (QuotientMLP(one=1, sign=1), "alpha must be "),
    (OtherQuotientMLP(), r"computes `-self\.u\(x\) - 1`"),
    (DividedMLP(), r"/ 2`"),
    (UntransposedMLP(), r"computes `x @ self\.g\.weight`"),
    (TransposedMLP(bias=True), r"computes `x @ self\.g\.weight\.T`"),
    (TupleResultMLP(), r"computes `\(self\.d\(.*, None\)`"),
    (InputCastMLP(), r"computes `x\.to\(self\.g\.weight\.dtype\)`"),
    (ResultCastMLP(), "its result is cast to a dtype that may not be its input's"),
    (DivOneMLP(scale=2), r"/ self\.scale`"),
]


@pytest.mark.parametrize(("block", "reason"), REFUSED, ids=[f"{type(b).__name__} {r[:20]}" for b, r in REFUSED])
def test_another_function_is_refused(block: nn.Module, reason: str) -> None:
    with refused(NothingToPatchError, "model", reason):
        patch_model(nn.ModuleDict({"mlp": block}))

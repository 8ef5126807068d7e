"""Sources of gated MLPs beyond SwiGLU: each read as its gate, and near misses refused with line and value."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.patching.discovery import discover
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS

H, I = 8, 12  # noqa: E741


class BaseMLP(nn.Module):
    """Layers for all sources, each uses some; `fused` and `bias` say which and how, the rest become attributes."""

    def __init__(self, fused: bool = False, bias: bool = False, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        if fused:
            self.gu = nn.Linear(H, 2 * I, bias=bias)
        else:
            self.g, self.u = nn.Linear(H, I, bias=bias), nn.Linear(H, I, bias=bias)
        self.d = nn.Linear(I, H, bias=bias)
        self.act, self.size = nn.SiLU(), I
        for name, value in attributes.items():
            setattr(self, name, value)
        for param in self.parameters():
            nn.init.normal_(param)


class BiasedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.gelu(self.g(x), approximate="tanh") * self.u(x))


class DownBiasMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.gelu(self.g(x)) * self.u(x))


class SwishMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d((g * torch.sigmoid(g * self.alpha)).mul(self.u(x)))


class UpFirstMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        u, g = self.gu(x).chunk(2, dim=-1)
        return self.d(u * self.act(g))


class SliceMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[..., self.size :]) * z[..., : self.size])


class StripesMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        gate, up = z[..., 1::2], z[..., ::2]
        return self.d(self.act(gate) * up)


class GridMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        g, u = z.view(*z.shape[:-1], self.size, 2).unbind(-1)
        return self.d(self.act(g) * u)


class RowsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x).unflatten(-1, (2, -1))
        return self.d(self.act(z[..., 0, :]) * z[..., 1, :])


class ClampMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x).clamp(max=self.limit)
        u = torch.clamp(self.u(x), -self.limit, self.limit)
        return self.d(self.act(g) * (u + 1))


class ClampAfterMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        act = self.act(self.g(x)).clamp(min=None, max=self.limit)
        return self.d(act * self.u(x) + act)


class ClampFirstMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.u(x).clamp(-self.limit, self.limit) * self.act(self.g(x).clamp(max=self.limit)))


class ClassLimitMLP(ClampFirstMLP):
    limit = 2.0


class UpBetweenMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(torch.sigmoid(g) * self.u(x) * g)


class UpBeforeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        return self.d(self.u(x) * g * torch.sigmoid(self.alpha * g))


class CastMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        g, u = self.g(x).float(), self.u(x).to(torch.float32)
        return self.d((self.act(g) * u).to(dtype))


class BranchMLP(BaseMLP):
    def forward(self, x: Tensor, scale: Any = None, **kwargs: Any) -> Tensor:
        if self.config.tp > 1 or self.bypass is not None:
            return torch.cat([self.d(x[0]), self.u(x)])
        g = self.g(x) if scale is None else self.g(x) * scale
        if not self.sparsity > 0.0:
            g = g * self.multiplier
        return self.d(self.act(g) * self.u(x)) * self.multiplier


class FunctionMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.silu(F.linear(x, self.g.weight, self.g.bias)) * F.linear(x, self.u.weight, self.u.bias))


class OwnLinear(nn.Module):
    def __init__(self, rows: int, columns: int, clips: bool = False) -> None:
        super().__init__()
        self.linear, self.clips = nn.Linear(columns, rows, bias=False), clips

    def forward(self, x: Tensor) -> Tensor:
        if self.clips:
            x = torch.clamp(x, -1, 1)
        return self.linear(x)


class OwnLinearMLP(nn.Module):
    def __init__(self, clips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.w2, self.w3 = OwnLinear(I, H, clips), OwnLinear(H, I), OwnLinear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class NormMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(x))
        return self.d(self.act(self.g(x)) * self.u(x))


class LastDropoutMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(self.d(self.act(self.g(x)) * self.u(x))), self.p, self.training)


class SizesMLP(BaseMLP):
    def forward(self, x: Tensor, index: int | None = None) -> Tensor:
        z = self.gu(x) if index is None else self.gu(x, index)
        batch, length, _ = z.shape
        z = z.view(batch, length, 2, -1)
        return self.d(self.act(z[..., 0, :]) * z[..., 1, :])


class LayerDtypeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        if isinstance(self.d.weight, torch.Tensor) and h.dtype != self.d.weight.dtype:
            h = h.to(self.d.weight.dtype)
        return self.d(h)


class FunctionsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.unflatten(self.gu(x), -1, (2, -1))
        g, u = torch.unbind(z, -2)
        act = torch.mul(torch.sigmoid(g), g)
        return self.d(torch.multiply((torch.clip(u, None, 2.0) + 1), (act)))


class WeightedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.d(self.act(self.g(x)) * self.u(x)) * self.scale)


def down_bias() -> nn.Module:
    block = DownBiasMLP()
    block.d.bias = nn.Parameter(torch.randn(H))
    return block


def branch(**changes: Any) -> nn.Module:
    class Config:
        """Plain values."""

        tp = 1

    settings = {"config": Config(), "bypass": None, "sparsity": 0.0, "multiplier": 1.0}
    return BranchMLP(**{**settings, **changes})


LIMITS = {"gate_max": 2.0, "up_max": 2.0, "up_min": -2.0}
ACCEPTED: list[tuple[nn.Module, Gate]] = [
    (BiasedMLP(bias=True), Gate("gelu_tanh")),
    (BiasedMLP(act=nn.GELU("tanh")), Gate("gelu_tanh")),
    (down_bias(), Gate("gelu")),
    (SwishMLP(alpha=1.5), Gate("swish", 1.5)),
    (SwishMLP(alpha=1), Gate()),
    (UpFirstMLP(fused=True, bias=True), Gate()),
    (SliceMLP(fused=True), Gate()),
    (StripesMLP(fused=True, bias=True), Gate()),
    (GridMLP(fused=True, act=nn.GELU()), Gate("gelu")),
    (RowsMLP(fused=True), Gate()),
    (ClampMLP(limit=2.0, bias=True), Gate(**LIMITS, up_offset=1.0)),
    (ClampMLP(limit=float("inf")), Gate(up_offset=1.0)),
    (ClampFirstMLP(limit=2.0), Gate(**LIMITS)),
    (ClassLimitMLP(), Gate(**LIMITS)),
    (UpBetweenMLP(), Gate()),
    (UpBeforeMLP(alpha=1.702), Gate("swish", 1.702)),
    (ClampAfterMLP(limit=1.5), Gate(act_max=1.5, up_offset=1.0)),
    (CastMLP(), Gate()),
    (branch(), Gate()),
    (FunctionMLP(bias=True), Gate()),
    (OwnLinearMLP(clips=False), Gate()),
    (NormMLP(norm=nn.LayerNorm(H), first=nn.Linear(H, H)), Gate()),
    (LastDropoutMLP(drop=nn.Dropout(0.3), p=0.2, bias=True), Gate()),
    (WeightedMLP(scale=nn.Parameter(torch.ones(1)), drop=nn.Dropout(0.3)), Gate()),
    (SizesMLP(fused=True), Gate()),
    (LayerDtypeMLP(), Gate()),
    (FunctionsMLP(fused=True), Gate(up_max=2.0, up_offset=1.0)),
]


def results(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output from a fixed random state, and all gradients under the names of the stock state dict."""
    x = x.clone().requires_grad_()
    torch.manual_seed(4)
    y = block(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = {"y": y.detach(), "dx": x.grad}
    with torch.no_grad():
        for param in block.parameters():
            param.copy_(param.grad)
    return found | {name: value.clone() for name, value in block.state_dict().items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize(("block", "gate"), ACCEPTED, ids=[f"{type(b).__name__} {g.text}" for b, g in ACCEPTED])
def test_a_source_is_read_as_its_gate_and_computes_the_same(block: nn.Module, gate: Gate, home: str) -> None:
    """fp32 against the class's own forward and autograd: up to rounding, in training mode."""
    model = nn.ModuleDict({"mlp": copy.deepcopy(block)}).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = 2 * torch.randn(1, 5, H, generator=torch.Generator().manual_seed(1))
    patch_model(model, {"precision": "fp32", "weights": home})
    assert model["mlp"].neuron_gate == gate
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected = results(copy.deepcopy(block).train(), x)
    actual = results(model["mlp"], x)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=2e-6 * value.abs().max().item(), msg=name)
    model.load_state_dict(before)
    unpatch_model(model)
    assert type(model["mlp"]) is type(block)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class RawSigmoidMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.g(x) * torch.sigmoid(self.g(x) + 1) * self.u(x))


class ClampBelowMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)).clamp(min=-0.1) * self.u(x))


class OffsetClampMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * (self.u(x) + 1).clamp(max=3.0))


class SameHalfMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[..., : self.size]) * z[..., : self.size])


class WrongStepMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        return self.d(self.act(z[..., ::3]) * z[..., 1::2])


class CastInputMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x.float())) * self.u(x))


class HalfCastMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x).to(torch.bfloat16)) * self.u(x))


class TwiceDroppedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(self.drop(x))) * self.u(self.drop(x)))


class TrainingMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x) * 2 if self.training else self.g(x)
        return self.d(self.act(g) * self.u(x))


class MissingBiasMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(F.linear(x, self.g.weight)) * self.u(x))


class OtherSizesMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x)
        length, batch, _ = z.shape
        z = z.view(batch, length, 2, -1)
        return self.d(self.act(z[..., 0, :]) * z[..., 1, :])


class InputDtypeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.g.weight.dtype:
            x = x.to(self.g.weight.dtype)
        return self.d(self.act(self.g(x)) * self.u(x))


class OtherDtypeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        if h.dtype != torch.float32:
            h = h.to(torch.bfloat16)
        return self.d(h)


class ThirdsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        z = self.gu(x).unflatten(-1, (3, -1))
        return self.d(self.act(z[..., 0, :]) * z[..., 1, :])


class OtherChunkMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gu(x).chunk(2, dim=0)
        return self.d(self.act(g) * u)


class UpTwiceMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        u = self.u(x)
        return self.d(self.act(self.g(x)) * u + u)


class SumMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.mul(self.act(self.g(x)) + self.u(x), 1.0))


class WeightedInsideMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x) * self.scale)


class PropertyLimitMLP(ClampFirstMLP):
    @property
    def limit(self) -> float:
        return 2.0


def with_bias(layer: str, size: int) -> nn.Module:
    block = BiasedMLP(bias=True)
    block.get_submodule(layer).bias = nn.Parameter(torch.randn(size))
    return block


REFUSED = [
    (WeightedInsideMLP(scale=nn.Parameter(torch.ones(1))), r"not one projection of a product of two branches"),
    (WeightedMLP(scale=nn.Parameter(torch.ones(H)), drop=nn.Identity()), r"computes `self\.scale`"),
    (OtherSizesMLP(fused=True), r"computes `z\.view\(batch, length, 2, -1\)`"),
    (InputDtypeMLP(), r"the statement `if x\.dtype != self\.g\.weight\.dtype"),
    (OtherDtypeMLP(), r"the statement `if h\.dtype != torch\.float32"),
    (ThirdsMLP(fused=True), r"computes `self\.gu\(x\)\.unflatten\(-1, \(3, -1\)\)`"),
    (OtherChunkMLP(fused=True), r"unpacks|computes `self\.gu\(x\)\.chunk\(2, dim=0\)`"),
    (UpTwiceMLP(), r"not down\(act\(gate"),
    (SumMLP(), r"computes `self\.act\(self\.g\(x\)\) \+ self\.u\(x\)`"),
    (RawSigmoidMLP(), r"not down\(act\(gate"),
    (ClampBelowMLP(), r"clamps the activation from below, at -0\.1"),
    (OffsetClampMLP(), r"not down\(act\(gate"),
    (SameHalfMLP(fused=True), r"not down\(act\(gate"),
    (WrongStepMLP(fused=True), r"computes `z\[\.\.\., ::3\]`"),
    (CastInputMLP(), r"not down\(act\(gate"),
    (HalfCastMLP(), r"computes `self\.g\(x\)\.to\(torch\.bfloat16\)`"),
    (TwiceDroppedMLP(drop=nn.Sequential(nn.Dropout(0.1))), r"not down\(act\(gate"),
    (TrainingMLP(), r"the statement `self\.g\(x\) \* 2 if self\.training else self\.g\(x\)`"),
    (MissingBiasMLP(bias=True), r"computes `F\.linear\(x, self\.g\.weight\)`"),
    (ClampMLP(limit=float("nan")), r"a limit of its forward is NaN: max=self\.limit"),
    (ClampMLP(limit=-1.0), r"its gate cannot be computed: gate_max must be a number above 0 in float32, got -1\.0\. L"),
    (ClampMLP(limit=0), "gate_max must be a number above 0 in float32, got 0"),
    (ClampMLP(limit=1e39), r"gate_max must be a finite number of float32 or None, got 1e\+39"),
    (ClampMLP(limit=10**400), r"computes `self\.g\(x\)\.clamp\(max=self\.limit\)`"),
    (ClampAfterMLP(limit=1e-46), "act_max must be a number above 0 in float32, got 1e-46"),
    (PropertyLimitMLP(), r"computes `self\.u\(x\)\.clamp\(-self\.limit, self\.limit\)`"),
    (with_bias("u", I + 1), r"u\.bias has shape \(13,\), with its weight it would be \(12,\)"),
    (with_bias("d", 1), r"d\.bias has shape \(1,\), with its weight it would be \(8,\)"),
    (ClampAfterMLP(limit=0.0), "act_max must be a number above 0"),
    (branch(multiplier=1.5), r"\* self\.multiplier`, a factor of 1\.5"),
    (branch(sparsity=0.5, multiplier=2.0), r"a factor of 2\.0"),
    (branch(bypass=nn.Identity()), r"computes `torch\.cat"),
    (OwnLinearMLP(clips=True), r"w1 is a tests\.patching\.test_gate_sources\.OwnLinear, not a plain"),
    (SliceMLP(fused=True, size=5), "splits by size=5, not in halves of 12"),
]


@pytest.mark.parametrize(("block", "reason"), REFUSED, ids=[f"{type(b).__name__} {r[:20]}" for b, r in REFUSED])
def test_near_misses_are_refused_with_line_and_value(block: nn.Module, reason: str) -> None:
    with refused(NothingToPatchError, "model", reason):
        patch_model(nn.ModuleDict({"mlp": block}))


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_what_decided_a_branch_is_compared_at_each_call(home: str) -> None:
    block = branch()
    model = nn.ModuleDict({"mlp": block})
    patch_model(model, {"weights": home})
    x = torch.randn(3, H)
    patched = model["mlp"]
    patched(x, unused=1)
    for scale in ((x, 2.0), (x, x)):
        with refused(UnsupportedModelError, "scale", where="mlp"):
            patched(*scale)
    patched.config.tp = 2
    with refused(UnsupportedModelError, "config.tp", got="2", where="mlp"):
        patched(x)
    patched.config.tp = 1
    patched.multiplier = 1.5
    with refused(UnsupportedModelError, "multiplier", got="1.5", where="mlp"):
        patched(x)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_a_limit_of_the_class_is_compared_at_each_call(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"mlp": ClassLimitMLP()})
    patch_model(model, {"precision": "fp32", "weights": home})
    x = torch.randn(3, H)
    compiled = torch.compile(model["mlp"], backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model["mlp"](x))
    monkeypatch.setattr(ClassLimitMLP, "limit", 3.0)
    with refused(UnsupportedModelError, "limit", got="3.0", where="mlp"):
        model["mlp"](x)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda act: lambda g: act(g) if g.requires_grad else act(g) + 0 * g, False),
        (lambda act: lambda g: torch.where(g < -6, 0.0, act(g)), True),  # seen at large negative gates only
        (lambda act: lambda g: act(g.clamp(max=9.0)), True),
    ],
    ids=["the same", "cut off below", "limited above"],
)
def test_the_probe_reaches_large_values(change: Any, differs: bool) -> None:
    block = ClampMLP(limit=9.5)
    block.act.forward = change(F.silu)
    (candidate,) = discover(nn.ModuleDict({"mlp": block}))
    assert (candidate.reason is not None) is differs
    assert candidate.reason is None or "the gate that its source says (silu, clamped, up + 1)" in candidate.reason

"""Gated MLPs of remote code whose gate is a module or function of its own, or that have statements beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from hf_neuron_moe import patch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.patching.discovery import discover
from tests.patching import test_gate_sources
from tests.patching.test_gate_sources import BaseMLP, H, I
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class GLUActivation(nn.Module):
    """An activation and a limit of its own."""

    def __init__(self, act: nn.Module, limit: float = 2.0) -> None:
        super().__init__()
        self.act, self.limit = act, limit

    def forward(self, gate: Tensor, up: Tensor, dim: int = -1) -> Tensor:
        return self.act(gate) * up.clamp(max=self.limit)


class SigmoidUnit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def swiglu(z: Tensor, dim: int = -1) -> Tensor:
    gate, up = torch.chunk(z, 2, dim)
    return silu(gate) * up


def silu(x: Tensor) -> Tensor:
    """Its own, at a depth of two."""
    return x / (1 + torch.exp(-x))


def gated(gate: Tensor, up: Tensor, *, offset: float = 0.0) -> Tensor:
    gate = F.gelu(gate)
    gate *= up + offset
    return gate


@torch.jit.script
def scripted(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class ScriptedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(scripted(self.g(x), self.u(x)))


class GateModuleMLP(BaseMLP):
    """Nothing in its own text is a product."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.glu(self.gu(x)))


class TwoArgumentsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.glu(self.g(x), up=self.u(x)))


class StarredMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.glu(*self.gu(x).chunk(2, dim=-1)))


class FunctionMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(swiglu(self.gu(x)))


class HeldFunctionMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.function(self.gu(x)))


class OffsetFunctionMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(gated(self.g(x), self.u(x), offset=1.0))


fused_swiglu = None  # of a package that is not installed


class FusedIfInstalledMLP(BaseMLP):
    """What decides is which function the instance holds."""

    def forward(self, x: Tensor) -> Any:
        y = self.gu(x)
        if self.activation == F.sigmoid:
            y = F.glu(y, dim=-1)
        elif fused_swiglu is not None and self.activation is F.silu:
            y = fused_swiglu(y)
        else:
            size = y.shape[-1]
            y, gate = y.split(size // 2, dim=-1)
            activation = self.activation
            y = y * activation(gate)
        y = self.norm(self.d(y))
        return y if not self.returns_input else (y, x)


class MethodsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        g, u = self._project(self._rows(x, shape[-1]))
        return self.d(self._gate(g, u)).view(shape)

    def _project(self, x: Tensor) -> Any:
        return self.gu(x).chunk(2, -1)

    @staticmethod
    def _rows(x: Tensor, size: int) -> Tensor:
        return x.view(-1, size)

    def _gate(self, g: Tensor, u: Tensor) -> Tensor:
        if self.size > 0:
            return self.act(g) * u
        return g


class SwishModuleMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.own(self.g(x)) * self.u(x))


class InlineMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(nn.GELU(approximate="tanh")(self.g(x)) * self.u(x))


class GetattrMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(nn.SiLU()(getattr(self, "g")(x)) * getattr(self, "u")(x))  # noqa: B009


class StatementsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 3 and x.size(-1) == self.g.weight.shape[1], f"not {x.shape}"
        if x.numel() == 0 or not isinstance(x, Tensor):
            raise ValueError("no rows")
        with record_function(f"mlp.{self.size}"), nullcontext():
            g, u = self.g(x), self.u(x)
            h = self.act(g) * u
        del g, u
        return self.d(h)


class ReturningContextMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.profiler.record_function("mlp"):
            return self.d(self.act(self.g(x)) * self.u(x))


class TrainingDropoutMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        if self.training:
            h = self.drop(h)
        y = self.d(h)
        if self.training and self.p > 0:
            y = F.dropout(y, p=self.p)
        return y


class HiddenByClassMLP(BaseMLP):
    """Python finds the value of the class before the child of the same name."""

    norm = None

    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        if self.norm is None:
            g = g.clamp(max=2.0)
        return self.d(self.act(g) * self.u(x))


class ListMLP(BaseMLP):
    """An empty list is false."""

    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        if self.more is not None and not self.more:
            g = g.clamp(max=2.0)
        return self.d(self.act(g) * self.u(x))


class ClassDropoutMLP(BaseMLP):
    p = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.d(self.act(self.g(x)) * self.u(x)), self.p, self.training)


class Settings:
    """Plain values."""

    p = 0.5


class PathDropoutMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.d(self.act(self.g(x)) * self.u(x)), self.settings.p, self.training)


ACCEPTED = [
    (GateModuleMLP(fused=True, bias=True, glu=SwiGLU()), Gate()),
    (TwoArgumentsMLP(glu=GLUActivation(nn.GELU(), 3.0)), Gate("gelu", up_max=3.0)),
    (StarredMLP(fused=True, glu=GLUActivation(nn.SiLU())), Gate(up_max=2.0)),
    (TwoArgumentsMLP(glu=GLUActivation(SigmoidUnit())), Gate(up_max=2.0)),
    (FunctionMLP(fused=True), Gate()),
    (HeldFunctionMLP(fused=True, function=swiglu), Gate()),
    (OffsetFunctionMLP(), Gate("gelu", up_offset=1.0)),
    (ScriptedMLP(), Gate()),
    (FusedIfInstalledMLP(fused=True, activation=F.silu, norm=nn.Identity(), returns_input=False), Gate()),
    (FusedIfInstalledMLP(fused=True, activation=F.gelu, norm=nn.Identity(), returns_input=False), Gate("gelu")),
    (MethodsMLP(fused=True), Gate()),
    (SwishModuleMLP(own=SigmoidUnit()), Gate()),
    (InlineMLP(), Gate("gelu_tanh")),
    (GetattrMLP(), Gate()),
    (StatementsMLP(), Gate()),
    (ReturningContextMLP(), Gate()),
    (TrainingDropoutMLP(drop=nn.Dropout(0.0), p=0.2, bias=True), Gate()),
    (ListMLP(more=nn.ModuleList()), Gate(gate_max=2.0)),
    (ListMLP(more=nn.ModuleList([nn.Identity()])), Gate()),
    (HiddenByClassMLP(norm=nn.Identity()), Gate(gate_max=2.0)),
    (TwoArgumentsMLP(glu=GLUActivation(ACT2FN["relu2"])), Gate("squared_relu", up_max=2.0)),
]


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize(("block", "gate"), ACCEPTED, ids=[f"{type(b).__name__} {g.text}" for b, g in ACCEPTED])
def test_what_a_forward_calls_is_read_with_it(block: nn.Module, gate: Gate, home: str) -> None:
    test_gate_sources.test_a_source_is_read_as_its_gate_and_computes_the_same(block, gate, home)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
@pytest.mark.parametrize(
    "block", [ClassDropoutMLP(), PathDropoutMLP(settings=Settings())], ids=lambda b: type(b).__name__
)
def test_a_dropout_by_an_attribute_of_the_class_or_of_an_object(block: nn.Module, home: str) -> None:
    stock, model = copy.deepcopy(block), nn.ModuleDict({"mlp": copy.deepcopy(block)})
    patch_model(model, {"precision": "fp32", "weights": home})
    x = torch.randn(2, 3, H)
    for training in (True, False):
        results = []
        for each in (stock, model["mlp"]):
            torch.manual_seed(1)
            results.append(each.train(training)(x))
        assert bool((results[0] == 0).any()) is training
        torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:mlp. d is a linear layer with hooks")
def test_a_gate_of_a_module_by_layers() -> None:
    stock = TwoArgumentsMLP(glu=GLUActivation(ACT2FN["relu2"]))
    model, x = nn.ModuleDict({"mlp": copy.deepcopy(stock)}), torch.randn(2, 3, H)
    patch_model(model, {"precision": "fp32"})
    model["mlp"].d.register_forward_hook(lambda *_: None)
    assert torch.equal(model["mlp"](x), stock(x))


class TanhGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.tanh(a) * b


class LearnedGLU(SwiGLU):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1))


class CallGLU(SwiGLU):
    def __call__(self, *tensors: Tensor) -> Any:
        return 2 * super().__call__(*tensors)


class TrainingGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return F.silu(a) * (b if self.training else 2 * b)


class HiddenModuleMLP(BaseMLP):
    """Python finds the method of the class before the child of the same name."""

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x))

    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def hidden_module() -> nn.Module:
    block = HiddenModuleMLP(act=None)
    block._modules["act"] = nn.SiLU()
    return block


class NumbersMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        one, two = 1, 2
        return self.d(self.act(self.g(x)) * (self.u(x) * one)) * two


class SameHalfGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, _ = x.chunk(2, dim=-1)
        return F.silu(a) * a


def overridden() -> nn.Module:
    glu = SwiGLU()
    glu.forward = lambda x: x[..., :I]
    return glu


def hooked(glu: nn.Module, inner: nn.Module) -> nn.Module:
    inner.register_forward_hook(lambda module, args, result: 2 * result)
    return glu


def deep(x: Tensor) -> Tensor:
    return deep(x)


def changing(z: Tensor) -> Tensor:
    """Its caller sees the change."""
    gate, up = z.chunk(2, dim=-1)
    gate *= torch.sigmoid(gate)
    return gate * up


def many(*tensors: Tensor) -> Tensor:
    return tensors[0]


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors: 2 * function(*tensors)


@decorate
def doubled(z: Tensor) -> Tensor:
    return swiglu(z)


def closed_over(F: Any) -> Callable[..., Any]:
    def inner(z: Tensor) -> Tensor:
        gate, up = z.chunk(2, dim=-1)
        return F.silu(gate) * up

    return inner


def changing_rows(z: Tensor) -> Tensor:
    """The same by a view."""
    rows = z.flatten(0, -2)
    rows.clamp_(max=1e3)
    return z


class ChangingRowsMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        _ = changing_rows(g)
        return self.d(self.act(g) * self.u(x))


class ContextNameMLP(BaseMLP):
    """The context's name gets another value."""

    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        limited = g.clamp(max=1e3)
        with nullcontext(limited) as g:
            return self.d(self.act(g) * self.u(x))


class OtherSelfMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        self = self.inner
        return self.d(self.act(self.g(x)) * self.u(x))


class BoundMethodMLP(BaseMLP):
    """The variable is a method, which has its first argument already."""

    def forward(self, x: Tensor) -> Tensor:
        act = self._act
        return self.d(act(self.g(x)) * self.u(x))

    def _act(self, x: Any = None) -> Any:
        return F.silu(self) if x is None else F.silu(x.clamp(max=1e3))  # type: ignore[arg-type]


class Changing:
    """An attribute that the class and its instances have different values of."""

    def __get__(self, instance: object, owner: object) -> float:
        return 1e9 if instance is None else 1e3


class DescriptorMLP(BaseMLP):
    limit = Changing()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x).clamp(max=self.limit)) * self.u(x))


class GetattrMethodMLP(BaseMLP):
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found if name != "g" else lambda x: found(x).clamp(max=1e3)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.act(self.g(x)) * self.u(x))


class LookedUpGLU(SwiGLU):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def isfinite(x: Tensor) -> Tensor:
    return x.clamp_(max=1e3)


class SameObjectMLP(BaseMLP):
    """Which objects are the same is not read."""

    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        if self.one is not self.other:
            g = g.clamp(max=1e3)
        return self.d(self.act(g) * self.u(x))


class NamesakeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        assert isfinite(g) is not None
        return self.d(self.act(g) * self.u(x))


class NamesakeMethodMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        assert self.dim(g)
        return self.d(self.act(g) * self.u(x))

    def dim(self, x: Tensor) -> int:
        return x.clamp_(max=1e3).dim()


class ClassMethodMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(self._gate(self.gu(x)))

    @classmethod
    def _gate(cls, z: Tensor) -> Tensor:
        return swiglu(z)


class WrongDropoutMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.g(x)) * self.u(x)
        if self.training:
            h = self.drop(self.u(x))
        return self.d(h)


class LaterDropoutMLP(BaseMLP):
    """Outside of the branch it drops in evaluation mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.d(self.act(self.g(x)) * self.u(x))
        if self.training:
            y = F.dropout(y, self.p)
        return F.dropout(y, self.p)


class AutocastMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.d(self.act(self.g(x)) * self.u(x))


class NoGradMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.d(self.act(self.g(x)) * self.u(x))


class AssertingMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g = self.g(x)
        assert g.clamp_(max=2.0) is not None
        return self.d(self.act(g) * self.u(x))


class FailingMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return self.d(self.act(self.g(x)) * self.u(x))


class DeletedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        g, u = self.g(x), self.u(x)
        h = self.act(g) * u
        del u
        return self.d(h * u)  # noqa: F821


class OfTypeMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(type(self).gate(self.g(x), self.u(x)))

    @staticmethod
    def gate(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class OfSuperMLP(OfTypeMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(super().gate(self.g(x), self.u(x)))


class OfTableMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(GATES["gated"](self.g(x), self.u(x)))


class OfNameMLP(OfTypeMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(getattr(self, self.name)(self.g(x), self.u(x)))


class CheckpointedMLP(OfTypeMLP):
    def forward(self, x: Tensor) -> Any:
        return self.d(checkpoint(self.gate, self.g(x), self.u(x)))


class GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class AppliedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Any:
        return self.d(GateFunction.apply(self.g(x), self.u(x)))


class NestedMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        def inner(gate: Tensor, up: Tensor) -> Tensor:
            return F.silu(gate) * up

        return self.d(inner(self.g(x), self.u(x)))


class LoopMLP(BaseMLP):
    """Only shapes tell that there may be a gate between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for name in ("gu", "glu", "d"):
            x = self._modules[name](x)
        return x


GATES = {"gated": gated}


class OtherInlineMLP(BaseMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(nn.Mish()(self.g(x)) * self.u(x))


REFUSED = [
    (GateModuleMLP(fused=True, glu=TanhGLU()), r"; not read: its glu \(TanhGLU\) computes `torch\.tanh\(a\)`"),
    (GateModuleMLP(fused=True, glu=LearnedGLU()), r"its glu \(LearnedGLU\) has weights of its own"),
    (GateModuleMLP(fused=True, glu=CallGLU()), "its glu is a CallGLU with hooks or methods of its own"),
    (GateModuleMLP(fused=True, glu=TrainingGLU()), r"its glu \(TrainingGLU\) has the statement `b if self\.training"),
    (hidden_module(), r"its act\(\) computes `torch\.tanh\(x\)`"),
    (NumbersMLP(), r"a factor of 2"),
    (GateModuleMLP(fused=True, glu=SameHalfGLU()), r"not down\(act\(gate"),
    (GateModuleMLP(fused=True, glu=overridden()), "its glu is a SwiGLU with hooks or methods of its own"),
    (GateModuleMLP(fused=True, glu=hooked(glu := SwiGLU(), glu)), "its glu is a SwiGLU with hooks"),
    (TwoArgumentsMLP(glu=hooked(GLUActivation(act := nn.SiLU()), act)), "its glu.act is a SiLU with hooks"),
    (TwoArgumentsMLP(glu=GLUActivation(nn.Mish())), r"its glu \(GLUActivation\) computes `self\.act\(gate\)`"),
    (TwoArgumentsMLP(glu=SwiGLU()), r"its glu \(SwiGLU\) takes \(self, x: 'Tensor'\) -> 'Tensor': got an unex"),
    (HeldFunctionMLP(fused=True, function=deep), "deeper than 3 calls are followed"),
    (HeldFunctionMLP(fused=True, function=changing), r"its function\(\) may change its input in place: `gate"),
    (HeldFunctionMLP(fused=True, function=many), r"its function\(\) takes \(\*tensors"),
    (HeldFunctionMLP(fused=True, function=doubled), r"its function\(\) is not a plain function"),
    (HeldFunctionMLP(fused=True, function=closed_over(F)), r"its function\(\) computes `F\.silu\(gate\)`"),
    (FusedIfInstalledMLP(fused=True, activation=F.sigmoid), r"computes `F\.glu"),
    (
        FusedIfInstalledMLP(fused=True, activation=F.silu, norm=nn.LayerNorm(H), returns_input=False),
        "not one projection",
    ),
    (
        FusedIfInstalledMLP(fused=True, activation=F.silu, norm=nn.Identity(), returns_input=True),
        r"computes `\(y, x\)`",
    ),
    (ClassMethodMLP(fused=True), r"its forward computes `self\._gate\(self\.gu\(x\)\)`"),
    (SwishModuleMLP(own=TanhGLU()), r"its activation is TanhGLU"),
    (WrongDropoutMLP(drop=nn.Dropout(0.0)), r"has the statement `if self\.training"),
    (LaterDropoutMLP(p=0.0), r"computes `F\.dropout\(y, self\.p\)`"),
    (TrainingDropoutMLP(drop=nn.Dropout(0.1), p=0.0), r"it has dropout, .*: drop with p=0\.1"),
    (AutocastMLP(), r"has the statement `with torch\.autocast"),
    (NoGradMLP(), r"has the statement `with torch\.no_grad\(\)"),
    (ChangingRowsMLP(), r"changing_rows\(\) may change its input in place: `rows\.clamp_\(max=1000\.0\)`"),
    (ContextNameMLP(), r"has the statement `with nullcontext\(limited\) as g"),
    (OtherSelfMLP(inner=nn.Identity()), r"reads attributes of another object in `return self\.d"),
    (BoundMethodMLP(), r"its forward computes `self\._act`"),
    (DescriptorMLP(), r"its forward computes `self\.g\(x\)\.clamp\(max=self\.limit\)`"),
    (GetattrMethodMLP(), "its class GetattrMethodMLP overrides __getattr__"),
    (GateModuleMLP(fused=True, glu=LookedUpGLU()), "its glu is a LookedUpGLU with hooks or methods of its own"),
    (SameObjectMLP(one=nn.SiLU(), other=nn.SiLU()), "has the statement `if self.one is not self.other"),
    (SameObjectMLP(one=1e3, other=float("1e3")), "has the statement `if self.one is not self.other"),
    (NamesakeMLP(), r"has the statement `assert isfinite\(g\)"),
    (NamesakeMethodMLP(), r"has the statement `assert self\.dim\(g\)`"),
    (AssertingMLP(), r"has the statement `assert g\.clamp_"),
    (FailingMLP(), "does not run on a small example: AssertionError"),
    (DeletedMLP(), "computes `u`"),
    (OfTypeMLP(), r"its forward computes `type\(self\)\.gate\(self\.g\(x\), self\.u\(x\)\)`"),
    (OfSuperMLP(), r"its forward computes `super\(\)\.gate\("),
    (OfTableMLP(), r"its forward computes `GATES\['gated'\]\("),
    (OfNameMLP(name="gate"), r"its forward computes `getattr\(self, self\.name\)\("),
    (CheckpointedMLP(), r"its forward computes `checkpoint\(self\.gate, "),
    (AppliedMLP(), r"its forward computes `GateFunction\.apply\("),
    (NestedMLP(), r"its forward has the statement `def inner\("),
    (LoopMLP(fused=True, glu=SwiGLU()), r"its forward has the statement `for name in \('gu', 'glu', 'd'\)"),
    (OtherInlineMLP(), r"computes `nn\.Mish\(\)\(self\.g\(x\)\)`"),
]


@pytest.mark.parametrize(("block", "reason"), REFUSED, ids=[f"{type(b).__name__} {r[:20]}" for b, r in REFUSED])
def test_what_was_not_read_is_named(block: nn.Module, reason: str) -> None:
    (candidate,) = discover(nn.ModuleDict({"mlp": block}))
    assert candidate.gated
    with refused(NothingToPatchError, "model", reason):
        patch_model(nn.ModuleDict({"mlp": block}))


class RouterMLP(nn.Module):
    """Three layers, with an activation between them that was not read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(H, I), nn.Linear(I, I), nn.Linear(I, H)
        self.act = TanhGLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))


def test_an_activation_that_was_not_read_makes_no_gate_of_layers_in_a_row() -> None:
    (candidate,) = discover(nn.ModuleDict({"mlp": RouterMLP()}))
    assert not candidate.gated


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_a_gate_that_is_replaced_or_hooked_later_is_an_error(home: str) -> None:
    blocks = {"module": GateModuleMLP(fused=True, glu=SwiGLU()), "inner": StarredMLP(fused=True)}
    blocks["inner"].glu = GLUActivation(nn.SiLU())
    blocks["function"] = HeldFunctionMLP(fused=True, function=swiglu)
    choices = {"activation": F.silu, "norm": nn.Identity(), "returns_input": False}
    blocks["choice"] = FusedIfInstalledMLP(fused=True, **choices)
    model = nn.ModuleDict(blocks)
    patch_model(model, {"weights": home})
    x = torch.randn(1, 3, H)
    for block in model.values():
        torch.compiler.reset()
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), block(x))
    torch.compiler.reset()
    model["module"].glu = TanhGLU()
    hooked(model["inner"], model["inner"].glu.act)
    model["function"].function = silu
    model["choice"].activation = F.gelu
    for name, path in (
        ("module", "glu()"),
        ("inner", "glu.act()"),
        ("function", "function()"),
        ("choice", "activation"),
    ):
        with refused(UnsupportedModelError, path, where=name):
            model[name](x)
    model["inner"].glu.act = nn.GELU()
    with refused(UnsupportedModelError, "glu.act()", got="Gate(act='gelu'", where="inner"):
        model["inner"](x)
    model["inner"].glu.act = nn.SiLU()
    model["inner"](x)
    model["inner"].glu.limit = 1.0
    with refused(UnsupportedModelError, "glu.limit", got="1.0", where="inner"):
        model["inner"](x)

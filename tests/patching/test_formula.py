"""Reading what a dense MLP computes from its source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedMLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.patching.formula import dense_roles
from hf_neuron_moe.patching.source_values import NotSwiGLU


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        (LlamaMLP, DenseRoles(("gate_proj", "up_proj"), "down_proj", "act_fn")),
        (Phi3MLP, DenseRoles(("gate_up_proj",), "down_proj", "activation_fn")),
        (Lfm2MLP, DenseRoles(("w1", "w3"), "w2", None)),
        (GraniteMoeSharedMLP, DenseRoles(("input_linear",), "output_linear", "activation")),
    ],
)
def test_roles_of_real_families(kind: type[nn.Module], roles: DenseRoles) -> None:
    assert dense_roles(kind.forward) == roles


class Forms:
    """Forwards that are SwiGLU, and what they must read as."""

    def annotated(self, x: torch.Tensor) -> torch.Tensor:
        """With a docstring and an annotation."""
        hidden: torch.Tensor = self.act(self.g(x)) * self.u(x)
        return self.d(hidden)

    def function_chunk(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.chunk(self.gu(x), 2, -1)
        return self.d(up * F.silu(gate))

    def keyword_chunk(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gu(x).chunk(chunks=2, dim=-1)
        return self.d(nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("forward", "roles"),
    [
        (Forms.annotated, DenseRoles(("g", "u"), "d", "act")),
        (Forms.function_chunk, DenseRoles(("gu",), "d", None)),
        (Forms.keyword_chunk, DenseRoles(("gu",), "d", None)),
    ],
)
def test_equivalent_forms_are_read(forward: Any, roles: DenseRoles) -> None:
    assert dense_roles(forward) == roles


def silu(x: torch.Tensor) -> torch.Tensor:
    """A function of the right name that computes something else."""
    return x


def decorated(function: Any) -> Any:
    """Mark only."""
    return function


class Others:
    """Forwards that are not, each by one detail."""

    def multiplied(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.act(self.g(x)) * self.u(x)) * self.scale

    def same_twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.act(self.g(x)) * self.g(x))

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.act(self.g(x)))

    def both_activated(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.act(self.g(x)) * self.act(self.u(x)))

    def halves_of_two(self, x: torch.Tensor) -> torch.Tensor:
        gate, _ = self.gu(x).chunk(2, dim=-1)
        _, up = self.other(x).chunk(2, dim=-1)
        return self.d(self.act(gate) * up)

    def other_dimension(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gu(x).chunk(2, dim=0)
        return self.d(self.act(gate) * up)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.d(self.act(self.g(x)) * self.u(x))

    def branching(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x * 2
        return self.d(self.act(self.g(x)) * self.u(x))

    def false_friend(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(silu(self.g(x)) * self.u(x))

    def two_inputs(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.d(self.act(self.g(x)) * self.u(y))

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.d(self.act(self.g(x)) * self.u(x))

    def extra_argument(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.act(self.g(x), 2) * self.u(x))

    @decorated
    def with_decorator(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.act(self.g(x)) * self.u(x))


@pytest.mark.parametrize("name", [name for name in vars(Others) if not name.startswith("__")])
def test_every_other_form_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(NotSwiGLU, match="its forward"):
        dense_roles(vars(Others)[name])


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("falcon_h1", "FalconH1MLP"),
        ("step3p7", "Step3p7MLP"),
        ("deepseek_v4", "DeepseekV4MLP"),
        ("gemma3n", "Gemma3nTextMLP"),
    ],
)
def test_without_an_instance_no_attribute_has_a_value(family: str, kind: str) -> None:
    module = pytest.importorskip(
        f"transformers.models.{family}.modeling_{family}", reason=f"this transformers has no {family}"
    )
    with pytest.raises(NotSwiGLU):
        dense_roles(getattr(module, kind).forward)

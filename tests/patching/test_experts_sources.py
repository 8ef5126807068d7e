"""Gates of experts in forms that say less than they do: refused, or an error when they change after patching."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.modules.experts_calls import digest_of, known_call
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_config, tiny_model

Gating = Callable[[Any, Tensor], Tensor]


def eager(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(hidden)
    for expert, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
        token, place = torch.where(ids == expert)
        y = F.linear(module._apply_gate(F.linear(hidden[token], gate_up)), down)
        out = out.index_add(0, token, y * weights[token, place, None])
    return out


def experts(gate: Gating, *, concatenated: bool = True, **attributes: Any) -> nn.Module:
    @use_experts_implementation(is_concatenated=concatenated)
    class OwnExperts(MixtralExperts):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return eager(self, hidden_states, top_k_index, top_k_weights)

        _apply_gate = gate

    torch.manual_seed(0)
    module = OwnExperts(tiny_config("mixtral"))
    for param in module.parameters():
        nn.init.normal_(param)
    for name, value in attributes.items():
        setattr(module, name, value)
    return nn.ModuleDict({"experts": module})


class GLU(nn.Module):
    """A gate of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act(gate) * up


class CalledGLU(GLU):
    """One whose call is not its forward."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.clamp(max=60)) * up


class AddingGLU(GLU):
    """One that changes its argument."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        gate += 1e-5
        return gate * up


def plain(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate) * up


@functools.wraps(plain)
def wrapped(self: Any, z: Tensor) -> Tensor:
    return plain(self, z).clamp(-3000, 3000)


def enclosed(F: Any) -> Gating:
    def gate(self: Any, z: Tensor) -> Tensor:
        gate, up = z.chunk(2, dim=-1)
        return F.silu(gate) * up

    return gate


def by_child(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.glu(gate, up)


def child_of_an_activation(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    act = self.act_fn(gate)
    return self.glu(act, up) + 0.0 * act


def changed_in_a_tuple(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    act = self.act_fn(gate)
    both = (act, up)
    act += 1e-5
    return both[0] * up


def dropout_by_name(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.dropout(input=self.act_fn(gate), p=0.0) * up


def chunk_by_name(self: Any, z: Tensor) -> Tensor:
    gate, up = torch.chunk(input=z, chunks=2, dim=-1)
    return self.act_fn(gate) * up


def dropped(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.drop(self.act_fn(gate)) * up


def limited(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.limit)) * up


def by_flag(self: Any, z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1) if self.is_concatenated else (z[..., ::2], z[..., 1::2])
    return self.act_fn(gate) * up


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "wrapped": (experts(wrapped), "plain wraps another function"),
    "closure": (experts(enclosed(F)), "has variables of an outer function: F"),
    "own call": (experts(by_child, glu=CalledGLU()), "its glu has parameters, hooks or a forward of its own"),
    "argument changed": (experts(child_of_an_activation, glu=AddingGLU()), r"the statement `gate \+= 1e-05`"),
    "tuple changed": (experts(changed_in_a_tuple), "its gate computes `both"),
    "dropout by name": (experts(dropout_by_name), r"its gate computes `F\.dropout\(input="),
    "chunk by name": (experts(chunk_by_name), r"its gate computes `torch\.chunk\(input="),
}


def test_a_parameter_of_a_wrong_shape_or_none_is_named() -> None:
    model = tiny_model("gpt_oss")
    found = model.model.layers[0].mlp.experts
    found.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 5))
    sizes = tuple(found.down_proj.shape)
    wide = (sizes[0], 2 * sizes[1])
    reason = f"its gate_up_proj_bias has shape (4, 5), with its down_proj {sizes} it would be {wide}"
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        patch_model(model)
    found.gate_up_proj_bias = None
    with pytest.raises(UnsupportedModelError, match="it has no gate_up_proj_bias; its gate takes gate_up_proj,"):
        patch_model(model)


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_source_does_not_say_is_refused(case: str) -> None:
    module, reason = REFUSED[case]
    with pytest.raises(NothingToPatchError, match=reason):
        patch_model(copy.deepcopy(module), {"precision": "fp32"})


CHANGED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object], str]] = {
    "hook": (
        lambda: experts(dropped, drop=nn.Dropout(0.0)),
        lambda block: block.drop.register_forward_hook(lambda module, given, result: 2 * result),
        "drop",
    ),
    "forward": (
        lambda: experts(dropped, drop=nn.Identity()),
        lambda block: setattr(block.drop, "forward", lambda x: 2 * x),
        "drop",
    ),
    "hook on a gate": (
        lambda: experts(by_child, glu=GLU()),
        lambda block: block.glu.register_forward_hook(lambda module, given, result: 2 * result),
        "glu",
    ),
    "activation of a gate": (
        lambda: experts(by_child, glu=GLU()),
        lambda block: setattr(block.glu, "act", nn.Tanh()),
        "glu.act",
    ),
    "function of an activation": (
        lambda: experts(plain, act_fn=ACT2FN["gelu"]),
        lambda block: setattr(block.act_fn, "act", torch.tanh),
        "act_fn",
    ),
    "option of an activation": (
        lambda: experts(plain, act_fn=nn.GELU()),
        lambda block: setattr(block.act_fn, "approximate", "tanh"),
        "act_fn",
    ),
    "limit as a tensor": (
        lambda: experts(limited, limit=3.0),
        lambda block: setattr(block, "limit", torch.tensor([3.0, 3.0])),
        "limit",
    ),
    "gate of the instance": (
        lambda: experts(plain),
        lambda block: setattr(block, "_apply_gate", lambda z: z[..., :48]),
        "_apply_gate",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_changes_after_patching_is_an_error(case: str) -> None:
    make, change, what = CHANGED[case]
    model = make()
    patch_model(model, {"precision": "fp32"})
    arguments = torch.randn(5, 32), torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 2)
    model["experts"](*arguments)
    change(model["experts"])
    with refused(UnsupportedModelError, what, where="experts"):
        model["experts"](*arguments)


def test_the_activation_of_a_child_is_looked_at_in_each_call() -> None:
    """DBRX has it in a child."""
    model = tiny_model("dbrx")
    patch_model(model, {"precision": "fp32"}, include=["*"], strict=False)
    ids = torch.arange(6).unsqueeze(0)
    model(input_ids=ids)
    model.transformer.blocks[0].ffn.experts.mlp.activation_fn = nn.Tanh()
    with pytest.raises(UnsupportedModelError, match=r"mlp\.activation_fn must be SiLU"):
        model(input_ids=ids)


@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_a_gate_that_reads_the_flags_of_its_class(home: str) -> None:
    """In kernel layout a block has flags of its own."""
    model = experts(by_flag, concatenated=False)
    arguments = torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    expected = eager(model["experts"], *arguments)
    patch_model(model, {"precision": "fp32", "weights": home})
    torch.testing.assert_close(model["experts"](*arguments), expected, rtol=1e-5, atol=1e-4)


def test_a_forward_with_another_one_around_it_is_not_known() -> None:
    inner = Llama4TextExperts.forward

    class Around(Llama4TextExperts):
        @functools.wraps(inner)
        def forward(self, hidden_states: Tensor) -> Tensor:
            return inner(self, hidden_states).clamp(-5000, 5000)

    assert known_call(Around(tiny_config("llama4"))) is None


def test_functions_with_defaults_or_scopes_of_their_own_have_no_digest() -> None:
    def with_default(self: Any, x: Tensor, k: int = 1) -> Tensor:
        return x * k

    def with_lambda(self: Any, x: Tensor) -> Tensor:
        f = lambda b: b  # noqa: E731
        return f(x)

    def with_list(self: Any, x: list[Tensor]) -> Tensor:
        y = [each for each in x]  # noqa: C416
        return y[0]

    assert [digest_of((each,)) for each in (with_default, with_lambda, with_list)] == [""] * 3
    assert digest_of((plain,)) != ""

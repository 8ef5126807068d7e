"""Every form of experts against the module's own eager forward: result, all gradients, both layouts, unpatching.

Legend: T tokens, K experts per token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DiffusionGemmaTextConfig,
    GptOssConfig,
    HYV4Config,
    JetMoeConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    NemotronHConfig,
    OpenAIPrivacyFilterConfig,
)
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaTextExperts
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Experts
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingSharedExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoA, JetMoeMoE
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from hf_neuron_moe import patch_model, unpatch_model
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import NothingToPatchError, UnsupportedModelError
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.experts_calls import by_expert, identity, known_call
from hf_neuron_moe.modules.experts_form import read_experts
from hf_neuron_moe.modules.gate_expression import UnknownForm
from hf_neuron_moe.modules.gate_match import match_gate
from tests.modules.test_equals_stock import assert_close
from tests.refusals import refused
from tests.tiny_models import assert_same_snapshot, snapshot

T, K, E, H, I = 11, 2, 4, 16, 24  # noqa: E741
_LOCAL = {"num_local_experts": E, "hidden_size": H, "moe_intermediate_size": I}
_ROUTED = {"n_routed_experts": E, "hidden_size": H, "moe_intermediate_size": I}
_FUSED = {"num_local_experts": E, "hidden_size": H, "intermediate_size": I}
_CLAMPED = Gate(gate_max=1.0, up_max=1.0, up_min=-1.0)
_OFFSET = _CLAMPED._replace(act="swish", alpha=1.702, up_offset=1.0)


def _diffusion_gemma() -> nn.Module:
    config = DiffusionGemmaTextConfig(hidden_size=H, num_experts=E, top_k_experts=K, moe_intermediate_size=I)
    return DiffusionGemmaTextExperts(_eager(config))


def _eager(config: Any) -> Any:
    config._experts_implementation = "eager"
    return config


def _limited(module: nn.Module) -> nn.Module:
    module.limit = 1.0  # no option of the configuration in transformers 5.17
    return module


def _newer(family: str, name: str, **sizes: Any) -> nn.Module:
    """Experts of a family that transformers 5.17 does not have."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}", reason=f"there is no {family}")
    config = getattr(module, f"{name}TextConfig", None) or getattr(module, f"{name}Config")
    return getattr(module, f"{name}Experts")(_eager(config(**sizes)))


_MINIMAX = {**_FUSED, "swiglu_limit": 1.0, "swiglu_alpha": 1.702}
ROUTED: dict[str, tuple[Callable[[], nn.Module], Gate]] = {
    "gpt_oss": (lambda: _limited(GptOssExperts(_eager(GptOssConfig(**_FUSED)))), _OFFSET),
    "openai_privacy_filter": (
        lambda: _limited(OpenAIPrivacyFilterExperts(_eager(OpenAIPrivacyFilterConfig(**_FUSED)))),
        _OFFSET,
    ),
    "glm5_next": (lambda: Glm5NextTextExperts(_eager(Glm5NextTextConfig(**_LOCAL, swiglu_limit=1.0))), _CLAMPED),
    "hy_v4": (lambda: HYV4Experts(_eager(HYV4Config(**_LOCAL, swiglu_limit=1.0))), _CLAMPED),
    "minimax_m3_vl": (lambda: MiniMaxM3VLExperts(_eager(MiniMaxM3VLTextConfig(**_MINIMAX))), _OFFSET),
    "nemotron_h": (
        lambda: NemotronHExperts(_eager(NemotronHConfig(**_ROUTED, moe_latent_size=None))),
        Gate("squared_relu", gated=False),
    ),
    "inkling2": (
        lambda: _newer("inkling2", "Inkling2", **_ROUTED, mlp_gate_softcap=1.0, mlp_up_softcap=2.0),
        Gate(gate_softcap=1.0, up_softcap=2.0),
    ),
    "muse_spark": (
        lambda: _newer("muse_spark", "MuseSpark", **_LOCAL, moe_hidden_size=H, num_attention_heads=2),
        Gate(),
    ),
    "beam": (lambda: _newer("beam", "Beam", num_experts=E, hidden_size=H, moe_intermediate_size=I), Gate()),
    "diffusion_gemma": (_diffusion_gemma, Gate("gelu_tanh")),
    "step3p7": (
        lambda: Step3p7Experts(Step3p7TextConfig(**_LOCAL), swiglu_limit=0.75),
        Gate(act_max=0.75, up_max=0.75, up_min=-0.75),
    ),
    "step3p7 without limit": (lambda: Step3p7Experts(Step3p7TextConfig(**_LOCAL)), Gate()),
    "longcat_flash": (
        lambda: LongcatFlashExperts(
            LongcatFlashConfig(hidden_size=H, expert_ffn_hidden_size=I, n_routed_experts=E, zero_expert_num=2)
        ),
        Gate(),
    ),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """A box around a module whose drawn parameters reach the limits."""
    torch.manual_seed(3)
    module = make()
    for param in module.parameters():
        nn.init.normal_(param, std=0.4)
    return nn.ModuleDict({"mlp": module})


def routing(experts: int) -> tuple[Tensor, Tensor]:
    """Ids and weights ``[T, K]`` that do not sum to 1; one expert gets no token."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(experts - 1, generator=generator)[:K] for _ in range(T)])
    return ids, torch.rand(T, K, generator=generator)


def results(box: nn.Module, x: Tensor, *further: Tensor) -> dict[str, Tensor]:
    """Result and all gradients; those of parameters by their stock names and in stock layout."""
    leaves = {"x": x.clone().requires_grad_()}
    leaves |= {f"argument {n}": t.clone().requires_grad_(t.is_floating_point()) for n, t in enumerate(further)}
    box.zero_grad()
    y = box["mlp"](*leaves.values())
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    found = {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    with torch.no_grad():
        saved = [param.detach().clone() for param in box.parameters()]
        for param in box.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        found |= {name: value.clone() for name, value in box.state_dict().items()}
        for param, value in zip(box.parameters(), saved, strict=True):
            param.copy_(value)
    return found


def assert_same_results(box: nn.Module, weights: str, *arguments: Tensor) -> None:
    stock, before = copy.deepcopy(box), snapshot(box)
    state = {name: value.clone() for name, value in box.state_dict().items()}
    report = patch_model(box, {"precision": "fp32", "weights": weights})
    assert [entry.kind for entry in report.patched if entry.experts] == ["experts"]
    found, expected = results(box, *arguments), results(stock, *arguments)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_close(found[name], value, name)
    box.zero_grad()
    assert list(box.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in box.state_dict().items())
    box.load_state_dict(state)
    unpatch_model(box)
    assert_same_snapshot(snapshot(box), before)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weights", ["stock", "kernel"])
@pytest.mark.parametrize("family", ROUTED)
def test_routed_experts_equal_their_eager_forward(family: str, weights: str) -> None:
    make, gate = ROUTED[family]
    box = made(make)
    assert read_experts(box["mlp"]).gate == gate
    ids, weight = routing(E + 2 if family == "longcat_flash" else E)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(4))
    assert_same_results(box, weights, x, ids, weight)


def dbrx() -> nn.Module:
    return DbrxExperts(DbrxFFNConfig(hidden_size=H, ffn_hidden_size=I, moe_num_experts=E))


def test_weights_below_one_another_equal_their_eager_forward() -> None:
    x = torch.randn(1, T, H, generator=torch.Generator().manual_seed(4))
    assert_same_results(made(dbrx), "stock", x, *routing(E))
    with refused(NothingToPatchError, "model", "its weights are parameters of its children; use weights='stock'"):
        patch_model(made(dbrx), {"weights": "kernel"})


@pytest.mark.parametrize("make", [dbrx, ROUTED["step3p7"][0]], ids=["dbrx", "step3p7"])
def test_forwards_of_transformers_5_17_are_known(
    make: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count the experts without one for ids of no expert; the rest is that of later releases."""
    module = make()
    cls = type(module)
    text = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    path = tmp_path / "modeling.py"
    path.write_text(text.replace("num_classes=self.num_experts + 1)", "num_classes=self.num_experts)"))
    spec = importlib.util.spec_from_file_location(f"{cls.__module__}_5_17", path)
    assert spec is not None and spec.loader is not None
    older = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, older)
    spec.loader.exec_module(older)
    expected = known_call(module)
    for each in module.modules():
        each.__class__ = vars(older).get(type(each).__name__, type(each))
    assert type(module) is not cls and expected is not None
    assert known_call(module) == expected


class RenamedExperts(Llama4TextExperts):
    """The forward with other names of its variables, as a model file outside of transformers may have it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        both = torch.bmm(hidden_states, self.gate_up_proj)
        first, second = both.chunk(2, dim=-1)
        y = torch.bmm((second * self.act_fn(first)), self.down_proj)
        y = y.view(-1, self.hidden_size)
        return y


class SwappedExperts(Llama4TextExperts):
    """The same with the activation on the other half."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        both = torch.bmm(hidden_states, self.gate_up_proj)
        first, second = both.chunk(2, dim=-1)
        y = torch.bmm((first * self.act_fn(second)), self.down_proj)
        y = y.view(-1, self.hidden_size)
        return y


def test_names_of_variables_decide_nothing() -> None:
    config = Llama4TextConfig(hidden_size=H, intermediate_size=I, num_local_experts=E)
    assert known_call(RenamedExperts(config)) == known_call(Llama4TextExperts(config)) is not None
    assert known_call(SwappedExperts(config)) is None


def shared() -> nn.Module:
    return InklingSharedExperts(InklingTextConfig(hidden_size=H, moe_intermediate_size=I, n_shared_experts=E))


def test_experts_that_all_compute_equal_their_own_forward() -> None:
    generator = torch.Generator().manual_seed(4)
    x, gammas = torch.randn(2, T, H, generator=generator), torch.randn(2, T, E, generator=generator)
    assert_same_results(made(shared), "stock", x, gammas)
    box = made(shared)
    patch_model(box, {"precision": "fp32"})
    assert box["mlp"].neuron_top_k == E
    box["mlp"].n_shared_experts = 1
    with refused(UnsupportedModelError, "n_shared_experts", where="mlp"):
        box["mlp"](x, gammas=gammas)
    with refused(NothingToPatchError, "model", "gate and up are parameters of their own; use weights='stock'"):
        patch_model(made(shared), {"weights": "kernel"})


@pytest.mark.parametrize("weights", ["stock", "kernel"])
@pytest.mark.parametrize("chosen", [1, 2])
def test_experts_that_get_weighted_inputs_equal_their_eager_forward(chosen: int, weights: str) -> None:
    config = Llama4TextConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=chosen)
    box = made(lambda: Llama4TextMoe(config))
    assert_same_results(box, weights, torch.randn(1, T, H, generator=torch.Generator().manual_seed(4)))


def test_rows_that_no_token_chose_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Llama4TextConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=1)
    box = made(lambda: Llama4TextMoe(config))
    patch_model(box, {"precision": "fp32"})
    rows = []
    computed = ops.experts

    def counted(x: Tensor, *args: Any, **options: Any) -> Tensor:
        rows.append(len(x))
        return computed(x, *args, **options)

    monkeypatch.setattr(ops, "experts", counted)
    x = torch.randn(1, T, H)
    eager = box["mlp"](x)[0]
    compiled = torch.compile(box["mlp"].experts, backend="eager", fullgraph=True)
    scores, _ = box["mlp"].router(x[0])
    routed = x[0].repeat(E, 1) * scores.t().reshape(-1, 1)
    torch.testing.assert_close(compiled(routed), box["mlp"].experts(routed), rtol=1e-6, atol=1e-6)
    assert rows == [T, E * T, T]
    assert eager.shape == (T, H)


def test_experts_with_a_router_of_their_own_equal_their_eager_forward() -> None:
    sizes = {"hidden_size": H, "intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": K}
    config = JetMoeConfig(**sizes, activation_function="silu")
    box = made(lambda: JetMoeMoE(config))
    assert_same_results(box, "stock", torch.randn(2, T, H, generator=torch.Generator().manual_seed(4)))
    attention = nn.ModuleDict({"mlp": box["mlp"], "attention": JetMoeMoA(config)})
    report = patch_model(attention)
    assert {(entry.name, entry.gated) for entry in report.refused} == {
        ("attention.input_linear", False),
        ("attention.output_linear", False),
    }


@pytest.mark.parametrize("family", ["gpt_oss", "glm5_next", "inkling2", "nemotron_h"])
def test_ids_of_other_ranks_add_nothing(family: str) -> None:
    box = made(ROUTED[family][0])
    stock = copy.deepcopy(box["mlp"])
    patch_model(box, {"precision": "fp32"})
    ids, weight = routing(E)
    ids[2] = E
    ids[5, 1] = E + 3
    x = torch.randn(T, H)
    expected = stock(x, ids.clamp(max=E - 1), weight * (ids < E))
    assert_close(box["mlp"](x, ids, weight), expected, "experts")


@pytest.mark.parametrize(
    ("family", "path", "value"),
    [
        ("gpt_oss", "limit", 2.0),
        ("gpt_oss", "alpha", 1.0),
        ("glm5_next", "swiglu_limit", None),
        ("inkling2", "act_fn.up_softcap.softcap", 3.0),
        ("step3p7", "limit", float("inf")),
        ("longcat_flash", "num_routed_experts", 3),
    ],
)
def test_a_number_changed_after_patching_raises(family: str, path: str, value: Any) -> None:
    box = made(ROUTED[family][0])
    patch_model(box, {"precision": "fp32"})
    owner, _, name = path.rpartition(".")
    holder = box["mlp"].get_submodule(owner)
    before = getattr(holder, name)
    arguments = (torch.randn(T, H), *routing(E))
    setattr(holder, name, value)
    with refused(UnsupportedModelError, path, "as when the block was patched") as caught:
        box["mlp"](*arguments)
    assert repr(before) in str(caught.value) and repr(value) in str(caught.value)
    setattr(holder, name, before)
    box["mlp"](*arguments)


def test_a_limit_of_the_class_is_compared_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    box = made(ROUTED["gpt_oss"][0])
    del box["mlp"].limit
    monkeypatch.setattr(GptOssExperts, "limit", 1.0, raising=False)
    stock = copy.deepcopy(box["mlp"])
    patch_model(box, {"precision": "fp32"})
    arguments = (torch.randn(T, H), *routing(E))
    assert_close(box["mlp"](*arguments), stock(*arguments), "experts")
    monkeypatch.setattr(GptOssExperts, "limit", 2.0)
    with refused(UnsupportedModelError, "limit", "1.0, as when the block was patched", got="2.0", where="mlp"):
        box["mlp"](*arguments)


NO_LIMITS = {
    float("nan"): "reads limit, NaN,",
    -1.0: r"gate_max must be a number above 0 in float32, got -1\.0\. ",
    0: r"above 0 in float32, got 0\.0\. ",
    1e39: r"gate_max must be a finite number of float32 or None, got 1e\+39\. ",
    10**400: "gate_max must be a finite number of float32 or None, got 1000",
}


@pytest.mark.parametrize(("limit", "shown"), NO_LIMITS.items(), ids=["nan", "negative", "zero", "float32", "float"])
def test_a_limit_that_is_none_is_named_before_anything_changes(limit: float, shown: str) -> None:
    box = made(ROUTED["gpt_oss"][0])
    box["mlp"].limit = limit
    before = snapshot(box)
    with refused(NothingToPatchError, "model", shown):
        patch_model(box)
    assert_same_snapshot(snapshot(box), before)


@pytest.mark.parametrize("family", ["gpt_oss", "muse_spark", "llama4", "jetmoe"])
def test_a_call_without_tokens_returns_none(family: str) -> None:
    sizes = {"hidden_size": H, "intermediate_size": I, "num_local_experts": E, "num_experts_per_tok": K}
    others: dict[str, Callable[[], nn.Module]] = {
        "llama4": lambda: Llama4TextMoe(Llama4TextConfig(**sizes)),
        "jetmoe": lambda: JetMoeMoE(JetMoeConfig(**sizes, activation_function="silu")),
    }
    box = made(others.get(family) or ROUTED[family][0])
    patch_model(box, {"precision": "mxfp8", "weights": "stock"})
    x = torch.zeros((0, H) if family in ROUTED else (2, 0, H), requires_grad=True)
    pairs = () if family in ("llama4", "jetmoe") else (torch.zeros(0, K, dtype=torch.long), torch.rand(0, K))
    y = box["mlp"](x, *pairs)
    y = y[0] if isinstance(y, tuple) else y
    assert y.numel() == 0 and y.shape[-1] == H
    y.sum().backward()
    assert not any(param.grad.any() for param in box.parameters() if param.grad is not None)


@pytest.mark.parametrize("weights", ["stock", "kernel"])
def test_a_copy_and_a_pickle_compute_the_same(weights: str) -> None:
    box = made(ROUTED["gpt_oss"][0])
    patch_model(box, {"precision": "fp32", "weights": weights})
    arguments = (torch.randn(T, H), *routing(E))
    assert torch.equal(copy.deepcopy(box)["mlp"](*arguments), box["mlp"](*arguments))


def test_a_bias_that_is_taken_away_is_an_error() -> None:
    box = made(ROUTED["gpt_oss"][0])
    patch_model(box, {"precision": "fp32"})
    box["mlp"].down_proj_bias = None
    ids = torch.zeros(3, K, dtype=torch.long)
    with refused(UnsupportedModelError, "the biases", "Unpatch the model", where="mlp"):
        box["mlp"](torch.randn(3, H), ids, torch.rand(3, K))


def test_a_capped_gate_has_a_plain_sigmoid() -> None:
    gate, up = ("half", 0, False), ("half", 1, False)
    for inside, found in ((gate, Gate(gate_softcap=3.0)), (("scaled", gate, 1.702), None)):
        expression = ("product", ("product", ("softcap", gate, 3.0), ("sigmoid", inside)), up)
        if found is not None:
            assert match_gate(expression) == (found, False)
            continue
        with pytest.raises(UnknownForm):
            match_gate(expression)


def test_processes_share_what_experts_return_unchanged() -> None:
    x_TH, ids_TK, weight_TK = torch.randn(1, 4), torch.tensor([[2, 0]]), torch.tensor([[0.5, 0.25]])
    found = identity(lambda x, ids, weights: torch.zeros_like(x), 2, 2, x_TH, ids_TK, weight_TK)
    torch.testing.assert_close(found, 0.25 * x_TH)


def test_a_row_without_positive_values_is_no_row_of_zeros() -> None:
    x_RH = torch.tensor([[-1.0, 0.0], [0.0, 0.0]])
    assert torch.equal(by_expert(lambda x, ids, weights: x + 3, 2, x_RH), torch.tensor([[2.0, 3.0], [0.0, 0.0]]))

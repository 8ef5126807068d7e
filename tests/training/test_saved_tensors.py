"""T tokens, H hidden, I intermediate, E experts, K experts per token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_neuron_moe.errors import ConfigError, DeviceError, ShapeError
from hf_neuron_moe.training.saved_tensors import measure_saved_bytes
from tests.refusals import refused

H, I, T = 32, 48, 10  # noqa: E741 - the field's name for the intermediate size


def llama_mlp() -> LlamaMLP:
    return LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=I))


def test_llama_mlp_in_fp32_saves_four_intermediates_and_its_input() -> None:
    mlp = llama_mlp()
    with measure_saved_bytes({"mlp": mlp}) as saved:
        mlp(torch.randn(2, T // 2, H, requires_grad=True))
    entry = saved.modules["mlp"]
    # SiLU keeps gate; the product keeps silu(gate) and up; down_proj keeps the product; gate_proj and up_proj keep the
    # same input once.
    assert entry.activation_bytes == 4 * T * I * 4
    assert entry.input_bytes == T * H * 4
    assert (entry.calls, entry.tokens) == (1, T)
    assert entry.bytes_per_token == (4 * I + H) * 4
    assert saved.bytes_per_token == entry.bytes_per_token
    assert saved.total_bytes == entry.total_bytes == entry.activation_bytes + entry.input_bytes


def test_bf16_halves_it_and_gradients_are_unchanged() -> None:
    mlp = llama_mlp().bfloat16()
    hidden_TH = torch.randn(T, H, dtype=torch.bfloat16)
    mlp(hidden_TH).sum().backward()
    expected = [parameter.grad.clone() for parameter in mlp.parameters()]
    mlp.zero_grad()
    with measure_saved_bytes({"mlp": mlp}) as saved:
        mlp(hidden_TH).sum().backward()
    assert saved.modules["mlp"].total_bytes == (4 * I + H) * T * 2
    assert all(torch.equal(p.grad, e) for p, e in zip(mlp.parameters(), expected, strict=True))


def test_stock_mixtral_experts_save_what_the_eager_loop_makes() -> None:
    config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=1, num_experts_per_tok=1)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config)
    nn.init.normal_(experts.gate_up_proj, std=0.1)
    nn.init.normal_(experts.down_proj, std=0.1)
    hidden_TH = torch.randn(T, H, requires_grad=True)
    index_TK = torch.zeros(T, 1, dtype=torch.int64)
    with measure_saved_bytes({"experts": experts}) as saved:
        experts(hidden_TH, index_TK, torch.ones(T, 1, requires_grad=True))
    entry = saved.modules["experts"]
    # One expert takes all T tokens, so the loop's tensors have T rows. gate and up are the two halves of one
    # [T, 2I] storage; silu(gate), the product and the gathered input are storages of their own; the scaling by the
    # routing weight keeps the expert's output and the gathered weight, index_add_ the scaled output. The indices of
    # rows and of top-k positions are the two columns of one int64 storage.
    floats = T * (2 * I + I + I + H + H + H + 1)
    assert entry.activation_bytes == 4 * floats + 8 * 2 * T
    assert entry.input_bytes == 0
    assert entry.tokens == T


def test_only_named_modules_are_counted() -> None:
    model = nn.Sequential(nn.Linear(H, H), llama_mlp(), nn.Linear(H, H), nn.GELU(), llama_mlp())
    names = {"first": model[1], "second": model[4]}
    with measure_saved_bytes(names) as saved:
        model(torch.randn(T, H))
    assert saved.modules["first"] == saved.modules["second"]
    assert saved.activation_bytes == 2 * 4 * T * I * 4
    assert saved.input_bytes == 2 * T * H * 4
    assert saved.bytes_per_token == 2 * (4 * I + H) * 4


def test_calls_add_up_and_hooks_go_away() -> None:
    mlp = llama_mlp()
    with measure_saved_bytes({"mlp": mlp}) as saved:
        mlp(torch.randn(T, H))
        mlp(torch.randn(T, H))
    mlp(torch.randn(T, H))
    entry = saved.modules["mlp"]
    assert (entry.calls, entry.tokens) == (2, 2 * T)
    assert entry.bytes_per_token == (4 * I + H) * 4
    assert not mlp._forward_hooks and not mlp._forward_pre_hooks


def test_no_grad_saves_nothing() -> None:
    mlp = llama_mlp()
    with measure_saved_bytes({"mlp": mlp}) as saved, torch.no_grad():
        mlp(torch.randn(T, H))
    assert saved.modules["mlp"].total_bytes == 0
    assert saved.modules["mlp"].tokens == T


class Square(torch.autograd.Function):
    """Saves a view of a larger storage and a copy of a parameter."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        scratch = torch.cat([hidden, hidden])
        ctx.save_for_backward(scratch[: len(hidden)], weight, weight.to(torch.bfloat16))
        return hidden * weight.sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[1].sum(), None


class UsesFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, hidden: Tensor) -> Tensor:
        return Square.apply(hidden, self.weight)


def test_whole_storages_and_parameter_copies_count_but_parameters_do_not() -> None:
    module = UsesFunction()
    with measure_saved_bytes({"module": module}) as saved:
        module(torch.randn(T, H, requires_grad=True)).sum().backward()
    assert saved.modules["module"].activation_bytes == 2 * T * H * 4 + H * 2
    assert saved.modules["module"].input_bytes == 0


class Fails(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("inside the module")


def test_an_exception_in_a_module_leaves_no_hook_behind() -> None:
    module = Fails()
    with pytest.raises(RuntimeError, match="inside the module"), measure_saved_bytes({"module": module}) as saved:
        module(torch.randn(T, H))
    x = torch.randn(T, H, requires_grad=True)
    (x * x).sum().backward()
    assert saved.modules["module"].total_bytes == 0
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_refusals() -> None:
    mlp = llama_mlp()
    with refused(ConfigError, "modules", got="an empty one"), measure_saved_bytes({}):
        pass
    with refused(ConfigError, "modules", got="'a' and 'b'"), measure_saved_bytes({"a": nn.Sequential(mlp), "b": mlp}):
        pass
    with refused(ConfigError, "modules", got="'a' and 'b'"), measure_saved_bytes({"a": mlp, "b": mlp}):
        pass
    with refused(ShapeError, "first tensor input of 'mlp'"), measure_saved_bytes({"mlp": mlp}):
        mlp(torch.randn(0, H))
    with (
        refused(DeviceError, "first tensor input of 'mlp'", got="a meta tensor"),
        measure_saved_bytes({"mlp": mlp.to("meta")}),
    ):
        mlp(torch.randn(T, H, device="meta"))

"""Generation in mxfp8 reads weights that were quantized once, and reads them anew when they change."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import patch_model, refresh_weights
from hf_neuron_moe.backends import prepared
from hf_neuron_moe.backends.spec import FFNWeights
from hf_neuron_moe.backends.torch import compute, generation
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.modules import ops
from tests.backends.rounding_oracle import network_mxfp8
from tests.refusals import refused
from tests.tiny_models import WEIGHT_LAYOUTS, tiny_model

FAMILIES = ("llama", "mixtral")
SIZES = {"hidden_size": 64, "intermediate_size": 160}


@pytest.fixture(autouse=True, params=[False, True], ids=["fp32_products", "bf16_products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: request.param)
    generation.generation_copies().clear()
    yield
    generation.generation_copies().clear()


def patched(family: str, home: str = "stock") -> nn.Module:
    model = tiny_model(family, **SIZES).to(torch.bfloat16).eval()
    patch_model(model, {"precision": "mxfp8", "weights": home})
    return model


@torch.inference_mode()
def logits(model: nn.Module, tokens: int = 3) -> Tensor:
    return model(torch.arange(tokens)[None] + 1).logits


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, 2, 37, 300])
@pytest.mark.parametrize("inner", [160, 1200])
def test_dense_values_are_those_of_the_contract(rows: int, inner: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x, gate, up = (torch.randn(size, 256, generator=g).bfloat16() for size in (rows, inner, inner))
    down = (torch.randn(256, inner, generator=g) * inner**-0.5).bfloat16()
    gate, up = gate * 256**-0.5, up * 256**-0.5
    y = generation.mlp(x, FFNWeights(gate, up, down))
    operands = tuple(t.double() for t in (gate, up, down))
    exact = network_mxfp8(x.double(), operands, x.double(), torch.ones(rows).double(), None).y_RH
    once = (exact.bfloat16().double() - exact).norm()
    assert float((y.double() - exact).norm() / once) <= 1.15


@pytest.mark.parametrize(("hidden", "inner"), [(384, 256), (256, 384), (896, 384)])
def test_an_axis_of_384_has_the_groups_of_training(hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: True)
    g = torch.Generator().manual_seed(hidden)

    def wide(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) * torch.randint(-6, 7, shape, generator=g).float().exp2()).bfloat16()

    operands = wide(5, hidden), wide(inner, hidden), wide(inner, hidden), wide(hidden, inner)
    trained = ops.swiglu_mlp(*operands, precision="mxfp8", backend="torch", activations="full", training=True)
    generated = generation.mlp(operands[0], FFNWeights(*operands[1:]))
    # The same operands give the same sums but for the order of their parts; other groups move a value by 2^-4.
    assert float((trained - generated).float().norm() / trained.float().norm()) < 2**-17


def test_a_changed_column_is_noticed() -> None:
    weight = torch.ones(1024, 512)
    before = prepared._sample(weight)
    for column in range(0, 512, 37):
        changed = weight.clone()
        changed[:, column] = 2
        assert not torch.equal(before, prepared._sample(changed)), column


def test_threads_share_the_copies() -> None:
    """Each has weights of its own, which go at once: the table changes while others walk it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def generate(_: int) -> bool:
        g = torch.Generator().manual_seed(0)
        for _ in range(40):
            x, gate, up, down = (torch.randn(s, generator=g).bfloat16() for s in ((1, 32), (8, 32), (8, 32), (32, 8)))
            generation.mlp(x, FFNWeights(gate, up, down))
        return True

    try:
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(generate, range(6)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("rows", [64, 65, 512, 513])
def test_more_rows_are_left_to_the_tiles(rows: int) -> None:
    most = 512 if compute.bf16_matmul_is_fast(torch.device("cpu")) else 64
    assert generation.suits("mxfp8", rows, torch.zeros(1)) == (rows <= most)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("home", WEIGHT_LAYOUTS)
def test_the_output_is_that_of_weights_quantized_in_the_call(
    family: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patched(family, home)
    first, again = logits(model), logits(model)
    assert generation.generation_copies().nbytes
    monkeypatch.setattr(generation, "environment_option", lambda *_: "0")
    without = logits(model)
    assert torch.equal(first, again)
    # Sums in another order, and experts' parts rounded where fp32 products add them unrounded: one rounding or two of
    # 2^-9 here and there, which MXFP8 makes a step of 2^-4 of where it crosses a border.
    assert float((first - without).norm() / without.norm()) < (2**-7 if family == "llama" else 2**-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.mul_(1.5),  # as an optimizer does, or load_state_dict
        lambda p: p.data.mul_(1.5),  # as merging adapters does
        lambda p: setattr(p, "data", p.data * 1.5),
    ],
    ids=["in place", "through data", "another tensor"],
)
def test_changed_weights_are_read_anew(family: str, change: Callable[[Tensor], object]) -> None:
    model = patched(family)
    before = logits(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name:
                change(parameter)
    changed = logits(model)
    fresh = tiny_model(family, **SIZES).to(torch.bfloat16).eval()
    fresh.load_state_dict(model.state_dict())
    patch_model(fresh, {"precision": "mxfp8"})
    assert torch.equal(changed, logits(fresh))
    assert not torch.equal(changed, before)


def test_copies_are_dropped_by_refresh_by_training_and_with_the_model() -> None:
    model = patched("llama")
    logits(model)
    held = generation.generation_copies().nbytes
    assert held >= sum(p.numel() * 2 for n, p in model.named_parameters() if "mlp" in n)
    assert refresh_weights(model) == held and generation.generation_copies().nbytes == 0
    logits(model)
    model.train()
    assert generation.generation_copies().nbytes == 0
    model.eval()
    logits(model)
    del model
    gc.collect()  # modules hold each other
    assert generation.generation_copies().nbytes == 0


def test_training_and_recorded_calls_keep_none() -> None:
    model = patched("mixtral")
    model(torch.arange(4)[None]).logits.sum().backward()
    model.train()
    logits(model)
    assert generation.generation_copies().nbytes == 0


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_the_environment_turns_copies_off(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generation.environment_option.cache_clear()
    monkeypatch.setenv(generation.OPTION, value)
    logits(patched("llama"))
    generation.environment_option.cache_clear()
    assert bool(generation.generation_copies().nbytes) is expected


def test_another_value_of_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    generation.environment_option.cache_clear()
    monkeypatch.setenv(generation.OPTION, "yes")
    with refused(ConfigError, f"the environment variable {generation.OPTION}"):
        generation.suits("mxfp8", 1, torch.zeros(1))

"""Blocks under FakeTensorMode: shapes and devices alone, as a compiler and a CUDA graph see them.

Tensors of `cuda` need a torch that was built for it, and no GPU. A fake tensor has no value: reading one is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import __version__

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.activation_policy import canonical_keep, parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.spec import BlockSpec, ExpertWeights, FFNWeights, Routing, Wants
from hf_neuron_moe.backends.torch import device_backward, device_products, gating
from hf_neuron_moe.formats import elements
from tests.backends.test_gates import GATES
from tests.backends.test_quantized_network import stack_of, words_of
from tests.tiny_models import tiny_model

PRECISIONS = ("bf16", "mxfp8", "fp32")
WINDOWED = Version(__version__) >= Version("5.21")  # before, gpt-oss masks its window with a real tensor
POLICIES = ("minimal", "full", "recompute", "fp8")
LAYOUTS = ("stock", "transposed", "interleaved")
E, T, H, I = 6, 50, 64, 96  # noqa: E741
BUILT_FOR_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without CUDA")
DEVICES = [pytest.param("cuda", marks=BUILT_FOR_CUDA), "cpu", "meta"]


class OneDevice(TorchDispatchMode):
    """Raises for an operation that has tensors of another device: a copy from or to the host, no part of a CUDA graph.

    Scalars of the host are arguments of a launch.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.ndim:
                assert tensor.device.type == self.device, f"{func} has a tensor of {tensor.device}"
        return result


@pytest.fixture(autouse=True)
def _nothing_made_before() -> Iterator[None]:
    """What is made once and held is made under the mode."""
    gating.gating_of.cache_clear()
    elements.decode_table.cache_clear()
    yield
    gating.gating_of.cache_clear()
    elements.decode_table.cache_clear()


def filled(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, 0.125, dtype=dtype, device=device)


def like(part: Tensor, device: str) -> Tensor:
    return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)


def routing_on(device: str) -> Routing:
    index = torch.arange(2 * T, device=device).view(T, 2) % (E + 1)  # the last is another rank's
    return Routing(index, filled(T, 2, device=device, dtype=torch.float32))


def run_experts(
    name: str, device: str, spec: BlockSpec, policy: str, *, biased: bool = False, inner: int = I
) -> list[Tensor]:
    """The result, what is saved and the gradients."""
    dtype = torch.float32 if spec.precision == "fp32" else torch.bfloat16
    x, dout = (filled(T, H, device=device, dtype=dtype) for _ in range(2))
    shapes = [(E, (2 if spec.gate.gated else 1) * inner, H), (E, H, inner)]
    weights = [filled(*shape, device=device) for shape in shapes]
    if spec.transposed:
        weights = [weight.transpose(1, 2).contiguous() for weight in weights]
    biases = [filled(*shape[:2], device=device) if biased else None for shape in shapes]
    keep, kernels = parse_keep(canonical_keep(policy, spec.precision)), get_backend(name)
    stack, routing = ExpertWeights(*weights, *biases), routing_on(device)
    y, saved = kernels.experts_forward(x, routing, stack, spec, keep)
    assert y.shape == x.shape
    return [y, *saved, *kernels.experts_backward(dout, x, routing, stack, saved, BackwardCall(spec, keep, Wants()))]


def run_dense(name: str, device: str, spec: BlockSpec, policy: str) -> list[Tensor]:
    dtype = torch.float32 if spec.precision == "fp32" else torch.bfloat16
    x, dout = (filled(T, H, device=device, dtype=dtype) for _ in range(2))
    weights = FFNWeights(*(filled(*shape, device=device) for shape in ((I, H), (I, H), (H, I))))
    keep, kernels = parse_keep(canonical_keep(policy, spec.precision)), get_backend(name)
    y, saved = kernels.mlp_forward(x, weights, spec, keep)
    assert y.shape == x.shape
    return [y, *saved, *kernels.mlp_backward(dout, x, weights, saved, BackwardCall(spec, keep, Wants()))]


def backend_of(device: str) -> str:
    return "torch-grouped" if device == "cpu" else "torch"  # the backend that a device gets by itself


@pytest.mark.sampled(4)
@pytest.mark.thinned(6, 3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gate", [pytest.param(gate, id=name) for name, gate in GATES.items()])
def test_every_gate_and_policy(device: str, precision: str, policy: str, gate: Gate) -> None:
    with FakeTensorMode(), OneDevice(device):
        found = run_experts(backend_of(device), device, BlockSpec(precision, gate=gate), policy)
        if gate.gated:
            found += run_dense(backend_of(device), device, BlockSpec(precision, gate=gate), policy)
    assert {tensor.device.type for tensor in found} == {device}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_biases(device: str, precision: str, layout: str) -> None:
    spec = BlockSpec(precision, transposed=layout == "transposed", interleaved=layout == "interleaved")
    with FakeTensorMode(), OneDevice(device):
        run_experts(backend_of(device), device, spec, "minimal", biased=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stored", ["natural", "swizzled", "words", "fp4 words"])
def test_frozen_mx_weights(device: str, stored: str) -> None:
    hidden = 512 if "words" in stored else 128
    gate_up, down = filled(E, 2 * 128, hidden), filled(E, hidden, 128)
    if "words" in stored:
        stack = words_of(gate_up, down, "e2m1" if "fp4" in stored else "e4m3fn", packed=False)[0]
    else:
        stack = stack_of(gate_up, down, stored, "compact")
    keep, kernels = parse_keep(canonical_keep("minimal", "mxfp8")), get_backend(backend_of(device))
    with FakeTensorMode():
        codes = {key: like(part, device) for key, part in vars(stack).items() if isinstance(part, Tensor)}
        stack = replace(stack, **codes)
        x, routing = filled(T, hidden, device=device), routing_on(device)
        with OneDevice(device):
            y, *saved = kernels.quantized_forward(x, routing, stack, keep)
            kernels.quantized_backward(x, x, routing, stack, (saved[0], saved[1]), keep, Wants(weights=False))
    assert y.device.type == device


@BUILT_FOR_CUDA
@pytest.mark.triton
class TestCUDA:
    """What a fake of the products, or a launch of a kernel, would hide."""

    @pytest.fixture(autouse=True)
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The kernels that would be launched; their results hold anything."""
        pytest.importorskip("triton", reason="Triton is not installed")
        from hf_neuron_moe.backends.triton import expert_gemm, gate_epilogue, mx_both_ways

        kernels: list[Any] = []
        for module in (expert_gemm, gate_epilogue, mx_both_ways):
            monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: kernels.append(kernel))
        return kernels

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("inner", [96, 52])
    def test_products(self, precision: str, inner: int, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """torch's grouped product checks the strides and dtypes that it is given."""
        taken: list[Tensor] = []
        for name in ("grouped_product", "grouped_over_rows"):
            body = getattr(device_products, name)._init_fn
            for module in (device_products, device_backward):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, body)
        monkeypatch.setattr(device_products, "_has_borders", taken.append)
        with FakeTensorMode(), OneDevice("cuda"):
            run_experts("torch", "cuda", BlockSpec(precision), "recompute", inner=inner)
        assert len(taken) > len(launched) or precision == "fp32"
        assert launched

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("blackwell", [False, True])
    def test_backend(
        self, precision: str, policy: str, blackwell: bool, launched: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from hf_neuron_moe.backends.triton import backend

        monkeypatch.setattr(backend, "multiplies_codes", lambda _: blackwell)
        with FakeTensorMode(), OneDevice("cuda"):
            for gate in (GATES["silu"], GATES["squared_relu"], GATES["swish_offset"]):
                run_experts("triton", "cuda", BlockSpec(precision, gate=gate), policy)
        assert bool(launched) == (precision != "fp32")  # whose products are operators


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "precision"), [("torch", "bf16"), ("torch", "fp32"), *(("torch-grouped", each) for each in PRECISIONS)]
)
def test_nothing_is_left_behind(name: str, precision: str) -> None:
    """Buffers and tables that a process holds have values, whatever ran before under the mode."""
    spec = BlockSpec(precision, gate=GATES["clamped_after"])

    def run(policy: str) -> list[Tensor]:
        return [*run_dense(name, "cpu", spec, policy), *run_experts("torch-grouped", "cpu", spec, policy)]

    with FakeTensorMode():
        run("fp8" if name == "torch-grouped" else "minimal")
    for policy in ("minimal", "fp8"):
        assert all(type(tensor) is Tensor for tensor in run(policy))


@pytest.mark.sampled(3)
@pytest.mark.thinned(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", *(["gpt_oss"] if WINDOWED else []), "llama"])
def test_a_model_trains(device: str, precision: str, family: str) -> None:
    model = tiny_model(family).train()
    patch_model(model, NeuronMoEConfig(precision, backend=backend_of(device)))
    with FakeTensorMode():
        state = {key: like(part, device).requires_grad_() for key, part in model.named_parameters()}
        buffers = {key: like(part, device) for key, part in model.named_buffers()}
        ids = torch.zeros(2, 16, dtype=torch.int64, device=device)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        loss = torch.func.functional_call(model, {**buffers, **state}, (), inputs).loss
        assert loss.device.type == device
        if device != "cuda" or torch.cuda.is_available():  # torch's autograd engine asks for the driver
            loss.backward()
            assert all(part.grad is not None for part in state.values())

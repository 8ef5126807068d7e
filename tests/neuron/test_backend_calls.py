"""The Neuron backend on the contract double: every policy and layout against the torch backend, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.mx_weights import MXExpertStack, MXLayout, held_form
from hf_neuron_moe.errors import (
    BackendUnavailableError,
    ConfigError,
    NeuronMoEWarning,
    NothingToPatchError,
    ShapeError,
    UnsupportedModelError,
)
from hf_neuron_moe.formats import quantize_mx, unswizzle
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.quantized_blocks import QuantizedSwiGLUMLP
from tests.flat_backend import flat
from tests.refusals import refused
from tests.tiny_models import tiny_model

T, H, I, E, K, B = 37, 96, 160, 4, 2, 256  # noqa: E741
CPU = torch.device("cpu")
Machine = Callable[..., Any]


def neuron() -> Any:
    return flat(get_backend(resolve_backend("neuron", CPU)))


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()


def dense(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple((torch.randn(shape) * 0.1).to(dtype) for shape in ((I, H), (I, H), (H, I)))  # type: ignore[return-value]


def experts(transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = torch.stack([torch.randperm(E + 1)[:K] for _ in range(T)])  # some pairs belong to another rank
    weights = (torch.randn(E, 2 * I, H) * 0.1, torch.randn(E, H, I) * 0.1)
    gate_up, down = (w.transpose(1, 2).contiguous() if transposed else w for w in weights)
    return index, torch.rand(T, K), gate_up, down


def deviation(actual: Tensor, expected: Tensor) -> float:
    if not actual.numel() and not expected.numel():  # of biases that are not there
        return 0.0
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


LOSSLESS = ("minimal", "recompute", "up", "gate_pre+gate_act+up+intermediate")


@pytest.mark.parametrize(("release", "lnc"), [((2, 30), 2), ((2, 31), 1), ((2, 33), 2)])
def test_the_dense_pair_equals_the_torch_backend(machine: Machine, release: tuple[int, int], lnc: int) -> None:
    machine(release=release, lnc=lnc)
    kernels, torch_backend, (x, dout), weights = neuron(), flat(get_backend("torch")), rows(), dense()
    for keep in LOSSLESS:
        y, saved = kernels.mlp_forward(x, *weights, "mxfp8", keep)
        expected, expected_saved = torch_backend.mlp_forward(x, *weights, "mxfp8", keep)
        assert torch.equal(y, expected)
        fakes = kernels.fake_mlp_saved(x, I, keep)
        assert [(t.shape, t.dtype) for t in fakes] == [(t.shape, t.dtype) for t in saved]
        grads = kernels.mlp_backward(dout, x, *weights, saved, "mxfp8", keep, True, True)
        stock = torch_backend.mlp_backward(dout, x, *weights, expected_saved, "mxfp8", keep, True, True)
        for grad, other in zip(grads, stock):
            assert grad.dtype == other.dtype and grad.is_contiguous() and grad.shape == other.shape
        # 2.30 contracts the input gradient over gate and up apart, which groups other values: MX noise.
        assert deviation(grads[0], stock[0]) <= (0.02 if release == (2, 30) else 0.0)
        assert all(torch.equal(grad, other) for grad, other in zip(grads[1:], stock[1:]))
    assert kernels.mlp_backward(dout, x, *weights, saved, "mxfp8", keep, False, False)[0].numel() == 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("release", "precision"), [((2, 29), "bf16"), ((2, 33), "bf16"), ((2, 33), "mxfp8")])
def test_the_expert_pairs_equal_the_torch_backend(
    machine: Machine, release: tuple[int, int], precision: str, transposed: bool
) -> None:
    machine(release=release, target="trn3" if precision == "mxfp8" else "trn2")
    kernels, torch_backend, (x, dout) = neuron(), flat(get_backend("torch")), rows()
    operands = experts(transposed)
    options = (transposed, precision, B)
    # bf16: affinities in bf16 (2^-9) and, from 2.31 on, on the intermediate, where the torch backend rounds once less.
    bound = 0.0 if precision == "mxfp8" else 0.02
    found: list[tuple[Tensor, ...]] = []
    for keep in ("minimal", "recompute", "gate_pre"):
        y, saved = kernels.experts_forward(x, *operands, *options, keep)
        expected, expected_saved = torch_backend.experts_forward(x, *operands, *options, keep)
        assert deviation(y, expected) <= bound
        index, _, gate_up, down = operands
        fakes = kernels.fake_experts_saved(x, index, gate_up, down, *options, keep)
        assert [(t.shape, t.dtype) for t in fakes] == [(t.shape, t.dtype) for t in saved]
        wants = (True, True, True)
        grads = kernels.experts_backward(dout, x, *operands, saved, *options, keep, *wants)
        stock = torch_backend.experts_backward(dout, x, *operands, expected_saved, *options, keep, *wants)
        for grad, other in zip(grads, stock):
            assert grad.dtype == other.dtype and grad.is_contiguous() and grad.shape == other.shape
            assert deviation(grad, other) <= bound
        found.append(grads)
    for grads in found[1:]:
        assert all(torch.equal(grad, first) for grad, first in zip(grads, found[0])), "policies differ"


def test_fp8_checkpoints_cost_what_fp8_loses(machine: Machine) -> None:
    machine()
    kernels, torch_backend, (x, dout), weights = neuron(), flat(get_backend("torch")), rows(), dense()
    y, saved = kernels.mlp_forward(x, *weights, "mxfp8", "fp8")
    expected, expected_saved = torch_backend.mlp_forward(x, *weights, "mxfp8", "fp8")
    assert torch.equal(y, expected)
    grads = kernels.mlp_backward(dout, x.new_empty(0), *weights, saved, "mxfp8", "fp8", True, True)
    stock = torch_backend.mlp_backward(dout, x.new_empty(0), *weights, expected_saved, "mxfp8", "fp8", True, True)
    assert torch.equal(grads[3], stock[3]), "the intermediate is COAT's"
    # The kernel multiplies silu' and up first, COAT the gradient and up: bf16 roundings, then MX ones.
    assert all(deviation(grad, other) < 0.06 for grad, other in zip(grads, stock))


def any_platform() -> Any:
    """The backend where nothing says which chip it is: then both precisions are taken."""
    found = neuron()
    found.device = replace(found.device, assumed=True)
    return found


def test_two_precisions_share_weights_but_no_copies(machine: Machine) -> None:
    machine()
    kernels, torch_backend, (x, _) = any_platform(), flat(get_backend("torch")), rows()
    operands = experts(transposed=False)
    for precision, bound in (("bf16", 0.02), ("mxfp8", 0.0), ("bf16", 0.02)):
        y = kernels.experts_forward(x, *operands, False, precision, B, "")[0]
        assert deviation(y, torch_backend.experts_forward(x, *operands, False, precision, B, "")[0]) <= bound


def test_a_forward_that_keeps_something_else_is_refused(machine: Machine) -> None:
    """A release with other checkpoints, or with none by default."""
    machine()
    kernels, (x, _), operands = neuron(), rows(), experts(transposed=False)
    real = kernels._experts.launch
    for change, shown in (
        (lambda found: found[:1], "got the output alone"),
        (lambda found: (found[0], found[1].mT.contiguous()), "behind the output, got"),
    ):
        kernels._experts = replace(kernels._experts, launch=lambda *a, change=change, **k: change(real(*a, **k)))
        with refused(BackendUnavailableError, "the experts' forward kernel", shown):
            kernels.experts_forward(x, *operands, False, "mxfp8", 2 * B, "minimal")
        y = kernels.experts_forward(x, *operands, False, "mxfp8", 2 * B, "recompute")[0]
        assert torch.equal(y, flat(get_backend("torch")).experts_forward(x, *operands, False, "mxfp8", 2 * B, "")[0])


def test_no_tokens_need_no_kernel(machine: Machine) -> None:
    machine()
    kernels, weights, operands, launched = any_platform(), dense(), experts(False), []
    kernels._dense = replace(kernels._dense, launch=launched.append)
    kernels._experts = replace(kernels._experts, launch=launched.append)
    none, index, weight = torch.empty(0, H).bfloat16(), operands[0][:0], operands[1][:0]
    y, saved = kernels.mlp_forward(none, *weights, "mxfp8", "minimal")
    grads = kernels.mlp_backward(none, none, *weights, saved, "mxfp8", "minimal", True, True)
    assert y.shape == grads[0].shape == (0, H) and all(grad.eq(0).all() for grad in grads[1:])
    routed = (index, weight, *operands[2:])
    y, saved = kernels.experts_forward(none, *routed, False, "bf16", B, "minimal")
    grads = kernels.experts_backward(none, none, *routed, saved, False, "bf16", B, "minimal", True, True, True)
    assert y.shape == grads[0].shape == (0, H) and grads[1].shape == (0, K) and grads[2].eq(0).all()
    assert not launched, "a kernel was asked for"


def test_what_the_kernels_lack_is_refused_or_said_in_the_report(machine: Machine) -> None:
    machine(target="trn2")
    with refused(NothingToPatchError, "model", "Trn3 only, and this is trn2"):
        patch_model(tiny_model("llama"), NeuronMoEConfig(precision="mxfp8", backend="neuron"))
    machine(lnc=1)
    options = {"backend": "neuron", "precision": "mxfp8"}
    with refused(UnsupportedModelError, "model", "fallback='torch'"):
        patch_model(tiny_model("qwen2_moe").bfloat16(), NeuronMoEConfig(**options))
    model = tiny_model("qwen2_moe").bfloat16()
    report = patch_model(model, NeuronMoEConfig(fallback="torch", **options))
    kinds = {entry.kind: entry for entry in report.patched}
    assert kinds["mlp"].backend == "neuron" and kinds["mlp"].weights == "kernel"
    assert kinds["experts"].backend == "torch" and "LNC is 1" in kinds["experts"].fallback
    assert "PyTorch instead of kernels: the experts' backward needs" in str(report)
    assert {entry["fallback"] for entry in report.to_dict()["entries"] if entry["kind"] == "mlp"} == {""}
    ids = torch.randint(3, 60, (1, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = sum(entry.weight_copy_bytes for entry in report.patched)
    assert neuron().prepared_bytes == expected > 0
    assert f"{expected / 2**20:.1f} MiB" in str(report)


def test_dense_bf16_blocks_run_as_one_expert(machine: Machine) -> None:
    double = machine(target="trn2").double
    model = tiny_model("llama").bfloat16()
    report = patch_model(model, NeuronMoEConfig(backend="neuron", block_size=1024))
    (entry, *_) = report.patched
    assert entry.backend == "neuron" and entry.kernel_sizes == (512, 64) and not entry.fallback
    assert any("as one expert with affinity 1" in note and "up to 32,768 tokens" in note for note in entry.notes)
    assert "as one expert with affinity 1" in str(report)
    ids = torch.randint(3, 60, (1, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    assert sorted(set(double.names)) == ["blockwise_mm_bwd", "moe_cte"]
    call = double.calls[0].arguments
    assert call["block_size"] == 512 and call["gate_up_proj_weight"].shape == (1, 512, 2, 64)
    assert neuron().prepared_bytes == sum(entry.weight_copy_bytes for entry in report.patched) > 0


def test_calls_that_break_a_limit_never_reach_a_kernel(machine: Machine) -> None:
    machine(target="trn2")
    operands = experts(False)
    long = torch.zeros(32769, H).bfloat16()
    index, weight = (part[:1].expand(len(long), K) for part in operands[:2])
    with refused(ShapeError, "the number of tokens (batch size times length)", got="32769"):
        neuron().experts_forward(long, index, weight, *operands[2:], False, "bf16", B, "")
    with refused(ConfigError, "the mlp block (H=96, I=160, precision=mxfp8)", "Trn3 only"):
        neuron().mlp_forward(rows()[0], *dense(), "mxfp8", "")


def test_a_changed_machine_gets_a_backend_of_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    first = neuron()
    assert neuron() is first and first.device.platform == "trn3" and first.device.lnc == 2
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert neuron() is not first and neuron().device == replace(first.device, platform="trn2")


def frozen_stack(arrangement: str, hidden: int = 256, inner: int = 128) -> MXExpertStack:
    torch.manual_seed(1)
    held = []
    for shape in ((2 * inner, hidden), (hidden, inner)):
        mx = quantize_mx((torch.randn(shape) * 0.1).bfloat16())
        codes = mx.codes if arrangement == "swizzled" else unswizzle(mx.codes)
        held.append(held_form(codes, mx.scales, MXLayout(arrangement=arrangement)))
    (gate_up, gate_up_scales, first), (down, down_scales, second) = held
    return MXExpertStack(gate_up, gate_up_scales, down, down_scales, first, second)


@pytest.mark.parametrize("arrangement", ["natural", "swizzled"])
def test_frozen_weights_go_through_the_kernel_as_codes(machine: Machine, arrangement: str) -> None:
    machine()
    kernels, stack, x = neuron(), frozen_stack(arrangement), torch.randn(T, 256).bfloat16()
    assert kernels.quantized_support(stack, training=False).reason is None
    y = kernels.quantized_forward(x, None, None, stack, "")[0]
    expected = flat(get_backend("torch")).quantized_forward(x, None, None, stack, "")[0]
    # The kernel quantizes the activations, the torch backend reads them in bf16: E4M3 steps of 2^-4 at most.
    assert y.shape == expected.shape and deviation(y, expected) < 0.05


@pytest.mark.parametrize(
    ("stack", "training", "reason"),
    [
        (frozen_stack("natural"), True, "input gradient"),
        (frozen_stack("natural", hidden=384), False, "exactly 384"),
        (frozen_stack("natural", hidden=160), False, "tiles of 128"),
        (replace(frozen_stack("natural"), gate_up_layout=MXLayout(fmt="e5m2")), False, "e4m3fn codes"),
        (replace(frozen_stack("natural", 1024), gate_up_layout=MXLayout(scheme="one_tile")), False, "as wrapX"),
    ],
)
def test_frozen_weights_that_no_kernel_takes(
    machine: Machine, stack: MXExpertStack, training: bool, reason: str
) -> None:
    machine()
    assert reason in str(neuron().quantized_support(stack, training=training).reason)


def frozen_block(stack: MXExpertStack, **options: Any) -> QuantizedSwiGLUMLP:
    """A block of a loaded conversion: made without values, then filled."""
    original = tiny_model("llama", hidden_size=256, intermediate_size=128).model.layers[0].mlp
    names = QuantizedSwiGLUMLP.tensor_names()
    tensors = (stack.gate_up_codes, stack.gate_up_scales, stack.down_codes, stack.down_scales)
    known = {name: tensor.to("meta") for name, tensor in zip(names, tensors)}
    layouts = {"gate_up_proj": stack.gate_up_layout, "down_proj": stack.down_layout}
    roles = DenseRoles(("gate_proj", "up_proj"), "down_proj", "act_fn")
    block = QuantizedSwiGLUMLP(original, "mlp", NeuronMoEConfig(backend="neuron", **options), layouts, known, roles)
    for name, tensor in zip(names, tensors):
        block._hold(name, tensor)
    return block.eval()


def test_a_frozen_block_trains_with_pytorch_only_if_allowed(machine: Machine) -> None:
    machine()
    stack, x = frozen_stack("natural"), torch.randn(2, 3, 256).bfloat16().requires_grad_()
    strict, allowed = frozen_block(stack), frozen_block(stack, fallback="torch")
    with torch.no_grad():
        by_kernel = strict(x)
    with refused(ConfigError, "backend", "fallback='torch'"):
        strict(x)
    with pytest.warns(NeuronMoEWarning, match="QuantizedSwiGLUMLP is computed by PyTorch"):
        by_torch = allowed(x)
    by_torch.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and deviation(by_kernel, by_torch.detach()) < 0.05


def test_the_operators_are_registered_by_the_plugin_that_is_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    plugin, names = sys.modules["torch_neuronx"], []
    nki_op = plugin.nki_op

    def recording(name: str, *arguments: Any, **options: Any) -> Any:
        names.append(name)
        return nki_op(name, *arguments, **options)

    monkeypatch.setattr(plugin, "nki_op", recording)
    resolve_backend("neuron", CPU)
    expected = {"frozen_bwd", "frozen_fwd", "mlp_bwd", "mlp_fwd", "moe_bwd", "moe_fwd"}
    assert len(names) == 6 and set(names) == {f"hf_neuron_moe::{name}" for name in expected}
    x, weights = rows()[0], dense()
    y = ops.swiglu_mlp(x.requires_grad_(), *weights, precision="mxfp8", backend="neuron")
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    monkeypatch.undo()
    resolve_backend("neuron", CPU)
    assert len(names) == 6, "the plugin's own nki_op again"


class Shapes:
    """Stands in for the launcher while a program is traced: only shapes come out of a kernel node."""

    lnc = 2

    def __call__(self, kernel: Any, /, **given: Any) -> tuple[Tensor, ...]:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16)

        if "hidden" in given:
            tokens, (hidden, inner) = len(given["hidden"]), given["down_weights"].shape
            kept = 3 if kernel.__name__ == "mlp_forward_keeping" else 1
            return empty(tokens, hidden), *(empty(tokens, inner) for _ in range(kept))
        if "output_grad" in given:
            return tuple(
                torch.empty_like(given[name]) for name in ("hidden_states", "gate_up_weights", "down_proj_weight")
            )
        names = ("hidden_states", "expert_affinities_masked", "gate_up_proj_weight", "down_proj_weight")
        if "output_hidden_states_grad" in given:
            return tuple(torch.empty_like(given[name]) for name in names)
        inner = given["gate_up_proj_weight"].numel() // (2 * E * given["hidden_states"].shape[1])
        checkpoint = empty(len(given["block_to_expert"]), 2, inner, given["block_size"])
        return torch.empty_like(given["hidden_states"]), checkpoint


@pytest.mark.parametrize(
    ("keep", "through"),
    [("recompute", lambda program: program), ("fp8", functionalize)],
    ids=["plain", "functionalized"],
)
@pytest.mark.slow
def test_the_operators_bodies_can_be_traced(machine: Machine, keep: str, through: Callable[..., Any]) -> None:
    """``nki_op`` traces into the body: no value may be read, nothing of the trace may be kept."""
    machine()
    kernels, (x, dout), weights, operands = any_platform(), rows(), dense(), experts(False)
    kernels.weights.clear()
    kernels._dense = replace(kernels._dense, launch=Shapes())
    kernels._experts = replace(kernels._experts, launch=Shapes())

    def trace(program: Callable[..., Any], *arguments: Tensor) -> None:
        graph = make_fx(through(program), tracing_mode="fake")(*arguments).graph
        reads = [node for node in graph.nodes if "_local_scalar_dense" in str(node.target)]
        assert not reads and kernels.prepared_bytes == 0

    trace(lambda *given: kernels.mlp_forward(*given, "mxfp8", keep), x, *weights)
    saved = kernels.fake_mlp_saved(x, I, keep)
    trace(
        lambda grad, own, *rest: kernels.mlp_backward(grad, own, *rest[:3], rest[3:], "mxfp8", keep, True, True),
        dout, x, *weights, *saved,
    )  # fmt: skip
    for precision in ("bf16", "mxfp8"):
        options = (False, precision, B, keep)
        trace(lambda *given, options=options: kernels.experts_forward(*given, *options), x, *operands)
        saved = kernels.fake_experts_saved(x, operands[0], *operands[2:], *options)
        trace(
            lambda grad, own, *rest, options=options: kernels.experts_backward(
                grad, own, *rest[:4], rest[4:], *options, True, True, True
            ),
            dout, x, *operands, *saved,
        )  # fmt: skip

"""Whatever is kept and whatever is made again: the same gradients, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.activation_policy import keep_strings
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.modules import ops
from tests.refusals import refused

PRECISIONS = ("fp32", "bf16", "mxfp8")
MATMULS = [("fp32", False), ("bf16", False), ("bf16", True), ("mxfp8", False)]
KINDS = ("mlp", "mlp, fused", "experts", "experts, transposed")


def bf16_matmuls(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """As on a CPU with bf16 instructions, or as on one without."""
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: native)


def make(kind: str, tokens: int, hidden: int, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Operands by name; the fused MLP's gate and up are halves of one parameter, as in the kernels' layout."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    if kind.startswith("mlp"):
        both, down = draw(2, inner, hidden, scale=hidden**-0.5), draw(hidden, inner, scale=inner**-0.5)
        x = draw(tokens, hidden)
        gate_up = {"gate_up": both} if "fused" in kind else {"g": both[0], "u": both[1]}
        return {"x": x, **gate_up, "down": down}
    index = torch.rand(tokens, 4, generator=generator).topk(2).indices
    weights = torch.rand(tokens, 2, generator=generator)
    gate_up, down = draw(4, 2 * inner, hidden, scale=hidden**-0.5), draw(4, hidden, inner, scale=inner**-0.5)
    if "transposed" in kind:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return {"x": draw(tokens, hidden), "index": index, "weights": weights, "gate_up": gate_up, "down": down}


def run(kind: str, operands: dict[str, Tensor], precision: str, keep: str, **options: Any) -> Tensor:
    if kind == "mlp":
        tensors = list(operands.values())
    elif kind == "mlp, fused":
        tensors = [operands["x"], *operands["gate_up"].unbind(0), operands["down"]]
    else:
        options |= {"transposed": "transposed" in kind, "block_size": 128}
        return ops.experts(*operands.values(), precision=precision, backend="torch", activations=keep, **options)
    return ops.swiglu_mlp(*tensors, precision=precision, backend="torch", activations=keep, **options)


def outcome(kind: str, operands: dict[str, Tensor], precision: str, keep: str, wanted: list[str]) -> list[Tensor]:
    """Output and the gradients of the operands `wanted`."""
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in operands.items()}
    y = run(kind, leaves, precision, keep)
    dout = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaves[name] for name in wanted], dout)]


@pytest.mark.sampled(3)
@pytest.mark.thinned(4, 4)
@pytest.mark.parametrize(("precision", "native"), MATMULS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(150, 64, 600), (9, 96, 2100)])
def test_every_lossless_policy_gives_the_same_bits(
    kind: str, precision: str, native: bool, tokens: int, hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes; two tiles of the intermediate axis with up cut in either; few rows and several blocks of rows."""
    bf16_matmuls(monkeypatch, native)
    operands = make(kind, tokens, hidden, inner, torch.bfloat16 if precision == "bf16" else torch.float32)
    floats = [name for name, tensor in operands.items() if tensor.is_floating_point()]
    expected = outcome(kind, operands, precision, "full", floats)
    for keep in sorted(keep_strings(precision) - {"fp8"}):
        actual = outcome(kind, operands, precision, keep, floats)
        for name, value, reference in zip(["y", *floats], actual, expected, strict=True):
            assert torch.equal(value, reference), (keep, name)
    assert torch.equal(outcome(kind, operands, precision, "fp8", floats)[0], expected[0])


@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["mlp", "mlp, fused", "experts"])
def test_also_with_some_parameters_frozen(kind: str, precision: str) -> None:
    operands = make(kind, 140, 128, 384, torch.float32)
    names = {"mlp": ["x", "g", "u", "down"], "mlp, fused": ["x", "gate_up", "down"]}
    floats = names.get(kind, ["x", "weights", "gate_up", "down"])
    for wanted in ([floats[0]], floats[1:2], floats[-1:], floats[:-1]):
        expected = outcome(kind, operands, precision, "full", wanted)
        for keep in ("minimal", "recompute", "gate_pre", "up"):
            actual = outcome(kind, operands, precision, keep, wanted)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), (wanted, keep)


@pytest.mark.parametrize("native", [False, True])
def test_an_axis_of_384_has_the_groups_of_the_forward(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense forward groups it otherwise than a backward does. Values over many binades show whose groups it was."""
    bf16_matmuls(monkeypatch, native)
    g = torch.Generator().manual_seed(3)

    def wide(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * torch.randint(-6, 7, shape, generator=g).float().exp2()

    operands = {"x": wide(40, 384), "g": wide(96, 384), "u": wide(96, 384), "down": wide(384, 96)}
    expected = outcome("mlp", operands, "mxfp8", "full", list(operands))
    for keep in ("recompute", "minimal"):
        actual = outcome("mlp", operands, "mxfp8", keep, list(operands))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), keep


@pytest.mark.parametrize(("precision", "native"), MATMULS)
@pytest.mark.parametrize("kind", ["mlp", "experts"])
def test_an_unrecorded_training_forward_equals_the_recorded_one(
    kind: str, precision: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for few rows, which inference multiplies in another order: a reentrant checkpoint's first pass is one."""
    bf16_matmuls(monkeypatch, native)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    operands = make(kind, 8, 256, 600, dtype)
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in operands.items()}
    recorded = run(kind, leaves, precision, "minimal")
    with torch.no_grad():
        assert torch.equal(run(kind, operands, precision, "minimal", training=True), recorded)


@pytest.mark.parametrize("kind", ["mlp", "experts"])
def test_an_input_that_is_a_view_is_kept_as_it_is_read(kind: str) -> None:
    """A strided input comes back from other memory with other strides; neither sums nor kept bytes may show it."""
    operands = make(kind, 40, 64, 600, torch.float32)
    wide = torch.cat([operands["x"].T, operands["x"].T + 1]).requires_grad_()  # [2H, S]
    results, sizes = [], []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor.clone(memory_format=torch.contiguous_format)

    for hooks in (lambda tensor: tensor, pack):
        with torch.autograd.graph.saved_tensors_hooks(hooks, lambda tensor: tensor):
            y = run(kind, {**operands, "x": wide[:64].T}, "fp32", "recompute")
        results += [y, *torch.autograd.grad(y.square().sum(), wide)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert wide.untyped_storage().nbytes() not in sizes and operands["x"].nbytes in sizes


@pytest.mark.parametrize("keep", ["gate_act", "intermediate", "gate_pre+gate_act+up"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_checkpoints_that_the_precision_does_not_have_are_refused(precision: str, keep: str) -> None:
    operands = {name: tensor.requires_grad_() for name, tensor in make("mlp", 4, 32, 32, torch.float32).items()}
    with refused(ConfigError, "activations", rf"that the {precision} kernels have .* got (gate_act|intermediate)"):
        run("mlp", operands, precision, keep)

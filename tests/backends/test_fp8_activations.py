"""What FP8 storage holds, and what the gradients are then."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch.gating import gating_of, mask_
from hf_neuron_moe.backends.torch.saved import GROUP, FP8Rows, fp8_storage
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.formats.group_fp8 import group_dequantize_fp8, group_quantize_fp8
from hf_neuron_moe.kernels import fp8_mul_backward, fp8_silu_backward, fp8_silu_forward
from hf_neuron_moe.modules import ops
from tests.refusals import refused


def relative(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def run(kind: str, tensors: tuple[Tensor, ...], precision: str, activations: str) -> Tensor:
    if kind == "mlp":
        return ops.swiglu_mlp(*tensors, precision=precision, backend="torch", activations=activations)
    options = {"transposed": False, "block_size": 128, "backend": "torch", "activations": activations}
    return ops.experts(*tensors, precision=precision, **options)


def make(kind: str, tokens: int, H: int, inner: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).requires_grad_()

    if kind == "mlp":
        return draw(tokens, H), *(draw(*s, scale=s[1] ** -0.5) for s in ((inner, H), (inner, H), (H, inner)))
    index = torch.rand(tokens, 4, generator=generator).topk(2).indices
    weights = torch.rand(tokens, 2, generator=generator).requires_grad_()
    return draw(tokens, H), index, weights, draw(4, 2 * inner, H, scale=H**-0.5), draw(4, H, inner, scale=inner**-0.5)


def grads(kind: str, tensors: tuple[Tensor, ...], precision: str, activations: str) -> tuple[Tensor, ...]:
    leaves = [t for t in tensors if t.requires_grad]
    out = run(kind, tensors, precision, activations)
    return torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("kind", ["mlp", "experts"])
@pytest.mark.parametrize("inner", [128, 600])
def test_fp8_is_near_lossless_gradients(kind: str, precision: str, inner: int) -> None:
    """e4m3 has 3 mantissa bits: an rms rounding error of 2.7 % (1.8 % averaged over a binade with groups) per factor;
    up to three quantized factors meet in a gradient, so 6 % bounds their root sum of squares."""
    tensors = make(kind, 200, 64, inner)
    for rough, exact in zip(
        grads(kind, tensors, precision, "fp8"), grads(kind, tensors, precision, "minimal"), strict=True
    ):
        assert 0 < relative(rough, exact) < 0.06


def test_fp8_backward_is_that_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's gradients are the composition of fp8_silu_forward, fp8_mul_backward and fp8_silu_backward."""
    # With bf16 instructions the product's gradient would come out of the matmul in bf16.
    monkeypatch.setattr("hf_neuron_moe.backends.torch.compute._cpu_bf16_matmul_is_fast", lambda: False)
    x, gate_w, up_w, down_w = (
        t.detach().to(torch.bfloat16).float().requires_grad_() for t in make("mlp", 64, 128, 256)
    )
    dout = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).float()
    out = run("mlp", (x, gate_w, up_w, down_w), "bf16", "fp8")
    got = torch.autograd.grad(out, (x, gate_w, up_w, down_w), dout)

    with torch.no_grad():
        gate, s_gate = group_quantize_fp8((x @ gate_w.T).to(torch.bfloat16), GROUP)
        up, s_up = group_quantize_fp8((x @ up_w.T).to(torch.bfloat16), GROUP)
        x8 = group_dequantize_fp8(*group_quantize_fp8(x.to(torch.bfloat16), GROUP)).to(torch.bfloat16).float()
        act, s_act = fp8_silu_forward(gate, s_gate, GROUP)
        g = dout @ down_w
        towards_act, (d_up, _) = fp8_mul_backward(act, s_act, up, s_up, g, GROUP, "E5M2")
        d_gate, _ = fp8_silu_backward(gate, s_gate, towards_act, GROUP, "E5M2")
        product = group_dequantize_fp8(act, s_act).mul_(group_dequantize_fp8(up, s_up)).to(torch.bfloat16).float()
        d_gate, d_up = d_gate.float(), d_up.float()
        expected = (d_gate @ gate_w + d_up @ up_w, d_gate.T @ x8, d_up.T @ x8, dout.T @ product)
    for name, value, reference in zip(("x", "gate", "up", "down"), got, expected, strict=True):
        # fp32 sums in another order and two spellings of the sigmoid: a few values on a bf16 tie go the other way.
        reference = reference.to(torch.bfloat16) if name == "x" else reference
        assert relative(value, reference) < 5e-5, name


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_fp8_rows_hold_what_the_format_gives(columns: int) -> None:
    values = torch.randn(7, columns)
    rows = FP8Rows(*fp8_storage(values, (7,), columns))
    rounded = rows.put(slice(None), slice(0, columns), values)
    assert torch.equal(rounded, values.to(torch.bfloat16))
    padded = F.pad(rounded, (0, -columns % GROUP))
    expected = group_dequantize_fp8(*group_quantize_fp8(padded, GROUP))[:, :columns]
    assert torch.equal(rows.take(slice(None), slice(0, columns)), expected)
    assert torch.equal(rows.rows(2, 5).take(slice(0, 3), slice(0, columns)), expected[2:5])


def test_unknown_policy_is_refused() -> None:
    with refused(ConfigError, "activations", "one of full, minimal, fp8, recompute", got="'fp9'"):
        run("mlp", make("mlp", 8, 32, 32), "bf16", "fp9")


LIMITS = [
    (7.0, None),
    (8.0, -6.0),
    (1.0, -1.0),
    (None, -2.0),
    (3.0, 0.0),
    (0.0, -3.0),
    (17.0, 3.0),
    (7.0063428146, None),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_what_was_beyond_a_limit_is_the_limit_and_nothing_else_is(limits: tuple[float | None, float | None]) -> None:
    """Every finite bf16 value, with neighbours and with values of all magnitudes in its group."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    mixed = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    for order in (every, mixed):
        values = order[: len(order) // 200 * 200].view(-1, 200)
        rows = FP8Rows(*fp8_storage(values, tuple(values.shape[:1]), 200), limits)
        assert torch.equal(rows.put(slice(None), slice(0, 200), values), values)
        taken = rows.take(slice(None), slice(0, 200))
        ones = torch.ones_like(taken)
        finite = taken.isfinite()  # the largest magnitudes have no finite scale
        assert finite.float().mean() > 0.7
        expected, found = (mask_(ones.clone(), each, limits)[finite] for each in (values.float(), taken))
        assert torch.equal(found, expected)
        clipped = values.float().clamp(limits[1], limits[0])
        assert torch.equal(taken[finite][expected == 0], clipped[finite][expected == 0])


@pytest.mark.parametrize("gate", [Gate(gate_max=1.0, up_max=1.0, up_min=-1.0), Gate(act_max=0.7)], ids=["exact", "odd"])
def test_no_value_of_fp32_changes_its_side_of_a_limit(gate: Gate) -> None:
    """Rounding to bf16 would move values next to a limit on it, or from a limit that bf16 does not have below it."""
    (limit, _), near = gating_of(gate).gate_limits, torch.linspace(-(2**-9), 2**-9, 64)
    biases = [(limit * (1 + near)).requires_grad_(), torch.full((64,), 0.5), torch.zeros(1)]
    nothing, down = torch.zeros(64, 1), torch.ones(1, 64)
    options = {"precision": "fp32", "backend": "torch", "gate": gate, "biases": tuple(biases), "training": True}
    found = []
    for keep in ("full", "fp8"):
        y = ops.swiglu_mlp(torch.zeros(1, 1), nothing, nothing, down, activations=keep, **options)
        found.append(torch.autograd.grad(y.sum(), biases[0])[0] != 0)
    assert torch.equal(*found) and 20 < found[0].sum() < 44


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_group_with_nan_has_no_limits(bad: float) -> None:
    values = torch.full((2, 128), 9.0)
    values[0, 3] = bad
    rows = FP8Rows(*fp8_storage(values, (2,), 128), (None, -7.0) if bad == torch.inf else (7.0, -7.0))
    rows.put(slice(None), slice(0, 128), values)
    taken = rows.take(slice(None), slice(0, 128))
    assert taken[0, :64].isnan().all() and taken[0, 64:].isfinite().all() and taken[1].isfinite().all()

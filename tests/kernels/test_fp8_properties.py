"""COAT's operators: the documented formulas on any shape, stochastic rounding by statistics, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_neuron_moe.errors import ConfigError, DTypeError, NeuronMoEError, ShapeError
from hf_neuron_moe.formats import group_dequantize_fp8, group_fp8, group_quantize_fp8
from hf_neuron_moe.kernels import (
    fp8_division_transpose,
    fp8_mul_backward,
    fp8_mul_forward,
    fp8_silu_backward,
    fp8_silu_forward,
)
from tests.refusals import refused

LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands(rows: int, columns: int, group: int, seed: int, fp8: str = "e4m3") -> Operands:
    generator = torch.Generator().manual_seed(seed)
    x1, x2, g = (torch.randn(rows, columns, generator=generator) for _ in range(3))
    (q1, s1), (q2, s2) = group_quantize_fp8(x1, group, fp8), group_quantize_fp8(x2 * 3, group, fp8)
    return q1, s1, q2, s2, (g * 0.01).to(torch.bfloat16)


def scale_of(values: torch.Tensor, group: int, fp8type: str) -> torch.Tensor:
    amax = values.unflatten(-1, (-1, group)).abs().amax(-1)
    return ((amax + 1e-10) / torch.tensor(LARGEST[fp8type])).to(torch.bfloat16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    group=st.sampled_from([1, 4, 8, 16, 24, 128]),
    fp8type=st.sampled_from(["E4M3", "E5M2"]),
    inputs=st.sampled_from(["e4m3", "e5m2"]),
    seed=st.integers(0, 999),
)
def test_product_formulas(rows: int, groups: int, group: int, fp8type: str, inputs: str, seed: int) -> None:
    q1, s1, q2, s2, g = operands(rows, groups * group, group, seed, inputs)
    v1, v2 = group_dequantize_fp8(q1, s1), group_dequantize_fp8(q2, s2)
    y1, (y2, s_y2) = fp8_mul_backward(q1, s1, q2, s2, g, group, fp8type)
    assert torch.equal(y1, (g.float() * v2).to(torch.bfloat16))
    assert torch.equal(y2, (g.float() * v1).to(torch.bfloat16))
    assert torch.equal(s_y2, scale_of(g.float() * v1, group, fp8type))
    again, (q, scale, transposed) = fp8_mul_backward(q1, s1, q2, s2, g, group, fp8type, output_quantized_transpose=True)
    assert torch.equal(again, y1)
    assert torch.equal(scale, s_y2.max())
    assert torch.equal(bits(q), bits((y2.float() / scale.float()).to(DTYPES[fp8type])))
    assert torch.equal(bits(transposed), bits(q.view(torch.uint8).t()))
    assert q.float().isfinite().all()

    fmt = "E4M3" if inputs == "e4m3" else "E5M2"
    product, scale, transposed = fp8_mul_forward(q1, s1, q2, s2, group)
    assert product.dtype == q1.dtype
    assert torch.equal(scale, scale_of(v1 * v2, group, fmt).max())
    expected = ((v1 * v2).to(torch.bfloat16).float() / scale.float()).to(q1.dtype)
    assert torch.equal(bits(product), bits(expected))
    assert torch.equal(bits(transposed), bits(product.view(torch.uint8).t()))


def test_gradients_are_those_of_float64_autograd() -> None:
    """Up to the one bf16 rounding of each output: half a unit in the last of 8 bits, 2**-8 of the value."""
    q1, s1, q2, s2, g = operands(33, 96, 16, 5)
    gate = group_dequantize_fp8(q1, s1).double().requires_grad_()
    up = group_dequantize_fp8(q2, s2).double().requires_grad_()
    (gate * up).backward(g.double())
    y1, (y2, _) = fp8_mul_backward(q1, s1, q2, s2, g, 16, "E5M2")
    assert gate.grad is not None
    assert up.grad is not None
    # The further 2**-22 are the fp32 roundings before.
    torch.testing.assert_close(y1.double(), gate.grad, rtol=2.0**-8 + 2.0**-22, atol=0)
    torch.testing.assert_close(y2.double(), up.grad, rtol=2.0**-8 + 2.0**-22, atol=0)
    gate.grad = None
    torch.nn.functional.silu(gate).backward(g.double())
    y, _ = fp8_silu_backward(q1, s1, g, 16, "E5M2")
    # SiLU's slope passes through zero near -1.28, where fp32 cancellation leaves an absolute error.
    torch.testing.assert_close(y.double(), gate.grad, rtol=2.0**-8 + 2.0**-20, atol=2.0**-22 * float(g.abs().max()))


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_silu_forward_divides_by_the_unrounded_scale(fp8: str) -> None:
    q1, s1, *_ = operands(17, 64, 16, 3, fp8)
    value = group_dequantize_fp8(q1, s1)
    silu = 1 / (1 + torch.exp(-value)) * value
    scale = ((silu.unflatten(-1, (4, 16)).abs().amax(-1) + 1e-10) / torch.tensor(LARGEST[fp8.upper()])).unsqueeze(-1)
    codes, scales = fp8_silu_forward(q1, s1, 16)
    assert torch.equal(scales, scale.squeeze(-1).to(torch.bfloat16))
    assert torch.equal(bits(codes), bits((silu.unflatten(-1, (4, 16)) / scale).flatten(1).to(q1.dtype)))
    _, scales32 = fp8_silu_forward(q1, s1.float(), 16)
    assert torch.equal(scales32, scale.squeeze(-1))


def test_zero_groups_stay_finite() -> None:
    zeros = torch.zeros(4, 32)
    q, s = group_quantize_fp8(zeros)
    y1, (codes, scale, transposed) = fp8_mul_backward(
        q, s, q, s, zeros.to(torch.bfloat16), 16, "E5M2", output_quantized_transpose=True
    )
    assert not y1.any()
    assert torch.equal(scale, torch.tensor(1e-10 / 57344).to(torch.bfloat16))
    assert not bits(codes).any()
    assert not bits(transposed).any()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: tuple[Any, ...] = (*operands(37, 64, 16, 1), 16, "E4M3")
    whole = fp8_mul_backward(*arguments, output_quantized_transpose=True)
    silu = fp8_silu_forward(*arguments[:2], 16)
    monkeypatch.setattr(group_fp8, "CPU_CHUNK", 5 * 64)
    parts = fp8_mul_backward(*arguments, output_quantized_transpose=True)
    assert torch.equal(whole[0], parts[0])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(whole[1], parts[1]))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(silu, fp8_silu_forward(*arguments[:2], 16)))


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest fp32 tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("stochastic", [False, True])
def test_no_fp32_temporary_of_the_whole_tensor(stochastic: bool) -> None:
    q1, s1, q2, s2, g = operands(640, 1024, 16, 0)
    with LargestFloat32() as largest:
        fp8_mul_backward(q1, s1, q2, s2, g, 16, "E5M2", stochastic, True)
        fp8_mul_forward(q1, s1, q2, s2, 16)
        fp8_silu_forward(q1, s1, 16)
        fp8_silu_backward(q1, s1, g, 16, "E5M2", stochastic, True)
        fp8_division_transpose(g, 16, "E4M3", stochastic=stochastic)
        group_quantize_fp8(g, stochastic=stochastic)
        group_dequantize_fp8(q1, s1, torch.bfloat16)
    assert 0 < largest.elements <= group_fp8.CPU_CHUNK < g.numel()


def test_strided_operands_and_nothing_is_modified() -> None:
    q1, s1, q2, s2, g = operands(12, 64, 16, 2)
    expected, _ = fp8_mul_backward(q1, s1, q2, s2, g, 16, "E4M3")
    wide = torch.zeros(12, 130, dtype=torch.bfloat16)
    wide[:, 1:129:2] = g
    before = [tensor.clone() for tensor in (q1, s1, q2, s2, wide)]
    columns = q1.view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    got, _ = fp8_mul_backward(columns, s1, q2, s2, wide[:, 1:129:2], 16, "E4M3")
    assert torch.equal(got, expected)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, (q1, s1, q2, s2, wide)))


@pytest.mark.parametrize("fp8type", ["E4M3", "E5M2"])
@pytest.mark.parametrize("value", [0.0, 1e-6, 6e-8, 1.0, 60000.0])
def test_scales_of_fp16_values_do_not_underflow(value: float, fp8type: str) -> None:
    """(amax + 1e-10) / 57344 is below fp16's smallest number for any amax below 0.0017: the scale is fp32."""
    x = torch.full((2, 32), value, dtype=torch.float16)
    codes, scale, transposed = fp8_division_transpose(x, 16, fp8type)
    assert scale.dtype == torch.float32
    assert torch.equal(scale, (x.float().max() + 1e-10) / torch.tensor(LARGEST[fp8type]))
    expected = (x.float() / scale).to(DTYPES[fp8type])
    assert torch.equal(bits(codes), bits(expected))
    assert torch.equal(bits(transposed), bits(expected).t())
    # 448 of 448 or 1e-6 / (1e-6 + 1e-10) of it: at most half a step of the format away.
    assert float((codes.float() * scale - value).abs().max()) <= value / 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_division_without_a_scale(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 32).to(dtype)
    codes, scale, transposed = fp8_division_transpose(x, 16, "E4M3")
    amax = x.abs().max()
    assert torch.equal(scale, (amax + 1e-10) / 448.0)
    assert scale.dtype == dtype
    assert torch.equal(bits(codes), bits((x.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)))
    assert transposed.shape == (32, 10)
    assert torch.equal(bits(transposed), bits(codes.view(torch.uint8).view(10, 32).t()))
    only, same_scale = fp8_division_transpose(x, 16, "E4M3", only_transposed=True)
    assert torch.equal(bits(only), bits(transposed))
    assert torch.equal(same_scale, scale)


def test_division_saturates_and_keeps_nan() -> None:
    x = torch.tensor([[1e6, -1e6, float("inf"), float("nan")]])
    for fp8type, largest in LARGEST.items():
        codes, _, _ = fp8_division_transpose(x, 1, fp8type, torch.ones(()))
        assert codes[0, :3].float().tolist() == [largest, -largest, largest]
        assert codes[0, 3].float().isnan()


def grid(fp8type: str) -> torch.Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[fp8type]).float()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("fp8type", ["E4M3", "E5M2"])
def test_stochastic_rounding_never_moves_values_on_the_grid(fp8type: str) -> None:
    values = grid(fp8type).repeat(2000, 1)
    codes, _, _ = fp8_division_transpose(values, 1, fp8type, torch.ones(()), stochastic=True)
    assert torch.equal(codes.float(), values)


@pytest.mark.parametrize("fp8type", ["E4M3", "E5M2"])
def test_stochastic_rounding_is_unbiased(fp8type: str) -> None:
    """Every value goes to one of its two neighbours, and the share that goes up is its place between them."""
    table = grid(fp8type).double()
    fraction = torch.tensor([0.05, 0.25, 0.5, 0.8]).double()
    low, high = table[:-1, None], table[1:, None]
    values = (low + (high - low) * fraction).flatten().float()
    trials = 4000
    codes, _, _ = fp8_division_transpose(
        values.repeat(trials, 1), 1, fp8type, torch.ones(()), True, generator=torch.Generator().manual_seed(3)
    )
    got = codes.double().view(trials, -1, 4)
    assert ((got == low) | (got == high)).all()
    share = (got == high).double().mean(dim=0)
    # The values are stored in fp32, so their place between the neighbours is `fraction` up to 2**-19.
    deviation = (share - fraction) / (fraction * (1 - fraction) / trials).sqrt()
    assert float(deviation.abs().max()) < 5.0  # about 1,000 binomial shares: beyond 5 sigma one time in 2,000
    # Together: the mean of n independent standard deviations is itself normal with 1/sqrt(n).
    assert abs(float(deviation.mean())) < 4.0 / deviation.numel() ** 0.5


def test_stochastic_backward_is_unbiased_and_follows_its_generator() -> None:
    arguments: tuple[Any, ...] = (*operands(16, 64, 16, 4), 16, "E5M2")
    y1, (y2, _) = fp8_mul_backward(*arguments)
    _, (nearest, scale, _) = fp8_mul_backward(*arguments, output_quantized_transpose=True)
    generator, draws = torch.Generator().manual_seed(1), []
    for _ in range(400):
        same_y1, (q, s, transposed) = fp8_mul_backward(*arguments, True, True, generator=generator)
        assert torch.equal(same_y1, y1)
        assert torch.equal(s, scale)
        assert torch.equal(bits(transposed), bits(q.view(torch.uint8).t()))
        draws.append(q.double())
    exact = y2.double() / scale.double()
    mean_error = torch.stack(draws).mean(0) - exact
    bias = float(mean_error.mul(exact).sum() / exact.square().sum())
    assert abs(bias) < 1e-3  # e5m2 steps are up to 1/4: the mean of 400 x 1024 draws has sigma below 2e-4
    assert float(mean_error.norm()) < 0.2 * float((nearest.double() - exact).norm())
    first = fp8_mul_backward(*arguments, True, True, generator=torch.Generator().manual_seed(7))
    second = fp8_mul_backward(*arguments, True, True, generator=torch.Generator().manual_seed(7))
    assert torch.equal(bits(first[1][0]), bits(second[1][0]))
    assert not torch.equal(bits(first[1][0]), bits(draws[0].to(torch.float8_e5m2)))
    silu = fp8_silu_backward(*arguments[:2], arguments[4], 16, "E5M2", True, True, generator=generator)
    again = fp8_silu_backward(*arguments[:2], arguments[4], 16, "E5M2", True, True, generator=generator)
    assert not torch.equal(bits(silu[0]), bits(again[0]))


@pytest.mark.parametrize(
    ("change", "error", "argument", "says"),
    [
        ({"fp8type": "E4M4"}, ConfigError, "fp8type", "Did you mean 'E4M3'"),
        ({"fp8type": torch.float16}, ConfigError, "fp8type", r"got torch\.float16"),
        ({"QB": 0}, ConfigError, "QB", ""),
        ({"QB": 24}, ShapeError, "QB", ""),
        ({"s_x1": torch.ones(4, 2)}, ShapeError, "s_x1", ""),
        ({"s_x2": torch.ones(1, 4, 4)}, ShapeError, "s_x2", ""),
        ({"s_x1": torch.ones(4, 4, dtype=torch.uint8)}, DTypeError, "s_x1", r"got uint8"),
        ({"x1": torch.ones(4, 64)}, DTypeError, "x1", ""),
        ({"x2": torch.ones(5, 64).to(torch.float8_e4m3fn), "s_x2": torch.ones(5, 4)}, ShapeError, "x2", ""),
        ({"g": torch.ones(4, 32)}, ShapeError, "g", ""),
        ({"g": torch.ones(4, 64, dtype=torch.float64)}, DTypeError, "g", ""),
        ({"stochastic": True}, ConfigError, "stochastic", "got True"),
        ({"stochastic": 1}, ConfigError, "stochastic", "got 1"),
        ({"output_quantized_transpose": "yes"}, ConfigError, "output_quantized_transpose", ""),
        ({"generator": 3}, ConfigError, "generator", "got int"),
        ({"s_x1": torch.ones(4, 4, dtype=torch.float16)}, DTypeError, "s_x1", r"got torch\.float16"),
    ],
)
def test_refusals_of_the_backward(
    change: dict[str, Any], error: type[NeuronMoEError], argument: str, says: str
) -> None:
    q1, s1, q2, s2, g = operands(4, 64, 16, 0)
    arguments: dict[str, Any] = {"x1": q1, "s_x1": s1, "x2": q2, "s_x2": s2, "g": g, "QB": 16, "fp8type": "E5M2"}
    with refused(error, argument, says, where="fp8_mul_backward"):
        fp8_mul_backward(**{**arguments, **change})


def test_refusals_of_the_others() -> None:
    q1, s1, q2, s2, g = operands(4, 64, 16, 0)
    with refused(ConfigError, "transpose_output_2d", got="False"):
        fp8_mul_forward(q1.view(2, 2, 64), s1.view(2, 2, 4), q2.view(2, 2, 64), s2.view(2, 2, 4), 16)
    with refused(DTypeError, "x2"):
        fp8_mul_forward(q1, s1, q2.float().to(torch.float8_e5m2), s2, 16)
    with refused(ShapeError, "s_x"):
        fp8_silu_forward(q1, s1[:, :2], 16)
    with refused(ConfigError, "stochastic", got="True"):
        fp8_silu_backward(q1, s1, g, 16, "E5M2", stochastic=True)
    with refused(ShapeError, "g", got="[2, 64]"):
        fp8_silu_backward(q1, s1, g[:2], 16, "E5M2")
    with refused(ShapeError, "x", got="[1, 1, 4, 64]"):
        fp8_division_transpose(g.view(1, 1, 4, 64), 16, "E5M2")
    with refused(ShapeError, "s_y"):
        fp8_division_transpose(g, 16, "E5M2", s1)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with refused(ConfigError, "s_y", got=f"{bad}"):
            fp8_division_transpose(g, 16, "E5M2", torch.tensor([bad]))
    half = s1.to(torch.float16)
    for argument, call in (
        ("s_y", lambda: fp8_division_transpose(g, 16, "E5M2", half.max())),
        ("s_x1", lambda: fp8_mul_forward(q1, half, q2, half, 16)),
        ("s_x", lambda: fp8_silu_forward(q1, half, 16)),
        ("s_x", lambda: fp8_silu_backward(q1, half, g, 16, "E5M2")),
    ):
        with refused(DTypeError, argument, "is 0 in fp16"):
            call()
    with refused(ConfigError, "transpose_output_2d", got="1", where="fp8_mul_forward"):
        fp8_mul_forward(q1, s1, q2, s2, 16, 1)  # type: ignore[arg-type]
    with refused(ConfigError, "only_transposed"):
        fp8_division_transpose(g, 16, "E5M2", only_transposed=None)  # type: ignore[arg-type]
    with refused(ConfigError, "stochastic", got="a Tensor"):
        fp8_silu_backward(q1, s1, g, 16, "E5M2", stochastic=torch.tensor(True))  # type: ignore[arg-type]
    with refused(ShapeError, "QB", got="QB 48 for N 64"):
        fp8_division_transpose(g, 48, "E5M2")

"""The Triton epilogues compute every gate as ``backends/torch`` does.

Saved bytes are equal. Exponentials of different libraries differ in the last bits of fp32, so a result rounded to bf16
is one unit off where such a difference lies across a boundary: at most ``2**-8`` of the value, and in few places.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
from hf_neuron_moe.backends.torch.gating import Gating, gating_of
from hf_neuron_moe.backends.torch.saved import FP8Gating, FP8Rows, fp8_storage
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad
from hf_neuron_moe.backends.triton import gate_functions
from hf_neuron_moe.backends.triton.gate_epilogue import gate_backward, gate_forward
from hf_neuron_moe.errors import ConfigError, DTypeError

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
R, I = 19, 100  # noqa: E741
TILES = {"TILE_R": 16, "TILE_C": 64}
GATES = {
    "silu": SWIGLU,
    "gpt-oss": Gate("swish", 1.702, gate_max=1.5, up_max=1.5, up_min=-1.5, up_offset=1.0),
    "gelu": Gate("gelu", gate_min=-1.0),
    "gelu_tanh": Gate("gelu_tanh", act_max=1.0),
    "squared_relu": Gate("squared_relu"),
    "softcaps": Gate(gate_softcap=2.0, up_softcap=1.5),
    "no gate, squared_relu": Gate("squared_relu", gated=False),
    "no gate, gelu": Gate("gelu", gated=False),
}


def gate_and_up(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate and up, interleaved, of all magnitudes that matter, and a factor per row."""
    generator = torch.Generator().manual_seed(0)
    both = 3 * torch.randn(R, 2 * I, generator=generator)
    both[0], both[1], both[2] = 0.0, both[1] * 30, 2.5  # 2.5: on a limit of gpt-oss here
    both = both.to(dtype)
    return both[:, ::2], both[:, 1::2], torch.rand(R, generator=generator)


def few(name: str) -> float:
    """Return which share may be one unit off. GELU of far negative values is a difference, which cancels."""
    return 0.06 if name == "no gate, gelu" else 0.02


def nearly_equal(ours: Tensor, expected: Tensor, rounding: float = 2.0**-8, share: float = 0.02) -> bool:
    """Whether values are equal but for a `share` of them, which are within one `rounding`."""
    ours, expected = ours.double(), expected.double()
    difference = (ours - expected).abs()
    close = difference <= rounding * expected.abs() + 1e-6 * expected.abs().max()
    return bool(close.all()) and float((difference > 0).double().mean()) <= share


@pytest.mark.sampled(3)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("rounding", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", GATES)
def test_forward(name: str, rounding: str) -> None:
    gate = GATES[name]
    g, u, scale = gate_and_up(torch.float32)
    kept = [torch.zeros(R, I, dtype=torch.bfloat16) for _ in range(4)]
    saved = Checkpoints(kept[0], kept[1][:, :70], kept[2], kept[3]) if gate.gated else Checkpoints(None, kept[1])
    ours = gate_forward(g if gate.gated else None, u, gate, rounding=rounding, scale_R=scale, saved=saved, tiles=TILES)
    gating = gating_of(gate)
    rounded_g, rounded_u = g.bfloat16().float(), u.bfloat16().float()
    reads = (rounded_g, rounded_u) if rounding == "bf16" else (g, u)
    expected = gating.intermediate_(*(part.double().contiguous() for part in reads)).mul_(scale[:, None])
    assert nearly_equal(ours[:, :I], expected.bfloat16(), share=few(name))
    assert ours.shape == (R, I if rounding == "bf16" else 128) and not ours[:, I:].any()
    columns = 70 if gate.gated else I
    assert torch.equal(kept[1][:, :columns], u.bfloat16()[:, :columns]) and not kept[1][:, columns:].any()
    if gate.gated:
        assert torch.equal(kept[0], g.bfloat16())
        act = gating.activation(rounded_g.double(), torch.empty(R, I, dtype=torch.float64)).bfloat16()
        assert nearly_equal(kept[2], act)
        # Of the kept activation, so that only what it is multiplied by is compared.
        assert nearly_equal(kept[3], (kept[2].float() * gating.up_value(rounded_u)).bfloat16())


def rows_in_fp8(values: Tensor, limits: tuple[float | None, float | None]) -> FP8Rows:
    rows = FP8Rows(torch.zeros(R, I, dtype=torch.uint8), torch.zeros(R, 2, dtype=torch.bfloat16), limits)
    rows.put(slice(0, R), slice(0, I), values)
    return rows


@pytest.mark.parametrize("name", ["silu", "gpt-oss", "gelu"])
def test_fp8_groups_have_the_bytes_of_the_torch_backend(name: str) -> None:
    g, u, _ = gate_and_up(torch.float32)
    g[2, 3], g[3, 70], g[4] = float("inf"), float("nan"), 1e-38
    u[5, 1], u[6] = float("-inf"), 1e-12
    g[7] = torch.linspace(-1.6, 1.6, I)
    gating = gating_of(GATES[name])
    saved = Checkpoints(
        *(FP8Rows(*fp8_storage(u, (R,), I), limits) for limits in (gating.gate_limits, gating.up_limits))
    )
    gate_forward(g, u, GATES[name], saved=saved, tiles=TILES)
    for kept, values, limits in ((saved.gate, g, gating.gate_limits), (saved.up, u, gating.up_limits)):
        expected = rows_in_fp8(values, limits)
        assert isinstance(kept, FP8Rows)
        unusable = expected.scales.isnan()
        assert torch.equal(kept.scales.isnan(), unusable)
        assert torch.equal(kept.scales[~unusable], expected.scales[~unusable])
        # A quotient by NaN has the sign that the processor gives it.
        any_sign = torch.where(unusable.repeat_interleave(64, 1)[:, :I], 0x7F, 0xFF).to(torch.uint8)
        assert torch.equal(kept.codes & any_sign, expected.codes & any_sign)


def backward_of_torch(
    gating: Gating, g: Tensor, u: Tensor, d_int: Tensor, rounding: str, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return d_gate, d_up and the intermediate, made in fp64, and the gradient of the factor."""
    results, d_scale = torch.empty(3, R, I, dtype=torch.float64), torch.zeros(R, dtype=torch.float64)

    def round_(values: Tensor) -> Tensor:
        return values.copy_(values.bfloat16())

    math = SwiGLUGrad(gating, rounding == "mxfp8", round_)
    parts = (part.double().contiguous() for part in (d_int.clone(), g, u, torch.empty(R, I)))
    math.fill(results, *parts, scale_R1=scale[:, None].double(), d_scale_R=d_scale)
    return results, d_scale


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rounding", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", GATES)
def test_backward(name: str, rounding: str) -> None:
    gate = GATES[name]
    (g, u, scale), d_int = gate_and_up(), torch.randn(R, I, generator=torch.Generator().manual_seed(1))
    # fp32 results are compared before their last rounding.
    both = torch.full((R, 2, 128), 9.0)
    into = (both[:, 0] if gate.gated else None, both[:, 1])
    saved = Checkpoints(g if gate.gated else None, u)
    inter, d_scale = gate_backward(d_int, saved, gate, into, rounding=rounding, scale_R=scale, tiles=TILES)
    results, d_scale_expected = backward_of_torch(gating_of(gate), g, u, d_int, rounding, scale)
    assert d_scale is not None
    # In mxfp8 factors of the results were rounded before: up to three roundings one unit off.
    unit, share = (2e-5, 1.0) if rounding == "bf16" else (3 * 2.0**-8, 1.0)
    for ours, expected in zip(both.unbind(1)[0 if gate.gated else 1 :], results[0 if gate.gated else 1 : 2]):
        assert nearly_equal(ours[:, :I], expected, unit, share)
        assert not ours[:, I:].any()
        exact = (ours[:, :I] - expected).abs() <= 2e-5 * expected.abs() + 1e-6 * expected.abs().max()
        assert float(exact.double().mean()) >= 0.97
    assert nearly_equal(inter[:, :I], results[2].bfloat16(), share=few(name)) and not inter[:, I:].any()
    size = (d_int.abs() * results[2].abs() / scale[:, None]).sum(1)  # what the sum over a row is made of
    assert bool(((d_scale - d_scale_expected).abs() <= (2e-5 if rounding == "bf16" else 2e-3) * size + 1e-30).all())


def test_backward_with_saved_products_and_without_factors() -> None:
    (g, u, _), d_int = gate_and_up(), torch.randn(R, I)
    act, product = (torch.randn(R, I).bfloat16() for _ in range(2))
    into = (torch.empty(R, I), torch.empty(R, I))
    inter, d_scale = gate_backward(d_int, Checkpoints(g, u, act, product), SWIGLU, into, rounding="mxfp8", tiles=TILES)
    assert d_scale is None and torch.equal(inter, product)
    assert torch.equal(into[1], act.float() * d_int)


@pytest.mark.parametrize("name", ["silu", "gpt-oss", "gelu"])
def test_backward_of_what_was_saved_in_fp8(name: str) -> None:
    """A group with a NaN or an infinity has no usable scale, so its values on a limit are NaN as well."""
    gate, gating = GATES[name], gating_of(GATES[name])
    (g, u, scale), d_int = gate_and_up(torch.float32), torch.randn(R, I)
    g[2, 3], u[3, 70], g[5, 3] = float("nan"), float("inf"), float("inf")
    rows = rows_in_fp8(g, gating.gate_limits), rows_in_fp8(u, gating.up_limits)
    taken = tuple(part.take(slice(0, R), slice(0, I)) for part in rows)
    from_codes, from_values = (torch.empty(2, R, I, dtype=torch.bfloat16) for _ in range(2))
    options = {"rounding": "fp8", "scale_R": scale, "tiles": TILES}
    inter, _ = gate_backward(d_int, Checkpoints(*rows), gate, tuple(from_codes), **options)
    inter_of_values, _ = gate_backward(d_int, Checkpoints(*taken), gate, tuple(from_values), **options)
    for ours, expected in ((from_codes, from_values), (inter, inter_of_values)):
        assert torch.equal(ours.nan_to_num(nan=3e38), expected.nan_to_num(nan=3e38))
    usable = ~(taken[0].isnan() | taken[1].isnan())
    fp8 = FP8Gating(*(getattr(gating, field) for field in Gating.__dataclass_fields__ if field != "rounds_itself"))
    results, _ = backward_of_torch(fp8, *taken, d_int, "bf16", scale)
    # A code that is one off, as an activation lies across a boundary, is an eighth off.
    for ours, expected in ((from_codes[0], results[0]), (from_codes[1], results[1]), (inter, results[2])):
        rounded = torch.where(usable, expected, 0).bfloat16()
        assert nearly_equal(torch.where(usable, ours, 0), rounded, 0.126)


@triton.jit
def softcapped(x_N, out_N, N: tl.constexpr):  # type: ignore[no-untyped-def] # Triton's tensors are no Python type
    place = tl.arange(0, N)
    tl.store(out_N + place, gate_functions.up_value(tl.load(x_N + place), (None, None), 1.0))


def test_a_softcap_is_exact_near_zero() -> None:
    """Two units of the last place: what a difference of exponentials loses, and the last term of a series is more."""
    x_N = torch.linspace(-0.2499, 0.2499, 512)
    out_N = torch.empty_like(x_N)
    softcapped[(1,)](x_N, out_N, 512)
    assert torch.allclose(out_N.double(), x_N.double().tanh(), rtol=2e-7, atol=0)


def test_errors() -> None:
    g, u, _ = gate_and_up()
    with pytest.raises(DTypeError):
        gate_forward(g.half(), u, SWIGLU)
    with pytest.raises(ConfigError):
        gate_forward(g, u, SWIGLU, rounding="fp8")
    with pytest.raises(ConfigError):
        gate_backward(u.float(), Checkpoints(g, u), SWIGLU, (None, u), rounding="fp16")
    assert gate_forward(g[:0], u[:0], SWIGLU).shape == (0, I)

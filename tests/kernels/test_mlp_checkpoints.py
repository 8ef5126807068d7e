"""The MXFP8 MLP backward's recompute, clamps, phases and scratch buffers against a readable float64 oracle.

Tolerance where the oracle is float64: quantized operands are the same bits, so results agree to fp32 summation order
before one bf16 rounding, whose relative error is 1.7e-3 on average (hence the Frobenius bound of 2e-3). At most one
element in 500 rounds the other way: the right arithmetic reaches one in 2,000, a wrong grouping of the operands one in
250 or more where magnitudes are spread over 2^-12 to 2^2.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_neuron_moe.kernels import (
    ClampLimits,
    TensorDescriptor,
    compute_fused_gate_up_down_mxfp8,
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8_2_30,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
    get_program_sharding_info,
    mlp_backward_mxfp8,
    mlp_backward_mxfp8_nki_2_30,
    mlp_forward_mxfp8,
    recompute_gate_act,
    recompute_gate_up_projection,
    recompute_hidden,
    recompute_intermediate,
)

sys.path.insert(0, str(Path(__file__).parent))
import mlp_oracle

NAMES = ("gate_pre", "gate_act", "up", "intermediate")
KEPT = [
    tuple(itertools.compress(NAMES, chosen))
    for chosen in itertools.product([False, True], repeat=4)
]  # fmt: skip
LIMITS = [(0.05, -0.05), (7.0, None), (None, -0.3), (0.7, -0.7)]
BF16 = torch.bfloat16


def flipped(actual: Tensor, expected: Tensor) -> float:
    """Share of the elements that are not the rounded expectation."""
    return float((actual != expected.to(BF16)).double().mean())


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual.double() - expected).norm() <= 2e-3 * expected.norm()
    assert flipped(actual, expected) <= 2e-3


def problem(tokens: int, hidden: int, inner: int, spread: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Operands, and the checkpoints that the forward saves; `spread` multiplies elements by 2^-spread to 2^2."""
    torch.manual_seed(tokens + hidden + inner)

    def values(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        factor = torch.exp2(torch.randint(-spread, 3, (rows, columns)).float()) if spread else 1.0
        return (torch.randn(rows, columns) * scale * factor).to(BF16)

    operands = {
        "output_grad": values(tokens, hidden),
        "hidden_states": values(tokens, hidden),
        "gate_up_weights": values(2 * inner, hidden, hidden**-0.5),
        "down_proj_weight": values(hidden, inner, inner**-0.5),
    }
    saved = mlp_forward_mxfp8(
        operands["hidden_states"], operands["gate_up_weights"], operands["down_proj_weight"],
        save_gate_pre=True, save_gate_act=True, save_up=True, save_hidden=True,
    )  # fmt: skip
    assert saved.gate_pre is not None and saved.gate_act is not None
    assert saved.up is not None and saved.hidden is not None
    return operands, {
        "gate_pre": saved.gate_pre, "gate_act": saved.gate_act, "up": saved.up, "intermediate": saved.hidden,
    }  # fmt: skip


def contiguous_T(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()


def old_call(operands: dict[str, Tensor], intermediate: Tensor, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    """Call release 2.30 with NaN-filled scratch; return the gradients and the scratch."""
    tokens, inner = intermediate.shape
    names = ("d_gate", "d_up", "gate_pre", "gate_act", "up", "hidden")
    scratch = {f"{name}_scratch": torch.full((tokens, inner), float("nan"), dtype=BF16) for name in names}
    scratch["silu_up_mul_gate_grad_T_scratch"] = torch.full((2 * inner, tokens), float("nan"), dtype=BF16)
    gate_up, down = operands["gate_up_weights"], operands["down_proj_weight"]
    result = mlp_backward_mxfp8_nki_2_30(
        output_hidden_states_grad=operands["output_grad"],
        hidden_states=operands["hidden_states"],
        gate_proj_weight_T=contiguous_T(gate_up[:inner]),
        up_proj_weight_T=contiguous_T(gate_up[inner:]),
        down_proj_weight_T=contiguous_T(down),
        gate_up_weights=gate_up,
        hidden_states_T=contiguous_T(operands["hidden_states"]),
        output_grad_T=contiguous_T(operands["output_grad"]),
        hidden_T=contiguous_T(intermediate),
        **scratch,
        **more,
    )
    return result, scratch


AT_384 = (NAMES, ("gate_pre", "up"), ())
"""What is kept in the fast run at the second shape, whose claim is the grouping of 384; other combinations are slow."""
COMBINATIONS = [
    pytest.param(sizes, kept, id=f"{sizes[0]}-{'+'.join(kept) or 'none'}", marks=marks)
    for sizes in ((128, 256, 640), (384, 384, 384))
    for kept in KEPT
    for marks in [() if sizes[0] == 128 or kept in AT_384 else pytest.mark.slow]
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("sizes", "kept"), COMBINATIONS)
def test_all_checkpoint_combinations(sizes: tuple[int, int, int], kept: tuple[str, ...]) -> None:
    operands, saved = problem(*sizes, spread=12)
    chosen = {name: saved[name] for name in kept}
    x, gate_up = operands["hidden_states"], operands["gate_up_weights"]
    for release in ("2.31", "2.30"):
        found = mlp_oracle.complete(chosen, x, gate_up, lone=release == "2.30")
        expected = mlp_oracle.backward(*operands.values(), found, release=release)
        result = mlp_backward_mxfp8(**operands, **chosen, release=release)
        for actual, wanted in zip(result, expected, strict=True):
            assert actual.dtype == BF16
            assert_close(actual, wanted)
        other = "2.30" if release == "2.31" else "2.31"
        wrong = mlp_oracle.backward(*operands.values(), found, release=other, lone=release == "2.30")
        assert flipped(result.hidden_states_grad, wrong[0]) > 3.5e-3, "the test sees phase 2 of the other release"
        if sizes[0] == 384:
            regrouped = mlp_oracle.backward(*operands.values(), found, release=release, lone=release != "2.30")
            for actual, wanted in zip(result, regrouped, strict=True):
                assert flipped(actual, wanted) > 3.5e-3, "the test sees the other grouping of 384"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kept", [NAMES, ("gate_pre", "up"), ()])
@pytest.mark.parametrize("limits", LIMITS)
def test_clamp_limits(kept: tuple[str, ...], limits: tuple[float | None, float | None]) -> None:
    operands, saved = problem(128, 256, 640)
    up_limits, gate_limits = limits, tuple(None if value is None else value / 2 for value in limits)
    bounds = {"gate_limits": gate_limits, "up_limits": up_limits}
    # A caller that clamps in the forward keeps clamped checkpoints.
    saved["gate_pre"] = mlp_oracle.clamp(saved["gate_pre"].float(), gate_limits).to(BF16)
    saved["up"] = mlp_oracle.clamp(saved["up"].float(), up_limits).to(BF16)
    chosen = {name: saved[name] for name in kept}
    found = mlp_oracle.complete(chosen, operands["hidden_states"], operands["gate_up_weights"], **bounds)
    expected = mlp_oracle.backward(*operands.values(), found, **bounds)
    result = mlp_backward_mxfp8(**operands, **chosen, clamp_limits=ClampLimits(*up_limits, *gate_limits))
    for actual, wanted in zip(result, expected, strict=True):
        assert_close(actual, wanted)
    free = mlp_backward_mxfp8(**operands, **chosen)
    # Values clamped to bf16(0.7) and bf16(0.35) lie inside the limits: kept checkpoints are then not masked at all.
    matters = not kept or limits != (0.7, -0.7)
    assert torch.equal(result.gate_up_weight_grad, free.gate_up_weight_grad) is not matters


@pytest.mark.parametrize(("limit", "zeroed"), [(0.05, True), (0.7, False), (7.0, True)])
def test_a_saturated_value_is_compared_as_bf16_with_the_exact_limit(limit: float, zeroed: bool) -> None:
    """bf16(0.7) = 0.69921875 lies inside the limit of 0.7, so its gradient stays; bf16(0.05) does not, nor does 7."""
    saturated = torch.full((128, 128), limit, dtype=BF16)
    d_gate_up, scratch_T = torch.empty(128, 256, dtype=BF16), torch.empty(256, 128, dtype=BF16)
    compute_phase1_down_proj_mm_grad_mxfp8(
        TensorDescriptor(torch.ones(128, 128, dtype=BF16)),
        *(TensorDescriptor(saturated) for _ in range(3)),
        TensorDescriptor(d_gate_up),
        TensorDescriptor(scratch_T),
        TensorDescriptor(torch.ones(128, 128, dtype=BF16)),
        0,
        BF16,
        run_with_lnc2=False,
        clamp_limits=ClampLimits(linear_clamp_upper_limit=limit, non_linear_clamp_upper_limit=limit),
    )
    assert (d_gate_up == 0).all().item() is zeroed
    assert torch.equal(scratch_T, d_gate_up.t())
    if not zeroed:
        assert (d_gate_up != 0).all()


def test_masking_multiplies_so_that_nan_stays_nan() -> None:
    operands, saved = problem(128, 128, 128)
    operands["output_grad"][3] = float("nan")
    result = mlp_backward_mxfp8(**operands, **saved, clamp_limits=ClampLimits(1e-30, -1e-30, 1e-30, -1e-30))
    assert result.hidden_states_grad[3].isnan().all()
    assert (result.hidden_states_grad[4:] == 0).all()


def test_recompute_clamps_the_fp32_sums() -> None:
    operands, _ = problem(128, 128, 128)
    gate, up = (torch.empty(128, 128, dtype=BF16) for _ in range(2))
    recompute_gate_up_projection(
        TensorDescriptor(operands["hidden_states"]), TensorDescriptor(operands["gate_up_weights"]),
        TensorDescriptor(gate), TensorDescriptor(up), 0, BF16,
        run_with_lnc2=False, clamp_limits=ClampLimits(0.4, 0.3, 0.25, None),
    )  # fmt: skip
    free = mlp_oracle.complete({}, operands["hidden_states"], operands["gate_up_weights"])
    limits = [torch.tensor(value).to(BF16) for value in (0.3, 0.4)]
    assert all((up == limit).any() for limit in limits) and (up >= limits[0]).all() and (up <= limits[1]).all()
    assert_close(up, free["up"].clamp(0.3, 0.4))
    assert (gate == 0.25).any() and (gate <= 0.25).all()
    assert_close(gate, free["gate_pre"].clamp(max=0.25))


def described(**tensors: Tensor) -> dict[str, TensorDescriptor]:
    return {f"{name}_td": TensorDescriptor(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("lnc2", [False, True])
def test_the_whole_is_the_composition_of_the_documented_steps(lnc2: bool) -> None:
    """Each step called as the device calls it: once per core. No sum is shared between the cores."""
    tokens, hidden, inner = 256, 256, 640
    operands, _ = problem(tokens, hidden, inner)
    gate_up, down = operands["gate_up_weights"], operands["down_proj_weight"]
    dout, x = operands["output_grad"], operands["hidden_states"]
    gate, act, up, inter = (torch.full((tokens, inner), 7.0, dtype=BF16) for _ in range(4))
    d_gate_up, scratch = torch.empty(tokens, 2 * inner, dtype=BF16), torch.empty(2 * inner, tokens, dtype=BF16)
    d_x, d_weight, d_down = torch.empty_like(x), torch.empty_like(gate_up), torch.empty_like(down)
    for core in range(2 if lnc2 else 1):
        programs, number = get_program_sharding_info(lnc2, core)
        base = number * tokens // programs
        kept = described(gate_pre=gate, up=up)
        recompute_gate_up_projection(
            *described(x=x, gate_up=gate_up).values(), *kept.values(), base, BF16, run_with_lnc2=lnc2
        )
        recompute_gate_act(*described(gate_pre=gate, gate_act=act).values(), base, BF16, lnc2)
        recompute_intermediate(*described(gate_act=act, up=up, intermediate=inter).values(), base, BF16, lnc2)
        compute_phase1_down_proj_mm_grad_mxfp8(
            **described(output_grad=dout, gate_pre=gate, gate_act=act, up=up, d_gate_up=d_gate_up, scratch=scratch),
            down_weight_td=TensorDescriptor(down.t()), s_base=base, dtype=BF16, run_with_lnc2=lnc2,
        )  # fmt: skip
        compute_phase2_hidden_states_grad_mxfp8(
            **described(hidden_states_grad=d_x, gate_up_weight=gate_up.t(), d_gate_up=d_gate_up),
            s_base=base, dtype=BF16, run_with_lnc2=lnc2,
        )  # fmt: skip
    for core in range(2 if lnc2 else 1):
        compute_phase3_gate_up_weight_grad_mxfp8(
            **described(weight_grad=d_weight, hidden_states_T=x.t(), grad_T=scratch),
            dtype=BF16, run_with_lnc2=lnc2, core=core,
        )  # fmt: skip
        programs, number = get_program_sharding_info(lnc2, core)
        compute_phase4_down_weight_grad_mxfp8(
            **described(down_weight_grad=d_down, output_grad_T=dout.t(), intermediate_T=inter.t()),
            h_base=number * hidden // programs, dtype=BF16, run_with_lnc2=lnc2,
        )  # fmt: skip
    whole = mlp_backward_mxfp8(**operands)
    for actual, wanted in zip((d_x, d_weight, d_down), whole, strict=True):
        if not lnc2:
            assert torch.equal(actual, wanted)
        # A library may sum the products of half the rows in another order, as MKL does on Intel's processors with
        # AVX-512: then a few fp32 sums round to the next bf16 value.
        apart, size = (actual.double() - wanted.double()).abs(), wanted.double().abs()
        assert (apart <= 2**-7 * size + 2**-20 * size.amax()).all()
        assert (apart > 0).double().mean() < 2**-10
    assert torch.equal(scratch, d_gate_up.t())


def test_the_forward_is_its_building_block_once_per_core() -> None:
    operands, saved = problem(256, 256, 640)
    names = ("hidden_states", "gate_up_weights", "down_proj_weight")
    tds = [TensorDescriptor(operands[name]) for name in names]
    inter, gate, act, up = (torch.full((256, 640), 7.0, dtype=BF16) for _ in range(4))
    output = torch.full((256, 256), 7.0, dtype=BF16)
    out_tds = [TensorDescriptor(tensor) for tensor in (inter, output)]
    saves = described(save_gate_pre=gate, save_gate_act=act, save_up=up)
    result = compute_fused_gate_up_down_mxfp8(*tds, *out_tds, 128, BF16, **saves)
    assert result is None
    assert (output[:128] == 7).all() and (up[:128] == 7).all(), "the other core's rows"
    compute_fused_gate_up_down_mxfp8(*tds, *out_tds, 0, BF16, **saves)
    assert torch.equal(output, mlp_forward_mxfp8(*(operands[name] for name in names)).output)
    for buffer, name in ((inter, "intermediate"), (gate, "gate_pre"), (act, "gate_act"), (up, "up")):
        assert torch.equal(buffer, saved[name])


def test_recomputed_activations_read_bf16_values() -> None:
    _, saved = problem(128, 128, 640)
    act, inter = (torch.empty(128, 640, dtype=BF16) for _ in range(2))
    recompute_gate_act(*described(gate=saved["gate_pre"], act=act).values(), 0, BF16, False)
    recompute_hidden(*described(act=act, up=saved["up"], hidden=inter).values(), 0, BF16, False)
    # torch's fp32 silu differs from its own float64 one by less than an ulp of fp32: a flipped bf16 rounding is rare.
    assert (act == F.silu(saved["gate_pre"].double()).to(BF16)).double().mean() > 0.999
    assert torch.equal(inter, (act.double() * saved["up"].double()).to(BF16))
    assert not torch.equal(act, saved["gate_act"]), "the forward's comes from the fp32 gate"


@pytest.mark.parametrize("kept", [NAMES, ("gate_pre", "up"), ("up",), ()])
def test_release_2_30_fills_its_scratch(kept: tuple[str, ...]) -> None:
    operands, saved = problem(128, 256, 640)
    checkpoints = {("hidden" if name == "intermediate" else name): saved[name] for name in kept}
    result, scratch = old_call(operands, saved["intermediate"], **checkpoints)
    transposed = scratch["silu_up_mul_gate_grad_T_scratch"].t()
    assert torch.equal(transposed, torch.cat([scratch["d_gate_scratch"], scratch["d_up_scratch"]], dim=1))
    sources = (operands["hidden_states"], operands["gate_up_weights"])
    found = mlp_oracle.complete({name: saved[name] for name in kept}, *sources)
    projected = "gate_pre" not in kept or "up" not in kept
    free = mlp_oracle.complete({}, *sources)
    for name, wanted, filled in (
        ("gate_pre", free["gate_pre"], projected), ("up", free["up"], projected),
        ("gate_act", found["gate_act"], "gate_act" not in kept),
        ("hidden", found["intermediate"], "intermediate" not in kept),
    ):  # fmt: skip
        buffer = scratch[f"{name}_scratch"]
        if filled:
            assert_close(buffer, wanted)
        else:
            assert buffer.isnan().all(), f"{name}_scratch is not written when its checkpoints are given"
    d_x = torch.empty_like(operands["hidden_states"])
    gate_up = operands["gate_up_weights"]
    compute_phase2_hidden_states_grad_mxfp8_2_30(
        *(TensorDescriptor(t) for t in (
            d_x, gate_up[:640].t(), gate_up[640:].t(), scratch["d_gate_scratch"], scratch["d_up_scratch"])),
        0, BF16, run_with_lnc2=False,
    )  # fmt: skip
    assert torch.equal(d_x, result.hidden_states_grad)


def test_release_2_30_takes_the_intermediate_from_the_caller_only() -> None:
    operands, saved = problem(128, 256, 640)
    other = torch.randn(128, 640).to(BF16)
    checkpoints = {"gate_pre": saved["gate_pre"], "gate_act": saved["gate_act"], "up": saved["up"]}
    with_hidden, _ = old_call(operands, other, **checkpoints, hidden=saved["intermediate"])
    without, _ = old_call(operands, other, **checkpoints)
    assert torch.equal(with_hidden.down_proj_weight_grad, without.down_proj_weight_grad)
    assert_close(without.down_proj_weight_grad, mlp_oracle.q(operands["output_grad"].double(), 0, False).T
                 @ mlp_oracle.q(other.double(), 0, False))  # fmt: skip
    new = mlp_backward_mxfp8(**operands, **checkpoints, intermediate=other)
    assert torch.equal(new.down_proj_weight_grad, without.down_proj_weight_grad)


@pytest.mark.parametrize("kept", [NAMES, ()])
def test_gradients_against_unquantized_autograd(kept: tuple[str, ...]) -> None:
    """What MX costs: each operand is rounded to 3 mantissa bits, a relative RMS error of 2.7 %; a product of two such
    operands errs by at most 2.7 % * sqrt(2), and chained products add up. Upstream accepts a cosine of 0.99.
    """
    operands, saved = problem(384, 256, 640)
    x, gate_up, down = (
        operands[name].double().requires_grad_() for name in ("hidden_states", "gate_up_weights", "down_proj_weight")
    )
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    ((F.silu(gate) * up) @ down.T).backward(operands["output_grad"].double())
    result = mlp_backward_mxfp8(**operands, **{name: saved[name] for name in kept})
    for actual, leaf in zip(result, (x, gate_up, down), strict=True):
        assert leaf.grad is not None
        relative = (actual.double() - leaf.grad).norm() / leaf.grad.norm()
        assert 0.01 < relative < 0.09
        assert F.cosine_similarity(actual.double().flatten(), leaf.grad.flatten(), dim=0) > 0.995


class LargestAllocation(TorchDispatchMode):
    """Remembers the largest tensor of more than two bytes per element that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.element_size() > 2:
                self.largest = max(self.largest, value.numel())
        return result


def test_no_temporary_of_the_whole_problem_in_fp32() -> None:
    operands, _ = problem(2048, 128, 4096)
    with LargestAllocation() as memory:
        mlp_backward_mxfp8(**operands)
        mlp_forward_mxfp8(operands["hidden_states"], operands["gate_up_weights"], operands["down_proj_weight"])
    whole = 2048 * 2 * 4096
    assert 0 < memory.largest <= whole // 4

"""The MXFP8 MLP kernels against recorded vectors of an independent model.

Tolerance: the same bits but for 3 elements in 10,000, and a relative Frobenius error of 1e-4, because only the order of
the fp32 sums before one bf16 rounding is left open (the manifest allows one ulp for 99.9 % and 2e-3). The right
grouping of K flips up to 1.2 elements in 10,000, a wrong one 5 or more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_neuron_moe.kernels import mlp_backward_mxfp8, mlp_forward_mxfp8

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = [
    entry["file"]
    for entry in json.loads((GOLDEN / "manifest_mlp.json").read_text())["files"]
    if entry["file"].startswith("mxfp8_mlp")
]
CHECKPOINTS = {
    "all": ("gate_pre", "gate_act", "up", "intermediate"),
    "gate_pre_up": ("gate_pre", "up"),
    "none": (),
}


FLIPPED = 3e-4


def flipped(actual: Tensor, expected: Tensor) -> float:
    return (actual != expected).double().mean().item()


def assert_close_in_bf16(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert flipped(actual, expected) <= FLIPPED
    actual, expected = actual.double(), expected.double()
    assert ((actual - expected).norm() / expected.norm()).item() <= 1e-4


@pytest.fixture(params=FILES)
def vectors(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    return load_file(GOLDEN / request.param)


def test_two_shapes_are_recorded() -> None:
    assert len(FILES) == 2


def test_forward_and_all_checkpoints(vectors: dict[str, Tensor]) -> None:
    result = mlp_forward_mxfp8(
        vectors["hidden_states"],
        vectors["gate_up_weights"],
        vectors["down_weights"],
        save_gate_pre=True,
        save_gate_act=True,
        save_up=True,
        save_hidden=True,
    )
    for name, value in result._asdict().items():
        assert_close_in_bf16(value, vectors[f"fwd_{name}"])


def test_forward_keeps_only_what_is_asked_for(vectors: dict[str, Tensor]) -> None:
    operands = (vectors["hidden_states"], vectors["gate_up_weights"], vectors["down_weights"])
    lean, full = mlp_forward_mxfp8(*operands), mlp_forward_mxfp8(*operands, save_up=True)
    assert lean.gate_pre is lean.gate_act is lean.up is lean.hidden is None
    assert full.up is not None and full.gate_pre is None
    assert torch.equal(lean.output, full.output)


@pytest.mark.parametrize(
    ("kept", "phase2", "release"),
    [
        ("all", "fused2I", "2.31"),
        ("all", "split", "2.30"),
        ("none", "fused2I", "2.31"),
        ("gate_pre_up", "fused2I", "2.31"),
    ],
)
def test_backward(vectors: dict[str, Tensor], kept: str, phase2: str, release: str) -> None:
    recorded = {"gate_pre": "fwd_gate_pre", "gate_act": "fwd_gate_act", "up": "fwd_up", "intermediate": "fwd_hidden"}
    result = mlp_backward_mxfp8(
        vectors["output_grad"],
        vectors["hidden_states"],
        vectors["gate_up_weights"],
        vectors["down_weights"],
        release=release,
        **{name: vectors[recorded[name]] for name in CHECKPOINTS[kept]},
    )
    for name, value in result._asdict().items():
        assert_close_in_bf16(value, vectors[f"bwd_{kept}_{phase2}_{name}"])
    other = mlp_backward_mxfp8(
        vectors["output_grad"],
        vectors["hidden_states"],
        vectors["gate_up_weights"],
        vectors["down_weights"],
        release={"2.31": "2.30", "2.30": "2.31"}[release],
        **{name: vectors[recorded[name]] for name in CHECKPOINTS[kept]},
    )
    recorded_grad = vectors[f"bwd_{kept}_{phase2}_hidden_states_grad"]
    assert flipped(other.hidden_states_grad, recorded_grad) > FLIPPED, "the vectors see the other phase 2"


def test_releases_differ_only_where_groups_straddle_gate_and_up() -> None:
    """I = 512 groups alike in both releases, I = 640 does not; that shows where magnitudes differ within a group."""
    torch.manual_seed(0)
    for inner, alike in ((512, True), (640, False)):
        x, dout = (torch.randn(128, 128).bfloat16() for _ in range(2))
        gate_up = (torch.randn(2 * inner, 128) / 16).bfloat16()
        down = (torch.randn(128, inner) * torch.exp2(torch.randint(-12, 1, (inner,)))).bfloat16()
        gate_up *= torch.exp2(torch.randint(-12, 1, (2 * inner, 1))).bfloat16()
        new, old = (mlp_backward_mxfp8(dout, x, gate_up, down, release=release) for release in ("2.31", "2.30"))
        relative = (new.hidden_states_grad.double() - old.hidden_states_grad.double()).norm()
        relative /= new.hidden_states_grad.double().norm()
        # Alike up to the order of the fp32 sums, which flips a few bf16 roundings.
        assert relative < 1e-5 if alike else relative > 1e-4
        assert torch.equal(new.gate_up_weight_grad, old.gate_up_weight_grad)
        assert torch.equal(new.down_proj_weight_grad, old.down_proj_weight_grad)

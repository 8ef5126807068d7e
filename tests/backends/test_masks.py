"""Gradients of what was clamped: the mask of one pass is that of the kernels, or is not taken."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch.gating import Limits, gating_of, mask_, mask_finite_
from hf_neuron_moe.backends.torch.swiglu_grad import SwiGLUGrad

LIMITS: list[Limits] = [(1.0, -1.0), (7.0, None), (None, -0.25), (None, None), (7.0063428146, -1e-30), (0.0, -3.0)]
GATES = {
    "clamped": Gate(gate_max=1.0, up_max=1.0, up_min=-1.0),
    "after": Gate(act_max=0.5, up_max=1.0, up_min=-1.0),
    "swish": Gate("swish", 1.702, gate_max=1.0, up_max=1.0, up_min=-1.0, up_offset=1.0),
}


@pytest.mark.parametrize("limits", LIMITS)
def test_every_finite_value_is_masked_alike(limits: Limits) -> None:
    """All bf16 values, so that some lie on a limit, and their neighbours in fp32."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite()]
    here = torch.tensor([0.0 if limit is None else limit for limit in limits])
    values = torch.cat([every, every.nextafter(here[0]), every.nextafter(here[1]), here])
    gradient = torch.randn(len(values), generator=torch.Generator().manual_seed(0))
    expected, found = (mask(gradient.clone(), values, limits) for mask in (mask_, mask_finite_))
    assert torch.equal(found, expected)  # -0.0 is 0.0
    assert limits == (None, None) or 0 < (found == 0).sum() < len(values)


@pytest.mark.parametrize("broken", ["nothing", "gate", "up", "d_int", "scale"])
@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("mx", [False, True])
def test_gradients_are_those_of_the_kernels_mask_whatever_is_not_finite(
    name: str, mx: bool, worst: float, broken: str
) -> None:
    gating = gating_of(GATES[name])
    generator = torch.Generator().manual_seed(1)
    operands = {key: torch.randn(6, 40, generator=generator).mul_(2) for key in ("d_int", "gate", "up")}
    operands["scale"] = torch.rand(6, 1, generator=generator)
    operands["gate"][0, 0] = operands["up"][0, 0] = 9.0  # beyond the limits
    if broken != "nothing":
        operands[broken][0, 0] = worst

    def filled(on_host: bool) -> list[torch.Tensor]:
        d_int, gate, up, scale_R1 = (operands[key].clone() for key in ("d_int", "gate", "up", "scale"))
        results, d_scale_R = torch.zeros(3, 6, 40), torch.zeros(6)
        grads = SwiGLUGrad(gating, mx, lambda values: values.copy_(values.bfloat16()), on_host)
        grads.fill(results, d_int, gate, up, torch.empty(6, 40), scale_R1=scale_R1, d_scale_R=d_scale_R)
        return [results, d_scale_R]

    (found, found_R), (expected, expected_R) = filled(on_host=True), filled(on_host=False)
    if broken == "gate" and worst > 0:  # the limit makes it finite; the slope at infinity would be NaN
        assert expected[0, 0, 0].isnan() and found[0, 0, 0] == 0
        expected[0, 0, 0] = 0
    assert torch.equal(found.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    assert torch.equal(found_R.nan_to_num(nan=1e9), expected_R.nan_to_num(nan=1e9))

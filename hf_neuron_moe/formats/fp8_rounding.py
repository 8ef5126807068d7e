"""fp32 values to FP8: nearest, or stochastic.

Stochastic rounding goes up with a probability equal to the distance from the grid point below, so that the expectation
is the value itself: a random number below one FP8 step is added to the fp32 bits, then everything below it is cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError, DeviceError
from hf_neuron_moe.formats.constants import ElementFormat
from hf_neuron_moe.formats.e8m0 import MAGNITUDE_MASK, MANTISSA_BITS


def round_to_fp8_(
    scaled: Tensor, fmt: ElementFormat, *, stochastic: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    """Round fp32 values, overwriting them, to FP8 of ``fmt.dtype``: nearest with ties to even, or `stochastic`.

    Magnitudes beyond the largest finite code saturate and NaN stays NaN. The generator is on the device of `scaled`;
    torch's default one if None.
    """
    assert fmt.dtype is not None
    clipped = scaled.clamp_(-fmt.max, fmt.max)
    if stochastic:
        clipped = _to_grid_stochastic(clipped, fmt, generator)
    return clipped.to(fmt.dtype)


def check_randomness(stochastic: object, generator: object, device: torch.device, *, argument: str = "x") -> None:
    """Check what callers pass on to :func:`round_to_fp8_`, for values on `device` that they call `argument`."""
    check_flags({"stochastic": stochastic})
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        fix = "Build it with torch.Generator(device).manual_seed(seed)."
        raise ConfigError.about("generator", "a torch.Generator or None", type(generator).__name__, fix)
    if generator.device.type != device.type:
        fix = f"Build it with torch.Generator({device.type!r})."
        raise DeviceError.about("generator", f"on {device.type} like {argument}", generator.device, fix)


def _to_grid_stochastic(values: Tensor, fmt: ElementFormat, generator: torch.Generator | None) -> Tensor:
    """Move finite values within the format's range to one of their two neighbours on its grid; NaN stays NaN."""
    step_bits = MANTISSA_BITS - fmt.mantissa_bits
    smallest_normal = 2.0 ** (1 - fmt.bias)
    noise = torch.randint(0, 1 << step_bits, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    magnitude = values.abs()
    # The grid below the smallest normal is that of the binade above it, shifted down: shift there and back.
    shift = torch.where(magnitude < smallest_normal, smallest_normal, 0.0)
    bits = (magnitude + shift).view(torch.int32) & MAGNITUDE_MASK
    bits = bits.add_(noise).bitwise_and_(-(1 << step_bits))
    rounded = torch.copysign(bits.view(torch.float32) - shift, values)
    return torch.where(values.isnan(), values, rounded)

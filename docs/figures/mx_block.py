"""One MX block worked by hand: 32 values, their scale byte, their codes, and the error."""

from __future__ import annotations

import math

import torch
from drawing import box, picture, text

from hf_neuron_moe.formats import fake_quantize_mx, quantize_mx

COLUMNS, LEFT, TOP, CELL, ROW = 8, 20, 148, 105, 60


def values() -> torch.Tensor:
    """Return the 32 values: normal ones to three decimals, one large."""
    drawn = torch.randn(1, 32, generator=torch.Generator().manual_seed(3))
    drawn[0, 5] *= 40
    return (drawn * 1000).round() / 1000


def draw() -> str:
    """Return the picture."""
    block = values()
    quantized, seen = quantize_mx(block), fake_quantize_mx(block)[0]
    codes = quantized.codes.view(8, 4).t().reshape(-1)  # lane by lane, as the values lie along K
    byte, amax = int(quantized.scales), float(block.abs().max())
    exponent = math.floor(math.log2(amax))
    power = exponent - 7
    assert byte == power + 127
    parts = [
        text(LEFT, 34, "One block of MXFP8 (e4m3): 32 values, one scale byte, 32 codes", kind="title"),
        text(LEFT, 62, f"1. The largest magnitude is {amax:g}, so its exponent is floor(log2 {amax:g}) = {exponent}."),
        text(LEFT, 82, f"2. Neuron's rule subtracts 7: scale 2^{power} = {2.0**power:g}, byte {power} + 127 = {byte}."),
        text(LEFT, 102, "3. Each value is divided by the scale and rounded to the nearest e4m3 number: one byte."),
        text(
            LEFT, 126, "Each cell: the value, its code in hex, the code times the scale, and the error.", kind="muted"
        ),
    ]
    for number, (value, code, back) in enumerate(zip(block[0], codes, seen, strict=True)):
        x, y = LEFT + CELL * (number % COLUMNS), TOP + ROW * (number // COLUMNS)
        largest = abs(float(value)) == amax
        parts.append(box(x, y, CELL - 5, ROW - 5, kind="orange" if largest else "box"))
        parts.append(text(x + 8, y + 17, f"{value:.3f}", kind="strong"))
        parts.append(text(x + CELL - 13, y + 17, f"{int(code):02X}", kind="code", anchor="end"))
        parts.append(text(x + 8, y + 33, f"{back:g}"))
        parts.append(text(x + 8, y + 48, f"{back - value:+.3f}", kind="muted small"))
    error = float((seen - block[0]).norm() / block.norm())
    small = [number for number in range(32) if abs(float(block[0, number])) < amax]
    rest = float((seen - block[0])[small].norm() / block[0, small].norm())
    y = TOP + 4 * ROW + 22
    parts.append(
        text(
            LEFT, y, f"Relative error of the block: {100 * error:.1f} %; without its largest value {100 * rest:.1f} %."
        )
    )
    parts.append(text(LEFT, y + 20, "33 bytes hold what takes 64 in bf16 and 128 in fp32.", kind="muted"))
    what = f"32 values with the largest magnitude {amax:g}; scale byte {byte}; relative error {100 * error:.1f} %."
    return picture((880, y + 36), "One MX block worked by hand", what, parts)

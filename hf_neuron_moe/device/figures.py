"""What AWS publishes of the chips, and what one logical core of them is by division.

Source: AWS Neuron documentation, "Trainium2 architecture" and "Trainium3 architecture" (about-neuron/arch), figures per
chip. The pages of the cores give about 5 % less for bf16 on Trn2 (8 x 79 TFLOP/s instead of 667).
"""

from __future__ import annotations

from dataclasses import dataclass

PHYSICAL_CORES = 8
SOURCE = "AWS Neuron documentation, about-neuron/arch, Trainium2 and Trainium3, figures per chip divided by cores"


@dataclass(frozen=True)
class Chip:
    """Published figures of a chip.

    Attributes:
        name: ``"trn2"`` or ``"trn3"``.
        flops: dense peak in FLOP/s by precision; what the chip cannot do is missing.
        bandwidth: of its memory, in bytes per second.
        memory: in bytes.
    """

    name: str
    flops: dict[str, float]
    bandwidth: float
    memory: int

    def core(self, lnc: int = 2) -> Chip:
        """Return a logical core of `lnc` physical ones, as one process of a run has it."""
        share = lnc / PHYSICAL_CORES
        flops = {precision: peak * share for precision, peak in self.flops.items()}
        return Chip(self.name, flops, self.bandwidth * share, int(self.memory * share))


CHIPS = {
    "trn2": Chip("trn2", {"bf16": 667e12, "fp32": 181e12}, 2.9e12, 96 * 2**30),
    "trn3": Chip("trn3", {"bf16": 671e12, "mxfp8": 2517e12, "fp32": 183e12}, 4.9e12, 144 * 2**30),
}
"""Trn2's 1,299 TFLOP/s in FP8 are of a format that is not MX (e4m3 up to 240), which no kernel here uses."""

"""What a pass over a text gathers: of every block its operands, products, and predicted changes of the loss.

Legend: E experts, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_neuron_moe.explore.operand_sums import Operand

FORMATS = ("bf16", "mxfp8", "mxfp4", "fp8-saved")
"""What a block can be looked at with: products in bf16 (against fp32) or mxfp8, weights in mxfp4 with activations in
mxfp8, and saved activations in FP8 groups. The backward reads those."""

PRODUCTS = ("gate_up", "down")
FORWARD, DX, DW = "", ".dx", ".dw"
"""What is behind a product's name: the forward, the gradient of its input, the gradient of its weights."""

ACTIVATIONS, WEIGHTS, GRADIENTS, SAVED = "activations", "weights", "gradients", "saved in fp8"


WEIGHTS_MXFP4 = "weights in mxfp4"

OTHER_RULE = "rceil"
"""A rule for the scales of stored weights that wastes less range than the hardware's own."""


@dataclass
class Score:
    """The predicted change of the summed loss; an estimate of the second order has a sample per drawn label set."""

    first: float = 0.0
    second: float = 0.0
    square: float = 0.0  # sum over rows of the text of a row's first order, squared

    @property
    def total(self) -> float:
        """Both orders: what this text's loss is predicted to change by."""
        return self.first + self.second

    @property
    def deviation(self) -> float:
        """Standard deviation of the first order over texts like this one."""
        return self.square**0.5

    @property
    def expected(self) -> float:
        """What other text's loss is expected to change by, at least 0: the first order counts as far as it is certain.

        Of a first order that is small beside its deviation nothing is left (the estimate of James and Stein).
        """
        sure = max(0.0, 1 - self.square / self.first**2) if self.first else 0.0
        return max(0.0, sure * self.first + self.second)


@dataclass
class BlockMeasures:
    """Everything that was gathered of one block."""

    kind: str  # "mlp" or "experts"
    experts: int  # 1 of a dense block
    hidden: int
    inner: int
    tokens_E: Tensor  # pairs that each expert got
    operands: dict[str, Operand] = field(default_factory=dict)  # by "product operand"
    scores: dict[str, Score] = field(default_factory=dict)  # by format, or "format product"
    products: dict[str, tuple[float, float]] = field(default_factory=dict)  # signal and noise, of a sample
    halves: int = 2  # projections of the input: gate and up, or up alone
    linear_up: bool = True  # whether the gate multiplies up as it is, so that a channel of down folds into up

    def operand(self, product: str, kind: str, channels: int) -> Operand:
        """Return the sums of an operand, new ones at first."""
        return self.operands.setdefault(f"{product} {kind}", Operand.empty(self.experts, channels))


@dataclass
class Measures:
    """What a pass has gathered."""

    blocks: dict[str, BlockMeasures] = field(default_factory=dict)
    rows: int = 0  # of the text that are done
    tokens: int = 0  # with a loss
    loss: float = 0.0  # sum over tokens
    losses: list[float] = field(default_factory=list)  # mean per row
    flips: dict[str, list[float]] = field(default_factory=dict)  # the same with blocks in mxfp8, by their names

    @property
    def positions(self) -> int:
        """Tokens that blocks saw: a row's last one has no loss."""
        return self.tokens + self.rows

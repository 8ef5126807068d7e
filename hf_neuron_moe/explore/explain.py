"""Why a block loses what it loses, in words with figures, and the remedy that is known for it.

Legend: E experts, C channels of an operand along its contraction axis.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.explore.measures import ACTIVATIONS, PRODUCTS, SAVED, WEIGHTS, BlockMeasures
from hf_neuron_moe.explore.operand_sums import Operand, decibels
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.formats.swizzle import tile_segments

OUTLIER = 64.0
"""From how many times the median channel's largest magnitude on a channel counts as an outlier."""

LOST_BITS = 0.5
"""From how many bits lost on the neighbours of an outlier are worth a word."""

POOR_SAVED_DB = 24.0
"""Below this SQNR, four noise bits of e4m3's six, saving in FP8 is advised against."""

_BIT_DB = 20 * math.log10(2)

KEEP_BF16, FOLD, OTHER_FORM = "bf16", "fold", "keep"


@dataclass(frozen=True)
class Outlier:
    """A channel far above the others, and what it does to the values that share its scales."""

    product: str  # "gate_up" or "down": the product whose input it is
    channel: int
    expert: int
    ratio: float  # its largest magnitude over the median channel's
    bits_lost: float  # by the 31 channels of its block, against the others


@dataclass(frozen=True)
class Reason:
    """What is said of a block."""

    text: str
    remedy: str  # in words
    remedy_kind: str  # "bf16", "fold" or "keep"
    outlier: Outlier | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def block_of_channels(channels: int) -> Tensor:
    """Return which MX block each of `channels` positions along a contraction axis is in, int64 ``[C]``.

    A block has 8 neighbours in each of 4 lanes, a quarter of a tile apart (nki-library 2.31, wrapX swizzle).
    """
    ids = []
    for segment in tile_segments(padded_size(channels), "wrapX"):
        position = torch.arange(segment.tile) % (segment.tile // 4) // 8
        for tile in range(segment.tiles):
            ids.append((segment.start + tile * segment.tile) // 32 + position)
    return torch.cat(ids)[:channels]


def outlier_of(product: str, operand: Operand) -> Outlier | None:
    """Return the channel that stands out most, where any stands out and costs its block bits."""
    found: list[Outlier] = []
    for expert in range(len(operand.amax_EC)):
        amax_C = operand.amax_EC[expert]
        median = amax_C[amax_C > 0].median().item() if (amax_C > 0).any() else 0.0
        channel = int(amax_C.argmax())
        ratio = amax_C[channel].item() / median if median else 1.0
        if ratio < OUTLIER:
            continue
        blocks_C = block_of_channels(len(amax_C))
        mates_C = blocks_C == blocks_C[channel]
        mates_C[channel] = False
        rest_C = ~mates_C
        rest_C[channel] = False
        signal_C, noise_C = operand.signal_EC[expert], operand.noise_EC[expert]
        mates, rest = (decibels(signal_C[part].sum().item(), noise_C[part].sum().item()) for part in (mates_C, rest_C))
        bits = max(0.0, (rest - mates) / _BIT_DB) if math.isfinite(rest - mates) else 0.0
        found.append(Outlier(product, channel, expert, ratio, bits))
    worst = max(found, key=lambda outlier: (outlier.bits_lost, outlier.ratio), default=None)
    return worst if worst is not None and worst.bits_lost >= LOST_BITS else None


def reason_of(name: str, block: BlockMeasures, form: str) -> Reason:
    """Explain what the format `form` costs a block, from its measures."""
    if form == "bf16":
        return Reason("bf16 rounds operands to 8 significant bits.", "Nothing cheaper is more exact.", OTHER_FORM)
    worst = max(PRODUCTS, key=lambda product: block.scores[f"{form} {product}"].total)
    weights = WEIGHTS if form == "mxfp8" else f"{WEIGHTS} in mxfp4"
    operands = {
        kind: (block.operands[f"{worst} {kind}"], block.operands[f"{worst} {kind}"].figures())
        for kind in (ACTIVATIONS, weights)
    }
    outliers = [
        found for product in PRODUCTS if (found := outlier_of(product, block.operands[f"{product} {ACTIVATIONS}"]))
    ]
    if outliers:
        return _of_outlier(max(outliers, key=lambda outlier: outlier.bits_lost), block)
    kind = min(operands, key=lambda each: operands[each][1]["sqnr_db"])
    figures = operands[kind][1]
    share = block.scores[f"{form} {worst}"].total / (block.scores[form].total or math.nan)
    most = f", {100 * share:.0f} % of the block's change" if 0 < share <= 1 else ""
    text = f"{_product_words(worst)}{most}: its {kind} have {figures['sqnr_db']:.1f} dB SQNR"
    if figures["flushed"] >= 0.001:
        text += f", {100 * figures['flushed']:.1f} % of them become zero"
    expert = _worst_expert(block, operands[kind][0])
    text += f"{expert}. No channel stands out."
    remedy = "Leave it in bf16 where the loss matters more than the time."
    saved = [key for key in block.operands if key.endswith(SAVED)]
    if any(block.operands[key].figures()["sqnr_db"] < POOR_SAVED_DB for key in saved):
        remedy += " Save its activations in bf16, not in FP8."
    return Reason(text, remedy, KEEP_BF16)


def _of_outlier(outlier: Outlier, block: BlockMeasures) -> Reason:
    where = f" of expert {outlier.expert}" if block.experts > 1 else ""
    times = f"2**{math.log2(outlier.ratio):.0f}" if outlier.ratio >= 4096 else f"{outlier.ratio:,.0f}"
    text = (
        f"{_product_words(outlier.product)} input{where}: channel {outlier.channel} is {times} times the median; "
        f"its block of 32 loses {outlier.bits_lost:.1f} bits."
    )
    remedy = "Fold a power of two into the weights before it (--fold), which bf16 does not notice, or leave it in bf16."
    return Reason(text, remedy, FOLD, outlier)


def _product_words(product: str) -> str:
    return "down_proj" if product == "down" else "gate_proj and up_proj"


def _worst_expert(block: BlockMeasures, operand: Operand) -> str:
    if block.experts == 1:
        return ""
    ratios = operand.sqnr_by_expert()
    seen = [(ratio, expert) for expert, ratio in enumerate(ratios) if not math.isnan(ratio)]
    ratio, expert = min(seen)
    return f"; worst is expert {expert} with {ratio:.1f} dB, which saw {int(block.tokens_E[expert]):,} tokens"

"""Why a block loses what it loses, in words with figures, and the remedy that is known for it.

Legend: E experts, C channels of an operand along its contraction axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_neuron_moe.explore.measures import (
    ACTIVATIONS,
    OTHER_RULE,
    PRODUCTS,
    SAVED,
    WEIGHTS,
    WEIGHTS_MXFP4,
    BlockMeasures,
)
from hf_neuron_moe.explore.operand_sums import Operand, decibels
from hf_neuron_moe.formats.padding import padded_size
from hf_neuron_moe.formats.swizzle import tile_segments

OUTLIER = 64.0
"""From how many times the median channel's largest magnitude on a channel counts as an outlier."""

LOST_BITS, CHIEF_BITS = 0.05, 0.5
"""From how many bits lost by its neighbours on an outlier is worth folding, and the reason alone."""

POOR_SAVED_DB = 24.0
"""Below this SQNR, four noise bits of e4m3's six, saving in FP8 is advised against."""

WORTH_DB = 0.5
"""From how many dB on another scale rule is worth a word."""

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
    outliers: tuple[Outlier, ...] = ()  # that cost bits, worst first

    @property
    def outlier(self) -> Outlier | None:
        """The worst one."""
        return self.outliers[0] if self.outliers else None


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


def outliers_of(product: str, operand: Operand) -> list[Outlier]:
    """Return the channels that stand out, and what each costs its block."""
    found: list[Outlier] = []
    blocks_C = block_of_channels(operand.amax_EC.shape[1])
    for expert, amax_C in enumerate(operand.amax_EC):
        median = amax_C[amax_C > 0].median().item() if (amax_C > 0).any() else 0.0
        out_C = amax_C >= OUTLIER * median
        if not median or not out_C.any():
            continue
        signal_C, noise_C = operand.signal_EC[expert], operand.noise_EC[expert]
        rest_C = ~torch.isin(blocks_C, blocks_C[out_C])
        for channel in out_C.nonzero().flatten().tolist():
            mates_C = (blocks_C == blocks_C[channel]) & ~out_C
            mates, rest = (decibels(float(signal_C[C].sum()), float(noise_C[C].sum())) for C in (mates_C, rest_C))
            bits = max(0.0, (rest - mates) / _BIT_DB) if math.isfinite(rest - mates) else 0.0
            found.append(Outlier(product, channel, expert, amax_C[channel].item() / median, bits))
    return found


def reason_of(name: str, block: BlockMeasures, form: str) -> Reason:
    """Explain what the format `form` costs a block, from its measures."""
    if form == "bf16":
        return Reason("bf16 rounds operands to 8 significant bits.", "Nothing cheaper is more exact.", OTHER_FORM)
    found = [each for product in PRODUCTS for each in outliers_of(product, block.operands[f"{product} {ACTIVATIONS}"])]
    own: dict[tuple[str, int, int], Outlier] = {}
    for each in sorted(found, key=lambda outlier: (-outlier.bits_lost, -outlier.ratio)):
        # Experts read the same input: each of its channels is told once.
        own.setdefault((each.product, each.channel, each.expert if each.product == PRODUCTS[1] else 0), each)
    outliers = list(own.values())
    costly = tuple(outlier for outlier in outliers if outlier.bits_lost >= LOST_BITS)
    saved = [key for key in block.operands if key.endswith(SAVED)]
    poor = any(block.operands[key].figures()["sqnr_db"] < POOR_SAVED_DB for key in saved)
    in_bf16 = " Save its activations in bf16, not in FP8." if poor else ""
    remedy, remedy_kind = "Leave it in bf16 where the loss matters more than the time.", KEEP_BF16
    if costly and (costly[0].product == PRODUCTS[0] or block.linear_up):
        remedy = "Fold a power of two into the weights before it (--fold), which bf16 does not notice, "
        remedy, remedy_kind = remedy + "or leave it in bf16.", FOLD
    if costly and costly[0].bits_lost >= CHIEF_BITS:
        return Reason(_of_outliers(name, costly, block), remedy + in_bf16, remedy_kind, costly)
    worst = max(PRODUCTS, key=lambda product: block.scores[f"{form} {product}"].total)
    weights = WEIGHTS if form == "mxfp8" else WEIGHTS_MXFP4
    operands = {
        kind: (block.operands[f"{worst} {kind}"], block.operands[f"{worst} {kind}"].figures())
        for kind in (ACTIVATIONS, weights)
    }
    kind = min(operands, key=lambda each: operands[each][1]["sqnr_db"])
    figures = operands[kind][1]
    share = block.scores[f"{form} {worst}"].total / (block.scores[form].total or math.nan)
    most = f", {100 * share:.0f} % of the block's change" if 0 < share <= 1 else ""
    where = f"{_product_words(worst, block)} of {_layer_of(name)}"
    zeros = [each for each, (_, found) in operands.items() if found["amax"] == 0]
    if zeros:
        remedy = "Nothing is lost: the product is zero in every format."
        return Reason(f"{where}{most}: its {' and '.join(zeros)} are all zeros.", remedy + in_bf16, OTHER_FORM, costly)
    text = f"{where}{most}: its {kind} have {figures['sqnr_db']:.1f} dB SQNR"
    if figures["flushed"] >= 0.001:
        text += f", {100 * figures['flushed']:.1f} % of them become zero"
    text += f"{_worst_expert(block, operands[kind][0])}. "
    text += _of_outliers(name, costly or outliers[:1], block) if outliers else "No channel stands out."
    other = block.operands[f"{worst} {weights}, {OTHER_RULE}"].figures()["sqnr_db"] - operands[weights][1]["sqnr_db"]
    if kind == weights and other >= WORTH_DB:
        remedy += f" In a conversion, --scale-rule {OTHER_RULE} gives these weights {other:.1f} dB more."
    return Reason(text, remedy + in_bf16, remedy_kind, costly)


def _of_outliers(name: str, outliers: Sequence[Outlier], block: BlockMeasures) -> str:
    """What is said of the first of some channels."""
    outlier = outliers[0]
    where = f", expert {outlier.expert}" if block.experts > 1 else ""
    times = f"2**{math.log2(outlier.ratio):.0f}" if outlier.ratio >= 4096 else f"{outlier.ratio:,.0f}"
    more = f" {len(outliers) - 1} more are like it." if len(outliers) > 1 else ""
    words = f"{_product_words(outlier.product, block)} input of {_layer_of(name)}{where}"
    lost = f"its block of 32 loses {outlier.bits_lost:.1f} bits"
    return f"{words}: channel {outlier.channel} is {times} times the median; {lost}.{more}"


def _layer_of(name: str) -> str:
    """``layer 3`` of ``model.layers.3.mlp``; a name without a number as it is."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return f"layer {numbers[-1]}" if numbers else name


def _product_words(product: str, block: BlockMeasures) -> str:
    if product == PRODUCTS[1]:
        return "down_proj"
    return "gate_proj and up_proj" if block.halves == 2 else "up_proj"


def _worst_expert(block: BlockMeasures, operand: Operand) -> str:
    if block.experts == 1:
        return ""
    ratios = operand.sqnr_by_expert()
    used = block.tokens_E.tolist()
    seen = [(ratio, expert) for expert, ratio in enumerate(ratios) if used[expert] and not math.isnan(ratio)]
    if not seen:
        return ""
    ratio, expert = min(seen)
    return f"; worst is expert {expert} with {ratio:.1f} dB, which saw {int(block.tokens_E[expert]):,} tokens"

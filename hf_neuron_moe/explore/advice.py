"""Whether MXFP8 pays for a model's shapes at all, by published figures of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hf_neuron_moe.device.kernel_support import BlockGroup, usable_kernels
from hf_neuron_moe.device.roofline_math import CHIPS, Step, chip_of
from hf_neuron_moe.errors import counted
from hf_neuron_moe.explore.measures import Measures
from hf_neuron_moe.explore.precision_plan import Cost
from hf_neuron_moe.formats.padding import padded_size

FEW_TOKENS = 512
"""Tokens per expert below which reading an expert's weights is most of its time."""


def advise(measures: Measures, costs: Mapping[str, Mapping[str, Cost]], device: str, step_tokens: int) -> list[str]:
    """Return sentences: what the roofline gives, and what of these shapes speaks for or against it."""
    chip = chip_of(device)
    if "mxfp8" not in chip.flops:
        return [f"{device} has no MXFP8 products: blocks in mxfp8 cost accuracy there and gain no time. Use bf16."]
    bf16, mxfp8 = (sum(row[kind].seconds for row in costs.values()) for kind in ("bf16", "mxfp8"))
    gain = bf16 / mxfp8
    lines = [
        f"On {device} the blocks of a step of {step_tokens:,} tokens take at least {1e3 * mxfp8:.3g} ms in mxfp8 and "
        f"{1e3 * bf16:.3g} ms in bf16: at best {gain:.2f} times as fast (estimate from published figures)."
    ]
    if gain < 1.1:
        lines.append("MXFP8 does not pay here: " + _no_gain_reason(chip.flops))
    else:
        lines.append(
            "Public measurements of MXFP8 training range from 0.75 to 1.8 times bf16's speed: quantizing reads every "
            "operand once more, and small products leave the multipliers waiting. Measure before you rely on it."
        )
    lines += _shapes(measures, Step(step_tokens), padded=device in CHIPS)
    return lines


def missing_kernels(groups: Iterable[BlockGroup], device: str) -> dict[tuple[str, str], str]:
    """Return by block and precision why no documented kernel of a Neuron chip trains it; nothing for a GPU."""
    if device not in CHIPS:
        return {}
    answers = [(each, each.documented[device]) for each in usable_kernels(groups, None, None)]
    return {
        (name, each.precision): reason for each, reason in answers if reason is not None for name in each.group.names
    }


def without_kernels(missing: Mapping[tuple[str, str], str], precisions: Mapping[str, str], device: str) -> list[str]:
    """Return a sentence for each reason why a Neuron chip's documented kernels do not train blocks as planned.

    Another one is for a precision that was left out for such a reason.
    """
    found, spared = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (name, precision), reason in missing.items():
        planned = precisions.get(name)
        if planned == precision:
            found[precision, reason] += 1
        elif planned is not None and precision not in (*precisions.values(), "fp32"):
            spared[precision, reason] += 1
    return [
        f"No documented kernel trains {counted(count, 'block')} in {precision} on {device}: {reason}. So the plan does "
        "not take it there, whatever it would cost."
        for (precision, reason), count in spared.items()
    ] + [
        f"No documented kernel trains {counted(count, 'block')} of the plan in {precision} on {device}: {reason}. "
        "PyTorch computes them with neuron_fallback: torch, and takes other times than those above."
        for (precision, reason), count in found.items()
    ]


def _no_gain_reason(flops: Mapping[str, float]) -> str:
    if flops["mxfp8"] <= flops["bf16"]:
        return "this device multiplies MXFP8 values as bf16."
    return "the blocks' memory traffic, which MXFP8 does not shrink, takes longer than their products."


def _shapes(measures: Measures, step: Step, *, padded: bool) -> list[str]:
    lines = []
    routed = [block for block in measures.blocks.values() if block.kind == "experts"]
    if routed:
        share = max(block.tokens_E.sum().item() / block.experts for block in routed) / max(measures.positions, 1)
        each = share * step.tokens
        few = " That is few: weights are read for little work." if each < FEW_TOKENS else ""
        lines.append(f"Each expert gets {each:,.0f} of a step's {step.tokens:,} tokens on average.{few}")
        if each and padded:
            filled = each / (-(-each // step.block_size) * step.block_size)
            lines.append(f"Its blocks of {step.block_size} rows are {100 * filled:.0f} % full.")
    if not padded:
        return lines
    needed = sum(block.hidden * block.inner * block.experts for block in measures.blocks.values())
    whole = sum(
        padded_size(block.hidden) * padded_size(block.inner) * block.experts for block in measures.blocks.values()
    )
    if whole > 1.02 * needed:
        lines.append(f"Padding H and I to multiples of 128 adds {100 * (whole / needed - 1):.0f} % of work.")
    return lines

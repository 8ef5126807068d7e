"""What a user asks of a conversion, and which of these wishes go together.

Everything here changes the bytes that are written; how the work is done (workers, parts) is no option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_neuron_moe.errors import ConfigError, nearest, public

PRECISIONS = ("bf16", "mxfp8", "mxfp4")
LAYOUTS = ("fused", "kernel")
SCALE_LAYOUTS = ("packed", "oversized", "compact")
SCALE_RULES = ("neuron", "floor", "ceil", "rceil", "even")
PURPOSES = ("inference", "training", "lora")

FORWARD = "forward"
BACKWARD = "backward"


@dataclass(frozen=True)
class ConvertOptions:
    """What to make of the MLP and expert weights."""

    precision: str = "bf16"
    """``"bf16"``; ``"mxfp8"``, e4m3 codes with one scale byte per 32 values of the contraction axis; or ``"mxfp4"``,
    e2m1 codes likewise, which only the inference kernels of experts take."""
    layout: str = "kernel"  # ``"fused"`` keeps Hugging Face's axis order, ``"kernel"`` takes the kernels'
    max_shard_bytes: int = 5_000_000_000
    """A shard is closed before it would grow beyond this; a larger weight gets its own."""
    swizzle: bool | None = field(default=None, kw_only=True)
    """Whether operands are interleaved as the MLP kernels read them. None: wherever the kernels need it, that is for MX
    in kernel layout. True also stores dense bf16 weights so (the MLP forward's pre-swizzled mode)."""
    scales: str | None = field(default=None, kw_only=True)
    """Where block scales lie (:mod:`hf_neuron_moe.formats.scales`). None: compact in fused layout, packed for the MLP
    kernels, and one row per 8 partitions for ``moe_cte``."""
    scale_rule: str | None = field(default=None, kw_only=True)
    """How a block's scale follows from its largest value; None: ``"neuron"`` for MXFP8 and ``"floor"`` for MXFP4
    (:func:`hf_neuron_moe.formats.quantize_moe_gate_up` says why)."""
    purpose: str | None = field(default=None, kw_only=True)
    """``"inference"`` writes what forward reads, and experts in MX kernel layout as ``moe_cte`` takes them;
    ``"training"`` and ``"lora"`` add the transposed MX operands that the gradient of a block's input needs (a weight's
    own gradient needs none, so that both write the same). None: ``"training"``, and ``"inference"`` for MXFP4."""
    tp_degree: int = field(default=1, kw_only=True)  # Ranks among which the I axis of every converted weight is split
    pad: bool = field(default=False, kw_only=True)  # Add zeros to H and I up to the sizes that the kernels take

    def __post_init__(self) -> None:
        _choice("precision", self.precision, PRECISIONS)
        _choice("layout", self.layout, LAYOUTS)
        if self.purpose is None:
            object.__setattr__(self, "purpose", "inference" if self.precision == "mxfp4" else "training")
        _choice("purpose", self.purpose, PURPOSES)
        _choice("scales", self.scales, (*SCALE_LAYOUTS, None))
        _choice("scale_rule", self.scale_rule, (*SCALE_RULES, None))
        _choice("swizzle", self.swizzle, (True, False, None))
        _choice("pad", self.pad, (True, False))
        _positive("max_shard_bytes", self.max_shard_bytes, "number of bytes", "Leave it out for 5 GB shards.")
        _positive("tp_degree", self.tp_degree, "number of ranks", "Leave it out for one rank.")
        self._check_bf16()
        self._check_fp4()
        self._check_layout()

    @property
    def quantized(self) -> bool:
        """Whether weights become MX codes."""
        return self.precision != "bf16"

    @property
    def swizzled(self) -> bool:
        """Whether operands of the MLP kernels are interleaved."""
        return self.swizzle if self.swizzle is not None else self.quantized and self.layout == "kernel"

    @property
    def rule(self) -> str:
        """The scale rule in force, for MX."""
        return self.scale_rule or ("floor" if self.precision == "mxfp4" else "neuron")

    @property
    def orientations(self) -> tuple[str, ...]:
        """Orientations that are written: bf16 needs one, since transposing it costs no accuracy."""
        return (FORWARD,) if self.purpose == "inference" or not self.quantized else (FORWARD, BACKWARD)

    def _check_bf16(self) -> None:
        if self.quantized:
            return
        for name in ("scales", "scale_rule"):
            if getattr(self, name) is not None:
                _senseless(name, "left out with precision bf16, which has no block scales", getattr(self, name))

    def _check_fp4(self) -> None:
        if self.precision != "mxfp4":
            return
        if self.purpose != "inference":
            remedy = "Use --for inference, or --precision mxfp8."
            _senseless("purpose", "inference with mxfp4: no kernel computes gradients with FP4", self.purpose, remedy)
        if self.layout != "kernel":
            remedy = "Use --layout kernel, or --precision mxfp8."
            _senseless("layout", "kernel with mxfp4: only moe_cte reads FP4, in its own layout", self.layout, remedy)

    def _check_layout(self) -> None:
        if self.layout == "fused":
            if self.swizzle:
                _senseless("swizzle", "off in fused layout, which keeps Hugging Face's axis order", self.swizzle)
            if self.pad:
                _senseless("pad", "off in fused layout, whose sizes are Hugging Face's", self.pad)
            if self.scales not in (None, "compact"):
                _senseless("scales", "compact in fused layout: the others belong to swizzled codes", self.scales)
            return
        if self.quantized and self.swizzle is False:
            _senseless("swizzle", "on for MX in kernel layout: the kernels read no other quantised operand", False)
        if self.scales == "compact" and self.purpose != "inference":
            remedy = "Use packed or oversized scales, or --layout fused."
            _senseless("scales", "packed or oversized: the MLP kernels take no compact ones", self.scales, remedy)


@public("convert")
def _choice(name: str, value: object, allowed: Sequence[object]) -> None:
    # Booleans by identity: 1 == True, and neither a count nor a name is a switch.
    if value in allowed if isinstance(value, str) else any(value is choice for choice in allowed):
        return
    known = [str(choice) for choice in allowed if choice is not None]
    hint = nearest(value, known) if isinstance(value, str) else ""
    raise ConfigError.about(name, f"one of {', '.join(known)}", repr(value), f"Choose one of these.{hint}")


@public("convert")
def _positive(name: str, value: object, what: str, remedy: str) -> None:
    if type(value) is int and value > 0:
        return
    raise ConfigError.about(name, f"a positive {what}", repr(value), remedy)


@public("convert")
def _senseless(
    name: str, expected: str, got: object, remedy: str = "Leave the option out, or use --layout kernel with MX."
) -> None:
    raise ConfigError.about(name, expected, repr(got), remedy)

"""What a user asks of a conversion, and which of these wishes go together.

Everything here changes the bytes that are written; how the work is done (workers, parts) is no option.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hf_neuron_moe.config import LAYOUTS, PURPOSES, SCALE_LAYOUTS, SCALE_RULES, STORED_PRECISIONS as PRECISIONS
from hf_neuron_moe.errors import ConfigError, known_names, not_one_of, public
from hf_neuron_moe.precision_map import PrecisionMap, as_precision, precisions_in

NO_COMPACT_SCALES = "packed or oversized: the MLP kernels take no compact ones"

FORWARD = "forward"
BACKWARD = "backward"


@dataclass(frozen=True)
class ConvertOptions:
    """What to make of the MLP and expert weights."""

    precision: Any = "bf16"
    """``"bf16"``; ``"mxfp8"``, e4m3 codes with one scale byte per 32 values of the contraction axis; or ``"mxfp4"``,
    e2m1 codes likewise, which only the inference kernels of experts take. A mapping gives blocks their own, by glob
    over module names, as in :class:`hf_neuron_moe.NeuronMoEConfig`. Here a glob that ends in ``.gate_up_proj``,
    ``.up_proj`` or ``.down_proj`` gives one product of experts ``"mxfp8"`` beside the other's ``"mxfp4"``, or the other
    way round."""
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
    """``"inference"`` writes what forward reads, and experts in MX kernel layout as ``moe_cte`` takes them.
    ``"training"`` and ``"lora"`` add the transposed MX operands that the gradient of a block's input needs. A weight's
    own gradient needs none, so that both write the same. None: ``"training"``, and ``"inference"`` for MXFP4."""
    tp_degree: int = field(default=1, kw_only=True)  # Ranks among which the I axis of every converted weight is split
    ep_degree: int = field(default=1, kw_only=True)
    """Ranks among which experts are dealt out, each a range of whole ones; `tp_degree` is then for the others."""
    pad: bool = field(default=False, kw_only=True)  # Add zeros to H and I up to the sizes that the kernels take
    allow_inexact: bool = field(default=False, kw_only=True)
    """Quantize the decoded values of MX codes again where ``moe_cte``'s words cannot hold the codes themselves."""

    @public("convert")
    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", as_precision(self.precision, PRECISIONS))
        has_mxfp4 = "mxfp4" in precisions_in(self.precision)
        if self.purpose is None:
            object.__setattr__(self, "purpose", "inference" if has_mxfp4 else "training")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            # Booleans by identity: 1 == True, and neither a count nor a name is a switch.
            if not (value in allowed if isinstance(value, str) else any(value is choice for choice in allowed)):
                known = [str(choice) for choice in allowed if choice is not None]
                raise not_one_of(name, value, known, None if isinstance(value, str) else "")
        for name, what, fix in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value <= 0:
                raise ConfigError.about(name, f"a positive {what}", repr(value), fix)
        kernel = self.layout == "kernel"
        cases = {
            "bf16": not self.quantized,
            "mxfp4": has_mxfp4,
            "fused": not kernel,
            "MX kernel": kernel and self.quantized,
            "trained kernel": kernel and self.purpose != "inference",
        }
        for case, name, allowed, expected in _RULES:
            if cases[case] and getattr(self, name) not in allowed:
                fix = _FIXES.get((case, name), "Leave the option out, or use --layout kernel with MX.")
                raise ConfigError.about(name, expected, repr(getattr(self, name)), fix)

    @property
    def quantized(self) -> bool:
        """Whether weights become MX codes; of several precisions, whether any do."""
        return precisions_in(self.precision) != ("bf16",)

    @property
    def swizzled(self) -> bool:
        """Whether operands of the MLP kernels are interleaved."""
        return self.swizzle if self.swizzle is not None else self.quantized and self.layout == "kernel"

    @property
    def rule(self) -> str:
        """The scale rule in force, for MX; of several precisions, those that are in force."""
        defaults = {"floor" if own == "mxfp4" else "neuron" for own in precisions_in(self.precision) if own != "bf16"}
        return self.scale_rule or ", ".join(sorted(defaults)) or "neuron"

    @property
    def orientations(self) -> tuple[str, ...]:
        """Orientations that are written: bf16 needs one, since transposing it costs no accuracy."""
        return (FORWARD,) if self.purpose == "inference" or not self.quantized else (FORWARD, BACKWARD)

    def of(self, weight: str) -> ConvertOptions:
        """Return the options of a fused weight: those with its own precision, or that of its block."""
        if not isinstance(self.precision, PrecisionMap):
            return self
        block, _, product = weight.removesuffix(".weight").rpartition(".")
        own = self.precision.of((block,), product)
        left_out: dict[str, Any] = {"scales": None, "scale_rule": None} if own == "bf16" else {}
        return replace(self, precision=own, **left_out)


_made: Any = ConvertOptions  # a type checker refuses to exchange the constructor of what may be a subclass
_made.__init__ = known_names("ConvertOptions")(_made.__init__)

_CHOICES: dict[str, tuple[object, ...]] = {
    "layout": LAYOUTS,
    "purpose": PURPOSES,
    "scales": (*SCALE_LAYOUTS, None),
    "scale_rule": (*SCALE_RULES, None),
    "swizzle": (True, False, None),
    "pad": (True, False),
    "allow_inexact": (True, False),
}
_COUNTS = (
    ("max_shard_bytes", "number of bytes", "Leave it out for 5 GB shards."),
    ("tp_degree", "number of ranks", "Leave it out for one rank."),
    ("ep_degree", "number of ranks", "Leave it out for one rank."),
)
_RULES = (
    ("bf16", "scales", (None,), "left out with precision bf16, which has no block scales"),
    ("bf16", "scale_rule", (None,), "left out with precision bf16, which has no block scales"),
    ("mxfp4", "purpose", ("inference",), "inference with mxfp4: no kernel computes gradients with FP4"),
    ("mxfp4", "layout", ("kernel",), "kernel with mxfp4: only moe_cte reads FP4, in its own layout"),
    ("fused", "swizzle", (None, False), "off in fused layout, which keeps Hugging Face's axis order"),
    ("fused", "pad", (False,), "off in fused layout, whose sizes are Hugging Face's"),
    ("fused", "scales", (None, "compact"), "compact in fused layout: the others belong to swizzled codes"),
    ("MX kernel", "swizzle", (None, True), "on for MX in kernel layout: the kernels read no other quantized operand"),
    ("trained kernel", "scales", (None, "packed", "oversized"), NO_COMPACT_SCALES),
)
"""Which options go together: in which case, which option has to be one of which values, and that rule in words."""
_FIXES = {
    ("mxfp4", "purpose"): "Use --for inference, or --precision mxfp8.",
    ("mxfp4", "layout"): "Use --layout kernel, or --precision mxfp8.",
    ("trained kernel", "scales"): "Use packed or oversized scales, or --layout fused.",
}

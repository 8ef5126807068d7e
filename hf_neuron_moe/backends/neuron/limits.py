"""What the kernels take, as documented: checked before a kernel is called, and when a model is patched.

H hidden, I intermediate (per tensor-parallel rank where sharded), B tokens per block, E experts, T tokens.

Sources: nki-library 2.29 to 2.33: ``mlp_mxfp8`` (2.30), ``moe_cte`` shard_on_i, ``blockwise_mm_bwd``, ``moe_mxfp8``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.gates import gate_notes, unsupported_reason_gate
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError, public
from hf_neuron_moe.formats.padding import LANES

BF16_HIDDEN_STEP, BF16_HIDDEN = 512, (512, 8192)  # of shard_on_i: H in steps and within bounds
BF16_INNER_STEP = 64  # shard_on_i takes multiples of 16, blockwise_mm_bwd 32 per core of two
BF16_BLOCK_STEP = 256
BF16_TOKENS = 32768  # of one call to moe_cte, with bf16 weights and with MX words
MAX_TOKENS = (1 << 24) - 1  # ids pass through fp32 on the chip and are exact below 2**24, the sink row's included
SMALL_BLOCKS, LARGE_BLOCKS = (128, 256, 512, 1024), (2048, 4096)
ON_TRN3 = "the MXFP8 kernels run on Trn3 only"
_NEEDS = {
    ("mlp", "mxfp8"): ("mlp_forward", "mlp_backward"),
    ("experts", "mxfp8"): ("moe_forward_mxfp8", "moe_backward_mxfp8"),
    ("experts", "bf16"): ("moe_forward", "moe_backward"),
    ("mlp", "bf16"): ("moe_forward", "moe_backward"),
}
ONE_EXPERT_BLOCK = 512  # block size of dense MLPs in bf16
ONE_EXPERT = (
    "computed by the bf16 kernels of experts as one expert with affinity 1, because no dense bf16 pair is documented; "
    f"a call takes up to {BF16_TOKENS:,} tokens, in blocks of {ONE_EXPERT_BLOCK}, after each of which weight gradients "
    f"are added in bf16; AWS documents 8 to 64 experts, intermediate sizes of 2,048 to 16,384, and tests one expert in "
    "the backward alone"
)
"""About dense MLPs in bf16."""


@dataclass(frozen=True)
class Device:
    """What the kernels run on."""

    platform: str  # "trn2" or "trn3"
    lnc: int  # physical cores per logical core
    assumed: bool = False  # nothing on the machine says which platform it is


def this_device() -> Device:
    """Return what this machine's kernels run on."""
    platform = versions.platform()
    return Device(platform.name, versions.lnc(), assumed=platform.source == versions.ASSUMED)


@dataclass(frozen=True)
class Block:
    """A block as its kernels see it."""

    kind: str  # "mlp" or "experts"
    precision: str  # "bf16", "mxfp8" or "fp32"
    hidden: int  # H
    inner: int  # I
    block_size: int = 512  # B, read for experts only
    gate: Gate = SWIGLU
    biased: tuple[bool, bool] = (False, False)  # whether gate or up, and whether down has a bias

    @classmethod
    def of(cls, shape: BlockShape, spec: BlockSpec) -> Block:
        """Return the block of an operator."""
        size = spec.block_size if shape.kind == "experts" else ONE_EXPERT_BLOCK
        return cls(shape.kind, spec.precision, shape.hidden, shape.inner, size, spec.gate, shape.biased)

    @property
    def needs(self) -> tuple[str, ...]:
        """The adapter's names of the kernels: forward, backward; empty where none are documented."""
        return _NEEDS.get((self.kind, self.precision), ())

    @property
    def blockwise(self) -> bool:
        """Whether the kernels of experts compute it: experts, and a dense MLP in bf16 as one expert."""
        return self.kind == "experts" or self.precision == "bf16"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report says of how the kernels compute this block, besides what holds for all in its precision."""
        dense = (ONE_EXPERT,) if self.blockwise and self.kind == "mlp" else ()
        return (*dense, *gate_notes(self.gate))

    def in_vain(self, experts: int) -> str:
        """What a report says of this block where its weights are frozen."""
        weights = 3 if self.gate.gated else 2
        size = 2 * weights * experts * self.padded[0] * self.padded[1]
        return (
            f"its weights are frozen, and no documented backward kernel leaves their gradients out: {weights} of its "
            f"{2 * weights} products and {size / 2**20:,.1f} MiB of bf16 gradients are made in vain by each call"
        )

    @property
    def padded(self) -> tuple[int, int]:
        """H and I as the kernels get them."""
        steps = (BF16_HIDDEN_STEP, BF16_INNER_STEP) if self.precision == "bf16" else (LANES, LANES)
        return -(-self.hidden // steps[0]) * steps[0], -(-self.inner // steps[1]) * steps[1]


def unsupported_reason(block: Block, device: Device, adapter: Adapter) -> str | None:
    """Return why the installed kernels cannot compute `block` forward and backward on `device`, or None."""
    bf16 = block.precision == "bf16"
    if not block.needs:
        return "no Neuron kernel computes in fp32"
    if not bf16 and device.platform != "trn3":
        return f"{ON_TRN3}, and this is {device.platform}"
    if bf16 and device.platform != "trn2" and not device.assumed:
        only = "the documents give the bf16 kernels of experts, which also compute dense MLPs, for Trn2 only"
        other = unsupported_reason(replace(block, precision="mxfp8"), device, adapter)
        hint = "" if other is not None else "; precision='mxfp8' has a kernel pair there"
        return f"{only}, and this is {device.platform}{hint}"
    if block.blockwise and device.lnc != 2:
        return "the experts' backward needs two physical cores per logical core (LNC 2), and LNC is 1"
    reason = adapter.unsupported_reason(*block.needs)
    if reason is None:
        reason = unsupported_reason_gate(block.gate, block.biased, block.kind, block.precision, block.needs, adapter)
    if reason is not None or not block.blockwise:
        return reason
    sizes, (low, high) = block_sizes(block, adapter), BF16_HIDDEN
    if block.block_size not in sizes:
        return f"the kernels take block sizes {', '.join(map(str, sizes))}, and block_size is {block.block_size}"
    if bf16 and not low <= block.padded[0] <= high:
        return f"moe_cte takes a hidden size of {low} to {high}, and it is {block.hidden}"
    return None


def block_sizes(block: Block, adapter: Adapter) -> tuple[int, ...]:
    """Return the values of B that forward and backward of experts both take."""
    backward = adapter.match(block.needs[1])
    if block.precision == "mxfp8":
        return SMALL_BLOCKS + (() if backward.installed.name == "2.31" else LARGE_BLOCKS)
    large = LARGE_BLOCKS if "skip_gate_proj" in backward.parameters else ()
    return tuple(size for size in SMALL_BLOCKS + large if size % BF16_BLOCK_STEP == 0)


@public("neuron backend")
def check_call(block: Block, tokens: int, dtype_name: str, device: Device, adapter: Adapter) -> None:
    """Refuse what :func:`unsupported_reason` names, and calls that are too long or not in bf16."""
    reason = unsupported_reason(block, device, adapter)
    if reason is not None:
        argument = f"the {block.kind} block (H={block.hidden}, I={block.inner}, precision={block.precision})"
        fix = "Patch with fallback='torch' to compute such blocks without the kernels, or change the option."
        raise ConfigError.about(argument, "one that the installed kernels compute", reason, fix)
    if dtype_name != "torch.bfloat16":
        fix = "The operators cast to it; call them instead of the backend."
        raise DTypeError.about("hidden states", "torch.bfloat16", dtype_name, fix)
    check_length(most_tokens(block), tokens, f" in {block.precision}")


@public("neuron backend")
def check_length(most: int | None, tokens: int, condition: str = "") -> None:
    """Refuse a call with more tokens than the kernels take."""
    if unsupported_reason_tokens(most, tokens) is not None:
        argument = "the number of tokens (batch size times length)"
        fix = "Use smaller micro-batches or shorter sequences."
        raise ShapeError.about(argument, f"at most {most}{condition}", tokens, fix)


def most_tokens(block: Block) -> int | None:
    """Return the largest number of tokens of one call that the kernels of `block` take; None if there is no limit."""
    if not block.blockwise:
        return None
    return BF16_TOKENS if block.precision == "bf16" else MAX_TOKENS


def unsupported_reason_tokens(most: int | None, tokens: int) -> str | None:
    """Return why kernels that take at most `most` tokens cannot compute a call of `tokens`, or None."""
    return f"the kernels take at most {most:,} tokens per call" if most is not None and tokens > most else None

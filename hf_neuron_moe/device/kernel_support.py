"""Which kernels compute which of a model's blocks, on this machine and by the documents of the newest SDK.

E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.neuron.adapter import Adapter, Match
from hf_neuron_moe.backends.neuron.gates import FURTHER_ARGUMENTS, unsupported_reason_gate
from hf_neuron_moe.backends.neuron.generations import FUNCTIONS, KERNEL_PRECISIONS
from hf_neuron_moe.backends.neuron.limits import ONE_EXPERT_BLOCK, Block, Device, unsupported_reason
from hf_neuron_moe.backends.neuron.quantized_experts import NO_BACKWARD, kernel_need, unsupported_reason_quantized
from hf_neuron_moe.backends.neuron.versions import PLATFORMS
from hf_neuron_moe.config import BLOCK_SIZES, NeuronMoEConfig
from hf_neuron_moe.device.installed import CheckedAdapter
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.patching.discovery import discover
from hf_neuron_moe.patching.planning import block_shape

DOCUMENTED_SDK = "2.33"
DOCUMENTED_LNC = 2
HERE = "here"
NO_TRAINING = f"MX codes are not trained: {NO_BACKWARD}"


class DocumentedAdapter(Adapter):
    """Answers as if the nkilib of :data:`DOCUMENTED_SDK` were installed; has no kernels."""

    def match(self, need: str) -> Match:
        """Return the newest generation of `need`."""
        name, (newest, *_) = FUNCTIONS[need]
        return Match(name, newest, newest.passed | FURTHER_ARGUMENTS.get(need, frozenset()))


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one model that are alike."""

    kind: str  # "mlp" or "experts"
    names: tuple[str, ...]  # in the model
    experts: int | None  # E; None for a dense MLP
    top_k: int | None  # experts per token; None for a dense MLP, 0 where the model does not say
    hidden: int | None  # H; None where unknown
    inner: int | None  # I; None where unknown
    reason: str | None  # why patch_model leaves them alone on any backend; None where it patches them
    gated: bool = True  # False for blocks without a gate, which stay stock and which --strict does not count
    codes: bool = False  # whether their weights are MX codes of a conversion
    ordered: tuple[bool, bool] = (True, False)
    """Whether weights are in the kernels' order, gate and up in one, or ``[E, H, 2I]``, ``[E, I, H]``. First in kernel
    layout, where a fused layer keeps its own order of rows, then in stock layout."""
    biased: tuple[bool, bool] = (False, False)  # whether gate or up, and whether down has a bias
    dtype: torch.dtype = torch.bfloat16  # of the parameters
    gate: Gate = SWIGLU
    stack: MXExpertStack | None = field(default=None, compare=False, repr=False)
    """Of blocks with MX codes, the first one's tensors, which may be on the meta device."""

    def block(self, precision: str, block_size: int) -> Block:
        """Return the block as its kernels see it; the sizes are known."""
        assert self.hidden is not None and self.inner is not None, "blocks without a reason have sizes"
        size = block_size if self.kind == "experts" else ONE_EXPERT_BLOCK
        return Block(self.kind, precision, self.hidden, self.inner, size, self.gate, self.biased)

    @property
    def label(self) -> str:
        """``"32 x experts 8 x (4096, 14336)"``."""
        count = "" if self.experts is None else f" {self.experts} x"
        sizes = "" if self.hidden is None else f"{count} ({self.hidden}, {self.inner})"
        return f"{len(self.names)} x {'frozen ' if self.codes else ''}{self.kind}{sizes}"

    def to_dict(self) -> dict[str, Any]:
        """Return names and sizes as plain values."""
        sizes = {"experts": self.experts, "hidden_size": self.hidden, "intermediate_size": self.inner}
        return {"kind": self.kind, "names": list(self.names), **sizes}

    @property
    def stored(self) -> str:
        """How codes are stored, for people: ``"e4m3fn codes, words"``; empty for others."""
        if self.stack is None:
            return ""
        layouts = (self.stack.gate_up_layout, self.stack.down_layout)
        return " and ".join(dict.fromkeys(f"{layout.fmt} codes, {layout.arrangement}" for layout in layouts))


@dataclass(frozen=True)
class Usable:
    """Whether the kernels of one precision compute a group of blocks; MX blocks in inference."""

    group: BlockGroup
    precision: str  # "bf16" or "mxfp8"; of MX blocks how they are stored
    kernels: tuple[str, ...]  # nkilib's forward and backward for them and their gate; empty where none are documented
    here: str | None  # why not on this machine; None where they do
    documented: dict[str, str | None]  # by chip, why not with SDK 2.33 there; None where they do
    block_size: int  # that the answers are for
    block_sizes: dict[str, tuple[int, ...]]  # by place, those the kernels take; only of trainable experts with kernels
    notes: tuple[str, ...] = ()  # on how the kernels compute them

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        group = self.group

        def answer(place: str, reason: str | None) -> dict[str, Any]:
            return {"usable": reason is None, "reason": reason, "block_sizes": list(self.block_sizes.get(place, ()))}

        return {
            **group.to_dict(),
            "gated": group.gated,
            "precision": self.precision,
            "kernels": list(self.kernels),
            "notes": list(self.notes),
            "frozen": group.codes,
            "training": NO_TRAINING if group.codes else None,
            "block_size": self.block_size if group.experts is not None and not group.codes else None,
            "here": answer(HERE, self.here),
            "documented": {name: answer(name, why) for name, why in self.documented.items()},
        }


def block_groups(model: nn.Module) -> list[BlockGroup]:
    """Return a model's blocks, like ones together, in model order, those with MX weights last; no value is read."""
    groups: dict[tuple[BlockGroup, Any], list[str]] = {}
    for found in discover(model):
        group = BlockGroup(found.kind, (), found.sizes[0], found.top_k, *found.sizes[1:], found.reason, found.gated)
        if found.reason is None:
            kernel, stock = (block_shape(found, layout) for layout in ("kernel", "stock"))
            ordered = (kernel.ordered, stock.ordered)
            group = replace(group, ordered=ordered, biased=stock.biased, dtype=stock.dtype, gate=found.gate)
        groups.setdefault((group, None), []).append(found.name)
    for name, block in model.named_modules():
        if isinstance(block, QuantizedBlock):
            stack, shape = block.neuron_stack, block.neuron_shape
            kind, sizes = "mlp" if shape.experts is None else "experts", (shape.hidden, shape.intermediate)
            group = BlockGroup(kind, (), shape.experts, shape.top_k, *sizes, NO_TRAINING, codes=True, stack=stack)
            stored = (stack.gate_up_layout, stack.down_layout, stack.down_codes.shape)
            groups.setdefault((group, stored), []).append(name)
    return [replace(group, names=tuple(names)) for (group, _), names in groups.items()]


def usable_kernels(
    groups: Iterable[BlockGroup],
    here: Device | None,
    unavailable: str | None,
    block_size: int | None = None,
    lnc: int = DOCUMENTED_LNC,
) -> list[Usable]:
    """Return for every group and precision whether there are kernels; for MX blocks whether there is a forward.

    `here` is this machine's chip, None if unknown, and `unavailable` why no kernel runs on it. `block_size` is that of
    experts, None for the default; `lnc`, physical cores per logical core, is for the answers by the documents.
    """
    size = NeuronMoEConfig().block_size if block_size is None else block_size
    documented = DocumentedAdapter()
    places: _Places = {name: (Device(name, lnc), documented) for name in PLATFORMS}
    if here is None:
        unavailable = unavailable or "the chip is not known"
    elif unavailable is None:
        places[HERE] = here, CheckedAdapter()
    return [
        _answer(group, precision, places, size, unavailable)
        for group in groups
        for precision in (KERNEL_PRECISIONS if group.stack is None else (group.stored,))
    ]


_Places = dict[str, tuple[Device, Adapter]]
"""Devices and what is known of their kernels: :data:`HERE` unless no kernel runs here, and the documented chips."""


def _answer(group: BlockGroup, precision: str, places: _Places, size: int, unavailable: str | None) -> Usable:
    kernels: tuple[str, ...] = ()
    blocks: list[Block] = []
    notes: tuple[str, ...] = ()
    if group.stack is not None:
        kernels = (FUNCTIONS[kernel_need(group.stack)][0],)
        reasons = {
            name: unsupported_reason_quantized(group.stack, *place, training=False) for name, place in places.items()
        }
    elif group.reason is not None:
        reasons = dict.fromkeys((*PLATFORMS, HERE), group.reason)
    else:
        block = group.block(precision, size)
        form = (block.gate, block.biased, block.kind, precision, block.needs, DocumentedAdapter())
        needs = () if unsupported_reason_gate(*form) is not None else block.needs
        kernels, notes = tuple(FUNCTIONS[need][0] for need in needs), block.notes if needs else ()
        reasons = {name: unsupported_reason(block, *place) for name, place in places.items()}
        blocks = [] if group.experts is None else [group.block(precision, each) for each in BLOCK_SIZES]
    sizes = {
        name: tuple(each.block_size for each in blocks if unsupported_reason(each, *place) is None)
        for name, place in places.items()
    }
    return Usable(group, precision, kernels, reasons.pop(HERE, unavailable), reasons, size, sizes, notes)

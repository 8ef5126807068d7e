"""Which kernels compute which of a model's blocks, on this machine and by the documents of the newest SDK.

E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.neuron.adapter import Adapter, Match
from hf_neuron_moe.backends.neuron.frozen import NO_BACKWARD, kernel_need, why_not_frozen
from hf_neuron_moe.backends.neuron.generations import FUNCTIONS, KERNEL_PRECISIONS
from hf_neuron_moe.backends.neuron.limits import Block, Device, why_not
from hf_neuron_moe.backends.neuron.versions import PLATFORMS
from hf_neuron_moe.config import BLOCK_SIZES, NeuronMoEConfig
from hf_neuron_moe.device.installed import CheckedAdapter
from hf_neuron_moe.modules.block import stock_slot
from hf_neuron_moe.modules.quantized_blocks import FrozenBlock
from hf_neuron_moe.patching.discovery import Candidate, discover

DOCUMENTED_SDK = "2.33"
DOCUMENTED_LNC = 2
HERE = "here"
NO_TRAINING = f"MX codes are not trained: {NO_BACKWARD}"
_FURTHER = {"moe_backward": frozenset({"skip_gate_proj"})}
"""Arguments of the newest argument sets that the wrappers do not pass, but whose presence the limits ask for."""


class DocumentedAdapter(Adapter):
    """Answers as if the nkilib of :data:`DOCUMENTED_SDK` were installed; has no kernels."""

    def match(self, need: str) -> Match:
        """Return the newest generation of `need`."""
        name, (newest, *_) = FUNCTIONS[need]
        return Match(name, newest, newest.passed | _FURTHER.get(need, frozenset()))


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one model that are alike.

    Attributes:
        kind: ``"mlp"`` or ``"experts"``.
        names: their names in the model.
        experts: E; None for a dense MLP.
        top_k: experts per token; None for a dense MLP, 0 where the model does not say.
        hidden: H; None where unknown.
        inner: I; None where unknown.
        reason: why ``patch_model`` leaves them alone on any backend; None where it patches them.
        gated: False for blocks without a gate, which stay stock and which ``--strict`` does not count.
        codes: whether their weights are MX codes of a conversion.
        ordered: whether transformers' own parameters have the kernels' order: gate and up in one (dense), or
            ``[E, H, 2I]`` and ``[E, I, H]`` (experts).
        dtype: of the parameters.
        stack: of blocks with MX codes, the first one's tensors, which may be on the meta device.
    """

    kind: str
    names: tuple[str, ...]
    experts: int | None
    top_k: int | None
    hidden: int | None
    inner: int | None
    reason: str | None
    gated: bool = True
    codes: bool = False
    ordered: bool = False
    dtype: torch.dtype = torch.bfloat16
    stack: MXExpertStack | None = field(default=None, compare=False, repr=False)

    def block(self, precision: str, block_size: int) -> Block:
        """Return the block as its kernels see it; the sizes are known."""
        assert self.hidden is not None and self.inner is not None, "blocks without a reason have sizes"
        return Block(self.kind, precision, self.hidden, self.inner, block_size)

    @property
    def label(self) -> str:
        """``"32 x experts 8 x (4096, 14336)"``."""
        count = "" if self.experts is None else f" {self.experts} x"
        sizes = "" if self.hidden is None else f"{count} ({self.hidden}, {self.inner})"
        kind = f"frozen {self.kind}" if self.codes else self.kind
        return f"{len(self.names)} x {kind}{sizes}"

    @property
    def stored(self) -> str:
        """How codes are stored, for people: ``"e4m3fn codes, words"``; empty for others."""
        if self.stack is None:
            return ""
        layouts = (self.stack.gate_up_layout, self.stack.down_layout)
        return " and ".join(dict.fromkeys(f"{layout.fmt} codes, {layout.arrangement}" for layout in layouts))


@dataclass(frozen=True)
class Usable:
    """Whether the kernels of one precision compute a group of blocks; frozen MX blocks in inference.

    Attributes:
        group: the blocks.
        precision: ``"bf16"`` or ``"mxfp8"``; of frozen MX blocks how they are stored.
        kernels: nkilib's forward and backward for them; empty where none are documented.
        here: why not on this machine; None where they do.
        documented: by chip, why not with SDK 2.33 there; None where they do.
        block_size: that the answers are for: the configuration's default if none was asked for.
        block_sizes: ``"here"`` and by chip, those that the kernels take; empty for dense and for frozen blocks, and
            where there are no kernels.
    """

    group: BlockGroup
    precision: str
    kernels: tuple[str, ...]
    here: str | None
    documented: dict[str, str | None]
    block_size: int
    block_sizes: dict[str, tuple[int, ...]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        group = self.group
        return {
            "kind": group.kind,
            "names": list(group.names),
            "experts": group.experts,
            "hidden_size": group.hidden,
            "intermediate_size": group.inner,
            "gated": group.gated,
            "precision": self.precision,
            "kernels": list(self.kernels),
            "frozen": group.codes,
            "training": NO_TRAINING if group.codes else None,
            "block_size": self.block_size if group.experts is not None and not group.codes else None,
            "here": self._answer(HERE, self.here),
            "documented": {name: self._answer(name, why) for name, why in self.documented.items()},
        }

    def _answer(self, place: str, reason: str | None) -> dict[str, Any]:
        return {"usable": reason is None, "reason": reason, "block_sizes": list(self.block_sizes.get(place, ()))}


def block_groups(model: nn.Module) -> list[BlockGroup]:
    """Return a model's blocks, like ones together, in model order; the model may be on the meta device."""
    groups: dict[Any, list[Candidate]] = {}
    for found in discover(model):
        key = (found.kind, found.sizes, found.top_k, found.reason, found.gated, *_form(found))
        groups.setdefault(key, []).append(found)
    stock = [
        BlockGroup(
            kind,
            tuple(found.name for found in alike),
            sizes[0],
            top_k,
            sizes[1],
            sizes[2],
            reason,
            gated,
            ordered=ordered,
            dtype=dtype,
        )
        for (kind, sizes, top_k, reason, gated, ordered, dtype), alike in groups.items()
    ]
    return stock + _groups_of_codes(model)


def _form(found: Candidate) -> tuple[bool, torch.dtype]:
    """Whether the parameters have the kernels' order, and their dtype."""
    if found.reason is not None:
        return False, torch.bfloat16
    ordered = len(found.roles.inputs) == 1 if found.roles is not None else bool(found.module.is_transposed)
    weight = getattr(*stock_slot(found.module, found.rules[0].stock[0]))
    return ordered, weight.dtype


def _groups_of_codes(model: nn.Module) -> list[BlockGroup]:
    """Blocks with MX weights, which a conversion has and which are not trained."""
    groups: dict[Any, list[str]] = {}
    stacks: dict[Any, MXExpertStack] = {}
    for name, block in model.named_modules():
        if isinstance(block, FrozenBlock):
            stack, shape = block.neuron_stack, block.neuron_shape
            experts = stack.gate_up_codes.shape[0] if stack.gate_up_codes.dim() > 2 else None
            sizes = (experts, shape.top_k, shape.hidden, shape.intermediate)
            key = (*sizes, stack.gate_up_layout, stack.down_layout, stack.down_codes.shape)
            groups.setdefault(key, []).append(name)
            stacks.setdefault(key, stack)
    return [
        BlockGroup(
            "mlp" if E is None else "experts",
            tuple(names),
            E,
            K,
            hidden,
            inner,
            NO_TRAINING,
            codes=True,
            stack=stacks[E, K, hidden, inner, *rest],
        )
        for (E, K, hidden, inner, *rest), names in groups.items()
    ]


@dataclass(frozen=True)
class _Place:
    """A device, the kernels there, and why there are none whatever the block; None where that depends on it."""

    device: Device | None
    adapter: Adapter
    unavailable: str | None = None


def usable_kernels(
    groups: Iterable[BlockGroup],
    here: Device | None,
    unavailable: str | None,
    block_size: int | None = None,
    lnc: int = DOCUMENTED_LNC,
) -> list[Usable]:
    """Ask for every group and precision whether there are kernels; for frozen MX blocks whether there is a forward.

    Args:
        groups: of :func:`block_groups`.
        here: this machine's chip; None where it cannot be told.
        unavailable: why no kernel runs on this machine at all, or None.
        block_size: tokens per block of experts; None for what the configuration takes by default.
        lnc: physical cores per logical core, for the answers by the documents.
    """
    size = NeuronMoEConfig().block_size if block_size is None else block_size
    if unavailable is None and here is None:
        unavailable = "the chip is not known"
    documented = DocumentedAdapter()
    places = {name: _Place(Device(name, lnc), documented) for name in PLATFORMS}
    places[HERE] = _Place(here, CheckedAdapter(), unavailable)
    answers = []
    for group in groups:
        if group.stack is not None:
            answers.append(_usable_codes(group, group.stack, places, size))
            continue
        answers += [_usable(group, precision, places, size) for precision in KERNEL_PRECISIONS]
    return answers


def _usable_codes(group: BlockGroup, stack: MXExpertStack, places: Mapping[str, _Place], size: int) -> Usable:
    reasons = {
        name: place.unavailable
        if place.device is None or place.unavailable is not None
        else why_not_frozen(stack, place.device, place.adapter, training=False)
        for name, place in places.items()
    }
    kernels = (FUNCTIONS[kernel_need(stack)][0],)
    return Usable(group, group.stored, kernels, reasons.pop(HERE), reasons, size, {})


def _usable(group: BlockGroup, precision: str, places: Mapping[str, _Place], size: int) -> Usable:
    if group.reason is not None:
        return Usable(group, precision, (), group.reason, dict.fromkeys(PLATFORMS, group.reason), size, {})
    block = group.block(precision, size)
    reasons: dict[str, str | None] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for name, place in places.items():
        reasons[name] = place.unavailable
        if place.unavailable is None and place.device is not None:
            reasons[name] = why_not(block, place.device, place.adapter)
            sizes[name] = _sizes_taken(group, precision, place.device, place.adapter)
    kernels = tuple(FUNCTIONS[need][0] for need in block.needs)
    return Usable(group, precision, kernels, reasons.pop(HERE), reasons, size, sizes)


def _sizes_taken(group: BlockGroup, precision: str, device: Device, adapter: Adapter) -> tuple[int, ...]:
    if group.experts is None:
        return ()
    return tuple(size for size in BLOCK_SIZES if why_not(group.block(precision, size), device, adapter) is None)

"""Which kernels compute which of a model's blocks, on this machine and by the documents of the newest SDK.

E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_neuron_moe.backends.neuron.adapter import Adapter, Match
from hf_neuron_moe.backends.neuron.generations import FUNCTIONS
from hf_neuron_moe.backends.neuron.limits import Block, Device, why_not
from hf_neuron_moe.config import BLOCK_SIZES, NeuronMoEConfig
from hf_neuron_moe.device.installed import CheckedAdapter
from hf_neuron_moe.modules.frozen_block import FrozenBlock
from hf_neuron_moe.patching.discovery import Candidate, discover

DOCUMENTED_SDK = "2.33"
DOCUMENTED_LNC = 2
PRECISIONS = ("bf16", "mxfp8")
TARGETS = ("trn2", "trn3")
HERE = "here"
NO_TRAINING = "MX codes are not trained: no documented kernel gives the input's gradient through pre-quantized weights"
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
        codes: whether their weights are MX codes of a conversion.
    """

    kind: str
    names: tuple[str, ...]
    experts: int | None
    top_k: int | None
    hidden: int | None
    inner: int | None
    reason: str | None
    codes: bool = False

    def block(self, precision: str, block_size: int) -> Block:
        """Return the block as its kernels see it; the sizes are known."""
        assert self.hidden is not None and self.inner is not None, "blocks without a reason have sizes"
        return Block(self.kind, precision, self.hidden, self.inner, block_size)

    @property
    def label(self) -> str:
        """``"32 x experts 8 x (4096, 14336)"``."""
        count = "" if self.experts is None else f" {self.experts} x"
        sizes = "" if self.hidden is None else f"{count} ({self.hidden}, {self.inner})"
        return f"{len(self.names)} x {self.kind}{sizes}"


@dataclass(frozen=True)
class Usable:
    """Whether the kernels of one precision compute a group of blocks.

    Attributes:
        group: the blocks.
        precision: ``"bf16"`` or ``"mxfp8"``.
        kernels: nkilib's forward and backward for them; empty where none are documented.
        here: why not on this machine; None where they do.
        documented: by chip, why not with SDK 2.33 there; None where they do.
        block_size: that the answers are for: the configuration's default if none was asked for.
        block_sizes: ``"here"`` and by chip, those that the kernels take; empty for dense blocks and where there are no
            kernels.
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
            "precision": self.precision,
            "kernels": list(self.kernels),
            "block_size": self.block_size if group.experts is not None else None,
            "here": self._answer(HERE, self.here),
            "documented": {name: self._answer(name, why) for name, why in self.documented.items()},
        }

    def _answer(self, place: str, reason: str | None) -> dict[str, Any]:
        return {"usable": reason is None, "reason": reason, "block_sizes": list(self.block_sizes.get(place, ()))}


def block_groups(model: nn.Module) -> list[BlockGroup]:
    """Return a model's blocks, like ones together, in model order; the model may be on the meta device."""
    groups: dict[Any, list[Candidate]] = {}
    for found in discover(model):
        groups.setdefault((found.kind, found.sizes, found.top_k, found.reason), []).append(found)
    stock = [
        BlockGroup(kind, tuple(found.name for found in alike), sizes[0], top_k, sizes[1], sizes[2], reason)
        for (kind, sizes, top_k, reason), alike in groups.items()
    ]
    return stock + _groups_of_codes(model)


def _groups_of_codes(model: nn.Module) -> list[BlockGroup]:
    """Blocks with MX weights, which a conversion has and which are not trained."""
    groups: dict[tuple[int | None, int | None, int, int], list[str]] = {}
    for name, block in model.named_modules():
        if isinstance(block, FrozenBlock):
            shape, codes = block.neuron_shape, block.neuron_stack.gate_up_codes
            experts = codes.shape[0] if codes.dim() > 2 else None
            groups.setdefault((experts, shape.top_k, shape.hidden, shape.intermediate), []).append(name)
    return [
        BlockGroup("mlp" if E is None else "experts", tuple(names), E, K, hidden, inner, NO_TRAINING, codes=True)
        for (E, K, hidden, inner), names in groups.items()
    ]


def usable_kernels(
    groups: Iterable[BlockGroup], here: Device | None, unavailable: str | None, block_size: int | None = None
) -> list[Usable]:
    """Ask for every group and precision whether there are kernels.

    Args:
        groups: of :func:`block_groups`.
        here: this machine's chip; None where it cannot be told.
        unavailable: why no kernel runs on this machine at all, or None.
        block_size: tokens per block of experts; None for what the configuration takes by default.
    """
    size = NeuronMoEConfig().block_size if block_size is None else block_size
    installed, documented = CheckedAdapter(), DocumentedAdapter()
    if unavailable is None and here is None:
        unavailable = "the chip is not known"
    answers = []
    for group in groups:
        for precision in PRECISIONS:
            if group.reason is not None:
                documents: dict[str, str | None] = dict.fromkeys(TARGETS, group.reason)
                answers.append(Usable(group, precision, (), group.reason, documents, size, {}))
                continue
            places: dict[str, tuple[Device, Adapter]] = {}
            places |= {name: (Device(name, DOCUMENTED_LNC), documented) for name in TARGETS}
            if unavailable is None and here is not None:
                places[HERE] = (here, installed)
            block = group.block(precision, size)
            reasons = {name: why_not(block, *place) for name, place in places.items()}
            sizes = {name: _sizes_taken(group, precision, *place) for name, place in places.items()}
            kernels = tuple(FUNCTIONS[need][0] for need in block.needs)
            at_home = unavailable if HERE not in reasons else reasons.pop(HERE)
            answers.append(Usable(group, precision, kernels, at_home, reasons, size, sizes))
    return answers


def _sizes_taken(group: BlockGroup, precision: str, device: Device, adapter: Adapter) -> tuple[int, ...]:
    if group.experts is None:
        return ()
    return tuple(size for size in BLOCK_SIZES if why_not(group.block(precision, size), device, adapter) is None)

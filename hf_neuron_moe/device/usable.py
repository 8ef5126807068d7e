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
from hf_neuron_moe.patching.discovery import Candidate, discover

DOCUMENTED_SDK = "2.33"
DOCUMENTED_LNC = 2
PRECISIONS = ("bf16", "mxfp8")
TARGETS = ("trn2", "trn3")
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
    """

    kind: str
    names: tuple[str, ...]
    experts: int | None
    top_k: int | None
    hidden: int | None
    inner: int | None
    reason: str | None

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
    """

    group: BlockGroup
    precision: str
    kernels: tuple[str, ...]
    here: str | None
    documented: dict[str, str | None]

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
            "here": {"usable": self.here is None, "reason": self.here},
            "documented": {name: {"usable": why is None, "reason": why} for name, why in self.documented.items()},
        }


def block_groups(model: nn.Module) -> list[BlockGroup]:
    """Return a model's blocks, like ones together, in model order; the model may be on the meta device."""
    groups: dict[Any, list[Candidate]] = {}
    for found in discover(model):
        groups.setdefault((found.kind, found.sizes, found.top_k, found.reason), []).append(found)
    return [
        BlockGroup(kind, tuple(found.name for found in alike), sizes[0], top_k, sizes[1], sizes[2], reason)
        for (kind, sizes, top_k, reason), alike in groups.items()
    ]


def usable_kernels(
    groups: Iterable[BlockGroup], here: Device | None, unavailable: str | None, block_size: int = 512
) -> list[Usable]:
    """Ask for every group and precision whether there are kernels.

    Args:
        groups: of :func:`block_groups`.
        here: this machine's chip; None where it cannot be told.
        unavailable: why no kernel runs on this machine at all, or None.
        block_size: tokens per block of experts.
    """
    installed, documented = Adapter(), DocumentedAdapter()
    answers = []
    for group in groups:
        for precision in PRECISIONS:
            if group.reason is not None:
                answers.append(Usable(group, precision, (), group.reason, dict.fromkeys(TARGETS, group.reason)))
                continue
            block = group.block(precision, block_size)
            by_chip = {name: why_not(block, Device(name, DOCUMENTED_LNC), documented) for name in TARGETS}
            reason = unavailable
            if reason is None:
                reason = "the chip is not known" if here is None else why_not(block, here, installed)
            kernels = tuple(FUNCTIONS[need][0] for need in block.needs)
            answers.append(Usable(group, precision, kernels, reason, by_chip))
    return answers

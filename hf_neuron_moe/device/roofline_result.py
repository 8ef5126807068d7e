"""What :func:`~hf_neuron_moe.device.roofline.roofline` returns: floors by block, and their sums by policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_neuron_moe.device.figures import SOURCE, Chip
from hf_neuron_moe.device.passes import ASSUMPTIONS, Floor
from hf_neuron_moe.device.usable import DOCUMENTED_LNC, BlockGroup

HOMES = ("kernel", "stock")
"""``NeuronMoEConfig(weights=...)``; the first is what ``"auto"`` takes where Neuron kernels compute."""


@dataclass(frozen=True)
class Copies:
    """Bytes of weight copies, kept from a step's first training forward to its optimizer's step.

    Attributes:
        total: of all blocks.
        largest_block: of the block with most; under FSDP, where none are kept, what exists at a time.
    """

    total: int
    largest_block: int


@dataclass(frozen=True)
class Step:
    """What a training step asks of all blocks.

    Attributes:
        tokens: T per step and device.
        block_size: B of experts.
        trained: whether the blocks' weights are trained; False for LoRA outside of them.
        checkpointing: gradient checkpointing of the layers.
    """

    tokens: int
    block_size: int = 512
    trained: bool = True
    checkpointing: bool = False


@dataclass(frozen=True)
class GroupFloor:
    """Blocks that are alike and keep the same, on one chip.

    Attributes:
        group: the blocks.
        keep: canonical keep string; empty where the block cannot be patched.
        policies: by name of a policy, how many of the blocks keep this under it.
        flops: floating-point operations of one block without padding and recomputation.
        floor: of one block at the block size that was asked for; None where nothing can be said.
        choices: the same at every block size that the kernels take.
        discarded_seconds: what the documented backward adds for gradients of frozen weights, which nobody reads.
        reason: why no Neuron kernel computes these blocks; the floor is then that of PyTorch in their place, padded
            to multiples of 128; None of blocks that PyTorch's own modules compute too.
        copy_bytes: of the copies of one block's weights that the kernels read, by the home of the weights
            (:data:`HOMES`); empty where no kernel computes it.
    """

    group: BlockGroup
    keep: str
    policies: Mapping[str, int]
    flops: float
    floor: Floor | None
    choices: tuple[Floor, ...]
    discarded_seconds: float
    reason: str | None
    copy_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def padding_overhead_percent(self) -> float | None:
        """Operations on padding, in percent of those that are needed."""
        if self.floor is None:
            return None
        return 100 * ((self.floor.padded_flops - self.floor.recomputed_flops) / self.flops - 1)

    @property
    def best_block_size(self) -> int | None:
        """The block size with the least time; None for dense blocks."""
        return min(self.choices, key=lambda choice: choice.seconds).block_size if self.choices else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        group, floor = self.group, self.floor
        return {
            "kind": group.kind,
            "names": list(group.names),
            "experts": group.experts,
            "top_k": group.top_k,
            "hidden_size": group.hidden,
            "intermediate_size": group.inner,
            "keep": self.keep,
            "policies": dict(self.policies),
            "kernel": {"usable": self.reason is None, "reason": self.reason},
            "flops": self.flops,
            "padding_overhead_percent": self.padding_overhead_percent,
            "floor": None if floor is None else asdict(floor) | {"bound": floor.bound},
            "discarded_seconds": self.discarded_seconds,
            "weight_copy_bytes": dict(self.copy_bytes),
            "best_block_size": self.best_block_size,
            "block_sizes": [asdict(choice) | {"bound": choice.bound} for choice in self.choices],
        }


@dataclass(frozen=True)
class Roofline:
    """Result of :func:`roofline`.

    Attributes:
        core: figures of one logical core.
        precision: of the blocks.
        step: what was asked.
        policies: names of the activation policies.
        groups: the model's blocks, those that the kernels compute first.
        memory: by policy, the bytes that a step holds; empty where they were not given.
    """

    core: Chip
    precision: str
    step: Step
    policies: tuple[str, ...]
    groups: tuple[GroupFloor, ...]
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def computed(self) -> tuple[GroupFloor, ...]:
        """Those that the kernels compute."""
        return tuple(part for part in self.groups if part.reason is None)

    @property
    def left_out(self) -> dict[str, str]:
        """By label, the blocks that no kernel computes and why."""
        return {part.group.label: part.reason for part in self.groups if part.reason is not None}

    @property
    def seconds(self) -> dict[str, float]:
        """By policy, of all blocks that the kernels compute."""
        return {name: self._sum(name, discarded=False) for name in self.policies}

    @property
    def discarded_seconds(self) -> dict[str, float]:
        """By policy, what the kernels add for gradients of frozen weights."""
        return {name: self._sum(name, discarded=True) for name in self.policies}

    def _sum(self, policy: str, *, discarded: bool) -> float:
        return sum(
            part.policies.get(policy, 0) * (part.discarded_seconds if discarded else part.floor.seconds)
            for part in self.computed
            if part.floor is not None
        )

    @property
    def copies(self) -> dict[str, Copies]:
        """By home of the weights, the copies of all blocks that the kernels compute; empty where they compute none."""
        by_home: dict[str, Copies] = {}
        for group in {part.group: part for part in self.computed}.values():
            for home, size in group.copy_bytes.items():
                before = by_home.get(home, Copies(0, 0))
                total = before.total + size * len(group.group.names)
                by_home[home] = Copies(total, max(before.largest_block, size))
        return by_home

    def held(self, policy: str, home: str = HOMES[0]) -> int:
        """Return the bytes that a step holds, copies included; the stock model has none."""
        copies = self.copies.get(home, Copies(0, 0)).total if policy in self.policies else 0
        return self.memory[policy] + copies

    def too_large(self, home: str = HOMES[0]) -> dict[str, int]:
        """By policy, the bytes by which a step exceeds a logical core's memory."""
        excess = {name: self.held(name, home) - self.core.memory for name in self.memory}
        return {name: size for name, size in excess.items() if size > 0}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        return {
            "kind": "estimate from published figures; nothing was measured",
            "source": SOURCE,
            "assumptions": list(ASSUMPTIONS),
            "device": self.core.name,
            "logical_core": {"lnc": DOCUMENTED_LNC, **asdict(self.core)},
            "precision": self.precision,
            **asdict(self.step),
            "blocks": [part.to_dict() for part in self.groups],
            "seconds": self.seconds,
            "discarded_seconds": self.discarded_seconds,
            "left_out": self.left_out,
            "memory": {
                "of_a_logical_core": self.core.memory,
                "weight_copies": {home: asdict(copies) for home, copies in self.copies.items()},
                "policies": {
                    name: {
                        "bytes": size,
                        "with_copies": {home: self.held(name, home) for home in HOMES},
                        "fits": name not in self.too_large(),
                    }
                    for name, size in self.memory.items()
                },
            },
        }

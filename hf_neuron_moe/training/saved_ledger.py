"""What one forward pass saves for its backward, and what of it gradient checkpointing would keep, and when.

Under gradient checkpointing the forward leaves the layers' inputs and what lies outside of the layers. What loss, head
and last norm saved is gone before the last layer is recomputed; its input and all it saved are gone before the layer
before is. So there are as many moments to look at as there are layers, and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_neuron_moe.training.saved_tensors import Storages, noting_saved, storages_of


@dataclass(frozen=True)
class SavedActivations:
    """What one forward pass keeps, in bytes."""

    blocks: int  # storages that the counted blocks save, their inputs included
    rest: int  # all other storages
    between_passes: int
    """What is left after the forward under gradient checkpointing: the layers' tensor arguments, and storages saved
    outside of all layers (embedding, last norm, head, loss)."""
    checkpointed: int
    """The most that is there at one time under gradient checkpointing: `between_passes`, or a recomputed layer's
    storages and all that was kept until that layer began, whichever is more."""
    checkpointed_blocks: int  # the part of it that counted blocks save; 0 where `between_passes` is the most

    @property
    def total(self) -> int:
        """Bytes without gradient checkpointing."""
        return self.blocks + self.rest


@dataclass
class _LayerCall:
    """One call of a layer."""

    kept: Storages
    """What gradient checkpointing keeps when the call begins and did not keep before: the call's tensor arguments, and
    what was saved outside since the last call."""
    own: Storages = field(default_factory=dict)  # what the layer saves; counted where it is not kept already


class SavedLedger:
    """Notes every storage that is saved while :meth:`watching`, and where in the model that happens."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._model = model
        self._blocks = list(blocks)
        self._block_depth = 0
        self._layer_depth = 0
        self._owned: Storages = {}
        self._saved: Storages = {}
        self._in_blocks: set[StorageWeakRef] = set()
        self._calls: list[_LayerCall] = []
        self._outside: Storages = {}  # since the last call of a layer

    @contextmanager
    def watching(self, owned: Iterable[Tensor]) -> Iterator[None]:
        """Count inside the block; storages of `owned` tensors (parameters, buffers, labels) are left out."""
        self._owned = storages_of(owned)
        layers = [module for module in self._model.modules() if isinstance(module, GradientCheckpointingLayer)]
        hooked: list[tuple[nn.Module, Callable[..., None], Callable[..., None]]] = [
            *((block, self._enter_block, self._leave_block) for block in self._blocks),
            *((layer, self._enter_layer, self._leave_layer) for layer in layers),
        ]
        with ExitStack() as stack:
            for module, enter, leave in hooked:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(noting_saved(self._owned, self._note))
            yield

    def result(self) -> SavedActivations:
        """Return the sums over everything seen."""
        blocks = sum(size for ref, size in self._saved.items() if ref in self._in_blocks)
        kept: Storages = {}
        moments: list[tuple[int, int]] = []  # all bytes, those of blocks
        for call in self._calls:
            kept |= call.kept
            own = {ref: size for ref, size in call.own.items() if ref not in kept}
            own_blocks = sum(size for ref, size in own.items() if ref in self._in_blocks)
            moments.append((sum(kept.values()) + sum(own.values()), own_blocks))
        between = sum((kept | self._outside).values())
        highest, highest_blocks = max([(between, 0), *moments], key=lambda moment: moment[0])
        return SavedActivations(blocks, sum(self._saved.values()) - blocks, between, highest, highest_blocks)

    def _note(self, saved: Storages) -> None:
        self._saved |= saved
        if self._layer_depth:
            self._calls[-1].own |= saved
        else:
            self._outside |= saved
        if self._block_depth:
            self._in_blocks |= saved.keys()

    def _enter_block(self, *_: Any) -> None:
        self._block_depth += 1

    def _leave_block(self, *_: Any) -> None:
        self._block_depth -= 1

    def _enter_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer_depth += 1
        if self._layer_depth == 1:
            arguments = storages_of(_tensors((*args, *kwargs.values()))).items()
            given = {storage: size for storage, size in arguments if storage not in self._owned}
            self._calls.append(_LayerCall(self._outside | given))
            self._outside = {}

    def _leave_layer(self, *_: Any) -> None:
        self._layer_depth -= 1


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)

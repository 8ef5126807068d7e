"""Weights in the form that a kernel or a product reads: copies that are kept while their sources stay the same.

A copy belongs to a state of its sources: their storages, places in these, and version counters, which every in-place
change that autograd sees advances. Writes through ``.data``, as when adapters are merged, do not advance them. So all
copies are dropped after every optimizer step, and calls without a backward keep none; who writes between two training
calls of one step calls :meth:`PreparedWeights.drop`. Copies for generation (``sampled``) stay, so some of their
sources' values are compared at every call, which shows what changes a weight everywhere.

No copies are kept (:class:`FreshWeights`) of weights that FSDP gathers for a call, which their copies would make stay,
nor in evaluation mode where autograd records.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_neuron_moe.activation_policy import Keep
from hf_neuron_moe.checks import PLAIN_TENSORS

_Place = tuple[Any, int, tuple[int, ...], tuple[int, ...], torch.dtype]
T = TypeVar("T")


@dataclass(frozen=True)
class _Copy:
    """A prepared tensor and the state of the sources it was made from."""

    made: Any
    storages: tuple[StorageWeakRef, ...]
    versions: tuple[int, ...]
    samples: tuple[Tensor, ...] = ()

    def orphaned(self) -> bool:
        return any(storage.expired() for storage in self.storages)


class PreparedWeights:
    """Makes and keeps copies of weights: tensors, or objects that have `nbytes`."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, tuple[_Place, ...]], _Copy] = {}
        self._lock = threading.RLock()  # held while the table is changed or walked; looking one copy up needs none
        own = weakref.ref(self)

        def after_step(*_: object) -> None:
            cache = own()
            if cache is not None:
                cache.clear()

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies kept now; those whose weights are gone are dropped."""
        with self._lock:
            self._drop_orphans()
            return sum(copy.made.nbytes for copy in self._copies.values())

    def clear(self) -> None:
        """Drop all copies."""
        with self._lock:
            self._copies.clear()

    def _drop_orphans(self) -> None:
        self._copies = {key: copy for key, copy in self._copies.items() if not copy.orphaned()}

    def drop(self, sources: Iterable[Tensor]) -> int:
        """Drop the copies made of `sources`, of views of them, or of what they are views of; return their bytes."""
        gone = {_storage(source) for source in sources if type(source) in PLAIN_TENSORS}
        with self._lock:
            before = self.nbytes
            self._copies = {
                key: copy for key, copy in self._copies.items() if gone.isdisjoint(place[0] for place in key[1])
            }
            return before - self.nbytes

    def get(self, form: str, build: Callable[..., T], *sources: Tensor, keep: bool = True, sampled: bool = False) -> T:
        """Return ``build(*sources)``, or the copy made before from the same state of the sources.

        `form` names everything that `build` depends on besides the sources. Without `keep`, and while a program is
        traced, the weights are read anew. With `sampled` some of their values are compared as well. Results that share
        memory with a source cost nothing and are not kept.
        """
        if not keep or not all(_has_a_version(source) for source in sources):
            return build(*sources)
        key = form, tuple(_place(source) for source in sources)
        versions = tuple(source._version for source in sources)
        known = self._copies.get(key)
        samples = tuple(_sample(source) for source in sources) if sampled else ()
        unchanged = known is not None and known.versions == versions and not known.orphaned()
        if known is not None and unchanged and all(map(torch.equal, samples, known.samples)):
            return known.made
        with torch.inference_mode(False), torch.no_grad():
            made = build(*sources)
        if isinstance(made, Tensor) and any(_storage(made) == _storage(source) for source in sources):
            return made
        storages = tuple(StorageWeakRef(source.untyped_storage()) for source in sources)
        with self._lock:
            self._drop_orphans()
            self._copies[key] = _Copy(made, storages, versions, samples)
        return made


class FreshWeights(PreparedWeights):
    """Makes copies for one call each and keeps none."""

    def get(self, form: str, build: Callable[..., T], *sources: Tensor, keep: bool = True, sampled: bool = False) -> T:
        """Return ``build(*sources)``."""
        return build(*sources)


class CountedWeights(PreparedWeights):
    """Counts the bytes that copies of tensors on the meta device would take."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[str, tuple[_Place, ...]], int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies asked for."""
        return sum(self._sizes.values())

    def get(self, form: str, build: Callable[..., T], *sources: Tensor, keep: bool = True, sampled: bool = False) -> T:
        """Return ``build(*sources)``, a tensor, and count it if it is a copy."""
        made: Any = build(*sources)
        if all(_storage(made) != _storage(source) for source in sources):
            self._sizes[form, tuple(_place(source) for source in sources)] = made.nbytes
        return made


def kept_for(keep: Keep) -> bool:
    """Whether copies made by a forward with this policy are kept; a backward keeps its own anyway."""
    return bool(keep.names)


def is_traced(tensor: Tensor) -> bool:
    """Return whether what is done with `tensor` becomes a program that runs later, on other memory."""
    if torch.compiler.is_compiling():  # first: the rest cannot be traced
        return True
    return type(tensor) not in PLAIN_TENSORS or torch._is_functional_tensor(tensor) or get_proxy_mode() is not None


def _has_a_version(tensor: Tensor) -> bool:
    return not is_traced(tensor) and not tensor.is_meta and not tensor.is_inference()


def _storage(tensor: Tensor) -> Any:
    """Identity of a tensor's storage; a weak reference to it keeps the number from being used again."""
    return tensor.untyped_storage()._cdata


def _place(tensor: Tensor) -> _Place:
    return _storage(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype


_SAMPLES = 512  # values of a weight that are compared


def _sample(tensor: Tensor) -> Tensor:
    """Return copies of values from all over `tensor`, as their bits: NaN equals itself then."""
    dense = tensor.is_contiguous() or (tensor.ndim > 1 and tensor.transpose(-1, -2).is_contiguous())
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)) if dense else tensor.detach().reshape(-1)
    step = max(flat.numel() // _SAMPLES, 1) | 1  # odd, so that it does not stay in one column
    return flat[::step].clone().view(torch.uint8)

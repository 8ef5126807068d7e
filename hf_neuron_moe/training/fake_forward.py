"""A training forward pass without memory: the storages that a model would keep for its backward, counted.

The model stays on the meta device. Its parameters and buffers are replaced, for one call, by fake tensors of the CPU
(:class:`torch._subclasses.fake_tensor.FakeTensorMode`): operators run by shape alone, custom operators through their
registered fakes, and autograd records what it always records. Hooks note what is saved, and where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface

from hf_neuron_moe.errors import NeuronMoEError, ShapeError, UnsupportedModelError, refuse

_WHERE = "estimate_training"
_ATTENTION = "hf_neuron_moe_shapes_only"
"""Name of an attention implementation that is transformers' sdpa with a mask made from shapes alone."""

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@dataclass
class SavedStorage:
    """One storage that autograd keeps.

    Attributes:
        nbytes: its whole size, also where only a view of it is saved.
        in_blocks: whether a counted block saves it.
        layers: indices of the checkpointable layers that save it; -1 stands for outside of all.
    """

    nbytes: int
    in_blocks: bool = False
    layers: set[int] = field(default_factory=set)


@dataclass
class SavedActivations:
    """What one forward pass keeps, in bytes.

    Attributes:
        blocks: storages that the counted blocks save, their inputs included.
        rest: all other storages.
        layer_inputs: what gradient checkpointing keeps instead of the layers' own storages: their tensor arguments.
        largest_layer: storages of the layer that saves the most, without its inputs: what is there again while that
            layer's backward runs under gradient checkpointing.
        largest_layer_blocks: the part of it that counted blocks save.
        outside: storages saved outside of all layers (embedding, last norm, head, loss).
    """

    blocks: int
    rest: int
    layer_inputs: int
    largest_layer: int
    largest_layer_blocks: int
    outside: int

    @property
    def total(self) -> int:
        """Bytes without gradient checkpointing."""
        return self.blocks + self.rest

    @property
    def checkpointed(self) -> int:
        """Bytes under gradient checkpointing, at the moment when the largest layer has been recomputed."""
        return self.layer_inputs + self.outside + self.largest_layer


class SavedLedger:
    """Notes every storage that is saved while :meth:`watching`, and where in the model that happens."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._model = model
        self._blocks = list(blocks)
        self._depth = 0
        self._layer = -1
        self._owned: set[StorageWeakRef] = set()
        self._saved: dict[StorageWeakRef, SavedStorage] = {}
        self._inputs: dict[StorageWeakRef, int] = {}

    @contextmanager
    def watching(self, owned: Iterable[Tensor]) -> Iterator[None]:
        """Count inside the block; storages of `owned` tensors (parameters, buffers, labels) are left out."""
        self._owned = {StorageWeakRef(tensor.untyped_storage()) for tensor in owned}
        handles: list[Any] = []
        for block in self._blocks:
            handles.append(block.register_forward_pre_hook(self._enter_block))
            handles.append(block.register_forward_hook(self._leave_block, always_call=True))
        layers = [module for module in self._model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(self._entering(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave_layer, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def result(self) -> SavedActivations:
        """Return the sums over everything seen."""
        kept = self._saved.items()
        blocks = sum(storage.nbytes for _, storage in kept if storage.in_blocks)
        outside = sum(s.nbytes for ref, s in kept if -1 in s.layers and ref not in self._inputs)
        own: dict[int, list[int]] = {}
        for ref, storage in kept:
            if -1 in storage.layers or ref in self._inputs:
                continue
            for layer in storage.layers:
                sums = own.setdefault(layer, [0, 0])
                sums[0] += storage.nbytes
                sums[1] += storage.nbytes * storage.in_blocks
        largest = max(own.values(), default=[0, 0])
        total = sum(storage.nbytes for _, storage in kept)
        return SavedActivations(blocks, total - blocks, sum(self._inputs.values()), largest[0], largest[1], outside)

    def _pack(self, tensor: Tensor) -> Tensor:
        ref = StorageWeakRef(tensor.untyped_storage())
        if ref not in self._owned:
            storage = self._saved.setdefault(ref, SavedStorage(tensor.untyped_storage().nbytes()))
            storage.in_blocks |= self._depth > 0
            storage.layers.add(self._layer)
        return tensor

    def _enter_block(self, *_: Any) -> None:
        self._depth += 1

    def _leave_block(self, *_: Any) -> None:
        self._depth -= 1

    def _entering(self, index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._layer = index
            for tensor in _tensors((*args, *kwargs.values())):
                ref = StorageWeakRef(tensor.untyped_storage())
                if ref not in self._owned:
                    self._inputs[ref] = tensor.untyped_storage().nbytes()

        return enter

    def _leave_layer(self, *_: Any) -> None:
        self._layer = -1


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def fake_saved_activations(
    model: nn.Module, blocks: Iterable[nn.Module], *, batch: int, length: int
) -> SavedActivations:
    """Run one training forward pass of a causal language model by shapes alone, and count what it saves.

    Args:
        model: a transformers model (or an adapter's wrapper) on the meta device; it is not changed.
        blocks: its modules that are counted apart.
        batch: sequences (B).
        length: tokens per sequence (L).

    Returns:
        The counts, as autograd on a CPU would give them; attention is transformers' sdpa where the model supports it.

    Raises:
        UnsupportedModelError: the forward needs values, not only shapes.
        ShapeError: the model does not take such a batch.
    """
    ledger = SavedLedger(model, blocks)
    was_training = model.training
    with FakeTensorMode() as fake, _shapes_only_attention(model):
        state = _fake_state(fake, model)
        ids_BL = torch.zeros(batch, length, dtype=torch.int64)
        labels_BL = ids_BL.clone()
        inputs = {"input_ids": ids_BL, "labels": labels_BL, "use_cache": False}
        model.train()
        try:
            owned = [*state.values(), ids_BL, labels_BL]
            with ledger.watching(owned), _GroupedProductsOfAnyDtype():
                torch.func.functional_call(model, state, (), inputs)
        except NeuronMoEError:
            raise
        except _DATA_DEPENDENT as error:
            raise _needs_values(model, error) from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise _no_such_batch(model, batch, length, error) from error
        finally:
            model.train(was_training)
    return ledger.result()


class _GroupedProductsOfAnyDtype(TorchFunctionMode):
    """Lets the stock experts' grouped product run by shape in every dtype; torch knows its shapes in bf16 only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            rows_RK, weights_EKN = args[0], args[1]
            return rows_RK @ weights_EKN[0]  # of the same shape, and it saves the same two storages
        return func(*args, **(kwargs or {}))


def _fake_state(fake: FakeTensorMode, model: nn.Module) -> dict[str, Tensor]:
    """Fake CPU tensors for all parameters and buffers, tied ones once; they require gradients as the originals do."""
    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    tensors: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        state[name] = made[id(tensor)]
    return state


@contextmanager
def _shapes_only_attention(model: nn.Module) -> Iterator[None]:
    """Use sdpa with a mask from shapes alone.

    While it sees fake tensors, transformers takes every batch for a packed one and makes a mask of L x L per sequence,
    which a real run of whole sequences does not have.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = [config for config in configs if getattr(config, "_attn_implementation", None) == "sdpa"]
    if _ATTENTION not in AttentionInterface().valid_keys():
        AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
        AttentionMaskInterface.register(_ATTENTION, _mask_from_shapes)
    try:
        for config in configs:
            config._attn_implementation_internal = _ATTENTION
        yield
    finally:
        for config in configs:
            config._attn_implementation_internal = "sdpa"


def _mask_from_shapes(**options: Any) -> Tensor | None:
    """No mask where plain causal attention does, else transformers' own."""
    local_size = options.get("local_size")
    return None if local_size is None or options["kv_length"] <= local_size else sdpa_mask(**options)


def _needs_values(model: nn.Module, error: BaseException) -> UnsupportedModelError:
    return refuse(
        UnsupportedModelError,
        where=_WHERE,
        argument="model",
        expected="a model whose forward needs shapes only",
        got=f"{type(model).__name__}, which asks for a tensor's values ({type(error).__name__}: {error})",
        remedy="Measure it instead: hf_neuron_moe.training.measure_saved_bytes counts a real forward pass.",
    )


def _no_such_batch(model: nn.Module, batch: int, length: int, error: BaseException) -> ShapeError:
    return refuse(
        ShapeError,
        where=_WHERE,
        argument="batch and length",
        expected="a batch that the model takes",
        got=f"{batch} x {length} tokens, at which {type(model).__name__} stops with {type(error).__name__}: {error}",
        remedy="Take a shorter length.",
    )

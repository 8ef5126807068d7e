"""A training forward pass without memory: the storages that a model would keep for its backward, counted.

Fake CPU tensors stand for the parameters of a model on the meta device. Operators run by shape alone, custom operators
through their registered fakes, and autograd records what it always records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface

from hf_neuron_moe.errors import NeuronMoEError, ShapeError, UnsupportedModelError
from hf_neuron_moe.training.other_ranks import Traffic
from hf_neuron_moe.training.repeated_layers import RepeatedLayers
from hf_neuron_moe.training.saved_tensors import Storages, local_part, noting_saved, storages_of

_WHERE = "estimate_training"
_ATTENTION = "hf_neuron_moe_shapes_only"
"""Name of an attention implementation that is transformers' sdpa with a mask made from shapes alone."""

_MEASURE_IT = "Measure it instead: hf_neuron_moe.training.measure_saved_bytes counts a real forward pass."
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@dataclass(frozen=True)
class SavedActivations:
    """What one forward pass keeps, in bytes."""

    blocks: int  # storages that the counted blocks save, their inputs included
    total: int  # all storages
    between_passes: int
    """What is left after the forward under gradient checkpointing: the layers' tensor arguments, and storages saved
    outside of all layers (embedding, last norm, head, loss)."""
    checkpointed: int
    """The most that is there at one time under gradient checkpointing: `between_passes`, or a recomputed layer's
    storages and all that was kept until that layer began, whichever is more."""
    checkpointed_blocks: int  # the part of it that counted blocks save; 0 where `between_passes` is the most


@dataclass
class _LayerCall:
    kept: Storages
    """What gradient checkpointing keeps when the call begins and did not keep before: the call's tensor arguments, and
    what was saved outside since the last call."""
    own: Storages = field(default_factory=dict)  # what the layer saves; counted where it is not kept already


def fake_saved_activations(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    *,
    batch: int,
    length: int,
    around: Iterable[AbstractContextManager[Any]] = (),
    traffic: Traffic | None = None,
) -> SavedActivations:
    """Run one training forward pass of a causal language model by shapes alone, and count what it saves.

    The counts are those that autograd on a CPU would give; attention is transformers' sdpa where the model supports it.
    `model` (or an adapter's wrapper) is on the meta device and is not changed; its modules `blocks` are counted apart.
    There are `batch` sequences of `length` tokens. The pass runs in the contexts `around`. `traffic` counts what this
    and a backward move. Of layers that are alike, two are run.
    """
    ledger = _Ledger(model, blocks)
    repeated = RepeatedLayers(model, ledger, lambda: [] if traffic is None else traffic.moved())
    was_training = model.training
    with FakeTensorMode(), _shapes_only_attention(model):
        state = _fake_state(model)
        ids_BL = torch.zeros(batch, length, dtype=torch.int64)
        labels_BL = ids_BL.clone()
        inputs = {"input_ids": ids_BL, "labels": labels_BL, "use_cache": False}
        model.train()
        try:
            owned = [*state.values(), ids_BL, labels_BL]
            with ExitStack() as stack:
                for context in (*around, *([] if traffic is None else [traffic])):
                    stack.enter_context(context)
                with ledger.watching(owned), repeated.standing_in(), _GroupedProductsOfAnyDtype():
                    output = torch.func.functional_call(model, state, (), inputs)
                if traffic is not None:
                    traffic.backpropagate(output, state, repeated.alike.values())
        except NeuronMoEError:
            raise
        except _DATA_DEPENDENT as error:
            expected, fix = "a model whose forward needs shapes only", _MEASURE_IT
            got = f"{type(model).__name__}, which asks for a tensor's values ({type(error).__name__}: {error})"
            raise UnsupportedModelError.about("model", expected, got, fix).named(_WHERE) from error
        except (RuntimeError, ValueError, IndexError) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"  # frames of C++ come below
            got = f"{batch} x {length} tokens, at which {type(model).__name__} stops with {reason}"
            expected, fix = "a batch that the model takes", "Take a shorter length."
            raise ShapeError.about("batch and length", expected, got, fix).named(_WHERE) from error
        finally:
            model.train(was_training)
    return ledger.result()


class _Ledger:
    """Notes every storage that is saved while :meth:`watching`, and where in the model that happens.

    Under gradient checkpointing the forward leaves the layers' inputs and what lies outside of the layers. What loss,
    head and last norm saved is gone before the last layer is recomputed; its input and all it saved are gone before the
    layer before is. So there are as many moments to look at as there are layers, and one more.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        self._model = model
        self._blocks = list(blocks)
        self._block_depth = 0
        self._layer_depth = 0
        self.owned: Storages = {}
        self.saved: Storages = {}
        self._in_blocks: set[StorageWeakRef] = set()
        self._calls: list[_LayerCall] = []
        self._outside: Storages = {}  # since the last call of a layer

    @contextmanager
    def watching(self, owned: Iterable[Tensor]) -> Iterator[None]:
        """Count inside the block; storages of `owned` tensors (parameters, buffers, labels) are left out."""
        self.owned = storages_of(owned)
        layers = [module for module in self._model.modules() if isinstance(module, GradientCheckpointingLayer)]
        hooked: list[tuple[nn.Module, Callable[..., None], Callable[..., None]]] = [
            *((block, self._enter_block, self._leave_block) for block in self._blocks),
            *((layer, self._enter_layer, self._leave_layer) for layer in layers),
        ]
        with ExitStack() as stack:
            for module, enter, leave in hooked:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(noting_saved(self.owned, self._note))
            yield

    def result(self) -> SavedActivations:
        """Return the sums over everything seen."""
        blocks = sum(size for ref, size in self.saved.items() if ref in self._in_blocks)
        kept: Storages = {}
        moments: list[tuple[int, int]] = []  # all bytes, those of blocks
        for call in self._calls:
            kept |= call.kept
            own = {ref: size for ref, size in call.own.items() if ref not in kept}
            own_blocks = sum(size for ref, size in own.items() if ref in self._in_blocks)
            moments.append((sum(kept.values()) + sum(own.values()), own_blocks))
        between = sum((kept | self._outside).values())
        highest, highest_blocks = max([(between, 0), *moments], key=lambda moment: moment[0])
        return SavedActivations(blocks, sum(self.saved.values()), between, highest, highest_blocks)

    def _note(self, saved: Storages) -> None:
        self.saved |= saved
        if self._layer_depth:
            self._calls[-1].own |= saved
        else:
            self._outside |= saved
        if self._block_depth:
            self._in_blocks |= saved.keys()

    def of_this_call(self) -> Storages:
        """Return what the present call of a layer has saved."""
        return dict(self._calls[-1].own)

    def note_as(self, other: Mapping[Any, Any], saved: Storages) -> None:
        """Note what a layer saved once more, in `other` storages."""
        self._note({other[ref]: size for ref, size in saved.items() if other[ref] not in self.owned})
        self._in_blocks |= {other[ref] for ref in saved if ref in self._in_blocks}

    def _enter_block(self, *_: object) -> None:
        self._block_depth += 1

    def _leave_block(self, *_: object) -> None:
        self._block_depth -= 1

    def _enter_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer_depth += 1
        if self._layer_depth == 1:
            arguments = storages_of(_tensors((*args, *kwargs.values()))).items()
            given = {storage: size for storage, size in arguments if storage not in self.owned}
            self._calls.append(_LayerCall(self._outside | given))
            self._outside = {}

    def _leave_layer(self, *_: object) -> None:
        self._layer_depth -= 1


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


class _GroupedProductsOfAnyDtype(TorchFunctionMode):
    """Lets the stock experts' grouped product run by shape in every dtype; torch knows its shapes in bf16 only."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            rows_RK, weights_EKN = args[0], args[1]
            return rows_RK @ weights_EKN[0]  # of the same shape, and it saves the same two storages
        return func(*args, **(kwargs or {}))


def _fake_state(model: nn.Module) -> dict[str, Tensor]:
    """Fake CPU tensors for all parameters and buffers, tied ones once; they require gradients as the originals do."""
    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if id(tensor) not in made:
            twin = torch.empty(local_part(tensor).shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, DTensor):
                whole: Any = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
                twin = DTensor.from_local(twin, tensor.device_mesh, tensor.placements, **whole)
            made[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
        state[name] = made[id(tensor)]
    return state


@contextmanager
def _shapes_only_attention(model: nn.Module) -> Iterator[None]:
    """Use sdpa with a mask from shapes alone.

    While it sees fake tensors, transformers takes every batch for a packed one and makes a mask of L x L per sequence.
    A real run of whole sequences has none.
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

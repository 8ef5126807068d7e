"""A training forward pass without memory: the storages that a model would keep for its backward, counted.

The parameters and buffers of a model on the meta device are replaced, for one call, by fake tensors of the CPU
(:class:`torch._subclasses.fake_tensor.FakeTensorMode`): operators run by shape alone, custom operators through their
registered fakes, and autograd records what it always records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from hf_neuron_moe.errors import NeuronMoEError, ShapeError, UnsupportedModelError
from hf_neuron_moe.training.saved_ledger import SavedActivations, SavedLedger

_WHERE = "estimate_training"
_ATTENTION = "hf_neuron_moe_shapes_only"
"""Name of an attention implementation that is transformers' sdpa with a mask made from shapes alone."""

_MEASURE_IT = "Measure it instead: hf_neuron_moe.training.measure_saved_bytes counts a real forward pass."
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def fake_saved_activations(
    model: nn.Module, blocks: Iterable[nn.Module], *, batch: int, length: int
) -> SavedActivations:
    """Run one training forward pass of a causal language model by shapes alone, and count what it saves.

    The counts are those that autograd on a CPU would give; attention is transformers' sdpa where the model supports it.
    `model` (or an adapter's wrapper) is on the meta device and is not changed; its modules `blocks` are counted apart.
    There are `batch` sequences of `length` tokens.
    """
    ledger = SavedLedger(model, blocks)
    was_training = model.training
    with FakeTensorMode(), _shapes_only_attention(model):
        state = _fake_state(model)
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


class _GroupedProductsOfAnyDtype(TorchFunctionMode):
    """Lets the stock experts' grouped product run by shape in every dtype; torch knows its shapes in bf16 only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

"""Weights changed where nobody could see it."""

from __future__ import annotations

from itertools import chain

from torch import nn

from hf_neuron_moe.backends import drop_weight_copies
from hf_neuron_moe.errors import UnsupportedModelError, public


@public
def refresh_weights(model: nn.Module) -> int:
    """Make the next call of every block read its weights anew, after they were written through ``.data``.

    The Neuron backend keeps copies of weights in its kernels' orientation from a training forward to the optimizer's
    step. They are made again after in-place operations, ``load_state_dict``, an assignment of another tensor to
    ``.data``, a change between training and evaluation mode, merging of adapters, and in every call without a backward.
    A write *into* ``parameter.data`` between two training calls, with no optimizer step in between, advances no version
    counter: exchanging weights with their running average, clipping them, and the like. Call this after such a write.
    It costs one copying of the weights at most. The torch backend keeps quantized copies for generation in mxfp8. It
    notices writes that change a weight everywhere; after a write to single values call this.

    Args:
        model: patched or not, wrapped or not: what counts is whose parameters and buffers are below it.

    Returns:
        Bytes of the copies that were dropped.

    Raises:
        UnsupportedModelError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError.about(
            "model", "a torch.nn.Module", type(model).__name__, "Pass the model that was patched."
        )
    return drop_weight_copies(chain(model.parameters(), model.buffers()))

"""Layers that are alike: two are run by shapes, and of the others it is known what they save, return and send.

The first of a kind may make what the others share, so the second is the one that speaks for those behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_neuron_moe.training.saved_tensors import Storages, local_part, storages_of

_NAMES = {"layer_idx", "layer_id", "neuron_name"} | nn.Module().__dict__.keys()
"""Attributes that tell equal layers apart, and those of every module."""


@dataclass
class Alike:
    """What the second layer of a kind did; `repeats` has those that were not run."""

    name: str
    given: list[Any]  # storages of its arguments
    saved: Storages
    shared: set[Any]  # those of them that were saved before
    output: Tensor
    sent: list[float] = field(default_factory=list)  # in the forward: all bytes, those between experts; in the backward
    repeats: list[str] = field(default_factory=list)


class _Through(torch.autograd.Function):
    """A result that depends on a tensor by autograd, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, output: Tensor) -> Tensor:
        ctx.tensor = (tensor.shape, tensor.dtype)
        return torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shape, dtype = ctx.tensor
        return grads[0].new_empty(shape, dtype=dtype), None


class RepeatedLayers:
    """Stands before the layers of a model while it runs.

    `ledger` notes what is saved; `sent` returns what collectives have moved.
    """

    def __init__(self, model: nn.Module, ledger: Any, sent: Callable[[], list[float]]) -> None:
        self._model, self._ledger, self._sent = model, ledger, sent
        self._runs: dict[Hashable, int] = {}
        self.alike: dict[Hashable, Alike] = {}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Run layers of a kind twice at most."""
        configs = {id(config): config for each in self._model.modules() if (config := getattr(each, "config", None))}
        layers = {n: each for n, each in self._model.named_modules() if isinstance(each, GradientCheckpointingLayer)}
        former = {name: layer.__dict__.get("forward") for name, layer in layers.items()}
        for name, layer in layers.items():
            place = int(next(iter(re.findall(r"\.(\d+)$", name)), 0))
            by_layer = [
                value[place]
                for config in configs.values()
                for value in vars(config).values()
                if isinstance(value, list | tuple) and len(value) > place
            ]
            layer.__dict__["forward"] = self._standing_in(name, layer.forward, (_kind(layer, set()), str(by_layer)))
        try:
            yield
        finally:
            for name, layer in layers.items():
                del layer.__dict__["forward"]
                if former[name] is not None:
                    layer.__dict__["forward"] = former[name]

    def _standing_in(self, name: str, forward: Callable[..., Any], kind: Hashable) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            tensors = [each for each in leaves if isinstance(each, Tensor)]
            given = [next(iter(storages_of([each]))) for each in tensors]
            aliases = tuple((given.index(ref), ref in self._ledger.owned) for ref in given)
            key = (kind, aliases, *(_form(each) for each in leaves))
            known = self.alike.get(key)
            source = next((each for each in tensors if each.requires_grad), None)
            if known is not None:
                known.repeats.append(name)
                return self._repeated(known, given, tensors[0] if source is None else source)
            before, sent = set(self._ledger.saved), self._sent()
            output = forward(*args, **kwargs)
            self._runs[key] = self._runs.get(key, 0) + 1
            if self._runs[key] == 2 and type(output) is type(tensors[0]):
                saved = self._ledger.of_this_call()
                alike = Alike(name, given, saved, before & saved.keys(), output)
                alike.sent = [after - start for after, start in zip(self._sent(), sent, strict=True)]
                if source is not None and output.requires_grad:
                    self._count_backward(alike, source, output)
                self.alike[key] = alike
            return output

        return called

    def _count_backward(self, alike: Alike, source: Tensor, output: Tensor) -> None:
        start: list[float] = []
        output.register_hook(lambda _: start.append(self._sent()[0]))
        source.register_hook(lambda _: alike.sent.append(self._sent()[0] - start[0]))

    def _repeated(self, known: Alike, given: list[Any], source: Tensor) -> Tensor:
        output: Tensor = _Through.apply(source, known.output)
        own: dict[Any, Any] = {ref: ref for ref in known.shared} | dict(zip(known.given, given, strict=True))
        own[next(iter(storages_of([known.output])))] = next(iter(storages_of([output])))
        self._ledger.note_as({ref: own.get(ref, object()) for ref in known.saved}, known.saved)
        return output


def _form(value: object) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(value)
    return type(value), value.shape, value.stride(), value.dtype, value.requires_grad


def _kind(module: nn.Module, seen: set[int]) -> Hashable:
    """What two layers that do the same have in common: classes, shapes, and attributes but for names and numbers."""
    if id(module) in seen:
        return None
    seen.add(id(module))
    tensors = [
        (name, None if each is None else (local_part(each).shape, each.dtype, each.requires_grad))
        for name, each in (*module._parameters.items(), *module._buffers.items())
    ]
    values = []
    for name, value in vars(module).items():
        if isinstance(value, nn.Module):
            values.append((name, _kind(value, seen)))
        elif name not in _NAMES:
            code = getattr(value, "__code__", None)  # of a function whose closure is the layer's own
            known: Any = id(value)  # of a configuration, which layers share
            if not isinstance(value, PretrainedConfig):
                known = re.sub(r"\.\d+\.", "..", repr(value))  # without a layer's number in names
            values.append((name, known if code is None else code))
    children = [(name, None if child is None else _kind(child, seen)) for name, child in module._modules.items()]
    return type(module), tuple(tensors), tuple(values), tuple(children)

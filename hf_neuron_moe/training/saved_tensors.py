"""Count the bytes that named modules keep alive between forward and backward.

:class:`torch.autograd.graph.saved_tensors_hooks` sees every tensor that an operator saves for its backward, stock or
custom alike. Forward hooks switch it on when a named module is entered and off when it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hf_neuron_moe.errors import ConfigError, DeviceError, ShapeError, public

_WHERE = "measure_saved_bytes"


@dataclass
class ModuleSavedBytes:
    """What one module saved, summed over its forward calls."""

    calls: int = 0
    tokens: int = 0  # rows of the module's first tensor input (its elements over its last dimension)
    activation_bytes: int = 0  # storages that the module itself brought into being and keeps for backward
    input_bytes: int = 0
    """Storages of the module's own inputs that it keeps for backward. Counted apart because the operator that produced
    the input often keeps the same storage, which then costs nothing extra."""

    @property
    def total_bytes(self) -> int:
        """Activation and input bytes together."""
        return self.activation_bytes + self.input_bytes

    @property
    def bytes_per_token(self) -> float:
        """:attr:`total_bytes` per token; 0 for a module that was not called."""
        return self.total_bytes / self.tokens if self.tokens else 0.0


@dataclass
class SavedBytes:
    """Result of :func:`measure_saved_bytes`: one entry per named module, and the sums."""

    modules: dict[str, ModuleSavedBytes] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all modules; a storage that two modules save counts in both."""
        return sum(entry.total_bytes for entry in self.modules.values())

    @property
    def activation_bytes(self) -> int:
        """Bytes of all modules without their own inputs."""
        return sum(entry.activation_bytes for entry in self.modules.values())

    @property
    def input_bytes(self) -> int:
        """Bytes of the modules' own inputs that they keep."""
        return sum(entry.input_bytes for entry in self.modules.values())

    @property
    def bytes_per_token(self) -> float:
        """What one token costs on its way through all named modules: the sum of their bytes per token."""
        return sum(entry.bytes_per_token for entry in self.modules.values())


Storages = dict[StorageWeakRef, int]
"""Bytes of distinct storages. A whole storage stays alive even when only a view of it is saved."""


def storages_of(tensors: Iterable[Tensor]) -> Storages:
    """Return the storages of `tensors`, of sharded ones (DTensors) this process's own."""
    own = (local_part(each).untyped_storage() for each in tensors)
    return {StorageWeakRef(storage): storage.nbytes() for storage in own}


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a DTensor, also while a collective fills it; other tensors as they are."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor)


def noting_saved(owned: Storages, note: Callable[[Storages], None]) -> saved_tensors_hooks:
    """Return a context in which `note` gets each storage that autograd saves and that is not in `owned`."""

    def pack(tensor: Tensor) -> Tensor:
        storage = storages_of([tensor])
        if not storage.keys() <= owned.keys():
            note(storage)
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


@public(_WHERE)
def _tensor_inputs(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the call's tensor arguments; an error where its storages or rows cannot be counted."""
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    argument = f"first tensor input of {name!r}"
    if not inputs or inputs[0].ndim == 0 or inputs[0].numel() == 0:
        got = f"shape {tuple(inputs[0].shape)}" if inputs else "no tensor input"
        fix = "Measure a module that is called with its hidden states."
        raise ShapeError.about(argument, "a tensor [..., features] with at least one row", got, fix)
    if inputs[0].device.type == "meta":
        fix = "Materialize the model first; meta storages have no identity to count."
        raise DeviceError.about(argument, "on a device with memory", "a meta tensor", fix)
    return inputs


class _Meter:
    """Hooks of one named module."""

    def __init__(self, name: str, entry: ModuleSavedBytes) -> None:
        self.name = name
        self.entry = entry
        self.running: list[tuple[Storages, Storages, saved_tensors_hooks]] = []  # inputs, what was saved since, hooks

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = _tensor_inputs(self.name, args, kwargs)
        saved: Storages = {}
        hooks = noting_saved(storages_of([*module.parameters(), *module.buffers()]), saved.update)
        hooks.__enter__()
        self.running.append((storages_of(inputs), saved, hooks))
        self.entry.calls += 1
        self.entry.tokens += inputs[0].numel() // inputs[0].shape[-1]

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if not self.running:  # `enter` refused the call, nothing was opened
            return
        inputs, saved, hooks = self.running.pop()
        hooks.__exit__()
        of_inputs = sum(nbytes for storage, nbytes in saved.items() if storage in inputs)
        self.entry.input_bytes += of_inputs
        self.entry.activation_bytes += sum(saved.values()) - of_inputs


@public(_WHERE)
def _check_modules(modules: Mapping[str, nn.Module]) -> None:
    if not modules:
        fix = "Pass for example {name: model.get_submodule(name) for name in names}."
        raise ConfigError.about("modules", "a mapping with at least one module", "an empty one", fix)
    identities = {id(module): name for name, module in modules.items()}
    for name, module in modules.items():
        inner = [identities[id(m)] for m in module.modules() if id(m) in identities and identities[id(m)] != name]
        if inner:  # their counts would overlap
            expected = "modules of which none contains or equals another"
            raise ConfigError.about("modules", expected, f"{name!r} and {inner[0]!r}", "Measure them in two runs.")


@contextmanager
def measure_saved_bytes(modules: Mapping[str, nn.Module]) -> Iterator[SavedBytes]:
    """Count what the named modules, none of which may contain another, save for backward inside the ``with`` block.

    Storages are counted once per call and in full, also where only a view of them is saved. Parameters and buffers of
    the module are left out, as are their views; a cast or quantized copy of a parameter that is kept for backward is
    counted. The counts grow with every forward call of a named module and stay readable after the block.

    Not seen: tensors that an operator keeps as plain attributes of its context. Measure without gradient checkpointing
    around the modules: innermost hooks win, so the counts would be those of the module without checkpointing.
    """
    _check_modules(modules)
    result = SavedBytes()
    with ExitStack() as stack:
        for name, module in modules.items():
            meter = _Meter(name, result.modules.setdefault(name, ModuleSavedBytes()))
            # Innermost position on both sides, so that other hooks of the module are outside the count.
            before = module.register_forward_pre_hook(meter.enter, with_kwargs=True)
            after = module.register_forward_hook(meter.leave, prepend=True, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield result

"""Which wrapper kernel calls which nkilib function, decided by the installed function's signature.

nkilib's argument sets change with every release, so nothing is decided by a version number: a wrapper fits if the
function has every argument that the wrapper needs and needs none that the wrapper does not pass, and if options that
are left alone have their documented defaults.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hf_neuron_moe.backends.neuron.checkpoint_layout import DIRECT, TRANSPOSED, gate_up_layout
from hf_neuron_moe.backends.neuron.generations import COMPANIONS, FUNCTIONS, SWIZZLE_MODES, Generation
from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, shown_name
from hf_neuron_moe.backends.neuron.signatures import other_default, record_fields, signature_of

_KERNELS = "hf_neuron_moe.backends.neuron.nki_kernels"


@dataclass(frozen=True)
class Match:
    """How a need is met by the installed nkilib.

    Attributes:
        function: name of nkilib's function.
        generation: the argument set that fits; None if none does.
        parameters: the installed function's arguments.
        reason: why none fits.
        layout: order of the checkpoint of gate and up, of the MXFP8 experts' kernels.
    """

    function: str
    generation: Generation | None
    parameters: frozenset[str] = frozenset()
    reason: str = ""
    layout: str = TRANSPOSED


def match(need: str) -> Match:
    """Find the generation of an nkilib function that is installed."""
    name, generations = FUNCTIONS[need]
    reasons: dict[str, list[str]] = {}
    for generation in generations:
        own = generation.function or name
        parameters, reason = _read(own)
        if reason is None:
            reason, layout = _why_not(generation, parameters), TRANSPOSED
            if reason is None and generation.checkpoint:
                layout, reason = _layout(generation, parameters)
            if reason is None:
                return Match(own, generation, frozenset(parameters), layout=layout)
            reason = f"not {generation.name}'s: {reason}"
        reasons.setdefault(own, []).append(reason)
    return Match(name, None, frozenset(_read(name)[0]), "; ".join(_told(own, why) for own, why in reasons.items()))


def _read(name: str) -> tuple[dict[str, inspect.Parameter], str | None]:
    """The installed function's arguments, or why they are not known."""
    function = find_object(name)
    if function is None:
        return {}, f"the installed nkilib has no {name}"
    signature = signature_of(function)
    if signature is None:
        return {}, f"the arguments of the installed {name} cannot be read"
    return {key: found for key, found in signature.parameters.items() if found.kind is not found.VAR_KEYWORD}, None


def _told(name: str, reasons: list[str]) -> str:
    if not reasons[0].startswith("not "):
        return reasons[0]
    return f"the installed {name} has unknown arguments ({'; '.join(reasons)})"


def _why_not(generation: Generation, parameters: dict[str, inspect.Parameter]) -> str | None:
    missing = generation.needed - parameters.keys()
    if missing:
        return f"no {', '.join(sorted(missing))}"
    foreign = generation.foreign & parameters.keys()
    if foreign:
        return f"has {', '.join(sorted(foreign))}"
    extra = {key for key, found in parameters.items() if found.default is found.empty} - generation.passed
    if extra:
        return f"needs {', '.join(sorted(extra))}"
    return other_default(parameters, generation.defaults) or _why_not_objects(generation)


def _layout(generation: Generation, parameters: dict[str, inspect.Parameter]) -> tuple[str, str | None]:
    records = [find_object(name) for name, _ in generation.records if name.endswith("Config")]
    return gate_up_layout({key: found.default for key, found in parameters.items()}, records[0] if records else None)


def _why_not_objects(generation: Generation) -> str | None:
    """Which enum, member, record or field that the wrappers use is not there."""
    for name, member in generation.members:
        kind = find_object(name)
        if kind is None:
            return f"{shown_name(name)} not found"
        if not hasattr(kind, member):
            return f"{shown_name(name)} has no {member}"
    for name, needed in generation.records:
        kind = find_object(name)
        if kind is None:
            return f"{shown_name(name)} not found"
        reason = _why_not_record(shown_name(name), needed, record_fields(kind))
        if reason is not None:
            return reason
    return None


def _why_not_record(name: str, needed: frozenset[str], known: frozenset[str] | None) -> str | None:
    if known is None:
        return None
    if not known:
        return f"{name} takes no options"
    if not needed <= known:
        return f"{name} has no {', '.join(sorted(needed - known))}"
    for field, (kind, member) in COMPANIONS.items():
        found = find_object(kind)
        if any(other.endswith(field) for other in known) and not hasattr(found, member):
            return f"{name} has {field.lstrip('_')}, and {kind}.{member} is not found"
    unset = {other for other in known if other.endswith("_swizzle_mode")} - set(SWIZZLE_MODES)
    if unset:  # their defaults are for a single expert
        return f"{name} also has {', '.join(sorted(unset))}"
    return None


class Adapter:
    """The wrapper kernels for one installed toolchain; nothing is imported before it is asked for."""

    def __init__(self) -> None:
        self._matches: dict[str, Match] = {}

    def match(self, need: str) -> Match:
        """Return :func:`match`, found once."""
        if need not in self._matches:
            self._matches[need] = match(need)
        return self._matches[need]

    def why_not(self, *needs: str) -> str | None:
        """Return why the installed nkilib cannot do all of `needs`, or None."""
        reasons = [found.reason for found in map(self.match, needs) if found.generation is None]
        return "; ".join(reasons) or None

    def generation(self, need: str) -> str:
        """Return the first release with the installed argument set."""
        found = self.match(need).generation
        assert found is not None, "ask why_not first"
        return found.name

    def turned(self, need: str) -> bool:
        """Return whether the installed kernel has the checkpoint of gate and up as ``[N, 2, B, I]``."""
        return self.match(need).layout == DIRECT

    def kernel(self, need: str, name: str) -> Callable[..., Any]:
        """Return the wrapper kernel `name` of the generation that is installed."""
        found = self.match(need).generation
        assert found is not None, "ask why_not first"
        return getattr(self._module(found.module), name)

    @functools.cache  # noqa: B019 - an adapter lives as long as its backend, which lives as long as the process
    def _module(self, name: str) -> ModuleType:
        path = f"{_KERNELS}.{name}"
        if path in sys.modules:  # made for another toolchain: its globals are that one's
            return importlib.reload(sys.modules[path])
        return importlib.import_module(path)

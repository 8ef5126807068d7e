"""Which wrapper kernel calls which nkilib function, decided by the installed function's signature, not by a version.

A wrapper fits if the function has every argument that the wrapper needs and needs none that the wrapper does not pass.
Options that are left alone must have their documented defaults.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType
from typing import Any

from hf_neuron_moe.backends.neuron.generations import COMPANIONS, FUNCTIONS, OPTION_RECORDS, SWIZZLE_MODES, Generation
from hf_neuron_moe.backends.neuron.mxfp8_pair import DIRECT, TRANSPOSED, gate_up_layout
from hf_neuron_moe.backends.neuron.nkilib_objects import find_object, shown_name
from hf_neuron_moe.backends.neuron.signatures import keywords, other_default, signature_of


@dataclass(frozen=True)
class Match:
    """How a need is met by the installed nkilib."""

    function: str  # nkilib's name of it
    generation: Generation | None  # the argument set that fits
    parameters: frozenset[str] = frozenset()  # the installed function's arguments, and the fields of its record
    reason: str = ""  # why no generation fits
    layout: str = TRANSPOSED  # of the checkpoint of gate and up, of the MXFP8 experts' kernels

    @property
    def installed(self) -> Generation:
        """The generation, where there is one."""
        assert self.generation is not None, "ask unsupported_reason first"
        return self.generation


def match(need: str) -> Match:
    """Find the generation of an nkilib function that is installed."""
    name, generations = FUNCTIONS[need]
    reasons = []
    for own, known in groupby(generations, lambda generation: generation.function or name):
        parameters, reason = _read(own)
        unfit = []
        for generation in known if reason is None else ():
            mismatch, layout = next(_mismatches(generation, parameters), None), TRANSPOSED
            records = [find_object(kind) for kind, _ in generation.records if kind in OPTION_RECORDS]
            if mismatch is None and generation.checkpoint:
                defaults = {key: found.default for key, found in parameters.items()}
                layout, mismatch = gate_up_layout(defaults, records[0] if records else None)
            if mismatch is None:
                taken = frozenset(parameters).union(*(keywords(kind) or () for kind in records))
                return Match(own, generation, taken, layout=layout)
            unfit.append(f"not {generation.name}'s: {mismatch}")
        reasons.append(reason or f"the installed {own} has unknown arguments ({'; '.join(unfit)})")
    return Match(name, None, reason="; ".join(reasons))


def _read(name: str) -> tuple[dict[str, inspect.Parameter], str | None]:
    """Return the installed function's arguments, or why they are not known."""
    if (function := find_object(name)) is None:
        return {}, f"the installed nkilib has no {name}"
    if (signature := signature_of(function)) is None:
        return {}, f"the arguments of the installed {name} cannot be read"
    return {key: found for key, found in signature.parameters.items() if found.kind is not found.VAR_KEYWORD}, None


def _mismatches(generation: Generation, parameters: dict[str, inspect.Parameter]) -> Iterator[str]:
    """Yield what the installed function, its enums and its records have otherwise than the wrappers need."""
    if missing := generation.needed - parameters.keys():
        yield f"no {_listed(missing)}"
    if foreign := generation.foreign & parameters.keys():
        yield f"has {_listed(foreign)}"
    required = {key for key, found in parameters.items() if found.default is found.empty}
    if extra := required - generation.passed:
        yield f"needs {_listed(extra)}"
    if default := other_default(parameters, generation.defaults):
        yield default
    for name, member in generation.members:
        kind = find_object(name)
        if not hasattr(kind, member):
            yield f"{shown_name(name)} not found" if kind is None else f"{shown_name(name)} has no {member}"
    for name, fields in generation.records:
        kind = find_object(name)
        if kind is None:
            yield f"{shown_name(name)} not found"
        elif (known := keywords(kind)) is not None:
            yield from _record_mismatches(shown_name(name), frozenset(fields.split()), known)


def _record_mismatches(name: str, needed: frozenset[str], known: frozenset[str]) -> Iterator[str]:
    if not known:
        yield f"{name} takes no options"
    if missing := needed - known:
        yield f"{name} has no {_listed(missing)}"
    for field, (kind, member) in COMPANIONS.items():
        if any(other.endswith(field) for other in known) and not hasattr(find_object(kind), member):
            yield f"{name} has {field.lstrip('_')}, and {kind}.{member} is not found"
    # The defaults of others are for a single expert.
    if unset := {other for other in known if other.endswith("_swizzle_mode")} - set(SWIZZLE_MODES):
        yield f"{name} also has {_listed(unset)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


class Adapter:
    """The wrapper kernels for one installed toolchain; nothing is imported before it is asked for."""

    def __init__(self) -> None:
        self._matches: dict[str, Match] = {}

    def match(self, need: str) -> Match:
        """Return :func:`match`, found once."""
        if need not in self._matches:
            self._matches[need] = match(need)
        return self._matches[need]

    def unsupported_reason(self, *needs: str) -> str | None:
        """Return why the installed nkilib cannot do all of `needs`, or None."""
        reasons = [found.reason for found in map(self.match, needs) if found.generation is None]
        return "; ".join(reasons) or None

    def generation(self, need: str) -> str:
        """Return the first release with the installed argument set; :meth:`unsupported_reason` was None."""
        return self.match(need).installed.name

    def turned(self, need: str) -> bool:
        """Return whether the installed kernel has the checkpoint of gate and up as ``[N, 2, B, I]``."""
        return self.match(need).layout == DIRECT

    def kernel(self, need: str, name: str) -> Callable[..., Any]:
        """Return the wrapper kernel `name` of the generation that is installed; :meth:`unsupported_reason` was None."""
        return getattr(self._module(self.match(need).installed.module), name)

    @functools.cache  # noqa: B019 - an adapter lives as long as its backend, which lives as long as the process
    def _module(self, name: str) -> ModuleType:
        path = f"hf_neuron_moe.backends.neuron.nki_kernels.{name}"
        if path in sys.modules:  # made for another toolchain: its globals are that one's
            return importlib.reload(sys.modules[path])
        return importlib.import_module(path)

"""Which wrapper kernel calls which nkilib function, decided by the installed function's signature.

nkilib's argument sets change with every release, so nothing is decided by a version number: a wrapper fits if the
function has every argument that the wrapper passes and needs none that it does not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hf_neuron_moe.backends.neuron.generations import FUNCTIONS, Generation
from hf_neuron_moe.backends.neuron.nkilib_objects import find_object

_KERNELS = "hf_neuron_moe.backends.neuron.nki_kernels"


@dataclass(frozen=True)
class Match:
    """How a need is met by the installed nkilib.

    Attributes:
        function: name of nkilib's function.
        generation: the argument set that fits; None if none does.
        parameters: the installed function's arguments.
        reason: why none fits.
    """

    function: str
    generation: Generation | None
    parameters: frozenset[str] = frozenset()
    reason: str = ""


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of an nkilib function, ``@nki.jit`` or not; None if it hides its arguments."""
    wrapped = (getattr(function, name, None) for name in ("func", "__wrapped__", "fn"))
    for candidate in (*wrapped, function):
        if not callable(candidate):
            continue
        try:
            signature = inspect.signature(candidate)
        except (TypeError, ValueError):
            continue
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            return signature
    return None


def match(need: str) -> Match:
    """Find the generation of an nkilib function that is installed."""
    name, generations = FUNCTIONS[need]
    function = find_object(name)
    if function is None:
        return Match(name, None, reason=f"the installed nkilib has no {name}")
    signature = signature_of(function)
    if signature is None:
        return Match(name, None, reason=f"the arguments of the installed {name} cannot be read")
    parameters = {key: value for key, value in signature.parameters.items() if value.kind is not value.VAR_KEYWORD}
    needed = {key for key, value in parameters.items() if value.default is value.empty}
    reasons = []
    for generation in generations:
        reason = _why_not(generation, set(parameters), needed)
        if reason is None:
            return Match(name, generation, frozenset(parameters))
        reasons.append(f"not {generation.name}'s: {reason}")
    return Match(
        name, None, frozenset(parameters), f"the installed {name} has unknown arguments ({'; '.join(reasons)})"
    )


def _why_not(generation: Generation, parameters: set[str], needed: set[str]) -> str | None:
    missing = (generation.passed | generation.marks) - parameters
    if missing:
        return f"no {', '.join(sorted(missing))}"
    extra = needed - generation.passed
    if extra:
        return f"needs {', '.join(sorted(extra))}"
    for record, set_fields in generation.records:
        kind = find_object(record)
        if kind is None:
            return f"{record} not found"
        known = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set_fields
        if not set_fields <= known:
            return f"{record} has no {', '.join(sorted(set_fields - known))}"
        unset = {name for name in known - set_fields if name.endswith("_swizzle_mode")}
        if unset:  # their defaults are for a single expert
            return f"{record} also has {', '.join(sorted(unset))}"
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

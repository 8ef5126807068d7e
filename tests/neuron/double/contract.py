"""The double's state, what it records, and its one exception."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.neuron.double.memory import Launch

Release = tuple[int, int]


class ContractError(AssertionError):
    """A caller broke a documented rule. No subclass of the package's errors: nothing may swallow it."""


def broken(where: str, rule: str) -> NoReturn:
    """Fail with the place and the rule."""
    raise ContractError(f"{where}: {rule}")


def need(condition: bool, where: str, rule: str) -> None:
    """Fail unless `condition` holds."""
    if not condition:
        broken(where, rule)


@dataclass(frozen=True)
class KernelCall:
    """One call of an nkilib function that passed all checks."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class LaunchRecord:
    """One finished launch of a kernel on real values."""

    kernel: str
    grid: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class Double:
    """One machine: an nkilib release on a chip with so many physical cores per logical one.

    Attributes:
        release: of nkilib, as ``(2, 33)``.
        target: ``"trn2"`` or ``"trn3"``.
        lnc: 1 or 2.
        plugin: torch_neuronx is installed; NKI's simulator works without.
        config_pair: the MXFP8 expert pair is the one that takes records; None for the release's.
        without: arguments that nkilib's functions, and fields that those records, do not have.
        records: what those records are: ``"dataclass"``, ``"namedtuple"`` or ``"class"``.
        layout: what the checkpoint record of the MXFP8 pair says of gate and up by default; empty for a record that
            says nothing. With ``"DIRECT"`` the forward saves ``[N, 2, B, I]``, and knows no other order.
        faults: by nkilib's function, what is wrong with it: see :mod:`tests.neuron.double.faults`.
        fallback: operations that the runtime says it ran on the CPU.
        plugin_version: of torch_neuronx, where it is not install.py's.
        launches: finished launches on real values.
        calls: nkilib functions that ran in them, with their bound arguments.
        traced: launches on fake tensors.
        compilations: distinct (kernel, grid, shapes, dtypes, constants) of eager launches, as the runtime caches them.
        operators: names registered through ``nki_op``.
        bodies: the functions that were registered, by name.
        configured: configuration records by id, with the shapes that nkilib made them for.
        current: the launch that runs now.
    """

    release: Release = (2, 33)
    target: str = "trn3"
    lnc: int = 2
    plugin: bool = True
    config_pair: bool | None = None
    without: frozenset[str] = frozenset()
    records: str = "dataclass"
    layout: str = ""
    faults: dict[str, str] = field(default_factory=dict)
    fallback: tuple[str, ...] = ()
    plugin_version: str = ""
    launches: list[LaunchRecord] = field(default_factory=list)
    calls: list[KernelCall] = field(default_factory=list)
    traced: list[str] = field(default_factory=list)
    compilations: Counter[Any] = field(default_factory=Counter)
    operators: list[str] = field(default_factory=list)
    bodies: dict[str, Any] = field(default_factory=dict)
    configured: dict[int, Any] = field(default_factory=dict)
    current: Launch | None = None

    def __post_init__(self) -> None:
        if self.config_pair is None:
            self.config_pair = self.release >= (2, 33)

    @property
    def names(self) -> list[str]:
        """Names of the nkilib functions that ran, in order."""
        return [call.name for call in self.calls]

    def clear(self) -> None:
        """Forget what was recorded, compilations included."""
        for record in (self.launches, self.calls, self.traced, self.compilations):
            record.clear()

"""The Neuron stack on this machine, package by package; imports no torch unless the stack's own packages do.

Sources: Neuron SDK 2.33 release notes; the packages of these names on PyPI, which say that they are the wrong ones.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hf_neuron_moe._version import __version__
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.neuron.adapter import Adapter, Match
from hf_neuron_moe.backends.neuron.generations import BF16_OPEN, FUNCTIONS
from hf_neuron_moe.device.first_step import BROKEN, COMPILER, MISSING, OK, PLACEHOLDER, first_steps, why_not_running
from hf_neuron_moe.errors import NeuronMoEError

_PLACEHOLDER_MARKS = ("WRONG PACKAGE", "does not publish installable wheels")
"""What AWS's placeholders on PyPI say in their description, and some when they are imported."""

_OTHERS = ("torch", "transformers", "accelerate", "peft", "safetensors", "numpy")
ENVIRONMENT = (
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    versions.LNC_OVERRIDE,
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_RT_NUM_CORES",
    "NEURON_CC_FLAGS",
    "NEURON_LAUNCH_BLOCKING",
    "NKILIB_FORCE_BUNDLED_LIBRARY",
    "NKI_SIMULATOR",
    "NKI_PRECISE_FP",
    "NKI_COMPILE_CACHE_URL",
    "NKI_ENABLE_TRACE_CACHE",
    "TORCH_NEURONX_NEFF_CACHE_DIR",
    "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "HF_DEACTIVATE_ASYNC_LOAD",
)
"""Variables that change what the stack does; those that are set are reported."""


_OPEN = dict.fromkeys(("moe_forward", "moe_backward"), BF16_OPEN)
"""By the kernel: what the documents leave open about it."""


_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError, SyntaxError)
"""What an installation whose parts do not fit together raises where it is asked about itself."""


@dataclass(frozen=True)
class Package:
    """One package of the Neuron stack.

    Attributes:
        name: of the distribution.
        module: what is imported of it.
        version: None where none is stated.
        state: ``"ok"``, ``"missing"``, ``"placeholder"`` (PyPI's package of that name, which has no code) or
            ``"broken"`` (installed and not importable).
        note: why, where it is not ``"ok"``; of the plugin also that it belongs to another torch.
    """

    name: str
    module: str
    version: str | None
    state: str
    note: str = ""


@dataclass(frozen=True)
class Kernel:
    """How one of the kernels that are called is met by the installed nkilib.

    Attributes:
        need: the package's name for it, such as ``"moe_forward"``.
        function: nkilib's name.
        generation: the first release with the installed argument set; None where it cannot be called.
        reason: why not.
        note: what the documents leave open about it.
    """

    need: str
    function: str
    generation: str | None
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Installation:
    """What :func:`inspect_installation` found.

    Attributes:
        reason: why ``backend="neuron"`` cannot run here; None where it can.
        simulator_reason: the same for ``backend="nki-sim"``.
        sdk: Neuron SDK that the installed nki belongs to, such as ``"2.33"``.
        python: its version.
        machine: operating system and architecture.
        others: versions of this package and of those it builds on; None where not installed.
        packages: the Neuron stack.
        target: ``"trn2"`` or ``"trn3"`` and where that is known from; None with the reason where it cannot be told.
        lnc: physical cores per logical core and where that is known from.
        devices: logical cores that the runtime offers; None where there is no runtime.
        environment: the variables of :data:`ENVIRONMENT` that are set.
        kernels: the kernels that this package calls.
        torch_reason: why ``backend="torch"`` cannot run here; None where torch is there.
    """

    reason: str | None
    simulator_reason: str | None
    sdk: str | None
    python: str
    machine: str
    others: dict[str, str | None]
    packages: tuple[Package, ...]
    target: tuple[str | None, str]
    lnc: tuple[str | None, str]
    devices: int | None
    environment: dict[str, str]
    kernels: tuple[Kernel, ...]
    torch_reason: str | None = None

    @property
    def why_not(self) -> str | None:
        """Why no Neuron kernel can run here: packages, compiler, device, kernels' arguments; None where one can."""
        return why_not_running(self)

    @property
    def usable(self) -> bool:
        """Whether Neuron kernels can run here."""
        return self.why_not is None

    @property
    def first_steps(self) -> tuple[str, ...]:
        """What to do, see :func:`~hf_neuron_moe.device.first_step.first_steps`."""
        return first_steps(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        values = asdict(self)
        for key in ("target", "lnc"):
            values[key] = dict(zip(("value", "source"), values[key]))
        return {"usable": self.usable, "why_not": self.why_not, "first_steps": list(self.first_steps), **values}


def inspect_installation() -> Installation:
    """Look at the Neuron stack; whatever is missing is told and not raised."""
    packages = tuple(_package(module, name) for module, name in versions.PACKAGES.items())
    reason, simulator_reason = _said(versions.why_unavailable), _said(lambda: versions.why_unavailable(simulator=True))
    return Installation(
        reason=reason,
        simulator_reason=simulator_reason,
        sdk=_said(versions.sdk_generation),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        others={"hf-neuron-moe": __version__, **{name: _version(name) for name in _OTHERS}},
        packages=packages,
        target=_detected(versions.platform),
        lnc=_detected(versions.logical_cores),
        devices=_devices(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        kernels=_kernels(packages),
        torch_reason=None if importlib.util.find_spec("torch") is not None else "torch is not installed",
    )


class CheckedAdapter(Adapter):
    """An adapter for a diagnosis: what a broken nkilib raises while it is looked at becomes the reason."""

    def match(self, need: str) -> Match:
        """Return the match, or none with what was raised."""
        try:
            return super().match(need)
        except _BROKEN as error:
            return Match(FUNCTIONS[need][0], None, reason=f"nkilib fails: {type(error).__name__}: {error}")


def device_count() -> int | None:
    """Return how many logical cores ``torch.neuron`` offers; None where the plugin is not loaded."""
    neuron = getattr(sys.modules.get("torch"), "neuron", None)
    if neuron is None:
        return None
    return int(neuron.device_count()) if neuron.is_available() else 0


def _devices() -> int | None:
    try:
        return device_count()
    except (RuntimeError, OSError):  # what the runtime raises where the driver is missing
        return 0


def _said(ask: Callable[[], str | None]) -> str | None:
    """The answer, or the refusal in its place: a diagnosis goes on."""
    try:
        return ask()
    except (NeuronMoEError, *_BROKEN) as error:
        return str(error)


def _detected(ask: Callable[[], versions.Detected]) -> tuple[str | None, str]:
    try:
        found = ask()
    except (NeuronMoEError, *_BROKEN) as error:
        return None, str(error)
    return found.name, found.told


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(module: str, name: str) -> Package:
    version = versions.installed_version(module)
    # The compiler is a program: importing it here would tell nothing that its version does not.
    reason = None if module == COMPILER and version is not None else versions.import_reason(module)
    if _is_placeholder(name) or (module == "nki" and reason is None and not hasattr(sys.modules["nki"], "jit")):
        note = "PyPI's package of this name has no code; the real one comes from AWS's own index"
        if module == "nkilib" and reason is None:
            return Package(name, module, None, OK, "nkilib comes with neuronx-cc; PyPI's nki-library adds nothing")
        return Package(name, module, version, PLACEHOLDER, note)
    if reason is not None:
        state = MISSING if version is None and "not installed" in reason else BROKEN
        return Package(name, module, version, state, reason)
    return Package(name, module, version, OK, (versions.pairing() or "") if module == "torch_neuronx" else "")


def _is_placeholder(distribution: str) -> bool:
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    told = f"{metadata.get_payload()} {metadata['Description'] or ''}"  # type: ignore[attr-defined]
    return any(mark in told for mark in _PLACEHOLDER_MARKS)


def _kernels(packages: tuple[Package, ...]) -> tuple[Kernel, ...]:
    library = next(package for package in packages if package.module == "nkilib")
    if library.state != OK:
        absent = f"nkilib is {library.state}"
        return tuple(Kernel(need, name, None, absent, _OPEN.get(need, "")) for need, (name, _) in FUNCTIONS.items())
    adapter = CheckedAdapter()
    found = ((need, adapter.match(need)) for need in FUNCTIONS)
    return tuple(
        Kernel(
            need,
            match.function,
            match.generation.name if match.generation else None,
            match.reason,
            _OPEN.get(need, ""),
        )
        for need, match in found
    )

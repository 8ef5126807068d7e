"""The Neuron stack on this machine, package by package, and what to do first where its kernels cannot run.

Imports no torch unless the stack's own packages do. Source: Neuron SDK 2.33 release notes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_neuron_moe._version import __version__
from hf_neuron_moe.backends.neuron import versions
from hf_neuron_moe.backends.neuron.adapter import Adapter, Match
from hf_neuron_moe.backends.neuron.generations import BF16_OPEN, FUNCTIONS
from hf_neuron_moe.device.gpus import GPUs, inspect_gpus
from hf_neuron_moe.environment import OWN, VALUES, wrong_values
from hf_neuron_moe.errors import NeuronMoEError

_DATA: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("installed.toml").read_text(encoding="utf-8"))
ENVIRONMENT: tuple[str, ...] = tuple(_DATA["environment"])
"""Variables that change what the stack does; those that are set are reported."""

OK, MISSING, PLACEHOLDER, BROKEN = "ok", "missing", "placeholder", "broken"
"""States of a package."""

COMPILER = "neuronxcc"
"""Module of the compiler's package."""
_SYSTEM = "Linux x86_64"
_INDEX = "pip's --index-url, whose address is on the page 'Install PyTorch for Neuron' of AWS's documentation"

_FAILURES = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError, SyntaxError)
"""What an installation whose parts do not fit together raises where it is asked about itself."""


@dataclass(frozen=True)
class Package:
    """One package of the Neuron stack."""

    name: str  # of the distribution
    module: str  # what is imported of it
    version: str | None  # None where none is stated
    state: str  # OK, MISSING, PLACEHOLDER (PyPI's package of that name, which has no code) or BROKEN (not importable)
    note: str = ""  # why, where it is not OK; of the plugin also that it belongs to another torch


@dataclass(frozen=True)
class Kernel:
    """How one of the kernels that are called is met by the installed nkilib."""

    need: str  # the package's name for it, such as "moe_forward"
    function: str  # nkilib's name
    generation: str | None  # the first release with the installed argument set; None where it cannot be called
    reason: str = ""  # why not
    note: str = ""  # what the documents leave open about it


@dataclass(frozen=True)
class Installation:
    """What :func:`inspect_installation` found."""

    reason: str | None  # why backend="neuron" cannot run here; None where it can
    simulator_reason: str | None  # the same for backend="nki-sim"
    sdk: str | None  # Neuron SDK that the installed nki belongs to, such as "2.33"
    python: str
    machine: str  # operating system and architecture
    others: dict[str, str | None]  # versions of this package and of those it builds on; None where not installed
    packages: tuple[Package, ...]  # the Neuron stack
    target: tuple[str | None, str]  # "trn2" or "trn3" and where that is known from; None with the reason if it is not
    lnc: tuple[str | None, str]  # physical cores per logical core and where that is known from
    devices: int | None  # logical cores that the runtime offers; None where there is no runtime
    environment: dict[str, str]  # the variables of ENVIRONMENT and of this package that are set
    kernels: tuple[Kernel, ...]  # those that this package calls
    torch_reason: str | None = None  # why backend="torch" cannot run here; None where it can
    wrong_variables: tuple[str, ...] = ()  # what is wrong with those of this package
    gpus: GPUs = field(default_factory=GPUs)

    @property
    def compiler(self) -> Package:
        """The compiler's package."""
        return next(package for package in self.packages if package.module == COMPILER)

    @property
    def _obstacle(self) -> tuple[str, str] | None:
        """The first reason why no Neuron kernel can run here, and what to do where every package can be imported."""
        if self.reason is not None:
            step = "Make an environment with the packages of SDK 2.33 from AWS's own index"
            return self.reason, f"{step} ({_INDEX})."
        if self.compiler.state != OK:
            return f"{self.compiler.name} is {self.compiler.state}, and it compiles the kernels", ""
        if self.devices is None:
            reason = "there is no runtime: torch has no torch.neuron, which torch-neuronx registers"
            step = "Unset TORCH_DEVICE_BACKEND_AUTOLOAD, or install the native torch-neuronx of SDK 2.33"
            return reason, f"{step} ({_INDEX})."
        if self.devices == 0:
            step = "Run `neuron-ls`: it shows driver and cores. Another process may hold them, or the driver is missing"
            return "the packages are here, and the runtime offers no logical core", f"{step}."
        for value, source in (self.target, self.lnc):
            if value is None:
                return source, "Correct or unset that variable."
        if all(kernel.generation is None for kernel in self.kernels):
            step = "Install the nki-library of SDK 2.33, or unset NKILIB_FORCE_BUNDLED_LIBRARY."
            return f"none of the kernels can be called: {self.kernels[0].reason}", step
        return None

    @property
    def unsupported_reason(self) -> str | None:
        """Why no Neuron kernel can run here: packages, compiler, device, kernels' arguments; None where one can."""
        return self._obstacle[0] if self._obstacle is not None else None

    @property
    def usable(self) -> bool:
        """Whether Neuron kernels can run here."""
        return self.unsupported_reason is None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that ``json.dumps`` accepts."""
        pairs = {key: dict(zip(("value", "source"), getattr(self, key))) for key in ("target", "lnc")}
        summary = {"usable": self.usable, "why_not": self.unsupported_reason, "first_steps": list(self.first_steps)}
        return {**summary, **asdict(self), **pairs}

    @property
    def first_steps(self) -> tuple[str, ...]:
        """What to do, the first thing first; later ones as far as they are known already."""
        obstacle = self._obstacle
        if obstacle is None:
            return ("`hf-neuron-moe verify-device MODEL_DIR --layers 1` compares a block with PyTorch.",)
        if self.others.get("torch") is None:
            return ("`pip install torch`, then this package without pip's --no-deps, which leaves out what it needs.",)
        if self.machine != _SYSTEM:
            return (f"Go to a Trn2 or Trn3 instance: AWS's packages are for {_SYSTEM}, and this is {self.machine}.",)
        # nkilib also comes with the compiler: where that is still to be installed, it is no step of its own.
        bundled = () if self.compiler.state == OK else ("nkilib",)
        replaced = [each.name for each in self.packages if each.state == PLACEHOLDER]
        broken = [each.name for each in self.packages if each.state == BROKEN]
        missing = [each.name for each in self.packages if each.state == MISSING and each.module not in bundled]
        if not replaced and not missing:
            again = f"Install {', '.join(broken)} again, all of one SDK release, and torch-neuronx of torch's minor "
            where = "version; the table below says what each raised when it was imported."
            return (again + where if broken else obstacle[1],)
        steps = []
        if self.target[0] is None or self.target[1] == versions.ASSUMED:
            steps.append("Go to a Trn2 or Trn3 instance: none was recognized here.")
        if tuple(map(int, self.python.split(".")[:2])) < versions.MINIMUM_PYTHON:
            steps.append(f"Make an environment of Python 3.12 or 3.13: AWS has no wheels for {self.python}.")
        if replaced:
            steps.append(f"`pip uninstall -y {' '.join(replaced)}`: PyPI's placeholders, which have no code.")
        return (*steps, f"Install {', '.join(replaced + missing)} from AWS's own index ({_INDEX}).")


def inspect_installation() -> Installation:
    """Look at the Neuron stack; what is missing is reported and not raised."""
    packages = tuple(_package(module, name) for module, name in versions.PACKAGES.items())
    library = next(package for package in packages if package.module == "nkilib")
    adapter = CheckedAdapter()
    kernels = []
    for need, (name, _) in FUNCTIONS.items():
        match = adapter.match(need) if library.state == OK else Match(name, None, reason=f"nkilib is {library.state}")
        generation = match.generation.name if match.generation else None
        note = BF16_OPEN if need in ("moe_forward", "moe_backward") else ""
        kernels.append(Kernel(need, match.function, generation, match.reason, note))
    try:
        devices = device_count()
    except (RuntimeError, OSError):  # what the runtime raises where the driver is missing
        devices = 0
    return Installation(
        reason=_said(versions.why_unavailable),
        simulator_reason=_said(lambda: versions.why_unavailable(simulator=True)),
        sdk=_said(versions.sdk_generation),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        others={"hf-neuron-moe": __version__, **{name: _version(name) for name in _DATA["others"]}},
        packages=packages,
        target=_detected(versions.platform),
        lnc=_detected(versions.agreed_cores),
        devices=devices,
        environment={name: os.environ[name] for name in (*ENVIRONMENT, *OWN) if name in os.environ},
        kernels=tuple(kernels),
        torch_reason=_torch_reason(),
        wrong_variables=tuple(wrong_values().values()),
        gpus=inspect_gpus(),
    )


class CheckedAdapter(Adapter):
    """An adapter for a diagnosis: what a broken nkilib raises while it is looked at becomes the reason."""

    def match(self, need: str) -> Match:
        """Return the match, or none with what was raised."""
        try:
            return super().match(need)
        except _FAILURES as error:
            return Match(FUNCTIONS[need][0], None, reason=f"nkilib fails: {type(error).__name__}: {error}")


def device_count() -> int | None:
    """Return how many logical cores ``torch.neuron`` offers; None where the plugin is not loaded."""
    neuron = getattr(sys.modules.get("torch"), "neuron", None)
    if neuron is None:
        return None
    return int(neuron.device_count()) if neuron.is_available() else 0


def _said(ask: Callable[[], str | None]) -> str | None:
    """The answer, or the error in its place: a diagnosis goes on."""
    try:
        return ask()
    except (NeuronMoEError, *_FAILURES) as error:
        return str(error)


def _detected(ask: Callable[[], versions.Detected]) -> tuple[str | None, str]:
    try:
        found = ask()
        return found.name, found.described
    except (NeuronMoEError, *_FAILURES) as error:
        return None, str(error)


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
        if module == "nkilib" and reason is None:
            return Package(name, module, None, OK, "nkilib comes with neuronx-cc; PyPI's nki-library adds nothing")
        note = "PyPI's package of this name has no code; the real one comes from AWS's own index"
        return Package(name, module, version, PLACEHOLDER, note)
    if reason is not None:
        state = MISSING if version is None and "not installed" in reason else BROKEN
        return Package(name, module, version, state, reason)
    return Package(name, module, version, OK, (versions.pairing() or "") if module == "torch_neuronx" else "")


def _torch_reason() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return next((why for name, why in wrong_values().items() if name in VALUES), None)


def _is_placeholder(distribution: str) -> bool:
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    metadata_text = f"{metadata.get_payload()} {metadata.get('Description', '')}"  # type: ignore[attr-defined]
    return any(mark in metadata_text for mark in _DATA["placeholder_marks"])

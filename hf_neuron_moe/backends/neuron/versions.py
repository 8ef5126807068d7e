"""What of the Neuron stack is installed, which device it targets, and why it cannot be used.

Sources: Neuron SDK 2.33 release notes (native torch-neuronx 2.13.3 and 2.14.3, nki 0.7, Python 3.12 to 3.14), NKI
simulator guide for the platform override.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

from hf_neuron_moe.errors import BackendUnavailableError, ConfigError, public

MINIMUM_NKI = (0, 7, 0)
MINIMUM_TORCH_NEURONX = (2, 13, 3)
MINIMUM_PYTHON = (3, 12)
PACKAGES = {"nki": "nki", "nkilib": "nki-library", "torch_neuronx": "torch-neuronx", "neuronxcc": "neuronx-cc"}
"""Distribution that provides each module; nkilib also comes bundled with neuronx-cc."""
PLATFORMS = ("trn2", "trn3")
_GENERATIONS = {"gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}
ASSUMED = "assumed, as NKI does where it sees no device"
LNC_OVERRIDE = "HF_NEURON_MOE_LNC"  # this package's own variable: physical cores per logical core
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"  # the same for runtime, compiler and kernels
_LNC_REMEDIES = {
    "torch_neuronx": f"Set {LNC_VARIABLE} to 1 or 2 before Python starts.",
    "NEURON_CC_FLAGS": "Correct --lnc or --logical-nc-config in NEURON_CC_FLAGS, or leave it out there.",
}
_PLATFORM_OVERRIDE = "NEURON_PLATFORM_TARGET_OVERRIDE"
_SDK_OF_NKI = {(0, 2): "2.28", (0, 3): "2.29", (0, 4): "2.30", (0, 5): "2.31", (0, 6): "2.32", (0, 7): "2.33"}
_PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2 the instance type: trn2.48xlarge


@public
def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: ``(0, 7, 0)`` for ``"0.7.0b1"``, which beta containers of 2.33 ship."""
    found = re.match(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    if found is None:
        expected, fix = "a version such as 0.7.0b1", "Pass the version as the package states it."
        raise ConfigError.about("version", expected, repr(version), fix)
    return tuple(int(number) for number in found[1].split("."))


def installed_version(module: str) -> str | None:
    """Return the version of the module that would be imported; None where none is stated."""
    loaded = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    return _of_distribution(PACKAGES[module])


def _of_distribution(name: str) -> str | None:
    from importlib import metadata  # costs --help time, which needs none of it

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def sdk_generation() -> str | None:
    """Return the SDK that the installed nki belongs to (``"2.33"``); None where nki's version is not known."""
    version = installed_version("nki")
    if version is None:
        return None
    numbers = (*release(version), 0)[:2]
    known = _SDK_OF_NKI.get((numbers[0], numbers[1]))
    return known if known is not None or numbers < MINIMUM_NKI[:2] else "later than 2.33"


@dataclass(frozen=True)
class Toolchain:
    """The imported modules."""

    nki: ModuleType  # the kernel language
    nkilib: ModuleType  # the kernel library
    torch_neuronx: ModuleType | None  # the device's plugin; None for the simulator, which works without


def import_reason(module: str) -> str | None:
    """Return why `module` cannot be imported, or None; importing it is the check."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name != module:
            return f"{module} fails to import: {error}"
        package, version = PACKAGES[module], installed_version(module)
        if version is None:
            return f"{package} is not installed"
        return f"{package} {version} is installed and has no module {module}, as PyPI's placeholders have none"
    except (OSError, RuntimeError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        # Missing drivers, mixed versions, wheels of a later Python.
        return f"{module} fails to import: {type(error).__name__}: {error}"
    return None


def why_unavailable(*, simulator: bool = False) -> str | None:
    """Return why the backend (or its simulator variant) cannot run here, or None."""
    needed = ("nki", "nkilib") if simulator else ("nki", "nkilib", "torch_neuronx")
    missing = [reason for reason in map(import_reason, needed) if reason is not None]
    if missing:
        python = f"; its wheels need Python 3.12 or later, this is {sys.version_info.major}.{sys.version_info.minor}"
        return "; ".join(missing) + (python if sys.version_info < MINIMUM_PYTHON else "")
    if os.environ.get("NKI_COMPILER_FRONTEND") == "custom":
        return "NKI_COMPILER_FRONTEND is custom, whose compiler passes do not take this package's kernels: unset it"
    if not hasattr(sys.modules["nki"], "jit"):
        return "the installed nki is PyPI's placeholder: it has no nki.jit"
    if simulator and not hasattr(sys.modules["nki"], "simulate"):
        return "the installed nki has no nki.simulate"
    from hf_neuron_moe.backends.operator_registration import plugin_function  # imports torch, this module does not

    native = simulator or any(plugin_function(name) is not None for name in ("nki_op", "wrap_nki"))
    if not native and installed_version("torch_neuronx") is None:
        return "the installed torch_neuronx has neither nki_op nor wrap_nki: it is not the native package"
    for module, minimum in (("nki", MINIMUM_NKI), ("torch_neuronx", MINIMUM_TORCH_NEURONX)):
        version = installed_version(module) if module in needed else None
        if version is not None and (*release(version), 0, 0)[: len(minimum)] < minimum:  # 0.7 is 0.7.0
            return f"{PACKAGES[module]} {version} is older than {'.'.join(map(str, minimum))} (native, SDK 2.33)"
    return None if simulator or platform().name in PLATFORMS else f"{platform().name} is neither Trn2 nor Trn3"


def pairing() -> str | None:
    """Return why AWS does not name the installed torch-neuronx and torch as a pair, or None; told, not refused."""
    plugin = installed_version("torch_neuronx")
    torch = _of_distribution("torch")
    if plugin is None or torch is None or release(plugin)[:2] == release(torch)[:2]:
        return None
    wanted = ".".join(map(str, release(plugin)[:2]))
    return f"torch-neuronx {plugin} is documented with torch {wanted}, and torch is {torch}: install a matching pair"


@public("resolve_backend")
def toolchain(*, simulator: bool = False) -> Toolchain:
    """Import and return the Neuron stack, with :func:`settle_environment` before."""
    settle_environment()
    if (reason := why_unavailable(simulator=simulator)) is not None:
        got = f"{'nki-sim' if simulator else 'neuron'!r}: {reason}"
        fix = (
            "Install torch-neuronx, nki and neuronx-cc of SDK 2.33 or later from AWS's own Neuron package index. "
            "Use backend='torch' elsewhere: it computes the same contract on any device."
        )
        raise BackendUnavailableError.about("backend", "one that can run here", got, fix)
    settle_environment()  # the plugin that was imported may know better
    plugin = None if simulator else sys.modules["torch_neuronx"]
    return Toolchain(sys.modules["nki"], sys.modules["nkilib"], plugin)


@dataclass(frozen=True)
class Detected:
    """A property of the device, where it is known from, and who says otherwise."""

    name: str
    source: str
    contradiction: str = ""

    @property
    def described(self) -> str:
        """The source and the contradiction."""
        return f"{self.source}; {self.contradiction}" if self.contradiction else self.source


@public("neuron backend")
def platform() -> Detected:
    """Return ``"trn1"``, ``"trn2"`` or ``"trn3"``; without any sign of a device NKI's own default, trn3."""
    override = os.environ.get(_PLATFORM_OVERRIDE, "").strip().lower()
    if override:
        name = _GENERATIONS.get(override, override)
        if name not in _GENERATIONS.values():
            expected, fix = "one of trn1, trn2, trn3, gen2, gen3, gen4", "Correct or unset the environment variable."
            raise ConfigError.about(_PLATFORM_OVERRIDE, expected, repr(override), fix)
        return Detected(name, _PLATFORM_OVERRIDE)
    ask = _runtime_function("get_platform_target")
    if ask is not None:
        return Detected(_platform_name(ask()), "torch_neuronx")
    signs = {"NEURON_CC_FLAGS": _compiler_flag("--target"), "the machine's product name": _product_name()}
    found = {source: _platform_name(sign or "") for source, sign in signs.items()}
    known = (Detected(name, source) for source, name in found.items() if name in _GENERATIONS.values())
    return next(known, Detected("trn3", ASSUMED))


def platforms_asked_for() -> dict[str, str]:
    """Return the platform that each environment variable names, for those that name one."""
    target = _compiler_flag("--target")
    asked = {_PLATFORM_OVERRIDE: platform().name} if os.environ.get(_PLATFORM_OVERRIDE, "").strip() else {}
    return asked | ({"NEURON_CC_FLAGS": _platform_name(target)} if target else {})


def _platform_name(found: object) -> str:
    """``"trn2"`` for "Trn2", "trn2n.48xlarge", "gen3" and an enum's member of such a name; others as they are."""
    text = str(getattr(found, "name", found)).strip().lower()
    name = _GENERATIONS.get(text[:4], text[:4])
    return name if name in _GENERATIONS.values() else text


@public("neuron backend")
def _compiler_flag(*names: str) -> str | None:
    """The last value of a flag in ``NEURON_CC_FLAGS``, in either spelling; None where it is not there."""
    text, found = os.environ.get("NEURON_CC_FLAGS", ""), None
    try:
        flags = shlex.split(text)
    except ValueError as error:
        expected, fix = "flags as a shell would take them", "Close its quotation marks."
        raise ConfigError.about("NEURON_CC_FLAGS", expected, f"{text!r} ({error})", fix) from None
    for flag, following in zip(flags, [*flags[1:], ""]):
        name, equals, value = flag.partition("=")
        if name in names:
            found = value if equals else following
    return found


@functools.cache
def _product_name() -> str:
    try:
        return _PRODUCT_NAME.read_text(encoding="ascii", errors="replace").strip().lower()
    except OSError:
        return ""


@public("neuron backend")
def logical_cores() -> Detected:
    """Return how many physical cores form a logical one (LNC), ``"1"`` or ``"2"``; the first source decides."""
    ask = _runtime_function("get_logical_neuron_cores")
    said = {
        LNC_OVERRIDE: os.environ.get(LNC_OVERRIDE),
        "torch_neuronx": None if ask is None else str(ask()),
        LNC_VARIABLE: os.environ.get(LNC_VARIABLE),
        "NEURON_CC_FLAGS": _compiler_flag("--lnc", "--logical-nc-config"),
    }
    known = [(source, value.strip()) for source, value in said.items() if value and value.strip()]
    if not known:
        return Detected("2", "the default of Trn2 and Trn3")
    source, value = known[0]
    if value not in ("1", "2"):
        fix = _LNC_REMEDIES.get(source, f"Set {source} to 1 or 2, or unset it.")
        raise ConfigError.about(f"LNC ({source})", "1 or 2", repr(value), fix)
    others = ", ".join(f"{other} says {theirs}" for other, theirs in known if theirs != value)
    return Detected(value, source, others and f"but {others}: make them agree")


@public("neuron backend")
def agreed_cores() -> Detected:
    """Return :func:`logical_cores`; ConfigError where its sources contradict each other."""
    cores = logical_cores()
    if cores.contradiction:
        got = f"{cores.name} by {cores.source}, {cores.contradiction.partition(':')[0]}"
        fix = f"Set {LNC_VARIABLE} alone and before Python starts, and unset the others."
        raise ConfigError.about("LNC", "the same wherever it is set", got, fix)
    return cores


def lnc() -> int:
    """Return :func:`agreed_cores` as a number."""
    return int(agreed_cores().name)


@public("neuron backend")
def settle_environment() -> None:
    """Set what is unset of the variables that the stack needs, before its runtime starts; nothing without nki.

    Without NEURON_LOGICAL_NC_CONFIG kernels take LNC 1 and neuronx-cc 2, says AWS's page on NCC_EVRF066. The other one
    is documented for transformers' loader beside this device.
    """
    if not sys.modules.get("nki") and importlib.util.find_spec("nki") is None:
        return
    number, plugin = str(lnc()), sys.modules.get("torch_neuronx")
    started = number if plugin is None else _started.setdefault(plugin, number)
    if started != number:
        expected = f"{started}, with which the runtime runs already"
        raise ConfigError.about(f"LNC ({LNC_VARIABLE})", expected, number, "Set it before Python starts.")
    os.environ.setdefault(LNC_VARIABLE, number)
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")


_started: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()  # LNC when the plugin was used first


def _runtime_function(name: str) -> Callable[[], object] | None:
    """Return a function of ``torch_neuronx.utils`` if the plugin is loaded and has it, else None."""
    if "torch_neuronx" not in sys.modules:
        return None
    try:
        utils = importlib.import_module("torch_neuronx.utils")
    except ImportError:
        return None
    return getattr(utils, name, None)

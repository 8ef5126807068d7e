"""What to do first on a machine whose Neuron kernels cannot run, or can; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_neuron_moe.backends.neuron.versions import ASSUMED

if TYPE_CHECKING:
    from hf_neuron_moe.device.installed import Installation, Package

OK, MISSING, PLACEHOLDER, BROKEN = "ok", "missing", "placeholder", "broken"
"""States of a package."""

COMPILER = "neuronxcc"
"""Module of the compiler's package."""

_SYSTEM = "Linux x86_64"
_OLDEST_PYTHON = (3, 12)
_INSTALLATION = "docs/neuron.md, Installation"


def why_not_running(found: Installation) -> str | None:
    """Return why no Neuron kernel can run on a machine, or None."""
    if found.reason is not None:
        return found.reason
    compiler = next(package for package in found.packages if package.module == COMPILER)
    if compiler.state != OK:
        return f"{compiler.name} is {compiler.state}, and it compiles the kernels"
    if found.devices is None:
        return "there is no runtime: torch has no torch.neuron, which torch-neuronx registers"
    if found.devices == 0:
        return "the packages are here, and the runtime offers no logical core"
    if found.target[0] is None or found.lnc[0] is None:
        return found.target[1] if found.target[0] is None else found.lnc[1]
    if all(kernel.generation is None for kernel in found.kernels):
        return "none of the kernels can be called: " + found.kernels[0].reason
    return None


def first_steps(found: Installation) -> tuple[str, ...]:
    """Return what to do, the first thing first; later ones are told as far as they are known already."""
    if why_not_running(found) is None:
        return ("`hf-neuron-moe verify-device MODEL_DIR --layers 1` compares a block with PyTorch.",)
    if found.others.get("torch") is None:
        return (f"Install this package with what it needs, torch and transformers: {_INSTALLATION}.",)
    if found.machine != _SYSTEM:
        return (f"Go to a Trn2 or Trn3 instance: AWS's packages are for {_SYSTEM}, and this is {found.machine}.",)
    replaced, missing, broken = (_names(found, state) for state in (PLACEHOLDER, MISSING, BROKEN))
    steps = _machine_steps(found) if replaced or missing else []
    if replaced:
        steps.append(f"`pip uninstall -y {' '.join(replaced)}`: PyPI's placeholders, which have no code.")
    if replaced or missing:
        steps.append(f"Install {', '.join(replaced + missing)} from AWS's own index ({_INSTALLATION}).")
    elif broken:
        steps.append(
            f"Install {', '.join(broken)} again, all of one SDK release, and torch-neuronx of torch's minor version "
            f"({_INSTALLATION}); the table below says what each raised when it was imported."
        )
    return tuple(steps) or (_other_step(found),)


def _machine_steps(found: Installation) -> list[str]:
    """What comes before packages: a chip, and a Python that AWS has wheels for."""
    steps = []
    if found.target[0] is None or found.target[1] == ASSUMED:
        steps.append("Go to a Trn2 or Trn3 instance: none was recognized here.")
    if tuple(int(part) for part in found.python.split(".")[:2]) < _OLDEST_PYTHON:
        steps.append(f"Make an environment of Python 3.12 or 3.13: AWS has no wheels for {found.python}.")
    return steps


def _other_step(found: Installation) -> str:
    """Every package can be imported."""
    if found.reason is not None:
        return f"Make an environment with the packages of SDK 2.33 from AWS's own index ({_INSTALLATION})."
    if found.devices is None:
        return (
            f"Unset TORCH_DEVICE_BACKEND_AUTOLOAD, or install the native torch-neuronx of SDK 2.33 ({_INSTALLATION})."
        )
    if found.devices == 0:
        return "Run `neuron-ls`: it shows driver and cores. Another process may hold them, or the driver is missing."
    if found.target[0] is None or found.lnc[0] is None:
        return "Correct or unset that variable."
    return f"Install the nki-library of SDK 2.33, or unset NKILIB_FORCE_BUNDLED_LIBRARY ({_INSTALLATION})."


def _names(found: Installation, state: str) -> list[str]:
    return [package.name for package in found.packages if package.state == state and _needed(package, found)]


def _needed(package: Package, found: Installation) -> bool:
    """nkilib also comes with the compiler: where that is still to be installed, it is no step of its own."""
    if package.module != "nkilib" or package.state != MISSING:
        return True
    return all(other.state == OK for other in found.packages if other.module == COMPILER)

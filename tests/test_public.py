"""The public names and their signatures are those of public.json: nothing is lost or renamed by accident.

After an addition:

    python -m pytest tests/test_public.py --update-messages
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SNAPSHOT = Path(__file__).with_name("public.json")
PACKAGES = ("", ".kernels", ".kernels.release_2_30", ".formats", ".convert", ".training", ".patching", ".quantizers")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def foreign_bases(value: Any) -> Iterator[Any]:
    """Yield the dataclasses of other packages that a class extends: their fields go with the release."""
    for base in getattr(value, "__mro__", ()):
        if dataclasses.is_dataclass(base) and not base.__module__.startswith("hf_neuron_moe"):
            yield base


def described(value: Any) -> str:
    """Return an enum's members, a callable's parameters with their defaults, or the type of anything else."""
    if isinstance(value, enum.EnumMeta):
        return ", ".join(f"{member.name}={member.value!r}" for member in value)
    if not callable(value):
        return type(value).__name__
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "no signature"
    inherited = {field.name for base in foreign_bases(value) for field in dataclasses.fields(base)}
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in signature.parameters.items()
        if name not in inherited
    ]
    plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return ADDRESS.sub("", str(plain))


def methods_of(kind: type) -> dict[str, str]:
    """Return the description of a class's public methods and properties, those that the package itself defines."""
    found = {}
    for owner in reversed(kind.__mro__):
        if not owner.__module__.startswith("hf_neuron_moe"):
            continue
        for name, value in vars(owner).items():
            if isinstance(value, property):
                found[name] = "property"
            elif not name.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
            ):
                found[name] = described(getattr(kind, name))
    return {f"{kind.__name__}.{name}": text for name, text in sorted(found.items()) if not name.startswith("_")}


def surface() -> dict[str, dict[str, str]]:
    """Return the description of every public name by package."""
    found = {}
    for name in PACKAGES:
        package = importlib.import_module(f"hf_neuron_moe{name}")
        members = {each: getattr(package, each) for each in sorted(package.__all__)}
        found[package.__name__] = {each: described(value) for each, value in members.items()}
        for value in members.values():
            found[package.__name__] |= methods_of(value) if inspect.isclass(value) else {}
    return found


def test_public_names_and_signatures(request: pytest.FixtureRequest) -> None:
    found = surface()
    if request.config.getoption("--update-messages"):
        SNAPSHOT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    known = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    for package, names in known.items():
        assert found[package] == names, package
    assert found.keys() == known.keys()


def test_methods_are_seen() -> None:
    config = methods_of(importlib.import_module("hf_neuron_moe").NeuronMoEConfig)
    assert config["NeuronMoEConfig.from_dict"].startswith("(") and "NeuronMoEConfig.to_dict" in config
    assert methods_of(dict) == {}, "of the package's own classes only"


@pytest.mark.parametrize("name", ["kernels", "formats"])
def test_type_checkers_see_every_name(name: str, repo_root: Path) -> None:
    """mypy's strict mode takes an import for public if it is listed in a literal ``__all__`` or repeats its name."""
    tree = ast.parse((repo_root / "hf_neuron_moe" / name / "__init__.py").read_text(encoding="utf-8"))
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    repeated = {alias.name for alias in imports if alias.asname == alias.name}
    assert repeated == set(importlib.import_module(f"hf_neuron_moe.{name}").__all__)

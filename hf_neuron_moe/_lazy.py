"""Names of a package that are loaded when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, modules: Mapping[str, tuple[str, ...]]) -> tuple[list[str], Callable[[str], Any]]:
    """Return a package's lazy names, sorted, and its ``__getattr__``; `modules` has the names of each module."""
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(module_of), load

"""Registers the quantization method with transformers without importing it.

If transformers' quantizers are not loaded yet, a finder waits for them, so that ``import hf_neuron_moe`` costs neither
transformers nor torch. It takes itself out afterwards, and the module gets its own loader back.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY_MODULE = "transformers.quantizers.auto"


def install() -> None:
    """Register now if transformers' quantizers are loaded, else as soon as they are. Calling it again does nothing."""
    if REGISTRY_MODULE in sys.modules:
        register(importlib.import_module(REGISTRY_MODULE))  # waits for another thread that is still importing it
    else:
        _wait()


def _wait() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register(registry: ModuleType) -> None:
    """Add the quantizer and its configuration to transformers' tables, where they are not yet."""
    from hf_neuron_moe.config import QUANT_METHOD
    from hf_neuron_moe.quantizers.quantization_config import NeuronMoEQuantizationConfig
    from hf_neuron_moe.quantizers.quantizer import NeuronMoEQuantizer

    if QUANT_METHOD not in registry.AUTO_QUANTIZATION_CONFIG_MAPPING:
        registry.register_quantization_config(QUANT_METHOD)(NeuronMoEQuantizationConfig)
    if QUANT_METHOD not in registry.AUTO_QUANTIZER_MAPPING:
        registry.register_quantizer(QUANT_METHOD)(NeuronMoEQuantizer)


class _Finder(MetaPathFinder):
    """Finds the registry module as the other finders would, with a loader that registers afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY_MODULE:
            return None
        if self in sys.meta_path:  # else another thread has just been here
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads a module with its own loader and then registers the method."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            _wait()  # a later import that succeeds must still find the method
            raise
        register(module)

"""Where nkilib keeps the functions, enums and records that the kernels use; its modules move between releases.

Sources: nki-library 2.29 to 2.33.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from itertools import chain
from types import ModuleType
from typing import Any

from hf_neuron_moe.errors import BackendUnavailableError, public

_CORE, _EXPERIMENTAL = "nkilib.core", "nkilib.experimental"
_MLP = f"{_EXPERIMENTAL}.mlp_mxfp8"
_MOE_CTE = (f"{_CORE}.moe.moe_cte", f"{_CORE}.moe.moe_cte.moe_cte")
_MXFP8 = f"{_EXPERIMENTAL}.moe_mxfp8"
_BACKWARD = (f"{_EXPERIMENTAL}.moe.bwd.moe_bwd_parameters", f"{_EXPERIMENTAL}.moe.bwd", _MXFP8)
_PARAMETERS = ("AffinityOption", "ShardOption", "BackwardSkipMode", "BackwardActFnType", "ClampLimits")
_DESCRIPTORS = (f"{_EXPERIMENTAL}.mxfp_utils.mxfp8_utils.common_dataclasses",)

MODULES: dict[str, tuple[str, ...]] = {
    "mlp_forward_mxfp8_nki": (f"{_MLP}.mlp_fwd_mxfp8", f"{_MLP}.mlp_fwd_mxfp8.mlp_fwd_mxfp8_kernel", _MLP),
    "mlp_backward_mxfp8_nki": (f"{_MLP}.mlp_bwd_mxfp8", f"{_MLP}.mlp_bwd_mxfp8.mlp_bwd_mxfp8_kernel", _MLP),
    **dict.fromkeys(("moe_cte", "MoECTESpec", "MoECTEImplementation", "ShardOnIConfig"), _MOE_CTE),
    "bwmm_shard_on_block_mx": (f"{_CORE}.moe.moe_cte.bwmm_shard_on_block_mx", *_MOE_CTE),
    "blockwise_mm_shard_intermediate_mx": (f"{_CORE}.moe.moe_cte.bwmm_shard_on_I_mx", *_MOE_CTE),
    **dict.fromkeys(("ExpertAffinityScaleMode", "ActFnType"), (f"{_CORE}.utils.common_types",)),
    "blockwise_mm_bwd": (f"{_EXPERIMENTAL}.moe.bwd.blockwise_mm_backward", f"{_EXPERIMENTAL}.moe.bwd"),
    **dict.fromkeys(_PARAMETERS, _BACKWARD),
    "blockwise_mm_fwd_mxfp8": (f"{_MXFP8}.fwd.blockwise_mm_forward_mxfp8", _MXFP8),
    "blockwise_mm_bwd_mxfp8": (f"{_MXFP8}.bwd.blockwise_mm_backward_mxfp8", _MXFP8),
    "MXFP8MOEFwdConfig": (f"{_MXFP8}.fwd.config", f"{_MXFP8}.fwd.moe_fwd_mxfp8_config", _MXFP8),
    "MXFP8MOEBwdConfig": (f"{_MXFP8}.bwd.config", _MXFP8),
    "MXFP8MOECheckpointConfig": (f"{_MXFP8}.moe_mxfp8_checkpoint_config", f"{_MXFP8}.fwd.config", _MXFP8),
    **dict.fromkeys(("TensorDescriptor", "TensorOrientation", "SwizzleMode"), _DESCRIPTORS),
}
"""Modules to look in, in order, by the name used here."""


def shown_name(name: str) -> str:
    """Return nkilib's own name of an object in :data:`MODULES`; those of the backward have the forward's names."""
    return name.removeprefix("Backward")


def find_object(name: str) -> Any | None:
    """Return an object of nkilib by its name in :data:`MODULES`; None where the installed release does not have it.

    If it is in none of its known modules, the modules beside the first one are searched.
    """
    package = ".".join(MODULES[name][0].split(".")[:3])
    for module in chain(MODULES[name], _modules_in(package)):
        found = getattr(_imported(module), shown_name(name), None)
        if found is not None and not isinstance(found, ModuleType):  # several modules have their function's name
            return found
    return None


def _imported(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _modules_in(package: str) -> Iterator[str]:
    """Yield the name of a package and of all modules in it, importing packages only; none where there is none."""
    found = _imported(package)
    if found is not None:
        path = getattr(found, "__path__", ())
        inner = [each.name for each in pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None)]
        yield from sorted({package, *inner, *(name for name in sys.modules if name.startswith(f"{package}."))})


@public("neuron backend")
def nkilib_object(name: str) -> Any:
    """Return an object of nkilib by its name in :data:`MODULES`."""
    found = find_object(name)
    if found is None:
        expected = f"a release with {shown_name(name)} in {' or '.join(MODULES[name])}"
        fix = "Install the nki-library of SDK 2.33, or unset NKILIB_FORCE_BUNDLED_LIBRARY."
        raise BackendUnavailableError.about("nkilib", expected, "one without", fix)
    return found

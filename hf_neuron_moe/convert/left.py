"""What a conversion leaves in its source form: modules that look like MLPs or experts and that no kernel computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hf_neuron_moe.convert.manifest import LeftModule
from hf_neuron_moe.errors import ConversionError, pattern_of, printable, public, spelled_together

Left = Mapping[str, LeftModule]


def left_facts(left: Left | None) -> dict[str, Any] | None:
    """What ``--json`` prints: modules by name, and their tensors and bytes together; None where it is not known."""
    if left is None:
        return None
    return {
        "modules": {name: asdict(module) for name, module in left.items()},
        "tensors": sum(module.tensors for module in left.values()),
        "bytes": sum(module.nbytes for module in left.values()),
    }


def left_notes(left: Left | None) -> list[str]:
    """One sentence for each kind of module and reason; none where nothing is left."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, module in (left or {}).items():
        kinds.setdefault((pattern_of(name), module.reason), []).append(name)
    return [
        printable(
            f"{len(names)} {'modules' if len(names) > 1 else 'module'} left in source form "
            f"({sum(left[name].tensors for name in names):,} tensors, "
            f"{sum(left[name].nbytes for name in names):,} bytes): {spelled_together(names)}: {reason}"
        )
        for (_, reason), names in kinds.items()
        if left is not None
    ]


@public("convert")
def check_nothing_left(left: Left) -> None:
    """Refuse a conversion that would leave modules in their source form, for ``strict``."""
    if not left:
        return
    raise ConversionError.about(
        "every MLP and experts module",
        "one that the kernels can compute, with strict",
        "; ".join(left_notes(left)),
        "Leave --strict out to copy what these modules hold as it is.",
    )

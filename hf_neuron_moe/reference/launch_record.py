"""What a kernel call would have been launched with on the device: checked and recorded, without effect on values::

with record_launches() as launches:
    mlp_forward_mxfp8_nki(hidden, gate_up, down, scratch, gate_up_tiles_n=2)
launches[0].options["gate_up_tiles_n"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError

FP8_X4_DTYPES = (torch.float8_e4m3fn, "float8_e4m3fn_x4", "float8_e4m3fn")
"""What ``fp8_x4_dtype`` may say. Upstream ignores the argument; any other type would promise another arithmetic."""


@dataclass(frozen=True)
class KernelLaunch:
    """One call: the kernel's name and its options that have no effect on values."""

    kernel: str
    options: dict[str, object] = field(default_factory=dict)


_launches: ContextVar[list[KernelLaunch] | None] = ContextVar("launches", default=None)


@contextmanager
def record_launches() -> Iterator[list[KernelLaunch]]:
    """Collect the launches of the calls in the block; an inner block takes its calls from the outer one."""
    launches: list[KernelLaunch] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


def note_launch(kernel: str, options: Mapping[str, object]) -> None:
    """Add one launch to the innermost open :func:`record_launches`, if there is one."""
    launches = _launches.get()
    if launches is not None:
        launches.append(KernelLaunch(kernel, dict(options)))


def check_positive_int(argument: str, value: object) -> None:
    """Raise ConfigError for anything that is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError.about(argument, "a positive integer", repr(value), "Tile counts and sizes count whole tiles.")


def _check_fp8_x4_dtype(argument: str, value: object) -> None:
    if value not in FP8_X4_DTYPES:
        expected = "float8_e4m3fn_x4 (upstream ignores this argument: every operand is e4m3)"
        raise ConfigError.about(argument, expected, repr(value), "Leave the default; the kernel has no e5m2 path.")


SCHEDULING: dict[str, Callable[[str, object], None] | None] = {
    "tiles": check_positive_int,  # every argument with "tiles" in its name
    "fp8_x4_dtype": _check_fp8_x4_dtype,
    **dict.fromkeys(
        ("run_with_lnc2", "spill_reload", "use_scale_packing"), lambda name, flag: check_flags({name: flag})
    ),
    # Checked where the sizes are known.
    **dict.fromkeys(("config", "gate_config", "up_config", "matmul_config", "s_base_offset")),
}
"""Options that say how the device does its work, each with its check. None of them changes a value here."""


def scheduling(call: Mapping[str, object]) -> dict[str, object]:
    """Return the options of `call`, arguments by name, that :data:`SCHEDULING` lists, each checked."""
    kinds = {name: "tiles" if "tiles" in name.lower() else name for name in call}
    found = {name: call[name] for name, kind in kinds.items() if kind in SCHEDULING}
    for name, value in found.items():
        if check := SCHEDULING[kinds[name]]:
            check(name, value)
    return found

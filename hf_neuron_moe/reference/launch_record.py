"""What a kernel call would have been launched with on the device: checked and recorded, without effect on values::

with record_launches() as launches:
    mlp_forward_mxfp8_nki(hidden, gate_up, down, scratch, gate_up_tiles_n=2)
launches[0].options["gate_up_tiles_n"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from hf_neuron_moe.checks import check_flags
from hf_neuron_moe.errors import ConfigError

_SWITCHES = ("run_with_lnc2", "spill_reload", "use_scale_packing")
_FP8_X4_DTYPES = (torch.float8_e4m3fn, "float8_e4m3fn_x4", "float8_e4m3fn")  # another would promise other arithmetic
_NAMES = ("fp8_x4_dtype", "config", "gate_config", "up_config", "matmul_config", "s_base_offset")


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


def scheduling(call: Mapping[str, object]) -> dict[str, object]:
    """Return the options of `call`, arguments by name, that say how the device does its work, each checked.

    None of them changes a value here. They are tile counts (every argument with "tiles" in its name), switches, the
    name of the fp8 type, and configurations. These are checked where the sizes are known.
    """
    found = {}
    for name, value in call.items():
        if "tiles" in name.lower():
            check_positive_int(name, value)
        elif name in _SWITCHES:
            check_flags({name: value})
        elif name == "fp8_x4_dtype" and value not in _FP8_X4_DTYPES:
            expected = "float8_e4m3fn_x4 (upstream ignores this argument: every operand is e4m3)"
            raise ConfigError.about(name, expected, repr(value), "Leave the default; the kernel has no e5m2 path.")
        elif name not in _NAMES:
            continue
        found[name] = value
    return found

"""How gate and up projections of a block become its intermediate: a record of numbers, and its text.

A block computes ``h = min(f(clip(g)), act_max) * p(clip(u) + up_offset)``: `g` and `u` are the projections with their
biases, ``f`` is the activation. Without a gate it computes ``h = f(u)``. Source of the rows: the families' own code in
transformers; the mapping to kernel arguments is in ``backends/neuron``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from hf_neuron_moe.errors import ConfigError


class Gate(NamedTuple):
    """The default is a SwiGLU: ``silu(g) * u``. None is an absent limit."""

    act: str = "silu"  # a row of ``backends/torch/gating.py``
    alpha: float = 1.0  # factor inside Swish: ``g s(alpha g)``, s the logistic function; other activations have none
    gate_max: float | None = None  # limits on g
    gate_min: float | None = None
    up_max: float | None = None  # limits on u, before the offset is added
    up_min: float | None = None
    act_max: float | None = None  # upper limit on the activation's value
    up_offset: float = 0.0
    gate_softcap: float | None = None  # c of ``c tanh(g / c) s(g)``, in the place of ``g s(g)``
    up_softcap: float | None = None  # c of ``c tanh(u / c)``
    gated: bool = True  # False: there is no gate projection, ``h = f(u)``

    @property
    def clamped(self) -> bool:
        """Whether any value has a limit beyond which its gradient is zero."""
        limits = (self.gate_max, self.gate_min, self.up_max, self.up_min, self.act_max)
        return any(limit is not None for limit in limits)

    @property
    def halves(self) -> int:
        """How many projections read the input: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def reads_up_as_it_is(self) -> bool:
        """Whether the intermediate is the gate's activation times up's plain product."""
        up = (self.up_max, self.up_min, self.up_softcap)
        return self.gated and not self.up_offset and up == (None, None, None)

    @property
    def title(self) -> str:
        """Return the gate as a message names it."""
        name = self.act + (f" with alpha {self.alpha:g}" if self.act == "swish" else "")
        words = {
            "clamped": self.clamped,
            f"up + {self.up_offset:g}": self.up_offset != 0,
            "softcapped": self.gate_softcap is not None or self.up_softcap is not None,
            "without gate projection": not self.gated,
        }
        return ", ".join([name, *(word for word, present in words.items() if present)])

    @property
    def short(self) -> str:
        """Return the gate as a table shows it: ``silu``, or ``swish(1.702, limit 7, up + 1)``."""
        limits = {self.gate_max if self.act_max is None else self.act_max, self.up_max, self.up_min and -self.up_min}
        one, after = len(limits) == 1 and self.gate_min is None, "" if self.act_max is None else " afterwards"
        words = {
            f"{self.alpha:g}": self.act == "swish",
            f"limit {self.up_max or 0:g}{after}" if one else "limits": self.clamped,
            f"up + {self.up_offset:g}": self.up_offset != 0,
            f"softcap {self.gate_softcap or 0:g}": self.gate_softcap is not None,
            f"up softcap {self.up_softcap or 0:g}": self.up_softcap is not None,
            "no gate": not self.gated,
        }
        shown = ", ".join(word for word, present in words.items() if present)
        return f"{self.act}({shown})" if shown else self.act

    @property
    def text(self) -> str:
        """Return the gate as one string without ``|``; :meth:`parse` is the inverse."""
        defaults = Gate._field_defaults
        changed = [f"{name}={getattr(self, name)!r}" for name in defaults if getattr(self, name) != defaults[name]]
        return ";".join([self.act, *(part for part in changed if not part.startswith("act="))])

    @staticmethod
    @functools.cache
    def parse(text: str) -> Gate:
        """Read what :attr:`text` wrote."""
        return checked_gate(Gate.read(text))

    @staticmethod
    def read(text: str) -> Gate:
        """Do the same, unchecked, as a compiler can trace it."""
        act, *parts = text.split(";")
        given = dict(part.split("=") for part in parts)
        numbers = {name: float(value) for name, value in given.items() if name != "gated"}
        return Gate(act, **numbers, gated="gated" not in given)


SWIGLU = Gate()
# Numbers from which float32, in which gates are computed, has infinity, and up to which it has 0.
_ABOVE_FLOAT32, _ZERO_IN_FLOAT32 = 2.0**128 - 2.0**103, 2.0**-150
_ABOVE_0 = ("gate_max", "up_max", "act_max", "gate_softcap", "up_softcap", "alpha")


def checked_gate(gate: Gate) -> Gate:
    """Return `gate`; raise :class:`ConfigError` for numbers that define no function."""
    fix = "Leave an absent limit at None."
    for name, value in zip(gate._fields, gate, strict=True):
        if isinstance(value, (str, bool)) or value is None:
            continue
        if not abs(value) < _ABOVE_FLOAT32:  # NaN included
            raise ConfigError.about(name, "a finite number of float32 or None", repr(value), fix)
        if name in _ABOVE_0 and not value > _ZERO_IN_FLOAT32:
            raise ConfigError.about(name, "a number above 0 in float32", repr(value), fix)
    if not gate.gated and gate != Gate(gate.act, gate.alpha, gated=False):
        raise ConfigError.about("gated", "True for a gate with limits, an offset or softcaps", "False", fix)
    for name in ("gate", "up"):
        low, high = getattr(gate, f"{name}_min"), getattr(gate, f"{name}_max")
        if low is not None and high is not None and not low < high:
            raise ConfigError.about(f"{name}_min", f"below {name}_max, {high:g}", f"{low:g}", fix)
    return gate

"""Matches an expression over the halves of a joint projection with the gates that a :class:`Gate` describes."""

from __future__ import annotations

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.modules.gate_expression import Expression, UnknownForm


def match_gate(result: Expression) -> tuple[Gate, bool]:
    """Return the gate, and whether the halves alternate."""
    factors = _paired(_factors(result))
    if len(factors) == 2:
        for act, up in (factors, factors[::-1]):
            gate, interleaved, up_interleaved = _match_gate(act), _index(act), _index(up)
            if gate is not None and interleaved == (0, up_interleaved[1]) and up_interleaved[0] == 1:
                found = _match_up(up, gate)
                if found is not None:
                    return found, bool(interleaved[1])
            if gate is not None and interleaved[0] == 1 and _match_up(up, gate) is not None:
                raise UnknownForm("its gate has up in the first half of the joint projection, the gate in the second")
    raise UnknownForm("its gate is not act(gate) * up, with limits, an offset or softcaps")


def _factors(x: Expression) -> list[Expression]:
    return [*_factors(x[1]), *_factors(x[2])] if x[0] == "product" else [x]


def _paired(factors: list[Expression]) -> list[Expression]:
    """Join ``g`` and ``sigmoid(g)`` to an activation, likewise ``softcap(g)`` and ``sigmoid(g)``."""
    for sigmoid in (factor for factor in factors if factor[0] == "sigmoid"):
        rest = [factor for factor in factors if factor is not sigmoid]
        inner, alpha = (sigmoid[1][1], sigmoid[1][2]) if sigmoid[1][0] == "scaled" else (sigmoid[1], 1.0)
        for other in rest:
            remaining = [factor for factor in rest if factor is not other]
            if other == inner:
                return [*remaining, ("act", "silu" if alpha == 1 else "swish", float(alpha), inner)]
            if other[0] == "softcap" and other[1] == inner and alpha == 1:
                return [*remaining, ("capped", inner, other[2])]
    return factors


def _index(x: Expression) -> tuple[int | None, bool]:
    """Which half the factor reads, and whether halves alternate."""
    while x[0] not in ("half", "input", "product"):
        x = x[3] if x[0] == "act" else x[1]
    return (x[1], x[2]) if x[0] == "half" else (None, False)


def _match_gate(x: Expression) -> Gate | None:
    act_max = None
    if x[0] == "clamp" and x[2] is None:
        _, x, _, act_max = x
    match x:
        case ("act", name, alpha, ("half", *_)):
            return Gate(name, alpha, act_max=_float(act_max))
        case ("act", name, alpha, ("clamp", ("half", *_), low, high)):
            return Gate(name, alpha, gate_max=_float(high), gate_min=_float(low), act_max=_float(act_max))
        case ("capped", ("half", *_), cap) if act_max is None:
            return Gate(gate_softcap=float(cap))
    return None


def _match_up(x: Expression, gate: Gate) -> Gate | None:
    match x:
        case ("half", *_):
            return gate
        case ("softcap", ("half", *_), cap):
            return gate._replace(up_softcap=float(cap))
        case ("plus", inner, offset) if inner[0] in ("half", "clamp"):
            found = _match_up(inner, gate)
            return None if found is None else found._replace(up_offset=float(offset))
        case ("clamp", ("half", *_), low, high):
            return gate._replace(up_min=_float(low), up_max=_float(high))
    return None


def _float(limit: float | None) -> float | None:
    return None if limit is None else float(limit) if abs(limit) < 2**1000 else limit

"""How a call of a blockwise function is executed: along which loops, and where its sums are rounded."""

from __future__ import annotations

from collections.abc import Iterator

from hf_neuron_moe.checks import Rule, shown
from hf_neuron_moe.config import ACCUMULATIONS

EXECUTIONS = ("fast", "tiles")


def execution_rules(execute: object, accumulation: object, bugs: object) -> Iterator[Rule]:
    """Rules of the options that both functions have; ``upstream_bugs`` looks at the names themselves."""
    fix = "'tiles' walks the documented loops, slowly; 'fast' computes the same expert by expert."
    yield Rule(execute in EXECUTIONS, "execute", f"one of {', '.join(EXECUTIONS)}", repr(execute), fix)
    fix = "'device' rounds sums between blocks and cores as the kernels do; 'convention' rounds each sum once."
    fits = accumulation in ACCUMULATIONS
    yield Rule(fits, "accumulation", f"one of {', '.join(ACCUMULATIONS)}", repr(accumulation), fix)
    fits = isinstance(bugs, tuple) and all(isinstance(name, str) for name in bugs)
    yield Rule(fits, "upstream_bugs", "a tuple of names", shown(bugs), "known_bugs returns such a tuple.")

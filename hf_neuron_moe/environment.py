"""The package's environment variables, except HF_NEURON_MOE_LNC, and what they may hold. Loads no torch."""

from __future__ import annotations

import functools
import os
import threading
from contextlib import suppress

from hf_neuron_moe.errors import ConfigError, public

BF16_PRODUCTS = "HF_NEURON_MOE_BF16_PRODUCTS"
GROUPED = "HF_NEURON_MOE_GROUPED"
GENERATION_COPIES = "HF_NEURON_MOE_GENERATION_COPIES"
RANK_TIMEOUT = "HF_NEURON_MOE_RANK_TIMEOUT"
VALUES = {BF16_PRODUCTS: ("auto", "native", "fp32"), GROUPED: ("auto", "0", "1"), GENERATION_COPIES: ("1", "0")}
"""What variables of the torch backend may hold; the first where they have no value."""
OWN = (*VALUES, RANK_TIMEOUT)
ANSWER_SECONDS = 600.0  # without RANK_TIMEOUT: the others may still be reading their weights; torch gives NCCL as long


@functools.cache
@public("the torch backend")
def environment_option(name: str) -> str:
    """Return the environment variable `name`, which is read once: one of its :data:`VALUES`."""
    return _read(name)


def _read(name: str) -> str:
    values = VALUES[name]
    value = os.environ.get(name) or values[0]
    if value not in values:
        raise ConfigError.about(
            f"the environment variable {name}",
            " or ".join(map(repr, values)),
            repr(value),
            "Unset it, or set one of these before Python starts.",
        )
    return value


def rank_seconds() -> float:
    """Return the seconds that a rank waits for the others."""
    given = os.environ.get(RANK_TIMEOUT) or str(ANSWER_SECONDS)
    with suppress(ValueError):
        if 0 < float(given) < threading.TIMEOUT_MAX:
            return float(given)
    fix = f"Unset it for {ANSWER_SECONDS:g} seconds."
    raise ConfigError.about(
        f"the environment variable {RANK_TIMEOUT}", "a positive number of seconds", repr(given), fix
    )


def wrong_values() -> dict[str, str]:
    """Return what is wrong with the variables that are set, by their names."""
    found = {}
    for name in OWN:
        try:
            rank_seconds() if name == RANK_TIMEOUT else _read(name)
        except ConfigError as error:
            found[name] = str(error)
    return found

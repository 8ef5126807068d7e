"""The options that say which precision each block gets: ``--precision``, ``--recipe`` and ``--keep-bf16``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.precision_map import DEFAULT_GLOB, read_recipe

Recipe = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="FILE", help="YAML or JSON file with a precision by glob over module names."),
]


def precision_asked(
    precision: str | None, recipe: Path | None, keep_bf16: Sequence[str] | None = None
) -> str | dict[str, str]:
    """Return the value of the option ``precision`` that these options of a command ask for; "bf16" without any."""
    if recipe is not None and precision is not None:
        fix = f'Remove it: the recipe\'s "{DEFAULT_GLOB}" is the precision of the other blocks.'
        raise ConfigError.about("precision", "left out with --recipe", precision, fix)
    asked = {DEFAULT_GLOB: precision or "bf16"} if recipe is None else read_recipe(recipe)
    if keep_bf16 and set(asked.values()) == {"bf16"}:
        fix = "Remove it, or choose --precision mxfp8 for the other blocks."
        raise ConfigError.about("keep_bf16", "left out of a conversion to bf16", " and ".join(keep_bf16), fix)
    if DEFAULT_GLOB in (keep_bf16 or ()):
        got = f"{DEFAULT_GLOB!r}, which matches all of them"
        raise ConfigError.about("keep_bf16", "globs that leave a block in MX", got, "Use --precision bf16.")
    for glob in keep_bf16 or ():
        if asked.get(glob, "bf16") != "bf16":
            got = f"{glob!r}, which the recipe gives {asked[glob]!r}"
            raise ConfigError.about("keep_bf16", "a glob that nothing gives another precision", got, "Remove one.")
    asked |= dict.fromkeys(keep_bf16 or (), "bf16")
    return asked if recipe is not None or keep_bf16 else str(asked[DEFAULT_GLOB])


def option_of_precision(arguments: Sequence[str], message: str) -> str:
    """Return which of the options among a command's `arguments` a message about its precision is about."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if any(option == "--keep-bf16" and f"got {glob!r}." in message for option, glob in pairwise(words)):
        return "--keep-bf16"
    return "--recipe" if "--recipe" in words and "--precision" not in words else "--precision"

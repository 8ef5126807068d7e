"""The options that say which precision each block gets: ``--precision``, ``--recipe`` and ``--keep-bf16``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.precision_map import DEFAULT_GLOB

MAX_RECIPE_BYTES = 1_000_000

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


def read_recipe(path: Path) -> dict[str, str]:
    """Read a map of precisions from a YAML or JSON file; ConfigError for anything else and for a key given twice."""
    import yaml

    try:
        if (size := path.stat().st_size) > MAX_RECIPE_BYTES:
            raise ValueError(f"{size:,} bytes")
        # Tabs are white space in JSON, which is YAML otherwise.
        pairs = _pairs(yaml.compose(path.read_text(encoding="utf-8").replace("\t", " "), Loader=yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        expected = f'a YAML or JSON file such as {{"{DEFAULT_GLOB}": "mxfp8", "model.layers.0.*": "bf16"}}'
        got = f"{path} ({type(error).__name__}: {' '.join(str(error).split())})"
        fix = "Correct the path." if isinstance(error, OSError) else "Put globs into quotes, and each of them once."
        raise ConfigError.about("recipe", expected, got, fix) from error
    return dict(pairs)


def _pairs(root: Any) -> list[tuple[str, str]]:
    """The entries of a YAML mapping of texts; ValueError for anything else and for a key given twice."""
    if root is None or root.id != "mapping":
        raise ValueError("no mapping")
    pairs = [(_text(glob), _text(precision)) for glob, precision in root.value]
    for glob, count in Counter(glob for glob, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{glob!r} appears twice")
    return pairs


def _text(node: Any) -> str:
    """The text of a YAML node; ValueError for a list or a mapping."""
    if not isinstance(node.value, str):
        raise ValueError(f"a {node.id} within the mapping")
    return node.value

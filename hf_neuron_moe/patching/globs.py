"""The ``include`` and ``exclude`` globs: each must match a block; a misspelt one is answered with one that does."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

from hf_neuron_moe.errors import ConfigError


def check_globs(
    argument: str, globs: Sequence[str], blocks: Sequence[Sequence[str]], what: str = "an MLP or experts block"
) -> None:
    """Raise for globs, as :mod:`fnmatch` reads them, that match none of the names of any block."""
    for glob in globs:
        if _matched(glob, blocks):
            continue
        fix = "Remove it: the model has no such blocks."
        if near := suggest(glob, blocks):
            fix = f"Did you mean {near!r}, which matches {_matched(near, blocks)} of {len(blocks)} blocks?"
        elif blocks:
            fix = f"Correct or remove it. Blocks are named like {blocks[0][0]!r}."
        raise ConfigError.about(argument, f"globs that match the name of {what}", repr(glob), fix)


def suggest(glob: str, blocks: Sequence[Sequence[str]]) -> str | None:
    """Return a glob near `glob` that matches a block, or None."""
    names = [name for block in blocks for name in block]
    for candidate in (*_extended(glob), *_extended(_respelt(glob, names))):
        if _matched(candidate, blocks):
            return candidate
    near = difflib.get_close_matches(glob, sorted(_pool(names)), n=1, cutoff=0.5)
    return near[0] if near else None


def _matched(glob: str, blocks: Sequence[Sequence[str]]) -> int:
    return sum(bool(fnmatch.filter(block, glob)) for block in blocks)


def _extended(glob: str) -> Iterator[str]:
    """`glob`, and what it becomes when it was meant for a part of the name."""
    yield glob
    yield f"{glob}.*"
    yield f"*.{glob}"
    yield f"*.{glob}.*"


def _respelt(glob: str, names: Sequence[str]) -> str:
    """Replace every level of `glob` that no name has by the nearest that one has."""
    levels = sorted({level for name in names for level in name.split(".")})
    respelt = []
    for level in glob.split("."):
        # No other number is what was meant by a layer that the model does not have.
        known = level.isdigit() or fnmatch.filter(levels, level)
        near = [] if known else difflib.get_close_matches(level, levels, n=1, cutoff=0.6)
        respelt.append(near[0] if near else level)
    return ".".join(respelt)


def _pool(names: Sequence[str]) -> set[str]:
    """Names with numbers left open, and their parents' contents: globs that match by construction."""
    pool = set(names)
    for name in names:
        levels = name.split(".")
        for path in (levels, ["*" if level.isdigit() else level for level in levels]):
            pool |= {".".join(path)} | {".".join([*path[:depth], "*"]) for depth in range(1, len(path))}
    return pool

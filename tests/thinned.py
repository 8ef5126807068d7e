"""Which cases of parametrized tests a run leaves out, because they repeat what others check.

``@pytest.mark.thinned(n)``: one of about n cases stays fast, the others become slow. For cross products: a case stays
if the sum of its places on the axes is a multiple of n. So values of two axes still meet where a third axis has n
values or more. ``thinned(n, m)``, where m divides n: one of about m cases is in every whole run, ``--all-cases`` runs
the others too.

``@pytest.mark.sampled(n)``: the first of every n cases is in every run, the others get the mark ``repeated``.
``--fast`` leaves them out, so values may be lost there. For tests whose cases take long together. Mutants run all.

``scripts/test.sh`` draws a sixteenth of the cases that ``--fast`` leaves out, by the run's seed. So each run
has others, like the examples of property tests. Runs of single files have all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

DRAWN = 1 / 16


def thin(items: Iterable[pytest.Item], every: bool = False) -> None:
    """Mark cases of thinned tests slow and repeated, and skip those of whole runs unless `every` case was asked for.

    Raises:
        pytest.UsageError: A value of an axis would have no fast case of a thinned test.
    """
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        axes = [_axis(*axis.args) for axis in item.iter_markers("parametrize")]
        of_fast, of_whole = (*mark.args, 1)[:2]
        if lost := lost_values(tuple(len(values) for _, values in axes), of_fast):
            raise pytest.UsageError(f"{item.nodeid}: no case stays fast of (axis, place) {sorted(lost)}")
        params = item.callspec.params
        places = [_place(values, [params[name] for name in names]) for names, values in axes]
        if not stays(places, of_fast):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.repeated)
        if not every and not stays(places, of_whole):
            item.add_marker(pytest.mark.skip("--all-cases runs it"))


def sample(items: Iterable[pytest.Item]) -> None:
    """Mark cases of sampled tests as repeated: all but the first of every n, of those that thinning leaves."""
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None or item.get_closest_marker("repeated") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.args[0]:
            item.add_marker(pytest.mark.repeated)
        seen[test] += 1


def left_out(items: Iterable[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the repeated cases that a run with this seed does not draw."""
    repeated = (item for item in items if item.get_closest_marker("repeated") is not None)
    return [item for item in repeated if Random(f"{seed} {item.nodeid}").random() >= DRAWN]


def stays(places: Sequence[int], n: int) -> bool:
    """Return whether the case at these places, one on each axis, stays fast."""
    return sum(places) % n == 0


@cache
def lost_values(sizes: tuple[int, ...], n: int) -> set[tuple[int, int]]:
    """Return the values, each as axis and place on it, of which no case stays among axes of these sizes."""
    values = {(axis, place) for axis, size in enumerate(sizes) for place in range(size)}
    return values.difference(*(enumerate(case) for case in itertools.product(*map(range, sizes)) if stays(case, n)))


def _axis(names: str | Sequence[str], values: Iterable[Any]) -> tuple[list[str], list[Sequence[Any]]]:
    """What one decorator gives: names of arguments, and the values of each case."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    marked = type(pytest.param())
    return names, [v.values if isinstance(v, marked) else v if len(names) > 1 else (v,) for v in values]


def _place(values: Sequence[Sequence[Any]], wanted: Sequence[Any]) -> int:
    return next(place for place, each in enumerate(values) if all(map(lambda one, two: one is two, each, wanted)))

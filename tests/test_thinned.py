"""Thinned tests keep a fast case of every value."""

from __future__ import annotations

import itertools

import pytest

from tests.thinned import DRAWN, left_out, lost_values, sample, stays, thin


@pytest.mark.parametrize(("sizes", "n"), [((3, 4), 3), ((2, 2, 2), 2), ((5, 3, 5, 2), 5), ((8, 4), 4)])
def test_every_value_stays_once_at_least(sizes: tuple[int, ...], n: int) -> None:
    assert not lost_values(sizes, n)
    cases = list(itertools.product(*map(range, sizes)))
    assert len([case for case in cases if stays(case, n)]) * n <= len(cases) + n


def test_values_of_which_no_case_stays_are_found() -> None:
    assert lost_values((4, 2), 3) == {(0, 1)}
    assert lost_values((3,), 2) == {(0, 1)}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("c", [0, 1, 2])
def test_the_other_cases_are_slow(a: int, b: int, c: int, request: pytest.FixtureRequest) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    assert a == b and slow == ((a + c) % 3 != 0)


@pytest.mark.thinned(4, 2)
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("a", range(4))
def test_cases_that_whole_runs_leave_out_are_skipped(a: int, b: int, request: pytest.FixtureRequest) -> None:
    assert (a + b) % 2 == 0 or request.config.getoption("--all-cases")
    assert (request.node.get_closest_marker("slow") is not None) == ((a + b) % 4 != 0)


def test_a_mark_that_loses_a_value_is_an_error(request: pytest.FixtureRequest) -> None:
    def test(a: int) -> None: ...

    marked = pytest.mark.thinned(2)(pytest.mark.parametrize("a", [0, 1])(test))
    item = pytest.Function.from_parent(request.node.parent, name="test", callobj=marked)
    with pytest.raises(pytest.UsageError, match="stays fast"):
        thin([item])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("a", range(7))
def test_the_first_of_every_n_cases_is_not_repeated(a: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("repeated") is not None) == (a % 3 != 0)


@pytest.mark.sampled(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("a", range(4))
def test_cases_that_thinning_makes_slow_are_not_counted(a: int, b: int, request: pytest.FixtureRequest) -> None:
    repeated = request.node.get_closest_marker("repeated") is not None
    assert repeated == (a % 2 != b or a % 2 == 1)


def test_each_seed_draws_other_cases_of_those_that_repeat_others(request: pytest.FixtureRequest) -> None:
    def test(a: int) -> None: ...

    marked = pytest.mark.sampled(4)(pytest.mark.parametrize("a", range(400))(test))
    items = [pytest.Function.from_parent(request.node.parent, name=f"test[{a}]", callobj=marked) for a in range(400)]
    sample(items)
    repeated = [item for item in items if item.get_closest_marker("repeated") is not None]
    assert items[::4] == [item for item in items if item not in repeated]
    first, again, second = (left_out(items, seed) for seed in ("1", "1", "2"))
    assert first == again != second and {*first} < {*repeated}
    assert abs(1 - len(first) / len(repeated) - DRAWN) < 0.07  # of 300 cases: four standard deviations

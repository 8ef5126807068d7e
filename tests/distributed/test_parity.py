"""What parity on several processes says of two runs, and which calls it refuses, without starting any process."""

from __future__ import annotations

import math

import pytest
import torch

from hf_neuron_moe import parity
from hf_neuron_moe.parity import Comparison, Run, compare


def test_gradients_are_compared_relative_to_their_norm() -> None:
    expected = Run([2.0, 4.0], {"a": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)})
    actual = Run([2.0, 3.0], {"a": torch.tensor([3.0, 3.0]), "zero": torch.zeros(2)})
    found = compare(expected, actual)
    assert found.loss == pytest.approx(0.25) and found.losses == [2.0, 3.0]
    assert found.gradients == {"a": pytest.approx(0.2), "zero": 0.0}
    assert found.worst[0] == "a"


def test_what_cannot_be_compared_is_infinitely_far() -> None:
    ones = torch.ones(2)
    expected = Run([1.0], {"a": ones, "missing": ones, "nan": ones, "shape": ones})
    actual = Run([1.0], {"a": ones, "more": ones, "nan": ones * math.nan, "shape": torch.ones(3)})
    far = dict.fromkeys(("missing", "more", "nan", "shape"), math.inf)
    assert compare(expected, actual).gradients == {"a": 0.0, **far}


def test_the_ten_largest_differences_are_shown() -> None:
    rows = list(parity._rows(Comparison(0.5, {f"p{n}": n / 100 for n in range(12)}, [])))
    assert rows[0].endswith("5.0e-01") and [row.split()[-1] for row in rows[2:]] == [f"p{n}" for n in range(11, 1, -1)]


@pytest.mark.parametrize(
    ("layout", "options", "processes", "says"),
    [
        ("fsdp=2,ep=3", (), 2, "ep must divide"),
        ("fsdp=2", (), 1, "takes 2 processes, got 1"),
        ("fsdp=2", (), 4, "takes 2 processes, got 4"),
        ("fsdp=2,dp_replicate=2", ("--rows", "6"), 4, "--rows must be a multiple of fsdp x dp_replicate = 4"),
        ("fsdp=0", (), 1, "'fsdp=0' is no size"),
        ("fsdp", (), 1, "'fsdp' is no size"),
        ("pp=2", (), 2, "'pp=2' is no size"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    layout: str,
    options: tuple[str, ...],
    processes: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(SystemExit) as ended:
        parity.main(["folder", "--layout", layout, *options])
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(("loss", "gradient", "code"), [(1e-6, 1e-6, 0), (1e-3, 1e-6, 1), (1e-6, 1e-3, 1)])
def test_the_tolerance_holds_for_losses_and_gradients(
    loss: float, gradient: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(parity.dist, "init_process_group", lambda **_: None)
    monkeypatch.setattr(parity.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(parity, "tried", lambda trial: Comparison(loss, {"a": 0.0, "b": gradient}, [1.0]))
    assert parity.main(["folder", "--layout", "fsdp=1"]) == code

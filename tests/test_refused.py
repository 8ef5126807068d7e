"""The helper that tests of errors rely on fails where another error comes first."""

from __future__ import annotations

from typing import Any

import pytest

from hf_neuron_moe.errors import ConfigError, NothingToPatchError, PatchError, ShapeError, with_article
from tests.refusals import refused


@pytest.mark.parametrize(
    ("kind", "argument", "options"),
    [
        (NothingToPatchError, "I", {}),
        (PatchError, "H", {}),
        (ShapeError, "H", {}),
        (NothingToPatchError, "H", {"says": "another word"}),
        (NothingToPatchError, "H", {"got": "5"}),
        (NothingToPatchError, "H", {"where": "another"}),
    ],
)
def test_another_error_fails(kind: Any, argument: str, options: dict[str, str]) -> None:
    error = NothingToPatchError.about("H", "even", "15", "Pad it.").named("here")
    with refused(NothingToPatchError, "H", "Pad", got="15", where="here"):
        raise error
    with pytest.raises((AssertionError, NothingToPatchError)), refused(kind, argument, **options):
        raise error


def test_an_error_without_the_parts_of_a_message_fails() -> None:
    with pytest.raises(AssertionError), refused(ConfigError, ""):
        raise ConfigError("no")


def test_no_error_fails() -> None:
    with pytest.raises(pytest.fail.Exception), refused(ConfigError, "x"):
        pass


@pytest.mark.parametrize("noun", ["an object", "an int", "an MlpBwdMatmulConfig", "an ndarray", "a dict", "a LlamaMLP"])
def test_articles_go_by_the_sound(noun: str) -> None:
    assert with_article(noun.split()[1]) == noun

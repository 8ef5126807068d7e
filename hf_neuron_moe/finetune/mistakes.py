"""Mistakes of a run's options: each with its file and line, and all that are found together in one error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_neuron_moe.errors import NeuronMoEError


@contextmanager
def located(places: Mapping[str, str]) -> Iterator[None]:
    """Put the file and line of the option that an error is about in front of its message."""
    try:
        yield
    except NeuronMoEError as error:
        _locate(error, places)
        raise


def _locate(error: NeuronMoEError, places: Mapping[str, str]) -> None:
    if error.where in places.values():
        return
    for word in re.split(r", |\[", error.argument):
        if place := places.get(word) or places.get(f"neuron_{word}"):
            error.where = place
            break


def pass_all(places: Mapping[str, str], *checks: Callable[[], Any]) -> list[Any]:
    """Run every check and return their results; raise what they refuse as :func:`raise_together` does.

    A check that ends otherwise may do so for what another one has refused, and is only then passed over.
    """
    results, errors = [], list[NeuronMoEError]()
    for check in checks:
        try:
            results.append(check())
        except NeuronMoEError as error:
            errors.append(error)
        except (OSError, ValueError):
            if not errors:
                raise
    raise_together(places, errors)
    return results


def raise_together(places: Mapping[str, str], errors: Iterable[NeuronMoEError]) -> None:
    """Raise the first of `errors`, if there is one; the messages of the others become its notes (PEP 678).

    Args:
        places: where each option was given, for :func:`located`.
        errors: not raised yet, or caught.
    """
    found = list(errors)
    for error in found:
        _locate(error, places)
    if found:
        texts = dict.fromkeys(text for error in found for text in (str(error), *getattr(error, "__notes__", ())))
        found[0].__notes__ = [text for text in texts if text != str(found[0])]
        raise found[0]

"""What a record whose fields are a function's arguments says about them: the comments at its fields."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_FIELD = re.compile(r"    (\w+): ([^=#]+?)(?: = .*?)?(?:  # (.*))?\n")


def missing_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Name all required arguments that a call leaves out; an empty string for a call that is wrong otherwise."""
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return ""
    required = [each.name for each in signature.parameters.values() if each.default is each.empty]
    return f"missing required arguments: {', '.join(repr(name) for name in required if name not in given)}"


def described_fields(record: Any) -> dict[str, list[str]]:
    """Return the comment at each field of a dataclass, in lines, from its file; nothing where there is no file."""
    lines = iter(linecache.getlines(sys.modules[record.__module__].__file__ or ""))
    found: dict[str, list[str]] = {}
    above: list[str] = []
    for line in lines:
        if line == f"class {record.__name__}:\n":
            break
    for line in lines:
        if line.startswith("    # "):
            above.append(line.strip("# \n"))
        elif match := _FIELD.match(line):
            found[match[1]] = [*above, match[3]] if match[3] else above or [match[2]]
            above = []
        elif line.startswith(("    @", "    def ", "class ", "def ", "@")):
            break
    return found

"""Reads JSON that comes from anywhere: headers, indexes, configurations and manifests.

Checked before a number of theirs becomes memory or time, or a text of theirs a path or a line on a terminal.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_NAME = 1000  # Characters of a tensor's or module's name
MAX_FILE_NAME = 255  # Bytes of a file's name, which is what file systems take
MAX_AXES = 64  # Of a tensor, which is torch's own limit
MAX_SIZE = 2**63 - 1  # Largest size of an axis and largest offset
MAX_DEPTH = 64  # Objects and lists within each other
MAX_DIGITS = 100
MAX_CONFIG_BYTES = 16_000_000
MAX_INDEX_BYTES = 100_000_000
MAX_MANIFEST_BYTES = 1_000_000_000

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

RecordT = TypeVar("RecordT")


def read_json(path: Path, limit: int, *, unique: bool = False) -> Any:
    """Read a JSON file as :func:`parse_json` takes it; ValueError also where it is longer than `limit` bytes.

    A named pipe, which nobody may ever write into, counts as missing: FileNotFoundError.
    """
    if not path.is_file() and not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{size:,} bytes, more than the {limit:,} that such a file has at most")
    content = parse_json(path.read_bytes(), unique=unique)
    _check_depth(content)
    return content


def parse_json(raw: bytes, *, unique: bool = False) -> Any:
    """Parse JSON in UTF-8 whose numbers have at most :data:`MAX_DIGITS` digits and whose text can be encoded again.

    ValueError for anything else; with `unique` also for a key that an object has twice, of which Python keeps the last.
    """
    text = raw.decode("utf-8")
    try:
        content = json.loads(text, parse_int=_integer, object_pairs_hook=_unique_pairs if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _SURROGATE.search(text):
        json.dumps(content, ensure_ascii=False).encode("utf-8")  # halves of a character alone cannot be written
    return content


def is_name(name: object) -> bool:
    """Whether `name` is a text that can be a tensor's name: neither empty nor endless, and printable."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and name != "__metadata__"


def is_relative_path(path: object) -> bool:
    """Whether `path` names a file in a folder or in folders of it, on every system: no drive, no way up, printable."""
    return is_name(path) and all(
        part not in ("", ".", "..") and not set(part) & set("\\:\0") and len(part.encode()) <= MAX_FILE_NAME
        for part in str(path).split("/")
    )


def is_shape(values: object) -> bool:
    """Whether `values` are sizes of axes."""
    return isinstance(values, (list, tuple)) and len(values) <= MAX_AXES and all(is_natural(value) for value in values)


def is_natural(value: object) -> bool:
    """Whether `value` is a natural number that 63 bits hold."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def record(kind: type[RecordT], content: object) -> RecordT:
    """Make a dataclass of parsed JSON; ValueError for unknown fields and for values of other than the declared types.

    Types are str, int, bool, None, ``dict[str, ...]``, ``tuple[..., ...]``, other dataclasses and Any.
    """
    value = _typed(kind, content, kind.__name__)
    assert isinstance(value, kind)
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} appears twice")
        result[name] = value
    return result


def _check_depth(content: object) -> None:
    level: list[Any] = [[content]]
    for _ in range(MAX_DEPTH + 1):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [part for parts in inner for part in parts if isinstance(part, (dict, list))]
        if not level:
            return
    raise ValueError("nested too deeply")


def _typed(kind: object, value: object, where: str) -> Any:
    """`value` as an instance of the annotation `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # of one kind and None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _typed(kind, value, where)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _built(kind, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_typed(arguments[0], part, where) for part in value)
    if origin is dict and isinstance(value, dict):
        return {name: _typed(arguments[1], part, where) for name, part in value.items()}
    if kind is Any or type(value) is kind:
        return value
    spelled = getattr(origin or kind, "__name__", str(kind))
    raise ValueError(f"{where} must be {spelled}, not {type(value).__name__}")


def _built(kind: Any, content: Mapping[str, Any], where: str) -> Any:
    hints = _hints(kind)
    if unknown := sorted(content.keys() - hints.keys()):
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}")
    values = {name: _typed(hints[name], value, f"{where}.{name}") for name, value in content.items()}
    try:
        return kind(**values)
    except TypeError as error:  # a field without default is missing
        raise ValueError(f"{where}: {error}") from error


@functools.cache
def _hints(kind: object) -> dict[str, Any]:
    return get_type_hints(kind)

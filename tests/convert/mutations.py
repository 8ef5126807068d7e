"""Seeded mutations of what strangers may have written: JSON values, keys and bytes."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from hf_neuron_moe.cli.error_handling import run
from hf_neuron_moe.cli.main import application

SEED = 20261122

EXIT_CODES = {0, 1, 2, 3, 4, 5, 6}
"""Those that docs/convert.md has for what can happen here; 70 is a defect."""

LONGEST_LINE = 2000
MOST_SECONDS = 1.0

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**9, 10**18, 10**60, 1.5, -0.0, 1e300, float("inf"), float("nan"),
    "", "x", ".", "..", "../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "a/b", "org/name", "\x1b[31mred",
    "line\nend", "\ud800", "²", "٣", "1" * 5000, "a" * 300 + ".safetensors", "n" * 100_000, "\u202eabc",
    [], [[]], {}, {"a": []}, [1] * 2000, [-1], ["x"], [10**4000], {"x": {"y": [{}]}},
]  # fmt: skip


def nested(depth: int) -> Any:
    """Lists within lists."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def odd(chance: random.Random, deepest: int) -> Any:
    """An odd value of its own."""
    number = chance.randrange(len(ODD) + 2)
    return copy.deepcopy(ODD[number]) if number < len(ODD) else nested(50 if number == len(ODD) else deepest)


def mutate_json(content: Any, chance: random.Random, deepest: int = 400) -> Any:
    """Change one to three places of parsed JSON; `content` is a copy that may be changed.

    Lists may then lie within each other up to `deepest`.
    """
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(content))
        if not places:
            return odd(chance, deepest)
        holder, key = chance.choice(places)
        kind = chance.randrange(8)
        if kind < 4:
            holder[key] = odd(chance, deepest)
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(holder, dict):
            text = chance.choice([value for value in ODD if isinstance(value, str)])
            holder[chance.choice([text, f"{key}{text}", f"{key}x"])] = holder.pop(key)
        elif kind == 6:
            other, place = chance.choice(places)
            holder[key] = json.loads(json.dumps(other[place]))
        elif isinstance(holder[key], int):
            holder[key] = holder[key] + chance.choice((-1, 1, 2, 32, 10**6))
        else:
            holder[key] = odd(chance, deepest)
    return content


def _places(content: Any) -> Any:
    """Every place in nested lists and dictionaries as holder and key."""
    pending = [content]
    while pending:
        holder = pending.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            pending.append(holder[key])


def mutate_bytes(raw: bytes, chance: random.Random, within: int | None = None) -> bytes:
    """Flip, cut, insert or repeat bytes, among the first `within` of them."""
    content = bytearray(raw)
    place = chance.randrange(min(len(content), within or len(content)))
    match chance.randrange(5):
        case 0:
            content[place] ^= 1 << chance.randrange(8)
        case 1:
            del content[place:]
        case 2:
            content[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
        case 3:
            del content[place : place + chance.randrange(1, 9)]
        case 4:
            content[place:place] = content[place : place + chance.randrange(1, 200)]
    return bytes(content)


def split_header(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(header: Any, data: bytes) -> bytes:
    """A safetensors file of a header, whatever it is, and data."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mutate_header(raw: bytes, chance: random.Random) -> bytes:
    """Change a safetensors header, as JSON or as bytes."""
    header, data = split_header(raw)
    if chance.randrange(4) == 0:
        return mutate_bytes(raw, chance, len(raw) - len(data))
    return with_header(mutate_json(header, chance), data)


def mutate_text(raw: bytes, chance: random.Random) -> bytes:
    """Change a JSON file, as JSON or as bytes."""
    if chance.randrange(4) == 0:
        return mutate_bytes(raw, chance)
    return json.dumps(mutate_json(json.loads(raw), chance)).encode()


def mutate_any(raw: bytes, chance: random.Random) -> bytes:
    """Change a file by what it is: safetensors, JSON, or something else."""
    if raw[8:9] == b"{":
        return mutate_header(raw, chance)
    return mutate_text(raw, chance) if raw[:1] == b"{" else mutate_bytes(raw, chance)


COMMAND = typer.main.get_command(application())
"""Made once: typer reads every signature anew for each call."""


def command(*arguments: object) -> tuple[int, str]:
    """Run the command line in this process: exit code, and all it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            run(COMMAND, [str(argument) for argument in arguments])
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def check_case(work: Callable[[], tuple[int, str]], home: Path, label: str) -> int:
    """Run one case: its exit code is documented, its lines can be read, it is fast, and nothing lies beside."""
    before = sorted(path.name for path in home.iterdir())
    start = time.process_time()
    code, printed = work()
    seconds = time.process_time() - start
    assert code in EXIT_CODES, f"{label}: exit code {code}: {printed[-3000:]}"
    assert "Traceback" not in printed, f"{label}: {printed[-3000:]}"
    for line in printed.splitlines():
        if line.startswith("{"):  # one object for programs: all tensors, or one message
            line = json.loads(line).get("message", "")
        assert len(line) <= LONGEST_LINE, f"{label}: a line of {len(line)} characters: {line[:300]}"
    assert all(char.isprintable() or char == "\n" for char in printed), f"{label}: {printed[:300]!r}"
    assert seconds < MOST_SECONDS, f"{label}: {seconds:.2f} s: {printed[:300]}"
    assert sorted(path.name for path in home.iterdir()) == before, f"{label}: files beside the destination"
    return code

"""The text that a model is measured on: a file cut into rows of tokens.

Legend: N rows, L tokens per row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, public

TEXT_KEY = "text"
"""The key of a JSON line that holds its text."""

_PART_CHARACTERS = 1 << 20  # of a file given to the tokenizer at once


@public("text")
def token_rows(
    path: Path,
    tokenizer: Any,
    tokens: int,
    length: int,
    skip: int = 0,
    less: Callable[[int], str] = "--tokens {}".format,
) -> Tensor:
    """Return the first `tokens` tokens of a text behind the first `skip`, int64 ``[N, L]`` with L at most `length`.

    A ``.jsonl`` file has an object with the key ``"text"`` in each line; any other file is plain text. `tokens` is a
    multiple of L, or it is rounded down to one. `less` names the option for a text of so many tokens.

    Raises:
        ConfigError: the file cannot be read, is empty, or has fewer tokens; the message says how many there are.
    """
    length = min(length, tokens)
    needed = tokens // length * length
    found: list[int] = []
    for part in _parts(path):
        # Texts are longer than the context that a tokenizer warns about; they are cut right here.
        found += tokenizer(part, verbose=False)["input_ids"]
        if len(found) >= skip + needed:
            return torch.tensor(found[skip : skip + needed]).view(-1, length)
    fix = f"Give a longer text, or {less((len(found) - skip) // length * length or len(found))}."
    if not found:
        fix = "Give a file with text: about four characters make a token."
    behind = f" behind the first {skip:,}" if skip else ""
    raise ConfigError.about("text", f"at least {needed:,} tokens long{behind}", f"{len(found):,} in {path}", fix)


def _parts(path: Path) -> Iterator[str]:
    """The texts of a file, each whole or in pieces that end with a line."""
    fix = f'Give a plain text file, or a .jsonl file whose lines have the key "{TEXT_KEY}".'
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix != ".jsonl":
                while lines := file.readlines(_PART_CHARACTERS):
                    yield "".join(lines)
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, number, path, fix)
    except OSError as error:
        raise ConfigError.about("text", "a file that can be read", f"{path} ({error.strerror})", fix) from error
    except UnicodeDecodeError as error:
        raise ConfigError.about("text", "UTF-8", f"{path} with byte {error.start} that is none", fix) from error


def _text_of(line: str, number: int, path: Path, fix: str) -> str:
    try:
        text = json.loads(line).get(TEXT_KEY)
    except (ValueError, AttributeError, RecursionError):
        text = None
    if not isinstance(text, str):
        expected = f'JSON objects with the key "{TEXT_KEY}", one per line'
        raise ConfigError.about("text", expected, f"line {number} of {path}: {line[:60].strip()!r}", fix)
    return text

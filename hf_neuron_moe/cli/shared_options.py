"""Options of several commands, with checks that name the nearest valid value. Loads no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_neuron_moe.config import BLOCK_SIZES
from hf_neuron_moe.errors import DestinationError, DiskError, nearest

PACKAGE = "package:"
LEAST_BARE_BYTES = 1_000_000  # Below this, a size is taken only with its unit
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def tell(as_json: bool, facts: Mapping[str, Any], *lines: str) -> None:
    """Print a command's result: `facts` as one JSON object, or `lines` as text."""
    typer.echo(json.dumps(facts) if as_json else "\n".join(lines))


def make_folder(folder: Path, fix: str) -> None:
    """Make a folder that a command writes to; `fix` says how to name another one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DestinationError.about(str(folder), "a folder", "a file on the way", fix) from error
    except OSError as error:
        raise DiskError.about(str(folder), "a folder that can be made", error.strerror, fix) from error
    if not os.access(folder, os.W_OK):
        raise DiskError.about(str(folder), "a folder that can be written to", "no permission", fix)


def choice(known: tuple[str, ...], *names: str, text: str) -> Any:
    """Return an option that takes one of `known`; None where it was not given."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in known:
            choices = ", ".join(known)
            raise typer.BadParameter(f"{value!r} is not one of {choices}.{nearest(value, list(known))}")
        return value

    def complete(incomplete: str) -> list[str]:
        return [each for each in known if each.startswith(incomplete)]

    return typer.Option(*names, help=text, metavar="|".join(known), callback=check, autocompletion=complete)


def size_in_bytes(text: str) -> int:
    """Read ``5000000000``, ``5GB`` (powers of 1000) or ``5GiB`` (powers of 1024)."""
    found = _SIZE.fullmatch(text.strip())
    nbytes = 0
    if found:
        number, prefix, binary = found.groups()
        nbytes = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r} is not a size such as 500MB, 5GB or 2GiB.")
    return nbytes


def part_of(text: str | None) -> tuple[int, int] | None:
    """Read ``I/N``: part I of N, counted from 1."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise typer.BadParameter(f"{text!r} is not a part I/N with I from 1 to N, such as 1/4.")
    return index, count


def check_size(text: str) -> str:
    """Return a size as it was given; a small number without a unit is refused: "5" is more likely meant to be 5 GB."""
    if size_in_bytes(text) < LEAST_BARE_BYTES and not text.strip()[-1].isalpha():
        raise typer.BadParameter(f"{text!r} has no unit and would be bytes: write 500MB, 5GB, or {text.strip()}B.")
    return text


def check_part(text: str | None) -> str | None:
    """Return a part as it was given, where it is one."""
    return text if part_of(text) else None


def in_package(path: Path) -> Path:
    """Return a file's path; ``package:demo/sotu/eval.jsonl`` is one in this package's folder."""
    inside = str(path).removeprefix(PACKAGE)
    return path if inside == str(path) else Path(__file__).resolve().parents[1] / inside


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text, on errors too.")]
Text = Annotated[
    Path, typer.Argument(metavar="TEXT", callback=in_package, help='Text, or .jsonl with "text" or "messages".')
]
AnySource = Annotated[
    str, typer.Argument(metavar="SRC", help="Folder with config.json and safetensors files, or a Hub id org/name.")
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.")]
Original = Annotated[
    Path | None,
    typer.Option("--source", metavar="SRC", help="The checkpoint it was made of, or its Hub id."),
]
Converted = Annotated[Path, typer.Argument(metavar="DST", help="Folder that convert wrote, or the Hub id of one.")]
BlockSize = Annotated[
    int, typer.Option(metavar="|".join(map(str, BLOCK_SIZES)), help="Tokens per block of experts.", show_default=True)
]

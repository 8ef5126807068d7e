from __future__ import annotations

import json
from pathlib import Path

import pytest
from make_sotu_excerpt import read_speeches, split, write_jsonl

DATA = Path(__file__).resolve().parents[2] / "hf_neuron_moe" / "demo" / "sotu"


def read(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_shipped_excerpt_is_split_by_year() -> None:
    train, evaluation = read("train"), read("eval")
    assert [speech["year"] for speech in train] == list(range(1948, 2010, 2))
    assert [speech["year"] for speech in evaluation] == list(range(2010, 2022))
    for speech in train + evaluation:
        assert set(speech) == {"year", "president", "text"}
        assert len(str(speech["text"])) > 5_000, "a speech of an excerpt of whole speeches is not that short"


def test_shipped_excerpt_is_one_to_two_megabytes_and_states_its_licence() -> None:
    size = sum((DATA / f"{name}.jsonl").stat().st_size for name in ("train", "eval"))
    assert 1_000_000 <= size <= 2_000_000
    licence = (DATA / "LICENSE.txt").read_text(encoding="utf-8")
    assert "PDDL-1.0" in licence and "CC0-1.0" in licence


def write_package(folder: Path, years: list[int]) -> None:
    (folder / "data").mkdir(parents=True)
    for year in years:
        record = {"year": year, "name": f"President {year}", "party": "None", "text": f" Speech of {year} – hello. "}
        (folder / "data" / f"{year}_name_n.json").write_text(json.dumps(record), encoding="utf-8")


def test_builder_selects_whole_speeches_by_year(tmp_path: Path) -> None:
    write_package(tmp_path, [2021, 2010, 2009, 2008, 1950, 1949, 1948, 1946, 1790])
    train, evaluation = split(read_speeches(tmp_path))
    assert [speech["year"] for speech in train] == [1948, 1950, 2008]
    assert [speech["year"] for speech in evaluation] == [2010, 2021]
    write_jsonl(tmp_path / "train.jsonl", train)
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {"year": 1948, "president": "President 1948", "text": "Speech of 1948 – hello."}


def test_builder_refuses_a_folder_without_speeches(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no speeches"):
        read_speeches(tmp_path)

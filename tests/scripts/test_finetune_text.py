"""finetune.py's text: files in, blocks of equal length out, nothing lost and nothing twice."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from finetune_options import DataOptions
from finetune_text import blocks, pack, quiet_datasets
from hypothesis import given, strategies as st
from make_tiny_model import END_OF_TEXT, byte_tokenizer

from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning
from tests.refusals import refused

DOCUMENTS = [f"Speech {number}: " + "we the people " * (number + 1) for number in range(12)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def written(folder: Path, kind: str) -> list[str]:
    """The documents in files of a kind: one per line or row; for .txt one per file."""
    if kind == ".txt":
        for number, text in enumerate(DOCUMENTS):
            (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
        return [str(folder / "*.txt")]
    file = folder / f"all{kind}"
    if kind == ".parquet":
        datasets.Dataset.from_dict({"text": DOCUMENTS}).to_parquet(file)
    else:
        file.write_text("".join(json.dumps({"text": text, "year": 1}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    return [str(file)]


@pytest.mark.parametrize("kind", [".jsonl", ".txt", ".parquet"])
def test_blocks_are_the_joined_documents_cut(tmp_path: Path, kind: str) -> None:
    tokenizer = byte_tokenizer()
    rows, held_out = blocks(DataOptions(train_files=written(tmp_path, kind), block_length=50), tokenizer)
    whole = "".join(text + END_OF_TEXT for text in DOCUMENTS)
    decoded = "".join(tokenizer.decode(row) for row in rows["input_ids"])
    assert whole.startswith(decoded)
    assert {len(row) for row in rows["input_ids"]} == {50}
    count = sum(len(text) + 1 for text in DOCUMENTS)  # one token per byte and one for the end
    assert len(rows) == count // 50
    assert rows["labels"] == rows["input_ids"]
    assert held_out is None


def test_a_share_of_the_blocks_or_other_files_are_held_out(tmp_path: Path) -> None:
    files, tokenizer = written(tmp_path, ".jsonl"), byte_tokenizer()
    whole, _ = blocks(DataOptions(train_files=files, block_length=20), tokenizer)
    train, held_out = blocks(DataOptions(train_files=files, block_length=20, eval_share=0.1), tokenizer)
    assert held_out is not None
    assert [*train["input_ids"], *held_out["input_ids"]] == list(whole["input_ids"])
    assert len(held_out) == round(0.1 * len(whole))
    options = DataOptions(
        train_files=files, eval_files=files, block_length=20, max_train_blocks=5, max_eval_blocks=3, eval_share=0.5
    )
    train, held_out = blocks(options, tokenizer)
    assert held_out is not None
    assert (len(train), len(held_out)) == (5, 3)
    assert held_out["input_ids"][0] == whole["input_ids"][0]


def test_a_damaged_file_is_reported_by_the_error_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    datasets.enable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    # As in a program: pytest has put its own files in place of the one that the library's handler writes to.
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("datasets").addHandler(handler)
    try:
        with refused(ConfigError, "train_files", got=f"{file}, line 2: "):
            blocks(DataOptions(train_files=[str(file)], block_length=2), byte_tokenizer())
        assert "".join(capfd.readouterr()) == ""
        assert not datasets.are_progress_bars_disabled() and datasets.logging.get_verbosity() == verbosity
        datasets.disable_progress_bars()
        with quiet_datasets():
            pass
        assert datasets.are_progress_bars_disabled(), "what was off stays off"
    finally:
        logging.getLogger("datasets").removeHandler(handler)


@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=9), st.integers(2, 8))
def test_packing_keeps_order_and_drops_only_the_last_piece(documents: list[list[int]], length: int) -> None:
    rows = pack(documents, length)
    joined = [token for document in documents for token in document]
    assert [token for row in rows for token in row] == joined[: len(joined) // length * length]
    assert all(len(row) == length for row in rows)


@pytest.mark.parametrize(
    ("options", "argument", "says"),
    [
        ({"train_files": ["none.jsonl"]}, "train_files", "got nothing at none.jsonl"),
        ({"text_column": "texts"}, "text_column", "Did you mean 'text'"),
        ({"block_length": 100_000}, "the training text", ""),
        ({"block_length": 800, "eval_share": 0.9}, "eval_share", ""),
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        blocks(DataOptions(**{"train_files": written(tmp_path, ".jsonl"), **options}), byte_tokenizer())


@pytest.mark.parametrize(
    ("name", "content", "argument", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', "train_files", r"a\.jsonl, line 3: a list instead of a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "the training text", "got 'utf-8' codec"),
        ("a.json", b'{"text": "a"}\n{"text"\n', "train_files", r"a\.json, line 2: Expecting"),
        ("a.jsonl", b"", "train_files", r"a\.jsonl, which is empty"),
        ("a.parquet", b"PAR", "train_files", r"a\.parquet, which cannot be read: "),
    ],
)
def test_a_damaged_file_is_named_with_the_line(
    tmp_path: Path, name: str, content: bytes, argument: str, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(ConfigError, argument, says):
        blocks(DataOptions(train_files=[str(tmp_path / name)]), byte_tokenizer())


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    files = [*written(tmp_path, ".jsonl"), *written(tmp_path, ".txt")]
    with refused(ConfigError, "train_files", got=".jsonl and .txt"):
        blocks(DataOptions(train_files=files), byte_tokenizer())
    (tmp_path / "a.csv").write_text("text\na\n", encoding="utf-8")
    with refused(ConfigError, "train_files", got=".csv"):
        blocks(DataOptions(train_files=[str(tmp_path / "a.csv")]), byte_tokenizer())


def jsonl(folder: Path, values: list[Any]) -> list[str]:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values), encoding="utf-8")
    return [str(folder / "a.jsonl")]


def test_empty_documents_are_counted_and_left_out(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    expected, _ = blocks(DataOptions(train_files=written(tmp_path, ".jsonl"), block_length=20), tokenizer)
    mixed = [value for text in DOCUMENTS for value in ("", text, " \n\t")]
    with pytest.warns(NeuronMoEWarning, match="24 of 36 documents of the training text are empty and are left out"):
        rows, _ = blocks(DataOptions(train_files=jsonl(tmp_path, mixed), block_length=20), tokenizer)
    assert list(rows["input_ids"]) == list(expected["input_ids"])


@pytest.mark.parametrize(
    ("values", "argument", "says"),
    [
        ([""] * 500, "the training text", "got 500 empty documents and no other"),
        (
            ["a"] * 1200 + [None, "b", None],
            "column 'text' of the training text",
            "got null in 2 of 1,203 documents, first in document 1,201. Remove these",
        ),
        ([None] * 3, "column 'text' of the training text", "got null in 3 of 3 documents, first in document 1"),
        ([1, 2], "text_column", "got 'text', which holds int64. No column does"),
        ([["a"], ["b"]], "text_column", "'text', which holds List"),
    ],
)
def test_documents_that_are_no_text_are_refused(tmp_path: Path, values: list[Any], argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        blocks(DataOptions(train_files=jsonl(tmp_path, values), block_length=20), byte_tokenizer())


def test_a_dataset_that_the_hub_does_not_give_is_refused() -> None:
    with refused(ConfigError, "dataset", got="'no/where'"):
        blocks(DataOptions(dataset="no/where"), byte_tokenizer())

"""Text for ``finetune.py``: HF `datasets` in, blocks of equal length out.

Documents are tokenized, an end-of-text token is put after each, all are joined and the result is cut into blocks of
`block_length` tokens; the last, shorter piece (of each thousand documents) is left out. Attention sees a whole block,
also where a document ends within it. Empty documents are left out with a warning, for a model would learn from them to
end a text at once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute
from datasets import Dataset, Value, load_dataset
from datasets.exceptions import DatasetsError
from finetune_options import DataOptions, files_of
from transformers import PreTrainedTokenizerBase

from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning, nearest

BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
"""Which loader of `datasets` reads which files."""

_STRINGS = ("string", "large_string")
_SPACE = " \t\n\v\f\r"
"""What arrow's ``ascii_trim_whitespace`` takes off."""

Blocks = Dataset
"""A dataset of ``input_ids`` and ``labels``, both `block_length` token ids; the model shifts the labels itself."""


def blocks(options: DataOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[Blocks, Blocks | None]:
    """Return the training blocks and, where evaluation text or an evaluation share is named, the evaluation blocks.

    Raises:
        ConfigError: files are missing or of several or unknown kinds, the dataset cannot be loaded, there is no column
            of text, a document is null, all are empty, or the text is shorter than a block.
    """
    if options.dataset:
        train_text = hub_text(options, options.train_split)
        eval_text = hub_text(options, options.eval_split) if options.eval_split else None
    else:
        train_text = local_text(options.train_files, "train_files")
        eval_text = local_text(options.eval_files, "eval_files") if options.eval_files else None
    train = packed(train_text, tokenizer, options.text_column, options.block_length, "training")
    if eval_text is not None:
        held_out = packed(eval_text, tokenizer, options.text_column, options.block_length, "evaluation")
    elif options.eval_share:
        train, held_out = split_off(train, options.eval_share)
    else:
        return first(train, options.max_train_blocks), None
    return first(train, options.max_train_blocks), first(held_out, options.max_eval_blocks)


def hub_text(options: DataOptions, split: str) -> Dataset:
    """Return the documents of a split of the hub's dataset.

    Raises:
        ConfigError: it cannot be loaded: an unknown name, configuration or split, or the hub cannot be reached.
    """
    try:
        return load_dataset(options.dataset, options.dataset_config or None, split=split)
    except (DatasetsError, ValueError, OSError) as error:
        got = f"{options.dataset!r}, which cannot be loaded: {' '.join(str(error).split()).rstrip('.')}"
        remedy = "Correct dataset, dataset_config or the split; without a network name local train_files."
        raise _bad("dataset", f"a dataset of the hub with the split {split!r}", got, remedy) from error


def local_text(patterns: Sequence[str], argument: str) -> Dataset:
    """Return the documents of local files: a .txt file is one document, a line or row of the others is one.

    Raises:
        ConfigError: files are missing, of several or unknown kinds, or damaged; of JSON the line is named.
    """
    files = files_of(patterns, argument)
    kinds = sorted({Path(path).suffix for path in files})
    if len(kinds) != 1 or kinds[0] not in BUILDERS:
        expected = f"files of one kind among {', '.join(BUILDERS)}"
        raise _bad(argument, expected, " and ".join(kinds), "Convert them to one kind.")
    options: dict[str, Any] = {"sample_by": "document"} if kinds[0] == ".txt" else {}
    try:
        with quiet_datasets():
            return load_dataset(BUILDERS[kinds[0]], data_files=files, split="train", **options)
    except (DatasetsError, ValueError, OSError, StopIteration) as error:  # the last where all files are empty
        found = next(filter(None, map(first_fault, files)), None) if BUILDERS[kinds[0]] == "json" else None
        cause = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        got = found or f"{', '.join(files)}, which cannot be read: {cause}"
        raise _bad(argument, f"readable {kinds[0]} files", got, "Mend the file.") from error


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the log and the progress bars of `datasets`, which report a damaged file before the error here does."""
    verbosity = datasets.logging.get_verbosity()
    shows_bars = not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if shows_bars:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shows_bars:
            datasets.enable_progress_bars()


def first_fault(path: str) -> str | None:
    """Return file, line and what is wrong there for the first line that is no JSON object; None where all are.

    A .json file that is one JSON value as a whole has no such line.
    """
    content = Path(path).read_bytes()
    if not content.strip():
        return f"{path}, which is empty"
    if not path.endswith(".jsonl") and _json_fault(content) is None:
        return None
    for number, line in enumerate(content.split(b"\n"), start=1):
        fault = _json_fault(line, dict) if line.strip() else None
        if fault is not None:
            return f"{path}, line {number}: {fault}"
    return None


def _json_fault(content: bytes, kind: type = object) -> str | None:
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return " ".join(str(error).split())
    return None if isinstance(value, kind) else f"a {type(value).__name__} instead of a JSON object"


def packed(text: Dataset, tokenizer: PreTrainedTokenizerBase, column: str, block_length: int, purpose: str) -> Blocks:
    """Tokenize and pack the documents in `column`."""
    check_documents(text, column, purpose)
    if tokenizer.eos_token_id is None:
        raise _bad("tokenizer", "one with an end-of-text token", "one without", "Set its eos_token.")

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        documents = [document for document in batch[column] if document.strip(_SPACE)]
        ids = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
        rows = pack([[*document, tokenizer.eos_token_id] for document in ids], block_length)
        return {"input_ids": rows, "labels": rows}

    try:
        result = text.map(cut, batched=True, remove_columns=text.column_names, desc=f"packing the {purpose} text")
    except UnicodeDecodeError as error:  # loading does not look at the bytes of strings
        raise _bad(f"the {purpose} text", "in UTF-8", str(error), "Save the files in UTF-8.") from error
    if not len(result):
        remedy = "Use more text or a smaller block_length."
        raise _bad(f"the {purpose} text", f"at least one block of {block_length} tokens", "less", remedy)
    return result


def check_documents(text: Dataset, column: str, purpose: str) -> None:
    """Refuse a column that holds no text, and warn of empty documents, which are left out.

    Raises:
        ConfigError: there is no such column, it holds something else than text, a document is null, or all are empty.
    """
    if column not in text.column_names:
        remedy = f"There are: {', '.join(text.column_names)}.{nearest(column, text.column_names)}"
        raise _bad("text_column", f"a column of the {purpose} text", repr(column), remedy)
    kinds = {
        name: kind.dtype if isinstance(kind, Value) else type(kind).__name__ for name, kind in text.features.items()
    }
    if kinds[column] not in (*_STRINGS, "null"):
        others = ", ".join(name for name, kind in kinds.items() if kind in _STRINGS)
        remedy = f"Name one that does: {others}." if others else "No column does: write the text into one."
        got = f"{column!r}, which holds {kinds[column]}"
        raise _bad("text_column", f"a column of the {purpose} text that holds strings", got, remedy)
    first_null, nulls, empty = _counted(text, column)
    if nulls:
        got = f"null in {nulls:,} of {len(text):,} documents, first in document {first_null + 1:,}"
        raise _bad(f"column {column!r} of the {purpose} text", "a string in every document", got, "Remove these.")
    if empty == len(text):
        got = f"{empty:,} empty documents and no other"
        raise _bad(f"the {purpose} text", "documents with text", got, "Check the files and text_column.")
    if empty:
        message = f"{empty:,} of {len(text):,} documents of the {purpose} text are empty and are left out"
        warnings.warn(f"finetune: {message}.", NeuronMoEWarning, stacklevel=2)


def _counted(text: Dataset, column: str) -> tuple[int, int, int]:
    """Return the index of the first null (-1: none), and how many documents are null and how many are empty.

    A document of white space is empty. The bytes are looked at without decoding them, of a thousand documents at once.
    """
    first_null, nulls, empty, seen = -1, 0, 0, 0
    for part in text.select_columns(column).with_format("arrow").iter(1000):
        values = part[column].combine_chunks()
        if values.null_count and first_null < 0:
            first_null = seen + values.is_null().index(True).as_py()
        nulls += values.null_count
        if values.null_count < len(values):
            lengths = pyarrow.compute.binary_length(pyarrow.compute.ascii_trim_whitespace(values))
            empty += pyarrow.compute.equal(lengths, 0).true_count
        seen += len(values)
    return first_null, nulls, empty


def pack(documents: Sequence[Sequence[int]], block_length: int) -> list[list[int]]:
    """Join `documents` and cut the result into blocks; a last piece shorter than a block is dropped."""
    ids = list(chain.from_iterable(documents))
    return [ids[start : start + block_length] for start in range(0, len(ids) - block_length + 1, block_length)]


def split_off(whole: Blocks, share: float) -> tuple[Blocks, Blocks]:
    """Return `whole` without its last blocks, and those: `share` of all, at least one of either."""
    count = max(1, round(share * len(whole)))
    if count >= len(whole):
        remedy = "Use more text, a smaller block_length or eval_files."
        raise _bad("eval_share", "a share that leaves blocks to train on", f"{count} of {len(whole)} blocks", remedy)
    kept = len(whole) - count
    return whole.select(range(kept)), whole.select(range(kept, len(whole)))


def first(rows: Blocks, count: int) -> Blocks:
    """Return the first `count` rows, or all for 0."""
    return rows.select(range(min(count, len(rows)))) if count else rows


def _bad(argument: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(argument, expected, got, remedy).named("finetune")

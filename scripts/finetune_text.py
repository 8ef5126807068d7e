"""Text for ``finetune.py``: HF `datasets` in, blocks of equal length out.

Documents are tokenized, an end-of-text token is put after each, all are joined and the result is cut into blocks of
`block_length` tokens; the last, shorter piece (of each thousand documents) is left out. Attention sees a whole block,
also where a document ends within it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from finetune_options import DataOptions, files_of
from transformers import PreTrainedTokenizerBase

from hf_neuron_moe.errors import ConfigError, nearest, refuse

BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
"""Which loader of `datasets` reads which files."""

Blocks = Dataset
"""A dataset of ``input_ids`` and ``labels``, both `block_length` token ids; the model shifts the labels itself."""


def blocks(options: DataOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[Blocks, Blocks | None]:
    """Return the training blocks and, where evaluation text or an evaluation share is named, the evaluation blocks.

    Raises:
        ConfigError: files are missing or of several or unknown kinds, there is no text column, or the text is shorter
            than a block.
    """
    if options.dataset:
        load = (options.dataset, options.dataset_config or None)
        train_text = load_dataset(*load, split=options.train_split)
        eval_text = load_dataset(*load, split=options.eval_split) if options.eval_split else None
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
        return load_dataset(BUILDERS[kinds[0]], data_files=files, split="train", **options)
    except (DatasetsError, ValueError, OSError, StopIteration) as error:  # the last where all files are empty
        found = next(filter(None, map(first_fault, files)), None) if BUILDERS[kinds[0]] == "json" else None
        cause = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        got = found or f"{', '.join(files)}, which cannot be read: {cause}"
        raise _bad(argument, f"readable {kinds[0]} files", got, "Mend the file.") from error


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
    if column not in text.column_names:
        remedy = f"There are: {', '.join(text.column_names)}.{nearest(column, text.column_names)}"
        raise _bad("text_column", f"a column of the {purpose} text", repr(column), remedy)
    if tokenizer.eos_token_id is None:
        raise _bad("tokenizer", "one with an end-of-text token", "one without", "Set its eos_token.")

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch[column], add_special_tokens=False, verbose=False)["input_ids"]
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
    return refuse(ConfigError, where="finetune", argument=argument, expected=expected, got=got, remedy=remedy)

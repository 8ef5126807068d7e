"""The rows to train and to evaluate on: read, told apart by their columns, and checked before a model is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow
from datasets import Dataset, Features, Json, List, Value
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from hf_neuron_moe.errors import NeuronMoEWarning, nearest
from hf_neuron_moe.finetune.data_rows import (
    EMPTY,
    FREE,
    KINDS,
    BadRow,
    Reader,
    check_values,
    is_chat,
    is_messages,
    is_plain,
)
from hf_neuron_moe.finetune.data_sources import Source, files_of, from_files, from_hub, quiet_datasets
from hf_neuron_moe.finetune.train_options import Options, bad, one_line


class Data(NamedTuple):
    """Rows in TRL's columns."""

    kind: str
    train: Dataset
    held_out: Dataset | None


def load_data(options: Options, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Return the rows of a run.

    Raises:
        ConfigError: files are missing, damaged or of several kinds, or the dataset cannot be loaded. Its columns are of
            no known kind, a row is not what its kind needs, or all rows are empty. An option asks for other data.
    """
    data = options.data
    kind, train = _read(options, tokenizer, "train_files", data.train_split if data.dataset else "")
    held_out = None
    if data.eval_files or data.eval_split:
        other, held_out = _read(options, tokenizer, "eval_files", data.eval_split)
        if other != kind:
            raise bad("eval_files, eval_split", f"data of kind {kind!r} as the training data", other, "Change one.")
    elif data.eval_share:
        kept = len(train) - max(1, round(data.eval_share * len(train)))
        if kept < 1:
            fix = "Name evaluation data: eval_files."
            raise bad("eval_share", "a share that leaves rows to train on", f"{len(train)} rows in all", fix)
        train, held_out = train.select(range(kept)), train.select(range(kept, len(train)))
    _check_losses(options, tokenizer, kind, train[0])
    if kind == "text":
        _pack_text(options)
    if getattr(options.training, "packing", False):
        return Data(kind, train, held_out)  # packed rows are counted
    return Data(kind, *limited(options, train, held_out))


def limited(options: Options, train: Dataset, held_out: Dataset | None) -> tuple[Dataset, Dataset | None]:
    """Return as many of the first rows as the options say."""
    data = options.data
    return _first(train, data.max_train_samples), held_out and _first(held_out, data.max_eval_samples)


def _first(rows: Dataset, count: int) -> Dataset:
    return rows.select(range(min(count, len(rows)))) if count else rows


def _read(options: Options, tokenizer: PreTrainedTokenizerBase, argument: str, split: str) -> tuple[str, Dataset]:
    if split:
        argument = "dataset"
        raw = from_hub(options, split)
    else:
        raw = from_files(files_of(getattr(options.data, argument), argument), argument)
    kind = _kind_of(options, raw.columns, argument)
    text_field = getattr(options.training, "dataset_text_field", "text")
    reader = Reader(kind, text_field, tokenizer)
    if tokenizer.chat_template is None and kind in ("messages", "conversations"):
        fix = "Set chat_template_path: FILE.jinja (or a model that has one), or take the model's chat variant."
        owner = "tokenizer" if options.model.tokenizer else "model"
        raise bad(owner, f"one whose tokenizer has a chat template, for rows of {kind}", "one without", fix)

    forms: dict[str, type] = {}

    def read(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            made = reader(raw.row_of(row))
            check_values(made, forms)
            return made
        except BadRow as error:
            got = f"{error.got} ({raw.place(index)})"
            raise bad(argument, f"rows of {_WORDS[kind]}", got, error.fix) from error

    try:
        with quiet_datasets():
            made = _made(raw, read)
            kept = made.filter(lambda empty: not empty, input_columns=EMPTY, load_from_cache_file=False)
    except UnicodeDecodeError as error:  # arrow looks at texts no sooner
        raise bad(argument, "text in UTF-8", one_line(error), "Convert it to UTF-8.") from error
    except (pyarrow.ArrowException, TypeError) as error:
        fix = "Write each column, and each field in it, in one type in all rows."
        raise bad(argument, "rows whose columns have one type each", one_line(error), fix) from error
    if not len(kept):
        got = f"{len(made):,} empty rows and no other" if len(made) else "no rows"
        raise bad(argument, f"rows of {_WORDS[kind]} with text to learn", got, "Check the files and their columns.")
    if len(kept) < len(made):
        message = f"train: {argument}: {len(made) - len(kept):,} of {len(made):,} rows are empty and are left out."
        warnings.warn(message, NeuronMoEWarning, stacklevel=2)
    return kind, kept.remove_columns(EMPTY)


class _VariedError(Exception):
    """A message with more than a role and a text."""


def _made(raw: Source, read: Callable[[dict[str, Any], int], dict[str, Any]]) -> Dataset:
    """Return what `read` makes of each row and its number.

    `datasets` takes the types of the first rows for all, and fills in what others have not. So rows of JSON are kept as
    JSON where their messages differ in form.
    """
    options: dict[str, Any] = {"remove_columns": raw.rows.column_names, "load_from_cache_file": False}
    if not raw.is_json:
        return raw.rows.map(read, with_indices=True, **options)
    first = read(raw.rows[0], 0)

    def read_plain(row: dict[str, Any], index: int) -> dict[str, Any]:
        made = read(row, index)
        if not is_plain(made):
            raise _VariedError
        return made

    try:
        return raw.rows.map(read_plain, with_indices=True, features=_features(first, varied=False), **options)
    except _VariedError:
        return raw.rows.map(read, with_indices=True, features=_features(first, varied=True), **options)


def _features(row: dict[str, Any], *, varied: bool) -> Features:
    messages = List(Json()) if varied else List({"role": Value("string"), "content": Value("string")})
    kinds = {str: Value("string"), bool: Value("bool")}
    named = {name: messages if is_messages(name, value) else kinds.get(type(value)) for name, value in row.items()}
    return Features({name: Json() if name in FREE else kind for name, kind in named.items()})


_WORDS = {
    "text": "text",
    "messages": "chat messages",
    "conversations": "conversations",
    "alpaca": "instruction and output",
    "completion": "prompt and completion",
    "preference": "chosen and rejected answers",
}


def _kind_of(options: Options, columns: list[str], argument: str) -> str:
    method, kinds = options.data.method, KINDS[options.data.method]
    text = getattr(options.training, "dataset_text_field", None)
    if text in columns and "dataset_text_field" in options.places:
        return "text"
    for kind, needed in kinds.items():
        if all(column in columns for column in needed):
            return kind
    if text in columns:
        return "text"
    known = [*(" and ".join(needed) for needed in kinds.values()), *([text] if text else [])]
    if "dataset_text_field" in options.places:
        argument = "dataset_text_field"
    near = nearest(text, columns) if text else ""
    fix = f"Rename them{', or name the column of text: dataset_text_field' if text else ''}.{near}"
    raise bad(
        argument, f"data with columns {', or '.join(known)} for method {method}", ", ".join(columns) or "none", fix
    )


def _check_losses(options: Options, tokenizer: PreTrainedTokenizerBase, kind: str, row: dict[str, Any]) -> None:
    """Refuse options that leave out tokens by marks that the data or the chat template do not have."""
    training = options.training
    if getattr(training, "completion_only_loss", None) and "completion" not in row:
        fix = "Use columns prompt and completion, or assistant_only_loss for chats."
        raise bad("completion_only_loss", "unset for data without completions", f"rows of {kind}", fix)
    if not getattr(training, "assistant_only_loss", False):
        return
    if not is_chat(row):
        fix = "Use chat data, or completion_only_loss for prompts with completions."
        raise bad("assistant_only_loss", "false for data without chat messages", f"rows of {kind}", fix)
    try:
        if not has_generation_markers(tokenizer.chat_template):
            get_training_chat_template(tokenizer)
    except ValueError as error:
        expected = "used with a chat template that marks answers by {% generation %}, or one that TRL knows"
        fix = "Add the marks to a copy and name it: chat_template_path: FILE.jinja; or train on all tokens."
        raise bad("assistant_only_loss", expected, "another one", fix) from error


def _pack_text(options: Options) -> None:
    """Plain text is packed unless the options say otherwise, and long documents are split instead of cut."""
    if "packing" not in options.places:
        options.training.packing = True
    if "packing_strategy" not in options.places:
        options.training.packing_strategy = "bfd_split"

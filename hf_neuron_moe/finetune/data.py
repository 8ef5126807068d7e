"""The rows to train and to evaluate on: read, told apart by their columns, and checked before a model is loaded."""

from __future__ import annotations

import errno
import glob
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from hf_neuron_moe.errors import NeuronMoEWarning, nearest
from hf_neuron_moe.finetune.data_rows import EMPTY, KINDS, BadRow, Reader, is_chat, shown
from hf_neuron_moe.finetune.train_options import Options, bad, one_line

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text", ".parquet": "parquet"}
"""Which loader of `datasets` reads which files."""

PACKAGE = "package:"
_NULL = re.compile(rb"\s*(\[\s*)?null\b")


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


def files_of(patterns: Sequence[str], argument: str) -> list[str]:
    """Return the files that names and globs stand for, those of each glob sorted.

    A name may begin with ``package:`` for the folder of this package.
    """
    named = [pattern.replace(PACKAGE, f"{Path(__file__).resolve().parents[1]}/", 1) for pattern in patterns]
    files = [path for pattern in named for path in sorted(glob.glob(pattern)) or [pattern]]
    missing = [path for path in files if not Path(path).is_file()]
    if missing:
        folders = [path for path in missing if Path(path).is_dir()]
        got, fix = f"nothing at {', '.join(missing)}", "Correct the path."
        if folders:
            got, fix = f"the folder {folders[0]}", f"Name its files, for example {Path(folders[0]) / '*.jsonl'}."
        raise bad(argument, "existing files", got, fix)
    return files


def _read(options: Options, tokenizer: PreTrainedTokenizerBase, argument: str, split: str) -> tuple[str, Dataset]:
    files: list[str] = []
    if split:
        argument = "dataset"
        raw = _from_hub(options, split)
    else:
        files = files_of(getattr(options.data, argument), argument)
        raw = _from_files(files, argument)
    kind = _kind_of(options, raw.column_names, argument)
    text_field = getattr(options.training, "dataset_text_field", "text")
    reader = Reader(kind, text_field, tokenizer)
    if tokenizer.chat_template is None and kind in ("messages", "conversations"):
        fix = "Set chat_template_path: FILE.jinja (or a model that has one), or take the model's chat variant."
        owner = "tokenizer" if options.model.tokenizer else "model"
        raise bad(owner, f"one whose tokenizer has a chat template, for rows of {kind}", "one without", fix)

    def read(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return reader(row)
        except BadRow as error:
            got = f"{error.got} ({_place(files, index)})"
            raise bad(argument, f"rows of {_WORDS[kind]}", got, error.fix) from error

    try:
        with quiet_datasets():
            made = raw.map(read, with_indices=True, remove_columns=raw.column_names, load_from_cache_file=False)
            kept = made.filter(lambda empty: not empty, input_columns=EMPTY, load_from_cache_file=False)
    except UnicodeDecodeError as error:  # arrow looks at texts no sooner
        got = next(filter(None, map(_first_fault, files)), None) or one_line(error)
        raise bad(argument, "text in UTF-8", got, "Convert it to UTF-8.") from error
    if not len(kept):
        got = f"{len(made):,} empty rows and no other" if len(made) else "no rows"
        raise bad(argument, f"rows of {_WORDS[kind]} with text to learn", got, "Check the files and their columns.")
    if len(kept) < len(made):
        message = f"train: {argument}: {len(made) - len(kept):,} of {len(made):,} rows are empty and are left out."
        warnings.warn(message, NeuronMoEWarning, stacklevel=2)
    return kind, kept.remove_columns(EMPTY)


_CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.ENOENT, errno.ENOTDIR)
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
    raise bad(argument, f"data with columns {', or '.join(known)} for method {method}", ", ".join(columns), fix)


def _from_hub(options: Options, split: str) -> Dataset:
    data = options.data
    try:
        return load_dataset(data.dataset, data.dataset_config or None, split=split)
    except (DatasetsError, ValueError, OSError) as error:
        got = f"{data.dataset!r}, which cannot be loaded: {one_line(error)}"
        fix = "Correct dataset, dataset_config or the split; without a network name local train_files."
        raise bad("dataset", f"a dataset of the hub with the split {split!r}", got, fix) from error


def _from_files(files: list[str], argument: str) -> Dataset:
    kinds = sorted({Path(path).suffix for path in files})
    if len({BUILDERS.get(kind, kind) for kind in kinds}) != 1 or kinds[0] not in BUILDERS:
        got = " and ".join(kind or "no suffix" for kind in kinds)
        raise bad(argument, f"files of one kind among {', '.join(BUILDERS)}", got, "Convert them to one kind.")
    more: dict[str, Any] = {"sample_by": "document"} if kinds[0] == ".txt" else {}
    if found := next(filter(None, map(_null_row, files)), None) if BUILDERS[kinds[0]] == "json" else None:
        raise bad(argument, f"readable {kinds[0]} files", found, "Remove it.")
    try:
        with quiet_datasets():
            return load_dataset(BUILDERS[kinds[0]], data_files=[*map(glob.escape, files)], split="train", **more)
    except (DatasetsError, ValueError, OSError, StopIteration) as error:  # the last where all files are empty
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE and error.filename not in files:
            cache, fix = datasets.config.HF_DATASETS_CACHE, "Name another in the environment: HF_HOME=FOLDER."
            got = f"{cache} ({error.strerror})"
            raise bad("HF_DATASETS_CACHE", "a folder that datasets can write to", got, fix) from error
        found = next(filter(None, map(_first_fault, files)), None) if BUILDERS[kinds[0]] == "json" else None
        if not found and len({*(columns := {path: _columns(path, BUILDERS[kinds[0]]) for path in files}).values()}) > 1:
            first, other = files[0], next(path for path in files if columns[path] != columns[files[0]])
            got = f"{', '.join(columns[first])} in {first} and {', '.join(columns[other])} in {other}"
            raise bad(argument, "files with the same columns", got, "Rename or remove columns.") from error
        got = found or f"{', '.join(files)}, which cannot be read: {one_line(error.__cause__ or error)}"
        raise bad(argument, f"readable {kinds[0]} files", got, "Correct the file.") from error


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the log and the progress bars of `datasets`, which report a damaged file before the error here does."""
    verbosity, shows_bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shows_bars:
            datasets.enable_progress_bars()


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """The lines with something in them, and their numbers."""
    with open(path, "rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _columns(path: str, builder: str) -> tuple[str, ...]:
    """The columns of a file's first row, sorted; none where it cannot be read."""
    try:
        rows = load_dataset(builder, data_files=[glob.escape(path)], split="train", streaming=True)
        return tuple(sorted(next(iter(rows))))
    except (DatasetsError, ValueError, OSError, StopIteration):
        return ()


def _null_row(path: str) -> str | None:
    """Return where a file has `null` for a row: some of them end the process in pyarrow's reader."""
    with open(path, "rb") as file:
        for number, line in enumerate(file if path.endswith(".jsonl") else [file.read(4096)], 1):
            if _NULL.match(line):
                return f"{path}, line {number}: null instead of a JSON object"
    return None


def _first_fault(path: str) -> str | None:
    """Return file, line and what is wrong there for the first line that is no JSON object; None where all are."""
    if not Path(path).read_bytes().strip():
        return f"{path}, which is empty"
    if not path.endswith(".jsonl") and _json_fault(Path(path).read_bytes()) is None:
        return None
    faults = ((number, _json_fault(line, dict)) for number, line in _lines(path))
    return next((f"{path}, line {number}: {fault}" for number, fault in faults if fault), None)


def _json_fault(content: bytes, kind: type = object) -> str | None:
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return one_line(error)
    return None if isinstance(value, kind) else f"{shown(value)} instead of a JSON object"


def _place(files: list[str], index: int) -> str:
    """Say where a row is: file and line where a line is a row."""
    if files and files[0].endswith(".txt"):
        return files[index]
    rest = index
    for path in files if files and files[0].endswith((".json", ".jsonl")) else ():
        lines = [number for number, line in _lines(path)]
        if not path.endswith(".jsonl") and _json_fault(Path(path).read_bytes()) is None:
            break  # one JSON value: its rows are no lines
        if rest < len(lines):
            return f"{path}, line {lines[rest]}"
        rest -= len(lines)
    return f"row {index + 1:,}" + (f" of {files[0]}" if len(files) == 1 else "")


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

"""Where rows come from: files or a dataset of the hub. Values are those that are written there, none is converted.

`datasets` guesses types of JSON and CSV: it makes times of strings that look like dates, and numbers of digits. So JSON
is kept as text and read row by row, and every column of CSV is text.
"""

from __future__ import annotations

import bisect
import errno
import glob
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas
import pyarrow
import pyarrow.parquet
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError
from pandas.errors import ParserWarning

from hf_neuron_moe.errors import NeuronMoEError
from hf_neuron_moe.finetune.data_rows import FREE, shown
from hf_neuron_moe.finetune.train_options import Options, bad, one_line

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text", ".parquet": "parquet"}
"""Which files go together."""

PACKAGE = "package:"
_JSON = "text"  # the column that `datasets` gives lines of text
_CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.ENOENT, errno.ENOTDIR)


class Source(NamedTuple):
    """Rows of some files or of a dataset."""

    rows: Dataset
    columns: list[str]
    place: Callable[[int], str]
    """Says where a row is: file and line where a line is a row."""
    row_of: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Returns the columns of one of `rows`."""
    is_json: bool = False
    """Whether rows are text in which anything may stand."""


def files_of(patterns: Sequence[str], argument: str) -> list[str]:
    """Return the files that names and globs stand for, those of each glob sorted.

    A name may begin with ``package:`` for the folder of this package.
    """
    named = [pattern.replace(PACKAGE, f"{Path(__file__).resolve().parents[1]}/", 1) for pattern in patterns]
    files = [path for pattern in named for path in sorted(glob.glob(pattern)) or [pattern]]
    missing = [path for path in files if not os.path.isfile(path)]  # also of a name that is too long
    if missing:
        folders = [path for path in missing if os.path.isdir(path)]
        got, fix = f"nothing at {', '.join(missing)}", "Correct the path."
        if folders:
            got, fix = f"the folder {folders[0]}", f"Name its files, for example {Path(folders[0]) / '*.jsonl'}."
        raise bad(argument, "existing files", got, fix)
    return files


def from_hub(options: Options, split: str) -> Source:
    """Return a dataset of the hub, or one whose loader `datasets` has."""
    data = options.data
    try:
        rows = load_dataset(data.dataset, data.dataset_config or None, split=split)
    except (DatasetsError, ValueError, OSError) as error:
        got = f"{data.dataset!r}, which cannot be loaded: {one_line(error)}"
        fix = "Correct dataset, dataset_config or the split; without a network name local train_files."
        raise bad("dataset", f"a dataset of the hub with the split {split!r}", got, fix) from error
    return Source(rows, rows.column_names, lambda index: f"row {index + 1:,}")


def from_files(files: list[str], argument: str) -> Source:
    """Return the rows of files of one kind.

    Raises:
        ConfigError: they are of several kinds, damaged, or have other columns than each other.
    """
    kinds = sorted({Path(path).suffix for path in files})
    if len({BUILDERS.get(kind, kind) for kind in kinds}) != 1 or kinds[0] not in BUILDERS:
        got = " and ".join(kind or "no suffix" for kind in kinds)
        raise bad(argument, f"files of one kind among {', '.join(BUILDERS)}", got, "Convert them to one kind.")
    builder, expected = BUILDERS[kinds[0]], f"readable {kinds[0]} files"
    try:
        with quiet_datasets():
            if builder == "json":
                return _from_json([_scanned(path) for path in files])
            if builder == "text":
                return _loaded("text", files, files.__getitem__, sample_by="document", encoding="utf-8-sig")
            place = (lambda index: f"row {index + 1:,} of {files[0]}") if len(files) == 1 else _row
            if builder == "csv":
                return _from_csv(files, argument, place)
            return _loaded(builder, files, place)
    except NeuronMoEError:
        raise
    except _DamagedError as error:
        raise bad(argument, expected, str(error), "Correct the file.") from error
    except (DatasetsError, pyarrow.ArrowException, ValueError, OSError, StopIteration, ParserWarning) as error:
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE and error.filename not in files:
            cache, fix = datasets.config.HF_DATASETS_CACHE, "Name another in the environment: HF_HOME=FOLDER."
            got = f"{cache} ({error.strerror})"
            raise bad("HF_DATASETS_CACHE", "a folder that datasets can write to", got, fix) from error
        if isinstance(error.__cause__ or error, UnicodeDecodeError):
            found = next(filter(None, map(_undecodable, files)), one_line(error))
            raise bad(argument, "text in UTF-8", found, "Convert it to UTF-8.") from error
        if builder == "parquet":
            try:
                _check_columns({path: _columns(path, builder) for path in files}, argument)
            except _DamagedError as damaged:
                raise bad(argument, expected, str(damaged), "Correct the file.") from error
        got = f"{', '.join(files)}, which cannot be read: {one_line(error.__cause__ or error)}"
        raise bad(argument, expected, got, "Correct the file.") from error


def _from_csv(files: list[str], argument: str, place: Callable[[int], str]) -> Source:
    """Return the rows of CSV files: texts, but for empty cells of columns that are none."""
    columns = {path: _columns(path, "csv") for path in files}
    _check_columns(columns, argument)
    texts = Features({name: Value("string") for name in columns[files[0]]})
    with warnings.catch_warnings():
        warnings.simplefilter("error", ParserWarning)  # of rows with more cells than there are columns
        found = _loaded("csv", files, place, features=texts, keep_default_na=False, index_col=False)
    return found._replace(row_of=lambda row: {name: row[name] or (None if name in FREE else "") for name in row})


def _row(index: int) -> str:
    return f"row {index + 1:,}"


def _loaded(builder: str, files: list[str], place: Callable[[int], str], **more: Any) -> Source:
    rows = load_dataset(builder, data_files=[*map(glob.escape, files)], split="train", **more)
    return Source(rows, rows.column_names, place)


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


class _DamagedError(Exception):
    """A file that cannot be read: which, and where."""


def _columns(path: str, builder: str) -> dict[str, str]:
    """Return the columns of a file and their types, in their order."""
    try:
        if builder == "csv":
            return dict.fromkeys(pandas.read_csv(path, nrows=0).columns, "text")
        return {field.name: str(field.type) for field in pyarrow.parquet.read_schema(path)}
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise _DamagedError(f"{path}, which cannot be read: {one_line(error)}") from error


def _check_columns(columns: Mapping[str, Mapping[str, str]], argument: str) -> None:
    if found := _difference(columns):
        fix = "Rename, reorder, convert or remove columns."
        raise bad(argument, "files with the same columns", found, fix)


def _difference(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Say in what the columns of files differ; an empty text where they do not."""
    (first, kept), *others = columns.items()
    for path, found in others:
        if names := [name for name in (*kept, *found) if (name in kept) != (name in found)][:3]:
            return f"{', '.join(repr(name) for name in names)} in only one of {first} and {path}"
        if name := next((name for name in kept if kept[name] != found[name]), None):
            return f"{name!r} of {kept[name]} in {first} and of {found[name]} in {path}"
        if list(kept) != list(found):
            return f"another order in {path} than in {first}"
    return ""


class _JsonFile(NamedTuple):
    """What a first look finds in a file of JSON objects, one per line or all in a list."""

    path: str
    columns: dict[str, None]
    lines: int  # or items of the list
    blank: list[int]  # lines without anything
    items: list[str] | None  # as JSON, of a file that is one value


def _scanned(path: str) -> _JsonFile:
    items = None if path.endswith(".jsonl") else _items_of(path)
    columns: dict[str, None] = {}
    blank, count = [], 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for count, line in enumerate(file if items is None else items, 1):
                if not line.strip():
                    blank.append(count - 1)
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _DamagedError(f"{path}, line {count}: {_words_of(error)}") from error
                if not isinstance(row, dict):
                    where = f"{path}, line {count}" if items is None else f"{path}, row {count}"
                    raise _DamagedError(f"{where}: {shown(row)} instead of a JSON object")
                columns |= dict.fromkeys(row)
    except UnicodeDecodeError as error:
        raise _DamagedError(_undecodable(path) or f"{path}: {one_line(error)}") from error
    return _JsonFile(path, columns, count, blank, items)


def _words_of(error: Exception) -> str:
    """Return what is wrong in a line of JSON, with its place in the line."""
    return f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else one_line(error)


def _items_of(path: str) -> list[str] | None:
    """Return the items of a file that is one JSON value, as JSON; None where it has one per line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and text.lstrip().startswith("["):
            raise _DamagedError(f"{path}, line {error.lineno}: {_words_of(error)}") from error
        return None
    return [json.dumps(item) for item in (value if isinstance(value, list) else [value])]


def _undecodable(path: str) -> str | None:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{path}, line {number}: {one_line(error)}"
    return None


def _from_json(files: Sequence[_JsonFile]) -> Source:
    """Return the rows of JSON files, each a text that `row_of` reads; a column that a row has not is None."""
    if not sum(file.lines - len(file.blank) for file in files):
        raise _DamagedError(f"{files[0].path}, which is empty")
    parts = []
    for are_lines, group in itertools.groupby(files, lambda file: file.items is None):
        some = list(group)
        if are_lines:
            names = [file.path for file in some]
            parts.append(_loaded("text", names, _row, encoding="utf-8-sig").rows)
        else:
            parts.append(Dataset.from_dict({_JSON: [item for file in some for item in file.items or ()]}))
    rows = concatenate_datasets(parts)
    starts = [0, *itertools.accumulate(file.lines for file in files)]
    blank = {start + number for start, file in zip(starts, files) for number in file.blank}
    kept = [index for index in range(len(rows)) if index not in blank] if blank else range(len(rows))
    columns = dict.fromkeys(name for file in files for name in file.columns)

    def place(index: int) -> str:
        number = bisect.bisect_right(starts, kept[index]) - 1
        file = files[number]
        return f"{file.path}, {'line' if file.items is None else 'row'} {kept[index] - starts[number] + 1:,}"

    def row_of(row: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(columns) | json.loads(row[_JSON])

    return Source(rows.select(kept) if blank else rows, list(columns), place, row_of, is_json=True)

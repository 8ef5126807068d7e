"""Data of every kind from files of every kind: what the model reads, and which tokens count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning
from hf_neuron_moe.finetune import read_options
from hf_neuron_moe.finetune.data import Data, load_data
from hf_neuron_moe.finetune.data_sources import Source
from hf_neuron_moe.finetune.model import load_tokenizer
from hf_neuron_moe.finetune.train_run import check, make_trainer
from tests.finetune.data_files import ANSWERS, CHATS, QUESTIONS, ROWS, words, write
from tests.refusals import refused


def loaded(model: Path, file: Path | str, folder: Path, **keys: Any) -> Data:
    options = read_options(words(model, Path(file), folder / "out", **keys))
    return load_data(options, load_tokenizer(options.model))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
@pytest.mark.parametrize("kind", ["messages", "conversations", "alpaca", "completion", "text"])
def test_kinds_are_told_by_their_columns(kind: str, suffix: str, models: dict[str, Path], tmp_path: Path) -> None:
    if suffix == ".csv" and kind in ("messages", "conversations"):
        return  # csv has no lists
    data = loaded(models["llama"], write(tmp_path, ROWS[kind], suffix), tmp_path)
    assert data.kind == kind and len(data.train) == len(QUESTIONS) and data.held_out is None
    row = data.train[3]
    if kind in ("messages", "conversations"):
        assert row == {"messages": CHATS[3]}
    elif kind == "alpaca":
        assert row["prompt"] == [{"role": "user", "content": f"Add\n\n{QUESTIONS[3]}"}]
        assert row["completion"] == [{"role": "assistant", "content": ANSWERS[3]}]
    else:
        assert row == ROWS[kind][3]


def test_text_files_are_documents_and_text_is_packed(models: dict[str, Path], tmp_path: Path) -> None:
    file = write(tmp_path, ROWS["text"], ".txt")
    options = read_options(words(models["llama"], file, tmp_path))
    data = load_data(options, load_tokenizer(options.model))
    assert data.train[:] == {"text": [file.read_text()]}
    assert (options.training.packing, options.training.packing_strategy) == (True, "bfd_split")
    options = read_options(words(models["llama"], file, tmp_path, packing=False))
    load_data(options, load_tokenizer(options.model))
    assert options.training.packing is False


def test_alpaca_without_a_template_is_text(models: dict[str, Path], tmp_path: Path) -> None:
    row = loaded(models["plain"], write(tmp_path, ROWS["alpaca"]), tmp_path).train[3]
    assert row["prompt"].endswith(f"### Input:\n{QUESTIONS[3]}\n### Response:\n") and row["completion"] == ANSWERS[3]


def test_evaluation_data_is_a_share_or_has_files(models: dict[str, Path], tmp_path: Path) -> None:
    file = write(tmp_path, ROWS["messages"])
    data = loaded(models["llama"], file, tmp_path, eval_share=0.25, max_train_samples=3)
    assert data.held_out is not None and data.held_out["messages"][:] == CHATS[6:]
    assert data.train["messages"][:] == CHATS[:3]
    data = loaded(models["llama"], file, tmp_path, eval_files=file, max_eval_samples=2)
    assert data.held_out is not None and (len(data.train), len(data.held_out)) == (8, 2)


def test_hub_datasets_are_loaded_by_name_and_split(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(name: str, config: str | None, *, split: str) -> Dataset:
        asked.append((name, config, split))
        if name != "me/chats":
            raise ValueError("no such dataset.")
        return Dataset.from_list(ROWS["messages"])

    monkeypatch.setattr("hf_neuron_moe.finetune.data_sources.load_dataset", load)
    given = words(models["llama"], Path("none"), tmp_path, dataset="me/chats", eval_split="test", dataset_config="big")
    del given[given.index("--train_files") : given.index("--train_files") + 2]
    options = read_options(given)
    data = load_data(options, load_tokenizer(options.model))
    assert asked == [("me/chats", "big", "train"), ("me/chats", "big", "test")] and len(data.train) == 8
    options = read_options([*given, "--dataset", "you/chats"])
    with refused(ConfigError, "dataset", got="'you/chats', which cannot be loaded: no such dataset"):
        load_data(options, load_tokenizer(options.model))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "keys", "counted"),
    [
        ("messages", {"assistant_only_loss": True}, f"{ANSWERS[3]}<|end|>"),
        ("conversations", {}, f"<user>{QUESTIONS[3]}\n<assistant>{ANSWERS[3]}<|end|>"),
        ("alpaca", {}, f"{ANSWERS[3]}<|end|>"),
        ("completion", {}, f"{ANSWERS[3]}<|end|>"),
        ("completion", {"completion_only_loss": False}, f"{QUESTIONS[3]}{ANSWERS[3]}<|end|>"),
        ("text", {"packing": False}, f"{QUESTIONS[3]} {ANSWERS[3]}<|end|>"),
    ],
)
def test_losses_count_the_tokens_of_the_answers(
    kind: str, keys: dict[str, Any], counted: str, models: dict[str, Path], tmp_path: Path
) -> None:
    options = read_options(words(models["llama"], write(tmp_path, ROWS[kind]), tmp_path / "out", **keys))
    tokenizer, data = check(options)
    trainer = make_trainer(options, tokenizer, data)
    row = trainer.train_dataset[3]
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == counted
    assert QUESTIONS[3] in tokenizer.decode(row["input_ids"]).replace("\n\n", " ")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("mixtral", "sdpa"), ("qwen3_moe", "sdpa")],
)
def test_packed_documents_do_not_see_each_other(
    family: str, attention: str, models: dict[str, Path], tmp_path: Path
) -> None:
    keys = {"packing": True, "max_length": 256, "attn_implementation": attention}
    options = read_options(words(models[family], write(tmp_path, ROWS["messages"]), tmp_path / "out", **keys))
    trainer = make_trainer(options, *check(options))
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) == len(CHATS) > len(trainer.train_dataset)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    model = trainer.model.eval()
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits[0]
        alone = torch.cat([model(ids[None]).logits[0] for ids in batch["input_ids"][0].tensor_split(starts[1:])])
        joined = model(batch["input_ids"]).logits[0]
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    assert (joined - alone).abs().max() > 1e-2, "one that sees the documents before it computes something else"


def test_messages_keep_what_else_they_have(models: dict[str, Path], tmp_path: Path) -> None:
    plain, called = CHATS[0], [*CHATS[1], {"role": "tool", "content": "2", "name": "add"}]
    rows = [{"messages": plain}] * 1500 + [{"messages": called}]  # more than datasets writes at once
    kept = loaded(models["llama"], write(tmp_path, rows), tmp_path).train
    assert kept[1500]["messages"][2]["name"] == "add" and kept[0]["messages"][0]["content"] == QUESTIONS[0]


def test_some_rows_may_have_tools_and_options_of_the_template(models: dict[str, Path], tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
    called = [
        CHATS[0][0],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]},
        {"role": "tool", "name": "add", "content": "0"},
        CHATS[0][1],
    ]
    rows: list[dict[str, Any]] = [
        {"messages": called, "tools": [tool], "chat_template_kwargs": {"brief": True}},
        {"messages": CHATS[1]},
    ]
    for first, other in (rows, rows[::-1]):
        options = read_options(words(models["llama"], write(tmp_path, [first, other]), tmp_path / "out"))
        trainer = make_trainer(options, *check(options))
        assert len(trainer.train_dataset) == 2
    asked = write(tmp_path, [{"messages": called[:2]}])  # a call of a tool is an answer
    assert len(loaded(models["llama"], asked, tmp_path).train) == 1
    as_json = write(tmp_path, [rows[0] | {"tools": json.dumps([tool])}])
    assert len(loaded(models["llama"], as_json, tmp_path).train) == 1


def test_names_of_files_are_no_patterns_where_they_exist(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "rows [1].jsonl"
    write(tmp_path, ROWS["text"]).rename(file)
    assert len(loaded(models["llama"], file, tmp_path).train) == 8


def test_evaluation_files_go_with_a_dataset_of_the_hub(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Dataset.from_list(ROWS["text"])
    source = Source(rows, rows.column_names, str)
    monkeypatch.setattr("hf_neuron_moe.finetune.data.from_hub", lambda options, split: source)
    given = words(models["llama"], write(tmp_path, ROWS["text"][:3]), tmp_path / "out", dataset="own/rows")
    given[given.index("--train_files")] = "--eval_files"
    options = read_options(given)
    found = load_data(options, load_tokenizer(options.model))
    assert len(found.train) == 8 and found.held_out is not None and len(found.held_out) == 3


def test_empty_rows_are_left_out_with_a_warning(models: dict[str, Path], tmp_path: Path) -> None:
    for kind, empty in (
        ("text", {"text": " \n"}),
        ("messages", {"messages": CHATS[0][:1]}),
        ("completion", {"prompt": "x", "completion": ""}),
        ("alpaca", {"instruction": "", "input": "", "output": "x"}),
    ):
        file = write(tmp_path, [*ROWS[kind], empty, empty])
        with pytest.warns(NeuronMoEWarning, match="train_files: 2 of 10 rows are empty and are left out"):
            assert len(loaded(models["llama"], file, tmp_path).train) == 8
        with refused(ConfigError, "train_files", got="2 empty rows and no other"):
            loaded(models["llama"], write(tmp_path, [empty, empty]), tmp_path)
    blank = ROWS["preference"][0] | {"rejected": [{"role": "assistant", "content": " "}]}
    with pytest.warns(NeuronMoEWarning, match="train_files: 1 of 9 rows are empty and are left out"):
        data = loaded(models["llama"], write(tmp_path, [*ROWS["preference"], blank]), tmp_path, method="dpo")
    assert len(data.train) == 8


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        ([{"text": "a"}, {"text": None}], "null in column 'text' (FILE, line 2)"),
        ([{"text": 7}], "int '7' in column 'text' (FILE, line 1)"),
        ([{"text": "a"}, {"text": 5}], "int '5' in column 'text' (FILE, line 2)"),
        ([{"text": ["a" * 99]}], f"list {str(['a' * 99])[:60]!r} in column 'text' (FILE, line 1)"),
        ([{"messages": "hello"}], "str 'hello' in column 'messages' (FILE, line 1)"),
        ([ROWS["messages"][0], {"messages": []}], "list '[]' in column 'messages' (FILE, line 2)"),
        ([{"messages": [{"role": "asistant", "content": "a"}]}], "role str 'asistant' in message 1 of column"),
        ([{"messages": [{"role": "user", "content": 3}]}], "content int '3' in message 1 of column 'messages' (FILE"),
        ([{"messages": ["hi"]}], "str 'hi' in message 1"),
        ([{"conversations": [{"from": "gpt"}]}], "content null in message 1 of column 'conversations'"),
        ([{"prompt": "a", "completion": None}], "null in column 'completion'"),
        ([{"prompt": "a", "completion": CHATS[0]}], "strings and lists of messages in one row"),
        ([{"instruction": None, "output": "b"}], "null in column 'instruction'"),
        ([ROWS["messages"][0] | {"tools": "nope"}], "str 'nope' in column 'tools' (FILE, line 1)"),
        ([ROWS["messages"][0] | {"tools": 5}], "int '5' in column 'tools' (FILE, line 1)"),
        ([ROWS["messages"][0] | {"chat_template_kwargs": "x"}], "str 'x' in column 'chat_template_kwargs'"),
    ],
)
def test_what_is_wrong_in_a_row_names_its_line(
    rows: list[dict[str, Any]], got: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write(tmp_path, rows)
    with refused(ConfigError, "train_files", got=got.replace("FILE", str(file))):
        loaded(models["llama"], file, tmp_path)


def test_answers_to_compare_begin_alike(models: dict[str, Path], tmp_path: Path) -> None:
    file = write(tmp_path, [{"chosen": CHATS[0], "rejected": [CHATS[0][0], CHATS[1][1]]}] * 2)
    assert len(loaded(models["llama"], file, tmp_path, method="dpo").train) == 2
    file = write(tmp_path, [{"chosen": CHATS[0], "rejected": CHATS[0][1:]}])
    got = f"chosen and rejected that do not begin with the same message ({file}, line 1)"
    with refused(ConfigError, "train_files", got=got):
        loaded(models["llama"], file, tmp_path, method="dpo")


@pytest.mark.parametrize(("column", "names"), [("messages", "assistant, tool"), ("conversations", "tool, human, gpt")])
def test_roles_that_may_be_written_are_those_of_the_column(
    column: str, names: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write(tmp_path, [{column: [{"role": "robot", "content": "a"}]}])
    with refused(ConfigError, "train_files", f"Write one of .*{names}") as caught:
        loaded(models["llama"], file, tmp_path)
    assert ("Did you mean 'bot'?" in str(caught.value)) == (column == "conversations")


def test_lines_are_counted_over_files_and_blank_lines(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    (tmp_path / "b.jsonl").write_text('\n\n{"text": null}\n')
    with refused(ConfigError, "train_files", rf"\({tmp_path}/b\.jsonl, line 3\)"):
        loaded(models["llama"], tmp_path / "*.jsonl", tmp_path)
    file = write(tmp_path, [{"text": "a"}, {"text": None}], ".parquet")
    with refused(ConfigError, "train_files", rf"\(row 2 of {file}\)"):
        loaded(models["llama"], file, tmp_path)


def test_damaged_files_and_unknown_columns(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for text, got in (
        ('{"text": "a"}\n{"text": cut\n', f"{file}, line 2: Expecting value"),
        ("", f"{file}, which is empty"),
        ('{"text": "a"}\n[1]\n', f"{file}, line 2: list '[1]' instead of a JSON object"),
        ('{"text": "a"}\nnull\n', f"{file}, line 2: null instead of a JSON object"),  # at the start pyarrow crashes
        (b'{"text": "a"}\n{"text": "caf\xe9"}\n', f"{file}, line 2: 'utf-8' codec can't decode"),
    ):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with refused(ConfigError, "train_files", got=got):
            loaded(models["llama"], file, tmp_path)
    (tmp_path / "null.json").write_text('[null, {"text": "a"}]')
    with refused(ConfigError, "train_files", got=f"{tmp_path}/null.json, row 1: null instead"):
        loaded(models["llama"], tmp_path / "null.json", tmp_path)
    file.write_text('{"texts": "a"}\n')
    with refused(ConfigError, "train_files", r"dataset_text_field\. Did you mean 'texts'\?", got="texts"):
        loaded(models["llama"], file, tmp_path)
    assert loaded(models["llama"], file, tmp_path, dataset_text_field="texts").kind == "text"
    with refused(ConfigError, "dataset_text_field", got="texts"):
        loaded(models["llama"], file, tmp_path, dataset_text_field="body")
    with refused(ConfigError, "train_files", "chosen and rejected", got="texts"):
        loaded(models["llama"], file, tmp_path, method="dpo")
    (tmp_path / "b.txt").write_text("a")
    with refused(ConfigError, "train_files", got=".jsonl and .txt"):
        loaded(models["llama"], tmp_path / "?.*", tmp_path)


def test_lines_and_lists_of_json_are_one_kind(models: dict[str, Path], tmp_path: Path) -> None:
    lines, whole = write(tmp_path, ROWS["messages"]), tmp_path / "whole.json"
    whole.write_text(json.dumps(ROWS["messages"]), encoding="utf-8")
    one = loaded(models["llama"], lines, tmp_path).train
    both = loaded(models["llama"], lines, tmp_path, train_files=[str(lines), str(whole)]).train
    assert [*both] == [*one, *one]


OTHERS: list[tuple[str, list[dict[str, Any]], str]] = [
    (".csv", [{"text": "a", "more": "b"}], "'year', 'more' in only one of {one} and {other}"),
    (".parquet", [{"text": "a", "more": "b"}], "'year', 'more' in only one of {one} and {other}"),
    (".parquet", [{"text": "a", "year": "b"}], "'year' of int64 in {one} and of string in {other}"),
    (".csv", [{"year": 1, "text": "a"}], "another order in {other} than in {one}"),
]


@pytest.mark.parametrize(("suffix", "rows", "got"), OTHERS)
def test_files_with_other_columns_are_both_named(
    suffix: str, rows: list[dict[str, Any]], got: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    one, other = write(folders[0], [{"text": "a", "year": 1}], suffix), write(folders[1], rows, suffix)
    with refused(ConfigError, "train_files", got=got.format(one=one, other=other)):
        loaded(models["llama"], one, tmp_path, train_files=[str(one), str(other)])


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_damaged_file_is_not_one_with_other_columns(suffix: str, models: dict[str, Path], tmp_path: Path) -> None:
    whole, cut = write(tmp_path, ROWS["text"], suffix), tmp_path / f"cut{suffix}"
    cut.write_bytes(b"" if suffix == ".csv" else b"x")
    with refused(ConfigError, "train_files", got=f"{cut}, which cannot be read"):
        loaded(models["llama"], whole, tmp_path, train_files=[str(whole), str(cut)])


STRINGS = ["2024-01-01", "7", "None", "1e5", "NaN", "true", "2024-01-01T10:00:00Z"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("value", STRINGS)
def test_strings_stay_what_they_are(suffix: str, value: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Loaders make times and numbers of columns in which all strings look like them."""
    file = write(tmp_path, [{"prompt": value, "completion": value}] * 3, suffix)
    assert loaded(models["llama"], file, tmp_path).train[1] == {"prompt": value, "completion": value}


def test_a_number_among_strings_is_named_with_its_line(models: dict[str, Path], tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "1"}, {"role": "assistant", "content": answer}] for answer in ("one", 5)]
    file = write(tmp_path, [{"messages": chat} for chat in chats])
    with refused(
        ConfigError, "train_files", got=rf"content int '5' in message 2 of column 'messages' ({file}, line 2)"
    ):
        loaded(models["llama"], file, tmp_path)


def test_rows_of_json_may_have_columns_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*ROWS["messages"], ROWS["messages"][0] | {"tools": None, "note": [1, {"a": "b"}]}]
    assert len(loaded(models["llama"], write(tmp_path, rows), tmp_path).train) == len(rows)
    (tmp_path / "mark.jsonl").write_text("\ufeff" + json.dumps({"text": "a"}) + "\r\n\r\n", encoding="utf-8")
    assert loaded(models["llama"], tmp_path / "mark.jsonl", tmp_path).train[:] == {"text": ["a"]}


def _tool(name: str, kind: object = "string") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {"type": kind}}}}}


LATE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tools": ({"tools": [_tool("a")]}, {"tools": [_tool("b", ["string", "null"])]}),
    "tools as text": ({"tools": json.dumps([_tool("a")])}, {"tools": [_tool("b")]}),
    "options": ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"b": "1"}}),
    "a key": ({}, {"messages": [*CHATS[1], {"role": "user", "content": "b", "weight": 0}, CHATS[0][1]]}),
    "parts": ({}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}, CHATS[0][1]]}),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("late", [1, 1200])  # datasets takes the types of the first 1000 rows
def test_rows_are_what_the_file_has_wherever_they_differ(
    name: str, late: int, models: dict[str, Path], tmp_path: Path
) -> None:
    one, other = ({"messages": CHATS[0]} | more for more in LATE[name])
    kept = loaded(models["llama"], write(tmp_path, [one] * late + [other]), tmp_path).train
    for found, row in ((kept[0], one), (kept[late], other)):
        tools = row.get("tools")
        assert found == (row | {"tools": json.loads(tools)} if isinstance(tools, str) else row)  # TRL reads both


PAIRS = [{"prompt": "i", "completion": "o"}, {"prompt": CHATS[0][:1], "completion": CHATS[0][1:]}]


@pytest.mark.parametrize("late", [1, 1200])
@pytest.mark.parametrize(("rows", "now", "before"), [(PAIRS, "list", "strings"), (PAIRS[::-1], "string", "lists")])
def test_pairs_of_both_forms_are_refused_with_the_line(
    rows: list[dict[str, Any]], now: str, before: str, late: int, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write(tmp_path, [rows[0]] * late + [rows[1]])
    got = f"a {now} in column 'prompt', where rows before have {before} ({file}, line {late + 1:,})"
    with refused(ConfigError, "train_files", got=got):
        loaded(models["llama"], file, tmp_path)


ANSWER = CHATS[0][1]
UNSTORED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [CHATS[0][0], ANSWER | {"id": 10**30}]}, "a number of more than 64 bits in column 'messages'"),
    ({"messages": [CHATS[0][0], ANSWER | {"id": 2**63}]}, "a number of more than 64 bits in column 'messages'"),
    ({"messages": CHATS[0], "chat_template_kwargs": {"a": 10**30}}, "a number of more than 64 bits in column 'chat"),
    ({"messages": [CHATS[0][0], ANSWER | {"content": "\ud83d"}]}, "half of a surrogate pair"),
    ({"messages": [CHATS[0][0], ANSWER | {"content": 2**62}]}, "content int"),
]


@pytest.mark.parametrize(("row", "got"), UNSTORED)
def test_what_cannot_be_stored_is_refused_with_its_line(
    row: dict[str, Any], got: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write(tmp_path, [{"messages": CHATS[0], "chat_template_kwargs": {}}, row])
    with refused(ConfigError, "train_files", rf"\({file}, line 2\)", got=got):
        loaded(models["llama"], file, tmp_path)


TABLES = [
    ("instruction,output,tools,chat_template_kwargs\ni,o,,\n", ""),
    ("text\n", "corresponds to no data"),
    ("instruction,output\ni,o,extra\nj,k,l\n", "Length of header"),
]


@pytest.mark.parametrize(("text", "says"), TABLES)
def test_tables_with_empty_cells_no_rows_or_too_many_cells(
    text: str, says: str, models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    if says:
        with refused(ConfigError, "train_files", says):
            loaded(models["llama"], tmp_path / "a.csv", tmp_path)
        return
    (row,) = loaded(models["llama"], tmp_path / "a.csv", tmp_path).train
    assert row["completion"] == [{"role": "assistant", "content": "o"}]
    assert (row["tools"], row["chat_template_kwargs"]) == (None, {})


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
def test_text_in_another_encoding_is_named_with_its_line_and_marks_are_left_out(
    suffix: str, models: dict[str, Path], tmp_path: Path
) -> None:
    whole, latin = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    lines = ['{"text": "x"}', '{"text": "caf\u00e9"}'] if suffix == ".jsonl" else ["text", "caf\u00e9"]
    whole.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    latin.write_text("\n".join(lines), encoding="latin-1")
    kept = loaded(models["llama"], whole, tmp_path).train["text"][:]
    assert kept == {".txt": ["text\ncaf\u00e9"], ".csv": ["caf\u00e9"], ".jsonl": ["x", "caf\u00e9"]}[suffix]
    with refused(ConfigError, "train_files", got=f"{latin}, line 2: 'utf-8' codec can't decode byte 0xe9"):
        loaded(models["llama"], whole, tmp_path, train_files=[str(whole), str(latin)])


def test_a_damaged_list_names_the_line_of_the_damage(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n{"text": "a"},\n{"text": b},\n]', encoding="utf-8")
    with refused(ConfigError, "train_files", got=f"{tmp_path}/a.json, line 3: Expecting value at character 10"):
        loaded(models["llama"], tmp_path / "a.json", tmp_path)


def test_parquet_files_may_differ_in_what_casts(models: dict[str, Path], tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.parquet" for number in range(2)]
    for file, rows in zip(files, ([{"text": "a", "x": 1}], [{"x": None, "text": "b"}])):
        Dataset.from_list(rows).to_parquet(file)
    kept = loaded(models["llama"], files[0], tmp_path, train_files=[str(file) for file in files]).train
    assert kept["text"][:] == ["a", "b"]


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_data(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with refused(ConfigError, "HF_DATASETS_CACHE", "HF_HOME=FOLDER", got=str(tmp_path / "file" / "cache")):
        loaded(models["llama"], write(tmp_path, ROWS["messages"]), tmp_path)


def test_chats_need_a_template_and_marks_for_answers(models: dict[str, Path], tmp_path: Path) -> None:
    file = write(tmp_path, ROWS["messages"])
    with refused(ConfigError, "model", "chat_template_path", got="one without"):
        loaded(models["plain"], file, tmp_path)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for keys, argument in (({}, None), ({"assistant_only_loss": True}, "assistant_only_loss")):
        options = read_options(words(models["plain"], file, tmp_path, chat_template_path=template, **keys))
        if argument is None:
            assert check(options)[1].kind == "messages"
            continue
        with refused(ConfigError, argument, "generation"):
            check(options)
    for text, got, fix in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate", "Correct the messages, or"),
        ("{{ 1 / 0 }}", "division by zero", "Correct the messages, or the template"),
        ("{{ messages }", "unexpected '}'", "Correct the template"),
    ):
        template.write_text(text)
        with refused(ConfigError, "train_files", fix, got=f"messages that the chat template refuses: {got}"):
            check(read_options(words(models["plain"], file, tmp_path, chat_template_path=template)))
    template.write_bytes(b"caf\xe9")
    with refused(ConfigError, "chat_template_path", "UTF-8", got=f"{template}: 'utf-8' codec"):
        check(read_options(words(models["plain"], file, tmp_path, chat_template_path=template)))
    with refused(ConfigError, "train_files", "chat_template_path", got="messages for a tokenizer without"):
        loaded(models["plain"], write(tmp_path, ROWS["preference"]), tmp_path, method="dpo")
    write(tmp_path, ROWS["messages"])
    with refused(ConfigError, "assistant_only_loss", got="rows of text"):
        loaded(models["llama"], write(tmp_path, ROWS["text"]), tmp_path, assistant_only_loss=True)
    with refused(ConfigError, "completion_only_loss", got="rows of messages"):
        loaded(models["llama"], write(tmp_path, ROWS["messages"]), tmp_path, completion_only_loss=True)

"""Rows of a dataset in the forms that TRL's trainers take; each is checked, and what is wrong names its row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from hf_neuron_moe.errors import nearest

EMPTY = "_empty"
"""Column that marks rows without text to learn from."""

KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "sft": {
        "messages": ("messages",),
        "conversations": ("conversations",),
        "alpaca": ("instruction", "output"),
        "completion": ("prompt", "completion"),
    },
    "dpo": {"preference": ("chosen", "rejected")},
}
"""By method, the kinds of data and the columns that tell them; the first that fits counts. Then plain text."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}


class BadRow(Exception):  # noqa: N818 - it never leaves the package
    """A row that cannot be trained on: what came, and the fix."""

    def __init__(self, got: str, fix: str) -> None:
        super().__init__(got, fix)
        self.got, self.fix = got, fix


@dataclass(frozen=True)
class Reader:
    """Turns a row into the columns that TRL reads."""

    kind: str
    text_field: str
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row in TRL's columns, with a mark where it is empty."""
        made: dict[str, Any] = _READERS[self.kind](self, row)
        for name in ("tools", "chat_template_kwargs"):
            if name in row:  # in all rows or in none, as datasets needs it
                made[name] = row[name] if row[name] is not None or name == "tools" else {}
        return made

    def text(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Plain text."""
        value = _string(row, self.text_field, "Write a string in every row, or name a column: dataset_text_field.")
        return {self.text_field: value, EMPTY: not value.strip()}

    def messages(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A chat with ``role`` and ``content``, or ShareGPT's ``from`` and ``value``."""
        column = "messages" if self.kind == "messages" else "conversations"
        messages = _messages(row, column)
        answers = [message for message in messages if message["role"] == "assistant"]
        empty = not any(_has_content(message) for message in answers)
        if not empty:
            self._render(messages, row)
        return {"messages": messages, EMPTY: empty}

    def alpaca(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Instruction, perhaps an input, and output; a chat of two turns where the tokenizer has a template."""
        task, answer = (_string(row, name, "Write a string in every row.") for name in ("instruction", "output"))
        more = str(row.get("input") or "")
        empty = not task.strip() or not answer.strip()
        if self.tokenizer.chat_template is None:
            parts = ["### Instruction:", task, *(("### Input:", more) if more else ()), "### Response:", ""]
            return {"prompt": "\n".join(parts), "completion": answer, EMPTY: empty}
        prompt = [{"role": "user", "content": f"{task}\n\n{more}" if more else task}]
        completion = [{"role": "assistant", "content": answer}]
        self._render(prompt + completion, row)
        return {"prompt": prompt, "completion": completion, EMPTY: empty}

    def pairs(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt and its completion, or two answers to compare: strings, or lists of messages."""
        names = ["prompt", "completion"] if self.kind == "completion" else ["chosen", "rejected"]
        if self.kind == "preference" and "prompt" in row:
            names.insert(0, "prompt")
        made: dict[str, Any] = {}
        for name in names:
            if isinstance(row[name], list):
                made[name] = _messages(row, name)
            else:
                made[name] = _string(row, name, "Write a string or a list of messages in every row.")
        if len({type(value) for value in made.values()}) > 1:
            raise BadRow("strings and lists of messages in one row", "Write all of them in one of these forms.")
        answers = [made[name] for name in names if name != "prompt"]
        if isinstance(answers[0], list):
            if self.kind == "preference" and "prompt" not in made and answers[0][0] != answers[1][0]:
                fix = "Begin both with the messages of the prompt, or write these in a column prompt."
                raise BadRow("chosen and rejected that do not begin with the same message", fix)
            for answer in answers:
                self._render([*made.get("prompt", []), *answer], row)
        return made | {EMPTY: not all(map(_is_filled, answers))}

    def _render(self, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> None:
        if self.tokenizer.chat_template is None:
            raise BadRow("messages for a tokenizer without a chat template", "Set chat_template_path: FILE.jinja.")
        more = row.get("chat_template_kwargs") or {}
        if not isinstance(more, Mapping):
            raise BadRow(f"{shown(more)} in column 'chat_template_kwargs'", "Write a mapping of names and values.")
        try:
            tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        except ValueError as error:
            raise BadRow(f"{shown(row['tools'])} in column 'tools'", "Write a list of tools, or it as JSON.") from error
        if tools is not None and not isinstance(tools, list):
            raise BadRow(f"{shown(tools)} in column 'tools'", "Write a list of tools, or it as JSON.")
        try:
            self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **more)
        except (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            which = "template" if isinstance(error, TemplateSyntaxError) else "messages, or the template"
            raise BadRow(f"messages that the chat template refuses: {why}", f"Correct the {which}.") from error


_READERS: dict[str, Callable[[Reader, Mapping[str, Any]], dict[str, Any]]] = {
    "text": Reader.text,
    "messages": Reader.messages,
    "conversations": Reader.messages,
    "alpaca": Reader.alpaca,
    "completion": Reader.pairs,
    "preference": Reader.pairs,
}


FREE = ("tools", "chat_template_kwargs")
"""Columns that may hold anything that JSON has."""

_PAIRS = ("prompt", "completion", "chosen", "rejected")


def is_messages(column: str, value: object) -> bool:
    """Whether a column of a made row has messages."""
    return isinstance(value, list) and column not in FREE


def is_plain(made: Mapping[str, Any]) -> bool:
    """Whether all messages of a made row have a role and a text, and no more."""
    lists = (value for column, value in made.items() if is_messages(column, value))
    return all(
        len(message) == 2 and isinstance(message.get("content"), str) and "role" in message
        for messages in lists
        for message in messages
    )


def check_values(made: Mapping[str, Any], forms: dict[str, type]) -> None:
    """Refuse what cannot be stored, and texts where rows before have messages; `forms` is filled with what these have.

    Raises:
        BadRow: names the column.
    """
    for column, value in made.items():
        if fault := _fault(value):
            raise BadRow(f"{fault} in column {column!r}", "Remove it.")
        if column in _PAIRS and type(value) is not forms.setdefault(column, type(value)):
            now, before = ("a list", "strings") if isinstance(value, list) else ("a string", "lists")
            got = f"{now} in column {column!r}, where rows before have {before}"
            raise BadRow(got, "Write all rows in one form: strings, or lists of messages.")


def _fault(value: object) -> str:
    """Say what in a value is no Unicode text, or is more than 64 bits long."""
    if isinstance(value, str):
        return "" if value.isascii() or _encodes(value) else "half of a surrogate pair, which is no character,"
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**63 else "a number of more than 64 bits"
    if isinstance(value, Mapping):
        return next(filter(None, map(_fault, (*value.keys(), *value.values()))), "")
    return next(filter(None, map(_fault, value)), "") if isinstance(value, list) else ""


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_chat(first: Mapping[str, Any]) -> bool:
    """Whether a row that a :class:`Reader` made holds messages."""
    return any(isinstance(first.get(name), list) for name in ("messages", "completion", "chosen"))


def _string(row: Mapping[str, Any], column: str, fix: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise BadRow(f"{shown(value)} in column {column!r}", fix)
    return value


def _messages(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """The messages of a row with ``role`` and ``content``, unchanged where they have these names."""
    value, fix = row[column], "Write a list of messages such as {role: user, content: Hello}."
    if not isinstance(value, list) or not value:
        raise BadRow(f"{shown(value)} in column {column!r}", fix)
    made = []
    for number, given in enumerate(value, 1):
        where = f"in message {number} of column {column!r}"
        if not isinstance(given, Mapping):
            raise BadRow(f"{shown(given)} {where}", fix)
        role = given.get("role") or given.get("from")
        content = given.get("content") if given.get("content") is not None else given.get("value")
        role = _SHAREGPT.get(str(role), role)
        if role not in ROLES:
            known = [*ROLES, *(_SHAREGPT if column == "conversations" else ())]
            near = nearest(str(role), known)
            raise BadRow(f"role {shown(role)} {where}", f"Write one of {', '.join(dict.fromkeys(known))}.{near}")
        if not isinstance(content, str | list) and not (content is None and given.get("tool_calls")):
            raise BadRow(f"content {shown(content)} {where}", "Write a string.")
        made.append({"role": role, "content": content})
    is_plain = all(message["role"] == given.get("role") for message, given in zip(made, value))
    return value if is_plain and column != "conversations" else made


def _has_content(message: Mapping[str, Any]) -> bool:
    return bool(str(message.get("content") or "").strip() or message.get("tool_calls"))


def _is_filled(answer: str | Sequence[Mapping[str, Any]]) -> bool:
    return bool(answer.strip()) if isinstance(answer, str) else any(map(_has_content, answer))


def shown(value: object) -> str:
    """Return a value with its type, cut to what a line has room for."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"

"""What is measured or trained on, checked: a model's weights, and a text that is cut into rows of tokens.

Legend: N rows, L tokens per row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.errors import ConfigError, NonFiniteWeightsError

TEXT_KEY, CHAT_KEY = "text", "messages"
"""The keys of a JSON line: its text, or a chat for the tokenizer's template."""

_PART_CHARACTERS = 1 << 20  # of a file given to the tokenizer at once


def check_finite(model: nn.Module) -> None:
    """Raise for weights that hold NaN or infinity."""
    for name, param in model.named_parameters():
        if not torch.isfinite(param).all():
            fix = "Find the checkpoint before they appeared."
            raise NonFiniteWeightsError.about(
                name, "finite", f"{int((~param.isfinite()).sum()):,} values that are not", fix
            )


def checked_rows(
    directory: Path, model: Any, text: Path, tokens: int, length: int, less: Callable[[int], str]
) -> tuple[Any, Tensor]:
    """Return a checkpoint's tokenizer and the rows of a text for its `model`, which may be on the meta device.

    Raises:
        ConfigError: as :func:`token_rows` does, and where rows or tokens are more than the model has.
    """
    from transformers import AutoTokenizer

    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and length > context:
        fix = f"Pass --length {context} or less."
        raise ConfigError.about("length", f"at most {context}, the positions of this model", length, fix)
    fix = "Save the model's tokenizer there with save_pretrained."
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        got = f"{directory}, of which transformers says: {' '.join(str(error).split()).rstrip('.')}"
        raise ConfigError.about("model", "a folder with a tokenizer", got, fix) from error
    rows_NL = token_rows(text, tokenizer, tokens, length, less=less)
    if (largest := int(rows_NL.max())) >= config.vocab_size:
        expected = f"a folder with a tokenizer of the model's {config.vocab_size:,} tokens"
        raise ConfigError.about("model", expected, f"token {largest:,} in {directory}", fix)
    return tokenizer, rows_NL


def token_rows(
    path: Path,
    tokenizer: Any,
    tokens: int,
    length: int,
    skip: int = 0,
    less: Callable[[int], str] = "--tokens {}".format,
) -> Tensor:
    """Return the first `tokens` tokens of a text behind the first `skip`, int64 ``[N, L]`` with L at most `length`.

    A ``.jsonl`` file has an object with the key ``"text"`` or ``"messages"`` in each line; any other file is plain
    text. `tokens` is a multiple of L, or it is rounded down to one. `less` names options that so many tokens do for.

    Raises:
        ConfigError: the file cannot be read, is empty, or has fewer tokens; the message says how many there are.
    """
    length = min(length, tokens)
    needed = tokens // length * length
    found: list[int] = []
    for part in _parts(path):
        found += _ids(part, tokenizer, path)
        if len(found) >= skip + needed:
            return torch.tensor(found[skip : skip + needed]).view(-1, length)
    words = less(len(found) - skip) if len(found) > skip else ""
    fix = f"Give a longer text, or {words}." if words else "Give a longer text: about four characters make a token."
    behind = f" behind the first {skip:,}" if skip else ""
    raise ConfigError.about("text", f"at least {needed:,} tokens long{behind}", f"{len(found):,} in {path}", fix)


def _ids(part: Any, tokenizer: Any, path: Path) -> list[int]:
    """Tokens of a text, or of a chat by the tokenizer's template."""
    if isinstance(part, str):
        # Texts are longer than the context that a tokenizer warns about; they are cut right here.
        ids: list[int] = tokenizer(part, verbose=False)["input_ids"]
        return ids
    from jinja2 import TemplateError

    fix = f'Take a model whose tokenizer has one, or lines with the key "{TEXT_KEY}".'
    if not tokenizer.chat_template:
        got = f"a chat in {path}, and a tokenizer without a chat template"
        raise ConfigError.about("text", "without chats, or for a tokenizer with a chat template", got, fix)
    try:
        ids = tokenizer.apply_chat_template(part, return_dict=True)["input_ids"]
    except (TemplateError, TypeError, ValueError) as error:
        got = f"a chat in {path}, of which the template says: {' '.join(str(error).split()).rstrip('.')}"
        fix = f'Give the tokenizer a chat template that takes it, or lines with the key "{TEXT_KEY}".'
        raise ConfigError.about("text", "made of chats of the tokenizer's template", got, fix) from error
    return ids


def _parts(path: Path) -> Iterator[Any]:
    """The texts of a file, each whole or in pieces that end with a line, and the chats."""
    fix = f'Give a plain text file, or a .jsonl file whose lines have the key "{TEXT_KEY}" or "{CHAT_KEY}".'
    try:
        with path.open(encoding="utf-8-sig") as file:
            if path.suffix != ".jsonl":
                rest = ""
                while more := file.read(_PART_CHARACTERS):
                    part, rest = _cut(rest + more) if len(more) == _PART_CHARACTERS else (rest + more, "")
                    yield part
                if rest:
                    yield rest
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, number, path, fix)
    except OSError as error:
        raise ConfigError.about("text", "a file that can be read", f"{path} ({error.strerror})", fix) from error
    except UnicodeDecodeError as error:
        got = f"{path} with the byte {error.object[error.start]:#x}, which is none there"
        raise ConfigError.about("text", "UTF-8", got, fix) from error


def _cut(text: str) -> tuple[str, str]:
    """Cut behind the last end of a line, or where there is none before the last space; the rest is to be continued."""
    place = text.rfind("\n") + 1 or max(text.rfind(" "), 0) or len(text)
    return text[:place], text[place:]


def _text_of(line: str, number: int, path: Path, fix: str) -> Any:
    try:
        entry = json.loads(line)
        text = entry.get(CHAT_KEY) if entry.get(TEXT_KEY) is None else entry[TEXT_KEY]
    except (ValueError, AttributeError, RecursionError):
        text = None
    if isinstance(text, str):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON may hold half a character
    elif not (isinstance(text, list) and text):
        expected = f'JSON objects with the key "{TEXT_KEY}" or "{CHAT_KEY}", one per line'
        raise ConfigError.about("text", expected, f"line {number} of {path}: {line[:60].strip()!r}", fix)
    else:
        for place, message in enumerate(text, 1):
            if not _has_content(message):
                got = f"message {place} in line {number} of {path}: {str(message)[:60]!r}"
                fix = "Write messages such as {role: user, content: Hello}."
                raise ConfigError.about("text", "chats of messages with a content", got, fix)
    return text


def _has_content(message: Any) -> bool:
    """Whether a message of a chat has what `train` wants, too: texts, or calls of tools in their place."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))

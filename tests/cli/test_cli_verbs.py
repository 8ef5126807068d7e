"""A command is one module with a function of its name, and one row of the table of commands."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import resources
from types import ModuleType
from typing import Annotated

import pytest
import typer

from hf_neuron_moe.cli import main
from hf_neuron_moe.cli.shared_options import Json
from hf_neuron_moe.errors import ConfigError


def count_words(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What is counted.")],
    tokens: Annotated[int, typer.Option(help="The most that are allowed.")] = 4,
    as_json: Json = False,
) -> None:
    """Count the words of a text."""
    words = len(text.split())
    if words > tokens:
        raise ConfigError.about("tokens", f"at least {words}", tokens, "Allow more.")
    typer.echo(json.dumps({"ok": True, "words": words}) if as_json else f"{words} words")


@pytest.fixture
def with_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a file cli/count_words.py and a row for it."""
    module = ModuleType("hf_neuron_moe.cli.count_words")
    module.count_words = count_words  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(main, "COMMANDS", (*main.COMMANDS, "count-words"))


@pytest.mark.usefixtures("with_toy")
def test_a_new_command_has_help_exit_codes_and_json(run):
    assert "count-words    Count the words of a text." in run("--help").out
    shown = run("count-words", "--help")
    assert (shown.code, shown.err) == (0, "") and "TEXT" in shown.out and "--tokens" in shown.out
    assert run("count-words", "a b") == (0, "2 words\n", "")
    assert run("count-words", "a b", "--json") == (0, '{"ok": true, "words": 2}\n', "")
    refused = run("count-words", "a b c", "--tokens", 2)
    message = "count-words: --tokens must be at least 3, got 2. Allow more."
    assert refused == (2, "", f"{message}\n"), "the name and the option as they are typed"
    as_json = json.loads(run("count-words", "a b c", "--tokens", 2, "--json").out)
    assert (as_json["kind"], as_json["exit_code"], as_json["message"]) == ("usage", 2, message)
    assert "Did you mean 'count-words'?" in run("count-word", "a").err
    assert run("count-words").code == 2


def test_every_command_is_a_module_of_its_name():
    files = {path.name for path in resources.files("hf_neuron_moe.cli").iterdir()}
    assert {f"{command.replace('-', '_')}.py" for command in main.COMMANDS} <= files
    assert len(set(main.COMMANDS)) == len(main.COMMANDS)


@pytest.mark.parametrize("command", main.COMMANDS)
def test_the_list_of_commands_is_not_cut(command: str) -> None:
    name = command.replace("-", "_")
    summary = str(getattr(importlib.import_module(f"hf_neuron_moe.cli.{name}"), name).__doc__).splitlines()[0]
    assert len(summary) <= 55 and summary.endswith(".")

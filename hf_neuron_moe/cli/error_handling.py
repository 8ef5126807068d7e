"""Between the commands and the shell: every failure becomes one line or one JSON object, and an exit code."""

from __future__ import annotations

import _thread
import json
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import typer

from hf_neuron_moe.cli.exit_codes import INTERNAL, INTERRUPTED, REFUSED, TERMINATED, USAGE, ExitCode, exit_code_of
from hf_neuron_moe.cli.precision_options import option_of_precision
from hf_neuron_moe.errors import ConfigError, NeuronMoEError, NeuronMoEWarning, nearest, printable

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError. typer brings its own copy of click in newer versions, and this class is in either."""

PROGRAM = "hf-neuron-moe"  # also where it runs as ``python -m hf_neuron_moe``: its completion goes by this name
SOON = 0.01  # Seconds until a lost interrupt is sent again
LONGEST_MESSAGE = 1800  # Characters of the one line of a failure: what a file says may be megabytes
_PARSED = re.compile(r"Input should be (a valid \w+), unable to parse string as an? \w+")
"""What typer's converter of numbers says of an option's value."""
_ARGUMENT = re.compile(r"^([\w-]+): (\w+)(\[.*?\])? must ")
_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("layout", "swizzle", "scales", "scale_rule", "tp_degree", "pad", "source", "backend", "device"),
        *(
            "tokens",
            "length",
            "layers",
            "seed",
            "block_size",
            "random_weights",
            "recipe",
            "keep_bf16",
            "formats",
            "budget",
        ),
    )
} | {"purpose": "--for", "max_shard_bytes": "--max-shard-size"}
"""What a user of the command typed for the library's arguments, which its errors begin with."""

_DEPENDENCIES = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "xxhash", "yaml")
"""Modules of what the package depends on; ``pip install --no-deps`` leaves them out."""


def run(app: typer.Typer, arguments: list[str]) -> None:
    """Run the application, and end the process unless it succeeds.

    ``--json`` and ``--debug`` may stand anywhere in `arguments`: they are looked for before those are understood.
    """
    as_json, debug = "--json" in arguments, "--debug" in arguments
    signals: list[int] = []
    try:
        with _stopped_by(signals), _short_warnings():
            given = [argument for argument in arguments if argument != "--debug"]
            code = app(given, prog_name=PROGRAM, standalone_mode=False)
            if signals or code == INTERRUPTED.code:  # which typer makes of a KeyboardInterrupt
                _end_stopped(signals, as_json)
            if code:
                sys.exit(code)
    except _UsageError as error:
        _end_usage(error, as_json)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure becomes an exit code
        if signals and not debug:  # packages make other errors of an interrupt in their imports
            _end_stopped(signals, as_json)
        if debug:
            traceback.print_exception(error)
            del vars(error).get("__notes__", [])[:]  # they are printed
        code, message = _code_and_message(error, debug, arguments)
        also = map(_one_line, getattr(error, "__notes__", ())) if isinstance(error, NeuronMoEError) else ()
        _end(code, type(error).__name__, message, as_json, *also)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()), LONGEST_MESSAGE)


def _code_and_message(error: BaseException, debug: bool, arguments: list[str]) -> tuple[ExitCode, str]:
    code = exit_code_of(error)
    message = _one_line(str(error)).replace("verify_device: ", "verify-device: ", 1) or type(error).__name__
    if isinstance(error, ConfigError):
        message = _ARGUMENT.sub(lambda found: _with_option(found, arguments), message)
    elif isinstance(error, ModuleNotFoundError) and error.name in _DEPENDENCIES:
        needed = "which this command needs: install the package with its dependencies"
        return REFUSED, f"{error.name} is not installed, {needed}"
    elif code is INTERNAL:
        hint = "" if debug else ". --debug shows where."
        message = f"internal error, please report it: {type(error).__name__}: {message}{hint}"
    elif code is INTERRUPTED:
        message = "interrupted"
    return code, message


def _with_option(found: re.Match[str], arguments: list[str]) -> str:
    """The beginning of a message with what the user typed; of a precision, which comes in three ways, also where."""
    where, name, key = found[1], found[2], found[3] or ""
    option = _OPTIONS.get(name, name)
    if name == "precision":
        where = next((word for word in arguments if not word.startswith("-")), where)
        option = option_of_precision(arguments, found.string)
    return f"{where}: {option}{key} must "


def _end(code: ExitCode, name: str, message: str, as_json: bool, *also: str) -> NoReturn:
    """Print one line per mistake, or one object, and exit."""
    if as_json:
        facts = {"ok": False, "error": name, "kind": code.kind, "exit_code": code.code, "message": message}
        try:
            typer.echo(json.dumps(facts | ({"also": also} if also else {})))
        except OSError:  # standard output is what failed
            typer.echo("\n".join((message, *also)), err=True)
    else:
        typer.echo("\n".join((message, *also)), err=True)
    sys.exit(code.code)


def _end_stopped(signals: list[int], as_json: bool) -> NoReturn:
    if signal.SIGTERM in signals:
        _end(TERMINATED, "Terminated", "terminated", as_json)
    _end(INTERRUPTED, "KeyboardInterrupt", "interrupted", as_json)


def _end_usage(error: Any, as_json: bool) -> NoReturn:
    """Unknown options and the like: with the usage lines in text, with the nearest name in both."""
    given, known = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if given and known:
        error.message = f"No such option: {given}.{nearest(given, known)}"
        error.possibilities = None
    error.message = _PARSED.sub(r"must be \1", str(error.message))
    if as_json:
        _end(USAGE, "UsageError", error.format_message(), as_json)
    error.show()
    sys.exit(USAGE.code)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Show the package's warnings as one line each, without the line of code that gave them."""

    def short(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
        if issubclass(category, NeuronMoEWarning):
            return f"warning: {' '.join(str(message).split())}\n"
        return before(message, category, *place, **more)

    before, warnings.formatwarning = warnings.formatwarning, short
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def _stopped_by(received: list[int]) -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that what a conversion holds is put in order; note which came.

    Python only reports an exception that is raised in a destructor or in a callback of the collector. An interrupt that
    gets lost there is sent again, until it arrives: one that comes just before a call of the system starts is noticed
    only after that call.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)
            return
        number = received[-1] if received else signal.SIGINT
        threading.Thread(target=repeat, args=(number, len(received)), daemon=True).start()

    def repeat(number: int, count: int) -> None:
        pause = SOON
        while not ended.wait(pause) and len(received) == count:
            if signal.getsignal(number) is stop:  # not while it is held back, where a second one would not be
                _signal_main_thread(number)
            pause = 20 * SOON

    hook, sys.unraisablehook = sys.unraisablehook, lost
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold one Ctrl-C back until the block has ended, for work of seconds that writes nothing.

    PyTorch ends the process with an abort where one is raised while its C++ calls Python for tensors without values.
    """
    before, asked = signal.getsignal(signal.SIGINT), list[int]()
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        before(asked[0], None)


def _signal_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    if sys.platform == "win32" or main is None:
        _thread.interrupt_main(signal.Signals(number))
    else:
        signal.pthread_kill(main, number)  # ends a sleep or another call of the system, too

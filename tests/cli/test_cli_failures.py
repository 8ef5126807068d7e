"""Every kind of failure: its exit code, one line without a traceback, or one JSON object."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import typer

import hf_neuron_moe.convert
from hf_neuron_moe import errors
from hf_neuron_moe.cli import error_handling, exit_codes, shared_options
from hf_neuron_moe.cli.error_handling import _stopped_by, interrupts_deferred
from hf_neuron_moe.cli.exit_codes import EXIT_CODES, exit_code_of
from hf_neuron_moe.config import ON_NONFINITE
from hf_neuron_moe.convert import (
    LAYOUTS,
    PRECISIONS,
    PURPOSES,
    SCALE_LAYOUTS,
    SCALE_RULES,
    ConvertOptions,
    convert_checkpoint,
)
from hf_neuron_moe.convert.transaction import disk
from hf_neuron_moe.errors import ConversionError, DiskError, NeuronMoEError, ShapeError


def kinds(model_dir: Path, tmp_path: Path) -> dict[str, list[object]]:
    """A command line for every kind of failure, by the kind's word in JSON."""
    convert_checkpoint(model_dir, tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    (shard,) = (tmp_path / "bad").glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    shutil.copytree(model_dir, tmp_path / "cut")
    shard = tmp_path / "cut" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    shutil.copytree(model_dir, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    return {
        "refused": ["convert", model_dir, tmp_path / "new", "--precision", "mxfp4"],
        "usage": ["convert", model_dir, tmp_path / "new", "--precision", "bf16", "--scales", "packed"],
        "source": ["convert", tmp_path / "cut", tmp_path / "new"],
        "destination": ["convert", model_dir, tmp_path / "good"],
        "verify": ["verify", tmp_path / "bad"],
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["refused", "usage", "source", "destination"])
def test_failures_are_one_line_or_one_object(kind, model_dir, run, tmp_path):
    command = kinds(model_dir, tmp_path)[kind]
    (expected,) = [code for code in EXIT_CODES if code.kind == kind]
    text = run(*command)
    assert (text.code, text.out, text.err.count("\n")) == (expected.code, "", 1), text
    assert text.err.startswith("convert: ") and "Traceback" not in text.err
    as_json = run(*command, "--json")
    assert (as_json.code, as_json.err) == (expected.code, "")
    shown = json.loads(as_json.out)
    assert shown.keys() == {"ok", "error", "kind", "exit_code", "message"}
    assert (shown["ok"], shown["kind"], shown["exit_code"]) == (False, kind, expected.code)
    assert shown["message"] == text.err.strip()
    assert not (tmp_path / "new").exists()


def test_pickles_are_refused_with_the_command_that_helps(model_dir, run, tmp_path):
    kinds(model_dir, tmp_path)
    result = run("convert", tmp_path / "pickled", tmp_path / "new")
    assert result.code in (1, 3) and "save_pretrained" in result.err and result.err.count("\n") == 1


def test_a_failed_verification_prints_its_report(model_dir, run, tmp_path):
    command = kinds(model_dir, tmp_path)["verify"]
    text = run(*command)
    assert (text.code, text.err) == (6, "")
    assert "NOT OK" in text.out and re.search(r"^FAILED files: neuron-\S+: \S+", text.out, re.MULTILINE)
    shown = json.loads(run(*command, "--json").out)
    assert shown["ok"] is False and shown["checks"]["files"]["state"] == "FAILED"
    assert shown["findings"][0]["check"] == "files"
    good = run("verify", tmp_path / "good", "--source", model_dir, "--json")
    assert good.code == 0
    assert {check["state"] for check in json.loads(good.out)["checks"].values()} == {"ok"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_what_the_system_refuses_is_exit_code_5(code, model_dir, run, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code), "somewhere")

    monkeypatch.setattr(disk, "fsync", fail)
    result = run("convert", model_dir, tmp_path / "dst", "--json")
    shown = json.loads(result.out)
    assert (result.code, shown["kind"], shown["error"]) == (5, "disk", "DiskError")
    assert os.strerror(code) in shown["message"]
    assert list(tmp_path.iterdir()) == []


def test_interrupts_are_exit_code_130(model_dir, run, tmp_path, monkeypatch):
    def stop(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_neuron_moe.convert, "convert_checkpoint", stop)
    text = run("convert", model_dir, tmp_path / "dst")
    assert (text.code, text.out, text.err) == (130, "", "interrupted\n")
    assert json.loads(run("convert", model_dir, tmp_path / "dst", "--json").out)["kind"] == "interrupted"


def test_a_missing_dependency_is_named_and_is_no_defect(model_dir, run, tmp_path, monkeypatch):
    """As after ``pip install --no-deps``; a module of our own that is missing is a defect."""
    for name, code in (("torch", 1), ("hf_neuron_moe.convert.nothing", 70)):

        def lack(*arguments: object, name: str = name, **keywords: object) -> None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(hf_neuron_moe.convert, "convert_checkpoint", lack)
        text = run("convert", model_dir, tmp_path / "dst")
        assert text.code == code
        assert text.err.startswith("torch is not installed, which this command needs") == (code == 1)


def test_defects_are_told_without_a_traceback_unless_debugging(model_dir, run, tmp_path, monkeypatch):
    def break_down(*arguments: object, **keywords: object) -> None:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(hf_neuron_moe.convert, "convert_checkpoint", break_down)
    text = run("convert", model_dir, tmp_path / "dst")
    assert (text.code, text.err.count("\n")) == (70, 1)
    assert "ZeroDivisionError: nobody thought of this" in text.err and "--debug" in text.err
    for command in (["--debug", "convert"], ["convert", "--debug"]):
        debug = run(*command, model_dir, tmp_path / "dst")
        assert (debug.code, debug.out) == (70, "")
        assert debug.err.startswith("Traceback") and "in break_down" in debug.err
        assert debug.err.splitlines()[-1].startswith("internal error, please report it: ZeroDivisionError: nobody")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["refused", "usage", "source", "destination", "verify"])
def test_debugging_changes_no_exit_code(kind, model_dir, run, tmp_path):
    command = kinds(model_dir, tmp_path)[kind]
    without, debug = run(*command, "--json"), run(*command, "--json", "--debug")
    assert (debug.code, debug.out) == (without.code, without.out)
    assert debug.err.startswith("Traceback") == (kind != "verify")


CHILD = """
import sys, time, types

def stand_in(name, **content):
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module

def wait(source, destination, options, **keywords):
    try:
        destination.with_name("begun").touch()
        time.sleep(300)
    finally:
        destination.with_name("tidied").touch()

# Loading torch and transformers takes seconds, and the command does not need them to be stopped.
logging = types.SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)
stand_in("transformers")
stand_in("transformers.utils", logging=logging)
stand_in("hf_neuron_moe.convert", ConvertOptions=dict, convert_checkpoint=wait, __path__=[sys.argv.pop()])
from hf_neuron_moe.cli.main import main
sys.argv = ["hf-neuron-moe", "convert", *sys.argv[1:], "--json"]
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_signals_unwind_and_end_with_their_code(number, code, model_dir, repo_root, tmp_path):
    command = [sys.executable, "-c", CHILD, str(model_dir), str(tmp_path / "dst")]
    command.append(str(repo_root / "hf_neuron_moe" / "convert"))
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=repo_root,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "begun").exists() and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(number)
    out, err = child.communicate(timeout=120)
    assert child.returncode == code, err
    assert json.loads(out)["exit_code"] == code
    assert (tmp_path / "tidied").exists() and "Traceback" not in err


DROPPED = """
import hf_neuron_moe.cli.error_handling as handling
send, asked = handling._signal_main_thread, []

def drop_first(number):
    asked.append(number)
    if len(asked) > 1:
        send(number)

handling._signal_main_thread = drop_first
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(
    ("name", "code", "dropped"), [("SIGTERM", 143, ""), ("SIGINT", 130, ""), ("SIGINT", 130, DROPPED)]
)
@pytest.mark.slow
def test_signals_in_destructors_are_not_lost(name, code, dropped, model_dir, repo_root, tmp_path):
    """Python only reports what is raised there, and goes on. What is sent again may come too early to be noticed."""
    destructor = f"type('Dying', (), {{'__del__': lambda self: signal.raise_signal(signal.{name})}})()"
    child = CHILD.replace("time.sleep(300)", f"import signal; {destructor}; time.sleep(60)")
    child = child.replace("sys.argv =", f"{dropped}\nsys.argv =")
    command = [sys.executable, "-c", child, str(model_dir), str(tmp_path / "dst")]
    command.append(str(repo_root / "hf_neuron_moe" / "convert"))
    result = subprocess.run(command, capture_output=True, text=True, cwd=repo_root, timeout=50)
    assert result.returncode == code and json.loads(result.stdout)["exit_code"] == code, result.stderr
    assert (tmp_path / "tidied").exists() and result.stderr == ""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.slow
def test_what_is_sent_again_waits_where_interrupts_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would end what must not be interrupted: it would be sent twice within the block."""
    monkeypatch.setattr(error_handling, "SOON", 0.1)
    received, ended = list[int](), False
    with pytest.raises(KeyboardInterrupt), _stopped_by(received):
        type("Dying", (), {"__del__": lambda self: signal.raise_signal(signal.SIGINT)})()
        with interrupts_deferred():
            time.sleep(2.3)
            ended = True
        time.sleep(60)
    assert ended and received == [signal.SIGINT] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["convrt", "a", "b"], "convert"),
        (["convert", "a", "b", "--precison", "bf16"], "--precision"),
        (["convert", "a", "b", "--on-nonfinit", "keep"], "--on-nonfinite"),
        (["verify", "a", "--sorce", "b"], "--source"),
        (["convert", "a", "b", "--precision", "mxpf8"], "'mxfp8'"),
        (["convert", "a", "b", "--layout", "kernal"], "'kernel'"),
        (["convert", "a", "b", "--for", "inferense"], "'inference'"),
        (["convert", "a", "b", "--scale-rule", "rciel"], "'rceil'"),
        (["convert", "a", "b", "--scales", "paked"], "'packed'"),
        (["plan", "a", "--precision", "fp23"], "'fp32'"),
    ],
)
def test_misspelt_words_are_answered_with_the_nearest(arguments, hint, run):
    text = run(*arguments)
    assert (text.code, text.out) == (2, "")
    assert re.search(rf"Did you mean {re.escape(hint)}\?|Did you mean '{re.escape(hint)}'\?", text.err), text.err
    assert "ossible options" not in text.err, "the nearest name is enough"
    shown = json.loads(run(*arguments, "--json").out)
    assert (shown["kind"], shown["exit_code"]) == ("usage", 2)
    assert "Did you mean" in shown["message"] and "ossible options" not in shown["message"]


def test_refusals_name_options_as_they_are_typed(model_dir, run, tmp_path):
    for option, value in (("--for", "lora"), ("--layout", "fused")):
        result = run("convert", model_dir, tmp_path / "dst", "--precision", "mxfp4", option, value)
        assert result.code == 2 and result.err.startswith(f"convert: {option} must be "), result.err
    result = run("convert", model_dir, tmp_path / "dst", "--scale-rule", "ceil")
    assert result.code == 2 and result.err.startswith("convert: --scale-rule must be left out"), result.err


def test_damaged_metadata_is_damage_of_the_source(model_dir, run, tmp_path):
    good = tmp_path / "good"
    convert_checkpoint(model_dir, good)
    shutil.copytree(model_dir, tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "llama",')
    shutil.copytree(model_dir, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").rename(tmp_path / "bare" / "model-00001-of-00002.safetensors")
    manifest = good / "neuron_moe_manifest.json"
    manifest.write_text(manifest.read_text()[:900])
    for command, words in (
        (["convert", tmp_path / "cut", tmp_path / "new"], ["config.json", "JSON"]),
        (["convert", tmp_path / "bare", tmp_path / "new"], ["model-00001-of-00002.safetensors", "index.json"]),
        (["inspect", tmp_path / "bare"], ["model-00001-of-00002.safetensors", "index.json"]),
        (["export", good, tmp_path / "new"], ["neuron_moe_manifest.json", "damaged"]),
        (["inspect", good], ["neuron_moe_manifest.json", "damaged"]),
    ):
        result = run(*command)
        assert result.code == 3 and result.err.startswith(f"{command[0]}: "), result.err
        assert all(word in result.err for word in words), result.err
    report = run("verify", good)
    assert report.code == 6 and "verify: " in report.out and "export: " not in report.out


def test_inspecting_what_is_not_all_there(model_dir, run, tmp_path):
    convert_checkpoint(model_dir, tmp_path / "dst")
    shutil.copytree(model_dir, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "other" / "weights.safetensors")
    result = run("inspect", tmp_path / "dst", "--source", tmp_path / "other")
    assert result.code == 3 and result.err.startswith("inspect: model.safetensors of "), result.err
    assert "no such file. Give the checkpoint" in result.err
    (shard,) = (tmp_path / "dst").glob("*.safetensors")
    shard.unlink()
    result = run("inspect", tmp_path / "dst")
    assert (
        result.code == 3 and result.err.startswith(f"inspect: {shard.name} must be ") and "no such file" in result.err
    )
    result = run("inspect", model_dir, "--source", model_dir)
    assert result.code == 2 and result.err.startswith("inspect: --source must be left out"), result.err


def test_a_link_is_not_replaced(model_dir, run, tmp_path):
    convert_checkpoint(model_dir, tmp_path / "dst")
    (tmp_path / "link").symlink_to(tmp_path / "dst")
    result = run("convert", model_dir, tmp_path / "link", "--force")
    assert result.code == 4 and "a link to" in result.err
    assert (tmp_path / "link").is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == ["dst", "link"]


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_a_misspelt_family_is_answered_with_the_nearest(command, model_dir, run, tmp_path):
    shutil.copytree(model_dir, tmp_path / "src")
    config = tmp_path / "src" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "model_type": "mixtrl", "architectures": None}))
    result = run(command, tmp_path / "src", *([tmp_path / "dst"] if command == "convert" else []))
    assert result.code == 1 and "Did you mean 'mixtral'?" in result.err, result.err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--part", "0/4"), ("--part", "5/4"), ("--part", "one"), ("--max-shard-size", "5XB"), ("--max-shard-size", "0"),
        ("--max-shard-size", "-1GB"), ("--workers", "0"), ("--tp-degree", "0"), ("--max-shard-size", "0.1B"),
        ("--max-shard-size", "5"), ("--max-shard-size", "999999"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_usage_errors(option, value, run):
    result = run("convert", "a", "b", option, value)
    assert result.code == 2 and option in result.err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("2GiB", 2**31), ("500mb", 5 * 10**8), ("1.5 kB", 1500), ("77", 77), ("3T", 3 * 10**12)],
)
def test_sizes(text, nbytes):
    assert shared_options.size_in_bytes(text) == nbytes


def test_a_size_has_at_least_one_byte():
    with pytest.raises(typer.BadParameter, match="is not a size"):
        shared_options.size_in_bytes("0.9B")


def test_a_folder_that_cannot_be_written_to_is_told_before_work(tmp_path, monkeypatch):
    shared_options.make_folder(tmp_path, "Name another one.")
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    with pytest.raises(DiskError, match="no permission"):
        shared_options.make_folder(tmp_path, "Name another one.")


def test_the_command_line_offers_what_the_library_takes(run):
    shown = run("convert", "--help").out
    for known in (PRECISIONS, LAYOUTS, SCALE_LAYOUTS, SCALE_RULES, PURPOSES, ON_NONFINITE):
        assert "|".join(known) in shown
    assert shared_options.size_in_bytes("5GB") == ConvertOptions().max_shard_bytes


def test_warnings_of_the_package_are_one_line_and_others_as_python_shows_them():
    with error_handling._short_warnings():
        assert warnings.formatwarning(errors.NeuronMoEWarning("a\n b"), errors.NeuronMoEWarning, "f.py", 3) == (
            "warning: a b\n"
        )
        assert "f.py:3: UserWarning: c" in warnings.formatwarning(UserWarning("c"), UserWarning, "f.py", 3)
    assert "f.py:3" in warnings.formatwarning(errors.NeuronMoEWarning("a"), errors.NeuronMoEWarning, "f.py", 3)


def test_exit_codes_are_distinct_and_chosen_by_class():
    assert len({code.code for code in EXIT_CODES}) == len(EXIT_CODES)
    assert exit_code_of(ConversionError("x")) is exit_codes.REFUSED
    assert exit_code_of(ShapeError("x")) is exit_codes.REFUSED
    assert exit_code_of(PermissionError("x")) is exit_codes.DISK
    assert exit_code_of(RuntimeError("x")) is exit_codes.INTERNAL


def test_every_exception_is_raised_somewhere(repo_root):
    """What a conversion or a device got wrong is in a report, so exit codes 6 and 7 have no class."""
    sources = [path for path in (repo_root / "hf_neuron_moe").rglob("*.py") if path.name != "exit_codes.py"]
    used = "".join(path.read_text(encoding="utf-8") for path in sources if path.name != "errors.py")
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NeuronMoEError)]
    names = [kind.__name__ for kind in classes if not kind.__subclasses__()]
    assert names and [name for name in names if not re.search(rf"\b{name}\b", used)] == []


def test_exit_codes_are_the_documented_ones(repo_root):
    text = (repo_root / "docs" / "convert.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+?) \|$", text, re.MULTILINE)
    assert [(int(code), kind, meaning) for code, kind, meaning in rows] == [tuple(code) for code in EXIT_CODES]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt_that_is_held_back_comes_at_the_end_and_a_second_one_at_once():
    ends = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        ends.append("first")
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        ends.append("second")
    assert ends == ["first"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("arguments", "code"), [([], 130), (["--debug"], 70)])
def test_debugging_shows_what_a_package_made_of_an_interrupt(arguments, code, capsys):
    def application(given, **options):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            error = ImportError("half imported")
            error.add_note("a note")
            raise error from None

    with pytest.raises(SystemExit) as ended:
        error_handling.run(application, arguments)
    assert ended.value.code == code
    assert ("half imported" in capsys.readouterr().err) == bool(arguments)


def test_debugging_shows_a_note_once(capsys):
    def application(given, **options):
        error = NeuronMoEError("wrong")
        error.add_note("also this")
        raise error

    for arguments in ([], ["--debug"]):
        with pytest.raises(SystemExit):
            error_handling.run(application, arguments)
        assert capsys.readouterr().err.count("also this") == 1


def test_a_message_of_megabytes_is_cut(capsys):
    def application(given, **options):
        raise NeuronMoEError("x" * 10**6)

    with pytest.raises(SystemExit):
        error_handling.run(application, [])
    assert len(capsys.readouterr().err) <= error_handling.LONGEST_MESSAGE + 1 < 2000

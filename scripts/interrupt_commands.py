#!/usr/bin/env python3
"""Send SIGINT to every command at random moments: each must end in one line, without a traceback.

    python scripts/interrupt_commands.py --moments 10
    python scripts/interrupt_commands.py --only convert explore --seed 3

Commands run on tiny inputs in children of this process, which has imported torch and transformers for all of them. Some
moments are before that: then a new interpreter is started, and interrupted while it imports.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_neuron_moe.__main__ import main as command_line

COMMANDS = {
    "plan": "plan model",
    "estimate": "estimate model --tokens 64",
    "doctor": "doctor model",
    "inspect": "inspect made --source model",
    "verify": "verify made --source model --probes 0",
    "convert": "convert model {new} --precision mxfp8",
    "finalize": "finalize model {new}",
    "export": "export made {new} --allow-inexact",
    "explore": "explore model text.txt --tokens 256 --length 64",
    "parity": "parity model text.txt --recipe mxfp8 --steps 4 --batch 1 --length 32 -o {new}",
    "demo": "demo --tiny --steps 3 -o {new}",
    "tiny-model": "tiny-model mixtral {new}",
    "train": "train tiny-mixtral --model model --train_files text.txt --eval_files text.txt --max_steps 4 "
    "--output_dir {new}",
    "report": "report runs -o {new}.html",
    "smoke": "smoke",
    "verify-device": "verify-device model",
}
IMPORTING = "plan"
"""The command that is interrupted while it imports: what others import in addition is little."""
ENDS = (0, 1, 2, 3, 6, 7, 130)
"""Exit codes of a command that was not stopped in time, and of one that was."""
LONGEST = 120.0  # seconds until a child that does not stop is killed, which is a failure


def make_inputs(folder: Path, names: Sequence[str]) -> None:
    """Write a model, its conversion and a text, and for ``report`` runs."""
    from hf_neuron_moe.demo.tiny_model import make_tiny_model

    make_tiny_model("mixtral", folder / "model", num_hidden_layers=1)
    (folder / "text.txt").write_text("The state of the Union is tested once more.\n\n" * 60, encoding="utf-8")
    runs = ["demo --tiny --steps 1 -o demo"] if "report" in names else []
    parts = [f"convert model parts --precision mxfp8 --part {number}/2" for number in (1, 2)]
    for line in ("convert model made --precision mxfp8", *(parts if "finalize" in names else []), *runs):
        child = start(line, folder)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            raise SystemExit(f"{line}: {(folder / 'err').read_text(encoding='utf-8')}")
    if runs:
        (folder / "demo" / "runs").rename(folder / "runs")


def start(line: str, folder: Path) -> int:
    """Fork a child that runs the command in `folder`, and return its process id; its output goes to files there."""
    child = os.fork()
    if child:
        with suppress(PermissionError, ProcessLookupError):  # it has done so itself, or is gone
            os.setpgid(child, child)
        return child
    code = 1
    try:
        os.chdir(folder)
        os.setpgid(0, 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["hf-neuron-moe", *line.split()]
        command_line()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - a failure, which is told by its traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start_new(name: str, new: str, folder: Path) -> int:
    """Start a command that writes to `new`; beside it lie the parts that ``finalize`` joins."""
    if name == "finalize":
        shutil.copytree(folder / "parts.partial", folder / f"{new}.partial")
    return start(COMMANDS[name].format(new=new), folder)


def interrupted(child: int, moment: float) -> tuple[int, float]:
    """Send SIGINT to the child's group at `moment`; return its exit code and how long it ran."""
    begun, sent = time.monotonic(), False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - begun
        if done:
            return os.waitstatus_to_exitcode(status), seconds
        if not sent and seconds >= moment:
            sent = True
            os.killpg(child, signal.SIGINT)
        if seconds > moment + LONGEST:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)


def failure_of(code: int, err: str) -> str:
    """Return what is wrong with how a child ended; nothing where it is right."""
    # Before Python itself has begun, or where code that a package made of a string was stopped, Python ends the process
    # by the signal. A shell reports 130 for that.
    if code == -signal.SIGINT and err in ("", "interrupted\n"):
        return ""
    if code not in ENDS:
        return f"exit code {code}: {err[-400:]}"
    if "Traceback" in err or "Exception ignored" in err:
        return f"a traceback: {err[-600:]}"
    if code == 130 and "interrupted" not in err:
        return f"no word about it: {err[-200:]}"
    return ""


def failures(names: Sequence[str], moments: int, seed: int) -> Iterator[str]:
    """Yield what went wrong, command by command."""
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as place, offline():
        folder = Path(place)
        make_inputs(folder, names)
        for name in names:
            child = start_new(name, f"{name}-whole", folder)
            code, whole = interrupted(child, 10 * LONGEST)
            if code not in ENDS[:-1] or (found := failure_of(code, (folder / "err").read_text(encoding="utf-8"))):
                yield f"{name}, not interrupted: {code} {(folder / 'err').read_text(encoding='utf-8')[-600:]}"
                continue
            print(f"{name}: {whole:.1f} s", file=sys.stderr)
            for number in range(moments):
                moment = chosen.uniform(0.1, max(0.2, whole))
                child = start_new(name, f"{name}{number}", folder)
                code, _ = interrupted(child, moment)
                if found := failure_of(code, (folder / "err").read_text(encoding="utf-8")):
                    yield f"{name} at {moment:.2f} of {whole:.2f} s: {found}"
        yield from importing_failures(folder, moments, chosen)


def importing_failures(folder: Path, moments: int, chosen: random.Random) -> Iterator[str]:
    """Yield what went wrong in new interpreters that were interrupted while they imported."""
    command = [sys.executable, "-m", "hf_neuron_moe", *COMMANDS[IMPORTING].split()]
    whole = 0.0
    for number in range(moments + 1):  # the first one is not interrupted
        begun = time.monotonic()
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if number:
            time.sleep(chosen.uniform(0.1, 0.9) * whole)  # not while Python itself starts
            child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=LONGEST + 60)
        whole = whole or time.monotonic() - begun
        if found := failure_of(child.returncode, err):
            yield f"{IMPORTING}, importing, {number}: {found}"


@contextmanager
def offline() -> Iterator[None]:
    """No child asks a network; the environment of this process is as before at the end."""
    before = dict(os.environ)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, before.get("PYTHONPATH"))))
    # A test run in the background of a shell ignores the signal, and children inherit that.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        os.environ.clear()
        os.environ.update(before)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("--moments", type=int, default=10, help="random moments per command")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch
    import transformers  # noqa: F401 - for all children

    torch.set_num_threads(1)
    count = 0
    for failure in failures(options.only, options.moments, options.seed):
        count += 1
        print(failure, flush=True)
    print(f"{len(options.only)} commands, {options.moments} moments each: {count} failures")
    return int(count > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m hf_neuron_moe``, and the entry point of ``hf-neuron-moe``: the command line, from its first moment on."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

_NOT_WRITTEN = 120  # as Python says it
_INTERRUPTED = 130  # cli.exit_codes.INTERRUPTED, before it is imported


def main() -> None:
    """Run the command line; Ctrl-C ends it in one line while it is imported and while the process ends, too.

    A KeyboardInterrupt is not enough then: packages turn one that is raised in their imports into other errors, and
    one that comes at the end is printed with a traceback.
    """
    asked = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where it is ignored
    if asked:
        signal.signal(signal.SIGINT, _end)
    from hf_neuron_moe.cli.error_handling import run
    from hf_neuron_moe.cli.main import application

    commands = application()  # imports them, too
    if asked:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = None
    try:
        run(commands, sys.argv[1:])
    except SystemExit as ended:
        code = ended.code
    finally:
        if asked:
            signal.signal(signal.SIGINT, _end)
    one_of_several = (os.environ.get("WORLD_SIZE") or "1") != "1"
    if one_of_several and (code is None or isinstance(code, int)):
        _end_without_teardown(code or 0)
    if code:
        sys.exit(code)


def _end_without_teardown(code: int) -> NoReturn:
    """End the process after what packages do at its end, and before Python takes its objects apart.

    torch's caches of sharded tensors keep process groups, and so the threads of gloo, until then. One that still frees
    its last operation aborts the process: "terminate called without an active exception".
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a full disk, a closed stream
            code = code or _NOT_WRITTEN
    os._exit(code & 0xFF)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()

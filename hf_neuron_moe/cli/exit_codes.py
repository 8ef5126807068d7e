"""How a command ends: one exit code per kind of failure, so that a job script can tell what to do next.

The table in docs/convert.md is this one; a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

from hf_neuron_moe.errors import ConfigError, DestinationError, DiskError, NeuronMoEError, SourceDamageError


class ExitCode(NamedTuple):
    """A number, the word for it in JSON, and what it means."""

    code: int
    kind: str
    meaning: str


DONE = ExitCode(0, "done", "everything that was asked for was done")
REFUSED = ExitCode(1, "refused", "the request cannot be carried out; the message says why and what can be done")
USAGE = ExitCode(2, "usage", "unknown option, value outside its set, or options that contradict each other")
SOURCE = ExitCode(3, "source", "the checkpoint to read is missing, damaged, incomplete or leads outside its folder")
DESTINATION = ExitCode(4, "destination", "the destination is taken, not ours, or cannot be where it was asked for")
DISK = ExitCode(5, "disk", "the operating system refused a call: no space, no permission, failing disk")
VERIFY = ExitCode(6, "verify", "verify, verify-device or smoke found a difference")
CLOSE = ExitCode(7, "close", "verify-device or smoke found a small difference that rounding does not explain")
INTERNAL = ExitCode(70, "internal", "a defect of this program; --debug shows where")
INTERRUPTED = ExitCode(130, "interrupted", "stopped from the keyboard (SIGINT)")
TERMINATED = ExitCode(143, "interrupted", "stopped by SIGTERM, as job schedulers do before a kill")

EXIT_CODES = (DONE, REFUSED, USAGE, SOURCE, DESTINATION, DISK, VERIFY, CLOSE, INTERNAL, INTERRUPTED, TERMINATED)

_BY_CLASS: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (SourceDamageError, SOURCE),
    (DestinationError, DESTINATION),
    (DiskError, DISK),
    (ConfigError, USAGE),
    (NeuronMoEError, REFUSED),
    (OSError, DISK),
    (KeyboardInterrupt, INTERRUPTED),
)


def exit_code_of(error: BaseException) -> ExitCode:
    """Return how a command ends that raised `error`; what no class claims is a defect of this program."""
    if type(error).__name__ == "SafetensorError" and "I/O error" in str(error):  # in place of an OSError
        return DISK
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), INTERNAL)

"""The package's exceptions: what is refused, where, what came instead, and what to do about it.

Every class also derives from the built-in exception a caller would expect (``ValueError``, ``TypeError``, ...), so
code that does not know this package still catches it. Raise them through :func:`refuse`, which keeps the four parts of
a message in one order.
"""

from __future__ import annotations

from typing import TypeVar


class NeuronMoEError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigError(NeuronMoEError, ValueError):
    """An option has an unknown name or a value outside its documented set."""


class ShapeError(NeuronMoEError, ValueError):
    """A tensor's shape (or a size derived from it) breaks a documented rule."""


class DTypeError(NeuronMoEError, TypeError):
    """A tensor's dtype is not one the operation is defined for."""


class DeviceError(NeuronMoEError, ValueError):
    """Operands of one operation live on different devices, or on one the operation cannot use."""


class BackendUnavailableError(NeuronMoEError, RuntimeError):
    """The requested backend cannot run in this environment."""


class GradientError(NeuronMoEError, RuntimeError):
    """A derivative was asked for that the kernels do not have."""


class PatchError(NeuronMoEError, RuntimeError):
    """A model could not be patched or unpatched; the model is left exactly as it was."""


class NothingToPatchError(PatchError):
    """No module of the model can be patched."""


class UnsupportedModelError(PatchError):
    """The model as a whole is in a state that cannot be patched (quantised, sharded, already patched differently)."""


class RoutingReplayError(NeuronMoEError, RuntimeError):
    """A recomputation makes other routing decisions than the run it repeats."""


class IncompleteCheckpointError(NeuronMoEError, ValueError):
    """A training checkpoint was not written to its end, or none was."""


class NonFiniteWeightsError(NeuronMoEError, FloatingPointError):
    """Weights that are to be saved hold NaN or infinity."""


class ConversionError(NeuronMoEError, RuntimeError):
    """A checkpoint cannot be converted; the destination is left exactly as it was."""


class SourceDamageError(ConversionError):
    """A checkpoint's files contradict themselves or each other: cut off, altered, missing, or leading elsewhere."""


class DestinationError(ConversionError):
    """A destination is taken, missing its parent, overlaps the source, or holds what is not ours."""


class DiskError(ConversionError):
    """The operating system refused a call: no space, no permission, a failing disk."""


class VerificationError(ConversionError):
    """A converted checkpoint is not what its manifest, its format or its source says."""


class ReportError(NeuronMoEError, ValueError):
    """A directory holds no run to report on, or a run's files are damaged."""


class NeuronMoEWarning(UserWarning):
    """Something works, but not in the way a reader of the configuration would assume."""


ErrorT = TypeVar("ErrorT", bound=NeuronMoEError)


def refuse(
    kind: type[ErrorT],
    *,
    where: str,
    argument: str,
    expected: str,
    got: object,
    remedy: str,
) -> ErrorT:
    """Build an exception with the message's parts in their fixed order.

    Args:
        kind: exception class.
        where: public function or module that refuses.
        argument: name of the offending argument, option or module.
        expected: the rule, in words.
        got: what came instead.
        remedy: what the caller can do.

    Returns:
        The exception; the caller raises it.
    """
    return kind(f"{where}: {argument} must be {expected}, got {got}. {remedy}")


def nearest(name: str, known: list[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to `name`, or an empty string."""
    import difflib

    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""

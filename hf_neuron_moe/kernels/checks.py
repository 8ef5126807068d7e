"""Checks of kernel arguments, in one vocabulary. Every refusal names the kernel, the argument and the rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.formats.checks import check_same_device as check_same_device


def check_dtype(tensor: Tensor, allowed: tuple[torch.dtype, ...], *, argument: str) -> None:
    """Refuse a tensor whose dtype is not in `allowed`, and anything that is not a tensor.

    Raises:
        DTypeError: otherwise.
    """
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    if not isinstance(tensor, Tensor) or tensor.dtype not in allowed:
        remedy = "This argument is required." if tensor is None else "Pass a torch.Tensor."
        if isinstance(tensor, Tensor):
            remedy = f"Convert it, for example with .to({allowed[0]})."
        raise DTypeError.about(
            argument,
            f"a tensor of dtype {names}",
            str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__,
            remedy,
        )


def check_shape(tensor: Tensor, shape: tuple[int | None, ...], names: str, *, argument: str) -> None:
    """Refuse a tensor that does not have `shape`; None stands for any extent.

    Args:
        tensor: the argument.
        shape: required extents.
        names: the shape in words, for the message, for example ``"[S, H]"``.
        argument: argument name.

    Raises:
        ShapeError: otherwise.
    """
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("?" if extent is None else str(extent) for extent in shape)
        sizes = "" if all(extent is None for extent in shape) else f" = [{wanted}]"
        raise ShapeError.about(
            argument,
            f"of shape {names}{sizes}",
            str(list(tensor.shape)),
            "Check which axis is which; layouts are never guessed from sizes.",
        )


def check_multiple(size: int, of: int, name: str, rule: str, *, argument: str) -> None:
    """Refuse an extent that is zero or no multiple of `of`.

    Raises:
        ShapeError: otherwise; `rule` says why the kernel needs it.
    """
    if size <= 0 or size % of:
        raise ShapeError.about(
            f"{name} of {argument}",
            f"a positive multiple of {of} ({rule})",
            str(size),
            "Zero-pad to the next multiple (padding with zeros is exact); patched modules do so themselves.",
        )


def check_flags(flags: Mapping[str, object]) -> None:
    """Refuse switches that are not bools: any other object would be taken by its truth value.

    Args:
        flags: switches by argument name.

    Raises:
        ConfigError: otherwise.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError.about(name, "True or False", shown(flag), "Pass a bool.")


def check_record(value: object, kind: type, *, argument: str, optional: bool = True) -> None:
    """Refuse what is not an instance of `kind` (or None, if that is an option).

    Raises:
        ConfigError: otherwise. A dict or tuple is never taken for a record: its fields could be mixed up.
    """
    if not isinstance(value, kind) and not (optional and value is None):
        raise ConfigError.about(
            argument,
            f"a {kind.__name__}{' or None' if optional else ''}",
            shown(value),
            f"Make one with {kind.__name__}(...), from hf_neuron_moe.kernels.",
        )


def shown(value: object) -> str:
    """Spell a wrong argument for a message: the value if it is short, else its type."""
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"

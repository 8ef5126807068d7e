"""Argument checks shared by the format functions. Each returns nothing and raises with the remedy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_neuron_moe.errors import DeviceError, DTypeError, ShapeError, refuse
from hf_neuron_moe.formats.constants import FLOAT_DTYPES, MX_BLOCK, ElementFormat


def check_tensor(value: object, *, where: str, argument: str) -> None:
    """Refuse anything that is not a torch tensor.

    Raises:
        DTypeError: `value` is not a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise refuse(
            DTypeError,
            where=where,
            argument=argument,
            expected="a torch.Tensor",
            got=type(value).__name__,
            remedy="Convert it with torch.as_tensor.",
        )


def check_dtype(tensor: torch.Tensor, allowed: tuple[torch.dtype, ...], *, where: str, argument: str) -> None:
    """Refuse a tensor whose dtype is not in `allowed`.

    Raises:
        DTypeError: not a tensor, or another dtype.
    """
    check_tensor(tensor, where=where, argument=argument)
    if tensor.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise refuse(
            DTypeError,
            where=where,
            argument=argument,
            expected=f"of dtype {names}",
            got=str(tensor.dtype).removeprefix("torch."),
            remedy="Cast it, or view its bytes as one of these dtypes.",
        )


def check_float(tensor: torch.Tensor, *, where: str, argument: str) -> None:
    """Refuse a tensor that is not bf16, fp16 or fp32 (DTypeError)."""
    check_dtype(tensor, FLOAT_DTYPES, where=where, argument=argument)


def check_shape(tensor: torch.Tensor, names: tuple[str, ...], *, where: str, argument: str) -> None:
    """Refuse a tensor that does not have one dimension per name, each of at least one element.

    Raises:
        DTypeError: not a tensor.
        ShapeError: another number of dimensions, or an empty one.
    """
    check_tensor(tensor, where=where, argument=argument)
    if tensor.ndim != len(names) or 0 in tensor.shape:
        raise refuse(
            ShapeError,
            where=where,
            argument=argument,
            expected=f"a non-empty tensor of shape [{', '.join(names)}]",
            got=str(list(tensor.shape)),
            remedy="Reshape it, or pass one matrix at a time.",
        )


def check_equal_shape(tensor: torch.Tensor, shape: tuple[int, ...], *, where: str, argument: str, because: str) -> None:
    """Refuse a tensor whose shape is not exactly `shape` (ShapeError); `because` says what the shape follows from."""
    check_tensor(tensor, where=where, argument=argument)
    if tuple(tensor.shape) != shape:
        raise refuse(
            ShapeError,
            where=where,
            argument=argument,
            expected=f"of shape {list(shape)} ({because})",
            got=str(list(tensor.shape)),
            remedy="Check that the tensors belong together and that their layout is the documented one.",
        )


def check_same_device(tensors: Mapping[str, torch.Tensor | None], *, where: str) -> None:
    """Refuse tensors, by argument name, that are not on the first one's device; None is an argument left out.

    Raises:
        DeviceError: otherwise.
    """
    given = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    first, anchor = next(given)
    for name, tensor in given:
        if tensor.device != anchor.device:
            raise refuse(
                DeviceError,
                where=where,
                argument=name,
                expected=f"on {anchor.device} like {first}",
                got=str(tensor.device),
                remedy="Move them to one device.",
            )


def is_whole(number: object) -> bool:
    """Return whether `number` can be a size or an index: an int, also a symbolic one or NumPy's, but no bool."""
    if isinstance(number, bool):
        return False
    return isinstance(number, int | torch.SymInt) or hasattr(number, "__index__")


def check_multiple(size: int, of: int, *, where: str, argument: str, remedy: str) -> None:
    """Refuse a size that is not a positive multiple of `of` (ShapeError)."""
    if not is_whole(size) or size <= 0 or size % of:
        raise refuse(
            ShapeError,
            where=where,
            argument=argument,
            expected=f"a positive multiple of {of}",
            got=repr(size),
            remedy=remedy,
        )


def check_contraction(size: int, *, where: str, argument: str = "K") -> None:
    """Refuse a contraction size that does not consist of whole MX blocks (ShapeError)."""
    check_multiple(
        size,
        MX_BLOCK,
        where=where,
        argument=argument,
        remedy="Zero-pad the contraction axis of both operands; zero padding does not change the product.",
    )


def codes_as_bytes(codes: torch.Tensor, fmt: ElementFormat, *, where: str) -> torch.Tensor:
    """View codes as uint8.

    Args:
        codes: uint8 codes, or the fp8 dtype of `fmt`.
        fmt: their element format.
        where: function named in the error.

    Returns:
        A uint8 view.

    Raises:
        DTypeError: another dtype; in particular the other fp8 dtype, whose bytes would be misread.
    """
    allowed = (torch.uint8,) if fmt.dtype is None else (torch.uint8, fmt.dtype)
    check_dtype(codes, allowed, where=where, argument="codes")
    return codes.detach().view(torch.uint8)

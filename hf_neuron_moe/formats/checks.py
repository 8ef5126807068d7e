"""Argument checks shared by the format functions. Each returns nothing and raises with the remedy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_neuron_moe.errors import DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats.constants import FLOAT_DTYPES, MX_BLOCK, ElementFormat


def check_tensor(value: object, *, argument: str) -> None:
    """Refuse anything that is not a torch tensor.

    Raises:
        DTypeError: `value` is not a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise DTypeError.about(argument, "a torch.Tensor", type(value).__name__, "Convert it with torch.as_tensor.")


def check_dtype(tensor: torch.Tensor, allowed: tuple[torch.dtype, ...], *, argument: str) -> None:
    """Refuse a tensor whose dtype is not in `allowed`.

    Raises:
        DTypeError: not a tensor, or another dtype.
    """
    check_tensor(tensor, argument=argument)
    if tensor.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise DTypeError.about(
            argument,
            f"of dtype {names}",
            str(tensor.dtype).removeprefix("torch."),
            "Cast it, or view its bytes as one of these dtypes.",
        )


def check_float(tensor: torch.Tensor, *, argument: str) -> None:
    """Refuse a tensor that is not bf16, fp16 or fp32 (DTypeError)."""
    check_dtype(tensor, FLOAT_DTYPES, argument=argument)


def check_shape(tensor: torch.Tensor, names: tuple[str, ...], *, argument: str) -> None:
    """Refuse a tensor that does not have one dimension per name, each of at least one element.

    Raises:
        DTypeError: not a tensor.
        ShapeError: another number of dimensions, or an empty one.
    """
    check_tensor(tensor, argument=argument)
    if tensor.ndim != len(names) or 0 in tensor.shape:
        raise ShapeError.about(
            argument,
            f"a non-empty tensor of shape [{', '.join(names)}]",
            str(list(tensor.shape)),
            "Reshape it, or pass one matrix at a time.",
        )


def check_equal_shape(tensor: torch.Tensor, shape: tuple[int, ...], *, argument: str, because: str) -> None:
    """Refuse a tensor whose shape is not exactly `shape` (ShapeError); `because` says what the shape follows from."""
    check_tensor(tensor, argument=argument)
    if tuple(tensor.shape) != shape:
        raise ShapeError.about(
            argument,
            f"of shape {list(shape)} ({because})",
            str(list(tensor.shape)),
            "Check that the tensors belong together and that their layout is the documented one.",
        )


def check_same_device(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse tensors, by argument name, that are not on the first one's device; None is an argument left out.

    Raises:
        DeviceError: otherwise.
    """
    given = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    first, anchor = next(given)
    for name, tensor in given:
        if tensor.device != anchor.device:
            raise DeviceError.about(
                name, f"on {anchor.device} like {first}", str(tensor.device), "Move them to one device."
            )


def is_whole(number: object) -> bool:
    """Return whether `number` can be a size or an index: an int, also a symbolic one or NumPy's, but no bool."""
    if isinstance(number, bool):
        return False
    return isinstance(number, int | torch.SymInt) or hasattr(number, "__index__")


def check_multiple(size: int, of: int, *, argument: str, remedy: str) -> None:
    """Refuse a size that is not a positive multiple of `of` (ShapeError)."""
    if not is_whole(size) or size <= 0 or size % of:
        raise ShapeError.about(argument, f"a positive multiple of {of}", repr(size), remedy)


def check_contraction(size: int, *, argument: str = "K") -> None:
    """Refuse a contraction size that does not consist of whole MX blocks (ShapeError)."""
    check_multiple(
        size,
        MX_BLOCK,
        argument=argument,
        remedy="Zero-pad the contraction axis of both operands; zero padding does not change the product.",
    )


def codes_as_bytes(codes: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """View codes as uint8.

    Args:
        codes: uint8 codes, or the fp8 dtype of `fmt`.
        fmt: their element format.

    Returns:
        A uint8 view.

    Raises:
        DTypeError: another dtype; in particular the other fp8 dtype, whose bytes would be misread.
    """
    allowed = (torch.uint8,) if fmt.dtype is None else (torch.uint8, fmt.dtype)
    check_dtype(codes, allowed, argument="codes")
    return codes.detach().view(torch.uint8)

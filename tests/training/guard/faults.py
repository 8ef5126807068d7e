"""Faults that are put into one block's kernels, as data: what is broken, and which product has to be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_neuron_moe.backends.spec import ExpertWeights, FFNWeights
from hf_neuron_moe.backends.torch import ffn_backward
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.backends.torch.gating import Gating
from hf_neuron_moe.backends.torch.tiles import Loader

DENSE, EXPERTS = "llama", "mixtral"
ROW, EXPERT = 17, 2
"""What is wrong of many rows or experts."""

Change = Callable[..., Any]
"""Called with the real kernel and its arguments; returns what the broken one does."""


@dataclass(frozen=True)
class Fault:
    """One fault of the second of a model's blocks."""

    name: str
    family: str
    precision: str
    kernel: str  # "forward", "backward", or "block" for what comes into it
    product: str
    change: Change
    expert: int | None = None  # that must be named
    operand: str = "result"


def _result(place: int, change: Callable[[Tensor], Any]) -> Change:
    """Change a result of the kernel in place."""

    def broken(real: Change, *args: Any) -> Any:
        results = real(*args)
        change(results[place])
        return results

    return broken


def _saved(place: int, change: Callable[[Tensor], Any]) -> Change:
    def broken(real: Change, *args: Any) -> Any:
        out, saved = real(*args)
        change(saved[place])
        return out, saved

    return broken


def _argument(place: int, change: Callable[[Any], Any]) -> Change:
    """Give the kernel another argument."""

    def broken(real: Change, *args: Any) -> Any:
        changed = list(args)
        changed[place] = change(changed[place])
        return real(*changed)

    return broken


def _operand(name: str, change: Callable[[Tensor], Any], axis: int | None = None) -> Change:
    """Change the operand `name` of a product after it was quantized; with `axis`, where it is quantized along it."""
    load = Loader.load

    def changed(self: Loader, this: str, *args: Any, **named: Any) -> Tensor:
        found = load(self, this, *args, **named)
        if this == name and (axis is None or named.get("mx_axis") == axis):
            found = found.clone()
            change(found)
        return found

    return _inside(Loader, "load", changed)


def _unquantized(*names: str, axis: int = 1) -> Change:
    """Leave operands as they are; without names those that are quantized in place along `axis`."""
    load, quantize, unquantized_axis = Loader.load, Loader.quantize, axis
    loading: list[str] = []

    def loaded(self: Loader, name: str, *args: Any, **named: Any) -> Tensor:
        loading.append(name)
        try:
            return load(self, name, *args, **named)
        finally:
            loading.pop()

    def left(self: Loader, buffer: Tensor, axis: int, scheme: str = "wrapX") -> Tensor:
        skipped = loading[-1] in names if loading else not names and axis == unquantized_axis
        return buffer if skipped else quantize(self, buffer, axis, scheme)

    def broken(real: Change, *args: Any) -> Any:
        with patch.object(Loader, "load", loaded), patch.object(Loader, "quantize", left):
            return real(*args)

    return broken


def _inside(owner: Any, name: str, replacement: Any) -> Change:
    """Replace a function that the kernel calls."""

    def broken(real: Change, *args: Any) -> Any:
        with patch.object(owner, name, replacement):
            return real(*args)

    return broken


def _without_carry(function: Any) -> Any:
    return lambda *args, **named: function(*args, **(named | {"accumulate": False}))


def _without_last_row(function: Any) -> Any:
    def lost(out: Tensor, left: Tensor, right: Tensor, rows: int, **named: Any) -> None:
        function(out, torch.cat([left[: rows - 1], torch.zeros_like(left[rows - 1 :])]), right, rows, **named)

    return lost


def _last_product_alone(real: Change, *args: Any) -> Any:
    """The input's gradient forgets the gate's part: what is added overwrites."""
    into = ffn_backward.matmul_into
    return _inside(ffn_backward, "matmul_into", _without_carry(into))(real, *args)


def _nan(values: Tensor) -> None:
    values[ROW] = torch.nan


def _rolled(values: Tensor) -> None:
    values.copy_(values.roll(1, 0))


def _double(values: Tensor) -> None:
    values[:, :8] *= 2  # the eight values of a block's first lane; in a tiny model others are padding


def _double_one(values: Tensor) -> None:
    values[5, :8] *= 2


def _swap(values: Tensor) -> None:
    values[[0, 1]] = values[[1, 0]]


def _stale(field: str, *, expert: int | None = None) -> Callable[[Any], Any]:
    """Weights as they were some steps ago."""

    def change(weights: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        now = getattr(weights, field)
        old = now + 0.02 * torch.randn(now.shape, generator=generator).to(now.dtype)
        if expert is not None:
            old = torch.where((torch.arange(len(now)) == expert).view(-1, 1, 1), old, now)
        return weights._replace(**{field: old})

    return change


def _routed_elsewhere(routing: Any) -> Any:
    index = routing.index_TK.clone()
    index[ROW, 0] = next(expert for expert in range(4) if expert not in index[ROW].tolist())
    return routing._replace(index_TK=index)


def _dropped(routing: Any) -> Any:
    return routing._replace(weight_TK=routing.weight_TK.masked_fill(routing.index_TK == EXPERT, 0))


def _weights_exchanged(routing: Any) -> Any:
    weight = routing.weight_TK.clone()
    weight[ROW] = torch.tensor([0.9, 0.1]) if weight[ROW, 0] < weight[ROW, 1] else torch.tensor([0.1, 0.9])
    return routing._replace(weight_TK=weight)


def _neighbor(weights: Any) -> Any:
    gate_up = weights.gate_up.clone()
    gate_up[EXPERT] = weights.gate_up[EXPERT - 1]
    return weights._replace(gate_up=gate_up)


def _identity(self: Loader, values: Tensor) -> Tensor:
    return values


def _no_slope(self: Gating, values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    return out.copy_(factor)


def _outlier(x: Tensor) -> Tensor:
    return x * torch.where(torch.arange(x.shape[-1]) == 3, 4096.0, 1.0)


def _with_nan(x: Tensor) -> Tensor:
    return x.masked_fill((torch.arange(x.shape[-2]) == ROW).unsqueeze(-1), torch.nan)


_OVER_ROWS = _inside(ffn_backward, "matmul_over_rows_into", _without_carry(ffn_backward.matmul_over_rows_into))
_LAST_ROW_LOST = _inside(ffn_backward, "matmul_over_rows_into", _without_last_row(ffn_backward.matmul_over_rows_into))
_NO_ROUNDING = _inside(Loader, "round_", _identity)

FAULTS = (
    # dense, bf16
    Fault("rounding of the intermediate skipped", DENSE, "bf16", "forward", "down", _NO_ROUNDING),
    Fault("stale copy of gate", DENSE, "bf16", "forward", "gate_up", _argument(1, _stale("gate_IH"))),
    Fault("stale copy of up", DENSE, "bf16", "forward", "gate_up", _argument(1, _stale("up_IH"))),
    Fault("stale copy of down", DENSE, "bf16", "forward", "down", _argument(1, _stale("down_HI"))),
    Fault("NaN in one row", DENSE, "bf16", "forward", "down", _result(0, _nan)),
    Fault("one row lost", DENSE, "bf16", "forward", "down", _result(0, lambda y: y[ROW].zero_())),
    Fault("two rows exchanged", DENSE, "bf16", "forward", "down", _result(0, _swap)),
    Fault(
        "gate and up exchanged",
        DENSE,
        "bf16",
        "forward",
        "gate_up",
        _argument(1, lambda weights: weights._replace(gate_IH=weights.up_IH, up_IH=weights.gate_IH)),
    ),
    Fault("rows read one too far", DENSE, "bf16", "forward", "gate_up", _argument(0, lambda x: x.roll(1, 0))),
    Fault("gate's part of dX lost", DENSE, "bf16", "backward", "gate_up.dx", _last_product_alone),
    Fault("no derivative of the gate", DENSE, "bf16", "backward", "gate", _inside(Gating, "slope", _no_slope)),
    Fault("NaN in a row of dX", DENSE, "bf16", "backward", "gate_up.dx", _result(0, _nan)),
    Fault("gradient of gate halved", DENSE, "bf16", "backward", "gate_up.dw", _result(1, lambda dw: dw.mul_(0.5))),
    Fault("gradient of up of other rows", DENSE, "bf16", "backward", "gate_up.dw", _result(2, _rolled)),
    Fault("sign of one channel", DENSE, "bf16", "backward", "down.dw", _result(3, lambda dw: dw[:, 7].neg_())),
    Fault("backward with a stale down", DENSE, "bf16", "backward", "down.dx", _argument(2, _stale("down_HI"))),
    Fault(
        "gradient of one row dropped", DENSE, "bf16", "backward", "down.dx", _operand("dout", lambda d: d[ROW].zero_())
    ),
    # dense, mxfp8
    Fault("scale of the input off by one", DENSE, "mxfp8", "forward", "gate_up", _operand("x", _double)),
    Fault("scale of a gate row off by one", DENSE, "mxfp8", "forward", "gate_up", _operand("gate", _double_one)),
    Fault("input not quantized", DENSE, "mxfp8", "forward", "gate_up", _unquantized("x")),
    Fault("intermediate not quantized", DENSE, "mxfp8", "forward", "down", _unquantized()),
    Fault("two rows of down exchanged", DENSE, "mxfp8", "forward", "down", _operand("down", _swap)),
    Fault("saved gate of other rows", DENSE, "mxfp8", "forward", "gate_up", _saved(0, _rolled)),
    Fault("saved intermediate of other rows", DENSE, "mxfp8", "forward", "gate", _saved(3, _rolled)),
    Fault("carry lost over tiles of rows", DENSE, "mxfp8", "backward", "down.dw", _OVER_ROWS),
    Fault("scale of the gradient off by one", DENSE, "mxfp8", "backward", "down.dx", _operand("dout", _double, 1)),
    Fault("gradients of gate and up not quantized", DENSE, "mxfp8", "backward", "gate_up.dx", _unquantized()),
    Fault("weights of dX not quantized", DENSE, "mxfp8", "backward", "gate_up.dx", _unquantized(axis=0)),
    # experts, bf16
    Fault("dropped expert", EXPERTS, "bf16", "forward", "down", _argument(1, _dropped), EXPERT),
    Fault("token routed elsewhere", EXPERTS, "bf16", "forward", "gate_up", _argument(1, _routed_elsewhere)),
    Fault("routing weights exchanged", EXPERTS, "bf16", "forward", "down", _argument(1, _weights_exchanged)),
    Fault("weights of another expert", EXPERTS, "bf16", "forward", "gate_up", _argument(2, _neighbor), EXPERT),
    Fault("stale down of one expert", EXPERTS, "bf16", "forward", "down", _argument(2, _stale("down", expert=1)), 1),
    Fault("gradient of the wrong expert", EXPERTS, "bf16", "backward", "gate_up.dw", _result(2, _swap)),
    Fault("down's gradient of the wrong expert", EXPERTS, "bf16", "backward", "down.dw", _result(3, _swap)),
    Fault(
        "routing gradient of the other slot",
        EXPERTS,
        "bf16",
        "backward",
        "down.dx",
        _result(1, lambda grad: grad.copy_(grad.flip(1))),
    ),
    Fault("expert dropped in the backward", EXPERTS, "bf16", "backward", "gate", _argument(2, _dropped)),
    Fault(
        "infinity in a row of dX",
        EXPERTS,
        "bf16",
        "backward",
        "gate_up.dx",
        _result(0, lambda d: d[ROW].fill_(torch.inf)),
    ),
    # experts, mxfp8
    Fault("scale of rows off by one", EXPERTS, "mxfp8", "forward", "gate_up", _operand("x", _double)),
    Fault("down not quantized", EXPERTS, "mxfp8", "forward", "down", _unquantized("down")),
    Fault(
        "rows taken as interleaved",
        EXPERTS,
        "mxfp8",
        "forward",
        "gate_up",
        _argument(3, lambda spec: spec._replace(interleaved=True)),
    ),
    Fault("last row of an expert left out", EXPERTS, "mxfp8", "backward", "down.dw", _LAST_ROW_LOST),
    Fault("carry lost over blocks", EXPERTS, "mxfp8", "backward", "down.dw", _OVER_ROWS),
    Fault("gradient not quantized", EXPERTS, "mxfp8", "backward", "down.dx", _unquantized("dout")),
    # what comes into a block
    Fault("outlier channel", DENSE, "mxfp8", "block", "gate_up", _outlier, operand="activations"),
    Fault("NaN in a row of the input", EXPERTS, "bf16", "block", "gate_up", _with_nan, operand="activations"),
)


def fault_named(name: str) -> Fault:
    """Return one of them."""
    return next(fault for fault in FAULTS if fault.name == name)


@contextmanager
def injected(fault: Fault, block: Any) -> Iterator[None]:
    """Break the kernels of `block` alone."""
    if fault.kernel == "block":
        handle = block.register_forward_pre_hook(lambda module, args: (fault.change(args[0]), *args[1:]))
        try:
            yield
        finally:
            handle.remove()
        return
    method = ("mlp" if fault.family == DENSE else "experts") + f"_{fault.kernel}"
    real = getattr(TorchBackend, method)
    mine = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def broken(self: TorchBackend, *args: Any) -> Any:
        weights = next(arg for arg in args if isinstance(arg, FFNWeights | ExpertWeights))
        down = weights.down_HI if isinstance(weights, FFNWeights) else weights.down
        call = real.__get__(self)
        return fault.change(call, *args) if down.untyped_storage().data_ptr() in mine else call(*args)

    with patch.object(TorchBackend, method, broken):
        yield

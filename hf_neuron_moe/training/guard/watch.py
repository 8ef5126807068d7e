"""Looks at the calls of a model's blocks in one step: figures by block and product, and what left its band."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.spec import ExpertWeights, FFNWeights
from hf_neuron_moe.modules.op_watch import WATCHERS, OpCall
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.training.block_calls import Call, decoded
from hf_neuron_moe.training.blocks import first_expert, patched_blocks
from hf_neuron_moe.training.guard.backward_check import check_backward
from hf_neuron_moe.training.guard.bands import WEIGHT, Bands
from hf_neuron_moe.training.guard.findings import Finding
from hf_neuron_moe.training.guard.forward_check import check_forward
from hf_neuron_moe.training.guard.reproduction import Reproduction

_DX, _GATE_DW, _UP_DW = ("gate_up.dx", "dx"), ("gate_up.dw", "gate"), ("gate_up.dw", "up")
_ROUTING = ("down.dx", "routing")
_COMPARED = ("worst", "rounding")
FEW = 16
"""Rows of a block on a process; of fewer, magnitudes say nothing about a run. Expert parallelism may send one.

Rows of experts count by their routing weights: where a router is sure of other experts, all that comes here has weights
of 1e-6, and so have results and gradients.
"""


@dataclass
class StepLooked:
    """What a step came to on this process."""

    step: int
    blocks: dict[str, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)  # in the order in which products are computed
    reproduction: Reproduction | None = None  # of the first alarm
    seconds: float = 0.0  # what looking took


class Watch:
    """Looks at a model's blocks between :meth:`begin` and :meth:`end`; each block's first call counts.

    A block is known by the hook before its forward, where that is compiled by its parameters, and in the backward by
    where its weights are. FSDP gathers weights in memory that other blocks had: what is left is in reverse order.
    """

    def __init__(self, model: nn.Module, bands: Bands, seed: int = 0) -> None:
        self.blocks, self.bands, self.seed = patched_blocks(model), bands, seed
        self.looked: StepLooked | None = None
        self._first_expert = {name: first_expert(block) for name, block in self.blocks.items()}
        self._handles: list[RemovableHandle] = [
            block.register_forward_pre_hook(functools.partial(self._enter, name)) for name, block in self.blocks.items()
        ]  # for the whole training: a compiled model would be compiled again
        self._current = threading.local()
        self._names: dict[int, str] = {}
        self._forward: list[str] = []
        self._backward: set[str] = set()

    def begin(self, step: int) -> None:
        """Begin to look at a step."""
        self.pause()
        self.looked = StepLooked(step)
        self._names, self._forward, self._backward = {}, [], set()
        self._current.name = None
        self._generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        WATCHERS.append(self._see)

    def pause(self) -> None:
        """Look no more until the next step begins; what was found stays."""
        if self._see in WATCHERS:
            WATCHERS.remove(self._see)

    def detach(self) -> None:
        """Take the hooks off the model."""
        self.pause()
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._current.name = name

    @functools.cached_property
    def _by_storage(self) -> dict[int, str]:
        """Blocks by the memory of their parameters, for forwards that no hook announces."""
        return {
            parameter.untyped_storage().data_ptr(): name
            for name, block in self.blocks.items()
            for parameter in (block.buffers() if isinstance(block, QuantizedBlock) else block.parameters())
            if type(parameter) in (nn.Parameter, Tensor)
        }

    @torch.no_grad()
    def _see(self, seen: OpCall) -> None:
        looked = self.looked
        assert looked is not None
        began = time.perf_counter()
        pointer = _down(seen.weights).data_ptr()
        if seen.dout_TH is None:
            name = getattr(self._current, "name", None)
            if name is None:
                name = self._by_storage.get(_down(seen.weights).untyped_storage().data_ptr())
            self._current.name = None
            if name is None or name in self._forward or not seen.call.keep.backward:
                return
            self._names[pointer] = name
            self._forward.append(name)
        else:
            name = self._names.get(pointer)
            if name is None or name in self._backward:
                name = next((each for each in reversed(self._forward) if each not in self._backward), None)
            if name is None:
                return
            self._backward.add(name)
        if not len(seen.results[0] if seen.dout_TH is None else seen.dout_TH):
            return  # a process of expert parallelism that gets no token
        weights, codes = seen.weights, None
        if isinstance(weights, MXExpertStack):
            codes, weights = weights, decoded(weights, dense=seen.routing is None)
        call = Call(name, seen.dout_TH, seen.x_TH, seen.routing, weights, seen.call.spec, codes)  # type: ignore[arg-type]
        form = call.spec.precision
        if seen.dout_TH is None:
            suspicious = self.bands.limits((name, "down", "y", "rounding"), form).high or 0.0
            findings = check_forward(call, seen, self._generator, suspicious)
        else:
            findings = check_backward(call, seen, self._generator)
        for found in findings:
            if call.routing is None:
                found.expert = -1  # the only one of a dense block
            elif found.expert >= 0:
                found.expert += self._first_expert[name]  # by its number in the model
        self._leave_out(name, call, findings)
        self._judge(name, findings, form)
        looked.seconds += time.perf_counter() - began

    def _leave_out(self, block: str, call: Call, findings: Sequence[Finding]) -> None:
        """Leave out magnitudes of too few rows, but those of weights, and add the largest routing weight."""
        rows: float = max(len(call.x_TH), 0 if call.dout_TH is None else len(call.dout_TH))  # FP8 saves no x
        if call.routing is not None:
            own = call.routing.index_TK < len(call.projections.down_EHI)
            weight_R = call.routing.weight_TK[own].float().abs()
            largest = float(weight_R.max()) if len(weight_R) else 0.0
            known = max(largest, self.bands.largest_weight(block))
            rows = float(weight_R.sum()) / known if known else 0.0
            for found in findings:
                if (found.product, found.name) == ("down", "activations"):
                    found.figures[WEIGHT] = largest
        if rows >= FEW:
            return
        always = (*_COMPARED, "nonfinite", WEIGHT)
        for found in findings:
            if found.name != "weights":
                found.figures = {key: value for key, value in found.figures.items() if key in always}

    def _judge(self, block: str, findings: Sequence[Finding], form: str) -> None:
        looked = self.looked
        assert looked is not None
        wrong: list[tuple[Finding, str, float | None, float | None]] = []
        for found in findings:
            place = looked.blocks.setdefault(block, {}).setdefault(found.product, {}).setdefault(found.name, {})
            place.update(found.figures)
            for figure, value in found.figures.items():
                limits = self.bands.limits((block, found.product, found.name, figure), form)
                known = value == value or figure in _COMPARED  # an SQNR of zeros is NaN, and nothing is wrong
                if known and not limits.hold(value):
                    wrong.append((found, figure, *limits))
        routed = any((found.product, found.name) == _ROUTING for found in findings)
        for found, figure, low, high, product in blamed(wrong, routed=routed):
            alarm = {
                "step": looked.step,
                "block": block,
                "product": product,
                "operand": found.name if found.is_operand else "result",
                "result": None if found.is_operand else found.name,
                "expert": found.expert,
                "figure": figure,
                "value": found.figures[figure],
                "low": low,
                "high": high,
            }
            if not looked.alarms and found.evidence is not None:
                looked.reproduction = Reproduction.of(alarm, found.evidence())
            looked.alarms.append(alarm)


Wrong = tuple[Finding, str, float | None, float | None]


def blamed(wrong: Sequence[Wrong], *, routed: bool) -> Iterator[tuple[Finding, str, float | None, float | None, str]]:
    """Yield what is wrong with the product that made it so.

    If the gradients of the input and of gate_up's weights are wrong together, something before both of them is. It is
    the gradient of the intermediate if both projections' are, or the derivative of the gate if only one's is. Where
    there are gradients of routing weights (`routed`), they read that of the intermediate, and say which of the two it
    is.
    """
    results = {(found.product, found.name) for found, figure, *_ in wrong if figure in _COMPARED}
    weights = results & {_GATE_DW, _UP_DW}
    common = _DX in results and bool(weights)
    source = "down.dx" if (_ROUTING in results if routed else len(weights) == 2) else "gate"
    for found, figure, low, high in wrong:
        place = (found.product, found.name)
        if common and figure in _COMPARED and place in {_DX, _GATE_DW, _UP_DW}:
            if place == _DX:
                yield found, figure, low, high, source
            continue
        yield found, figure, low, high, found.product


def _down(weights: FFNWeights | ExpertWeights | MXExpertStack) -> Tensor:
    if isinstance(weights, MXExpertStack):
        return weights.down_codes
    return weights.down_HI if isinstance(weights, FFNWeights) else weights.down

"""One process of ``hf-neuron-moe smoke``: a block's kernels traced, called twice, and compared with PyTorch.

What it does is appended to a file as it goes on, so that the file says how far it came if the process ends or blocks.
Nothing is caught here: how the process ends is the result.

T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend, resolve_backend
from hf_neuron_moe.backends.base import NOTHING, BackwardCall
from hf_neuron_moe.backends.mx_weights import SWIZZLED, WORDS, MXExpertStack, MXLayout
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import Block, this_device, unsupported_reason
from hf_neuron_moe.backends.neuron.quantized_experts import unsupported_reason_quantized
from hf_neuron_moe.backends.operator_registration import plugin_function
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec, ExpertWeights, FFNWeights, Routing, Wants
from hf_neuron_moe.device.device_report import ORDER
from hf_neuron_moe.device.installed import inspect_installation
from hf_neuron_moe.device.request import Request
from hf_neuron_moe.device.smoke import (
    AGREES,
    CASES,
    COMPILED,
    GRADIENTS,
    NEFF_CACHE,
    NOT_RUN,
    RAN,
    TRACED,
    Case,
    Job,
    count_executables,
)
from hf_neuron_moe.device.tolerances import BOUNDS, compare
from hf_neuron_moe.errors import BackendUnavailableError
from hf_neuron_moe.formats.constants import SwizzleScheme
from hf_neuron_moe.formats.moe_mx import (
    HIDDEN_SCHEME,
    INTERMEDIATE_SCHEME,
    quantize_moe_down,
    quantize_moe_gate_up,
)
from hf_neuron_moe.formats.mx import quantize_mx
from hf_neuron_moe.modules import ops, quantized_ops

KEEP = parse_keep("gate_pre+up")
Values = tuple[Tensor, ...]
Operands = tuple[Tensor | None, ...]


class Problem(NamedTuple):
    """A block's operands on the CPU, in the order of its operators, and what they compute."""

    case: Case
    operands: Operands
    spec: BlockSpec
    layouts: tuple[MXLayout, ...] = ()

    @classmethod
    def of(cls, case: Case, seed: int) -> Problem:
        """Draw rows as a norm layer makes them, weights that keep their size, and a routing of softmax weights."""
        generator = torch.Generator().manual_seed(seed)
        T, H, I, E = case.tokens, case.hidden, case.inner, case.experts  # noqa: E741

        def draw(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).bfloat16()

        spec, x = BlockSpec(case.precision, case.block_size), draw(T, H, scale=1.0)
        count = () if E is None else (E,)
        gate_up, down = draw(*count, 2 * I, H, scale=H**-0.5), draw(*count, H, I, scale=I**-0.5)
        routing: Operands = (None, None) if case.frozen else ()
        if E is not None:
            weights, ids = torch.rand(T, E, generator=generator).softmax(-1).topk(case.top_k, -1)
            routing = ids, weights / weights.sum(-1, keepdim=True)
        if case.frozen:
            codes, layouts = _quantized(gate_up, down)
            return cls(case, (x, *routing, *codes, None, None), BlockSpec("bf16"), layouts)
        if E is not None:
            return cls(case, (x, *routing, gate_up, down, None, None), spec)
        return cls(case, (x, *gate_up.chunk(2), down, None, None, None), spec)

    @property
    def stack(self) -> MXExpertStack:
        """Of a frozen block."""
        return MXExpertStack(*self.operands[3:7], *self.layouts)  # type: ignore[arg-type]

    def unsupported_reason(self) -> str | None:
        """Why this machine's kernels do not take the block."""
        device, adapter, case = this_device(), Adapter(), self.case
        if case.frozen:
            return unsupported_reason_quantized(self.stack, device, adapter, training=False)
        kind = "mlp" if case.experts is None else "experts"
        block = Block(kind, case.precision, case.hidden, case.inner, case.block_size)
        return unsupported_reason(block, device, adapter)

    def forward(self, operands: Operands, backend: str) -> Values:
        """Return the output and what is saved for backward, by the operator that training calls."""
        keep = NOTHING if self.case.frozen else KEEP
        call = BlockCall(self.spec, keep, backend, False, self.layouts).encode()
        operator = ops.mlp_fwd if self.case.experts is None else ops.moe_fwd
        found: Values = (quantized_ops.frozen_fwd if self.case.frozen else operator)(*operands, call)
        return found

    def backward(self, operands: Operands, dout: Tensor, saved: Values, backend: str) -> Values:
        """Return the gradients in the order of :data:`GRADIENTS`."""
        call = BlockCall(self.spec, KEEP, backend, False).encode()
        operator = ops.mlp_bwd if self.case.experts is None else ops.moe_bwd
        wants = (True,) * (2 if self.case.experts is None else 3)
        found: Values = operator(dout, *operands, *saved, call, *wants)
        return found

    def body(self, operands: Any, dout: Tensor | None, saved: Any) -> None:
        """Call the backend itself, as a compiler does that traces into the body of an operator."""
        backend = get_backend("neuron").without_copies
        x, routing = operands[0], Routing(*operands[1:3])
        if self.case.frozen:
            stack = MXExpertStack(*operands[3:7], *self.layouts)
            backend.quantized_forward(x, None if self.case.experts is None else routing, stack, NOTHING)
        elif self.case.experts is None:
            weights = FFNWeights(*operands[1:])
            if dout is None:
                backend.mlp_forward(x, weights, self.spec, KEEP)
            else:
                backend.mlp_backward(dout, x, weights, saved, BackwardCall(self.spec, KEEP, Wants()))
        else:
            experts = ExpertWeights(*operands[3:])
            if dout is None:
                backend.experts_forward(x, routing, experts, self.spec, KEEP)
            else:
                backend.experts_backward(dout, x, routing, experts, saved, BackwardCall(self.spec, KEEP, Wants()))


def _quantized(gate_up: Tensor, down: Tensor) -> tuple[Operands, tuple[MXLayout, ...]]:
    """Codes and scales of both projections, swizzled or, of experts, in words, with their layouts."""
    if gate_up.dim() == 2:
        pair = [quantize_mx(weight) for weight in (gate_up, down)]
        layout = MXLayout(arrangement=SWIZZLED, scheme=SwizzleScheme.WRAPX.value)
        return tuple(tensor for each in pair for tensor in (each.codes, each.scales)), (layout, layout)
    E, rows, H = gate_up.shape
    words = quantize_moe_gate_up(gate_up.view(E, 2, rows // 2, H).permute(0, 3, 1, 2)), quantize_moe_down(down.mT)
    schemes = HIDDEN_SCHEME, INTERMEDIATE_SCHEME
    layouts = tuple(MXLayout(arrangement=WORDS, scheme=scheme.value) for scheme in schemes)
    return tuple(tensor for each in words for tensor in (each.words, each.scales)), layouts


class Recorder(NamedTuple):
    """Appends what a kernel did to the job's file."""

    path: Path
    need: str

    def tell(self, event: str, **facts: Any) -> None:
        """Append an event; whatever follows, it is in the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "need": self.need, **facts}) + "\n")

    def begin(self, stage: str) -> None:
        """Append that a stage begins, and how many executables there are."""
        cache = os.environ.get(NEFF_CACHE)
        self.tell("begin", stage=stage, executables=count_executables(Path(cache).parent) if cache else 0)


def run(job: Job) -> None:
    """Do a job."""
    if job.case is None:
        _look(job)
        return
    case, place = CASES[job.case], Request(device=job.device).device_here()
    problem = Problem.of(case, job.seed)
    if (reason := problem.unsupported_reason()) is not None:
        for need in case.needs:
            Recorder(Path(job.events), need).tell(NOT_RUN, note=reason)
        return
    resolve_backend("neuron", place)  # registers the operators with the plugin
    there = tuple(None if tensor is None else tensor.to(place) for tensor in problem.operands)
    recorders = [Recorder(Path(job.events), need) for need in case.needs]
    trace = partial(problem.body, dout=None, saved=())
    found = _measured(recorders[0], partial(problem.forward, there, "neuron"), job.trace and trace, there)
    expected = problem.forward(problem.operands, "torch")
    _judge(recorders[0], case, ("output",), found, expected)
    if len(recorders) > 1:
        dout = torch.randn(case.tokens, case.hidden, generator=torch.Generator().manual_seed(job.seed + 1)).bfloat16()
        saved, arrived = found.values[1:], dout.to(place)
        call = partial(problem.backward, there, arrived, saved, "neuron")
        trace = partial(_body_of, problem, len(there))
        made = _measured(recorders[1], call, job.trace and trace, (*there, arrived, *saved))
        grads = problem.backward(problem.operands, dout, expected[1:], "torch")
        _judge(recorders[1], case, GRADIENTS[case.experts is not None], made, grads)


def _body_of(problem: Problem, count: int, operands: Any) -> None:
    """Trace the backward."""
    problem.body(operands[:count], operands[count], operands[count + 1 :])


class Measured(NamedTuple):
    """Results on the device, and seconds."""

    values: Values
    compile_seconds: float
    run_seconds: float
    fallback_ops: list[str] | None


def _measured(recorder: Recorder, call: Callable[[], Values], trace: Any, operands: Operands) -> Measured:
    """Trace on fake tensors, then call twice: the first call compiles."""
    if trace:
        recorder.begin(TRACED)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            trace(operands=tuple(None if each is None else mode.from_tensor(each) for each in operands))
        recorder.tell(TRACED)
    clear, ask = plugin_function("clear_op_tracking"), plugin_function("get_fallback_ops")
    if clear is not None:
        clear()
    recorder.begin(COMPILED)
    first, _ = _timed(call)
    recorder.tell(COMPILED)
    recorder.begin(RAN)
    second, values = _timed(call)
    recorder.tell(RAN)
    recorder.begin(AGREES)
    return Measured(values, max(first - second, 0.0), second, None if ask is None else sorted(set(map(str, ask()))))


def _timed(call: Callable[[], Values]) -> tuple[float, Values]:
    begin = time.perf_counter()
    values = call()
    for value in values:
        value.cpu()  # waits for the device
    return time.perf_counter() - begin, values


def _judge(recorder: Recorder, case: Case, names: tuple[str, ...], found: Measured, expected: Values) -> None:
    """Compare the results in `names`; further ones are what is saved, or gradients of absent biases."""
    pairs = zip(names, found.values, expected, strict=False)
    tensors = [compare(name, mine.cpu(), theirs, BOUNDS[case.precision]) for name, mine, theirs in pairs]
    worst = max(tensors, key=lambda tensor: ORDER.index(tensor.verdict))
    recorder.tell(
        AGREES,
        verdict=worst.verdict,
        note=f"{worst.name}: {worst.note}" if worst.note else "",
        compile_seconds=found.compile_seconds,
        run_seconds=found.run_seconds,
        fallback_ops=found.fallback_ops,
        tensors=[tensor.to_dict() for tensor in tensors],
    )


def _look(job: Job) -> None:
    """Tell what is installed, and why no kernel can run here."""
    place, refused = None, None
    try:
        place = str(Request(device=job.device).device_here())
    except BackendUnavailableError as error:
        refused = error.args[0]
    Recorder(Path(job.events), "").tell(
        "machine", device=place, refused=refused, installation=inspect_installation().to_dict()
    )


if __name__ == "__main__":
    run(Job(**json.loads(sys.argv[1])))

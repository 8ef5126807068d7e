"""One process of ``hf-neuron-moe smoke``: a block's kernels traced, called twice, and compared with PyTorch.

It prints each event when it happens, so that they show how far it came if the process ends or blocks. Nothing is caught
here: how the process ends is the result.

T tokens, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import resolve_backend
from hf_neuron_moe.backends.base import NOTHING
from hf_neuron_moe.backends.mx_weights import SWIZZLED, WORDS, MXExpertStack, MXLayout
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.limits import Block, this_device, unsupported_reason
from hf_neuron_moe.backends.neuron.quantized_experts import unsupported_reason_quantized
from hf_neuron_moe.backends.operator_registration import body_of, plugin_function
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec
from hf_neuron_moe.device import smoke
from hf_neuron_moe.device.device_report import ORDER
from hf_neuron_moe.device.installed import inspect_installation
from hf_neuron_moe.device.request import Request
from hf_neuron_moe.device.tolerances import BOUNDS, compare
from hf_neuron_moe.errors import BackendUnavailableError
from hf_neuron_moe.formats.moe_mx import HIDDEN_SCHEME, INTERMEDIATE_SCHEME, quantize_moe_down, quantize_moe_gate_up
from hf_neuron_moe.formats.mx import quantize_mx
from hf_neuron_moe.modules import ops, quantized_ops

Values = tuple[Any, ...]


class Problem(NamedTuple):
    """A block's operands on the CPU, in the order of its operators."""

    case: smoke.Case
    operands: Values
    layouts: tuple[MXLayout, ...]

    @classmethod
    def of(cls, case: smoke.Case, generator: torch.Generator) -> Problem:
        """Draw rows as a norm layer makes them, weights that keep their size, and a routing of softmax weights."""
        T, H, I, E = case.tokens, case.hidden, case.inner, case.experts  # noqa: E741
        shapes = ((T, H), (*(E or ()), 2 * I, H), (*(E or ()), H, I))
        x, gate_up, down = (
            (torch.randn(shape, generator=generator) * (1.0 if shape == (T, H) else shape[-1] ** -0.5)).bfloat16()
            for shape in shapes
        )
        routing: Values = (None, None) if case.frozen else ()
        if E:
            affinities, ids = torch.rand(T, *E, generator=generator).softmax(-1).topk(case.top_k, -1)
            routing = ids, affinities / affinities.sum(-1, keepdim=True)
        weights, layouts = _quantized(gate_up, down) if case.frozen else ((gate_up, down), ())
        if not (E or case.frozen):
            weights = (*gate_up.chunk(2), down, None)
        return cls(case, (x, *routing, *weights, None, None), layouts)

    def call(self, backend: str) -> str:
        """The operators' string argument."""
        keep = NOTHING if self.case.frozen else parse_keep("gate_pre+up")
        spec = BlockSpec("bf16" if self.case.frozen else self.case.precision, self.case.block_size)
        return BlockCall(spec, keep, backend, False, self.layouts).encode()

    def unsupported_reason(self) -> str | None:
        """Why this machine's kernels do not take the block."""
        device, adapter, case = this_device(), Adapter(), self.case
        if case.frozen:
            stack = MXExpertStack(*self.operands[3:7], *self.layouts)
            return unsupported_reason_quantized(stack, device, adapter, training=False)
        sizes = case.hidden, case.inner, case.block_size
        return unsupported_reason(Block("experts" if case.experts else "mlp", case.precision, *sizes), device, adapter)


def _quantized(gate_up: Tensor, down: Tensor) -> tuple[Values, tuple[MXLayout, ...]]:
    """Codes and scales of both projections, swizzled or, of experts, in words, with their layouts."""
    if gate_up.dim() == 2:
        pair = [quantize_mx(weight) for weight in (gate_up, down)]
        return tuple(tensor for each in pair for tensor in (each.codes, each.scales)), (
            MXLayout(arrangement=SWIZZLED),
        ) * 2
    E, rows, H = gate_up.shape
    words = quantize_moe_gate_up(gate_up.view(E, 2, rows // 2, H).permute(0, 3, 1, 2)), quantize_moe_down(down.mT)
    layouts = tuple(MXLayout(arrangement=WORDS, scheme=each.value) for each in (HIDDEN_SCHEME, INTERMEDIATE_SCHEME))
    return tuple(tensor for each in words for tensor in (each.words, each.scales)), layouts


def tell(need: str, event: str, **facts: object) -> None:
    """Print an event of a kernel."""
    sys.stdout.write(f"\n{smoke.MARK}{json.dumps({'need': need, 'event': event, **facts})}\n")
    sys.stdout.flush()


def run(case: str | None, device: str | None, seed: int, trace: bool) -> None:
    """Run a block's kernels, or without a `case` look at the machine."""
    if case is None:
        _look(device)
        return
    place, generator = Request(device=device).device_here(), torch.Generator().manual_seed(seed)
    problem, needs = Problem.of(smoke.CASES[case], generator), smoke.CASES[case].needs
    if (reason := problem.unsupported_reason()) is not None:
        for need in needs:
            tell(need, smoke.NOT_RUN, note=reason)
        return
    resolve_backend("neuron", place)  # registers the operators with the plugin
    experts, operands = bool(problem.case.experts), problem.operands
    forward, backward = (ops.moe_fwd, ops.moe_bwd) if experts else (ops.mlp_fwd, ops.mlp_bwd)
    forward = quantized_ops.frozen_fwd if problem.case.frozen else forward
    expected = forward(*operands, problem.call("torch"))
    found = _compared(needs[0], forward, (*operands, problem.call("neuron")), expected, (place, trace, ("output",)))
    if len(needs) > 1:
        dout, wants = torch.randn(operands[0].shape, generator=generator).bfloat16(), (True,) * (2 + experts)
        expected = backward(dout, *operands, *expected[1:], problem.call("torch"), *wants)
        arguments = (dout, *operands, *found[1:], problem.call("neuron"), *wants)
        _compared(needs[1], backward, arguments, expected, (place, trace, smoke.GRADIENTS[experts]))


def _compared(need: str, operator: Any, arguments: Values, expected: Values, how: tuple[Any, bool, Any]) -> Values:
    """Trace a kernel on fake tensors, call it twice, the first time to compile, and compare; return its results."""
    place, trace, names = how
    there = [value.to(place) if isinstance(value, Tensor) else value for value in arguments]
    if trace:
        _begin(need, smoke.TRACED)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            body_of(operator)(*(mode.from_tensor(each) if isinstance(each, Tensor) else each for each in there))
        tell(need, smoke.TRACED)
    clear, ask = plugin_function("clear_op_tracking"), plugin_function("get_fallback_ops")
    if clear is not None:
        clear()
    seconds = []
    for stage in (smoke.COMPILED, smoke.RAN):
        _begin(need, stage)
        begin = time.perf_counter()
        found: Values = operator(*there)
        copies = [value.cpu() for value in found]  # waits for the device
        seconds.append(time.perf_counter() - begin)
        tell(need, stage)
    fallback = None if ask is None else sorted(set(map(str, ask())))
    _begin(need, smoke.AGREES)
    bounds = BOUNDS["bf16" if need in ("moe_forward", "moe_backward") else "mxfp8"]
    tensors = [compare(name, mine, theirs, bounds) for name, mine, theirs in zip(names, copies, expected)]
    worst = max(tensors, key=lambda tensor: ORDER.index(tensor.verdict))
    tell(
        need,
        smoke.AGREES,
        verdict=worst.verdict,
        note=f"{worst.name}: {worst.note}" if worst.note else "",
        compile_seconds=max(seconds[0] - seconds[1], 0.0),
        run_seconds=seconds[1],
        fallback_ops=fallback,
        tensors=[tensor.to_dict() for tensor in tensors],
    )
    return found


def _begin(need: str, stage: str) -> None:
    tell(need, "begin", stage=stage, executables=smoke.count_executables(Path(os.environ[smoke.NEFF_CACHE])))


def _look(device: str | None) -> None:
    """Tell what is installed, and why no kernel can run here."""
    place, refused = None, None
    try:
        place = str(Request(device=device).device_here())
    except BackendUnavailableError as error:
        refused = error.args[0]
    tell("", "machine", device=place, refused=refused, installation=inspect_installation().to_dict())


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))

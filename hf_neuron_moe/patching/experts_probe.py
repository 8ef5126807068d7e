"""A small numeric comparison of an experts module's own forward with the operator: values and all gradients.

T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.modules.experts import compute_experts
from hf_neuron_moe.modules.experts_calls import BY_EXPERT, IDENTITY, ROUTED, SHARED, SORTED, STACKED
from hf_neuron_moe.modules.experts_form import ExpertsForm
from hf_neuron_moe.patching.probe import OWN_FAILURES, SIZES, TOLERANCE, E, H, I, deviation, draw, stand_in

_CONFIG = NeuronMoEConfig(precision="fp32", backend="torch", block_size=128)
_INDEX_TK = ((0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (0, 1), (2, 1), (0, 1))
_UP_SCALE = 3.0
"""Up's values are larger than the gate's, so that exchanged or interleaved halves show."""


def probe_experts(module: Any, form: ExpertsForm) -> str | None:
    """Return why the experts `module`'s eager forward disagrees with the operator, or None.

    Compared are the result and the gradients of the input, the routing weights and every parameter. The first draw has
    ordinary values. In the second, a large part of them is beyond the gate's limits, in evaluation mode.
    """
    # Whatever the caller is in the middle of (a default device, autocast, inference mode) must not touch the probe.
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        generator = torch.Generator(device="cpu").manual_seed(0)
        ordinary = _difference(module, form, generator, 1.0, training=True)
        return ordinary or _difference(module, form, generator, _largest_limit(form.gate), training=False)


def _difference(
    module: Any, form: ExpertsForm, generator: torch.Generator, scale: float, *, training: bool
) -> str | None:
    kind = type(module)
    eager = getattr(kind.forward, "__wrapped__", kind.forward)  # what transformers' decorator wrapped
    shell, inputs = _small(module, form, generator), _inputs(form, generator, scale)
    for part in shell.modules():
        part.__dict__["training"] = training
    leaves = [tensor for tensor in (*inputs, *shell.parameters()) if tensor.requires_grad]
    dout = draw(generator, *inputs[0].shape)

    def results(y: Tensor) -> list[Tensor]:
        return [y.detach(), *torch.autograd.grad(y, leaves, dout, materialize_grads=True)]

    try:
        y = eager(shell, *inputs)
        if y.shape != dout.shape:
            return f"on a small example its result has shape {tuple(y.shape)}, not {tuple(dout.shape)}"
        expected = results(y)
    except OWN_FAILURES as error:
        return f"its forward does not run on a small example: {type(error).__name__}: {error}"
    actual = results(compute_experts(shell, inputs, form, _CONFIG, "torch", "minimal"))
    for place, (theirs, mine) in enumerate(zip(expected, actual, strict=True)):
        if not (far := deviation(theirs, mine)) <= TOLERANCE:
            what = "its result" if place == 0 else "a gradient"
            by = f"{far:.1%} of the largest value"
            return f"on a small example {what} differs from the gate of its source by {by}"
    return None


def _largest_limit(gate: Gate) -> float:
    """The factor that brings values of size 1 to the gate's limits, or without limits to an activation's tails."""
    limits = (gate.gate_max, gate.gate_min, gate.up_max, gate.up_min, gate.act_max, gate.gate_softcap, gate.up_softcap)
    return max((abs(limit) for limit in limits if limit is not None), default=4.0)


def _inputs(form: ExpertsForm, generator: torch.Generator, scale: float) -> tuple[Tensor, ...]:
    """Arguments of the module's call."""
    ids_TK = torch.tensor(_INDEX_TK, device="cpu")
    x_TH = draw(generator, len(ids_TK), H) * scale
    if form.call == BY_EXPERT:  # each expert gets its part, where rows of tokens that did not choose it are zero
        parts = [x_TH * (ids_TK == expert).any(1, keepdim=True) for expert in range(E)]
        return (torch.cat(parts).requires_grad_(),)
    x = (x_TH if form.call in (ROUTED, IDENTITY) else x_TH.unsqueeze(0)).requires_grad_()
    if form.call == SORTED:
        return (x,)
    if form.call == IDENTITY:
        ids_TK = ids_TK + (ids_TK == 0) * E  # the first expert's tokens go to one that returns its input
    shape_TK = (len(ids_TK), E if form.call == SHARED else ids_TK.shape[1])
    weight_TK = 2 * draw(generator, *shape_TK)  # of both signs, below and above 1
    return (x, weight_TK.requires_grad_()) if form.call == SHARED else (x, ids_TK, weight_TK.requires_grad_())


def _values(form: ExpertsForm, generator: torch.Generator) -> list[Tensor]:
    """Weights and biases in the module's own layout."""
    columns, rows = 2 * I if form.gate.gated else I, E + 1 if form.call == IDENTITY else E
    gate_up, bias = draw(generator, rows, H, columns) * H**-0.5, draw(generator, E, columns)
    if form.gate.gated:
        ups = slice(1, None, 2) if form.interleaved else slice(I, None)
        gate_up[..., ups] *= _UP_SCALE
    down = draw(generator, E, I, H)
    if form.call == STACKED:
        return [part.transpose(1, 2).reshape(E * I, H) for part in gate_up.chunk(2, dim=2)] + [down.reshape(E * I, H)]
    if not form.transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    if form.call == SHARED:
        return [*gate_up.chunk(2, dim=1), down]
    return [gate_up, bias, down, draw(generator, E, H)] if form.biased else [gate_up, down]


def _small(module: Any, form: ExpertsForm, generator: torch.Generator) -> nn.Module:
    """A stand-in with drawn parameters, all of which require gradients."""
    own, inside = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for path, value in zip(form.parameters, _values(form, generator)):
        child, _, name = path.rpartition(".")
        (inside.setdefault(child, {}) if child else own)[name] = value
    if form.post_norm is not None:
        inside[form.post_norm] = {name: draw(generator, H) for name in getattr(module, form.post_norm)._parameters}
    children = {name: stand_in(getattr(module, name), {}, parameters) for name, parameters in inside.items()}
    if form.call == SORTED:
        own["bias"] = draw(generator, H)
        gate = stand_in(module.router.layer, {}, {"weight": draw(generator, E, H)})
        children["router"] = stand_in(module.router, {"layer": gate}, {})
    shell = stand_in(module, children, own)
    for part in shell.modules():
        sizes = SIZES if form.call != SORTED else {"num_experts": E, "top_k": 2}
        part.__dict__.update({key: size for key, size in sizes.items() if key in part.__dict__})
    shell.__dict__["_is_expert_parallel"] = False
    if form.call == SORTED:
        shell.__dict__["input_size"] = H
    for param in shell.parameters():
        param.requires_grad_()
    return shell

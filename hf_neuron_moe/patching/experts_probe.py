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
from hf_neuron_moe.modules.experts_form import ExpertsForm
from hf_neuron_moe.patching.probe import OWN_FAILURES, SIZES, TOLERANCE, E, H, I, draw, stand_in

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
    eager = type(module).forward.__wrapped__  # what the decorator wrapped
    shell, inputs = _small(module, form, generator), _inputs(generator, scale)
    shell.__dict__["training"] = training
    leaves, dout_TH = (inputs[0], inputs[2], *shell.parameters()), draw(generator, len(_INDEX_TK), H)

    def results(y_TH: Tensor) -> list[Tensor]:
        return [y_TH.detach(), *torch.autograd.grad(y_TH, leaves, dout_TH, materialize_grads=True)]

    try:
        y_TH = eager(shell, *inputs)
        if y_TH.shape != dout_TH.shape:
            return f"on a small example its result has shape {tuple(y_TH.shape)}, not {tuple(dout_TH.shape)}"
        expected = results(y_TH)
    except OWN_FAILURES as error:
        return f"its forward does not run on a small example: {type(error).__name__}: {error}"
    actual = results(compute_experts(shell, inputs, form, _CONFIG, "torch", "minimal"))
    for place, (theirs, mine) in enumerate(zip(expected, actual, strict=True)):
        deviation = ((theirs - mine).abs().max() / theirs.abs().max()).item()
        if not deviation <= TOLERANCE:
            what = "its result" if place == 0 else "a gradient"
            return (
                f"on a small example {what} differs from the gate of its source by {deviation:.1%} of the largest value"
            )
    return None


def _largest_limit(gate: Gate) -> float:
    """The factor that brings values of size 1 to the gate's limits, or without limits to an activation's tails."""
    limits = (gate.gate_max, gate.gate_min, gate.up_max, gate.up_min, gate.act_max, gate.gate_softcap, gate.up_softcap)
    return max((abs(limit) for limit in limits if limit is not None), default=4.0)


def _inputs(generator: torch.Generator, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    x_TH = draw(generator, len(_INDEX_TK), H) * scale
    weight_TK = torch.rand(len(_INDEX_TK), 2, generator=generator, device="cpu")  # they do not sum to 1
    return x_TH.requires_grad_(), torch.tensor(_INDEX_TK, device="cpu"), weight_TK.requires_grad_()


def _small(module: Any, form: ExpertsForm, generator: torch.Generator) -> nn.Module:
    """A stand-in with drawn weights and biases in the module's own layout, all of which require gradients."""
    columns = 2 * I if form.gate.gated else I
    gate_up, bias = draw(generator, E, H, columns) * H**-0.5, draw(generator, E, columns)
    if form.gate.gated:
        ups = slice(1, None, 2) if form.interleaved else slice(I, None)
        gate_up[..., ups] *= _UP_SCALE
    down = draw(generator, E, I, H)
    if not form.transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    values = (gate_up, bias, down, draw(generator, E, H)) if form.biased else (gate_up, down)
    children = {}
    if form.post_norm is not None:
        norm: nn.Module = getattr(module, form.post_norm)
        sizes = {name: draw(generator, H) for name in norm._parameters}
        children[form.post_norm] = stand_in(norm, children={}, parameters=sizes)
    shell = stand_in(module, children=children, parameters=dict(zip(form.parameters, values)))
    shell.__dict__.update({key: size for key, size in SIZES.items() if key in shell.__dict__})
    shell.__dict__["_is_expert_parallel"] = False
    for param in shell.parameters():
        param.requires_grad_()
    return shell

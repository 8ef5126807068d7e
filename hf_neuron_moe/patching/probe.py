"""A small numeric comparison of an original module's own forward with the operator.

The original's class runs on a tiny stand-in that has the instance's attributes but small fp32 weights on the CPU, which
costs milliseconds for any model size, also on the meta device, and leaves the module and global random state alone.

T tokens, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.block import HOOK_DICTS
from hf_neuron_moe.modules.structure import act_of
from hf_neuron_moe.modules.swiglu_mlp import DenseRoles

T, E, H, I = 6, 3, 8, 12  # noqa: E741
TOLERANCE = 1e-4
"""Largest deviation relative to the largest output. fp32 rounding is near 1e-6; GELU for SiLU deviates by 6-15 %."""

SIZES = (
    dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts"), E)
    | {"total_experts": E + 1}
    | dict.fromkeys(("hidden_dim", "hidden_size"), H)
    | dict.fromkeys(
        ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_hidden_size"), I
    )
)
"""Attributes by which experts classes remember their sizes; the stand-in gets the probe's."""


OWN_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError)
"""What a forward may raise on a small example."""


def probe_dense(module: nn.Module, roles: DenseRoles) -> str | None:
    """Return why `module`'s forward disagrees with the operator, or None."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    inner = roles.half_size if isinstance(roles.half_size, int) else I
    gate_IH, up_IH, down_HI = (draw(generator, *shape) for shape in ((inner, H), (inner, H), (H, inner)))
    inputs = [gate_IH, up_IH] if len(roles.inputs) == 2 else [torch.cat([gate_IH, up_IH])]
    children = {name: _linear(weight) for name, weight in zip(roles.linears, [*inputs, down_HI])}
    shell = stand_in(module, children=children, parameters={})
    if isinstance(roles.half_size, str):
        shell.__dict__[roles.half_size] = I
    x_TH = draw(generator, T, H)
    gate = SWIGLU if roles.activation is None else Gate(act_of(getattr(module, roles.activation)) or "silu")
    return _compare(
        lambda: type(module).forward(shell, x_TH),
        lambda: ops.swiglu_mlp(x_TH, gate_IH, up_IH, down_HI, precision="fp32", backend="torch", gate=gate),
    )


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Return fp32 values of size 1."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def stand_in(module: nn.Module, children: Mapping[str, nn.Module], parameters: dict[str, Tensor]) -> nn.Module:
    """Return an object of the class of `module` with its attributes, but these `children` and `parameters`."""
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    # Neither the user's hooks nor a compiled call may run in the probe, also not those of an activation.
    shell.__dict__.update({hooks: type(module.__dict__[hooks])() for hooks in HOOK_DICTS})
    shell.__dict__.pop("_compiled_call_impl", None)
    shell.__dict__["_modules"] = {
        name: children.get(name, child and stand_in(child, children={}, parameters={}))
        for name, child in module._modules.items()
    }
    small = {key: nn.Parameter(value, requires_grad=False) for key, value in parameters.items()}
    shell.__dict__["_parameters"] = {**module._parameters, **small}
    return shell


def _compare(stock: Callable[[], Tensor], operator: Callable[[], Tensor]) -> str | None:
    # Whatever the caller is in the middle of (a default device, autocast, inference mode) must not touch the probe.
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            expected = stock()
        except OWN_FAILURES as error:
            return f"its forward does not run on a small example: {type(error).__name__}: {error}"
        actual = operator()
    if expected.shape != actual.shape:
        return f"on a small example its result has shape {tuple(expected.shape)}, the operator's {tuple(actual.shape)}"
    deviation = ((expected - actual).abs().max() / expected.abs().max()).item()
    if not deviation <= TOLERANCE:
        return f"on a small example its result differs from silu(gate) * up by {deviation:.1%} of the largest value"
    return None

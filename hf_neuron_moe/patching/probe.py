"""A small numeric comparison of an original module's own forward with the operator.

The original's class runs on a tiny stand-in that has the instance's attributes but small fp32 weights on the CPU. That
costs milliseconds for any model size, also on the meta device. It leaves the module and the global random state alone.

T tokens, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.block import HOOK_DICTS
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.engine import installed

T, E, H, I = 6, 3, 8, 12  # noqa: E741
TOLERANCE = 1e-4
"""Largest deviation relative to the largest output. fp32 rounding is near 1e-6; GELU for SiLU deviates by 6-15 %."""

SIZES = (
    dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_shared_experts"), E)
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
    """Return why `module`'s forward disagrees with the operator, or None.

    Rows of the input meet every limit on both sides, and large negative gates; gate and up differ in magnitude, biases
    are of size 1. With limits, biases or changes in place all gradients are compared too. Forwards get a batch axis of
    two, which some of them want, and along which others could mix rows.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    inner = roles.half_size if isinstance(roles.half_size, int) else I
    gate_IH, up_IH, down_HI = (draw(generator, *shape) for shape in ((inner, H), (inner, H), (H, inner)))
    gate_IH[:, 0] += 3  # so that an input along the first axis has gates of one sign
    biases = [draw(generator, size) if biased else None for size, biased in zip((inner, inner, H), _biased(roles))]
    learned = [weight for weight in (gate_IH, up_IH.mul_(UP_SCALE), down_HI, *biases) if weight is not None]
    x_TH = _rows(generator, roles.gate)
    module_of = functools.partial(_dense_stand_in, module, roles, (gate_IH, up_IH, down_HI), tuple(biases))

    def stock(training: bool) -> Tensor:
        return type(module).forward(module_of(training), x_TH.unflatten(0, (2, -1)))

    def operator() -> Tensor:
        options: dict[str, Any] = {"precision": "fp32", "backend": "torch", "gate": roles.gate, "biases": tuple(biases)}
        return ops.swiglu_mlp(x_TH, gate_IH, up_IH, down_HI, **options).unflatten(0, (2, -1))

    gradients = roles.gate.clamped or bool(roles.biased) or roles.overwrites
    return _compare(functools.partial(stock, False), operator, roles.gate, (x_TH, *learned) if gradients else ()) or (
        _compare(functools.partial(stock, True), functools.partial(stock, False), None)
    )


UP_SCALE = 0.5
"""Magnitude of up's weights; gate's are of magnitude 1 and 3."""


def _biased(roles: DenseRoles) -> tuple[bool, bool, bool]:
    *inputs, down = (name in roles.biased for name in roles.linears)
    return inputs[0], inputs[-1], down


def _rows(generator: torch.Generator, gate: Gate) -> Tensor:
    """Groups of T rows: ordinary ones, those with gates from about -12 to 0, and for each limit rows of its size."""
    groups = [draw(generator, T, H), 0.2 * draw(generator, T, H)]
    groups[1][:, 0] -= torch.linspace(1, 3, T, device="cpu")
    limits = (gate.gate_max, gate.gate_min, gate.act_max, gate.up_max, gate.up_min)
    sizes = {abs(limit) for limit in limits if limit is not None}
    # Standard deviations are 4 for gates and 1.4 for up per unit of the input.
    groups += [scale * draw(generator, T, H) for size in sorted(sizes) for scale in (size / 4, 2 * size / 1.4)]
    return torch.cat(groups)


def _dense_stand_in(
    module: nn.Module,
    roles: DenseRoles,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, ...],
    training: bool,
) -> nn.Module:
    """A small instance of the module's class, without what is computed outside of the operator."""
    if len(roles.inputs) == 2:
        held = list(zip(weights, biases))
    else:
        fused = None if biases[0] is None or biases[1] is None else roles.fused(biases[0], biases[1])
        held = [(roles.fused(*weights[:2]), fused), (weights[2], biases[2])]
    children: dict[str, nn.Module] = {name: nn.Identity() for name in roles.before}
    for name, (weight, bias) in zip(roles.linears, held):
        root, _, inner = name.partition(".")
        layer = _linear(weight, bias)
        children[root] = stand_in(getattr(module, root), {inner: layer}, {}) if inner else layer
    factors = {name: torch.ones(1) for name in roles.after if name in module._parameters}
    others = [name for name in roles.after if isinstance(name, str) and name not in factors]
    numbers = [name for name in others if name not in module._modules]
    dropouts = {name: nn.Identity() for name in roles.after if name in module._modules}
    shell = stand_in(module, children={**children, **dropouts}, parameters=factors)
    sizes = dict.fromkeys(roles.input_sizes, H)
    for path, value in (*sizes.items(), (roles.half_size, I), *dict.fromkeys(numbers, 0.0).items()):
        if isinstance(path, str):
            _set_number(shell, path, value)
    for part in shell.modules():
        part.training = training
    return shell


def _set_number(shell: nn.Module, path: str, value: float) -> None:
    """Make a stand-in's attribute the probe's size or probability; an object on the way to it is copied before."""
    *way, name = path.split(".")
    holder: Any = shell
    for part in way:
        held = copy.copy(getattr(holder, part))
        holder.__dict__[part] = held
        holder = held
    holder.__dict__[name] = value


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Return fp32 values of size 1."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    # Not as parameters, which would be leaves of their own: gradients go to the tensors that were drawn.
    layer._parameters["weight"], layer._parameters["bias"] = weight, bias  # type: ignore[assignment]
    return layer


def stand_in(module: nn.Module, children: Mapping[str, nn.Module], parameters: dict[str, Tensor]) -> nn.Module:
    """Return an object of the class of `module` with its attributes, but these `children` and `parameters`."""
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    # Neither the user's hooks nor a compiled call may run in the probe, also not those of an activation.
    shell.__dict__.update({hooks: type(module.__dict__[hooks])() for hooks in HOOK_DICTS})
    shell.__dict__.pop("_compiled_call_impl", None)
    if installed(module) is not None:  # transformers' collectives, which one process alone cannot take part in
        del shell.__dict__["forward"]
    shell.__dict__["_modules"] = {
        name: children.get(name, child and stand_in(child, children={}, parameters={}))
        for name, child in module._modules.items()
    }
    small = {key: nn.Parameter(value, requires_grad=False) for key, value in parameters.items()}
    shell.__dict__["_parameters"] = {**module._parameters, **small}
    return shell


def _compare(
    stock: Callable[[], Tensor], operator: Callable[[], Tensor], gate: Gate | None, learned: Sequence[Tensor] = ()
) -> str | None:
    """Why the results differ, or gradients of `learned` tensors; `gate` is the operator's, None for two modes."""
    # Whatever the caller is in the middle of (a default device, autocast, inference mode) must not touch the probe.
    quiet = (torch.device("cpu"), torch.inference_mode(False), torch.autocast("cpu", enabled=False))
    with quiet[0], quiet[1], quiet[2], torch.set_grad_enabled(bool(learned)):
        for tensor in learned:
            tensor.requires_grad_()
        try:
            expected = stock()
            theirs = _gradients(expected.flatten(0, 1), learned) if learned else ()
        except OWN_FAILURES as error:
            return f"its forward does not run on a small example: {type(error).__name__}: {error}"
        actual = operator()
        if expected.shape != actual.shape:
            shapes = f"{tuple(expected.shape)}, the operator's {tuple(actual.shape)}"
            return f"on a small example its result has shape {shapes}"
        expected, actual = expected.flatten(0, 1), actual.flatten(0, 1)
        pairs = list(zip(expected.split(T), actual.split(T)))
        if learned:
            pairs += zip(theirs, _gradients(actual, learned))
    for tensor in learned:
        tensor.requires_grad_(False)
    worst = next((far for one, other in pairs if not (far := deviation(one, other)) <= TOLERANCE), None)
    if worst is None:
        return None
    if gate is None:
        return f"on a small example its results in training and evaluation mode differ by {worst:.1%}"
    formula = "silu(gate) * up" if gate == SWIGLU else f"the gate that its source says ({gate.title})"
    return f"on a small example its result differs from {formula} by {worst:.1%} of the largest value"


def _gradients(result: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of each group of rows' mean square, scaled so that no group outweighs the others."""
    squares = [rows.square().mean() for rows in result.split(T)]
    loss = torch.stack([square / square.detach() for square in squares if square != 0]).sum()
    return torch.autograd.grad(loss, learned)


def deviation(one: Tensor, other: Tensor) -> float:
    """The largest difference relative to the largest value of both."""
    largest = torch.maximum(one.abs().max(), other.abs().max())
    return ((one - other).abs().max() / largest).item() if largest != 0 else 0.0

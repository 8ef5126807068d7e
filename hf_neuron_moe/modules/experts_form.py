"""Which experts the operators compute: how their parameters lie, and which gate they have.

Every class decorated with ``transformers.integrations.use_experts_implementation`` has the same call and describes its
parameters by flags on the instance, so one rule covers all families. Its gate is read from the source of the method
that transformers calls for it.
"""

from __future__ import annotations

from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.gate_source import GateSource, UnknownForm, read_gate
from hf_neuron_moe.modules.state_dict import WeightRule
from hf_neuron_moe.modules.structure import describe_activation, gate_of, has_call_hooks, supported_activations


class ExpertsForm(NamedTuple):
    """How an experts module computes; E experts, H hidden size, I intermediate size."""

    gate: Gate
    transposed: bool  # weights are [E, H, 2I] and [E, I, H], not [E, 2I, H] and [E, H, I]
    interleaved: bool  # columns of gate and up alternate
    biased: bool
    bias_interleaved: bool  # whether entries of the gate_up bias alternate, also where the weights no longer do
    activation: str | None  # attribute that is called as the activation
    constants: tuple[tuple[str, Any], ...]  # attributes that the gate depends on, with their values
    post_norm: str | None = None  # child that each expert's output goes through before it is weighted

    @property
    def gate_up(self) -> str:
        """Name of the first projection's parameter: gate and up, or up alone."""
        return "gate_up_proj" if self.gate.gated else "up_proj"

    @property
    def ordered(self) -> bool:
        """Whether the weights lie as kernels read them."""
        return self.transposed and not self.interleaved

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in the order in which classes define them."""
        names = (self.gate_up, f"{self.gate_up}_bias", "down_proj", "down_proj_bias")
        return names if self.biased else names[::2]

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """The kernel layout: gate_up ``[E, H, 2I]`` with gate's columns first, down ``[E, I, H]``; biases stay."""
        weights = {self.gate_up: self.interleaved, "down_proj": False}
        return tuple(
            WeightRule(name, (name,), not self.transposed and name in weights, weights.get(name, False))
            for name in self.parameters
        )

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """Return E, H and I of a module of this form."""
        E, first, second = module.get_parameter("down_proj").shape
        return (E, second, first) if self.transposed else (E, first, second)


def is_decorated_experts(module: nn.Module) -> bool:
    """Return whether `module` has the flags that ``use_experts_implementation`` sets since transformers 5.17."""
    return module.__dict__.keys() >= {"has_gate", "has_bias", "is_transposed", "is_concatenated"}


@cache
def _dispatching_forward() -> CodeType:
    """The code of the forward that the decorator installs; the same object for every decorated class."""
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation
    class _Probe(nn.Module):
        def forward(self) -> None:
            """Never called."""

    return _Probe.forward.__code__


def read_experts(module: nn.Module) -> ExpertsForm:
    """Return the form of `module`; raise :class:`UnknownForm` where the operator cannot compute it."""
    if not is_decorated_experts(module):
        raise UnknownForm("its class is not decorated with transformers' use_experts_implementation")
    if module.__dict__.get("_is_hooked") and "forward" in module.__dict__:
        raise UnknownForm("transformers' tensor or expert parallelism wraps its forward, which is not supported")
    if type(module).forward.__code__ is not _dispatching_forward() or "forward" in module.__dict__:
        raise UnknownForm("its forward is not the one that use_experts_implementation installs")
    flags = module.__dict__
    source = _gate_source(module)
    if source.interleaved is flags["is_concatenated"] and source.gate.gated:
        raise UnknownForm(f"is_concatenated={flags['is_concatenated']}, but its gate reads the columns otherwise")
    form = ExpertsForm(
        source.gate,
        bool(flags["is_transposed"]),
        source.interleaved,
        bool(flags["has_bias"]),
        source.interleaved,
        source.activation,
        source.constants,
        _post_norm(module),
    )
    check_shapes(module, form)
    return form


def _gate_source(module: nn.Module) -> GateSource:
    if module.__dict__["has_gate"]:
        if "_apply_gate" in module.__dict__:
            raise UnknownForm("its _apply_gate is overridden on the instance")
        kind: Any = type(module)
        return read_gate(module, kind._apply_gate)
    activation = getattr(module, "act_fn", None)
    gate = gate_of(activation)
    if gate is None:
        raise UnknownForm(
            f"its activation is {describe_activation(activation)}, the kernels have {supported_activations()}"
        )
    if isinstance(activation, nn.Module) and has_call_hooks(activation):
        raise UnknownForm("its act_fn has hooks, which the operator would not call")
    return GateSource(gate._replace(gated=False), False, "act_fn", ())


def _post_norm(module: nn.Module) -> str | None:
    if not getattr(module, "has_post_expert_norm", False):  # a version without the flag has no experts with such a norm
        return None
    if not isinstance(getattr(module, "post_expert_norm", None), nn.Module):
        raise UnknownForm("it has no module post_expert_norm (has_post_expert_norm=True)")
    return "post_expert_norm"


def check_shapes(module: nn.Module, form: ExpertsForm) -> None:
    """Raise :class:`UnknownForm` where the parameters of `module` are not those of `form`."""
    found: dict[str, Any] = {name: getattr(module, name, None) for name in form.parameters}
    missing = [name for name, param in found.items() if not isinstance(param, Tensor)]
    weights = [found[name] for name in (form.gate_up, "down_proj")]
    if missing or any(weight is not None and weight.dim() != 3 for weight in weights):
        raise UnknownForm(f"it has no 3-D parameters {form.gate_up} and down_proj, or no biases for them")
    E, H, I = form.sizes(module)  # noqa: E741
    columns = 2 * I if form.gate.gated else I
    expected: dict[str, tuple[int, ...]] = {form.gate_up: (E, H, columns) if form.transposed else (E, columns, H)}
    expected |= {f"{form.gate_up}_bias": (E, columns), "down_proj_bias": (E, H)} if form.biased else {}
    if any(found[name].shape != shape for name, shape in expected.items()):
        shapes = ", ".join(f"{name} {tuple(param.shape)}" for name, param in found.items())
        raise UnknownForm(f"its parameters do not fit together: {shapes}")


def check_constants(module: nn.Module, form: ExpertsForm, name: str) -> None:
    """Raise, for the block `name`, where an attribute that the gate depends on has changed."""
    for path, value in form.constants:
        owner, _, attr = path.rpartition(".")
        holder = module.get_submodule(owner) if owner else module
        now = getattr(holder, attr, None)
        now = type(now) if isinstance(now, nn.Module) else now
        if now != value:
            fix = "The operator has the value read at patching: unpatch the model before changing it."
            error = UnsupportedModelError.about(path, f"{value!r}, as when the block was patched", repr(now), fix)
            raise error.named(name)

"""Which experts the operators compute: how their parameters lie, and which gate they have.

Every class decorated with ``transformers.integrations.use_experts_implementation`` has the same call and describes its
parameters by flags on the instance, so one rule covers all families. Its gate is read from the source of the method
that transformers calls for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from types import CodeType
from typing import Any

from torch import Tensor, nn

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.engine import axis_parts, installed, strided, style_name, uneven
from hf_neuron_moe.modules.expert_parallel import unsupported_reason_of_exchange
from hf_neuron_moe.modules.experts_calls import IDENTITY, ROUTED, SHARED, SORTED, STACKED, known_call
from hf_neuron_moe.modules.gate_expression import UnknownForm
from hf_neuron_moe.modules.gate_source import GateSource, read_gate
from hf_neuron_moe.modules.state_dict import WeightRule
from hf_neuron_moe.modules.structure import (
    attribute_of,
    describe_activation,
    gate_of,
    has_call_hooks,
    supported_activations,
)


@dataclass(frozen=True)
class ExpertsForm:
    """How an experts module computes; E experts, H hidden size, I intermediate size."""

    gate: Gate
    transposed: bool  # weights are [E, H, 2I] and [E, I, H], not [E, 2I, H] and [E, H, I]
    interleaved: bool  # columns of gate and up alternate
    biased: bool
    bias_interleaved: bool  # whether entries of the gate_up bias alternate, also where the weights no longer do
    activation: str | None  # attribute that is called as the activation
    constants: tuple[tuple[str, Any], ...]  # attributes that the gate depends on, with their values
    post_norm: str | None = None  # child that each expert's output goes through before it is weighted
    call: str = ROUTED  # a row of the table in ``experts_calls``
    inputs: tuple[str, ...] = ("gate_up_proj",)  # parameters of gate and up, or of up alone
    down: str = "down_proj"
    experts: str = ""  # attribute that says E, where the parameters' first axis does not
    gate_text: str = field(init=False)  # for calls that are compiled

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate_text", self.gate.text)

    @property
    def gate_up(self) -> str:
        """Name of the first projection's parameter: gate and up, or up alone."""
        return self.inputs[0]

    @property
    def ordered(self) -> bool:
        """Whether the weights lie as kernels read them."""
        return self.transposed and not self.interleaved

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases' parameters, the first projection's and down's, if there are any."""
        return (f"{self.gate_up}_bias", f"{self.down}_bias") if self.biased else ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in the order in which classes define them."""
        if not self.biased:
            return (*self.inputs, self.down)
        return (self.gate_up, self.biases[0], self.down, self.biases[1])

    @property
    def routed(self) -> bool:
        """Whether it is called with hidden states, ids and weights, as decorated classes are."""
        return self.call == ROUTED

    @property
    def stacked(self) -> bool:
        """Whether the experts' matrices lie below one another in parameters of two axes."""
        return self.call == STACKED

    @property
    def stock_only(self) -> str | None:
        """Why the parameters cannot have the kernel layout; None where they can."""
        if self.call == SHARED:
            return "its gate and up are parameters of their own"
        return "its weights are parameters of its children" if self.call in (STACKED, SORTED) else None

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """The kernel layout: gate_up ``[E, H, 2I]`` with gate's columns first, down ``[E, I, H]``; biases stay."""
        weights = {self.gate_up: self.interleaved, self.down: False}
        return tuple(
            WeightRule(name, (name,), not self.transposed and name in weights, weights.get(name, False))
            for name in self.parameters
        )

    def sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """Return E, H and I of a module of this form."""
        shape = parameter_of(module, self.down).shape
        if self.call == STACKED:
            count: int = getattr(module, self.experts)
            return count, shape[1], shape[0] // count
        E, first, second = shape
        return (E, second, first) if self.transposed else (E, first, second)

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of gate_up and of down that are cut where the intermediate axis is."""
        return (2, 1) if self.transposed else (1, 2)

    def local_sizes(self, module: nn.Module) -> tuple[int, int, int]:
        """Return E, H and I of what tensor and expert parallelism leave to this process."""
        (E, H, I), down = self.sizes(module), parameter_of(module, self.down)  # noqa: E741
        return E // axis_parts(down, 0)[0], H, I // axis_parts(down, self.axes[1])[0]


def reasons_against_cut(module: nn.Module, form: ExpertsForm) -> Iterator[str]:
    """Yield why a block cannot compute experts with the parts that the engine left to this process."""
    engine = installed(module)
    if engine is not None and engine.experts is not None:
        reason = unsupported_reason_of_exchange(engine.experts)
        if reason is not None:
            yield reason
    for name, axis in ((name, axis) for name in (*form.inputs, form.down) for axis in (0, 1, 2)):
        parameter = parameter_of(module, name)
        parts, _ = axis_parts(parameter, axis) if axis < parameter.dim() else (1, 0)
        if parts == 1 or axis == 0:
            continue
        inner = form.sizes(module)[2]
        halves = name != form.down and form.gate.gated and len(form.inputs) == 1 and not form.interleaved
        if form.call in (STACKED, SORTED) or form.biased or form.post_norm is not None:
            norm, bias = "a norm behind each expert", "a bias that is added to results"
            what = bias if form.post_norm is None else norm
            yield f"it has {what}, and tensor parallelism leaves it partial ones; use expert parallelism (ep_size)"
        if axis != form.axes[name == form.down] or strided(parameter, axis) is not halves:
            style = "another axis" if axis != form.axes[name == form.down] else "other rows"
            yield f"tensor parallelism cuts {name} along {style} than a block reads; leave its tp_plan as it is"
        if inner % parts:
            yield uneven(inner, parts)


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """Return a parameter by its path, with what an adapter or a parametrization makes of it."""
    found: Tensor = attrgetter(name)(module)
    return found


_FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}  # of transformers' decorator


def is_decorated_experts(module: nn.Module) -> bool:
    """Return whether `module` has the flags that ``use_experts_implementation`` sets since transformers 5.17."""
    return module.__dict__.keys() >= _FLAGS


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
        return _read_undecorated(module)
    own = "forward" not in module.__dict__ or installed(module) is not None
    if type(module).forward.__code__ is not _dispatching_forward() or not own:
        raise UnknownForm("its forward is not the one that use_experts_implementation installs")
    flags = module.__dict__
    source = _gate_source(module) if flags["has_gate"] else _gate_of_child(module, "act_fn", gated=False)
    if source.interleaved is flags["is_concatenated"] and source.gate.gated:
        raise UnknownForm(f"is_concatenated={flags['is_concatenated']}, but its gate reads the columns otherwise")
    form = _form(source, transposed=bool(flags["is_transposed"]))
    form = replace(form, biased=bool(flags["has_bias"]), post_norm=_post_norm(module))
    _check_shapes(module, form)
    return form


def _form(source: GateSource, *, transposed: bool = False, call: str = ROUTED) -> ExpertsForm:
    alternates = source.interleaved
    names = ("gate_up_proj",) if source.gate.gated else ("up_proj",)
    return ExpertsForm(
        source.gate,
        transposed,
        alternates,
        biased=False,
        bias_interleaved=alternates,
        activation=source.activation,
        constants=source.constants,
        call=call,
        inputs=names,
    )


def _read_undecorated(module: Any) -> ExpertsForm:
    call = known_call(module)
    if call is None:
        raise UnknownForm(
            "its class is not decorated with transformers' use_experts_implementation, and its forward is not one of "
            "those that are known without"
        )
    if call == ROUTED:
        form = _form(_gate_source(module))
    elif call == STACKED:
        source = _gate_of_child(module, "mlp.activation_fn")
        constants = tuple((name, getattr(module, name)) for name in ("num_experts", "ffn_hidden_size", "hidden_size"))
        form = _form(source._replace(constants=constants), call=call)
        form = replace(form, inputs=("mlp.w1", "mlp.v1"), down="mlp.w2", experts="num_experts")
    elif call == SORTED:
        form = _form(_gate_of_child(module, "activation"), call=call)
        form = replace(form, inputs=("input_linear.weight",), down="output_linear.weight")
    elif call == SHARED:
        constants = (("n_shared_experts", module.n_shared_experts),)
        form = _form(_gate_of_child(module, "act_fn")._replace(constants=constants), call=call)
        form = replace(form, inputs=("gate_proj", "up_proj"))
    elif call == IDENTITY:
        constants = (("num_routed_experts", module.num_routed_experts), ("identity_expert", nn.Identity))
        form = _form(_gate_of_child(module, "act_fn")._replace(constants=constants), call=call)
        check_constants(module, form, "")
    else:
        form = _form(_gate_of_child(module, "act_fn"), transposed=True, call=call)
    if any(has_call_hooks(child) or "forward" in child.__dict__ for child in _replaced_children(module, form)):
        raise UnknownForm("one of its children has hooks or a forward of its own, which the operator would not call")
    _check_shapes(module, form)
    return form


def _replaced_children(module: nn.Module, form: ExpertsForm) -> list[nn.Module]:
    """Children whose forward the operator stands in for; blocks of MX weights keep none."""
    names = {name.rpartition(".")[0] for name in form.parameters} - {""}
    return [module.get_submodule(name) for name in names if name.partition(".")[0] in module._modules]


def _gate_source(module: nn.Module) -> GateSource:
    if "_apply_gate" in module.__dict__:
        raise UnknownForm("its _apply_gate is overridden on the instance")
    kind: Any = type(module)
    source = read_gate(module, kind._apply_gate)
    # A block has flags of its own where it has weights of its own: those of the class decided what was read.
    return source._replace(constants=tuple(each for each in source.constants if each[0] not in _FLAGS))


def _gate_of_child(module: nn.Module, path: str, *, gated: bool = True) -> GateSource:
    """The gate of a forward that has one activation, ``act(gate) * up`` or ``act(up)``."""
    owner, _, name = path.rpartition(".")
    activation = getattr(module.get_submodule(owner), name, None)
    gate = gate_of(activation)
    if gate is None:
        raise UnknownForm(
            f"its activation is {describe_activation(activation)}, the kernels have {supported_activations()}"
        )
    if isinstance(activation, nn.Module) and has_call_hooks(activation):
        raise UnknownForm(f"its {name} has hooks, which the operator would not call")
    return GateSource(gate._replace(gated=gated), False, path, ())


def _post_norm(module: nn.Module) -> str | None:
    if not getattr(module, "has_post_expert_norm", False):  # a version without the flag has no experts with such a norm
        return None
    if not isinstance(getattr(module, "post_expert_norm", None), nn.Module):
        raise UnknownForm("it has no module post_expert_norm (has_post_expert_norm=True)")
    return "post_expert_norm"


def _check_shapes(module: nn.Module, form: ExpertsForm) -> None:
    """Raise :class:`UnknownForm` where the parameters of `module` are not those of `form`."""
    found: dict[str, Any] = {name: _found(module, name) for name in form.parameters}
    weights = [found[name] for name in (*form.inputs, form.down)]
    axes = 2 if form.call == STACKED else 3
    missing = [name for name, param in found.items() if param is None]
    if missing or any(weight.dim() != axes for weight in weights):
        what = f"no {' and no '.join(missing)}" if missing else f"weights that are not {axes}-D"
        raise UnknownForm(f"it has {what}; its gate takes {', '.join(found)}")
    E, H, I = form.sizes(module)  # noqa: E741
    columns = 2 * I if form.gate.gated else I
    count = getattr(module, "total_experts", E) if form.call == IDENTITY else E
    if form.call == STACKED:
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(form.parameters, (E * I, H))
    elif form.call == SHARED:
        expected = dict.fromkeys(form.inputs, (E, I, H))
    else:
        expected = {form.gate_up: (count, H, columns) if form.transposed else (count, columns, H)}
    if form.biased:
        expected |= {f"{form.gate_up}_bias": (E, columns), f"{form.down}_bias": (E, H)}
    for name, shape in expected.items():
        if found[name].shape != shape:
            has = f"its {name} has shape {tuple(found[name].shape)}"
            raise UnknownForm(f"{has}, with its {form.down} {tuple(found[form.down].shape)} it would be {shape}")


def _found(module: nn.Module, name: str) -> Tensor | None:
    try:
        found = parameter_of(module, name)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def _takes_a_share(child: nn.Module, module: nn.Module, form: ExpertsForm) -> bool:
    """Whether the engine only divides the identity by the processes that add it up, as ``neuron_parts`` does."""
    found, down = installed(child), _found(module, form.down)
    if form.call != IDENTITY or found is None or style_name(found.style) != "moe_identity_expert":
        return False
    parts = getattr(module, "neuron_parts", None) or (1 if down is None else axis_parts(down, form.axes[1])[0])
    return bool(found.mesh.size() == parts)


def check_constants(module: nn.Module, form: ExpertsForm, name: str) -> None:
    """Raise, for the block `name`, where an attribute that the gate depends on has changed."""
    fix = "The operator has what was read at patching: unpatch the model before changing it."
    children = [(type(child).__name__, child) for child in _replaced_children(module, form)]
    for path, value in form.constants:
        owner, _, attr = path.rpartition(".")
        holder = module.get_submodule(owner) if owner else module
        try:
            now = attribute_of(holder, attr)
        except AttributeError:
            now = None
        if isinstance(now, nn.Module):
            children.append((path, now))
            now = type(now)
        if isinstance(now, Tensor) or now != value:
            error = UnsupportedModelError.about(path, f"{value!r}, as when the block was patched", repr(now), fix)
            raise error.named(name)
    for path, child in children:
        if has_call_hooks(child) or ("forward" in child.__dict__ and not _takes_a_share(child, module, form)):
            expected = "without hooks or a forward of its own, as when the block was patched"
            raise UnsupportedModelError.about(path, expected, "one that has them", fix).named(name)
    if "_apply_gate" in module.__dict__:
        raise UnsupportedModelError.about("_apply_gate", "that of the class", "one of the instance", fix).named(name)

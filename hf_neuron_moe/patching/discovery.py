"""Finds the modules that could be patched and decides about each, without changing anything.

A dense MLP can be patched if its source is the formula of a gate, and a small numeric probe agrees. Its parts must be
plain linear layers of matching shapes, with an activation that the operators have. An experts module can be if
transformers' flags say so and the probe agrees. Everything else that looks like such a block gets a reason.

E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.errors import with_article
from hf_neuron_moe.modules.dense_roles import OVERRIDDEN, DenseRoles, constant_of
from hf_neuron_moe.modules.engine import axis_parts, installed, is_sharded, stock_class
from hf_neuron_moe.modules.expert_parallel import EXPERT_PARALLELISM_NEEDS
from hf_neuron_moe.modules.experts_calls import SHARED, known_call
from hf_neuron_moe.modules.experts_form import ExpertsForm, is_decorated_experts, read_experts, reasons_against_cut
from hf_neuron_moe.modules.gate_expression import UnknownForm
from hf_neuron_moe.modules.in_place import block_of
from hf_neuron_moe.modules.replaced_layers import ReplacedLayers
from hf_neuron_moe.modules.sharded_mlp import reasons_against_parallel
from hf_neuron_moe.modules.state_dict import WeightRule
from hf_neuron_moe.modules.structure import (
    act_of,
    describe_activation,
    has_call_hooks,
    supported_activations,
    unsupported_reason_plain_linear,
)
from hf_neuron_moe.patching.experts_probe import probe_experts
from hf_neuron_moe.patching.formula import dense_roles
from hf_neuron_moe.patching.probe import probe_dense
from hf_neuron_moe.patching.source_functions import multiplies_branches
from hf_neuron_moe.patching.source_values import NotSwiGLU

MLP, EXPERTS = "mlp", "experts"

_DENSE_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
)
"""Child or parameter names that make a module a candidate."""
_DENSE_SUFFIXES = ("MLP", "Mlp", "FeedForward", "FFN", "GLU")
_EXPERTS_SUFFIX = "Experts"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_TOP_K = ("top_k", "num_experts_per_tok", "moe_topk", "top_k_experts", "num_selected_experts")
"""Attributes by which routers, their blocks and configurations state the number of experts per token."""
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Candidate:
    """A module that looks like an MLP or experts block."""

    name: str
    aliases: tuple[str, ...]  # further names of the same object (a module shared by several layers)
    kind: str  # ``"mlp"`` or ``"experts"``
    module: nn.Module
    reason: str | None = None  # why the kernels cannot compute it; None where they can
    roles: DenseRoles | None = None  # which attribute plays which part, for a dense MLP that can be patched
    form: ExpertsForm | None = None  # how an experts module computes that can be patched
    sizes: tuple[int | None, int | None, int | None] = (None, None, None)  # ``(E, H, I)``; E is None for a dense MLP
    top_k: int | None = None  # experts per token; None for a dense MLP, 0 where the model does not say
    gated: bool = True  # False where no two branches are multiplied, which no kernel here is meant for
    sharded: bool = False  # its weights were cut while loading, so that the module has to stay where it is
    listed: int = 0  # number of MLPs in the ModuleList that holds it, which may be experts; 0 outside of such lists

    @property
    def gate(self) -> Gate:
        """Its gate, where the kernels can compute it."""
        if self.form is not None:
            return self.form.gate
        return SWIGLU if self.roles is None else self.roles.gate

    @property
    def local_sizes(self) -> tuple[int | None, int | None, int | None]:
        """``(E, H, I)`` of what tensor and expert parallelism leave to this process."""
        if self.form is not None:
            return self.form.local_sizes(self.module)
        E, H, I = self.sizes  # noqa: E741
        if self.roles is None or I is None:
            return self.sizes
        return E, H, I // axis_parts(self.module.get_parameter(f"{self.roles.down}.weight"), 1)[0]

    @property
    def part(self) -> tuple[str, ...]:
        """What of the block this process has, where that is not all."""
        names = ("experts", "", "columns of the intermediate axis")
        whole = zip(self.local_sizes, self.sizes, names, strict=True)
        return tuple(f"{mine} of {all_} {name} on each process" for mine, all_, name in whole if mine != all_)

    @property
    def stays(self) -> bool:
        """Whether a block computes for the module, which stays where it is, and does not replace it."""
        return self.sharded and self.kind == EXPERTS

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """The kernel home's parameters."""
        parts = self.roles if self.roles is not None else self.form
        assert parts is not None, "a block that cannot be patched has no parameters in kernel layout"
        return parts.rules


def discover(model: nn.Module, prefix: str = "") -> list[Candidate]:
    """Return every candidate of `model` in model order, each judged; `prefix` comes before the names."""
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules(prefix=prefix, remove_duplicate=False):
        kind = _kind(module)
        if kind is not None:
            names.setdefault(id(module), []).append(name)
            found[id(module)] = (kind, module)
    top_ks = _top_ks(model, {key for key, (kind, _) in found.items() if kind == EXPERTS})
    listed = _listed(model, {key: kind for key, (kind, _) in found.items()})
    judged = {key: _judge(names[key], kind, module) for key, (kind, module) in found.items()}
    whole = (each.module for each in judged.values() if each.kind == EXPERTS and each.reason is None)
    parts = {id(part) for module in whole for child in module.children() for part in child.modules()}
    judged = {key: each for key, each in judged.items() if key not in parts}
    for key, each in judged.items():
        if each.form is not None and each.form.call == SHARED:
            top_ks[key] = each.form.sizes(each.module)[0]
    return [replace(each, top_k=top_ks.get(key), listed=listed.get(key, 0)) for key, each in judged.items()]


def _listed(model: nn.Module, kinds: dict[int, str]) -> dict[int, int]:
    """How many MLPs there are in the list or dictionary that holds an MLP; `kinds` are those of the blocks, by id.

    It may also hold experts that pass tokens on, and the places of experts of other processes, but nothing else. A
    layer that has experts of its own has its dense MLPs in such a list.
    """

    def has_experts(parent: nn.Module) -> bool:
        inside = [child for child in parent.children() if not isinstance(child, _CONTAINERS)]
        return any(kinds.get(id(child)) == EXPERTS or has_experts(child) for child in inside)

    of_layers = {id(child) for parent in model.modules() if has_experts(parent) for child in parent.children()}
    counts: dict[int, int] = {}
    for holder in (each for each in model.modules() if isinstance(each, _CONTAINERS) and id(each) not in of_layers):
        entries = list(holder._modules.values())
        mlps = [entry for entry in entries if kinds.get(id(entry)) == MLP]
        others = [entry for entry in entries if entry is not None and kinds.get(id(entry)) != MLP]
        if len(entries) > 1 and all(type(other) is nn.Identity for other in others):
            counts |= dict.fromkeys(map(id, mlps), len(mlps))
    return counts


def _top_ks(model: nn.Module, experts: set[int]) -> dict[int, int]:
    """Experts per token of each experts module: what its parent or the router beside it says, or the configuration."""
    found: dict[int, int] = {}
    for parent in model.modules() if experts else ():
        children = [child for child in parent._modules.values() if child is not None]
        for child in children:
            if id(child) in experts:
                config: Any = getattr(model, "config", None)
                text = config.get_text_config() if hasattr(config, "get_text_config") else config
                said = map(_stated_top_k, (parent, *children, text))
                found[id(child)] = next(filter(None, said), 0)
    return found


def _stated_top_k(holder: object) -> int | None:
    values = (getattr(holder, name, None) for name in _TOP_K)
    return next((value for value in values if type(value) is int and value > 0), None)


def _kind(module: nn.Module) -> str | None:
    if block_of(module) is not None or isinstance(module, (ReplacedLayers, *_CONTAINERS)):
        return None
    class_name, named = stock_class(module).__name__, _has_dense_names(module)
    stacked = any(param.dim() == 3 for param in module._parameters.values() if param is not None)
    if is_decorated_experts(module) or (stacked and (named or class_name.endswith(_EXPERTS_SUFFIX))):
        return EXPERTS
    if module._modules and known_call(module) is not None:
        return EXPERTS
    return MLP if named or (class_name.endswith(_DENSE_SUFFIXES) and len(_matrices(module)) >= 2) else None


def _has_dense_names(module: nn.Module) -> bool:
    owned = {**module._parameters, **module._modules}
    return any(all(owned.get(part) is not None for part in parts) for parts in _DENSE_NAMES)


def _matrices(module: nn.Module, deep: bool = False) -> list[tuple[int, ...]]:
    """Shapes of the 2-D weights that `module` itself or its direct children hold, or with `deep` any module in it."""
    inside = list(module.modules())[1:] if deep else module.children()
    children = [child._parameters.get("weight") for child in inside]
    held = (*children, *module._parameters.values())
    return [tuple(param.shape) for param in held if param is not None and param.dim() == 2]


def _has_gate(kind: str, module: nn.Module, unread: bool = False) -> bool:
    """Whether `module` may be gated: not without a product of two branches of the input, or code that is `unread`.

    Nor if it holds two matrices, one for the other's result as it is. A fused gate and up projection has twice the rows
    that the projection after it has columns.
    """
    if kind == EXPERTS:
        stacks = [param for param in module._parameters.values() if param is not None and param.dim() == 3]
        return bool(getattr(module, "has_gate", True)) and len(stacks) != 1
    if _has_dense_names(module):
        return True
    matrices = _matrices(module, deep=True)
    if _in_a_row(matrices):
        return False
    halved = len(matrices) == 2 and any(one[0] == 2 * other[1] for one, other in (matrices, reversed(matrices)))
    return halved or unread or multiplies_branches(type(module).forward)


def _in_a_row(matrices: list[tuple[int, ...]]) -> bool:
    """Whether there are two matrices, the second for the first one's result as it is."""
    if len(matrices) != 2:
        return False
    (first_out, first_in), (second_out, second_in) = matrices
    return first_out == second_in and second_out != 2 * first_in


def _judge(names: list[str], kind: str, module: nn.Module) -> Candidate:
    sharded = any(map(is_sharded, module.parameters())) or installed(module) is not None
    base = Candidate(names[0], tuple(names[1:]), kind, module, sharded=sharded)
    if kind == EXPERTS:
        return _judge_experts(replace(base, gated=_has_gate(kind, module), sizes=_expert_sizes(module)))
    try:
        roles = dense_roles(type(module).forward, module)
    except NotSwiGLU as answer:
        if not _has_gate(kind, module, answer.unread):
            none = "its forward multiplies no two branches before a projection"
            row = "two projections in a row" if _in_a_row(_matrices(module, deep=True)) else none
            return replace(base, gated=False, reason=f"it has no gate: {row}")
        # What a reader looks for first: a wrapped module explains more than the source does.
        return replace(base, reason=next(chain(_instance_reasons(module), [str(answer)])))
    reason = next(
        chain(_instance_reasons(module), _role_reasons(module, roles), reasons_against_parallel(module, roles)), None
    )
    if reason is not None:
        return replace(base, reason=reason)
    H, I = module.get_parameter(f"{roles.down}.weight").shape  # noqa: E741
    return replace(base, reason=next(_weight_reasons(module, roles, H, I), None), roles=roles, sizes=(None, H, I))


# Each yields why a block cannot be patched, the reason that explains most first; what comes later may rely on it.


def _instance_reasons(module: nn.Module) -> Iterator[str]:
    if hasattr(module, "_hf_hook") or hasattr(module, "_old_forward"):
        yield "accelerate dispatches it through a hook (_hf_hook); patch the model before dispatching it"
    if "forward" in module.__dict__ and installed(module) is None:
        if getattr(module.forward, "__name__", None) == "ep_forward":
            yield EXPERT_PARALLELISM_NEEDS
        yield "its forward is overridden on the instance"
    if getattr(module, "_compiled_call_impl", None) is not None:
        yield "it is compiled (module.compile()) and would go on computing the stock code; compile it after patching"
    for method in OVERRIDDEN:
        if getattr(type(module), method) is not getattr(nn.Module, method):
            yield f"its class {type(module).__name__} overrides {method}"
    if hasattr(module, "parametrizations"):
        yield "it has parametrizations"


def _role_reasons(module: nn.Module, roles: DenseRoles) -> Iterator[str]:
    for name in roles.linears:
        try:
            child: Any = module.get_submodule(name)
        except AttributeError:
            yield f"{name} is no module"
            return
        reason = unsupported_reason_plain_linear(child, sharded=True)
        if reason is not None:
            yield f"{name} is {reason}"
    if roles.activation is not None:
        activation = getattr(module, roles.activation, None)
        if act_of(activation) is None:
            yield f"its activation is {describe_activation(activation)}, the kernels have {supported_activations()}"
        if isinstance(activation, nn.Module) and has_call_hooks(activation):
            yield f"{roles.activation} has hooks, which the operator would not call"


def _weight_reasons(module: nn.Module, roles: DenseRoles, H: int, I: int) -> Iterator[str]:  # noqa: E741
    rows = I if len(roles.inputs) == 2 else 2 * I
    reads = {module.get_parameter(f"{name}.weight").shape[1] for name in roles.inputs}
    if len(reads) == 1 and reads != {H}:
        yield f"it maps {reads.pop()} features to {H}, and the operators return as many as they read"
    for name in roles.inputs:
        shape = tuple(module.get_parameter(f"{name}.weight").shape)
        if shape != (rows, H):
            yield f"{name}.weight has shape {shape}, with {roles.down}.weight {(H, I)} it would be {(rows, H)}"
    for name in roles.biased:
        bias, wanted = module.get_parameter(f"{name}.bias"), module.get_parameter(f"{name}.weight").shape[:1]
        if bias.shape != wanted:
            yield f"{name}.bias has shape {tuple(bias.shape)}, with its weight it would be {tuple(wanted)}"
    size = roles.half_size
    if isinstance(size, str) and (found := _size_at(module, size)) != I:
        yield f"its forward splits by {size}={found!r}, not in halves of {I}"
    if isinstance(size, int) and size != I:
        yield f"its forward splits by {size}, not in halves of {I}"
    for size in roles.input_sizes:
        if (found := _size_at(module, size)) != H:
            yield f"its forward takes {size}={found!r} for the number of its input's features, which is {H}"
    yield from _dtype_reasons(module)
    if (difference := probe_dense(module, roles)) is not None:
        yield difference


def _size_at(module: nn.Module, path: str) -> Any:
    try:
        return constant_of(module, path)
    except AttributeError:
        return None


def _judge_experts(base: Candidate) -> Candidate:
    if not base.gated and not is_decorated_experts(base.module):
        return replace(base, reason="it has one projection per expert, no gate")
    reason = next(_instance_reasons(base.module), None)
    if reason is not None:
        return replace(base, reason=reason)
    try:
        form = read_experts(base.module)
    except UnknownForm as answer:
        return replace(base, reason=str(answer))
    reason = next(chain(reasons_against_cut(base.module, form), _experts_reasons(base.module, form)), None)
    return replace(base, reason=reason, form=form, sizes=form.sizes(base.module))


def _experts_reasons(module: nn.Module, form: ExpertsForm) -> Iterator[str]:
    parameters: dict[str, Any] = dict(module.named_parameters())
    for name, param in parameters.items():
        if param is None or type(param) is FakeTensor:
            continue
        plain = is_sharded(param) or (type(param) is nn.Parameter and type(param.data) is torch.Tensor)
        if not plain:  # quantized, or sharded by others
            kind = with_article(type(param).__name__)
            yield f"its {name} is {kind} of {type(param.data).__name__}, not a plain parameter"
    yield from _dtype_reasons(module)
    if (difference := probe_experts(module, form)) is not None:
        yield difference


def _dtype_reasons(module: nn.Module) -> Iterator[str]:
    dtypes = {param.dtype for param in module.parameters()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        yield f"its weights have different dtypes ({names}); give them one, as model.to(torch.bfloat16) does"
    if not dtypes <= set(_WEIGHT_DTYPES):
        yield f"its weights are {dtypes.pop()}; the kernels take {', '.join(map(str, _WEIGHT_DTYPES))}"
    devices = {param.device for param in module.parameters()}
    if len(devices) > 1:
        yield f"its weights are on different devices ({', '.join(sorted(map(str, devices)))})"


def _expert_sizes(module: nn.Module) -> tuple[int | None, int | None, int | None]:
    down = module._parameters.get("down_proj")
    if down is None or down.dim() != 3:
        return None, None, None
    E, first, second = down.shape
    return (E, second, first) if getattr(module, "is_transposed", False) else (E, first, second)

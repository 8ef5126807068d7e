"""What every replacement module shares: it takes over the original's state, and gives it back.

The original stays alive, unregistered, while the replacement sits in its place. Both share the same child modules,
parameters and hook dictionaries, so handles held by the user (``RemovableHandle``) keep working on either.
"""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from typing import Any, Self

import torch
from torch import nn

from hf_neuron_moe.activation_policy import canonical_keep
from hf_neuron_moe.backends import drop_weight_copies, release_gradient_memory
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import NeuronMoEWarning, UnsupportedModelError
from hf_neuron_moe.modules.backend_choice import LongCalls
from hf_neuron_moe.modules.own_forward import check_own_forward
from hf_neuron_moe.modules.saved_bytes import SavedBlock, saved_bytes, saved_bytes_of_call, saved_bytes_per_call
from hf_neuron_moe.modules.state_dict import WeightRule
from hf_neuron_moe.modules.structure import (
    ACTIVATIONS,
    CALL_HOOKS,
    gate_of,
    gate_of_text,
    has_call_hooks,
    unsupported_activation,
)

OWN_COPY = ("_parameters", "_buffers", "_modules")
"""Attributes of ``nn.Module`` that a replacement has copies of."""
HOOK_DICTS = tuple(name for name in nn.Module().__dict__ if name.endswith("_hooks"))
"""Attributes of ``nn.Module`` that hold hooks, except the flags that accompany them."""


def _state(activation: object) -> dict[str, Any]:
    """What an activation's module holds that may change what it computes."""
    held = activation.__dict__ if isinstance(activation, nn.Module) else {}
    return {name: value for name, value in held.items() if name[0] != "_" and name != "training"}


class NeuronBlock(nn.Module):
    """Stands in for `original`, which is read and not changed; `name` is its name in the model.

    `config` is resolved: ``backend`` and ``weights`` are not ``"auto"``, ``activations`` is this block's own policy.
    """

    neuron_rules: tuple[WeightRule, ...] = ()  # how parameters in kernel layout are made; empty in stock layout
    neuron_stock_order: tuple[str, ...] = ()  # state_dict names that `neuron_rules` read, in the original's order
    neuron_top_k: int | None = None  # experts per token, 0 where the model does not say; None for a dense MLP
    neuron_former_forward: Any = None  # of a block that computes for a module which stays: what was there before
    neuron_installed: Any = None  # and what was put there
    neuron_same_tokens: Any = None  # the processes that call it with the same tokens
    neuron_long_calls: LongCalls | None = None  # those too long for the kernels; None: none are, or they raise

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig) -> None:
        super().__init__()
        for key, value in original.__dict__.items():
            self.__dict__[key] = value.copy() if key in OWN_COPY else value
        self.neuron_name = name
        self.neuron_stock_class: type[nn.Module] = type(original)
        self.neuron_config = config
        self.neuron_keep = canonical_keep(config.activations, config.precision)
        self.neuron_warned = False
        _release_with(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or an unpickled block."""
        super().__setstate__(state)
        _release_with(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block like any module."""
        if "forward" in self.__dict__:
            check_own_forward(self, self.neuron_name)
        return super().__call__(*args, **kwargs)

    @property
    @abstractmethod
    def neuron_shape(self) -> SavedBlock:
        """What the bytes of the block's saved activations depend on."""

    @property
    def saved_bytes_per_token(self) -> float:
        """Bytes per token that the operator saves for backward; NaN where K is not known."""
        return saved_bytes(self.neuron_shape, self.neuron_keep)

    @property
    def saved_bytes_per_call(self) -> float:
        """Bytes that every call saves on top: of the kernels' unfilled blocks."""
        return saved_bytes_per_call(self.neuron_shape, self.neuron_keep)

    def saved_bytes(self, tokens: int) -> int:
        """Return the bytes that the operator saves of a call with so many tokens, at most as many as kernels take."""
        return saved_bytes_of_call(self.neuron_shape, self.neuron_keep, tokens)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a change drops the copies of the weights, which are exchanged around an evaluation."""
        if mode != self.training:
            drop_weight_copies(self.parameters())
            release_gradient_memory()
        return super().train(mode)

    def _call_backend(self, tokens: int) -> str:
        """Return the name of the backend for a call of `tokens` tokens."""
        config, long_calls = self.neuron_config, self.neuron_long_calls
        too_long = long_calls is not None and long_calls.take(tokens, self.neuron_name)
        return config.fallback if too_long else config.backend

    def _own_weights(self, original: nn.Module, rules: tuple[WeightRule, ...]) -> None:
        """Register the parameters in kernel layout that `rules` make of the original's."""
        stock = {name for rule in rules for name in rule.stock}
        names = (name for name, _ in original.named_parameters(remove_duplicate=False))
        self.neuron_rules, self.neuron_stock_order = rules, tuple(name for name in names if name in stock)
        for rule in rules:
            self.register_parameter(rule.kernel, make_kernel_parameter(original, rule))

    def _remember_activation(self, name: str | None, gate: Gate | None = None) -> None:
        """Note the activation and the gate; not through setattr, which would register a second child."""
        activation = None if name is None else self._attribute(name)
        self.__dict__["neuron_activation"] = activation, _state(activation)
        self.neuron_gate = gate or gate_of(activation) or SWIGLU

    @property
    def neuron_gate(self) -> Gate:
        """What the block computes between its products; held as text, see :func:`gate_of_text`."""
        return gate_of_text(self.neuron_gate_text)

    @neuron_gate.setter
    def neuron_gate(self, gate: Gate) -> None:
        self.neuron_gate_text = gate.text

    def _attribute(self, path: str) -> Any:
        *owners, name = path.split(".")
        holder: nn.Module | None = self
        for owner in owners:
            holder = None if holder is None else holder._modules.get(owner)
        if holder is None:  # blocks of MX weights keep no children: nothing of them can change
            return self.__dict__.get("neuron_activation", (None,))[0]
        return holder._modules.get(name, holder.__dict__.get(name))

    def _check_activation(self, name: str | None) -> None:
        """Raise for another activation than at patching; warn once of hooks on it, which the operator does not call."""
        if name is None:
            return
        now = self._attribute(name)
        # The object seen at patching, as it was, is known at a glance that costs no import.
        seen, state = self.__dict__["neuron_activation"]
        known = now is seen and _state(now) == state
        reason = None if known else unsupported_activation(now, self.neuron_gate.act)
        if reason is not None:
            expected = f"{ACTIVATIONS[self.neuron_gate.act].title}, as when the block was patched"
            fix = "The kernels have no other activation: unpatch the model before changing it."
            raise UnsupportedModelError.about(name, expected, reason, fix).named(self.neuron_name)
        if not isinstance(now, nn.Module) or self.neuron_warned or not has_call_hooks(now):
            return
        self.neuron_warned = True
        hooks = [
            f"{meaning} {getattr(hook, '__qualname__', type(hook).__name__)}"
            for kind, meaning in CALL_HOOKS.items()
            for hook in getattr(now, kind).values()
        ]
        message = (
            f"{self.neuron_name}.{name} has a hook that is not called: {', '.join(hooks)}. The patched block computes "
            f"the activation inside its operator. Remove the hook, or unpatch the model and pass "
            f"exclude=[{self.neuron_name!r}]."
        )
        warnings.warn(message, NeuronMoEWarning, stacklevel=3)

    def extra_repr(self) -> str:
        """Show what the block computes and its weight layout."""
        config = self.neuron_config
        return f"precision={config.precision}, weights={config.weights}, backend={config.backend}"


def give_back(replacement: NeuronBlock, original: nn.Module) -> None:
    """Put the replacement's present state into `original`, the module it stood in for.

    Children and parameters present in both come back as they are now; attributes that the original had follow the
    replacement's present values. Weights in kernel layout are handled by :func:`restore_layout`.
    """
    moved = {rule.kernel for rule in replacement.neuron_rules if not rule.keeps_layout}
    for kind in OWN_COPY:
        mine, theirs = replacement.__dict__[kind], original.__dict__[kind]
        kept_out = moved if kind == "_parameters" else ()
        theirs.update({key: mine[key] for key in theirs if key in mine and key not in kept_out})
    if replacement.training != original.training:  # the layers that weights in kernel layout replaced
        for name in replacement.neuron_stock_order:
            stock_slot(original, name)[0].training = replacement.training
    layout_flags = {"is_transposed", "is_concatenated"} if replacement.neuron_rules else set()
    for key in original.__dict__.keys() & replacement.__dict__.keys() - {*OWN_COPY, *layout_flags}:
        original.__dict__[key] = replacement.__dict__[key]


def stock_slot(module: nn.Module, stock_name: str) -> tuple[nn.Module, str]:
    """Return the submodule of `module` and the parameter name in it for a stock state_dict name."""
    path, _, leaf = stock_name.rpartition(".")
    return module.get_submodule(path), leaf


def put_parameter(module: nn.Module, stock_name: str, param: nn.Parameter) -> None:
    """Make `param` the parameter of `module` that has a stock state_dict name."""
    slot, leaf = stock_slot(module, stock_name)
    slot._parameters[leaf] = param


REPLACED = "neuron_replaced"
"""Attribute of an original parameter while its weights live in another layout: its name in the model."""


def make_kernel_parameter(original: nn.Module, rule: WeightRule) -> nn.Parameter:
    """Return the kernel-layout parameter for `rule`: where that is the stock layout, the original parameter itself."""
    sources = [original.get_parameter(name) for name in rule.stock]
    if rule.keeps_layout:
        return sources[0]
    param = nn.Parameter(rule.to_kernel([p.detach() for p in sources]), requires_grad=sources[0].requires_grad)
    if any(p.grad is not None for p in sources):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in sources]
        param.grad = rule.to_kernel(grads)
    return param


def release_layout(replacement: NeuronBlock, original: nn.Module) -> None:
    """Free the original's weights that now live in the replacement in another layout."""
    for name in (name for rule in replacement.neuron_rules if not rule.keeps_layout for name in rule.stock):
        param = getattr(*stock_slot(original, name))
        param.data = param.data.new_empty(0)
        param.grad = None
        param.__dict__[REPLACED] = f"{replacement.neuron_name}.{name}"


def restore_layout(replacement: NeuronBlock, original: nn.Module) -> None:
    """Put the replacement's weights back into the original's parameter objects, in stock layout, bit for bit."""
    for rule in replacement.neuron_rules:
        kernel = replacement.get_parameter(rule.kernel)
        if rule.keeps_layout:
            put_parameter(original, rule.stock[0], kernel)
            continue
        grads: tuple[Any, ...] = rule.to_stock(kernel.grad) if kernel.grad is not None else (None,) * len(rule.stock)
        for name, view, grad in zip(rule.stock, rule.to_stock(kernel.detach()), grads):
            param, value = original.get_parameter(name), view.clone(memory_format=torch.contiguous_format)
            param.__dict__.pop(REPLACED, None)
            param.grad = None
            if torch._has_compatible_shallow_copy_type(param.data, value):
                param.data = value
            else:  # another device type since patching (for example meta): a parameter cannot change its storage's kind
                param = nn.Parameter(value)
                put_parameter(original, name, param)
            param.requires_grad_(kernel.requires_grad)
            if grad is not None:
                param.grad = grad.clone(memory_format=torch.contiguous_format)


def _release_with(block: nn.Module) -> None:
    """Release spare memory of gradients when `block` is deleted."""
    weakref.finalize(block, release_gradient_memory).atexit = False

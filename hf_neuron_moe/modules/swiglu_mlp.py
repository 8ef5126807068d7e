"""Dense gated MLP: ``down(act(gate(x)) * up(x))``, with SiLU a SwiGLU.

S tokens (all leading dimensions flattened), H hidden size, I intermediate size.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from hf_neuron_moe.backends import drop_weight_copies, get_backend
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import NeuronMoEWarning, UnsupportedModelError
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.backend_choice import caches_weights
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.low_rank import (
    is_lora_linear,
    low_rank_mlp,
    low_rank_of,
    three_weights,
    unsupported_reason_low_rank,
)
from hf_neuron_moe.modules.ops_checks import check_hidden_states
from hf_neuron_moe.modules.replaced_layers import NAME as REPLACED_LAYERS, ReplacedLayers, adapters_refused
from hf_neuron_moe.modules.saved_bytes import SavedBlock
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin, WeightRule
from hf_neuron_moe.modules.structure import (
    CALL_HOOKS,
    has_call_hooks,
    is_inert,
    unsupported_activation,
    unsupported_reason_plain_linear,
)


@dataclass(frozen=True)
class DenseRoles:
    """Which attribute of a dense MLP plays which part."""

    inputs: tuple[str, ...]
    """Names of the linear layers before the product: ``(gate, up)`` or the single fused one ``(gate_up,)`` whose first
    I rows are the gate."""
    down: str  # name of the linear layer after the product
    activation: str | None  # name of the activation's attribute; None where forward calls the function itself
    half_size: str | int | None = None  # attribute or number that a fused projection is split by; None for its middle
    extra_arguments: bool = False  # whether forward takes arguments that it does not use
    inert: tuple[str, ...] = ()  # names of attributes that change nothing while they are as they are: a dropout of 0

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of all linear layers."""
        return (*self.inputs, self.down)

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """The parameters in kernel layout: ``gate_up_proj [2I, H]`` and ``down_proj [H, I]``."""
        gate_up = WeightRule("gate_up_proj", tuple(f"{name}.weight" for name in self.inputs))
        return gate_up, WeightRule("down_proj", (f"{self.down}.weight",))


class _Watch:
    """Recognizes, in a microsecond or two per call, that nothing has happened to linear layers found plain before.

    Generation asks for every token and block whether a layer was wrapped, replaced or hooked since. The dictionaries
    that would show it are looked up once; a layer keeps its hook dictionaries for life.
    """

    def __init__(self, parent: nn.Module, roles: DenseRoles, activation: Any, backend: str) -> None:
        layers = [(name, parent.get_submodule(name)) for name in roles.linears]
        self.layers = [(name, layer, layer.__dict__, layer._parameters) for name, layer in layers]
        self.activation_name, self.activation = roles.activation, activation
        watched = [layer for _, layer in layers] + ([activation] if isinstance(activation, nn.Module) else [])
        self.hooks = [getattr(module, kind) for module in watched for kind in CALL_HOOKS]
        self.decode = get_backend(backend).mlp_decode

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: a copied block has layers of its own to look at."""
        return type(None), ()

    def unchanged(self, block: nn.Module) -> list[nn.Parameter] | None:
        """Return the layers' weights, or None where anything is not as it was found.

        A parameter made from a tensor subclass has that subclass's type, so the parameter's type settles its data's.
        """
        weights, children = [], block._modules
        for name, layer, state, parameters in self.layers:
            weight = parameters.get("weight")
            if children[name] is not layer or type(layer) is not nn.Linear or "forward" in state:
                return None
            if type(weight) is not nn.Parameter or parameters.get("bias") is not None:
                return None
            weights.append(weight)
        if self.activation_name in children:
            activation = children[self.activation_name]
            if activation is not self.activation or "forward" in activation.__dict__:
                return None
        elif self.activation_name is not None and block.__dict__.get(self.activation_name) is not self.activation:
            return None
        return None if any(self.hooks) else weights


class NeuronSwiGLUMLP(NeuronBlock):
    """A dense SwiGLU MLP computed by the operator, LoRA on its layers included; the weights stay in those.

    If a layer is wrapped otherwise or gets a hook, the block computes through the layers instead and warns once.
    """

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig, roles: DenseRoles) -> None:
        super().__init__(original, name, config)
        self.neuron_roles = roles
        self.neuron_watch: _Watch | None = None
        self.neuron_adapted = False
        self.neuron_merged: list[tuple[str, str]] = []
        self._remember_activation(roles.activation)

    @property
    def neuron_shape(self) -> SavedBlock:
        # Asked for after adapters were put on the layers too, which then have the sizes but not the weight.
        down: Any = self._modules.get(self.neuron_roles.down)
        hidden, inner = self._weights()[2].shape if down is None else (down.out_features, down.in_features)
        config = self.neuron_config
        return SavedBlock(config.precision, hidden, inner, None, config.backend, gate=self.neuron_gate)

    def _unsupported_reason_fused(self) -> str | None:
        if self.neuron_watch is not None and self.neuron_watch.unchanged(self) is not None:
            return None
        roles, activation = self.neuron_roles, None
        self.neuron_watch = None
        self.neuron_adapted = False
        for name in roles.linears:
            layer: Any = self.get_submodule(name)
            reason = None
            if is_lora_linear(layer):
                self.neuron_adapted = True
                reason, layer = unsupported_reason_low_rank(layer), layer.base_layer
            reason = reason or unsupported_reason_plain_linear(layer)
            if reason is not None:
                return f"{name} is {reason}"
        if roles.activation is not None:
            activation = self._attribute(roles.activation)
            changed = unsupported_activation(activation, self.neuron_gate.act)
            if changed is not None:
                return f"{roles.activation} is {changed}"
            if isinstance(activation, nn.Module) and has_call_hooks(activation):
                return f"{roles.activation} has hooks"
        # Not while a compiler looks on, which could not make the object again in its graph.
        if not self.neuron_adapted and not is_compiling():
            self.neuron_watch = _Watch(self, roles, activation, self.neuron_config.backend)
        return None

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        layers: list[Any] = [self._modules[name] for name in self.neuron_roles.linears]
        replica = "_is_replica" in self.__dict__  # nn.DataParallel's, which has plain tensors
        return three_weights([layer.weight if replica else layer._parameters["weight"] for layer in layers])

    def forward(self, hidden_states: Tensor, *unused: Any, **unused_by_name: Any) -> Tensor:
        """Apply the block to ``hidden_states`` ``[..., H]``; the result has its shape and dtype."""
        if (unused or unused_by_name) and not self.neuron_roles.extra_arguments:
            raise TypeError(f"{self.neuron_name}: forward takes hidden_states only")
        if self.training and self.neuron_roles.inert:
            self._check_inert()
        if not self.training and not torch.is_grad_enabled() and type(hidden_states) is Tensor:
            y = self._generate(hidden_states)
            if y is not None:
                return y
        reason = self._unsupported_reason_fused()
        if reason is not None:
            return self._through_layers(hidden_states, reason)
        names = self.neuron_roles.linears if self.neuron_adapted else ()
        layers = [low_rank_of(self.get_submodule(name)) for name in names]
        weights: tuple[Tensor, ...] = () if layers else self._weights()
        down_HI = layers[-1].weight_ON if layers else weights[-1]
        check_hidden_states(hidden_states, down_HI, 0, self.neuron_name)
        config, flat = self.neuron_config, hidden_states.dim() == 2
        x_SH = hidden_states if flat else hidden_states.reshape(-1, hidden_states.shape[-1])
        options: dict[str, Any] = {
            "precision": config.precision,
            "gate": self.neuron_gate,
            "backend": self._call_backend(x_SH.shape[0]),
            "activations": self.neuron_keep,
            "training": self.training,
            "cache_weights": caches_weights(self),
        }
        if self.neuron_adapted or self.neuron_merged:
            self._note_merged()
        out_SH = low_rank_mlp(x_SH, layers, **options) if layers else ops.swiglu_mlp(x_SH, *weights, **options)
        return out_SH if flat else out_SH.reshape(hidden_states.shape)

    def _check_inert(self) -> None:
        for name in self.neuron_roles.inert:
            now = self._attribute(name)
            if not is_inert(now):
                expected = "a dropout of 0 without hooks, as when the block was patched"
                fix = "The kernels have no dropout: unpatch the model before changing it."
                raise UnsupportedModelError.about(name, expected, repr(now), fix).named(self.neuron_name)

    def _note_merged(self) -> None:
        """Drop weight copies after a (un)merge of adapters: peft changes ``.data``, which no version counter shows."""
        names = self.neuron_roles.linears if self.neuron_adapted else ()
        merged = [(name, adapter) for name in names for adapter in getattr(self._modules[name], "merged_adapters", ())]
        if merged != self.neuron_merged and not is_compiling():
            self.neuron_merged = merged
            drop_weight_copies(self.parameters())

    def _generate(self, hidden_states: Tensor) -> Tensor | None:
        """The usual case of generation; None where anything is unusual.

        Between two calls the weights of the whole model go through the caches, so that every line and object here
        comes from memory again: they are as few as possible.
        """
        watch = self.neuron_watch
        if watch is None or is_compiling() or not hidden_states.is_cpu or not self.neuron_gate.reads_up_as_it_is:
            return None
        weights = None if torch.is_autocast_enabled("cpu") else watch.unchanged(self)
        if weights is None or len(weights) != 3:  # a fused gate_up_proj is cut in two elsewhere
            return None
        shape = hidden_states.shape
        flat = len(shape) == 2
        x_SH = hidden_states if flat else hidden_states.reshape(-1, shape[-1])
        gate_IH, up_IH, down_HI = weights
        y_SH = watch.decode(x_SH, gate_IH, up_IH, down_HI, self.neuron_config.precision, self.neuron_gate)
        return y_SH if y_SH is None or flat else y_SH.view(shape)

    def _through_layers(self, hidden_states: Tensor, reason: str) -> Tensor:
        if not self.neuron_warned:
            self.neuron_warned = True
            message = (
                f"{self.neuron_name}: {reason}, so this block calls its layers one by one and computes at the stock "
                f"precision instead of {self.neuron_config.precision!r}. To keep the patched precision, put adapters "
                "on other modules (attention, say), or merge this one."
            )
            warnings.warn(message, NeuronMoEWarning, stacklevel=3)
        roles = self.neuron_roles
        projected = [self.get_submodule(name)(hidden_states) for name in roles.inputs]
        gate, up = projected if len(projected) == 2 else projected[0].chunk(2, dim=-1)
        activation = F.silu if roles.activation is None else getattr(self, roles.activation)
        return self.get_submodule(roles.down)(activation(gate) * up)


class KernelLayoutSwiGLUMLP(KernelLayoutMixin, NeuronSwiGLUMLP):
    """A dense SwiGLU MLP that owns ``gate_up_proj [2I, H]`` and ``down_proj [H, I]``, with a stock state_dict."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig, roles: DenseRoles) -> None:
        super().__init__(original, name, config, roles)
        layers: dict[str, Any] = {child: self._modules.pop(child) for child in roles.linears}
        shapes = {child: (layer.out_features, layer.in_features) for child, layer in layers.items()}
        self._own_weights(original, roles.rules)
        self.add_module(REPLACED_LAYERS, ReplacedLayers(self.neuron_name, shapes))

    def _unsupported_reason_fused(self) -> str | None:
        self._check_activation(self.neuron_roles.activation)  # without linear layers there is nothing to fall back to
        return None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.refuse_adapters(prefix[:-1])
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        # peft loads without strict: what it leaves over would be lost without a word.
        for name in self.neuron_roles.linears:
            key = next((key for key in state_dict if key.startswith(f"{prefix}{name}.lora_")), None)
            if key is not None:
                raise adapters_refused(self.neuron_name, name, f"{key.removeprefix(prefix)} to load")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def refuse_adapters(self, name: str) -> None:
        """Raise for adapters on the parameters that are to be saved: peft would ignore them in stock models.

        `name` is the block's present one, which shows peft's wrapper around it.
        """
        if name.endswith(".base_layer"):
            expected = "without adapters on its parameters in kernel layout when it is saved"
            fix = (
                "Call merge_and_unload() before saving. Or patch with weights='stock' and target the layers "
                f"{', '.join(self.neuron_roles.linears)} (target_modules)."
            )
            got = "adapters that no stock model could load"
            raise UnsupportedModelError.about("the block", expected, got, fix).named(self.neuron_name)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return three_weights((self.gate_up_proj, self.down_proj))

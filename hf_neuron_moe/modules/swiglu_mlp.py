"""Dense gated MLP: ``down(f(gate(x)) * p(up(x)))``, with SiLU and nothing else a SwiGLU.

S tokens (all leading dimensions flattened), H hidden size, I intermediate size.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from hf_neuron_moe.backends import drop_weight_copies
from hf_neuron_moe.backends.spec import FFNWeights
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import NeuronMoEWarning, UnsupportedModelError
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.backend_choice import caches_weights
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.dense_checks import check_arguments, check_attributes, check_rank
from hf_neuron_moe.modules.dense_roles import DenseRoles, constant_of
from hf_neuron_moe.modules.dense_watch import Watch
from hf_neuron_moe.modules.layers_gate import gate_by_layers
from hf_neuron_moe.modules.low_rank import (
    LowRank,
    base_of,
    is_lora_linear,
    low_rank_mlp,
    low_rank_of,
    unsupported_reason_low_rank,
)
from hf_neuron_moe.modules.ops_checks import check_hidden_states
from hf_neuron_moe.modules.replaced_layers import NAME as REPLACED_LAYERS, ReplacedLayers, adapters_refused
from hf_neuron_moe.modules.saved_bytes import SavedBlock
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin
from hf_neuron_moe.modules.structure import (
    has_call_hooks,
    unsupported_activation,
    unsupported_reason_plain_linear,
)


class NeuronSwiGLUMLP(NeuronBlock):
    """A dense SwiGLU MLP computed by the operator, LoRA on its layers included; the weights stay in those.

    If a layer is wrapped otherwise or gets a hook, the block computes through the layers instead and warns once.
    """

    neuron_layers = True  # whether it has the original's

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig, roles: DenseRoles) -> None:
        super().__init__(original, name, config)
        self.neuron_roles = roles
        self.neuron_watch: Watch | None = None
        self.neuron_adapted = False
        self.neuron_merged: list[tuple[str, str]] = []
        self._remember_activation(roles.activation)
        self.neuron_gate = roles.gate
        self.neuron_surrounded = roles.surrounded

    @property
    def neuron_shape(self) -> SavedBlock:
        # Asked for after adapters were put on the layers too, which then have the sizes but not the weight.
        down: Any = base_of(self._layer(self.neuron_roles.down))
        hidden, inner = self._weights().down_HI.shape if down is None else (down.out_features, down.in_features)
        config = self.neuron_config
        return SavedBlock(config.precision, hidden, inner, None, config.backend, gate=self.neuron_gate)

    def _unsupported_reason_fused(self) -> str | None:
        if self.neuron_watch is not None and self.neuron_watch.unchanged(self) is not None:
            return None
        roles = self.neuron_roles
        self.neuron_watch = None
        self.neuron_adapted = False
        for name in roles.linears:
            reason = self._unsupported_reason_layer(name)
            if reason is not None:
                return f"{name} is {reason}"
            layer: Any = self._layer(name)
            if (layer.bias is not None) is not (name in roles.biased):
                change = "without its bias" if name in roles.biased else "with a bias"
                return f"{name} is a linear layer {change}, other than when the block was patched"
        wrappers = {root for root, name in zip(roles.roots, roles.linears, strict=True) if root != name}
        hooked = next((root for root in wrappers if has_call_hooks(self._modules[root])), None)  # type: ignore[arg-type]
        if hooked is not None:
            return f"{hooked} has hooks"
        changed = self._changed_activation()
        if changed is not None:
            return changed
        # Not while a compiler looks on, which could not make the object again in its graph.
        if not self.neuron_adapted and not is_compiling():
            activation = None if roles.activation is None else self._attribute(roles.activation)
            self.neuron_watch = Watch(self, roles, activation, self.neuron_config.backend)
        return None

    def _unsupported_reason_layer(self, name: str, *, sharded: bool = False) -> str | None:
        """Why the operator cannot compute a linear layer; an adapter on it is noted."""
        layer: Any = self._layer(name)
        reason = None
        if is_lora_linear(layer):
            self.neuron_adapted = True
            # The operator with adapters cuts a fused weight in halves, gate rows first.
            order = None if self.neuron_roles.gate_first else "a LoRA layer in a block of other row order"
            reason, layer = unsupported_reason_low_rank(layer) or order, layer.base_layer
        return reason or unsupported_reason_plain_linear(layer, sharded=sharded)

    def _low_rank(self) -> tuple[list[LowRank], list[Any]]:
        """Weights of the layers with their adapters, and their biases."""
        layers = [self._layer(name) for name in self.neuron_roles.linears]
        return [low_rank_of(layer) for layer in layers], [base_of(layer).bias for layer in layers]

    def _changed_activation(self) -> str | None:
        name = self.neuron_roles.activation
        if name is None:
            return None
        activation = self._attribute(name)
        changed = unsupported_activation(activation, self.neuron_gate.act)
        if changed is not None:
            return f"{name} is {changed}"
        return f"{name} has hooks" if isinstance(activation, nn.Module) and has_call_hooks(activation) else None

    def _layer(self, name: str) -> nn.Module | None:
        """The linear layer at a path, or None."""
        layer: Any = self
        for part in name.split("."):
            layer = None if layer is None else layer._modules.get(part)
        return layer

    def _weights(self) -> FFNWeights:
        roles = self.neuron_roles
        layers: list[Any] = [self._layer(name) for name in roles.linears]
        replica = "_is_replica" in self.__dict__  # nn.DataParallel's, which has plain tensors
        weights = [layer.weight if replica else layer._parameters["weight"] for layer in layers]
        return ffn_weights(roles, weights, [layer.bias for layer in layers] if roles.biased else [None] * len(layers))

    def forward(self, hidden_states: Tensor, *unused: object, **unused_by_name: object) -> Tensor:
        """Apply the block to ``hidden_states`` ``[..., H]``; the result has its shape and dtype."""
        if unused or unused_by_name:
            check_arguments(self, self.neuron_roles, unused, unused_by_name)
        if not self.neuron_surrounded:
            return self._compute(hidden_states)
        roles = self.neuron_roles
        check_attributes(self, roles, layers=self.neuron_layers)
        dtype = hidden_states.dtype
        for name in roles.before:
            hidden_states = self._attribute(name)(hidden_states)
        check_rank(self, roles, hidden_states)
        result = self._compute(hidden_states)
        if torch.is_autocast_enabled(result.device.type):  # where layers return one dtype, whatever a norm returned
            result = result.to(dtype)
        for step in roles.after:
            held = _step(self, step) if isinstance(step, str) else step
            if isinstance(held, Tensor):
                result = result * held
                continue
            result = held(result) if isinstance(held, nn.Module) else F.dropout(result, held, self.training)
        return result.to(dtype) if roles.cast_back else result

    def _compute(self, hidden_states: Tensor) -> Tensor:
        if not self.training and not torch.is_grad_enabled() and type(hidden_states) is Tensor:
            y = self._generate(hidden_states)
            if y is not None:
                return y
        reason = self._unsupported_reason_fused()
        if reason is not None:
            return self._through_layers(hidden_states, reason)
        layers, held = self._low_rank() if self.neuron_adapted else ([], [])
        weights = None if layers else self._weights()
        down_HI = layers[-1].weight_ON if weights is None else weights.down_HI
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
        if weights is None:
            biases = three_biases(self.neuron_roles, held)
            out_SH = low_rank_mlp(x_SH, layers, biases=biases, **options)
        else:
            out_SH = ops.swiglu_mlp(x_SH, *weights[:3], biases=weights[3:], **options)
        return out_SH if flat else out_SH.reshape(hidden_states.shape)

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
        if watch is None or is_compiling() or not hidden_states.is_cpu or not watch.decodes:
            return None
        weights = None if torch.is_autocast_enabled("cpu") else watch.unchanged(self)
        if weights is None:
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
            warnings.warn(message, NeuronMoEWarning, stacklevel=4)
        roles = self.neuron_roles
        *inputs, down = (self.get_submodule(root) for root in roles.roots)
        projected = [layer(hidden_states) for layer in inputs]
        gate, up = projected if len(projected) == 2 else roles.halves_of_result(projected[0])
        activation = None if roles.activation is None else getattr(self, roles.activation)
        result: Tensor = down(gate_by_layers(roles.gate, activation, gate, up))
        return result


def _step(block: NeuronBlock, name: str) -> Any:
    """A dropout, a factor, or a probability, which may be an attribute of another object or of the class."""
    held: Any = {**block._parameters, **block._modules}.get(name)
    return constant_of(block, name) if held is None else held


class KernelLayoutSwiGLUMLP(KernelLayoutMixin, NeuronSwiGLUMLP):
    """A dense MLP that owns ``gate_up_proj [2I, H]``, ``down_proj [H, I]`` and biases, with a stock state_dict."""

    neuron_layers = False
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig, roles: DenseRoles) -> None:
        super().__init__(original, name, config, roles)
        layers: dict[str, Any] = {
            root: self._layer(name) for root, name in zip(roles.roots, roles.linears, strict=True)
        }
        shapes = {root: (layer.out_features, layer.in_features) for root, layer in layers.items()}
        for root in shapes:
            del self._modules[root]
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
        for name in self.neuron_roles.roots:
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

    def _weights(self) -> FFNWeights:
        roles, parameters = self.neuron_roles, self._parameters
        inputs: list[Any] = [self.gate_up_proj]
        titles = ["gate_up_proj_bias"] if len(roles.inputs) == 1 else ["gate_proj_bias", "up_proj_bias"]
        biases = [parameters.get(title) for title in (*titles, "down_proj_bias")]
        if len(roles.inputs) == 2:
            inputs = list(self.gate_up_proj.view(2, -1, self.gate_up_proj.shape[1]).unbind(0))
        return ffn_weights(roles, [*inputs, self.down_proj], biases)


def ffn_weights(roles: DenseRoles, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> FFNWeights:
    """Return the operator's weights of those of the linear layers, in the order of ``roles.linears``."""
    gate_IH, up_IH = weights[:2] if len(weights) == 3 else roles.halves(weights[0])
    return FFNWeights(gate_IH, up_IH, weights[-1], *three_biases(roles, biases))


def three_biases(
    roles: DenseRoles, biases: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the biases of gate, up and down of those of the linear layers."""
    if len(biases) == 3:
        return biases[0], biases[1], biases[2]
    fused, down_H = biases
    gate_I, up_I = (None, None) if fused is None else roles.halves(fused)
    return gate_I, up_I, down_H

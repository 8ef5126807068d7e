"""Routed experts behind transformers' experts call ``(hidden_states, top_k_index, top_k_weights)``.

T tokens, K experts per token, E experts on this rank, H hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.activation_policy import canonical_keep
from hf_neuron_moe.backends.base import Backend
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, Support
from hf_neuron_moe.config import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, public
from hf_neuron_moe.modules import ops
from hf_neuron_moe.modules.backend_choice import caches_weights, usable_backend
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.ops_checks import check_hidden_states
from hf_neuron_moe.modules.saved_bytes import SavedBlock
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin, WeightRule
from hf_neuron_moe.modules.structure import act_of, unsupported_reason_swiglu_experts


def expert_rules(is_transposed: bool) -> tuple[WeightRule, ...]:
    """Return the kernel layout's parameters ``gate_up_proj [E, H, 2I]`` and ``down_proj [E, I, H]``."""
    return tuple(WeightRule(name, (name,), transposed=not is_transposed) for name in ("gate_up_proj", "down_proj"))


class NeuronExperts(NeuronBlock):
    """SwiGLU experts computed by the operator, their weights in the original 3-D parameters."""

    is_transposed: bool
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig) -> None:
        super().__init__(original, name, config)
        self._remember_activation("act_fn")

    @property
    def neuron_shape(self) -> SavedBlock:
        config, (K, E) = self.neuron_config, (self.neuron_top_k or 0, len(self.down_proj))
        sizes = (*_sizes(self), K, config.backend)
        return SavedBlock(config.precision, *sizes, experts=E, block_size=config.block_size, gate=self.neuron_gate)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        `hidden_states` are ``[T, H]``, as is the result; `top_k_index` and `top_k_weights` ``[T, K]``. Ids of E and
        above belong to another rank and add nothing.
        """
        self._check_activation("act_fn")
        config, axis = self.neuron_config, 2 if self.is_transposed else 1
        check_hidden_states(hidden_states, self.down_proj, axis, self.neuron_name)
        inputs, backend = (hidden_states, top_k_index, top_k_weights), self._call_backend(hidden_states.shape[0])
        return _compute(self, inputs, config, backend, self.neuron_keep, self.neuron_gate)


def _compute(
    module: Any, inputs: tuple[Tensor, Tensor, Tensor], config: NeuronMoEConfig, backend: str, keep: str, gate: Gate
) -> Tensor:
    return ops.experts(
        *inputs,
        module.gate_up_proj,
        module.down_proj,
        transposed=module.is_transposed,
        precision=config.precision,
        block_size=config.block_size,
        backend=backend,
        activations=keep,
        training=module.training,
        cache_weights=caches_weights(module),
        gate=gate,
    )


def _sizes(module: Any) -> tuple[int, int]:
    """H and I of an experts module."""
    shape = module.down_proj.shape
    return (shape[2], shape[1]) if module.is_transposed else (shape[1], shape[2])


class KernelLayoutExperts(KernelLayoutMixin, NeuronExperts):
    """SwiGLU experts that own ``gate_up_proj [E, H, 2I]`` and ``down_proj [E, I, H]``, with a stock state_dict."""

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig) -> None:
        super().__init__(original, name, config)
        self._own_weights(original, expert_rules(self.is_transposed))
        # The flag describes the parameters as they are now; peft's target_parameters reads it.
        self.is_transposed = True


@public
def register_experts_implementation(
    config: NeuronMoEConfig | Mapping[str, Any] | None = None, name: str = "neuron_moe"
) -> Callable[..., Tensor]:
    """Register the experts operator in transformers, for models that are not to be patched.

    Afterwards ``model.set_experts_implementation(name)`` or ``from_pretrained(..., experts_implementation=name)``
    selects it, process-wide. Parameters and checkpoints stay transformers' own, so that the ``weights`` of `config`
    must be ``"auto"`` or ``"stock"``; its activations are a preset or a policy without exceptions. An implementation
    `name` of another origin is not replaced. Under transformers' tensor or expert parallelism the first call raises.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    options = NeuronMoEConfig() if config is None else config
    if not isinstance(options, NeuronMoEConfig):
        options = NeuronMoEConfig.from_dict(options)
    if options.weights == "kernel":
        expected = "'auto' or 'stock', since the parameters stay the model's own"
        fix = "Use patch_model for weights in kernel layout."
        raise ConfigError.about("config.weights", expected, "'kernel'", fix)
    existing = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or (existing is not None and not isinstance(existing, _RegisteredExperts)):
        expected = "a name that no other experts implementation has"
        fix = "Choose another name, for example 'neuron_moe'."
        raise ConfigError.about("name", expected, repr(name), fix)
    function = _RegisteredExperts(options)
    ALL_EXPERTS_FUNCTIONS.register(name, function)
    return function


class _RegisteredExperts:
    """The function transformers calls as ``fn(module, hidden_states, top_k_index, top_k_weights)``."""

    def __init__(self, config: NeuronMoEConfig) -> None:
        self.config = config
        self.keep = canonical_keep(config.activations, config.precision)
        self.warned: set[str] = set()

    def __call__(self, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        _check_supported(module)
        config, gate = self.config, Gate(act_of(module.act_fn) or "silu")
        # Where PyTorch may not take over, a call that is too long is the backend's to refuse.
        tokens = hidden_states.shape[0] if config.fallback == "torch" else 0

        def support(kernels: Backend) -> Support:
            shape = BlockShape("experts", *_sizes(module), len(module.down_proj))
            spec = BlockSpec(config.precision, config.block_size, module.is_transposed, gate)
            return kernels.support(shape, spec, tokens=tokens)

        backend = usable_backend(config, hidden_states.device, type(module).__name__, support, self.warned)
        return _compute(module, (hidden_states, top_k_index, top_k_weights), config, backend, self.keep, gate)


@torch.compiler.assume_constant_result  # decided once per compiled module: the flags are set when it is made
@public("experts implementation of hf_neuron_moe")
def _check_supported(module: nn.Module) -> bool:
    reason = unsupported_reason_swiglu_experts(module)
    if reason is not None:
        got = f"one that the kernels cannot compute: {reason}"
        fix = "Use model.set_experts_implementation('grouped_mm') for this model."
        raise UnsupportedModelError.about(type(module).__name__, "a plain SwiGLU experts module", got, fix)
    return True

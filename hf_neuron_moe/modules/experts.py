"""Routed experts behind transformers' experts call ``(hidden_states, top_k_index, top_k_weights)``.

T tokens, K experts per token, E experts on this rank, H hidden size, I intermediate size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.activation_policy import canonical_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.base import Backend
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, Support
from hf_neuron_moe.config import DEFAULT_BACKEND, NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, public
from hf_neuron_moe.modules import experts_calls, ops
from hf_neuron_moe.modules.backend_choice import caches_weights, usable_backend
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.engine import axis_parts
from hf_neuron_moe.modules.expert_parallel import register_expert_parallel
from hf_neuron_moe.modules.experts_calls import BY_EXPERT, IDENTITY, SHARED, SORTED, STACKED
from hf_neuron_moe.modules.experts_form import ExpertsForm, check_constants, parameter_of, read_experts
from hf_neuron_moe.modules.gate_expression import UnknownForm
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE, check_hidden_states
from hf_neuron_moe.modules.saved_bytes import SavedBlock, saved_beside
from hf_neuron_moe.modules.state_dict import KernelLayoutMixin, halves_together
from hf_neuron_moe.modules.structure import gate_of_text
from hf_neuron_moe.precision_map import PrecisionMap


class ExpertsBlock(NeuronBlock):
    """Experts computed by the operator, their weights in the original parameters."""

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig) -> None:
        super().__init__(original, name, config)
        self.neuron_form = read_experts(original)
        self._remember_activation(self.neuron_form.activation, self.neuron_form.gate)
        # Processes that add up their results, each with a part of the intermediate axis.
        self.neuron_parts, _ = axis_parts(parameter_of(original, self.neuron_form.down), self.neuron_form.axes[1])
        self.neuron_factors: dict[str, list[tuple[Tensor, Tensor, float]]] = {}  # of adapters, lent to a call

    @property
    def neuron_shape(self) -> SavedBlock:
        return experts_shape(self, self.neuron_form, self.neuron_config, self.neuron_top_k or 0)

    def _run(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        """Check what may have changed since patching, and compute."""
        form = self.neuron_form
        self._check_activation(form.activation)
        check_constants(self, form, self.neuron_name)
        axis = 2 if form.transposed else 1
        check_hidden_states(hidden_states, parameter_of(self, form.down), axis, self.neuron_name)
        rows = math.prod(hidden_states.shape[:-1]) * (1 if form.post_norm is None else routing[0].shape[1])
        backend = self._call_backend(rows)
        parameters: dict[str, Any] = self._parameters
        held = {name: parameters[name] for name in self.neuron_factors}
        try:
            for name, factors in self.neuron_factors.items():
                with torch.autocast(hidden_states.device.type, enabled=False):
                    for left, right, scaling in factors:  # one rounding, as peft does it
                        parameters[name] = torch.baddbmm(parameters[name], left, right, alpha=scaling)
            return compute_experts(self, (hidden_states, *routing), form, self.neuron_config, backend, self.neuron_keep)
        finally:
            parameters.update(held)


class NeuronExperts(ExpertsBlock):
    """Experts that get hidden states, ids and weights."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        `hidden_states` are ``[T, H]``, as is the result, or ``[B, S, H]`` where the original takes those;
        `top_k_index` and `top_k_weights` ``[T, K]``. Ids of E and above belong to another rank and add nothing.
        """
        return self._run(hidden_states, top_k_index, top_k_weights)


class SharedExperts(ExpertsBlock):
    """Experts that all compute every token, with a weight for each."""

    def forward(self, hidden_states: Tensor, gammas: Tensor) -> Tensor:
        """Return the sum of all experts of `hidden_states` ``[..., H]``, weighted by `gammas` ``[..., E]``."""
        return self._run(hidden_states, gammas)


class SelfRoutedExperts(ExpertsBlock):
    """Experts that get hidden states only: with a router of their own, or sorted by expert."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return what the original's call does, in the shape of `hidden_states` ``[..., H]``."""
        return self._run(hidden_states)


def experts_shape(module: nn.Module, form: ExpertsForm, config: NeuronMoEConfig, top_k: int) -> SavedBlock:
    """Return what the saved bytes of experts depend on; `top_k` is 0 where it is not known."""
    E, H, I = form.local_sizes(module)  # noqa: E741
    rows, beside, dtype = None, 0.0, parameter_of(module, form.down).dtype
    if form.call == BY_EXPERT:
        # With fixed rows every token is a row of every expert; otherwise the chosen rows are looked up.
        rows, beside = (E, 0.0) if get_backend(config.backend).fixed_rows else (top_k, torch.int64.itemsize)
    elif form.post_norm is not None:
        norm, rows = copy.deepcopy(getattr(module, form.post_norm)).to("meta"), top_k
        weight = torch.empty((), dtype=dtype, device="meta", requires_grad=True)
        beside = saved_beside(lambda y_RH: norm(y_RH) * weight, H, dtype) + torch.float32.itemsize  # of its own weight
    elif form.call == IDENTITY:  # the mask of a token's pairs, and the sum of their weights
        beside = top_k + torch.float32.itemsize
    elif form.call == SORTED:  # the router's choices and their softmax, and the order of the pairs
        beside = top_k * (2 * torch.int64.itemsize + torch.float32.itemsize)
    reads_input = form.call == IDENTITY or (
        form.call == SORTED and parameter_of(module, "router.layer.weight").requires_grad
    )
    if reads_input and dtype != COMPUTE_DTYPE[config.precision]:  # the operator has a cast copy of its own
        reads_input, beside = False, beside + H * dtype.itemsize
    alternating = form.biased and form.bias_interleaved and config.weights == "kernel"
    copied = 2 * E * I * H if form.call in (STACKED, SHARED) else 2 * E * I if alternating else 0
    copied *= dtype.itemsize
    shape = SavedBlock(config.precision, H, I, top_k, config.backend, experts=E, gate=form.gate)
    return replace(
        shape,
        block_size=config.block_size,
        rows=rows,
        beside=beside,
        copied=copied,
        reads_input=reads_input,
    )


def compute_experts(
    module: Any,
    inputs: tuple[Tensor, ...],
    form: ExpertsForm,
    config: NeuronMoEConfig,
    backend: str,
    keep: str,
) -> Tensor:
    """Return what a module of this `form` computes of `inputs`, the arguments of its call."""
    gate_up, down, *biases = (parameter_of(module, name) for name in _operands(form))
    if None in biases:
        fix = "Unpatch the model before you take a bias away."
        error = UnsupportedModelError.about("the biases", "those that were there at patching", "None", fix)
        raise error.named(getattr(module, "neuron_name", "experts"))
    if form.call == STACKED:
        gate_up, down = _of_stacked(module, form)
    if form.call == SHARED:
        gate_up = torch.cat([gate_up, parameter_of(module, form.inputs[1])], dim=1)
    if form.call == IDENTITY:
        gate_up = gate_up[: len(down)]  # experts that return their input have rows too, which nothing reads
    if form.biased and form.bias_interleaved and not form.interleaved:
        biases[0] = halves_together(biases[0])

    def operator(x_TH: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
        return ops.experts(
            x_TH,
            ids_TK,
            weight_TK,
            gate_up,
            down,
            transposed=form.transposed,
            precision=config.precision,
            block_size=config.block_size,
            backend=backend,
            activations=keep,
            training=module.training,
            cache_weights=caches_weights(module),
            gate=gate_of_text(form.gate_text),
            interleaved=form.interleaved,
            biases=(biases[0], biases[1]) if form.biased else (None, None),
        )

    return called(module, form, operator, len(down), inputs)


def called(
    module: Any, form: ExpertsForm, operator: experts_calls.Operator, experts: int, inputs: tuple[Tensor, ...]
) -> Tensor:
    """Return what the call of a `module` of this `form` returns, from the operator of its `experts`."""
    if form.call == STACKED:
        return experts_calls.stacked(operator, *inputs)
    if form.call == SHARED:
        return experts_calls.shared(operator, experts, *inputs)
    if form.call == IDENTITY:
        return experts_calls.identity(operator, experts, getattr(module, "neuron_parts", 1), *inputs)
    if form.call == BY_EXPERT:
        return experts_calls.by_expert(operator, experts, *inputs)
    if form.call == SORTED:
        return experts_calls.in_expert_order(operator, module.router, module.bias, experts, *inputs)
    norm = None if form.post_norm is None else getattr(module, form.post_norm)
    return experts_calls.routed(operator, norm, *inputs)


def _operands(form: ExpertsForm) -> tuple[str, ...]:
    """Names of gate_up, down and their biases; fields only, since compilers do not trace properties of constants."""
    gate_up, down = form.inputs[0], form.down
    return (gate_up, down, f"{gate_up}_bias", f"{down}_bias") if form.biased else (gate_up, down)


def _of_stacked(module: nn.Module, form: ExpertsForm) -> tuple[Tensor, Tensor]:
    """Return gate_up ``[E, 2I, H]``, a copy, and down ``[E, H, I]`` of weights ``[E I, H]``."""
    E, H, I = form.sizes(module)  # noqa: E741
    gate, up, down = (parameter_of(module, name).view(E, I, H) for name in form.parameters)
    return torch.cat([gate, up], dim=1), down.transpose(1, 2)


class KernelLayoutExperts(KernelLayoutMixin, NeuronExperts):
    """Experts that own gate_up ``[E, H, 2I]`` and down ``[E, I, H]``, with a stock state_dict."""

    def __init__(self, original: nn.Module, name: str, config: NeuronMoEConfig) -> None:
        super().__init__(original, name, config)
        self._own_weights(original, self.neuron_form.rules)
        self.neuron_form = replace(self.neuron_form, transposed=True, interleaved=False)
        # The flags describe the parameters as they are now; peft's target_parameters reads the first.
        self.is_transposed = self.is_concatenated = True

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.refuse_adapters(prefix[:-1])
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if any("lora_" in key and key.startswith(_outside_adapters(prefix)) for key in state_dict):
            self.refuse_adapters(prefix[:-1])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def refuse_adapters(self, name: str) -> None:
        """Raise for adapters that are saved or loaded where the stock weights' columns have another order.

        `name` is the block's present one, which shows peft's wrapper around it.
        """
        if name.endswith(".base_layer") and any(rule.interleaved for rule in self.neuron_rules):
            expected = "without adapters on its parameters in kernel layout when they are saved or loaded"
            stock = "patch with weights='stock' (convert with --layout fused) and train the adapters there"
            fix = f"Call merge_and_unload() before saving. Or {stock}."
            got = "adapters whose columns have another order than in stock models"
            raise UnsupportedModelError.about("the block", expected, got, fix).named(self.neuron_name)


def _outside_adapters(prefix: str) -> str:
    """Return the state_dict prefix of the module that peft's wrappers stand in for."""
    while prefix.endswith(".base_layer."):
        prefix = prefix.removesuffix("base_layer.")
    return prefix


@public
def register_experts_implementation(
    config: NeuronMoEConfig | Mapping[str, Any] | None = None, name: str = "neuron_moe"
) -> Callable[..., Tensor]:
    """Register the experts operator in transformers, for models that are not to be patched.

    Afterwards ``model.set_experts_implementation(name)`` or ``from_pretrained(..., experts_implementation=name)``
    selects it, process-wide. Parameters and checkpoints stay transformers' own, so that the ``weights`` of `config`
    must be ``"auto"`` or ``"stock"``. Its precision is one for all, its activations a preset or a policy without
    exceptions. An implementation `name` of another origin is not replaced.

    Under expert parallelism transformers' exchange multiplies the affinities behind the experts, not where the kernels
    do. ``DistributedConfig(ep_implementation="neuron_moe")``, registered here too, takes them along.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    options = NeuronMoEConfig() if config is None else config
    if not isinstance(options, NeuronMoEConfig):
        options = NeuronMoEConfig.from_dict(options)
    if options.weights == "kernel":
        expected = "'auto' or 'stock', since the parameters stay the model's own"
        fix = "Use patch_model for weights in kernel layout."
        raise ConfigError.about("config.weights", expected, "'kernel'", fix)
    if isinstance(options.precision, PrecisionMap):
        expected = "one precision: an implementation does not know the names of the blocks it computes"
        fix = "Use patch_model for a precision per block."
        raise ConfigError.about("config.precision", expected, repr(options.precision), fix)
    existing = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or (existing is not None and not isinstance(existing, _RegisteredExperts)):
        expected = "a name that no other experts implementation has"
        fix = "Choose another name, for example 'neuron_moe'."
        raise ConfigError.about("name", expected, repr(name), fix)
    register_expert_parallel()
    function = _RegisteredExperts(options)
    ALL_EXPERTS_FUNCTIONS.register(name, function)
    return function


class _RegisteredExperts:
    """The function transformers calls as ``fn(module, hidden_states, top_k_index, top_k_weights)``."""

    def __init__(self, config: NeuronMoEConfig) -> None:
        self.config = config
        get_backend(DEFAULT_BACKEND if config.backend == "auto" else config.backend)  # whose import cannot be traced
        self.keep = canonical_keep(config.activations, config.precision)
        self.warned: set[str] = set()

    def __call__(self, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        form, config = _supported_form(module), self.config
        # Where PyTorch may not take over, a call that is too long is the backend's to refuse.
        tokens = hidden_states.shape[0] if config.fallback == "torch" else 0

        def support(kernels: Backend) -> Support:
            E, H, I = form.sizes(module)  # noqa: E741
            shape = BlockShape("experts", H, I, E, biased=(form.biased, form.biased))
            spec = BlockSpec(config.precision, config.block_size, form.transposed, form.gate, form.interleaved)
            return kernels.support(shape, spec, tokens=tokens)

        backend = usable_backend(config, hidden_states.device, type(module).__name__, support, self.warned)
        inputs = (hidden_states, top_k_index, top_k_weights)
        return compute_experts(module, inputs, form, config, backend, self.keep)


@torch.compiler.assume_constant_result  # decided once per compiled module: the flags are set when it is made
@public("experts implementation of hf_neuron_moe")
def _supported_form(module: nn.Module) -> ExpertsForm:
    try:
        return read_experts(module)
    except UnknownForm as answer:
        got = f"one that the kernels cannot compute: {answer}"
        fix = "Use model.set_experts_implementation('grouped_mm') for this model."
        expected = "an experts module whose gate the kernels have"
        raise UnsupportedModelError.about(type(module).__name__, expected, got, fix) from answer

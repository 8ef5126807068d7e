"""A dense MLP whose layers transformers' tensor parallelism cut: each process has a part of the intermediate axis.

The block computes with its parts and does once what the layers' installed forwards do one by one. Gradients of the
input are summed in the backward, results in the forward. What it returns before the sum is rounded to the input's
dtype, as a kernel's result is.

I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.backends.spec import FFNWeights
from hf_neuron_moe.modules.collectives import sum_gradients, sum_results
from hf_neuron_moe.modules.dense_roles import DenseRoles
from hf_neuron_moe.modules.engine import axis_parts, group_of, installed, is_sharded, local, style_name, uneven
from hf_neuron_moe.modules.low_rank import LowRank, base_of, low_rank_of
from hf_neuron_moe.modules.saved_bytes import SavedBlock
from hf_neuron_moe.modules.swiglu_mlp import NeuronSwiGLUMLP, ffn_weights

_INPUTS = {False: "colwise", True: "packed_colwise"}
"""The engine's style for a layer before the product, by whether it is gate's and up's in one."""


def is_parallel(module: nn.Module, roles: DenseRoles) -> bool:
    """Return whether tensor parallelism cut the layers of an MLP."""
    return any(installed(base_of(module.get_submodule(name))) is not None for name in roles.linears)


def rules_for(roles: DenseRoles) -> dict[str, str]:
    """Return the engine's style for each layer, by which a block can compute with the parts."""
    style = "colwise" if roles.interleaved else _INPUTS[len(roles.inputs) == 1]
    return dict.fromkeys(roles.inputs, style) | {roles.down: "rowwise"}


def reasons_against_parallel(module: nn.Module, roles: DenseRoles) -> Iterator[str]:
    """Yield why a block cannot compute an MLP that was sharded while loading."""
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        yield "FSDP shards it as a module of its own, so that it cannot be replaced; leave it out of fsdp_plan"
    if not is_parallel(module, roles):
        return
    wanted = rules_for(roles)
    found = {name: _style(module.get_submodule(name)) for name in roles.linears}
    if found != wanted:
        given = ", ".join(f"{name}: {style}" for name, style in found.items())
        plan = ", ".join(f"{name!r}: {style!r}" for name, style in wanted.items())
        yield f"tensor parallelism cuts it by {given}; pass rules for {{{plan}}} in DistributedConfig(tp_plan=...)"
    first: Any = base_of(module.get_submodule(roles.inputs[0])).weight
    axes = [getattr(placement, "dim", None) for placement in first.placements] if is_sharded(first) else []
    if wanted[roles.inputs[0]] == "packed_colwise" and axes.count(0) > 1:
        yield "FSDP cuts gate and up a second time, which transformers 5.23 loads wrongly; use tp or fsdp alone"
    down = base_of(module.get_submodule(roles.down)).weight
    inner, (parts, _) = down.shape[1], axis_parts(down, 1)
    if inner % parts:
        yield uneven(inner, parts)


def _style(layer: nn.Module) -> str:
    found = installed(base_of(layer))
    return "not cut" if found is None else style_name(found.style)


class ShardedSwiGLUMLP(NeuronSwiGLUMLP):
    """A dense gated MLP with a part of its intermediate axis; all processes of its group call it together."""

    neuron_forwards: list[Any] | None = None  # the layers' installed forwards, once they were found right

    @property
    def neuron_shape(self) -> SavedBlock:
        shape, down = super().neuron_shape, self.get_submodule(self.neuron_roles.down)
        parts, _ = axis_parts(down.weight, 1)
        return replace(shape, intermediate=shape.intermediate // parts)

    def _unsupported_reason_fused(self) -> str | None:
        roles = self.neuron_roles
        self.neuron_adapted = False
        for name in roles.linears:
            reason = self._unsupported_reason_layer(name, sharded=True)
            if reason is not None:
                return f"{name} is {reason}"
        forwards = [base_of(self._layer(name)).__dict__.get("forward") for name in roles.linears]
        if forwards != self.neuron_forwards:
            reason = next(reasons_against_parallel(self, roles), None)
            if reason is not None:
                return reason
            self.neuron_forwards = forwards
        return self._changed_activation()

    def _weights(self) -> FFNWeights:
        layers, biases = self._low_rank()
        return ffn_weights(self.neuron_roles, [layer.weight_ON for layer in layers], biases)

    def _low_rank(self) -> tuple[list[LowRank], list[Any]]:
        layers: list[Any] = [self._layer(name) for name in self.neuron_roles.linears]
        engine: Any = installed(base_of(layers[-1]))
        group = group_of(engine.mesh)

        def part(tensor: Tensor) -> Tensor:
            # peft cuts the factor of the axis that is cut; each process has the other one whole, and a part of its use.
            return local(tensor) if is_sharded(tensor) else sum_gradients(tensor, group)

        biases = [None if base_of(layer).bias is None else local(base_of(layer).bias) for layer in layers[:-1]]
        return [low_rank_of(layer, part) for layer in layers], [*biases, None]  # down's is added behind the sum, once

    @torch.compiler.disable  # a compiler cannot look into the layers' installed forwards
    def _compute(self, hidden_states: Tensor) -> Tensor:
        if self._unsupported_reason_fused() is not None:
            return super()._compute(hidden_states)  # by the layers, which sum for themselves
        down: Any = base_of(self._layer(self.neuron_roles.down))
        engine = installed(down)
        assert engine is not None
        group = group_of(engine.mesh)
        result = sum_results(super()._compute(sum_gradients(hidden_states, group)), group)
        return result if down.bias is None else result + local(down.bias)

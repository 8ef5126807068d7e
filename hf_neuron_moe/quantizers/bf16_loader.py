"""Places for bf16 tensors in another layout, and how they become a module's own weights.

transformers fills parameters by name and shape. A loader has those of the converted file; once they are filled, the
original module gets its weights from them. E experts, F rows, K columns, H hidden, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_neuron_moe.formats.swizzle import unswizzle
from hf_neuron_moe.modules.block import put_parameter, stock_slot
from hf_neuron_moe.modules.quantized_blocks import DOWN, GATE_UP, UP
from hf_neuron_moe.patching.discovery import Candidate
from hf_neuron_moe.quantizers.shard_layouts import StoredTensor


class Bf16Loader(nn.Module):
    """Stands in for `candidate`'s module while weights are loaded; `tensors` are the converted ones by role."""

    def __init__(self, candidate: Candidate, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__()
        self.candidate = candidate
        self.tensors = dict(tensors)
        original = candidate.module
        dtype = next(original.parameters()).dtype
        suffix = "" if candidate.roles is None else ".weight"
        self.names = {GATE_UP: (GATE_UP if candidate.gate.gated else UP) + suffix, DOWN: DOWN + suffix}
        for role, stored in tensors.items():
            self._hold(self.names[role], torch.empty(stored.tensor.shape, dtype=dtype, device="meta"))
        # What the module has beside the weights, such as biases, norms and a router, stays in its source form.
        replaced = {name for rule in candidate.rules[:2] for name in rule.stock}
        if candidate.form is not None:
            replaced = {*candidate.form.inputs, candidate.form.down}
        state = original.state_dict(keep_vars=True)
        self.others = [name for name in state if name not in replaced]
        for name in self.others:
            self._hold(name, torch.empty_like(state[name], device="meta"))

    def _hold(self, name: str, value: Tensor) -> None:
        """Register `value`, of a parameter or buffer, under a path, making modules on the way."""
        home: nn.Module = self
        for part in name.split(".")[:-1]:
            if part not in home._modules:
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        home.register_parameter(name.rpartition(".")[2], nn.Parameter(value, value.is_floating_point()))

    def role(self, role: str) -> nn.Parameter:
        """Return the parameter of a role."""
        return self.get_parameter(self.names[role])

    def hand_over(self, layout: str) -> nn.Module:
        """Give the original module the loaded weights and return it; `layout` as in :func:`give_weights`."""
        gate_up, down = (self._forward_matrix(role) for role in (GATE_UP, DOWN))
        module = give_weights(self.candidate, gate_up, down, layout).train(self.training)
        for name in self.others:
            owner, leaf = stock_slot(module, name)
            if leaf in owner._buffers:
                owner._buffers[leaf] = self.get_parameter(name).data
            else:
                owner._parameters[leaf] = self.get_parameter(name)
        return module

    def _forward_matrix(self, role: str) -> Tensor:
        """The weight as ``[F, K]`` or ``[E, F, K]``, without padding."""
        stored, value = self.tensors[role], self.role(role).detach()
        row = stored.bf16_layout
        assert row is not None, "a loader is for values"
        value = unswizzle(value) if row.view is None else row.view(value)
        extra_hidden, extra_inner = (stored.padding.get(axis, 0) for axis in "HI")
        if not extra_hidden and not extra_inner:
            return value
        if role == DOWN:
            return value[..., : value.shape[-2] - extra_hidden, : value.shape[-1] - extra_inner].contiguous()
        halves = value.unflatten(-2, (stored.halves, -1))
        inner, hidden = halves.shape[-2] - extra_inner, halves.shape[-1] - extra_hidden
        return halves[..., :inner, :hidden].flatten(-3, -2).contiguous()


def give_weights(candidate: Candidate, gate_up: Tensor, down: Tensor, layout: str) -> nn.Module:
    """Make the weights of a module, which may be on the meta device, of fused ones; return the module.

    `gate_up` is ``[2I, H]`` or ``[E, 2I, H]``, gate first, or up alone; `down` is ``[H, I]`` or ``[E, H, I]``. `layout`
    is where the weights will be kept, ``"stock"`` or ``"kernel"``; for ``"kernel"`` nothing is copied.
    """
    roles, form = candidate.roles, candidate.form
    if roles is not None:
        gate_up = gate_up if roles.gate_first else roles.fused(*gate_up.chunk(2))
        inputs = gate_up.chunk(len(roles.inputs))
        # Halves of one tensor would be taken for tied weights where they stay as they are.
        copied = layout == "stock" and len(inputs) == 2
        parts = (*(part.clone() if copied else part for part in inputs), down)
        values = dict(zip((f"{name}.weight" for name in roles.linears), parts))
    else:
        assert form is not None, "a module that can be patched has roles or a form"
        if form.interleaved:
            gate_up = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # gate and up rows in turn
        values = dict(zip((*form.inputs, form.down), (*gate_up.chunk(len(form.inputs), dim=1), down)))
        if form.stacked:
            values[form.down] = down.transpose(-1, -2)
            values = {name: value.flatten(0, 1).clone() for name, value in values.items()}
        elif form.transposed:
            values = {name: value.transpose(-1, -2) for name, value in values.items()}
    for name, value in values.items():
        put_parameter(candidate.module, name, nn.Parameter(value.contiguous() if layout == "stock" else value))
    return candidate.module

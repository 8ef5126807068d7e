"""Places for bf16 tensors in another layout, and how they become a module's own weights.

transformers fills parameters by name and shape. A loader has those of the converted file; once they are filled, the
original module gets its weights from them. E experts, F rows, K columns, H hidden, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_neuron_moe.formats.swizzle import unswizzle
from hf_neuron_moe.modules.block import put_parameter
from hf_neuron_moe.modules.quantized_blocks import DOWN, GATE_UP
from hf_neuron_moe.patching.discovery import Candidate
from hf_neuron_moe.quantizers.shard_layouts import StoredTensor


class Bf16Loader(nn.Module):
    """Stands in for `candidate`'s module while weights are loaded; `tensors` are the converted ones by role."""

    def __init__(self, candidate: Candidate, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__()
        self.candidate = candidate
        self.tensors = dict(tensors)
        dtype = next(candidate.module.parameters()).dtype
        for role, stored in tensors.items():
            home, leaf = (self, role) if candidate.roles is None else (nn.Module(), "weight")
            home.register_parameter(leaf, nn.Parameter(torch.empty(stored.tensor.shape, dtype=dtype, device="meta")))
            if home is not self:
                self.add_module(role, home)
        # Parameters beside the weights, such as biases, which a conversion leaves in their source form.
        own = candidate.module._parameters if candidate.roles is None else {}
        others = {name: param for name, param in own.items() if param is not None and name not in tensors}
        self.others = list(others)
        for name, param in others.items():
            self.register_parameter(name, nn.Parameter(torch.empty_like(param, device="meta")))

    def role(self, role: str) -> nn.Parameter:
        """Return the parameter of a role."""
        return self.get_parameter(role if self.candidate.roles is None else f"{role}.weight")

    def hand_over(self, layout: str) -> nn.Module:
        """Give the original module the loaded weights and return it; `layout` as in :func:`give_weights`."""
        gate_up, down = (self._forward_matrix(role) for role in (GATE_UP, DOWN))
        module = give_weights(self.candidate, gate_up, down, layout).train(self.training)
        for name in self.others:
            put_parameter(module, name, self.get_parameter(name))
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
        halves = value.unflatten(-2, (2, -1))
        inner, hidden = halves.shape[-2] - extra_inner, halves.shape[-1] - extra_hidden
        return halves[..., :inner, :hidden].flatten(-3, -2).contiguous()


def give_weights(candidate: Candidate, gate_up: Tensor, down: Tensor, layout: str) -> nn.Module:
    """Make the weights of a module, which may be on the meta device, of fused ones; return the module.

    `gate_up` is ``[2I, H]`` or ``[E, 2I, H]``, `down` ``[H, I]`` or ``[E, H, I]``. `layout` is where the weights will
    be kept, ``"stock"`` or ``"kernel"``; for ``"kernel"`` nothing is copied.
    """
    if candidate.roles is not None:
        inputs = gate_up.chunk(len(candidate.roles.inputs))
        # Halves of one tensor would be taken for tied weights where they stay as they are.
        copied = layout == "stock" and len(inputs) == 2
        parts = (*(part.clone() if copied else part for part in inputs), down)
        values = dict(zip((f"{name}.weight" for name in candidate.roles.linears), parts))
    else:
        if not getattr(candidate.module, "is_concatenated", True):
            gate_up = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # gate and up rows in turn
        values = {GATE_UP: gate_up, DOWN: down}
        if candidate.module.is_transposed:
            values = {name: value.transpose(-1, -2) for name, value in values.items()}
    for name, value in values.items():
        put_parameter(candidate.module, name, nn.Parameter(value.contiguous() if layout == "stock" else value))
    return candidate.module

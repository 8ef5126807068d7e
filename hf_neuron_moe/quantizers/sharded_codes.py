"""Frozen MX codes of a model that transformers' engine shards: a process has some experts, or a part of the I axis.

Codes and scales are buffers, which the engine does not cut. Expert parallelism gives a process a range of experts, one
range of each tensor. Groups of codes run along I, so that tensor parallelism takes the parts that a conversion with
``--tp-degree`` made. FSDP leaves them whole on every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.modules.engine import group_of, installed, style_name
from hf_neuron_moe.modules.expert_parallel import implementation_for, unsupported_reason_of_exchange
from hf_neuron_moe.modules.experts_calls import ROUTED
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock, QuantizedSwiGLUMLP
from hf_neuron_moe.patching.discovery import Candidate
from hf_neuron_moe.quantizers.shard_layouts import StoredTensor
from hf_neuron_moe.quantizers.sharded import Slices, hidden, overlap

WHOLE = "Convert the original again without --tp-degree, or load it with tp_size of that degree."


@dataclass
class CodeReading:
    """A block whose codes are read once transformers has loaded the rest of the model."""

    block: QuantizedBlock
    stored: Mapping[str, StoredTensor]  # by the names of the block's tensors
    experts: int  # number of this process's experts; 0 where they are not divided
    hook: Any = field(init=False)

    def __post_init__(self) -> None:
        self.hook = hidden(self.block, self.stored.keys())
        if self.experts:
            self.block.num_experts = self.experts  # type: ignore[assignment] # what the engine's exchange reads
            self.block._is_expert_parallel = True  # type: ignore[assignment]

    def check(self) -> None:
        """Raise where the engine does not bring the block its tokens, or does not sum its results."""
        block, found = self.block, installed(self.block)
        if self.experts:
            got = "none" if found is None or found.experts is None else unsupported_reason_of_exchange(found.experts)
            if got is not None:
                expected = "an ep_plan with ep_dispatch_experts and grouped_gemm for its experts"
                raise self._unsupported(expected, got, "Load it with the model's own ep_plan.")
        elif block.neuron_form is not None and self._parts > 1:
            got = "none" if found is None else style_name(found.style)
            if got != "moe_tp_experts":
                raise self._unsupported("a tp_plan with moe_tp_experts", got, "Load it with the model's own tp_plan.")

    def _unsupported(self, expected: str, got: str, fix: str) -> UnsupportedModelError:
        return UnsupportedModelError.about(f"distributed_config for {self.block.neuron_name}", expected, got, fix)

    @property
    def _parts(self) -> int:
        return _tensor_parts(next(iter(self.stored.values())))

    def finish(self, slices: Slices, device: torch.device, model: Any) -> None:
        """Read this process's codes and scales, and show them to ``state_dict``."""
        self.hook.remove()
        block, divided = self.block, self._parts > 1
        own = slice(None)
        if self.experts:
            first = model._mesh_manager.get_mesh("ep").get_local_rank() * self.experts
            own = slice(first, first + self.experts)
            for name in () if block.neuron_form is None else block.neuron_form.biases:
                block.register_buffer(name, block.get_buffer(name)[own].clone())
        rank = model._mesh_manager.get_mesh("tp").get_local_rank() if divided else 0
        for name, stored in self.stored.items():
            parts = [stored.all[rank]] if stored.ep_rank is None else stored.all
            wanted = range(stored.experts)[own]
            ranges = [(part, overlap(wanted, part.first_expert, len(part.tensor))) for part in parts]
            pieces = [slices(part)[here.start : here.stop] for part, here in ranges if here]
            block._hold(name, (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(device))
        found = installed(block)
        if self.experts and found is not None:  # weights of experts go with the tokens, as in a patched block
            del block.__dict__["forward"]
            found.again(block, implementation_for(found.experts))
        if divided and isinstance(block, QuantizedSwiGLUMLP):
            block.neuron_group = group_of(model._mesh_manager.get_mesh("tp"))


def local_codes(
    candidate: Candidate, tensors: Mapping[str, StoredTensor], engine: Mapping[str, int]
) -> tuple[dict[str, Tensor], int]:
    """Return what a process has of a module: the forms of its tensors, on the meta device, and its number of experts.

    The number is 0 where experts are not divided. Raise where these tensors cannot be divided so.
    """
    form, tp, ep = candidate.form, engine.get("tp", 1), engine.get("ep", 1)
    by_expert = form is not None and ep > 1
    wanted = 1 if by_expert else tp
    for reason, expected, got, fix in _reasons(candidate, tensors, wanted, ep if by_expert else 1):
        if reason:
            raise UnsupportedModelError.about(expected[0], expected[1], got, fix)
    if form is None:
        return {name: tensor.tensor for name, tensor in tensors.items()}, 0
    counts = {name: tensor.experts // (ep if by_expert else 1) for name, tensor in tensors.items()}
    forms = {name: each.tensor.new_empty(counts[name], *each.tensor.shape[1:]) for name, each in tensors.items()}
    return forms, max(counts.values()) if by_expert else 0


def _tensor_parts(tensor: StoredTensor) -> int:
    """Number of tensor-parallel ranks that share a tensor."""
    return len(tensor.all) if tensor.tp_rank is not None else 1


def _reasons(
    candidate: Candidate, tensors: Mapping[str, StoredTensor], wanted: int, ep: int
) -> Iterator[tuple[bool, tuple[str, str], Any, str]]:
    """Yield what has to hold: whether it does not, the argument and what it has to be, what it is, the remedy."""
    form, any_tensor = candidate.form, next(iter(tensors.values()))
    parts, name = _tensor_parts(any_tensor), candidate.name
    if wanted > 1:
        fix = f"Convert the original again with --tp-degree {wanted}, or load it with tp_size={parts}."
        expected = f"{wanted}: codes of {name} are not cut again, their groups run along the cut"
    elif ep > 1:
        fix = "Convert the original again without --tp-degree."
        expected = f"1 with ep_size={ep}: experts of {name} are divided whole"
    else:
        fix, expected = WHOLE, f"1 for codes of {name}, loaded whole"
    yield parts != wanted, ("tp_degree", expected), parts, fix
    if form is None:
        biased = candidate.roles is not None and bool(candidate.roles.biased)
        fix = "Load the original checkpoint and patch it, or use fsdp_size."
        expected, got = f"one without tp_size for codes of {name}", "an MLP with biases, which each rank would add"
        yield biased and wanted > 1, ("distributed_config", expected), got, fix
        return
    experts = any_tensor.experts
    sizes = ", ".join(str(size) for size in range(2, experts + 1) if experts % size == 0)
    fix = f"Choose an ep_size that divides them ({sizes})."
    yield experts % ep > 0, ("ep_size", f"a divisor of the {experts} experts of {name}"), ep, fix
    apart = form.call != ROUTED or form.post_norm is not None or (wanted > 1 and form.biased)
    expected = f"experts of {name} that take ids and weights" + (", without biases" if wanted > 1 else "")
    what = f"{form.call} experts" + (" with biases" if form.biased else "")
    fix = "Load the original checkpoint and patch it, or use fsdp_size."
    yield apart and max(wanted, ep) > 1, ("distributed_config", expected), what, fix

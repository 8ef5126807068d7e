"""What a forward by shapes meets of other ranks: how many tokens they send, and what collectives move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_neuron_moe.training.saved_tensors import local_part

_COLLECTIVES = {
    "c10d::allreduce_": ("tp", 2),
    "_c10d_functional::all_reduce": ("tp", 2),
    "_c10d_functional::all_gather_into_tensor": ("tp", 1),
    "_c10d_functional::reduce_scatter_tensor": ("tp", 1),
    "_c10d_functional::all_to_all_single": ("ep", 1),
}
"""Operators of torch: whose ranks take part, and how often a ring sends the larger of input and output."""


@dataclass
class Exchange:
    """What the collectives of a forward and its backward move; those of FSDP are not among them."""

    sent: float = 0.0  # bytes that this rank sends
    all_to_all: int = 0  # bytes of the inputs and outputs of one layer's exchanges in the forward
    gradients: int = 0  # bytes of all gradients before FSDP reduces them


class Routing(TorchFunctionMode):
    """Tells expert parallelism how many rows each rank sends and receives, which depends on values that are not there.

    Every rank sends its pairs of token and expert in equal parts. Balanced, it receives as many. At worst all tokens of
    the group choose as many experts of this rank as they can.
    """

    def __init__(self, tp: int, ep: int, *, worst: bool = False) -> None:
        super().__init__()
        self._tp, self._ep = tp, ep
        self._worst = worst
        self._asked: list[int] = []

    def watch(self, model: Any) -> int:
        """Look at the calls of the experts that get tokens of other ranks; return their number."""
        plan = model._expand_parallel_plan(model.ep_plan) if self._ep > 1 else {}
        experts = [model.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]
        for module in experts:
            module.forward = self._expecting(module.forward, module.num_experts)
        return len(experts)

    def _expecting(self, forward: Callable[..., Tensor], experts: int) -> Callable[..., Tensor]:
        def called(hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            ranks, K = self._ep, ids.shape[-1]
            tokens = -(-hidden_states.shape[0] // self._tp)
            sent = [tokens * K // ranks + (rank < tokens * K % ranks) for rank in range(ranks)]
            self._asked = [*sent, *([tokens * min(K, experts)] * ranks if self._worst else sent)]
            return forward(hidden_states, ids, weights)

        return called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and self._asked:
            return self._asked.pop(0)
        return func(*args, **(kwargs or {}))


class Traffic(TorchDispatchMode):
    """Counts what collectives move while shapes run through a model."""

    def __init__(self, tp: int, ep: int) -> None:
        super().__init__()
        self._ranks = {"tp": tp, "ep": ep}
        self.seen = Exchange()
        self.backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operators come here next
        output = func(*args, **(kwargs or {}))
        group, times = _COLLECTIVES.get(func._schema.name, ("", 0))
        if times:
            sizes = [each.nbytes for each in tree_leaves((args, output)) if isinstance(each, Tensor)]
            self.seen.sent += times * max(sizes) * (self._ranks[group] - 1) / self._ranks[group]
            if group == "ep" and not self.backward:
                self.seen.all_to_all += sum(sizes)
        return output

    def backpropagate(self, output: Any, state: Mapping[str, Tensor]) -> None:
        """Run the backward and note the gradients."""
        self.backward = True
        output.loss.backward()
        leaves = {id(each): each.grad for each in state.values()}
        self.seen.gradients = sum(local_part(grad).nbytes for grad in leaves.values() if grad is not None)

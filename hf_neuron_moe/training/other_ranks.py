"""What a forward by shapes meets of other ranks: how many tokens they send, and what collectives move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_neuron_moe.training.repeated_layers import Alike
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
    the group choose as many experts of this rank as they can. Stock experts get a row per pair, a block one per token.
    """

    def __init__(self, tp: int, ep: int, *, worst: bool = False) -> None:
        super().__init__()
        self._tp, self._ep = tp, ep
        self._worst = worst
        self._asked: list[int] = []
        self._rows: list[int] = []
        self.watched: list[Any] = []

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Look at the calls of the experts that get tokens of other ranks, which are `watched`."""
        plan = model._expand_parallel_plan(model.ep_plan) if self._ep > 1 else {}
        self.watched = [model.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]
        with ExitStack() as stack:
            for module in self.watched:
                stack.callback(module.register_forward_pre_hook(self._expect).remove)
                stack.callback(module.register_forward_hook(self._forget, always_call=True).remove)
            yield

    def _expect(self, module: Any, args: tuple[Tensor, ...]) -> None:
        hidden_states, ids, _ = args
        ranks, K, experts = self._ep, ids.shape[-1], module.num_experts
        tokens = -(-hidden_states.shape[0] // self._tp)
        sent = _parts(tokens * K, ranks)
        self._asked = [*sent, *([tokens * min(K, experts)] * ranks if self._worst else sent)]
        # A block gets a token once if it has any of its experts; with even shares all choices are equally frequent.
        without = math.comb(experts * (ranks - 1), K) / math.comb(experts * ranks, K)
        sent = _parts(tokens * -(-K // experts), ranks) if self._worst else [round(tokens * (1 - without))] * ranks
        self._rows = [*sent, *([tokens] * ranks if self._worst else sent)]

    def _forget(self, *_: object) -> None:
        self._asked = self._rows = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.nonzero and self._rows:
            self._asked, self._rows = self._rows, []
            rows = sum(self._asked[: self._ep])
            return args[0].new_empty((rows, 2), dtype=torch.int64).unbind(1)  # one storage, as torch's
        if func is torch.Tensor.item and self._asked:
            return self._asked.pop(0)
        return func(*args, **(kwargs or {}))


def _parts(number: int, parts: int) -> list[int]:
    """Cut a number into parts that differ by one at most."""
    return [number // parts + (part < number % parts) for part in range(parts)]


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

    def moved(self) -> list[float]:
        """Return what was moved until now: by all collectives, and by all-to-alls of the forward."""
        return [self.seen.sent, self.seen.all_to_all]

    def backpropagate(self, output: Any, state: Mapping[str, Tensor], repeated: Iterable[Alike]) -> None:
        """Run the backward and note the gradients, of layers that were not run too."""
        self.backward = True
        output.loss.backward()
        leaves = {id(each): each.grad for each in state.values()}
        for alike in repeated:
            sent, exchanged, *backward = alike.sent
            self.seen.sent += len(alike.repeats) * (sent + sum(backward))
            self.seen.all_to_all += len(alike.repeats) * int(exchanged)
            own = {key: each.grad for key, each in state.items() if key.startswith(f"{alike.name}.")}
            for name in alike.repeats:
                leaves |= {id(state[name + key.removeprefix(alike.name)]): grad for key, grad in own.items()}
        self.seen.gradients = sum(local_part(grad).nbytes for grad in leaves.values() if grad is not None)

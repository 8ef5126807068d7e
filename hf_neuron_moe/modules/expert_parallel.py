"""Expert parallelism with the kernels' numerics: tokens travel with their affinities, and experts apply them.

transformers' own exchange gives experts weights of 1 and multiplies on the sender, behind the down projection. The
kernels multiply the intermediate, in front of a rounding. Here a token goes once to each process that has some of its
experts, with its ids and fp32 affinities, and one row comes back from each. Tokens arrive in the order of their senders
and, of one sender, in their own order, which is that of one process with the joined batch.

T tokens of this process, R rows it receives, K experts per token, D processes, E experts per process, H hidden size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hf_neuron_moe.modules.collectives import exchange, exchanged, sum_rows

NAME = "neuron_moe"
"""Of the implementation in ``DistributedConfig(ep_implementation=...)``, once it is registered."""

EXPERT_PARALLELISM_NEEDS = "expert parallelism needs transformers 5.23 or later"
"""Why experts that an older engine shared out cannot be patched."""


@cache
def register_expert_parallel() -> str | None:
    """Register the implementation in transformers and return its name; None where transformers has no such registry."""
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError:
        return None

    class NeuronEP(EPImplementation):
        """Sends tokens with their affinities, in both directions by an all-to-all."""

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return dispatched(self, hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(NAME, NeuronEP)
    return NAME


def implementation_for(present: object) -> str | None:
    """Return the name of the implementation that gives experts what `present` does not: their affinities.

    Where all processes of a group have the same tokens, transformers' all-reduce hands them over. It is taken for
    ``"auto"`` too, in training as in inference, so that both compute the same. None for what is no implementation.
    """
    if present is None:
        return None
    from transformers.distributed import expert_parallel as engine

    if type(present) is engine.AllReduceEP or (type(present) is engine.AutoEP and present.shares_batch):
        return "all_reduce"
    return register_expert_parallel()


def unsupported_reason_of_exchange(present: object) -> str | None:
    """Return why experts behind an implementation cannot be patched, or None."""
    from transformers.distributed import expert_parallel as engine

    names = ("AllReduceEP", "AllToAllEP", "AutoEP")
    if not hasattr(engine, names[0]):
        return EXPERT_PARALLELISM_NEEDS
    known = {getattr(engine, name) for name in names}
    if type(present) in known or type(present).__module__ == __name__:
        return None
    return f"their tokens are brought by {type(present).__name__}; use ep_implementation='auto', or {NAME!r}"


def dispatched(engine: Any, x_TH: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, wherever they are; `engine` is an ``EPImplementation``.

    Partial sums come back in the dtype of the hidden states and are added in fp32.
    """
    group, processes, experts = engine.ep_mesh.get_group(), engine.ep_mesh.size(), engine.num_local_experts
    tokens = len(x_TH)
    if engine.tp_mesh.size() > 1:  # which all have the same tokens: each takes its part of them
        x_TH, ids_TK, weight_TK = (_own_rows(tensor, engine.tp_mesh) for tensor in (x_TH, ids_TK, weight_TK))
    home_TK = torch.div(ids_TK, experts, rounding_mode="floor")
    wanted_TD = torch.zeros(len(x_TH), processes, dtype=torch.bool, device=x_TH.device).scatter_(1, home_TK, True)
    target_R, token_R = wanted_TD.T.nonzero(as_tuple=True)  # by process, then by token
    sent_D = wanted_TD.sum(0)
    received_D = torch.empty_like(sent_D)
    torch.distributed.all_to_all_single(received_D, sent_D, group=group)
    sent, received = torch.stack([sent_D, received_D]).tolist()

    elsewhere_RK = home_TK[token_R] != target_R.unsqueeze(1)
    ids_RK = (ids_TK[token_R] - target_R.unsqueeze(1) * experts).masked_fill(elsewhere_RK, experts)
    weight_RK = weight_TK.float()[token_R].masked_fill(elsewhere_RK, 0.0)
    y_RH = engine.experts_forward(
        exchange(x_TH[token_R], sent, received, group),
        exchanged(ids_RK, sent, received, group),
        exchange(weight_RK, sent, received, group),
    )
    back_RH = exchange(y_RH, received, sent, group)
    y_TH = sum_rows(back_RH, token_R, len(x_TH)).to(x_TH.dtype)
    return y_TH if engine.tp_mesh.size() == 1 else _all_rows(y_TH, tokens, engine.tp_mesh)


def _own_rows(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's rows of what all have; the gradient is that of all rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    own: Tensor = whole.redistribute(mesh, [Shard(0)]).to_local()
    return own


def _all_rows(tensor: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """All processes' rows."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((rows, tensor.shape[1]))
    whole = DTensor.from_local(tensor.contiguous(), mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
    found: Tensor = whole.full_tensor()
    return found

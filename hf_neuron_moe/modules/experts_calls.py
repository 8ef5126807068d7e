"""How experts modules are called: forwards that are known by their source, and what each computes from the operator.

T tokens, K experts per token, R = T * K pairs, E experts, H hidden size, I intermediate size.

=============  ===========================================  =====================================================
call           arguments                                    what is computed
=============  ===========================================  =====================================================
routed         hidden ``[T, H]``, ids and weights           ``sum_k weight_k * expert_k(x)``; with a norm after
               ``[T, K]``                                   each expert: of ``norm(expert_k(x))``
identity       the same                                     the same; ids from E on are experts that return ``x``
stacked        hidden ``[B, S, H]``, ids and weights        the same, of weights ``[E I, H]`` below one another
by_expert      ``[E T, H]``, an equal part for each expert  each row by its expert; rows of zeros stay zero
sorted         hidden ``[B, S, H]``                         the routed sum plus a bias; the router is a child
                                                            that returns the pairs in the experts' order
shared         hidden ``[..., H]``, weights ``[..., E]``    the weighted sum of all experts
=============  ===========================================  =====================================================
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_neuron_moe.checks import check_multiple
from hf_neuron_moe.modules.gate_expression import UnknownForm
from hf_neuron_moe.modules.gate_source import parsed

Operator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``sum_k weight_k * expert_k(x)`` of hidden ``[T, H]``, ids and weights ``[T, K]``."""

ROUTED, IDENTITY, STACKED, BY_EXPERT, SORTED = "routed", "identity", "stacked", "by_expert", "sorted"
SHARED = "shared"

_FORWARDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "b452c3326191d0ed": (ROUTED, ()),
    "0c68c6f71d775601": (ROUTED, ()),  # transformers 5.17
    "5f3b7ba31e9bf95d": (IDENTITY, ()),
    "7c18307818b5f38d": (BY_EXPERT, ()),
    "c55fb7bd8af6f846": (SHARED, ()),
    "15d214e03e0758a9": (STACKED, ("mlp",)),
    "40f80bd138603714": (STACKED, ("mlp",)),  # transformers 5.17
    "79c31e1270e746b9": (SORTED, ("input_linear", "output_linear", "router")),
}
"""By the digest of the forwards of a module and of some of its children: the call, and which children these are."""

_SCOPES = (ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.comprehension, ast.Global, ast.Nonlocal)

_CHILDREN: tuple[tuple[str, ...], ...] = ((), ("mlp",), ("input_linear", "output_linear", "router"))
"""Children whose forwards belong to a call, for :func:`known_call` to look for."""


def known_call(module: nn.Module) -> str | None:
    """Return the call of a module without flags whose forward is known, or None."""
    for children in _CHILDREN:
        parts = [module, *(part for name in children if (part := module._modules.get(name)) is not None)]
        found = _FORWARDS.get(digest_of(tuple(type(part).forward for part in parts)))
        if found is not None and found[1] == children and len(parts) == len(children) + 1:
            return found[0]
    return None


@cache
def digest_of(functions: tuple[Callable[..., Any], ...]) -> str:
    """Return a digest of the functions' statements; "" if one cannot be read, or has defaults or scopes of its own.

    Docstrings, comments, annotations and the names of local variables are not in it.
    """
    texts = []
    for function in functions:
        try:
            definition = parsed(function)
        except UnknownForm:
            return ""
        inner = (node for statement in definition.body for node in ast.walk(statement))
        if definition.args.defaults or definition.args.kwonlyargs or any(isinstance(node, _SCOPES) for node in inner):
            return ""
        body = definition.body
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body = body[1:]
        names = [argument.arg for argument in definition.args.args]
        texts.append("\n".join([", ".join(names), *map(ast.unparse, _without_local_names(body, names))]))
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()[:16]


def _without_local_names(body: list[ast.stmt], given: list[str]) -> list[ast.stmt]:
    """Return the statements with their local variables numbered; those that are `given` to the function are not."""
    body = copy.deepcopy(body)
    names = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    stored = [node.id for node in names if isinstance(node.ctx, ast.Store)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(stored)) if name not in given}
    for node in names:
        if node.id in numbers:
            node.id = f"<{numbers[node.id]}>"  # which no variable is called
    return body


def routed(
    operator: Operator, norm: Callable[[Tensor], Tensor] | None, x_TH: Tensor, ids_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    """Return the weighted sum; with a norm, its rows leave the operator one by one and are weighted after it."""
    if norm is None:
        return operator(x_TH, ids_TK, weight_TK)
    (T, K), ones_R1 = ids_TK.shape, torch.ones_like(weight_TK).reshape(-1, 1)
    y_RH = norm(operator(x_TH.repeat_interleave(K, dim=0), ids_TK.reshape(-1, 1), ones_R1))
    return (y_RH.view(T, K, y_RH.shape[-1]) * weight_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype)


def identity(operator: Operator, experts: int, parts: int, x_TH: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return the sum of the experts below `experts`, and ``x`` times the weights of the others.

    Of so many `parts`, which are added up, each has its share of ``x``.
    """
    passed_T1 = (weight_TK * (ids_TK >= experts)).sum(1, keepdim=True) / parts
    return operator(x_TH, ids_TK, weight_TK) + (x_TH * passed_T1).to(x_TH.dtype)


def stacked(operator: Operator, x_BSH: Tensor, ids_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Return the weighted sum in the shape ``[B, S, H]`` of the hidden states."""
    H = x_BSH.shape[-1]
    return operator(x_BSH.reshape(-1, H), ids_TK, weight_TK).view(x_BSH.shape[0], -1, H)


def shared(operator: Operator, experts: int, x: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum of all experts, in the shape of `x`: every token is sent to each of them."""
    x_TH = x.reshape(-1, x.shape[-1])
    ids_TE = torch.arange(experts, device=x.device).repeat(len(x_TH), 1)
    return operator(x_TH, ids_TE, weight.reshape(-1, experts)).view(x.shape)


def by_expert(operator: Operator, experts: int, x_RH: Tensor) -> Tensor:
    """Return each row's result of its expert; rows of zeros, which no token chose, are left out: their result is zero.

    Their gradients are zero too: gate and up of such a row are zero, and so is the product's derivative. Where the
    number of rows may depend on values, the operator gets the others only, else these rows with an id of no expert.
    """
    if len(x_RH):
        check_multiple(len(x_RH), experts, "number of rows", "each expert has an equal part of them")
    ids_R1 = torch.arange(experts, device=x_RH.device).repeat_interleave(len(x_RH) // experts).unsqueeze(1)
    ones_R1 = torch.ones_like(ids_R1, dtype=torch.float32)
    used_R1 = (x_RH.detach() != 0).any(1, keepdim=True)
    if torch.compiler.is_compiling() or type(used_R1) is not Tensor or x_RH.device.type not in ("cpu", "cuda"):
        return operator(x_RH, ids_R1.masked_fill(~used_R1, experts), ones_R1)
    rows = used_R1.squeeze(1).nonzero().squeeze(1)
    y_RH = operator(x_RH[rows], ids_R1[rows], ones_R1[rows])
    return y_RH.new_zeros(x_RH.shape).index_put((rows,), y_RH)  # index_copy would save y for its backward


def in_expert_order(
    operator: Operator, router: Callable[[Tensor], Any], bias_H: Tensor, experts: int, x_BSH: Tensor
) -> Tensor:
    """Return the weighted sum plus `bias_H`; `router` returns pairs in the experts' order and each expert's number."""
    x_TH = x_BSH.reshape(-1, x_BSH.shape[-1])
    pair_R, _, weight_R, rows_E, _ = router(x_TH)
    counts_E = torch.tensor(rows_E, device=x_TH.device)
    sorted_R = torch.arange(experts, device=x_TH.device).repeat_interleave(counts_E, output_size=len(pair_R))
    ids_R = torch.empty_like(sorted_R).scatter_(0, pair_R, sorted_R)
    K = len(pair_R) // len(x_TH) if len(x_TH) else 1
    weight_TK = torch.zeros_like(weight_R).scatter(0, pair_R, weight_R).view(len(x_TH), K)
    return operator(x_TH, ids_R.view(len(x_TH), K), weight_TK).view(x_BSH.shape) + bias_H

"""The mixture-of-experts router: logits, the k best experts of every token, their routing weights.

Legend: T tokens, H hidden, E experts, K experts per token.

Source: nki-library 2.29 ``core.router_topk.router_topk`` and its torch reference. Products of bf16 and fp16 operands
are summed in fp32, and everything after them is fp32. fp32 operands never reach the device: they are summed and
activated in float64 (fp32 where a device has no float64) and every result is rounded to fp32 once. An fp32 logit of 32
already puts an error of 2e-6 into its affinity. Results are returned and differentiable (towards `x`, `w` and
`w_bias`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from hf_neuron_moe.checks import FLOATS, Rule, check_dtype, check_layouts, check_rules, check_same_device, check_shape
from hf_neuron_moe.errors import ShapeError, public
from hf_neuron_moe.reference.moe_types import RouterActFnType, as_member, check_switches, taking
from hf_neuron_moe.reference.specification import broken, constraints

_INTEGERS = (torch.int32, torch.int64, torch.uint32)
_OUTPUTS = {"router_logits": "[T, E]", "expert_affinities": "[T, E]", "expert_index": "[T, K]"}
_WITHOUT_FLOAT64 = ("mps",)
_CONSTRAINTS = constraints("router")


@dataclass(frozen=True)
class RouterArguments:
    """The arguments of ``router_topk``; docs/kernels.md describes each."""

    x: Tensor  # [H, T] or [T, H], bf16, fp16 or fp32
    w: Tensor  # [H, E], same dtype
    w_bias: Tensor | None = None  # [1, E] or [E], bf16, fp16 or fp32
    router_logits: Tensor | None = None  # [T, E]; its dtype is the result's, as of the next two
    expert_affinities: Tensor | None = None  # [T, E]
    expert_index: Tensor | None = None  # [T, K]
    act_fn: RouterActFnType | str | None = None  # required: a member or its name in either case
    k: int | None = None  # K, required
    x_hbm_layout: int = 1  # 0 for x [H, T], 1 for [T, H]
    x_sb_layout: int = 0
    router_pre_norm: bool = True
    norm_topk_prob: bool = False
    use_column_tiling: bool = False
    use_indirect_dma_scatter: bool = False
    return_eager_affi: bool = False
    use_PE_broadcast_w_bias: bool = False
    shard_on_tokens: bool = False
    skip_store_expert_index: bool = False
    skip_store_router_logits: bool = False  # must be False, as upstream asserts
    _: KW_ONLY
    device_limits: bool | None = None  # enforce what the device can do; None: unless x is fp32, which it does not take

    @property
    def transposed(self) -> bool:
        """Whether `x` is ``[H, T]``."""
        return self.x_hbm_layout == 0

    @property
    def sizes(self) -> dict[str, int]:
        """T, H, E and K."""
        (H, E), T = self.w.shape, self.x.shape[1 if self.transposed else 0]
        return {"T": T, "H": H, "E": E, "K": self.k or 0}


@public
@taking(RouterArguments)
def router_topk(given: RouterArguments) -> list[Tensor | None]:
    """Route tokens: ``logits = x @ w + w_bias``, the K largest of every token, and their affinities.

    ================ =============== =================================================================
    router_pre_norm  norm_topk_prob  affinities ``[T, E]``
    ================ =============== =================================================================
    False            (no effect)     `act_fn` over the K selected logits, zero elsewhere
    True             False           `act_fn` over all E logits, dense and unmasked; multiply by the selection before
                                     ``moe_cte``
    True             True            `act_fn` over all E logits, the K selected ones divided by their sum, zero
                                     elsewhere
    ================ =============== =================================================================

    Selection is by the logits, in descending order; of equal logits the expert with the lower number comes first. The
    arguments are the fields of :class:`RouterArguments`.

    Returns ``[router_logits, expert_index, expert_affinities]``, the index None with `skip_store_expert_index`; with
    `return_eager_affi` then the ``[T, K]`` affinities of the selected experts. For dense affinities upstream computes
    none; here they are the selected entries.
    """
    name = given.act_fn.upper() if isinstance(given.act_fn, str) else given.act_fn
    act = as_member(name, RouterActFnType, argument="act_fn")
    check_switches(given)
    check_rules(_option_rules(given))
    _check_operands(given)
    dtypes = {"router_logits": torch.float32, "expert_affinities": torch.float32, "expert_index": torch.int32}
    for name in _OUTPUTS:
        output = getattr(given, name)
        if output is not None:
            check_dtype(output, _INTEGERS if name == "expert_index" else FLOATS, name)
            dtypes[name] = output.dtype
    check_layouts(vars(given), _OUTPUTS, **given.sizes)
    if given.device_limits if given.device_limits is not None else given.x.dtype != torch.float32:
        check_rules(_device_rules(given, act))
    # Float64 for fp32 operands; products of bf16 values are exact in fp32, only sums round.
    x, w, w_bias = given.x, given.w, given.w_bias
    wide = torch.float64 if x.dtype == torch.float32 and x.device.type not in _WITHOUT_FLOAT64 else torch.float32
    logits_TE = (x.t() if given.transposed else x).to(wide) @ w.to(wide)
    logits_TE = logits_TE if w_bias is None else logits_TE + w_bias.to(wide).reshape(1, -1)
    # The logits that are returned decide, so that experts whose fp32 logits are equal are in order of their numbers.
    # A stable sort, so that ties are broken as argsort of the negated logits does: lower expert first.
    order_TE = torch.sort(logits_TE.detach().to(torch.float32), dim=-1, descending=True, stable=True).indices
    index_TK = order_TE[:, : given.k]
    affinities_TE, selected_TK = _affinities(logits_TE, index_TK, act, given.router_pre_norm, given.norm_topk_prob)
    index = None if given.skip_store_expert_index else index_TK.to(dtypes["expert_index"])
    affinity_dtype = dtypes["expert_affinities"]
    results = [logits_TE.to(dtypes["router_logits"]), index, affinities_TE.to(affinity_dtype)]
    return [*results, selected_TK.to(affinity_dtype)] if given.return_eager_affi else results


class _Sigmoid(torch.autograd.Function):
    """Sigmoid whose slope is ``s(x) * s(-x)``: autograd's ``s * (1 - s)`` has no digits left where s is close to 1."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = _sigmoid(x) * _sigmoid(-x)
        return grad * slope


def _sigmoid(x: Tensor) -> Tensor:
    values: Tensor = _Sigmoid.apply(x)
    return values


def _affinities(
    logits_TE: Tensor, index_TK: Tensor, act: RouterActFnType, pre_norm: bool, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Return the affinities ``[T, E]`` and those of the selected experts ``[T, K]``."""

    def activate(values: Tensor) -> Tensor:
        return values.softmax(dim=-1) if act is RouterActFnType.SOFTMAX else _sigmoid(values)

    if not pre_norm:
        selected_TK = activate(logits_TE.gather(1, index_TK))
        return torch.zeros_like(logits_TE).scatter(1, index_TK, selected_TK), selected_TK
    dense_TE = activate(logits_TE)
    selected_TK = dense_TE.gather(1, index_TK)
    if not normalize:
        return dense_TE, selected_TK
    selected_TK = selected_TK / selected_TK.sum(dim=-1, keepdim=True)
    return torch.zeros_like(logits_TE).scatter(1, index_TK, selected_TK), selected_TK


def _option_rules(given: RouterArguments) -> Iterator[Rule]:
    fix = "x_hbm_layout is 0 for x [H, T] and 1 for [T, H]; x_sb_layout has no effect on values."
    for name, known in (("x_hbm_layout", (0, 1)), ("x_sb_layout", (0, 1, 2))):
        value = getattr(given, name)
        yield Rule(value in known, name, f"one of {', '.join(map(str, known))}", repr(value), fix)
    name, fix = "skip_store_router_logits", "Ignore the first result instead."
    yield Rule(not given.skip_store_router_logits, name, "False (upstream asserts it)", "True", fix)
    fits, fix = type(given.k) is int, "Pass k, for example 2 for Mixtral."
    yield Rule(fits, "k", "the number of experts per token", repr(given.k), fix)


def _check_operands(given: RouterArguments) -> None:
    x, w, w_bias = given.x, given.w, given.w_bias
    check_dtype(x, FLOATS, "x")
    check_dtype(w, (x.dtype,), "w")
    check_shape(w, (None, None), "[H, E]", "w")
    H, E = w.shape
    shape, names = ((H, None), "[H, T] (x_hbm_layout 0)") if given.transposed else ((None, H), "[T, H]")
    check_shape(x, shape, f"{names}, with the H of w {list(w.shape)},", "x")
    if w_bias is not None:
        check_dtype(w_bias, FLOATS, "w_bias")
        check_shape(w_bias, (E,) if w_bias.dim() == 1 else (1, E), "[1, E] or [E]", "w_bias")
    check_same_device({"x": x, "w": w, "w_bias": w_bias})
    K, fix = given.sizes["K"], "A token cannot choose an expert twice."
    check_rules([Rule(1 <= K <= E, "k", f"from 1 to E = {E}", K, fix, ShapeError)])


def _device_rules(given: RouterArguments, act: RouterActFnType) -> Iterator[Rule]:
    """What the device's kernel can do (2.29); values do not depend on any of it."""
    T, H, E, K = given.sizes.values()
    fix = "Pass device_limits=False to compute the mathematical definition anyway."
    active = {name for name in ("use_indirect_dma_scatter", "return_eager_affi") if getattr(given, name)}
    yield from broken(_CONSTRAINTS, {"E of w": E, "H of w": H, "k": K, "T of x": T}, fix, active=active)
    fits = given.use_indirect_dma_scatter or act is not RouterActFnType.SIGMOID or given.router_pre_norm
    rule = "True for SIGMOID with router_pre_norm=False"
    yield Rule(fits, "use_indirect_dma_scatter", rule, "False", fix)

"""What a model's patched blocks compute in a backward: every call of a block's operator, with all of its operands.

Legend: T tokens, K experts per token, R rows of one expert, E experts (1 of a dense block), H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends import get_backend
from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.mx_weights import MXExpertStack, MXMatrix
from hf_neuron_moe.backends.spec import BlockCall, BlockSpec, ExpertWeights, FFNWeights, Routing
from hf_neuron_moe.backends.torch.activation_rows import ACTIVATIONS
from hf_neuron_moe.backends.torch.compute import bf16_matmul_is_fast
from hf_neuron_moe.modules.experts import ExpertsBlock
from hf_neuron_moe.modules.experts_form import parameter_of
from hf_neuron_moe.modules.ops_checks import COMPUTE_DTYPE
from hf_neuron_moe.training.blocks import patched_blocks

_AS_TRAINING = parse_keep("recompute")
"""A policy whose forward computes as training does and keeps nothing."""


class Projections(NamedTuple):
    """Views of a block's weights in ``nn.Linear`` orientation."""

    gate_EIH: Tensor | None  # None without a gate projection
    up_EIH: Tensor
    down_EHI: Tensor


class Run(NamedTuple):
    """The rows of one expert."""

    expert: int
    start: int  # its first row among those of all experts
    pair_R: Tensor  # places in the flattened ``[T, K]``; of a dense block its tokens, as `token_R`
    token_R: Tensor
    scale_R: Tensor | None  # routing weights in fp32


class ExpertRows(NamedTuple):
    """What one expert gets in a call."""

    expert: int
    token_R: Tensor  # rows of the call
    x_RH: Tensor
    dout_RH: Tensor  # gradient of the expert's own output: the call's, times the routing weight


@dataclass(frozen=True)
class Call:
    """One call of a block's operator, seen from its backward."""

    block: str
    dout_TH: Tensor
    x_TH: Tensor
    routing: Routing | None  # None of a dense block
    weights: FFNWeights | ExpertWeights
    spec: BlockSpec
    codes: MXExpertStack | None = None  # that the weights are the values of
    out_TH: Tensor | None = None  # what the forward returned, where :class:`BlockCalls` keeps it

    @property
    def projections(self) -> Projections:
        """The weights of all experts."""
        if isinstance(self.weights, FFNWeights):
            return Projections(*(weight.unsqueeze(0) for weight in self.weights[:3]))
        return Projections(*halves(self.weights.gate_up, self.spec), oriented(self.weights.down, self.spec))

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Those of gate and up, ``[E, I]`` each."""
        if isinstance(self.weights, FFNWeights):
            gate, up = self.weights[3:5]
            return _first(gate), _first(up)
        bias = self.weights.gate_up_bias
        if bias is None or not self.spec.gate.gated:
            return None, bias
        return (bias[:, ::2], bias[:, 1::2]) if self.spec.interleaved else tuple(bias.chunk(2, dim=1))  # type: ignore[return-value]

    @torch.no_grad()
    def forward(self, precision: str, x_TH: Tensor | None = None, weights: Projections | None = None) -> Tensor:
        """Return the block's output at another precision, of other values or weights if any, ``[T, H]``."""
        spec, backend = self.spec._replace(precision=precision), get_backend("torch")
        x_TH = (self.x_TH if x_TH is None else x_TH).to(COMPUTE_DTYPE[precision])
        own = self.weights
        if isinstance(own, FFNWeights):
            if weights is not None:
                gate, up, down = (None if weight is None else weight[0] for weight in weights)
                assert gate is not None and up is not None and down is not None
                own = own._replace(gate_IH=gate, up_IH=up, down_HI=down)
            return backend.mlp_forward(x_TH, own, spec, _AS_TRAINING)[0]
        assert self.routing is not None
        if weights is not None:
            parts = [part for part in weights[:2] if part is not None]
            spec = spec._replace(transposed=False, interleaved=False)
            own = own._replace(gate_up=torch.cat(parts, dim=1), down=weights.down_EHI)
            if own.gate_up_bias is not None and self.spec.interleaved:
                own = own._replace(gate_up_bias=torch.cat([bias for bias in self.biases if bias is not None], dim=1))
        return backend.experts_forward(x_TH, self.routing, own, spec, _AS_TRAINING)[0]

    def experts(self) -> Iterator[ExpertRows]:
        """Yield what each expert gets that gets anything; a dense block is one expert."""
        for run in self.runs():
            dout_RH = self.dout_TH[run.token_R]
            if run.scale_R is not None:
                dout_RH = dout_RH.float() * run.scale_R.unsqueeze(1)
            yield ExpertRows(run.expert, run.token_R, self.x_TH[run.token_R], dout_RH)

    def runs(self) -> Iterator[Run]:
        """Yield the rows of each expert that gets any, in the order in which activations are saved."""
        if self.routing is None:
            rows_R = torch.arange(len(self.x_TH), device=self.x_TH.device)
            yield Run(0, 0, rows_R, rows_R, None)
            return
        index_TK, weight_TK = self.routing
        order_R = index_TK.reshape(-1).argsort(stable=True)
        experts = len(self.projections.down_EHI)
        counts = torch.bincount(index_TK.reshape(-1).clamp(max=experts), minlength=experts + 1).tolist()
        start = 0
        for expert, count in enumerate(counts[:experts]):
            pair_R = order_R[start : start + count]
            if count:
                scale_R = weight_TK.reshape(-1)[pair_R].float()
                yield Run(expert, start, pair_R, pair_R // index_TK.shape[1], scale_R)
            start += count

    @torch.no_grad()
    def pre_activations(self, rows: ExpertRows) -> tuple[Tensor | None, Tensor]:
        """Return gate (None without one) and up of an expert's rows, fp32 ``[R, I]``."""
        values: list[Tensor | None] = []
        for weight_EIH, bias_EI in zip(self.projections[:2], self.biases, strict=True):
            if weight_EIH is None:
                values.append(None)
                continue
            value_RI = rounded_product(rows.x_RH, weight_EIH[rows.expert].to(rows.x_RH.dtype).t()).float()
            values.append(value_RI if bias_EI is None else value_RI + bias_EI[rows.expert].float())
        gate_RI, up_RI = values
        assert up_RI is not None
        return gate_RI, up_RI


def rounded_product(left_RK: Tensor, right_KN: Tensor) -> Tensor:
    """Return the product, rounded once to the operands' dtype; it is made in fp32 where bf16 products are slow."""
    if left_RK.dtype == torch.float32 or bf16_matmul_is_fast(left_RK.device):
        return left_RK @ right_KN
    return (left_RK.float() @ right_KN.float()).to(left_RK.dtype)


def _first(bias_I: Tensor | None) -> Tensor | None:
    return None if bias_I is None else bias_I.unsqueeze(0)


def decoded(stack: MXExpertStack, *, dense: bool) -> FFNWeights | ExpertWeights:
    """Return the values of MX codes, which bf16 holds exactly, as weights in ``nn.Linear`` orientation."""
    (rows, hidden), inner, count = stack.gate_up.shape, stack.inner, 1 if dense else len(stack.down_codes)
    device = stack.down_codes.device
    gate_up_EFH = torch.empty(count, rows, hidden, dtype=torch.bfloat16, device=device)
    down_EHI = torch.empty(count, hidden, inner, dtype=torch.bfloat16, device=device)
    for number in range(count):  # one at a time: a base in codes was chosen for its size
        one = stack.expert(None if dense else number)
        for half in (slice(first, first + inner) for first in range(0, rows, inner)):
            gate_up_EFH[number, half] = _values(one.gate_up, half)
        down_EHI[number] = _values(one.down, slice(0, hidden))[:, :inner]
    if dense:
        gate_bias, up_bias = (None, None) if stack.gate_up_bias is None else stack.gate_up_bias.chunk(2)
        gate_IH, up_IH = gate_up_EFH[0].chunk(2)
        return FFNWeights(gate_IH, up_IH, down_EHI[0], gate_bias, up_bias, stack.down_bias)
    return ExpertWeights(gate_up_EFH, down_EHI, stack.gate_up_bias, stack.down_bias)


def _values(matrix: MXMatrix, rows: slice) -> Tensor:
    out_FK = torch.empty(rows.stop - rows.start, matrix.shape[1], dtype=torch.float32, device=matrix.codes.device)
    return matrix.values(rows, slice(0, matrix.shape[1]), out_FK)


def oriented(weight: Tensor, spec: BlockSpec) -> Tensor:
    """Return experts' weights, or their gradients, in ``nn.Linear`` orientation."""
    return weight.transpose(1, 2) if spec.transposed else weight


def halves(gate_up: Tensor, spec: BlockSpec) -> tuple[Tensor | None, Tensor]:
    """Return gate (None without one) and up of experts' weights, or of their gradients, oriented."""
    both = oriented(gate_up, spec)
    if not spec.gate.gated:
        return None, both
    if spec.interleaved:
        return both[:, ::2], both[:, 1::2]
    gate, up = both.chunk(2, dim=1)
    return gate, up


def intermediate(gate: Gate, gate_RI: Tensor | None, up_RI: Tensor) -> Tensor:
    """Return what a `gate` makes of its pre-activations, in fp32 and differentiable; NaN counts as such.

    Without a gate projection `gate_RI` is None.
    """
    if gate_RI is None:
        return activated(gate, up_RI)
    up_RI = up_RI.clamp(gate.up_min, gate.up_max) if _any(gate.up_min, gate.up_max) else up_RI
    up_RI = up_RI + gate.up_offset if gate.up_offset else up_RI
    return activated(gate, gate_RI) * softcapped(gate, up_RI)


def softcapped(gate: Gate, up_RI: Tensor) -> Tensor:
    """Return up with its softcap, if it has one."""
    return up_RI if gate.up_softcap is None else gate.up_softcap * torch.tanh(up_RI / gate.up_softcap)


def activated(gate: Gate, gate_RI: Tensor) -> Tensor:
    """Return what multiplies up: the activation with its limits; without a gate projection, that of up."""
    activation = ACTIVATIONS["silu" if gate.act == "swish" else gate.act].value
    alpha = gate.alpha if gate.act == "swish" else 1.0
    gate_RI = gate_RI.clamp(gate.gate_min, gate.gate_max) if _any(gate.gate_min, gate.gate_max) else gate_RI
    if gate.gate_softcap is not None:
        capped_RI = gate.gate_softcap * torch.tanh(gate_RI / gate.gate_softcap)
        activated_RI = capped_RI * torch.sigmoid(gate_RI)
    else:
        activated_RI = activation(gate_RI * alpha) / alpha
    return activated_RI if gate.act_max is None else activated_RI.clamp(max=gate.act_max)


def _any(*limits: float | None) -> bool:
    return any(limit is not None for limit in limits)


class BlockCalls(TorchDispatchMode):
    """Keeps in the list :attr:`seen` every backward call of a model's patched blocks while it is entered.

    Blocks are known by the memory of their down projections. With `outputs`, calls have copies of what their forwards
    returned; these must run while it is entered.
    """

    def __init__(self, model: nn.Module, *, outputs: bool = False) -> None:
        super().__init__()
        self.seen: list[Call] = []
        self.outputs: dict[tuple[Any, ...], Tensor] | None = {} if outputs else None  # by the memory of the operands
        self.names = {_down(block).untyped_storage().data_ptr(): name for name, block in patched_blocks(model).items()}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at an operation, and do it."""
        name = func.name()
        if (read := _READERS.get(name)) is not None:
            call = read(args)
            down = call.weights.down_HI if isinstance(call.weights, FFNWeights) else call.weights.down
            operands = (call.x_TH, *(call.routing or ()), down)
            known = None if self.outputs is None else self.outputs.get(_memory(operands))
            self.seen.append(replace(call, block=self.names[down.untyped_storage().data_ptr()], out_TH=known))
        result = func(*args, **(kwargs or {}))
        if self.outputs is not None and name in _PLACES:
            key = _memory([args[place] for place in _PLACES[name]])
            self.outputs[key] = result[0].detach().clone()  # models may write into it
        return result


def _memory(operands: Iterable[Tensor]) -> tuple[Any, ...]:
    """Where operands lie, and how."""
    return tuple((each.data_ptr(), each.shape, each.stride()) for each in operands)


def _down(block: Any) -> Tensor:
    if isinstance(block, ExpertsBlock):
        return parameter_of(block, block.neuron_form.down)
    weights: FFNWeights = block._weights()
    return weights.down_HI


def _read_mlp(args: tuple[Any, ...]) -> Call:
    dout_SH, x_SH, *weights = args[:8]
    return Call("", dout_SH, x_SH, None, FFNWeights(*weights), BlockCall.decode(args[12]).spec)


def _read_experts(args: tuple[Any, ...]) -> Call:
    dout_TH, x_TH, index_TK, weight_TK, *weights = args[:8]
    return Call(
        "", dout_TH, x_TH, Routing(index_TK, weight_TK), ExpertWeights(*weights), BlockCall.decode(args[12]).spec
    )


_READERS = {"hf_neuron_moe::mlp_bwd": _read_mlp, "hf_neuron_moe::moe_bwd": _read_experts}
"""By name: the objects of ``torch.ops`` are others once the Neuron plugin has registered the operators again."""

_PLACES = {"hf_neuron_moe::mlp_fwd": (0, 3), "hf_neuron_moe::moe_fwd": (0, 1, 2, 4)}
"""Where the arguments of a forward have input, routing and down projection."""

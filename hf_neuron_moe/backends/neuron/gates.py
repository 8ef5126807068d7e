"""How a block's gate is passed to nkilib's kernels, and which kernels have it.

The kernels add no offset: the caller adds it to the bias of up, and shifts both limits of up by it. Their backward
reads clamp masks off checkpoints in bf16, so limits must be numbers of bf16. Nothing here has run on a device.

Sources: nki-library 2.29 to 2.33 ``moe_cte``, ``blockwise_mm_bwd`` and ``moe_mxfp8``.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.neuron.adapter import Adapter
from hf_neuron_moe.backends.neuron.fp8_checkpoints import Limits
from hf_neuron_moe.backends.torch.gating import gating_of

SWISH_ALPHA = 1.702  # the kernels' constant
_CLAMPS = frozenset(
    {"gate_clamp_upper_limit", "gate_clamp_lower_limit", "up_clamp_upper_limit", "up_clamp_lower_limit"}
)
MX_ACTIVATIONS = {"silu": "SiLU", "swish": "Swish", "gelu": "GELU", "gelu_tanh": "GELU_Tanh_Approx"}
"""Those of the forward kernels for MX words: nkilib's name by ours; a call has the place in this table."""
_GATED = {
    "moe_forward": _CLAMPS | {"activation_function", "gate_and_up_proj_bias", "down_proj_bias"},
    "moe_backward": frozenset({"activation_type", "bias", "clamp_limits"}),
    "moe_forward_mxfp8": frozenset({"clamp_limits"}),
    "moe_backward_mxfp8": frozenset({"clamp_limits"}),
}
"""By need, arguments that wrapper kernels pass for a gate other than SwiGLU and for biases."""
_UNGATED = "skip_gate_proj"
"""The further argument of both bf16 kernels without a gate projection."""

FURTHER_ARGUMENTS = {
    need: names | ({_UNGATED} if need in ("moe_forward", "moe_backward") else frozenset())
    for need, names in _GATED.items()
}
"""What the newest release has of them."""

_WITHOUT_GELU = {
    "bf16": "the bf16 kernels leave the intermediate of a GELU unwritten, and their backward has no GELU",
    "mxfp8": "the MXFP8 kernels compute SiLU only",
}


class KernelGate(NamedTuple):
    """A gate as the blockwise kernels take it: limits on g and on u plus the offset."""

    swish: bool = False
    ungated: bool = False
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None

    @property
    def limits(self) -> dict[str, float | None]:
        """The four limits by the kernels' names of them."""
        return dict(zip(self._fields[2:], self[2:], strict=True))

    @property
    def pairs(self) -> Limits:
        """The limits of gate, then of up."""
        return self[2:4], self[4:6]


PLAIN = KernelGate()


@functools.cache
def kernel_gate(gate: Gate, *, trained: bool = True) -> KernelGate:
    """Return the arguments of a gate for which :func:`unsupported_reason_gate` is None.

    Where it is not `trained`, :func:`unsupported_reason_words` is, and a limit on the activation is not rounded.
    """
    high, low = (None if limit is None else limit + gate.up_offset for limit in (gate.up_max, gate.up_min))
    uppers = [
        limit for limit in (gate.gate_max, (activation_limit if trained else _exact_limit)(gate)) if limit is not None
    ]
    swish = gate.act == "swish" and gate.alpha != 1
    return KernelGate(swish, not gate.gated, min(uppers, default=None), gate.gate_min, high, low)


def _exact_limit(gate: Gate) -> float | None:
    return None if gate.act_max is None else gating_of(gate._replace(gate_max=None)).gate_limits[0]


def activation_limit(gate: Gate) -> float | None:
    """Return the upper limit on g that has the effect of ``act_max`` on the activation, as bf16 holds it.

    Every activation is at most 0 below 0 and increasing above, so ``min(act(g), L) = act(min(g, g*))`` with
    ``act(g*) = L``. The limit itself is no number of bf16, and is rounded for forward and backward alike.
    """
    found = _exact_limit(gate)
    return None if found is None else float(torch.tensor(found, dtype=torch.float32, device="cpu").bfloat16())


def gate_notes(gate: Gate) -> tuple[str, ...]:
    """Return what a report says of a gate that the kernels compute in another form."""
    limit = activation_limit(gate)
    if limit is None or gate.act_max is None:
        return ()
    alpha = gate.alpha if gate.act == "swish" else 1.0
    reached = limit / (1 + math.exp(-alpha * limit))
    return (
        f"the limit {gate.act_max:g} on the activation is passed as the limit {limit:g} on the gate (bf16), "
        f"so the activation ends at {reached:.6g}, and gate values between the two limits have no gradient",
    )


def unsupported_reason_gate(
    gate: Gate, biased: tuple[bool, bool], kind: str, precision: str, needs: tuple[str, ...], adapter: Adapter
) -> str | None:
    """Return why the kernels `needs` of a block in "bf16" or "mxfp8" do not compute its gate and biases, or None."""
    if (gate == SWIGLU and not any(biased)) or (kind == "mlp" and precision == "mxfp8"):
        return unsupported_reason_dense(gate, any(biased))
    reason = _unsupported_reason_form(gate, kind) or unsupported_reason_activation(gate, precision)
    if reason is None and precision == "mxfp8" and (any(biased) or gate.up_offset):
        reason = "the MXFP8 kernels of experts take no biases" + ("" if any(biased) else ", so up has no offset")
    if reason is None:
        reason = _unsupported_reason_limits(gate)
    return reason or _missing_arguments(gate, needs, adapter)


def unsupported_reason_dense(gate: Gate, biased: bool) -> str | None:
    """Return why the dense MXFP8 kernels do not compute a gate and biases, or None."""
    if gate == SWIGLU and not biased:
        return None
    what = f"its gate is {gate.title}" if gate != SWIGLU else "its projections have biases"
    return f"{what}, and the dense MXFP8 kernels compute silu(gate) * up without biases"


def unsupported_reason_words(gate: Gate, biased: bool, *, wide: bool) -> str | None:
    """Return why no forward kernel for MX words computes a gate and biases, or None; `wide` is shard_on_i_mx.

    Nothing is saved for a backward, so limits may be any numbers.
    """
    if not gate.gated:
        return "the kernels for MX words always compute a gate projection"
    if wide and (biased or gate.up_offset):
        return "the kernel for MX words of this hidden size, shard_on_i_mx, adds the down bias twice"
    return _unsupported_reason_form(gate, "experts") or unsupported_reason_activation(gate, "mx")


def mx_activation(gate: Gate) -> int:
    """Return the place of the gate's activation in :data:`MX_ACTIVATIONS`."""
    return list(MX_ACTIVATIONS).index("silu" if gate.act == "swish" and gate.alpha == 1 else gate.act)


def unsupported_reason_activation(gate: Gate, precision: str) -> str | None:
    """Return why the kernels of a precision, or for "mx" words, do not compute the activation, or None."""
    if gate.act in ("gelu", "gelu_tanh"):
        return _WITHOUT_GELU.get(precision)
    swish = gate.act == "swish" and gate.alpha != 1
    if precision == "mxfp8" and (swish or gate.act not in ("silu", "swish")):
        return _WITHOUT_GELU["mxfp8"]
    if swish and gate.alpha != SWISH_ALPHA:
        return f"the kernels' Swish has alpha {SWISH_ALPHA}, and the block's is {gate.alpha:g}"
    if gate.gated and gate.act not in ("silu", "swish"):
        return f"its gate is {gate.title}, with which the kernels are not called"
    return None


def _unsupported_reason_form(gate: Gate, kind: str) -> str | None:
    if gate.gate_softcap is not None or gate.up_softcap is not None:
        return "its gate is softcapped, which no kernel computes"
    if not gate.gated and (kind != "experts" or gate.act != "squared_relu"):
        return "the kernels' blocks without a gate projection are experts with squared ReLU"
    return None


def _unsupported_reason_limits(gate: Gate) -> str | None:
    for name, limit in kernel_gate(gate).limits.items():
        if limit is not None and float(torch.tensor(limit, dtype=torch.float64).bfloat16()) != limit:
            return f"the kernels read clamp masks off bf16 values, and {name} {limit!r} is no number of bf16"
    return None


def _missing_arguments(gate: Gate, needs: tuple[str, ...], adapter: Adapter) -> str | None:
    """Return what the installed kernels lack; those that are not installed have their own reason."""
    for need in needs:
        found = adapter.match(need)
        wanted = _GATED[need] | (frozenset() if gate.gated else {_UNGATED})
        missing = wanted - found.parameters
        if found.generation is not None and missing:
            return f"the installed {found.function} has no {', '.join(sorted(missing))}"
    return None

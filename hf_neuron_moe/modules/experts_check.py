"""Which experts modules the operator computes: read from the flags that transformers puts on the instance.

Every class decorated with ``transformers.integrations.use_experts_implementation`` has the same call and describes
its parameters by flags, so one rule covers all families.
"""

from __future__ import annotations

from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from hf_neuron_moe.modules.activation import describe_activation, is_silu
from hf_neuron_moe.modules.block import has_call_hooks

EXPERT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Set by every transformers version since 5.17; later ones add ``has_post_expert_norm``."""

_FLAG_RULES: tuple[tuple[str, bool, str], ...] = (
    ("has_gate", True, "it has no gate projection"),
    ("has_bias", False, "its projections have a bias"),
    ("is_concatenated", True, "its gate and up rows are interleaved, not concatenated"),
    ("has_post_expert_norm", False, "it normalizes each expert's output"),
)
"""Flag, the value the kernels need, and what the other value means."""


def is_decorated_experts(module: nn.Module) -> bool:
    """Return whether `module` carries the flags that ``use_experts_implementation`` sets."""
    return all(flag in module.__dict__ for flag in EXPERT_FLAGS)


@cache
def _dispatching_forward() -> CodeType:
    """The code of the forward that the decorator installs; the same object for every decorated class."""
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation
    class _Probe(nn.Module):
        def forward(self) -> None:
            """Never called."""

    return _Probe.forward.__code__


def why_not_swiglu_experts(module: Any) -> str | None:
    """Return why the operator cannot compute `module`, or None where its flags and parts say that it can."""
    from transformers.integrations.moe import _default_apply_gate

    if not is_decorated_experts(module):
        return "its class is not decorated with transformers' use_experts_implementation"
    forward = type(module).forward
    if module.__dict__.get("_is_hooked") and "forward" in module.__dict__:
        return "transformers' tensor or expert parallelism wraps its forward, which is not supported"
    if forward.__code__ is not _dispatching_forward() or "forward" in module.__dict__:
        return "its forward is not the one that use_experts_implementation installs"
    for flag, needed, meaning in _FLAG_RULES:
        value = getattr(module, flag, needed)  # a version without the flag has no experts it would describe
        if bool(value) is not needed:
            return f"{meaning} ({flag}={value})"
    if "_apply_gate" in module.__dict__ or type(module)._apply_gate is not _default_apply_gate:
        return f"its gate is not silu(gate) * up: {type(module).__name__} defines its own _apply_gate"
    activation = getattr(module, "act_fn", None)
    if not is_silu(activation):
        return f"its activation is {describe_activation(activation)}, the kernels have SiLU"
    if isinstance(activation, nn.Module) and has_call_hooks(activation):
        return "its act_fn has hooks, which the operator would not call"
    return _why_not_shapes(module)


def _why_not_shapes(module: Any) -> str | None:
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return "it has no 3-D parameters gate_up_proj and down_proj"
    E, first, second = gate_up.shape
    hidden, double = (first, second) if module.is_transposed else (second, first)
    expected = (E, double // 2, hidden) if module.is_transposed else (E, hidden, double // 2)
    if double % 2 or tuple(down.shape) != expected:
        return f"its parameters do not fit together: gate_up_proj {tuple(gate_up.shape)}, down_proj {tuple(down.shape)}"
    return None

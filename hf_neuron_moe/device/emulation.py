"""The bf16 experts' kernels computed by this package, with the device's accumulation or with a known fault.

The Neuron backend may differ from PyTorch because the kernels round running sums to the I/O dtype, or because a release
has a known fault. Here :mod:`hf_neuron_moe.reference` answers the backend's calls, so that results can be compared with
each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_neuron_moe.backends.kernel_answers import answered_by
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import (
    ActFnType,
    AffinityOption,
    ClampLimits,
    MoECTEImplementation,
    MoECTESpec,
    ShardOnIConfig,
    ShardOption,
    SkipMode,
)
from hf_neuron_moe.reference.upstream_bugs import BACKWARD, FORWARD, known_bugs

DEVICE_ACCUMULATION = "sums of blocks and cores in the I/O dtype, as the kernels keep them (accumulation='device')"
"""What fits where a result agrees with the reference that accumulates as documented, and with no other."""


_CLAMPS = {
    "linear_clamp_upper_limit": "up_clamp_upper_limit",
    "linear_clamp_lower_limit": "up_clamp_lower_limit",
    "non_linear_clamp_upper_limit": "gate_clamp_upper_limit",
    "non_linear_clamp_lower_limit": "gate_clamp_lower_limit",
}
"""Fields of the backward's record by argument of the wrapper kernels."""


def _activation(arguments: dict[str, Any]) -> ActFnType:
    """Return the activation of a wrapper kernel's call, whose `swish` is taken out."""
    if arguments.pop("swish", False):
        return ActFnType.Swish
    return ActFnType.SquaredReLU if arguments.get("skip_gate_proj") else ActFnType.SiLU


def _forward(arguments: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    saved, on_inner = arguments.pop("checkpoint"), arguments.pop("affinity_on_i")
    config = ShardOnIConfig(checkpoint_activation=saved, expert_affinity_multiply_on_I=on_inner)
    arguments["activation_function"] = _activation(arguments)
    return moe_cte, arguments | {"spec": MoECTESpec(MoECTEImplementation.shard_on_i, shard_on_I=config)}


def _backward(arguments: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    arguments["activation_type"] = _activation(arguments)
    limits = {field: arguments.pop(name, None) for field, name in _CLAMPS.items()}
    arguments["clamp_limits"] = ClampLimits(**limits)
    # The device's gradient lacks the part of the down bias, which the backend adds.
    arguments["upstream_affinity_grad"] = bool(arguments.get("bias"))
    call = {"down_proj_act_checkpoint": None, **arguments, "skip_dma": SkipMode(skip_token=True)}
    if call["down_proj_act_checkpoint"] is None:
        call |= {"shard_option": ShardOption.SHARD_ON_FREE, "affinity_option": AffinityOption.AFFINITY_ON_I}
    return blockwise_mm_bwd, call


CALLS = {"moe_forward": _forward, "moe_backward": _backward}
"""By the need that a wrapper kernel meets: the reference function and its call, options as in nki_kernels/."""


@contextmanager
def emulated(bugs: tuple[str, ...] = (), applicable: set[str] | None = None) -> Iterator[None]:
    """Answer the bf16 experts' calls here, with the device's accumulation and those `bugs` that a call can have.

    The names of all faults that the calls can have are added to `applicable`.
    """

    def answer(need: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        function, call = CALLS[need](dict(arguments))
        known = known_bugs(function.__name__, **call)
        if applicable is not None:
            applicable.update(known)
        chosen = tuple(bug for bug in bugs if bug in known)
        result = function(**call, accumulation="device", upstream_bugs=chosen)
        return tuple(tensor for tensor in result if tensor is not None)

    with answered_by(answer):
        yield


def explanation(run: Callable[[], dict[str, Tensor]], fits: Callable[[dict[str, Tensor]], bool]) -> str:
    """Return what a result agrees with: the device's accumulation or a known fault; empty if with neither.

    `run` computes the block's results anew, `fits` compares them with those that were found.
    """
    applicable: set[str] = set()
    with emulated(applicable=applicable):
        expected = run()
    if fits(expected):
        return DEVICE_ACCUMULATION
    for bug in sorted(applicable):
        with emulated((bug,)):
            expected = run()
        if fits(expected):
            return f"a known fault of nki-library, {bug}: {(FORWARD | BACKWARD)[bug]}"
    return ""

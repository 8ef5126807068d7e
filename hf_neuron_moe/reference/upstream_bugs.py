"""Known faults of the device kernels as switches, so that a chip's wrong output can be recognized as such.

``upstream_bugs=("name", ...)`` computes what a kernel with these faults computes; the default has none of them.
:func:`known_bugs` returns the names that can change the values of a call. The faults were read in the source of
nki-library and are not confirmed on a device.

Three known faults have no value that could be computed. GELU outside of MX leaves its buffer unwritten. shard_on_i_mx
reads an undefined variable with NO_SCALE. The backward of 2.29 leaves affinity gradients of an odd E uninitialized.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_neuron_moe.checks import Rule, check_rules
from hf_neuron_moe.errors import ConfigError, nearest, public
from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments, Options, check_options
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_problem import Place, Problem, check_arguments
from hf_neuron_moe.reference.moe_cte_scales import Scales
from hf_neuron_moe.reference.moe_types import ActFnType, BlockShardStrategy, MoECTEImplementation as Kind, bound
from hf_neuron_moe.reference.specification import family

FORWARD, BACKWARD = (
    {row["name"]: row["text"] for row in family(name)["fault"]} for name in ("moe_cte", "blockwise_backward")
)
"""Faults by name: the release and what its kernel does."""


def forward_bugs(problem: Problem) -> tuple[str, ...]:
    """Return the faults that can change a value of a checked call."""
    given, kind, place = problem.given, problem.given.kind, problem.place
    bias, block, adds = problem.down_bias_EH is not None, given.block_size, given.is_tensor_update_accumulating
    on_i, on_block = kind is Kind.shard_on_i, kind is Kind.shard_on_block
    in_turn = given.spec.shard_on_block.block_sharding_strategy is BlockShardStrategy.PING_PONG
    covered = reduced_rows(given.tokens, given.skip_dma.skip_token)
    halves_of_tiles = block > 256 and block % 256 == 0
    applying = {
        "pre_scale_first_tile": (on_i or kind is Kind.shard_on_i_hybrid)
        and place is Place.PRE_ACTIVATIONS
        and block > 512,
        "no_affinity_bias_first_tile": on_i and bias and not adds and place is not Place.OUTPUT and halves_of_tiles,
        "mx_bias_twice": kind is Kind.shard_on_i_mx and bias,
        "skip_token_pre_scale_zero": on_block and place is Place.INPUT and given.skip_dma.skip_token,
        "no_affinity_bias_missing": on_block and bias and place is Place.NOTHING and problem.inner <= 1024,
        "last_rows_not_reduced": on_block and in_turn and adds and covered < given.tokens,
        "multiply_on_i_no_bias": on_i and bias and place is Place.INTERMEDIATE,
        "fp8_scales_ignored": (on_block or kind is Kind.shard_on_i_dropping) and problem.scales.gate_up_E2X is not None,
    }
    return tuple(name for name, applies in applying.items() if applies and not problem.golden)


def backward_bugs(given: BackwardArguments, options: Options) -> tuple[str, ...]:
    """Return the faults that can change a value of a backward call."""
    in_checkpoint = options.on_hidden and given.convention == "golden"
    lacks_bias = given.down_proj_bias is not None and not given.upstream_affinity_grad and not in_checkpoint
    applying = {
        "activation_as_silu": options.activation not in (ActFnType.SiLU, ActFnType.Swish),
        "affinity_on_i_as_on_h": not options.on_hidden and given.down_proj_act_checkpoint is not None,
        "affinity_grad_without_bias": lacks_bias,
    }
    return tuple(name for name, applies in applying.items() if applies)


def reduced_rows(tokens: int, skip_token: bool) -> int:
    """Return how many rows the last sum of shard_on_block covers by ``last_rows_not_reduced``."""
    return -(-(tokens - skip_token) // 128) * 128


def with_bugs(problem: Problem) -> Problem:
    """Check the names of a checked call and return what these faults make of it; ``block_walk`` has the others."""
    names = problem.given.upstream_bugs
    _check_names(names, FORWARD, forward_bugs(problem))
    if "fp8_scales_ignored" in names:
        problem = replace(problem, scales=Scales())
    if "mx_bias_twice" in names:
        problem = with_down_bias(problem, 2)
    if {"no_affinity_bias_missing", "multiply_on_i_no_bias"} & {*names}:
        problem = with_down_bias(problem, 0)
    return problem


def with_down_bias(problem: Problem, factor: int) -> Problem:
    """Return the call with a multiple of its down bias."""
    bias_EH = problem.down_bias_EH
    return problem if bias_EH is None else replace(problem, down_bias_EH=factor * bias_EH)


def with_backward_bugs(given: BackwardArguments, options: Options) -> tuple[BackwardArguments, Options]:
    """Check the names of a backward call and return what these faults make of it."""
    names = given.upstream_bugs
    _check_names(names, BACKWARD, backward_bugs(given, options))
    if "activation_as_silu" in names:
        options = options._replace(activation=ActFnType.SiLU)
    if "affinity_on_i_as_on_h" in names:
        options = options._replace(on_hidden=True)
    if "affinity_grad_without_bias" in names:
        given = replace(given, upstream_affinity_grad=True)
    return given, options


def _check_names(names: tuple[str, ...], known: Mapping[str, str], applying: tuple[str, ...]) -> None:
    for name in names:
        hint = "" if name in known else nearest(name, list(known))
        fix = f"known_bugs returns the names that can change a call.{hint}"
        rule = f"made of the faults of this call ({', '.join(applying) or 'none'})"
        check_rules([Rule(name in applying, "upstream_bugs", rule, repr(name), fix)])


@public
def known_bugs(kernel: str, /, **arguments: Any) -> tuple[str, ...]:
    """Return the names for `upstream_bugs` that can change the values of a call of `kernel`.

    `kernel` is ``"moe_cte"`` or ``"blockwise_mm_bwd"``, `arguments` are those of the call. Limits of the device, which
    guard against some faults, are not looked at.
    """
    records: dict[str, Any] = {"moe_cte": Arguments, "blockwise_mm_bwd": BackwardArguments}
    if kernel not in records:
        expected = "'moe_cte' or 'blockwise_mm_bwd'"
        raise ConfigError.about("kernel", expected, repr(kernel), "No faults of other kernels are known.")
    bound(kernel, inspect.signature(records[kernel]), (), arguments)
    given = records[kernel](**{**arguments, "device_limits": False, "limits": None})
    if isinstance(given, Arguments):
        return forward_bugs(check_arguments(given))
    return backward_bugs(given, check_options(given))

"""Known faults of the device kernels as switches, so that a chip's wrong output can be recognized as such.

``upstream_bugs=("name", ...)`` computes what a kernel with these faults computes; the default has none of them.
:func:`known_bugs` returns the names that can change the values of a call. The faults were read in the source of
nki-library and are not confirmed on a device.

Three known faults have no value that could be computed. GELU outside of MX leaves its buffer unwritten. shard_on_i_mx
reads an undefined variable with NO_SCALE. The backward of 2.29 leaves affinity gradients of an odd E uninitialized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hf_neuron_moe.checks import Rule, check_rules
from hf_neuron_moe.errors import ConfigError, nearest, public
from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments, Options, check_options
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_problem import Place, Problem, check_arguments
from hf_neuron_moe.reference.moe_cte_scales import Scales
from hf_neuron_moe.reference.moe_types import ActFnType, BlockShardStrategy, MoECTEImplementation as Kind

_TILE = 128
_PSUM_ROWS = 512


class Bug(NamedTuple):
    """One fault of the forward."""

    text: str  # release and what the kernel does
    applies: Callable[[Problem], bool]  # whether it can change a value of a call
    apply: Callable[[Problem], Problem] = lambda problem: problem  # where the block walk does not ask for the name


def without_down_bias(problem: Problem) -> Problem:
    """Return the call with a down bias of zeros."""
    bias_EH = problem.down_bias_EH
    return problem if bias_EH is None else replace(problem, down_bias_EH=bias_EH.new_zeros(bias_EH.shape))


def _twice_down_bias(problem: Problem) -> Problem:
    return problem if problem.down_bias_EH is None else replace(problem, down_bias_EH=2 * problem.down_bias_EH)


def _kind(problem: Problem, *kinds: Kind) -> bool:
    return problem.given.kind in kinds


def _biased(problem: Problem, *kinds: Kind) -> bool:
    return _kind(problem, *kinds) and problem.down_bias_EH is not None


def reduced_rows(tokens: int, skip_token: bool) -> int:
    """Return how many rows shard_on_block adds at the end: ``ceil((T' - 1) / 128) * 128``."""
    return -(-(tokens - skip_token) // _TILE) * _TILE


FORWARD = {
    "pre_scale_first_tile": Bug(
        "2.29 and later, shard_on_i with PRE_SCALE: slots from 512 on get the affinities of slots 0 to 511",
        lambda problem: (
            _kind(problem, Kind.shard_on_i, Kind.shard_on_i_hybrid)
            and problem.place is Place.PRE_ACTIVATIONS
            and problem.given.block_size > _PSUM_ROWS
        ),
    ),
    "no_affinity_bias_first_tile": Bug(
        "2.29 and later, shard_on_i with plain stores and no affinity on the output: only the first 128 slots of each "
        "core's half of a block get the down bias",
        lambda problem: (
            _biased(problem, Kind.shard_on_i)
            and not problem.given.is_tensor_update_accumulating
            and problem.place is not Place.OUTPUT
            and problem.given.block_size > 2 * _TILE
            and problem.given.block_size % (2 * _TILE) == 0
        ),
    ),
    "mx_bias_twice": Bug(
        "2.29 and later, shard_on_i_mx: both cores add the down bias before their sums are added",
        lambda problem: _biased(problem, Kind.shard_on_i_mx),
        _twice_down_bias,
    ),
    "skip_token_pre_scale_zero": Bug(
        "2.29 and later, shard_on_block with PRE_SCALE and skip_token: every affinity reads as zero",
        lambda problem: (
            _kind(problem, Kind.shard_on_block) and problem.place is Place.INPUT and problem.given.skip_dma.skip_token
        ),
    ),
    "no_affinity_bias_missing": Bug(
        "2.29 and later, shard_on_block with NO_SCALE and I up to 1024: the down bias is not added",
        lambda problem: (
            _biased(problem, Kind.shard_on_block) and problem.place is Place.NOTHING and problem.inner <= 1024
        ),
        without_down_bias,
    ),
    "last_rows_not_reduced": Bug(
        "2.29 and later, shard_on_block: the last sum leaves out the second core's part of rows from "
        "ceil((T' - 1) / 128) * 128 on",
        lambda problem: (
            _kind(problem, Kind.shard_on_block)
            and problem.given.spec.shard_on_block.block_sharding_strategy is BlockShardStrategy.PING_PONG
            and problem.given.is_tensor_update_accumulating
            and reduced_rows(problem.given.tokens, problem.given.skip_dma.skip_token) < problem.given.tokens
        ),
    ),
    "multiply_on_i_no_bias": Bug(
        "2.29, shard_on_i with expert_affinity_multiply_on_I: the down bias is not added",
        lambda problem: _biased(problem, Kind.shard_on_i) and problem.place is Place.INTERMEDIATE,
        without_down_bias,
    ),
    "fp8_scales_ignored": Bug(
        "2.29, shard_on_block and shard_on_i_dropping: FP8 scales are accepted and not used",
        lambda problem: (
            _kind(problem, Kind.shard_on_block, Kind.shard_on_i_dropping) and problem.scales.gate_up_E2X is not None
        ),
        lambda problem: replace(problem, scales=Scales()),
    ),
}


class BackwardBug(NamedTuple):
    """One fault of the backward."""

    text: str
    applies: Callable[[BackwardArguments, Options], bool]


BACKWARD = {
    "activation_as_silu": BackwardBug(
        "2.29: every activation but Swish is taken for SiLU",
        lambda given, options: options.activation not in (ActFnType.SiLU, ActFnType.Swish),
    ),
    "affinity_on_i_as_on_h": BackwardBug(
        "2.29: AFFINITY_ON_I is computed as AFFINITY_ON_H",
        lambda given, options: not options.on_hidden and given.down_proj_act_checkpoint is not None,
    ),
    "affinity_grad_without_bias": BackwardBug(
        "2.29 and later: the affinity's gradient lacks the down bias (as upstream_affinity_grad)",
        lambda given, options: (
            given.down_proj_bias is not None
            and not given.upstream_affinity_grad
            and not (options.on_hidden and given.convention == "golden")
        ),
    ),
}


def with_bugs(problem: Problem) -> Problem:
    """Check the names of a checked call; return what a kernel with these faults takes it for."""
    names = problem.given.upstream_bugs
    _check_names(names, FORWARD, _applying(problem))
    for name in names:
        problem = FORWARD[name].apply(problem)
    return problem


def with_backward_bugs(given: BackwardArguments, options: Options) -> tuple[BackwardArguments, Options]:
    """Check the names of a backward call; return what a kernel with these faults takes it for."""
    names = given.upstream_bugs
    _check_names(names, BACKWARD, _applying_backward(given, options))
    if "activation_as_silu" in names:
        options = options._replace(activation=ActFnType.SiLU)
    if "affinity_on_i_as_on_h" in names:
        options = options._replace(on_hidden=True)
    if "affinity_grad_without_bias" in names:
        given = replace(given, upstream_affinity_grad=True)
    return given, options


def _applying(problem: Problem) -> tuple[str, ...]:
    return tuple(name for name, bug in FORWARD.items() if not problem.golden and bug.applies(problem))


def _applying_backward(given: BackwardArguments, options: Options) -> tuple[str, ...]:
    return tuple(name for name, bug in BACKWARD.items() if bug.applies(given, options))


def _check_names(names: tuple[str, ...], known: Mapping[str, object], applying: tuple[str, ...]) -> None:
    for name in names:
        fix = f"known_bugs returns the names that can change a call.{nearest(name, list(known))}"
        rule = f"made of the faults of this call ({', '.join(applying) or 'none'})"
        check_rules([Rule(name in applying, "upstream_bugs", rule, repr(name), fix)])


@public
def known_bugs(kernel: str, /, **arguments: Any) -> tuple[str, ...]:
    """Return the names for `upstream_bugs` that can change the values of a call of `kernel`.

    `kernel` is ``"moe_cte"`` or ``"blockwise_mm_bwd"``, `arguments` are those of the call.
    """
    if kernel == "moe_cte":
        return _applying(check_arguments(Arguments(**arguments)))
    expected = "'moe_cte' or 'blockwise_mm_bwd'"
    if kernel != "blockwise_mm_bwd":
        raise ConfigError.about("kernel", expected, repr(kernel), "The other kernels have no known faults.")
    given = BackwardArguments(**arguments)
    return _applying_backward(given, check_options(given))

"""What each implementation of the blockwise forward takes, on which chip, and how its result looks.

Sources: nki-library 2.29 ``core.moe.moe_cte`` kernels and their asserts; 2.31 and 2.33 where said. Letters: T' token
rows, H hidden, I intermediate, E experts, N blocks of B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.neuron.double.checks import check_multiple
from tests.neuron.double.contract import Release, need
from tests.neuron.double.plan import Sizes

MAX_TOKENS = 32 * 1024


@dataclass(frozen=True)
class Rule:
    """Limits of one implementation.

    Attributes:
        block: B is a multiple of this.
        inner: I is a multiple of this.
        modes: names of affinity modes it has.
        two_cores: runs on two cores only.
        mx: Trn3, packed weights.
        on_inner: has multiply-on-I.
        checkpoints: can return activations.
        fp8: uses FP8 scales.
        skip_weight: can reuse weights.
        hybrid: needs conditions.
    """

    block: int
    inner: int
    modes: frozenset[str]
    two_cores: bool = False
    mx: bool = False
    on_inner: bool = False
    checkpoints: bool = False
    fp8: bool = False
    skip_weight: bool = False
    hybrid: bool = False


_ALL = frozenset({"POST_SCALE", "PRE_SCALE", "NO_SCALE", "PRE_SCALE_DELAYED"})
_THREE = _ALL - {"PRE_SCALE_DELAYED"}
_POST = frozenset({"POST_SCALE"})
RULES = {
    "shard_on_block": Rule(128, 16, _THREE, two_cores=True, skip_weight=True),
    "shard_on_i": Rule(256, 16, _ALL, on_inner=True, checkpoints=True, fp8=True),
    "shard_on_i_hybrid": Rule(256, 16, _THREE, two_cores=True, fp8=True, hybrid=True),
    "shard_on_i_dropping": Rule(1024, 16, _POST, on_inner=True, checkpoints=True),
    "shard_on_block_mx": Rule(128, 32, _POST, two_cores=True, mx=True, fp8=True, skip_weight=True),
    "shard_on_i_mx": Rule(256, 1024, _POST, two_cores=True, mx=True, fp8=True),
    "shard_on_i_mx_hybrid": Rule(256, 1024, _POST, two_cores=True, mx=True, fp8=True, hybrid=True),
    "shard_on_hidden": Rule(256, 16, _POST, two_cores=True),
}


def check_sizes(kind: str, sizes: Sizes, where: str) -> None:
    """B, H, I, T and N of an implementation."""
    rule = RULES[kind]
    check_multiple(sizes.block, rule.block, where, "block_size")
    check_multiple(sizes.hidden, 512, where, "H")
    open_ended = kind in ("shard_on_i_mx", "shard_on_i_mx_hybrid")
    need(open_ended or sizes.hidden <= 8192, where, f"H is at most 8192, got {sizes.hidden}")
    step = 512 if kind == "shard_on_block_mx" and sizes.inner >= 512 else rule.inner
    check_multiple(sizes.inner, step, where, "I")
    need(sizes.tokens <= MAX_TOKENS, where, f"T is at most {MAX_TOKENS}, got {sizes.tokens}")
    if kind in ("shard_on_block", "shard_on_block_mx"):
        check_multiple(sizes.blocks, 2, where, "N (two cores share the blocks)")
    if kind == "shard_on_block":
        check_multiple(sizes.tokens, 128, where, "T (the last reduction covers whole tiles)")
    if kind == "shard_on_i_dropping":
        need(sizes.blocks == sizes.experts, where, "a dropping plan has one block per expert")


def check_options(kind: str, release: Release, call: dict[str, Any], sizes: Sizes, on_inner: bool, where: str) -> None:
    """Activation, affinity mode, bias and scale pairs, clamps and skips."""
    rule = RULES[kind]
    activation = call.get("activation_function")
    if activation is not None:
        allowed = {"SiLU", "Swish"} | ({"SquaredReLU"} if release >= (2, 33) else set())
        allowed = {"SiLU", "GELU", "GELU_Tanh_Approx", "Swish"} if rule.mx else allowed
        need(activation.name in allowed, where, f"activation {activation.name} leaves its buffer unwritten")
    mode = call["expert_affinities_scaling_mode"].name
    need(mode in rule.modes or on_inner, where, f"{kind} has no {mode}")
    need(rule.on_inner or not on_inner, where, f"{kind} has no multiply-on-I")
    pre = mode.startswith("PRE") and kind in ("shard_on_i", "shard_on_i_hybrid")
    need(not pre or on_inner or sizes.block <= 512, where, "PRE_SCALE reuses the first 512 affinities")
    for first, second in (("gate_and_up_proj_bias", "down_proj_bias"), ("gate_up_proj_scale", "down_proj_scale")):
        both = (call.get(first) is None) == (call.get(second) is None)
        need(both, where, f"{first} and {second} come together, one alone is ignored")
    need(rule.fp8 or call.get("gate_up_proj_scale") is None, where, f"{kind} ignores FP8 scales")
    bias = call.get("down_proj_bias") is not None
    old = release < (2, 31)
    need(not (bias and on_inner and old), where, "multiply-on-I drops the down bias before 2.31")
    need(not (bias and kind == "shard_on_i_mx"), where, "shard_on_i_mx adds the down bias twice")
    needs_bias = kind == "shard_on_block_mx" and release < (2, 30)
    need(not needs_bias or bias, where, "2.29 reads both biases' dtypes unconditionally")
    skip = call["skip_dma"]
    need(rule.skip_weight or not skip.skip_weight, where, f"{kind} asserts skip_weight off")
    broken_read = kind == "shard_on_block" and mode == "PRE_SCALE" and skip.skip_token
    need(not broken_read, where, "PRE_SCALE with skip_token reads every affinity as zero")
    for name in ("gate_up_activations_T", "down_activations"):
        need(call.get(name) is None, where, f"{name} is never written: activations are returned")
    accumulating = call["is_tensor_update_accumulating"]
    need(type(accumulating) is bool, where, "is_tensor_update_accumulating is a bool")
    need(accumulating or kind != "shard_on_block_mx", where, "shard_on_block_mx accumulates always")
    if not accumulating and bias:
        need(mode == "POST_SCALE" and not on_inner, where, "the down bias is added to the first tile only")

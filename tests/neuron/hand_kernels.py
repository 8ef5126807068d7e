"""Wrapper kernels as the documents want them, and some that break one rule each. Imported while a double is installed.

Letters: S tokens, H hidden, I intermediate, T' token rows, E experts, N blocks of B.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.language as nl
from nkilib.core.moe.moe_cte import MoECTEImplementation, MoECTESpec, ShardOnBlockConfig, ShardOnIConfig, moe_cte
from nkilib.core.moe.moe_cte.bwmm_shard_on_I_mx import blockwise_mm_shard_intermediate_mx
from nkilib.core.utils.common_types import ExpertAffinityScaleMode
from nkilib.experimental.moe.bwd.blockwise_mm_backward import blockwise_mm_bwd
from nkilib.experimental.moe.bwd.moe_bwd_parameters import ShardOption

try:
    from nkilib.experimental.mlp_mxfp8.mlp_bwd_mxfp8 import mlp_backward_mxfp8_nki
    from nkilib.experimental.mlp_mxfp8.mlp_fwd_mxfp8 import mlp_forward_mxfp8_nki
except ModuleNotFoundError:
    mlp_backward_mxfp8_nki = mlp_forward_mxfp8_nki = None
try:
    from nkilib.experimental.moe_mxfp8 import blockwise_mm_bwd_mxfp8, blockwise_mm_fwd_mxfp8
except ImportError:
    blockwise_mm_bwd_mxfp8 = blockwise_mm_fwd_mxfp8 = None


def _scratch(shape: tuple[int, int]) -> Any:
    return nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)


@nki.jit
def mlp_forward(x: Any, gate_up: Any, down: Any, lnc2: bool) -> Any:
    """Output, gate_pre, up and the intermediate, all allocated here."""
    shape = (x.shape[0], gate_up.shape[0] // 2)
    inter = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    gate = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    up = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    out = mlp_forward_mxfp8_nki(
        hidden=x, gate_up_weights=gate_up, down_weights=down, intermediate_hbm=inter, run_with_lnc2=lnc2,
        save_gate_pre=gate, save_up=up,
    )  # fmt: skip
    return out, gate, up, inter


@nki.jit
def mlp_forward_quantized(x: Any, gate_up: Any, gate_up_scales: Any, down: Any, down_scales: Any, packed: bool) -> Any:
    """Pre-quantized weights."""
    inter = nl.ndarray((x.shape[0], gate_up.shape[1] // 2), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    out = mlp_forward_mxfp8_nki(
        hidden=x, gate_up_weights=gate_up, gate_up_scales=gate_up_scales, down_weights=down, down_scales=down_scales,
        intermediate_hbm=inter, use_scale_packing=packed,
    )  # fmt: skip
    return out, inter


@nki.jit
def mlp_forward_kept_unused(x: Any, gate_up: Any, down: Any) -> Any:
    """save_hidden leaves intermediate_hbm untouched; it is returned all the same."""
    shape = (x.shape[0], gate_up.shape[0] // 2)
    inter = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    kept = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    out = mlp_forward_mxfp8_nki(
        hidden=x, gate_up_weights=gate_up, down_weights=down, intermediate_hbm=inter, save_hidden=kept
    )
    return out, kept, inter


@nki.jit
def mlp_forward_private(x: Any, gate_up: Any, down: Any) -> Any:
    """Returns memory that is not shared."""
    inter = nl.ndarray((x.shape[0], gate_up.shape[0] // 2), dtype=nl.bfloat16, buffer=nl.private_hbm)
    out = mlp_forward_mxfp8_nki(hidden=x, gate_up_weights=gate_up, down_weights=down, intermediate_hbm=inter)
    return out, inter


@nki.jit
def mlp_forward_lost(x: Any, gate_up: Any, down: Any, inter: Any) -> Any:
    """Writes into an argument that it does not return."""
    return mlp_forward_mxfp8_nki(hidden=x, gate_up_weights=gate_up, down_weights=down, intermediate_hbm=inter)


@nki.jit
def mlp_forward_positional(x: Any, gate_up: Any, down: Any) -> Any:
    """Positional arguments."""
    inter = nl.ndarray((x.shape[0], gate_up.shape[0] // 2), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    return mlp_forward_mxfp8_nki(x, gate_up, down, inter)


@nki.jit
def mlp_backward(grad: Any, x: Any, gate_up: Any, down: Any, gate_pre: Any, up: Any) -> Any:
    """The backward of 2.31 and later."""
    return mlp_backward_mxfp8_nki(
        output_grad=grad, hidden_states=x, gate_up_weights=gate_up, down_proj_weight=down, gate_pre=gate_pre, up=up
    )


@nki.jit
def mlp_backward_unwritten(grad: Any, x: Any, gate_up: Any, down: Any) -> Any:
    """Reads a checkpoint that nothing wrote."""
    gate = nl.ndarray((x.shape[0], down.shape[1]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    return mlp_backward_mxfp8_nki(
        output_grad=grad, hidden_states=x, gate_up_weights=gate_up, down_proj_weight=down, gate_pre=gate, up=gate
    )


@nki.jit
def mlp_backward_2_30(
    grad: Any, x: Any, gate_T: Any, up_T: Any, down_T: Any, gate_up: Any, x_T: Any, grad_T: Any, inter_T: Any,
    gate_pre: Any, up: Any,
) -> Any:  # fmt: skip
    """The backward of 2.30: transposed operands from the caller, scratch allocated here."""
    shape = (x.shape[0], down_T.shape[0])
    return mlp_backward_mxfp8_nki(
        output_hidden_states_grad=grad, hidden_states=x, gate_proj_weight_T=gate_T, up_proj_weight_T=up_T,
        down_proj_weight_T=down_T, gate_up_weights=gate_up, hidden_states_T=x_T, output_grad_T=grad_T,
        hidden_T=inter_T, d_gate_scratch=_scratch(shape), d_up_scratch=_scratch(shape),
        silu_up_mul_gate_grad_T_scratch=_scratch((2 * shape[1], shape[0])), gate_pre_scratch=_scratch(shape),
        gate_act_scratch=_scratch(shape), up_scratch=_scratch(shape), hidden_scratch=_scratch(shape),
        gate_pre=gate_pre, up=up,
    )  # fmt: skip


@nki.jit
def moe_forward(x: Any, affinity: Any, gate_up: Any, down: Any, ids: Any, owners: Any, block: int, keep: bool) -> Any:
    """shard_on_i."""
    options = ShardOnIConfig(checkpoint_activation=keep)
    spec = MoECTESpec(implementation=MoECTEImplementation.shard_on_i, shard_on_I=options)
    return moe_cte(
        hidden_states=x, expert_affinities_masked=affinity, gate_up_proj_weight=gate_up, down_proj_weight=down,
        token_position_to_id=ids, block_to_expert=owners, block_size=block, spec=spec,
    )  # fmt: skip


@nki.jit
def moe_forward_blocks(x: Any, affinity: Any, gate_up: Any, down: Any, ids: Any, owners: Any, block: int) -> Any:
    """shard_on_block."""
    spec = MoECTESpec(implementation=MoECTEImplementation.shard_on_block, shard_on_block=ShardOnBlockConfig())
    return moe_cte(
        hidden_states=x, expert_affinities_masked=affinity, gate_up_proj_weight=gate_up, down_proj_weight=down,
        token_position_to_id=ids, block_to_expert=owners, block_size=block, spec=spec,
    )  # fmt: skip


@nki.jit
def moe_forward_in_scale(x: Any, affinity: Any, gate_up: Any, down: Any, ids: Any, owners: Any, block: int) -> Any:
    """Passes an argument that came with 2.31."""
    spec = MoECTESpec(implementation=MoECTEImplementation.shard_on_i)
    return moe_cte(
        hidden_states=x, expert_affinities_masked=affinity, gate_up_proj_weight=gate_up, down_proj_weight=down,
        token_position_to_id=ids, block_to_expert=owners, block_size=block, spec=spec, gate_up_in_scale=None,
    )  # fmt: skip


@nki.jit
def moe_backward(
    x: Any, affinity: Any, gate_up: Any, down: Any, gate_up_kept: Any, down_kept: Any, ids: Any, owners: Any,
    grad: Any, block: int, free: bool,
) -> Any:  # fmt: skip
    """The bf16 backward."""
    shard = ShardOption["SHARD_ON_FREE"] if free else ShardOption.SHARD_ON_HIDDEN
    return blockwise_mm_bwd(
        hidden_states=x, expert_affinities_masked=affinity, gate_up_proj_weight=gate_up, down_proj_weight=down,
        gate_up_proj_act_checkpoint_T=gate_up_kept, down_proj_act_checkpoint=down_kept, token_position_to_id=ids,
        block_to_expert=owners, output_hidden_states_grad=grad, block_size=block, shard_option=shard,
    )  # fmt: skip


@nki.jit
def moe_forward_mxfp8(x: Any, affinity: Any, gate_up: Any, down: Any, ids: Any, owners: Any, block: int) -> Any:
    """The MXFP8 forward."""
    return blockwise_mm_fwd_mxfp8(
        hidden_states=x, expert_affinities_masked=affinity, gate_up_proj_weight=gate_up, down_proj_weight=down,
        token_position_to_id=ids, block_to_expert=owners, block_size=block,
    )  # fmt: skip


@nki.jit
def moe_backward_mxfp8(
    x: Any, affinity: Any, gate_up: Any, down: Any, kept: Any, ids: Any, owners: Any, grad: Any, block: int
) -> Any:
    """The MXFP8 backward."""
    return blockwise_mm_bwd_mxfp8(
        hidden_states=x, expert_affinities_masked=affinity, gate_up_proj_weight=gate_up, down_proj_weight=down,
        gate_up_proj_act_checkpoint_T=kept, token_position_to_id=ids, block_to_expert=owners,
        output_hidden_states_grad=grad, block_size=block,
    )  # fmt: skip


@nki.jit
def moe_forward_mx(
    x: Any, affinity: Any, gate_up: Any, down: Any, gate_up_scale: Any, down_scale: Any, ids: Any, owners: Any,
    block: int, unified: bool,
) -> Any:  # fmt: skip
    """shard_on_i_mx, directly or through the entry that has no branch for it."""
    operands = {
        "hidden_states": x, "expert_affinities_masked": affinity, "gate_up_proj_weight": gate_up,
        "down_proj_weight": down, "token_position_to_id": ids, "block_to_expert": owners, "block_size": block,
        "gate_up_proj_scale": gate_up_scale, "down_proj_scale": down_scale,
        "expert_affinities_scaling_mode": ExpertAffinityScaleMode.POST_SCALE,
    }  # fmt: skip
    if unified:
        return moe_cte(**operands, spec=MoECTESpec(implementation=MoECTEImplementation.shard_on_i_mx))
    return blockwise_mm_shard_intermediate_mx(**operands)


@nki.jit
def returns_input(x: Any) -> Any:
    """Nothing but its argument."""
    return x


@nki.jit
def returns_number(x: Any) -> Any:
    """No tensor."""
    return x.shape[0]


def make_closure() -> Any:
    """A kernel that closes over a knob."""
    block = 256

    def kernel(x: Any) -> Any:
        return nl.ndarray((block,), dtype=x.dtype, buffer=nl.shared_hbm)

    return nki.jit(kernel)

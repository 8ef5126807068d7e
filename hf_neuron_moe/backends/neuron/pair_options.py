"""The options that both MXFP8 kernels of experts, ``blockwise_mm_fwd_mxfp8`` and ``..._bwd_mxfp8``, are given."""

from __future__ import annotations

from typing import Any

from hf_neuron_moe.backends.neuron.nkilib_objects import nkilib_object
from hf_neuron_moe.backends.neuron.signatures import accepted


def pair_options(taker: Any, shard_option: str) -> dict[str, Any]:
    """Return those options that `taker` has, an installed function or the record that it takes.

    `shard_option` is a member of ``ShardOption``, which differs between the two.
    """
    return accepted(
        taker,
        shard_option=getattr(nkilib_object("ShardOption"), shard_option),
        affinity_option=nkilib_object("AffinityOption").AFFINITY_ON_I,
        skip_dma=nkilib_object("BackwardSkipMode")(skip_token=True),
        is_tensor_update_accumulating=True,
        accumulate_hidden_states_grad=True,
        no_indirect_load=False,
        single_expert_dense=False,
    )

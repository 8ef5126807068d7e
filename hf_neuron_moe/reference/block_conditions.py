"""The ``conditions`` vectors of a block plan: which blocks have real tokens, as each kernel wants to read it.

==================================================  ==============  ==============================================
consumer                                            shape           content
==================================================  ==============  ==============================================
``shard_on_i_hybrid``, ``shard_on_i_mx_hybrid``     ``[N + 1]``     a flag per block, then 0
``shard_on_block_mx``                               ``[N + 2]``     a flag per block, then two 0
``shard_on_block``                                  [ceil(N/2)+1]   a flag per pair of blocks (ping-pong), then 0
``shard_on_block_upstream``                         [ceil(N/2)+1]   the same as upstream's test generator counts it
``shard_on_block_hybrid``                           [2, ..+1]       a row per core (low and high half), each then 0
==================================================  ==============  ==============================================

Upstream's generator for block sharding is one pair short if the number of spare blocks is odd. 2.29 kernels do not read
it; in your own loop use ``shard_on_block``. For ``shard_on_block_hybrid`` (experimental) the documentation describes
one row and the newest test passes both rows flattened.

Sources: nki-library 2.29 ``moe_cte`` test utilities; NxD and vllm-neuron, which take any real token per block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_neuron_moe.errors import ConfigError, nearest, public
from hf_neuron_moe.formats.block_plan import BlockPlan
from hf_neuron_moe.reference.moe_types import MoECTEImplementation

_HYBRIDS = ("shard_on_i_hybrid", "shard_on_i_mx_hybrid")
_OF_BLOCKS = ("shard_on_block_mx", "shard_on_block", "shard_on_block_upstream", "shard_on_block_hybrid")
CONSUMERS = (*_HYBRIDS, *_OF_BLOCKS)


@public
def block_conditions(plan: BlockPlan, consumer: str | MoECTEImplementation) -> Tensor:
    """Return the int32 vector of a plan that `consumer` reads; no value is read back to the host.

    `consumer` is one of the names in the table above, or a member of ``MoECTEImplementation`` of that name.
    """
    name = consumer.name if isinstance(consumer, MoECTEImplementation) else consumer
    if name not in CONSUMERS:
        fix = f"Other implementations read no conditions.{nearest(str(name), list(CONSUMERS))}"
        raise ConfigError.about("consumer", f"one of {', '.join(CONSUMERS)}", repr(consumer), fix)
    if name in _HYBRIDS:
        return plan.conditions
    if name == "shard_on_block_mx":
        return pad(plan.conditions, (0, 1))
    flags_N = plan.conditions[:-1]
    blocks = len(flags_N)
    half = -(-blocks // 2)
    even = pad(flags_N, (0, 2 * half - blocks))
    if name == "shard_on_block":
        return pad(even.view(half, 2).amax(1), (0, 1))
    if name == "shard_on_block_hybrid":
        return pad(even.view(2, half), (0, 1))
    zeros = -(-(blocks - flags_N.sum()) // 2) + 1
    return (torch.arange(half + 1, device=flags_N.device) < half + 1 - zeros).to(torch.int32)

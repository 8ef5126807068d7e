"""Records of the blockwise MoE kernels with fields of wrong types, and refusals that explain a plan or a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import MoECTESpec, ShardOnBlockConfig, ShardOnIConfig, SkipMode
from tests.kernels.moe_cte_calls import E, H, mx_arguments, spec, with_sink_row
from tests.refusals import refused


@pytest.mark.parametrize(
    ("make", "argument", "says"),
    [
        (lambda: MoECTESpec("shard_on_i", shard_on_I=ShardOnBlockConfig()),
         "shard_on_I", "got a ShardOnBlockConfig"),
        (lambda: MoECTESpec("shard_on_block", {"top_k": 1}), "shard_on_block", ""),
        (lambda: ShardOnBlockConfig(use_packed_scales="no"), "use_packed_scales", "got 'no'"),
        (lambda: ShardOnBlockConfig(non_overlapping_shards=1), "non_overlapping_shards", "got 1"),
        (lambda: ShardOnBlockConfig(n_static_blocks="2"), "n_static_blocks", "got '2'"),
        (lambda: ShardOnBlockConfig(weight_dtype="e5m2"), "weight_dtype", "got 'e5m2'"),
        (lambda: ShardOnIConfig(checkpoint_activation="yes"), "checkpoint_activation", "got 'yes'"),
        (lambda: ShardOnIConfig(expert_affinity_multiply_on_I=1), "expert_affinity_multiply_on_I", "got 1"),
        (lambda: ShardOnIConfig(num_static_block=1.0), "num_static_block", "got 1.0"),
        (lambda: SkipMode(skip_token="True"), "skip_token", "got 'True'"),
    ],
)  # fmt: skip
def test_records_check_their_fields(make: Callable[[], Any], argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        make()


def test_hybrids_take_no_spare_blocks_in_between() -> None:
    """The split plan's last expert comes behind a spare block, which a hybrid that counts flags never reaches."""
    index = torch.tensor([[0]] * 20 + [[1]] * 20 + [[2]] * 20)
    plans = {
        how: build_block_plan(expert_mask(index, 3), 16, top_k=1, spare_blocks=how, n_block_per_iter=10)
        for how in ("last", "split")
    }
    shapes = {"gate_up_proj_weight": (3, 8, 2, 4), "down_proj_weight": (3, 4, 8)}
    given = {name: torch.ones(shape) for name, shape in shapes.items()} | {
        "hidden_states": with_sink_row(torch.ones(60, 8)),
        "expert_affinities_masked": masked_affinities(index, torch.ones(60, 1), 3),
        "block_size": 16,
    }

    def run(how: str, static: int) -> Any:
        plan = plans[how]._asdict()
        return moe_cte(**given | plan, spec=spec("shard_on_i_hybrid", num_static_block=static))

    assert run("last", 0).output.shape == (61, 8)
    with refused(
        ShapeError, "conditions", r'spare_blocks="last", not "split".*num_static_block to 8', got="tokens in block 7"
    ):
        run("split", 0)
    assert torch.equal(run("split", 8).output, run("last", 0).output)


def test_scales_of_another_layout_are_answered_with_what_the_kernel_takes() -> None:
    packed = {"down_proj_scale": torch.ones(E, 128, 1, H, dtype=torch.uint8)}
    with refused(ShapeError, "down_proj_scale", "shard_on_block_mx alone reads packed"):
        moe_cte(**mx_arguments("shard_on_i_mx", inner=1024) | packed)

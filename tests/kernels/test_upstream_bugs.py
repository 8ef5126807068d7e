"""Every known fault of the kernels changes exactly the values that its description names, and nothing by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.kernels import known_bugs
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import ActFnType, ExpertAffinityScaleMode, SkipMode
from hf_neuron_moe.reference.upstream_bugs import BACKWARD, FORWARD
from tests.kernels.test_block_walk import spec, whole_call
from tests.kernels.test_blockwise_walk import whole_call as backward_call
from tests.refusals import refused

Mode = ExpertAffinityScaleMode


def call(kind: str, tokens: int, *, skip_token: bool = False, **change: Any) -> dict[str, Any]:
    """One expert, slots in the order of the tokens, a block for up to 600 of them; whole numbers."""
    if "mx" not in kind:
        given = whole_call("shard_on_i", torch.float32, tokens=4, hidden=32, inner=32)
    else:
        given = whole_call(kind, torch.bfloat16, tokens=4, hidden=512, inner=32)
        given |= {"down_proj_bias": torch.ones(3, 512), "gate_and_up_proj_bias": torch.zeros(3, 8, 2, 1, 4)}
    index, hidden = torch.zeros(tokens, 1, dtype=torch.int64), given["hidden_states"].shape[1]
    plan = build_block_plan(expert_mask(index, 3), 600, top_k=1, skip_token=skip_token)
    x = torch.randint(-1, 2, (tokens, hidden), generator=torch.Generator().manual_seed(0)).float()
    x = x if skip_token else torch.cat([x, torch.zeros(1, hidden)])
    weight = 0.5 ** (torch.arange(tokens) % 7).float()[:, None]
    given |= {
        "hidden_states": x.to(given["hidden_states"].dtype),
        "expert_affinities_masked": masked_affinities(index, weight, 3, skip_token=skip_token),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": 600,
        "skip_dma": SkipMode(skip_token),
        "spec": spec(kind),
    }
    return given | change


def both(given: dict[str, Any], name: str) -> tuple[Tensor, Tensor]:
    """Return the output of the tiles without and with the fault, of the real tokens."""
    assert name in known_bugs("moe_cte", **given)
    tokens = len(given["hidden_states"]) - (not given["skip_dma"].skip_token)
    options: list[dict[str, Any]] = [{"execute": "tiles"}, {"upstream_bugs": (name,)}]
    right, wrong = (moe_cte(**given, **option).output[:tokens] for option in options)
    assert torch.equal(right, moe_cte(**given).output[:tokens])
    return right, wrong


def test_pre_scale_first_tile() -> None:
    given = call("shard_on_i", 600, expert_affinities_scaling_mode=Mode.PRE_SCALE)
    right, wrong = both(given, "pre_scale_first_tile")
    assert torch.equal(right[:512], wrong[:512])
    table = given["expert_affinities_masked"].view(-1, 3).clone()
    table[512:600] = table[:88]
    moved = moe_cte(**given | {"expert_affinities_masked": table.view(-1, 1)}).output[:600]
    assert torch.equal(moved, wrong)
    assert not torch.equal(right[512:], wrong[512:])


def test_no_affinity_bias_first_tile() -> None:
    change = {"expert_affinities_scaling_mode": Mode.NO_SCALE, "is_tensor_update_accumulating": False}
    given = call("shard_on_i", 512, **change)
    given |= {"block_size": 512, "token_position_to_id": torch.arange(512).int()}
    given["block_to_expert"] = torch.zeros(1).int()
    right, wrong = both(given, "no_affinity_bias_first_tile")
    bias_TH = given["down_proj_bias"][0].expand(512, -1).clone()
    bias_TH[:128] = bias_TH[256:384] = 0
    assert torch.equal(right - bias_TH, wrong)


def test_mx_bias_twice() -> None:
    given = call("shard_on_i_mx", 20, accumulation_dtype=torch.float32)
    right, wrong = both(given, "mx_bias_twice")
    once = given["down_proj_bias"][0] * given["expert_affinities_masked"].view(-1, 3)[:20, :1]
    assert torch.equal(right + once, wrong)


def test_skip_token_pre_scale_zero() -> None:
    given = call("shard_on_block", 40, skip_token=True, expert_affinities_scaling_mode=Mode.PRE_SCALE)
    right, wrong = both(given, "skip_token_pre_scale_zero")
    nothing = moe_cte(**given | {"hidden_states": torch.zeros_like(given["hidden_states"])}).output
    assert torch.equal(wrong, nothing) and not torch.equal(right, wrong)


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("shard_on_block", "no_affinity_bias_missing", {"expert_affinities_scaling_mode": Mode.NO_SCALE}),
        ("shard_on_i", "multiply_on_i_no_bias", {"spec": spec("shard_on_i", expert_affinity_multiply_on_I=True)}),
    ],
)
def test_without_the_down_bias(kind: str, name: str, change: dict[str, Any]) -> None:
    given = call(kind, 40, **change)
    right, wrong = both(given, name)
    without = moe_cte(**given | {"down_proj_bias": torch.zeros_like(given["down_proj_bias"])}).output[:40]
    assert torch.equal(wrong, without) and not torch.equal(right, wrong)


def test_last_rows_not_reduced() -> None:
    given = call("shard_on_block", 257, skip_token=True)
    ids = given["token_position_to_id"][:600].clone()
    # The last token in block 0, of core 0, and with another expert in block 1, of core 1.
    given["token_position_to_id"] = torch.cat([ids, torch.full((600,), -1).index_fill(0, torch.tensor([0]), 256)]).int()
    given["block_to_expert"] = torch.tensor([0, 1], dtype=torch.int32)
    table = given["expert_affinities_masked"].view(-1, 3).clone()
    table[256, 1] = 0.5
    given["expert_affinities_masked"] = table.view(-1, 1)
    right, wrong = both(given, "last_rows_not_reduced")
    table[256, 1] = 0
    first = moe_cte(**given | {"expert_affinities_masked": table.view(-1, 1)}).output
    assert torch.equal(wrong, first) and torch.equal(right[:256], wrong[:256]) and not torch.equal(right, wrong)


def test_fp8_scales_ignored() -> None:
    given = call("shard_on_block", 40)
    plain = moe_cte(**given).output[:40]
    given |= {"gate_up_proj_scale": torch.full((3, 1, 64), 0.5), "down_proj_scale": torch.full((3, 1, 32), 2.0)}
    right, wrong = both(given, "fp8_scales_ignored")
    assert torch.equal(wrong, plain) and not torch.equal(right, wrong)


@pytest.mark.parametrize(
    ("name", "change", "same"),
    [
        ("activation_as_silu", {}, {"activation_type": ActFnType.SiLU}),
        ("affinity_on_i_as_on_h", {"affinity_option": "AFFINITY_ON_I"}, {"affinity_option": "AFFINITY_ON_H"}),
        ("affinity_grad_without_bias", {}, {"upstream_affinity_grad": True}),
    ],
)
def test_faults_of_the_backward(name: str, change: dict[str, Any], same: dict[str, Any]) -> None:
    given = backward_call(torch.float32) | change
    assert name in known_bugs("blockwise_mm_bwd", **given)
    wrong, expected, right = (blockwise_mm_bwd(**given | more) for more in ({"upstream_bugs": (name,)}, same, {}))
    assert all(map(torch.equal, wrong, expected)) and not all(map(torch.equal, wrong, right))


def test_device_limits_let_the_faults_be_computed() -> None:
    """PRE_SCALE with a block of 1024 is refused as computed wrongly by the kernel, unless the fault is asked for."""
    given = call("shard_on_i", 600, expert_affinities_scaling_mode=Mode.PRE_SCALE) | {"device_limits": True}
    given |= {"block_size": 1024, "token_position_to_id": torch.arange(1024).clamp(max=600).int()}
    given |= {"block_to_expert": torch.zeros(1).int(), "hidden_states": torch.zeros(601, 512)}
    given |= {"gate_up_proj_weight": torch.zeros(3, 512, 2, 32), "down_proj_weight": torch.zeros(3, 32, 512)}
    given |= {"gate_and_up_proj_bias": torch.zeros(3, 2, 32), "down_proj_bias": torch.zeros(3, 512)}
    moe_cte(**given, upstream_bugs=("pre_scale_first_tile",))


def test_known_bugs_looks_behind_the_limits_that_guard_against_them() -> None:
    given = call("shard_on_i", 600, expert_affinities_scaling_mode=Mode.PRE_SCALE)
    assert known_bugs("moe_cte", **given | {"device_limits": True}) == known_bugs("moe_cte", **given) != ()
    with pytest.raises(TypeError, match=r"moe_cte\(\) got an unexpected keyword argument 'foo'"):
        known_bugs("moe_cte", **given, foo=1)


@pytest.mark.parametrize("names", [("mx_bias_twice",), ("pre_scale",), ["mx_bias_twice"], (1,)])
def test_names_that_do_not_apply(names: Any) -> None:
    given = call("shard_on_i", 4)
    assert known_bugs("moe_cte", **given) == ()
    with refused(ConfigError, "upstream_bugs", where="moe_cte"):
        moe_cte(**given, upstream_bugs=names)
    backward = backward_call(torch.float32) | {"bias": False, "down_proj_bias": None, "activation_type": "Swish"}
    assert known_bugs("blockwise_mm_bwd", **backward) == ()
    with refused(ConfigError, "upstream_bugs", where="blockwise_mm_bwd"):
        blockwise_mm_bwd(**backward, upstream_bugs=names)


def test_known_bugs_of_another_kernel() -> None:
    with refused(ConfigError, "kernel", where="known_bugs"):
        known_bugs("router_topk")


def test_the_golden_convention_has_no_faults() -> None:
    given = call("shard_on_i", 4, expert_affinities_scaling_mode=Mode.NO_SCALE, is_tensor_update_accumulating=False)
    given |= {"block_size": 512, "token_position_to_id": torch.arange(512).clamp(max=4).int()}
    given["block_to_expert"] = torch.zeros(1).int()
    assert known_bugs("moe_cte", **given) == ("no_affinity_bias_first_tile",)
    assert known_bugs("moe_cte", **given, convention="golden") == ()
    assert all(text.startswith("2.29") for text in [*FORWARD.values(), *BACKWARD.values()])

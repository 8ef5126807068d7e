"""The contract double: what differs between releases. Letters: S tokens, H hidden, I intermediate, E experts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import formats, kernels
from tests.neuron.double.contract import ContractError
from tests.neuron.small_runs import EXPERTS_MX, run

Start = Callable[..., SimpleNamespace]
bf16 = torch.bfloat16


def normal(*shape: int) -> Tensor:
    return (torch.randn(shape) * 0.3).to(bf16)


def test_the_backward_of_2_30_takes_the_callers_transposes(machine: Start, hand: Any) -> None:
    machine(release=(2, 30))
    own, inner = hand(), 256
    x, gate_up, down, grad = normal(128, 128), normal(2 * inner, 128), normal(128, inner), normal(128, 128)
    _, gate_pre, up, inter = own.mlp_forward[(2,)](x, gate_up, down, True)
    turned = [w.t().contiguous() for w in (gate_up[:inner], gate_up[inner:], down)]
    rest = [t.t().contiguous() for t in (x, grad, inter)]
    grads = own.mlp_backward_2_30[(2,)](grad, x, *turned, gate_up, *rest, gate_pre, up)
    kept = {"gate_pre": gate_pre, "up": up, "intermediate": inter}
    wanted = kernels.mlp_backward_mxfp8(grad, x, gate_up, down, release="2.30", **kept)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, wanted, strict=True))
    with pytest.raises(ContractError, match="gate_proj_weight_T has K=128"):
        own.mlp_backward_2_30[(2,)](grad, x, turned[0], turned[1], down, gate_up, *rest, gate_pre, up)
    with pytest.raises(ContractError, match=r"mlp_backward_mxfp8_nki of nkilib 2\.30"):
        own.mlp_backward[(2,)](grad, x, gate_up, down, gate_pre, up)


def test_modules_appear_with_their_release(machine: Start) -> None:
    present = {}
    for release in ((2, 29), (2, 30), (2, 31), (2, 33)):
        machine(release=release)
        pair = sys.modules.get("nkilib.experimental.moe_mxfp8")
        present[release] = (
            "nkilib.experimental.mlp_mxfp8" in sys.modules,
            hasattr(pair, "blockwise_mm_bwd_mxfp8"),
            hasattr(pair, "blockwise_mm_fwd_mxfp8"),
        )
    assert present == {
        (2, 29): (False, False, False),
        (2, 30): (True, False, False),
        (2, 31): (True, True, False),
        (2, 33): (True, True, True),
    }


def mx_experts() -> list[Any]:
    tokens, experts, hidden, inner, block = 16, 2, 512, 1024, 256
    weights_TK, index_TK = torch.rand(tokens, experts).softmax(-1).topk(1, -1)
    plan = kernels.build_block_plan(kernels.expert_mask(index_TK, experts), block, top_k=1)
    gate_up = formats.quantize_moe_gate_up(normal(experts, hidden, 2, inner))
    down = formats.quantize_moe_down(normal(experts, inner, hidden))
    return [
        torch.cat([normal(tokens, hidden), torch.zeros(1, hidden, dtype=bf16)]),
        kernels.masked_affinities(index_TK, weights_TK, experts),
        gate_up.words, down.words, gate_up.scales, down.scales,
        plan.token_position_to_id, plan.block_to_expert, block,
    ]  # fmt: skip


def test_the_unified_entry_has_no_branch_for_shard_on_i_mx(machine: Start, hand: Any) -> None:
    machine()
    own, operands = hand(), mx_experts()
    x, affinity, gate_up, down, gate_up_scale, down_scale, ids, owners, block = operands
    out = own.moe_forward_mx[(2,)](*operands, False)
    wanted = kernels.blockwise_mm_shard_intermediate_mx(
        x, affinity, gate_up, down, ids, owners, gate_up_proj_scale=gate_up_scale, down_proj_scale=down_scale,
        block_size=block, expert_affinities_scaling_mode=kernels.ExpertAffinityScaleMode.POST_SCALE,
    )  # fmt: skip
    assert torch.equal(out[:-1], wanted.output[:-1])
    with pytest.raises(ContractError, match="returns its tensors, got NoneType"):
        own.moe_forward_mx[(2,)](*operands, True)
    with pytest.raises(ContractError, match="gate_up_proj_scale has shape"):
        own.moe_forward_mx[(2,)](*operands[:4], down_scale, *operands[5:], False)


def test_mx_experts_need_trn3(machine: Start, hand: Any) -> None:
    machine(target="trn2")
    with pytest.raises(ContractError, match="trn3 only"):
        hand().moe_forward_mx[(2,)](*mx_experts(), False)


def test_a_record_is_for_one_shape(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """nkilib fills in its fields, so each call makes its own."""
    machine()
    run(EXPERTS_MX, "neuron", steps=1)
    wrapper = sys.modules["hf_neuron_moe.backends.neuron.nki_kernels.moe_forward_mxfp8"]
    shared: dict[str, Any] = wrapper.options()
    monkeypatch.setattr(wrapper, "options", shared.copy)
    run(EXPERTS_MX, "neuron", steps=1)
    with pytest.raises(ContractError, match="a record is for one shape"):
        run(replace(EXPERTS_MX, block_size=256), "neuron", steps=1)


def test_grid_and_variable_agree(machine: Start, hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    launch = sys.modules["torch_neuronx"].wrap_nki(hand().mlp_forward)[(2,)]
    operands = normal(128, 128), normal(512, 128), normal(128, 256), True
    assert len(launch(*operands)) == 4
    for value in ("1", None):
        if value is None:
            monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
        else:
            monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", value)
        with pytest.raises(ContractError, match="NCC_EVRF066"):
            launch(*operands)


def test_the_plugin_of_torch_2_14_trains_alike(machine: Start) -> None:
    machine()
    expected = run(EXPERTS_MX, "neuron", steps=2)
    machine(plugin_version="2.14.3")
    assert sys.modules["torch_neuronx"].__version__ == "2.14.3"
    assert run(EXPERTS_MX, "neuron", steps=2) == expected

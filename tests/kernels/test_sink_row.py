"""Without ``skip_token`` the last row of the token tensors is a sink row of zeros, and a call without one is an error.

It would lose its last token without a word: the row's output and gradients would be zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_neuron_moe.errors import ShapeError
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.block_rows import check_sink_row
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.blockwise_mxfp8 import blockwise_mm_bwd_mxfp8, blockwise_mm_fwd_mxfp8
from hf_neuron_moe.reference.moe_cte import moe_cte
from hf_neuron_moe.reference.moe_types import MoECTEImplementation, MoECTESpec, ShardOnIConfig, SkipMode
from tests.kernels import moe_cte_calls
from tests.refusals import Arguments, refused

T, H, I, E, B = 128, 128, 128, 2, 128  # noqa: E741
FIX = r"Append a row of zeros, or pass SkipMode\(skip_token=True\) and a plan built with skip_token=True"
TOKEN_TENSORS = ("hidden_states", "expert_affinities_masked")


def rows_of(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def operands(skip_token: bool = False, experts: int = E) -> Arguments:
    """Arguments of all four functions but for weights and checkpoints, with a sink row unless `skip_token`."""
    index = torch.arange(T)[:, None] % experts
    plan = build_block_plan(expert_mask(index, experts), B, top_k=1, skip_token=skip_token)
    x = rows_of(T, H)
    return {
        "hidden_states": x if skip_token else moe_cte_calls.with_sink_row(x),
        "expert_affinities_masked": masked_affinities(index, torch.rand(T, 1) + 0.5, experts, skip_token=skip_token),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": B,
        "skip_dma": SkipMode(skip_token),
    }


def weights(transposed: bool = True, experts: int = E) -> Arguments:
    shapes = [(H, 2, I), (I, H)] if transposed else [(2, I, H), (H, I)]
    names = ("gate_up_proj_weight", "down_proj_weight")
    return {name: rows_of(experts, *shape) * 0.05 for name, shape in zip(names, shapes, strict=True)}


def backward(given: Arguments, experts: int = E) -> Arguments:
    blocks = len(given["block_to_expert"])
    return given | {
        **weights(experts=experts),
        "gate_up_proj_act_checkpoint_T": rows_of(blocks, 2, I, B),
        "output_hidden_states_grad": torch.randn_like(given["hidden_states"]) * given["hidden_states"].ne(0),
    }


def forward_of(kind: str) -> Callable[[], tuple[Callable[..., Any], Arguments]]:
    make = moe_cte_calls.mx_arguments if kind.endswith(("mx", "mx_hybrid")) else lambda kind: moe_cte_calls.arguments()
    return lambda: (moe_cte, make(kind) | {"spec": MoECTESpec(kind), "device_limits": False})


CALLS: dict[str, Callable[[], tuple[Callable[..., Any], Arguments]]] = {
    **{kind.name: forward_of(kind.name) for kind in MoECTEImplementation},
    "bwd_on_H": lambda: (
        blockwise_mm_bwd,
        backward(operands()) | {"down_proj_act_checkpoint": rows_of(E, B, H)},
    ),
    "bwd_on_I": lambda: (
        blockwise_mm_bwd,
        backward(operands()) | {"down_proj_act_checkpoint": None, "affinity_option": "AFFINITY_ON_I"},
    ),
    "fwd_mxfp8": lambda: (blockwise_mm_fwd_mxfp8, operands() | weights(transposed=False)),
    "bwd_mxfp8": lambda: (blockwise_mm_bwd_mxfp8, backward(operands())),
}


@pytest.mark.parametrize("skip_dma", [SkipMode(), SkipMode(skip_weight=True)], ids=["default", "skip_weight"])
@pytest.mark.parametrize("name", TOKEN_TENSORS)
@pytest.mark.parametrize("call", CALLS)
def test_a_sink_row_that_is_not_zero(call: str, name: str, skip_dma: SkipMode) -> None:
    function, given = CALLS[call]()
    given["skip_dma"] = skip_dma
    given[name] = given[name].clone()
    given[name][-1, 0] = torch.nan if name == "hidden_states" else 0.5
    got = f"row {len(given['hidden_states']) - 1} with nonzero values"
    with refused(ShapeError, name, f"a sink row of zeros as its last row.*{FIX}", got=got, where=function.__name__):
        function(**given)


@pytest.mark.parametrize("call", ["bwd_on_H", "bwd_on_I", "bwd_mxfp8"])
def test_the_output_gradient_of_the_sink_row_has_no_effect(call: str) -> None:
    """The gradient of ``output.sum()`` is one there too; the affinity that it is multiplied by is zero."""
    function, given = CALLS[call]()
    grads = function(**given)
    given["output_hidden_states_grad"][-1] = 1
    assert all(torch.equal(one, two) for one, two in zip(grads, function(**given), strict=True))


def test_documented_shapes_without_a_sink_row() -> None:
    """``[T, H]`` with the default SkipMode, as the documents write it, is an error; skip_token computes all T."""
    given = operands(skip_token=True, experts=1)
    given = backward(given, experts=1) | {"down_proj_act_checkpoint": rows_of(1, B, H)}
    with refused(ShapeError, "hidden_states", FIX):
        blockwise_mm_bwd(**given | {"skip_dma": None})
    grads = blockwise_mm_bwd(**given)
    assert grads.hidden_states_grad[-1].any() and grads.expert_affinities_masked_grad[-1].any()

    forward = {name: given[name] for name in (*operands(), *weights())} | {"device_limits": False}
    spec = MoECTESpec("shard_on_i", shard_on_I=ShardOnIConfig(checkpoint_activation=True))
    with refused(ShapeError, "hidden_states", FIX):
        moe_cte(**forward | {"skip_dma": SkipMode()}, spec=spec)
    assert moe_cte(**forward, spec=spec).output[-1].any()


def test_a_tensor_without_rows_has_no_sink_row() -> None:
    empty = {"hidden_states": torch.zeros(0, H), "expert_affinities_masked": torch.zeros(0, 1)}
    with pytest.raises(ShapeError, match=r"hidden_states must be given with a sink row .*, got no rows"):
        check_sink_row(empty, None)


def test_only_values_that_exist_are_read() -> None:
    """Reading fake and meta tensors raises, and under ``torch.compile`` it would break the graph."""
    ones = {name: torch.ones(T + 1, 1) for name in TOKEN_TENSORS}
    with pytest.raises(ShapeError):
        check_sink_row(ones, None)
    check_sink_row({name: tensor.to("meta") for name, tensor in ones.items()}, None)
    with FakeTensorMode() as mode:
        check_sink_row({name: mode.from_tensor(tensor) for name, tensor in ones.items()}, None)

    def traced(x: Tensor) -> Tensor:
        check_sink_row({"hidden_states": x, "expert_affinities_masked": x}, None)
        return x + 1

    compiled = torch.compile(traced, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ones["hidden_states"]), torch.full((T + 1, 1), 2.0))

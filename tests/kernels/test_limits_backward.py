"""Every limit of the backward, the MXFP8 pair, the MLP and the router as data: just inside, and just outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe import kernels
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments, check_options
from hf_neuron_moe.reference.blockwise_mm_bwd import _checked_rows
from hf_neuron_moe.reference.specification import Constraint, constraints
from tests.kernels.limit_calls import Call, backward_call, filled, options_of, routing, sizes_of
from tests.refusals import refused


def check_backward(call: Call, **limits: Any) -> None:
    """Run the checks of ``blockwise_mm_bwd``."""
    given = BackwardArguments(**call, **limits)
    _checked_rows(given, check_options(given))


def shard_of(release: str) -> Call:
    return {"shard_option": "AUTO" if release == "2.29" else "SHARD_ON_FREE"}


BACKWARD_ROWS = [
    pytest.param(row, release, id=f"{number}-{row.of}-{release}")
    for number, row in enumerate(constraints("blockwise_backward"))
    if row.column == "kernel" and not row.implementations
    for release in row.releases or ("2.29", "2.31")
]


@pytest.mark.parametrize(("row", "release"), BACKWARD_ROWS)
def test_bounds_of_the_backward_kernels(row: Constraint, release: str) -> None:
    inside, outside = sizes_of(row) if row.symbol else options_of(row)
    more = {"B": 128} if row.when == "block_size 128" else {}
    for value in inside:
        pair = {"affinity_option": "AFFINITY_ON_I"} if value == "SHARD_ON_HIDDEN" and release != "2.29" else {}
        change = shard_of(release) | more | pair | {row.symbol or row.of: value}
        check_backward(backward_call(**change), limits="kernel", release=release)
    assert outside
    for value in outside:
        call = backward_call(**shard_of(release) | more | {row.symbol or row.of: value})
        with refused(row.error, row.of, where="blockwise_mm_bwd"):
            kernels.blockwise_mm_bwd(**call, limits="kernel", release=release)


PAIR_ROWS = [row for row in constraints("blockwise_backward") if row.implementations]


@pytest.mark.parametrize("row", PAIR_ROWS, ids=lambda row: row.symbol)
def test_bounds_of_the_mxfp8_pair(row: Constraint) -> None:
    inside, outside = sizes_of(row)
    for size in (*inside, *outside):
        H, I, B = (size if row.symbol == letter else 128 for letter in "HIB")  # noqa: E741
        call = routing(20, H, 2, B) | {
            "gate_up_proj_weight": filled(0, 2, 2, I, H),
            "down_proj_weight": filled(0, 2, H, I),
        }
        backward = call | {
            "gate_up_proj_weight": filled(0, 2, H, 2, I),
            "down_proj_weight": filled(0, 2, I, H),
            "gate_up_proj_act_checkpoint_T": filled(0, len(call["block_to_expert"]), 2, I, B),
            "output_hidden_states_grad": filled(0, 21, H),
        }
        for function, given in ((kernels.blockwise_mm_fwd_mxfp8, call), (kernels.blockwise_mm_bwd_mxfp8, backward)):
            if size in inside:
                assert function(**given)[0].shape == (21, H)
                continue
            with refused(row.error, row.of, where=function.__name__):
                function(**given)


def test_bounds_of_the_backward_page() -> None:
    outside: dict[str, Call] = {
        "block_size": backward_call(B=2048),
        "H of hidden_states": backward_call(H=127),
        "shard_option": backward_call(shard_option="SHARD_ON_FREE"),
        "activation_type": backward_call(activation_type="SquaredReLU"),
        "kernel_type_option": backward_call(kernel_type_option="DROPPING"),
        "down_proj_act_checkpoint": backward_call(down_proj_act_checkpoint=None, affinity_option="AFFINITY_ON_I"),
        "hidden_states": backward_call(hidden_states=filled(0, 21, 128, dtype=torch.float32)),
    }
    rows = {row.of: row for row in constraints("blockwise_backward") if row.column == "documented"}
    assert outside.keys() == rows.keys()
    for size in (128, 1024):
        check_backward(backward_call(B=size), limits="documented")
    for activation in ("SiLU", "Swish"):
        for shard in ("AUTO", "SHARD_ON_HIDDEN", "SHARD_ON_INTERMEDIATE"):
            call = backward_call(shard_option=shard, activation_type=activation)
            check_backward(call, limits="documented")
    check_backward(backward_call(affinity_option="AFFINITY_ON_I"), limits="documented")
    for of, call in outside.items():
        with refused(rows[of].error, of):
            kernels.blockwise_mm_bwd(**call | {"affinity_option": "AFFINITY_ON_I"}, limits="documented")
        if of not in ("H of hidden_states", "kernel_type_option"):  # which the kernels bound too
            check_backward(call | {"shard_option": "SHARD_ON_FREE"}, limits="kernel")


def test_an_activation_is_reported_before_other_limits() -> None:
    with refused(ConfigError, "activation_type", "2.31"):
        kernels.blockwise_mm_bwd(**backward_call(activation_type="GELU", H=96))


MLP_CALLS = {
    "S": lambda size: (kernels.mlp_forward_mxfp8, filled(0, size, 128), filled(0, 256, 128), filled(0, 128, 128)),
    "H": lambda size: (kernels.mlp_forward_mxfp8, filled(0, 16, size), filled(0, 256, size), filled(0, size, 128)),
    "I": lambda size: (kernels.mlp_forward_mxfp8, filled(0, 16, 128), filled(0, 2 * size, 128), filled(0, 128, size)),
}


@pytest.mark.parametrize("row", constraints("mlp_forward"), ids=lambda row: f"{row.symbol}-{row.multiple_of}")
def test_sizes_of_the_mlp_forward(row: Constraint) -> None:
    function, *operands = MLP_CALLS[row.symbol](row.multiple_of * (1 if row.when == "" else 8))
    assert function(*operands).output.shape == operands[0].shape
    function, *operands = MLP_CALLS[row.symbol](row.multiple_of + row.multiple_of // 2)
    of = row.of if row.symbol != "H" else "H of hidden"
    with refused(row.error, of):
        if row.when == "run_with_lnc2":
            kernels.mlp_forward_mxfp8_nki(*operands, torch.zeros(3, 128).bfloat16())
        function(*operands)


@pytest.mark.parametrize("row", constraints("mlp_backward"), ids=lambda row: row.symbol)
def test_sizes_of_the_mlp_backward(row: Constraint) -> None:
    for size in (row.multiple_of, row.multiple_of + row.multiple_of // 2):
        S, H, I = (size if row.symbol == letter else 128 for letter in "SHI")  # noqa: E741
        operands = (filled(0, S, H), filled(0, S, H), filled(0, 2 * I, H), filled(0, H, I))
        if size == row.multiple_of:
            assert kernels.mlp_backward_mxfp8(*operands)[0].shape == (S, H)
            continue
        with refused(row.error, row.of):
            kernels.mlp_backward_mxfp8(*operands)


@pytest.mark.parametrize("row", constraints("router"), ids=lambda row: f"{row.symbol}-{row.when}")
def test_bounds_of_the_router(row: Constraint) -> None:
    inside, outside = sizes_of(row)
    if row.applies_from:  # below, every size fits
        inside, outside = [row.applies_from - 1, 2 * row.multiple_of], [row.applies_from]
    options = {row.when: True} if row.when else {}
    for size in (*inside, *outside):
        T, H, E = (size if row.symbol == letter else least for letter, least in (("T", 8), ("H", 128), ("E", 16)))
        call = {"x": filled(0, T, H), "w": filled(0, H, E), "act_fn": "SOFTMAX", "k": size if row.symbol == "K" else 1}
        if size in inside:
            kernels.router_topk(**call, **options)
            continue
        with refused(row.error, row.of, where="router_topk"):
            kernels.router_topk(**call, **options)
        kernels.router_topk(**call, **options, device_limits=False)

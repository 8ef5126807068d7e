"""Every limit of ``moe_cte`` as data: a call just inside passes the checks, one just outside is an error.

Calls inside are stopped where the checks end, because the largest ones would take long.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe import kernels
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.kernels import release_2_30
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_problem import check_arguments
from hf_neuron_moe.reference.specification import FAMILIES, Constraint, constraints
from tests.kernels.limit_calls import ALL, Call, backward_call, filled, moe_call, options_of, page_call, sizes_of
from tests.kernels.moe_cte_calls import spec
from tests.refusals import refused


def with_option(call: Call, of: str, value: Any) -> Call:
    """A call of ``moe_cte`` with an option, which rows name with dots, set."""
    if of.startswith("spec."):
        return call | {"spec": spec(call["spec"].implementation.name, **{of.split(".")[2]: value})}
    if of == "skip_dma.skip_weight":
        return call | {"skip_dma": kernels.SkipMode(skip_weight=value)}
    if of == "gate_up_proj_scale":
        return call | {of: value, "down_proj_scale": None if value is None else torch.ones(2, 1, 512)}
    return call | {of: value}


def moe_calls(row: Constraint, kind: str) -> tuple[list[Call], list[Call]]:
    """Calls inside and outside of a row's bounds."""
    make = moe_call if row.column == "kernel" else page_call
    if row.symbol:
        mode = {"expert_affinities_scaling_mode": row.when} if row.when == "PRE_SCALE" else {}
        inside, outside = ([make(kind, **{row.symbol: size}) | mode for size in some] for some in sizes_of(row))
    else:
        inside, outside = ([with_option(make(kind), row.of, value) for value in some] for some in options_of(row))
    return inside, outside


MOE_ROWS = [
    pytest.param(row, kind, id=f"{number}-{row.of}-{kind}")
    for number, row in enumerate(constraints("moe_cte"))
    if row.column == "kernel"
    for kind in row.implementations or ALL
]
PAGE_KINDS = {"H": "shard_on_i_mx"}  # which has no largest H of its own; the others have the fewest bounds
PAGE_ROWS = [row for row in constraints("moe_cte") if row.column == "documented"]


@pytest.mark.parametrize(("row", "kind"), MOE_ROWS)
def test_bounds_of_the_kernels(row: Constraint, kind: str) -> None:
    inside, outside = moe_calls(row, kind)
    assert inside and (outside or row.multiple_of == 32)  # other words than of 32 do not exist
    for call in inside:
        check_arguments(Arguments(**call, limits="kernel"))
    for call in outside:
        with refused(row.error, row.of, where="moe_cte"):
            kernels.moe_cte(**call, limits="kernel")


@pytest.mark.parametrize("row", [row for row in PAGE_ROWS if row.symbol], ids=lambda row: row.of)
def test_sizes_of_the_page(row: Constraint) -> None:
    inside, outside = moe_calls(row, PAGE_KINDS.get(row.symbol, "shard_on_block"))
    assert inside and outside
    for call in inside:
        check_arguments(Arguments(**call, limits="documented"))
    for call in outside:
        with refused(row.error, row.of, where="moe_cte"):
            kernels.moe_cte(**call, limits="documented")


def test_figures_of_the_pages() -> None:
    """Copied from the documents' lists of constraints by hand."""
    figures = {row.symbol: (row.multiple_of, row.minimum, row.maximum) for row in PAGE_ROWS if row.symbol}
    assert figures == {
        "B": (256, 256, 1024),
        "T": (1, 1, 32 * 1024),
        "H": (512, 512, 8192),
        "I": (16, 2048, 16384),
        "E": (1, 8, 64),
    }
    block, hidden = (row for row in constraints("blockwise_backward") if row.symbol and row.column == "documented")
    assert (block.one_of, hidden.multiple_of) == ((128, 256, 512, 1024), 2)


DTYPES: dict[str, Call] = {
    "hidden_states": {"hidden_states": filled(0, 257, 512, dtype=torch.float32)},
    "expert_affinities_masked": {"expert_affinities_masked": filled(0, 257 * 8, 1, dtype=torch.float32)},
    "gate_up_proj_weight": {
        "gate_up_proj_weight": filled(0, 8, 512, 2, 2048, dtype=torch.float32),
        "down_proj_weight": filled(0, 8, 2048, 512, dtype=torch.float32),
    },
    "gate_and_up_proj_bias": {
        "gate_and_up_proj_bias": filled(0, 8, 2, 2048, dtype=torch.float32),
        "down_proj_bias": filled(0, 8, 512),
    },
    "down_proj_bias": {
        "gate_and_up_proj_bias": filled(0, 8, 2, 2048),
        "down_proj_bias": filled(0, 8, 512, dtype=torch.float32),
    },
    "accumulation_dtype": {"accumulation_dtype": torch.float32},
    "token_position_to_id": {"token_position_to_id": page_call("shard_on_block")["token_position_to_id"].long()},
    "block_to_expert": {"block_to_expert": page_call("shard_on_block")["block_to_expert"].long()},
}
"""What each row about a dtype excludes. The two weights have one dtype: the first row speaks for both."""


def test_dtypes_of_the_page() -> None:
    rows = [row for row in PAGE_ROWS if row.same_as or row.dtypes]
    assert {row.of for row in rows} == {*DTYPES, "down_proj_weight"}
    within = page_call("shard_on_block")
    biases = {"gate_and_up_proj_bias": filled(0, 8, 2, 2048), "down_proj_bias": filled(0, 8, 512)}
    for call in (within, within | biases, within | {"accumulation_dtype": torch.bfloat16}):
        check_arguments(Arguments(**call, limits="documented"))
    for of, change in DTYPES.items():
        check_arguments(Arguments(**within | change, limits="kernel"))
        with refused(next(row.error for row in rows if row.of == of), of):
            kernels.moe_cte(**within | change, limits="documented")
    static = {"gate_up_proj_weight": filled(0, 8, 512, 2, 2048, dtype=torch.float8_e4m3fn)}  # not held to one dtype
    static |= {"down_proj_weight": filled(0, 8, 2048, 512, dtype=torch.float8_e4m3fn)}
    static |= {"gate_up_proj_scale": torch.ones(8, 1, 4096), "down_proj_scale": torch.ones(8, 1, 512)}
    check_arguments(Arguments(**page_call("shard_on_i") | static, limits="documented"))


def test_words_of_the_page() -> None:
    (row,) = (row for row in PAGE_ROWS if row.one_of)
    for kind in row.implementations:
        within = page_call(kind)
        for dtype in (None, torch.float8_e4m3fn):
            check_arguments(Arguments(**with_option(within, row.of, dtype), limits="documented"))
        outside = with_option(within, row.of, torch.float8_e5m2)
        check_arguments(Arguments(**outside, limits="kernel"))
        with refused(row.error, row.of):
            kernels.moe_cte(**outside, limits="documented")


def test_limits_and_device_limits_agree_or_contradict() -> None:
    wide = {"hidden_states": filled(0, 129, 512, dtype=torch.float32)}
    call = moe_call("shard_on_i", B=128) | wide
    for option in ({"limits": "kernel"}, {"device_limits": True}, {"limits": "kernel", "device_limits": True}):
        with refused(ShapeError, "block_size of the plan"):
            kernels.moe_cte(**call, **option)
    for option in ({}, {"device_limits": False}, {"limits": None}):
        check_arguments(Arguments(**call, **option))
    for function, given in ((kernels.moe_cte, call), (kernels.blockwise_mm_bwd, backward_call())):
        with refused(ConfigError, "device_limits"):
            function(**given, limits="documented", device_limits=False)
        with refused(ConfigError, "limits"):
            function(**given, limits="document")


def test_every_function_of_the_documents_has_limits() -> None:
    call = moe_call("shard_on_i")
    plain = {name: value for name, value in call.items() if name not in ("spec", "conditions")}
    functions = {
        kernels.moe_cte: call,
        release_2_30.moe_cte: call,
        kernels.blockwise_mm_baseline_shard_intermediate: plain,
    }
    for function, given in functions.items():
        assert function(**given, limits="kernel") is not None
        with refused(next(row.error for row in PAGE_ROWS if row.symbol == "T"), "I of gate_up_proj_weight"):
            function(**given, limits="documented")
    for function in (kernels.blockwise_mm_bwd, release_2_30.blockwise_mm_bwd):
        with refused(ConfigError, "kernel_type_option"):
            function(**backward_call(kernel_type_option="DROPPING"), limits="documented")


def test_documented_values_that_no_kernel_has_say_so() -> None:
    """Asked for by the page's words, and listed with the reason."""
    call, backward = moe_call("shard_on_i"), backward_call(shard_option="SHARD_ON_FREE")
    direct = {name: value for name, value in call.items() if name not in ("spec", "conditions")}
    for module in (kernels, release_2_30):
        for function, given, name in (
            (module.moe_cte, call, "activation_function"),
            (module.blockwise_mm_bwd, backward, "activation_type"),
            (kernels.blockwise_mm_baseline_shard_intermediate, direct, "activation_function"),
        ):
            with refused(ConfigError, name, "names ReLU, but no kernel has it", got="ReLU"):
                function(**given | {name: "ReLU"})
            half = {"hidden_states": given["hidden_states"].half()}
            for limits in ({}, {"limits": "documented"}):
                with refused(DTypeError, "hidden_states", "lists float16, but", got="float16"):
                    function(**given | half, **limits)


def test_rows_are_whole() -> None:
    """Every row bounds something, and says where its figure comes from."""
    for name in FAMILIES:
        for row in constraints(name):
            assert row.column in ("documented", "kernel") and row.source and row.words
            assert row.column == "kernel" or "page" in row.source
            assert row.multiple_of > 1 or row.maximum or row.one_of or row.dtypes or row.same_as
            assert set(row.implementations) <= {*ALL, "MXFP8 pair"} and set(row.releases) <= {"2.29", "2.31"}

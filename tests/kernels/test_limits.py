"""Every row of the specification's constraints: a call just inside passes the checks, one just outside is an error.

Operands are expanded from one element, because the documents' sizes go up to gigabytes and an error comes before any
product. So does the end of the checks, which is where a call inside is stopped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import kernels
from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.kernels import release_2_30
from hf_neuron_moe.reference.blockwise_arguments import BackwardArguments, check_options
from hf_neuron_moe.reference.blockwise_mm_bwd import _checked_rows
from hf_neuron_moe.reference.moe_cte_arguments import Arguments
from hf_neuron_moe.reference.moe_cte_problem import check_arguments
from hf_neuron_moe.reference.moe_types import MoECTEImplementation
from hf_neuron_moe.reference.specification import FAMILIES, Constraint, constraints
from tests.kernels.moe_cte_calls import spec
from tests.refusals import refused

Call = dict[str, Any]
ALL = tuple(kind.name for kind in MoECTEImplementation)
MX = {kind for kind in ALL if "mx" in kind}
MEMBERS = {
    "activation_function": [each.name for each in kernels.ActFnType],
    "activation_type": [each.name for each in kernels.ActFnType],
    "expert_affinities_scaling_mode": [each.name for each in kernels.ExpertAffinityScaleMode],
    "kernel_type_option": ["DROPLESS", "DROPPING"],
    "shard_option": [*kernels.ShardOption.__members__, *kernels.ShardOption229.__members__],
    "affinity_option": ["AFFINITY_ON_H", "AFFINITY_ON_I"],
}


def filled(value: float, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((), value, dtype=dtype).expand(shape)


def routing(T: int, H: int, E: int, B: int) -> Call:
    index = (torch.arange(T) % E)[:, None]
    plan = build_block_plan(expert_mask(index, E), B, top_k=1)
    return {
        "hidden_states": filled(0, T + 1, H),
        "expert_affinities_masked": masked_affinities(index, torch.full((T, 1), 0.5).bfloat16(), E),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": B,
    }


def moe_call(kind: str, *, T: int = 128, H: int = 512, I: int = 0, E: int = 2, B: int = 0) -> Call:  # noqa: E741
    """A call that the kernel of `kind` takes, but for the sizes that are given."""
    I = I or (1024 if "shard_on_i_mx" in kind else 64)  # noqa: E741
    given = routing(T, H, E, B or (1024 if kind == "shard_on_i_dropping" else 256)) | {"spec": spec(kind)}
    blocks = len(given["block_to_expert"])
    given["conditions"] = torch.tensor([1] * blocks + [0] * (2 if kind == "shard_on_block_mx" else 1))
    partitions, tiles, byte = min(128, I // 4), -(-I // 512), {"dtype": torch.uint8}
    if kind.endswith(("mx", "mx_hybrid")):
        return given | {
            "gate_up_proj_weight": filled(0, E, 128, 2, H // 512, I, dtype=torch.int32),
            "gate_up_proj_scale": filled(127, E, 16, 2, H // 512, I, **byte),
            "down_proj_weight": filled(0, E, partitions, tiles, H, dtype=torch.int32),
            "down_proj_scale": filled(127, E, partitions // 8, tiles, H, **byte),
        }
    return given | {"gate_up_proj_weight": filled(0, E, H, 2, I), "down_proj_weight": filled(0, E, I, H)}


def page_call(kind: str, **sizes: int) -> Call:
    """A call within the bounds of the page."""
    return moe_call(kind, **{"I": 2048, "E": 8, "T": 256} | sizes)


def sizes_of(row: Constraint) -> tuple[list[int], list[int]]:
    """Sizes just inside and just outside of a row's bounds."""
    if row.one_of:
        known = sorted(int(str(size)) for size in row.one_of)
        return known, [known[0] // 2, known[-1] * 2, known[0] + known[1] // 4]
    if row.symbol == "I" and row.implementations and set(row.implementations) <= MX:  # its words hold whole MX groups
        first = max(row.applies_from, row.multiple_of)
        return [first, first + row.multiple_of], [first + 32] if row.multiple_of > 32 else []
    step = row.multiple_of
    first = max(row.minimum, step)
    inside, outside = [first], [] if step == 1 else [first + step // 2]
    if row.minimum > 1:
        outside.append(row.minimum - step)
    if row.maximum is not None:
        beyond = row.maximum + max(step, {"B": 256, "T": 128}.get(row.symbol, 1))  # what the kernels take
        inside, outside = [*inside, row.maximum], [*outside, beyond]
    return [size for size in inside if size > 1], [size for size in outside if size > 0]


def options_of(row: Constraint) -> tuple[list[Any], list[Any]]:
    """Values of an option within and outside of a row's list."""
    if row.one_of == (False,):
        return [False], [True]
    if row.one_of == ("None",):
        return [None], [torch.ones(2, 1, 128)]
    return list(row.one_of), [name for name in dict.fromkeys(MEMBERS[row.of]) if name not in row.one_of]


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


def backward_call(**changes: Any) -> Call:
    """A call of ``blockwise_mm_bwd`` that the kernels of both releases take, with sizes and options changed."""
    T, E = 20, 2
    H, I, B = (changes.pop(name, size) for name, size in (("H", 128), ("I", 64), ("B", 256)))  # noqa: E741
    given = routing(T, H, E, B)
    blocks = len(given["block_to_expert"])
    return given | {
        "gate_up_proj_weight": filled(0, E, H, 2, I),
        "down_proj_weight": filled(0, E, I, H),
        "gate_up_proj_act_checkpoint_T": filled(0, blocks, 2, I, B),
        "down_proj_act_checkpoint": filled(0, blocks, B, H),
        "output_hidden_states_grad": filled(0, T + 1, H),
        **changes,
    }


def check_backward(call: Call, **limits: Any) -> None:
    """Run the checks of ``blockwise_mm_bwd``."""
    given = BackwardArguments(**call, **limits)
    _checked_rows(given, check_options(given))


def shard_of(release: str) -> Call:
    return {"shard_option": "AUTO" if release == "2.29" else "SHARD_ON_FREE"}


BACKWARD_ROWS = [
    pytest.param(row, release, id=f"{number}-{row.of}-{release}")
    for number, row in enumerate(constraints("blockwise_backward"))
    if row.column == "kernel"
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


def test_bounds_of_the_backward_page() -> None:
    outside: dict[str, Call] = {
        "block_size": backward_call(B=2048),
        "H of hidden_states": backward_call(H=127),
        "kernel_type_option": backward_call(kernel_type_option="DROPPING"),
        "down_proj_act_checkpoint": backward_call(down_proj_act_checkpoint=None, affinity_option="AFFINITY_ON_I"),
        "hidden_states": backward_call(hidden_states=filled(0, 21, 128, dtype=torch.float32)),
    }
    rows = {row.of: row for row in constraints("blockwise_backward") if row.column == "documented"}
    assert outside.keys() == rows.keys()
    for size in (128, 1024):
        check_backward(backward_call(B=size, shard_option="SHARD_ON_FREE"), limits="documented")
    check_backward(backward_call(affinity_option="AFFINITY_ON_I"), limits="documented")
    for of, call in outside.items():
        with refused(rows[of].error, of):
            kernels.blockwise_mm_bwd(**call | {"shard_option": "SHARD_ON_FREE"}, limits="documented")
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


def test_rows_are_whole() -> None:
    """Every row bounds something, and says where its figure comes from."""
    for name in FAMILIES:
        for row in constraints(name):
            assert row.column in ("documented", "kernel") and row.source and row.words
            assert row.column == "kernel" or "page" in row.source
            assert row.multiple_of > 1 or row.maximum or row.one_of or row.dtypes or row.same_as
            assert set(row.implementations) <= set(ALL) and set(row.releases) <= {"2.29", "2.31"}

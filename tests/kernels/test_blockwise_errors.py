"""Every rule of ``blockwise_mm_bwd`` broken once: the error names the argument and the rule."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, DeviceError, DTypeError, NeuronMoEError, NeuronMoEWarning, ShapeError
from hf_neuron_moe.formats.block_plan import build_block_plan, expert_mask, masked_affinities
from hf_neuron_moe.reference.blockwise_mm_bwd import blockwise_mm_bwd
from hf_neuron_moe.reference.moe_types import (
    ClampLimits,
    DownProjOutputGradBlocking,
    HiddenGradBlocking,
    ShardOption229,
)
from tests.kernels.moe_cte_calls import with_sink_row
from tests.refusals import Arguments, BrokenCall, Case, bf16, message_of, named

T, H, I, E, B = 20, 128, 64, 3, 128  # noqa: E741


def arguments_of(hidden: int = H, inner: int = I, block: int = B, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    index = torch.arange(2 * T).view(T, 2) % E
    plan = build_block_plan(expert_mask(index, E), block, top_k=2)
    blocks = len(plan.block_to_expert)
    shapes = {
        "gate_up_proj_weight": (E, hidden, 2, inner),
        "down_proj_weight": (E, inner, hidden),
        "gate_up_proj_act_checkpoint_T": (blocks, 2, inner, block),
        "down_proj_act_checkpoint": (blocks, block, hidden),
    }
    tokens = dict.fromkeys(("hidden_states", "output_hidden_states_grad"), torch.ones(T, hidden, dtype=dtype))
    return {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()} | {
        **{name: with_sink_row(rows) for name, rows in tokens.items()},
        "expert_affinities_masked": masked_affinities(index, torch.full((T, 2), 0.5), E),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": block,
    }


def buffers(**changes: Tensor) -> Arguments:
    good = {
        "hidden_states_grad_out": bf16(T + 1, H),
        "expert_affinities_masked_grad_out": torch.ones((T + 1) * E, 1),
        "gate_up_proj_weight_grad_out": bf16(E, H, 2, I),
        "down_proj_weight_grad_out": bf16(E, I, H),
    }
    return good | changes | {"skip_grad_initialization": True, "shard_option": "SHARD_ON_FREE"}


OPERANDS: list[Case] = [
    (ConfigError, "down_proj_act_checkpoint", {"down_proj_act_checkpoint": None}),
    (ShapeError, "down_proj_bias", {"down_proj_bias": bf16(H)}),
    (DTypeError, "down_proj_bias", {"down_proj_bias": [0.0]}),
    (
        DTypeError,
        "output_hidden_states_grad",
        {"output_hidden_states_grad": None},
    ),
    (ShapeError, "hidden_states", {"hidden_states": bf16(T + 1, H)}),
    (ShapeError, "expert_affinities_masked", {"expert_affinities_masked": torch.ones((T + 1) * E, 1)}),
    (ShapeError, "token_position_to_id", {"token_position_to_id": torch.zeros(3, dtype=torch.int32)}),
    (ShapeError, "token_position_to_id", {"ids": T + 1}),
    (ShapeError, "token_position_to_id", {"ids": 6}),
    (ShapeError, "block_to_expert", {"block_to_expert": torch.tensor([0, 1, 3])}),
    (ShapeError, "block_to_expert", {"block_to_expert": torch.tensor([0, 1, -1])}),
]
OPTIONS: list[Case] = [
    (ConfigError, "shard_option", {"shard_option": "SHARD"}),
    (ConfigError, "affinity_option", {"affinity_option": 1}),
    (ConfigError, "kernel_type_option", {"kernel_type_option": "DROP"}),
    (ConfigError, "activation_type", {"activation_type": "ReLU"}),
    (ConfigError, "clamp_limits", {"clamp_limits": (7, -7, 7, -7)}),
    (ConfigError, "skip_dma", {"skip_dma": True}),
    (ConfigError, "bias", {"bias": bf16(E, H)}),
    *(
        (ConfigError, name, {name: "no"})
        for name in (
            "is_tensor_update_accumulating",
            "skip_grad_initialization",
            "skip_gate_proj",
            "upstream_affinity_grad",
            "device_limits",
        )
    ),
    (ConfigError, "blocking_params", {"blocking_params": 3}),
    (ConfigError, "blocking_params", {"blocking_params": (HiddenGradBlocking(block_h=0),)}),
    (ConfigError, "compute_dtype", {"compute_dtype": torch.float16}),
    (ConfigError, "convention", {"convention": "numpy"}),
    (ConfigError, "release", {"release": "2.30"}),
    (ShapeError, "block_size", {"block_size": 128.0}),
    (ShapeError, "block_tile_size", {"block_tile_size": 0}),
    (ShapeError, "block_tile_size", {"block_tile_size": 48}),
    (
        ShapeError,
        "block_to_expert",
        {"kernel_type_option": "DROPPING", "block_to_expert": torch.tensor([0, 2, 1]), "device_limits": False},
    ),
    (ConfigError, "is_tensor_update_accumulating", {"is_tensor_update_accumulating": False}),
]
BUFFERS: list[Case] = [
    (ConfigError, "accumulation_dtype",
     buffers(hidden_states_grad_out=torch.ones(T + 1, H)) | {"accumulation_dtype": torch.bfloat16}),
    (ConfigError, "accumulation_dtype", buffers() | {"accumulation_dtype": torch.float16}),
    (ConfigError, "skip_grad_initialization",
     {**buffers(), "down_proj_weight_grad_out": None}),
    (ShapeError, "down_proj_weight_grad_out",
     buffers(down_proj_weight_grad_out=bf16(E, H, I))),
    (ShapeError, "gate_up_proj_weight_grad_out",
     buffers(gate_up_proj_weight_grad_out=bf16(E, 2, I, H).permute(0, 3, 1, 2))),
    (DTypeError, "hidden_states_grad_out",
     buffers(hidden_states_grad_out=torch.ones(T + 1, H).half())),
    (DeviceError, "down_proj_weight_grad_out",
     buffers(down_proj_weight_grad_out=bf16(E, I, H).to("meta"))),
]  # fmt: skip
LIMITS: list[Case] = [
    (ConfigError, "shard_option", {"release": "2.31"}),
    (ConfigError, "shard_option", {"shard_option": "AUTO", "release": "2.31"}),
    (ConfigError, "shard_option",
     {"shard_option": ShardOption229.BASELINE_LNC1, "affinity_option": "AFFINITY_ON_I"}),
    (ConfigError, "shard_option", {"shard_option": "SHARD_ON_BLOCK", "release": "2.29"}),
    (ConfigError, "affinity_option",
     {"affinity_option": "AFFINITY_ON_I", "release": "2.29"}),
    (ConfigError, "accumulation_dtype",
     {"accumulation_dtype": torch.float32, "release": "2.29"}),
    (ConfigError, "skip_gate_proj", {"skip_gate_proj": True, "release": "2.29"}),
    (ConfigError, "activation_type",
     {"activation_type": "SquaredReLU", "release": "2.29"}),
    (ConfigError, "activation_type",
     {"activation_type": "GELU", "shard_option": "SHARD_ON_FREE"}),
    (ShapeError, "block_size",
     {"small_block": 64, "shard_option": "SHARD_ON_FREE"}),
    (ShapeError, "block_size", {"small_block": 2048, "release": "2.29"}),
    (ShapeError, "H of hidden_states", {"hidden": 96}),
    (ShapeError, "I of gate_up_proj_weight", {"inner": 96, "small_block": 256}),
    (ShapeError, "I of gate_up_proj_weight", {"inner": 96, "release": "2.29"}),
    (ShapeError, "I of gate_up_proj_weight",
     {"inner": 33, "shard_option": "SHARD_ON_FREE"}),
    (ConfigError, "clamp_limits.linear_clamp_upper_limit", {"clamp_limits": ClampLimits(0.7)}),
    (ConfigError, "kernel_type_option",
     {"kernel_type_option": "DROPPING", "dropping": True}),
    *(
        (ConfigError, "kernel_type_option",
         {"kernel_type_option": "DROPPING", "dropping": True, "release": release, "shard_option": shard})
        for release, shard in (("2.29", "AUTO"), ("2.31", "SHARD_ON_FREE"))
    ),
]  # fmt: skip


def change(change: Arguments) -> Arguments:
    change = dict(change)
    shape = {"hidden": change.pop("hidden", H), "inner": change.pop("inner", I), "block": change.pop("small_block", B)}
    arguments = arguments_of(**shape)
    if change.pop("dropping", False):
        assert arguments["block_to_expert"].tolist() == list(range(E))  # which is a dropping plan too
    if "ids" in change:
        arguments["token_position_to_id"] = arguments["token_position_to_id"].clone()
        arguments["token_position_to_id"][0] = change.pop("ids")
    return arguments | change


CALLS = named(
    BrokenCall(blockwise_mm_bwd, functools.partial(change, spoiled), kind, argument, {})
    for kind, argument, spoiled in (*OPERANDS, *OPTIONS, *BUFFERS, *LIMITS)
)


@pytest.mark.parametrize("call", CALLS)
def test_refused(call: BrokenCall) -> None:
    call.check()


@pytest.mark.parametrize(("kind", "argument", "spoiled"), [case for case in LIMITS if "release" not in case[2]])
def test_limits_are_the_devices_and_not_the_mathematics(
    kind: type[NeuronMoEError], argument: str, spoiled: Arguments
) -> None:
    """Lifted by device_limits=False, absent in fp32, and there on request."""
    arguments = change(spoiled)
    assert blockwise_mm_bwd(**arguments, device_limits=False)[0].shape == arguments["hidden_states"].shape
    arguments = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    assert blockwise_mm_bwd(**arguments)[0].dtype == torch.float32
    if "clamp_limits" not in spoiled:  # fp32 checkpoints hold any limit
        message_of(kind, argument, blockwise_mm_bwd, **arguments, device_limits=True)


@pytest.mark.parametrize(
    "accepted",
    [
        {},
        {"blocking_params": HiddenGradBlocking(), "shard_option": "SHARD_ON_FREE"},
        {"blocking_params": {"a": HiddenGradBlocking(), "b": None}, "shard_option": "SHARD_ON_FREE"},
        {"blocking_params": [DownProjOutputGradBlocking(4)], "shard_option": "SHARD_ON_FREE"},
        buffers(),
        {"shard_option": "SHARD_ON_FREE", "release": "2.31"},
        {"affinity_option": "AFFINITY_ON_I", "release": "2.31"},
        {"shard_option": ShardOption229.SHARD_ON_HIDDEN, "release": "2.29"},
        {"inner": 96, "affinity_option": "AFFINITY_ON_I"},
        {"small_block": 4096, "shard_option": "SHARD_ON_BLOCK"},
        {"activation_type": "SquaredReLU", "shard_option": "SHARD_ON_FREE"},
        {"clamp_limits": ClampLimits(7.0, -7.0, 7.0, None), "activation_type": "Swish"},
    ],
)
def test_documented_calls_are_accepted(accepted: Arguments) -> None:
    assert len(blockwise_mm_bwd(**change(accepted))) == 4


@pytest.mark.parametrize("option", ["AFFINITY_ON_H", "AFFINITY_ON_I"])
def test_a_missing_down_bias_is_said(option: str) -> None:
    """The documented call has no place for it: it gives upstream's affinity gradient, and says that this lacks it."""
    arguments = arguments_of() | {"affinity_option": option, "bias": True}
    with pytest.warns(NeuronMoEWarning, match="lacks the down bias. Pass down_proj_bias .*upstream_affinity_grad=True"):
        warned = blockwise_mm_bwd(**arguments)
    meant = blockwise_mm_bwd(**arguments, upstream_affinity_grad=True)
    assert len(meant) == 6 and all(torch.equal(a, b) for a, b in zip(warned, meant, strict=True))
    right = blockwise_mm_bwd(**arguments, down_proj_bias=bf16(E, H))
    assert not torch.equal(right.expert_affinities_masked_grad, meant.expert_affinities_masked_grad)


def test_a_checkpoint_with_the_bias_in_it_needs_no_down_bias() -> None:
    arguments = arguments_of() | {"bias": True, "convention": "golden"}
    assert len(blockwise_mm_bwd(**arguments)) == 6
    with pytest.warns(NeuronMoEWarning, match="lacks the down bias"):
        blockwise_mm_bwd(**arguments | {"affinity_option": "AFFINITY_ON_I"})


def test_repeated_calls_give_the_same_bits_and_keep_their_arguments() -> None:
    torch.manual_seed(0)
    arguments = {
        name: (torch.randn_like(value.float()) * (value != 0)).to(value.dtype)  # a sink row stays zero
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments_of().items()
    }
    kept = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    first, second = (blockwise_mm_bwd(**arguments) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    assert all(torch.equal(arguments[name], value) for name, value in kept.items())

"""The MXFP8 MLP's tile configurations: recorded tables, automatic rules, records, and that they are only recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.kernels import (
    ClampLimits,
    MatmulMxfp8KernelConfig,
    MlpBwdConfig,
    MlpBwdMatmulConfig,
    MlpFwdConfig,
    get_backward_config_for_shape,
    get_forward_config_for_shape,
    mlp_backward_mxfp8,
    mlp_backward_mxfp8_nki,
    mlp_forward_mxfp8_nki,
    record_launches,
)
from hf_neuron_moe.reference.mlp_mxfp8 import backward_2_30, forward
from tests.refusals import refused


@pytest.mark.parametrize(
    ("shape", "gate_up", "down"),
    [
        ((4096, 4096, 12288), (8, 2, 8), (8, 4, 8)),
        ((4096, 4096, 6144), (8, 2, 8), (8, 4, 4)),
        ((4096, 4096, 3072), (8, 2, 8), (8, 8, 2)),
        ((4096, 4096, 1536), (8, 1, 8), (8, 8, 1)),
        ((4096, 5120, 6400), (8, 1, 8), (8, 8, 1)),
        ((4096, 5120, 3200), (8, 1, 8), (8, 8, 1)),
        ((2176, 1152, 1152), (1, 3, 1), (1, 3, 1)),
        ((2304, 1280, 1280), (1, 3, 1), (1, 3, 1)),
        ((2432, 1408, 1408), (2, 3, 1), (2, 3, 1)),
        ((4096, 5120, 25600), (16, 50, 1), (16, 10, 1)),
        ((2048, 1024, 1024), (8, 2, 1), (8, 2, 1)),
    ],
)
def test_forward_table(shape: tuple[int, int, int], gate_up: tuple[int, ...], down: tuple[int, ...]) -> None:
    assert get_forward_config_for_shape(*shape) == MlpFwdConfig(gate_up, down)


WIDE = ((8, 4, 8), (8, 4, 8), (8, 2, 8), (8, 4, 8), (8, 4, 8))


@pytest.mark.parametrize(
    ("shape", "phases"),
    [
        ((4096, 4096, 12288), WIDE),
        ((4096, 4096, 6144), (*WIDE[:1], (8, 4, 6), *WIDE[2:])),
        ((4096, 4096, 3072), ((8, 3, 8), (8, 4, 3), (4, 2, 8), (8, 3, 8), (8, 3, 8))),
        ((4096, 4096, 1536), ((8, 3, 8), (8, 8, 1), (2, 4, 8), (8, 3, 8), (8, 3, 8))),
        ((4096, 5120, 6400), ((16, 1, 1), (16, 2, 1), (1, 2, 1), (4, 1, 1), (16, 1, 1))),
        ((4096, 5120, 3200), ((16, 1, 1), (16, 2, 1), (1, 2, 1), (4, 1, 1), (16, 1, 1))),
        ((4096, 5120, 25600), ((16, 2, 1), (16, 2, 1), (4, 2, 1), (4, 2, 1), (16, 2, 1))),
        ((2176, 1152, 1152), ((1, 1, 1),) * 5),
        ((2304, 1280, 1280), ((1, 1, 1),) * 5),
        ((2432, 1408, 1408), ((2, 1, 1),) * 5),
    ],
)
def test_backward_table(shape: tuple[int, int, int], phases: tuple[tuple[int, int, int], ...]) -> None:
    """I = 6144 has 12 K tiles in phase 2, of which 8 is no divisor; I = 1536 has 3, so 2 becomes 1."""
    assert get_backward_config_for_shape(*shape) == MlpBwdConfig(*phases)


def test_documented_name_of_both_lookups() -> None:
    assert forward.get_config_for_shape(2048, 1024, 1024) == MlpFwdConfig((8, 2, 1), (8, 2, 1))
    assert backward_2_30.get_config_for_shape(2432, 1408, 1408) == MlpBwdConfig(*((2, 1, 1),) * 5)


def test_defaults_and_lnc_1() -> None:
    assert MlpFwdConfig() == MlpFwdConfig((8, 2, 8), (8, 4, 8))
    assert MlpBwdConfig() == MlpBwdConfig((8, 4, 8), (8, 4, 8), (4, 2, 8), (4, 2, 8), (8, 1, 8))
    assert get_forward_config_for_shape(2048, 1024, 1024, lnc=1).gate_up == (16, 2, 1)
    assert get_backward_config_for_shape(2048, 1024, 1024, lnc=1).phase1 == (16, 2, 1)


@pytest.mark.parametrize("lookup", [get_forward_config_for_shape, get_backward_config_for_shape])
def test_config_lookup_refuses(lookup: Any) -> None:
    with refused(ConfigError, "hidden_size", got="0"):
        lookup(4096, 0, 128)
    with refused(ConfigError, "lnc"):
        lookup(4096, 128, 128, lnc=4)


def test_configurations_are_the_kernels_arguments_and_only_recorded() -> None:
    x, gate_up, down = (torch.randn(*shape).bfloat16() for shape in ((256, 128), (512, 128), (128, 256)))
    scratch = torch.empty(256, 256, dtype=torch.bfloat16)
    config = get_forward_config_for_shape(256, 128, 256)
    with record_launches() as launches:
        tuned = mlp_forward_mxfp8_nki(x, gate_up, down, scratch, **config.as_arguments(), spill_reload=False)
        plain = mlp_forward_mxfp8_nki(x, gate_up, down, scratch, run_with_lnc2=False)
    assert torch.equal(tuned, plain)
    assert [launch.kernel for launch in launches] == ["mlp_forward_mxfp8_nki"] * 2
    assert launches[0].options["gate_up_tiles_n"] == config.gate_up[1] == 1
    assert launches[0].options["spill_reload"] is False and launches[1].options["spill_reload"] is True
    assert launches[1].options["run_with_lnc2"] is False and launches[1].options["down_tiles_m"] == 8
    assert set(MlpBwdConfig().as_arguments()) == {
        f"{name}_tiles_{axis}" for name in ("phase1", "phase2", "phase3", "phase4", "recompute") for axis in "mnk"
    }


def test_the_backward_records_every_step() -> None:
    x, gate_up, down = (torch.randn(*shape).bfloat16() for shape in ((128, 128), (256, 128), (128, 128)))
    with record_launches() as outer, record_launches() as launches:
        mlp_backward_mxfp8_nki(x, x, down, gate_up)
    assert outer == []
    assert [launch.kernel for launch in launches] == [
        "mlp_backward_mxfp8_nki",
        "recompute_gate_up_projection",
        "recompute_gate_act",
        "recompute_intermediate",
        "compute_phase1_down_proj_mm_grad_mxfp8",
        "compute_phase2_hidden_states_grad_mxfp8",
        "compute_phase3_gate_up_weight_grad_mxfp8",
        "compute_phase4_down_weight_grad_mxfp8",
        "mlp_backward_mxfp8_base_nki",
    ]
    with record_launches() as nothing:
        pass
    mlp_backward_mxfp8(x, x, gate_up, down)
    assert nothing == []


@pytest.mark.parametrize(
    ("change", "argument", "says"),
    [
        ({"M": 0}, "M", ""),
        ({"TILES_IN_BLOCK_K": True}, "TILES_IN_BLOCK_K", ""),
        ({"TILES_IN_BLOCK_N": 4, "TILES_IN_LOAD_N": 3}, "TILES_IN_LOAD_N", ""),
        ({"TILES_IN_LOAD_M": 0}, "TILES_IN_LOAD_M", ""),
        ({"block_loop_order": "mmk"}, "block_loop_order", ""),
        ({"float8_dtype": "float8_e5m2"}, "float8_dtype", ""),
        ({"quant_scheme": "1x32"}, "quant_scheme", ""),
        ({"tile_loop_order": 5}, "tile_loop_order", ""),
        ({"spill_reload": 1}, "spill_reload", ""),
        ({"lnc_2_shard_rhs": "no"}, "lnc_2_shard_rhs", ""),
        ({"run_with_lnc2": None}, "run_with_lnc2", ""),
        ({"output_dtype": "bf16"}, "output_dtype", ""),
    ],
)
def test_matmul_config_refuses(change: dict[str, Any], argument: str, says: str) -> None:
    with refused(ConfigError, argument, says):
        MatmulMxfp8KernelConfig(**({"M": 256, "K": 512, "N": 512} | change))


def test_matmul_config_counts_tiles_and_blocks() -> None:
    config = MatmulMxfp8KernelConfig(M=1088, K=1152, N=1152, TILES_IN_BLOCK_M=4, TILES_IN_BLOCK_K=2)
    assert config.tiles == (9, 3, 3)
    assert config.blocks == (3, 2, 3)


def test_automatic_phases() -> None:
    phases = MlpBwdMatmulConfig().resolve_backward_phases(4096, 4096, 12288)
    sizes = [(2048, 4096, 12288), (2048, 24576, 4096), (12288, 4096, 4096), (2048, 4096, 12288)]
    assert [(config.M, config.K, config.N) for config in phases] == sizes
    for config in phases:
        assert config.TILES_IN_BLOCK_M <= 16 and config.TILES_IN_BLOCK_N <= 2 and config.TILES_IN_BLOCK_K <= 8
        assert config.TILES_IN_BLOCK_K * config.tile_k <= 2048
    gate, up = MlpBwdMatmulConfig().resolve_recompute_phases(256, 128, 384, run_with_lnc2=False)
    assert gate == up and (gate.M, gate.K, gate.N, gate.tile_n) == (256, 128, 384, 128)


def test_recompute_configs_share_the_hidden_tiles() -> None:
    gate = MatmulMxfp8KernelConfig(M=128, K=128, N=256, TILES_IN_BLOCK_M=1)
    up = MatmulMxfp8KernelConfig(M=128, K=128, N=256, tile_m=64)
    config = MlpBwdMatmulConfig(recompute_gate=gate, recompute_up=up)
    with refused(ConfigError, "recompute_up.tile_m"):
        config.resolve_recompute_phases(256, 128, 256)


def test_records_take_configurations_only() -> None:
    with refused(ConfigError, "phase3_wgrad", got="a dict"):
        MlpBwdMatmulConfig(phase3_wgrad={})  # type: ignore[arg-type]
    with refused(ConfigError, "run_with_lnc2", got="2", where="MlpBwdMatmulConfig"):
        MlpBwdMatmulConfig().resolve_backward_phases(256, 128, 256, 2)  # type: ignore[arg-type]
    with refused(ConfigError, "run_with_lnc2", got="None"):
        MlpBwdMatmulConfig().resolve_recompute_phases(256, 128, 256, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "argument", "says"),
    [
        ((1.0, 1.0), "linear_clamp_upper_limit", "got 1.0"),
        ((None, None, -1, 2), "non_linear_clamp_upper_limit", "got -1"),
        ((float("nan"),), "linear_clamp_upper_limit", "got nan"),
        ((None, "7"), "linear_clamp_lower_limit", "got '7'"),
        ((None, None, True), "non_linear_clamp_upper_limit", "got True"),
        ((None, None, None, object()), "non_linear_clamp_lower_limit", ""),
    ],
)
def test_clamp_limits_refuse(limits: tuple[Any, ...], argument: str, says: str) -> None:
    with refused(ConfigError, argument, says, where="ClampLimits"):
        ClampLimits(*limits)


def test_clamp_limits_take_any_numbers_in_order() -> None:
    assert ClampLimits(7, -7.0, float("inf"), None).linear_clamp_upper_limit == 7

"""``footprint`` and the on-chip checks: figures counted by hand, all recorded configurations, refusals with figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.kernels import (
    Footprint,
    MatmulMxfp8KernelConfig,
    MlpBwdConfig,
    MlpBwdMatmulConfig,
    MlpFwdConfig,
    TensorDescriptor,
    compute_fused_gate_up_down_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
    footprint,
    get_backward_config_for_shape,
    get_forward_config_for_shape,
    matmul_mxfp8,
    mlp_backward_mxfp8_nki,
    mlp_forward_mxfp8_nki,
    release_2_30,
)
from tests.refusals import refused

SHAPES = [
    *((4096, 4096, inner) for inner in (12288, 6144, 3072, 1536)),
    *((4096, 5120, inner) for inner in (6400, 3200, 25600)),
    *((2176, 1152, 1152), (2304, 1280, 1280), (2432, 1408, 1408), (2048, 1024, 1024)),
    *((768, 6272, 5376), (3584, 3584, 7040), (768, 5632, 1664), (768, 4352, 7936), (6016, 6144, 5888)),
    *((6400, 4224, 1152), (6784, 3712, 4096), (3072, 1536, 7552), (6400, 5248, 3328), (6656, 4480, 3584)),
]
"""All shapes of the documented configurations and tests."""


@pytest.mark.parametrize("shape", SHAPES)
def test_every_recorded_configuration_fits(shape: tuple[int, int, int]) -> None:
    defaults = (MlpFwdConfig(), MlpFwdConfig((8, 1, 8), (8, 1, 8)), MlpBwdConfig(), MlpBwdMatmulConfig())
    chosen = [(get_forward_config_for_shape(*shape), 2), (get_backward_config_for_shape(*shape), 2)]
    chosen += [(get_forward_config_for_shape(*shape, lnc=1), 1), (get_backward_config_for_shape(*shape, lnc=1), 1)]
    for tiles, lnc in [*chosen, *((each, 2) for each in defaults)]:
        for name, figures in footprint(*shape, tiles, lnc).items():
            assert figures.partitions <= 128 and figures.psum_banks <= 8, name
            assert figures.sbuf_bytes <= 262144, (name, figures.sbuf_bytes)


def test_figures_of_a_forward() -> None:
    """4096, 4096, 3072 on two cores: 2048 rows; K has 8 and 6 tiles, with 2 and 2 bytes of scales per position."""
    made = footprint(4096, 4096, 3072, MlpFwdConfig((8, 2, 8), (8, 8, 2)))
    gate_up = Footprint(
        128, 1, left_bytes=8 * 128 * (8 * 4 + 2), right_bytes=2 * 512 * (8 * 4 + 2), accumulator_bytes=0
    )
    down = Footprint(128, 1, left_bytes=1024 * (2 * 4 + 1), right_bytes=4096 * (2 * 4 + 1), accumulator_bytes=2048)
    assert made == {"gate_up": gate_up, "down": down}
    assert made["down"].sbuf_bytes == 1024 * 9 + 4096 * 9 + 2048


def test_figures_of_a_small_backward_are_cut_to_its_axes() -> None:
    """Rows 64 of one core, K 128: a quarter of 128 partitions, but 64 rows of the result."""
    made = footprint(128, 128, 256, MlpBwdConfig())
    assert made["phase1"] == Footprint(64, 1, left_bytes=64 * 5, right_bytes=256 * 5, accumulator_bytes=0)
    assert made["phase3"] == Footprint(128, 1, left_bytes=256 * 5, right_bytes=128 * 5, accumulator_bytes=0)
    assert list(made) == ["phase1", "phase2", "phase3", "phase4", "recompute"]
    config = MatmulMxfp8KernelConfig(M=128, K=128, N=128, tile_n=64)
    made = footprint(128, 128, 128, MlpBwdMatmulConfig(phase3_wgrad=config))
    assert list(made)[:3] == ["recompute_gate", "recompute_up", "phase1_down_proj"]
    assert made["phase3_wgrad"].right_bytes == 64 * 5 and made["phase2_hidden_grad"].left_bytes == 64 * 5


def config(**change: Any) -> MatmulMxfp8KernelConfig:
    return MatmulMxfp8KernelConfig(**({"M": 2048, "K": 8192, "N": 2048} | change))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "argument", "figure"),
    [
        ({"tile_m": 256}, "config.tile_m", "256"),
        ({"tile_k": 1024}, "config.tile_k", "256"),
        ({"tile_n": 4608, "N": 8192}, "config.tile_n", "9"),
        ({"TILES_IN_BLOCK_M": 16, "TILES_IN_BLOCK_K": 16, "TILES_IN_BLOCK_N": 4}, "config.TILES_IN_BLOCK_N", "278528"),
        ({"TILES_IN_BLOCK_M": 48, "M": 8192, "TILES_IN_BLOCK_K": 12}, "config.TILES_IN_BLOCK_M", "341"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_figure(change: dict[str, Any], argument: str, figure: str) -> None:
    """64 bytes of words and 4 of scales for each of 2048 + 2048 positions are 278,528 of 262,144 bytes."""
    chosen = config(**change)
    left, right = (torch.zeros(size, chosen.K, dtype=torch.bfloat16) for size in (chosen.M, chosen.N))
    out = torch.full((chosen.M, chosen.N), 7.0)
    step = [TensorDescriptor(each) for each in (out, left, right)]
    with refused(ConfigError, argument, figure):
        compute_phase4_down_weight_grad_mxfp8(*step, 0, torch.bfloat16, config=chosen, run_with_lnc2=False)
    assert bool((out == 7).all())


def test_tile_arguments_of_every_function_are_checked() -> None:
    S, H, inner = 16384, 2048, 2048
    x, gate_up, down = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((S, H), (2 * inner, H), (H, inner)))
    scratch = torch.zeros(S, inner, dtype=torch.bfloat16)
    with refused(ConfigError, "gate_up_tiles_m", "at least 287232"):
        mlp_forward_mxfp8_nki(x, gate_up, down, scratch, run_with_lnc2=False, gate_up_tiles_m=4096)
    mlp_forward_mxfp8_nki(x[:256], gate_up, down, scratch[:256], gate_up_tiles_m=4096)  # cut to the one tile of a core
    td = [TensorDescriptor(each) for each in (x, gate_up, down, scratch, x)]
    for name in ("TILES_IN_BLOCK_M", "TILES_IN_BLOCK_M_DOWN"):
        with refused(ConfigError, name, "SBUF"):
            compute_fused_gate_up_down_mxfp8(*td, 0, torch.bfloat16, run_with_lnc2=False, **{name: 128})  # type: ignore[arg-type]
    out = TensorDescriptor(torch.zeros(S, H, dtype=torch.bfloat16))
    half = TensorDescriptor(scratch)
    with refused(ConfigError, "TILES_IN_BLOCK_M", "SBUF"):
        release_2_30.compute_phase2_hidden_states_grad_mxfp8(
            out, td[2], td[2], half, half, 0, torch.bfloat16, torch.float8_e4m3fn, 128, run_with_lnc2=False
        )
    with refused(ConfigError, "TILES_IN_BLOCK_M", "SBUF"):
        matmul_mxfp8(x, down, 512, lhs_is_swizzled=False, rhs_is_swizzled=False)
    phase1 = MatmulMxfp8KernelConfig(M=S // 2, K=H, N=inner, tile_m=256)
    with refused(ConfigError, "phase1_down_proj.tile_m", "256"):
        mlp_backward_mxfp8_nki(x, x, down, gate_up, matmul_config=MlpBwdMatmulConfig(phase1_down_proj=phase1))


def test_footprint_refuses() -> None:
    with refused(ConfigError, "tiles", got="dict"):
        footprint(128, 128, 128, {})  # type: ignore[arg-type]
    with refused(ConfigError, "lnc", got="4"):
        footprint(128, 128, 128, MlpFwdConfig(), 4)
    with refused(ShapeError, "seq_len"):
        footprint(127, 128, 128, MlpFwdConfig())

"""``execute="tiles"`` of the MXFP8 MLP against the fast path: equal bytes and roundings, sums in the kernels' order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_neuron_moe.errors import ConfigError, ShapeError
from hf_neuron_moe.formats import k_map, pack_x4, quantize_mx, swizzle, to_oversized, to_packed
from hf_neuron_moe.formats.constants import ScaleRule
from hf_neuron_moe.kernels import (
    MatmulMxfp8KernelConfig,
    MlpBwdMatmulConfig,
    MXOperand,
    TensorDescriptor,
    compute_fused_gate_up_down_mxfp8,
    compute_phase1_down_proj_mm_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8,
    compute_phase2_hidden_states_grad_mxfp8_2_30,
    compute_phase3_gate_up_weight_grad_mxfp8,
    compute_phase4_down_weight_grad_mxfp8,
    mlp_backward_mxfp8,
    mlp_backward_mxfp8_base_nki,
    mlp_backward_mxfp8_nki,
    mlp_backward_mxfp8_nki_2_30,
    mlp_forward_mxfp8,
    mlp_forward_mxfp8_nki,
    recompute_gate_up_projection,
    release_2_30,
)
from hf_neuron_moe.reference.mlp_mxfp8.tile_walk import k_blocks
from tests.refusals import refused

BF16 = torch.bfloat16


def rows_of(*shape: int, scale: float = 1.0) -> Tensor:
    """bf16 rows whose magnitudes differ widely within a block, so that other groups would give other values."""
    return (torch.randn(shape) * torch.exp2(torch.randint(-9, 1, shape)) * scale).bfloat16()


def whole(low: int, high: int, *shape: int) -> Tensor:
    """bf16 integers: MX values and fp32 sums of them are exact, in whatever order."""
    return torch.randint(low, high + 1, shape).bfloat16()


def config(M: int, K: int, N: int, **tiles: int) -> MatmulMxfp8KernelConfig:
    return MatmulMxfp8KernelConfig(M=M, K=K, N=N, **tiles)


MODES: dict[str, Callable[[Tensor], TensorDescriptor]] = {
    "raw": TensorDescriptor,
    "K-major": lambda raw: TensorDescriptor(raw.t().contiguous(), is_f_by_k=False),
    "swizzled": lambda raw: TensorDescriptor(swizzle(raw), is_swizzled=True),
    "x4": lambda raw: TensorDescriptor(pack_x4(quantize_mx(raw).codes), to_packed(quantize_mx(raw).scales)),
    "uint32": lambda raw: TensorDescriptor(
        pack_x4(quantize_mx(raw).codes).view(torch.uint32), to_oversized(quantize_mx(raw).scales)
    ),
    "fp8": lambda raw: TensorDescriptor(
        quantize_mx(raw).codes.view(torch.float8_e4m3fn), to_packed(quantize_mx(raw).scales)
    ),
    "one tile": lambda raw: TensorDescriptor(raw, fast_dma_transpose=True),
}


@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("K", [384, 1408, 640, 512])
@pytest.mark.parametrize("tile_k", [512, 128])
def test_every_tile_is_the_operand_of_the_fast_path(mode: str, K: int, tile_k: int) -> None:
    torch.manual_seed(K)
    raw = rows_of(512, K)
    operand = MXOperand(MODES[mode](raw), argument="operand", lone_384=mode == "raw")
    values, kept = operand.dequantized(), quantize_mx(raw, scheme=operand.scheme)
    natural = k_map(K, operand.scheme)
    seen = 0
    for block in k_blocks(operand, config(512, K, 512, tile_k=tile_k, TILES_IN_BLOCK_K=2)):
        assert sum(k.stop - k.start for k in block) <= 2 * tile_k // 4
        for k in block:
            for f in (slice(0, 128), slice(384, 501)):
                tile = operand.load_and_quantize_tile(f, k)
                assert torch.equal(tile.codes, kept.codes[k, 4 * f.start : 4 * f.stop])
                assert torch.equal(tile.scales, kept.scales[k.start // 8 : k.stop // 8, f])
                width = f.stop - f.start
                scale = torch.exp2(tile.scales.double() - 127).repeat_interleave(8, 0).repeat_interleave(4, 1)
                made = tile.codes.view(torch.float8_e4m3fn).double() * scale
                wanted = values[f][:, natural[k].flatten()].view(width, -1, 4).transpose(0, 1).flatten(1)
                assert torch.equal(made, wanted.double())
            seen += k.stop - k.start
    assert seen == K // 4


def test_the_scale_rule_reaches_the_tiles() -> None:
    raw = rows_of(8, 128)
    operand = MXOperand(TensorDescriptor(raw), argument="operand", rule=ScaleRule.FLOOR)
    tile = operand.load_and_quantize_tile(slice(0, 8), slice(0, 32))
    assert torch.equal(tile.codes, quantize_mx(raw, rule="floor").codes)
    assert not torch.equal(tile.codes, quantize_mx(raw).codes)


def both(
    function: Callable[..., Any], outputs: dict[str, tuple[int, ...]], **arguments: Any
) -> list[dict[str, Tensor]]:
    """The outputs, fp32 where a name says so, of a phase that fills descriptors: fast, then tiles."""
    results = []
    for execute in ("fast", "tiles"):
        made = {
            name: torch.full(shape, float("nan"), dtype=torch.float32 if name in FP32 else BF16)
            for name, shape in outputs.items()
        }
        function(**arguments, **{name: TensorDescriptor(made[name]) for name in made}, execute=execute)
        results.append(made)
    return results


FP32 = ("hidden_states_grad_td", "weight_grad_td", "down_weight_grad_td")


def check_sums(fast: Tensor, tiles: Tensor, left: MXOperand, right: MXOperand) -> None:
    """Two orders of one fp32 sum of K products differ by at most 2 (K - 1) roundings of the sum of magnitudes."""
    a, b = left.dequantized().double(), right.dequantized().double()
    bound = 2 * left.K * torch.finfo(torch.float32).eps * (a.abs() @ b.abs().t())
    assert bool(((fast.double() - tiles.double()).abs() <= bound).all())
    assert bool(((tiles.double() - a @ b.t()).abs() <= bound).all())


@pytest.mark.parametrize(("S", "H", "inner", "spill"), [(256, 640, 384, True), (384, 384, 640, False)])
def test_weight_gradients_and_dx_of_both_releases(S: int, H: int, inner: int, spill: bool) -> None:
    torch.manual_seed(S + H + inner)
    grad_T, x_T, weight_T = rows_of(2 * inner, S), rows_of(H, S), rows_of(H, 2 * inner)
    td = TensorDescriptor
    options = {"dtype": BF16, "run_with_lnc2": False, "spill_reload": spill}
    both_halves = rows_of(S, 2 * inner)
    tiles = {"TILES_IN_BLOCK_K": 1, "TILES_IN_BLOCK_M": 3}
    fast, walked = both(
        compute_phase3_gate_up_weight_grad_mxfp8, {"weight_grad_td": (2 * inner, H)}, hidden_states_T_td=td(x_T),
        grad_T_td=td(grad_T), config=config(2 * inner, S, H, **tiles), **options,
    )  # fmt: skip
    operands = [MXOperand(td(each), argument="") for each in (grad_T, x_T)]
    check_sums(fast["weight_grad_td"], walked["weight_grad_td"], *operands)
    fast, walked = both(
        compute_phase4_down_weight_grad_mxfp8, {"down_weight_grad_td": (H, 2 * inner)}, output_grad_T_td=td(x_T),
        intermediate_T_td=td(grad_T), h_base=0, lone_384=True, **options,
    )  # fmt: skip
    operands = [MXOperand(td(each), argument="", lone_384=True) for each in (x_T, grad_T)]
    check_sums(fast["down_weight_grad_td"], walked["down_weight_grad_td"], *operands)
    fast, walked = both(
        compute_phase2_hidden_states_grad_mxfp8, {"hidden_states_grad_td": (S, H)}, s_base=0,
        gate_up_weight_td=td(weight_T), d_gate_up_td=td(both_halves), **options,
    )  # fmt: skip
    operands = [MXOperand(td(each), argument="") for each in (both_halves, weight_T)]
    check_sums(fast["hidden_states_grad_td"], walked["hidden_states_grad_td"], *operands)
    halves = [each.contiguous() for tensor in (weight_T, both_halves) for each in tensor.chunk(2, dim=1)]
    fast, walked = both(
        compute_phase2_hidden_states_grad_mxfp8_2_30, {"hidden_states_grad_td": (S, H)}, s_base=0,
        **dict(zip(("gate_weight_td", "up_weight_td", "d_gate_td", "d_up_td"), map(td, halves))), **options,
    )  # fmt: skip
    torch.testing.assert_close(
        walked["hidden_states_grad_td"], fast["hidden_states_grad_td"], rtol=0,
        atol=2e-6 * float(fast["hidden_states_grad_td"].abs().max()),
    )  # fmt: skip


@pytest.mark.parametrize(("S", "H", "inner"), [(272, 384, 384), (128, 1408, 256), (48, 512, 640)])
def test_forward_sums_and_roundings(S: int, H: int, inner: int) -> None:
    torch.manual_seed(S + H)
    x, gate_up, down = rows_of(S, H), rows_of(2 * inner, H, scale=H**-0.5), rows_of(H, inner, scale=inner**-0.5)
    made = {}
    for execute in ("fast", "tiles"):
        saves = {f"save_{name}": torch.empty(S, inner) for name in ("gate_pre", "gate_act", "up")}
        middle = torch.empty(S, inner, dtype=BF16)
        options: dict[str, Any] = {"dtype": torch.float32, "gate_up_tiles_k": 1, "gate_up_tiles_m": 2, **saves}
        output = mlp_forward_mxfp8_nki(x, gate_up, down, middle, down_tiles_k=1, execute=execute, **options)
        made[execute] = {"output": output, "middle": middle, **saves}
    fast, tiles = made["fast"], made["tiles"]
    operands = [MXOperand(TensorDescriptor(each), argument="", lone_384=True) for each in (x, gate_up)]
    for names in (["save_gate_pre", "save_up"],):
        check_sums(*(torch.cat([each[name] for name in names], 1) for each in (fast, tiles)), *operands)
    # Each rounding is where it is: the kept fp32 values explain the bf16 ones, and those the output.
    assert torch.equal(torch.nn.functional.silu(tiles["save_gate_pre"]), tiles["save_gate_act"])
    assert torch.equal((tiles["save_gate_act"] * tiles["save_up"]).bfloat16(), tiles["middle"])
    operands = [MXOperand(TensorDescriptor(each), argument="", lone_384=True) for each in (tiles["middle"], down)]
    values = [each.dequantized().double() for each in operands]
    check_sums((values[0] @ values[1].t()).float(), tiles["output"], *operands)


def test_one_k_tile_agrees_as_closely_as_its_gemm() -> None:
    torch.manual_seed(7)
    x, gate_up, down = rows_of(128, 512), rows_of(512, 512), rows_of(512, 256)
    fast, tiles = (
        mlp_forward_mxfp8(x, gate_up, down, save_gate_pre=True, dtype=torch.float32, execute=execute)
        for execute in ("fast", "tiles")
    )
    assert fast.gate_pre is not None and tiles.gate_pre is not None
    torch.testing.assert_close(tiles.gate_pre, fast.gate_pre, rtol=0, atol=1e-6 * float(fast.gate_pre.abs().max()))


@pytest.mark.parametrize("lnc2", [True, False])
def test_exact_sums_are_bit_equal_in_the_forward(lnc2: bool) -> None:
    """gate is at least 32, where silu is the identity in fp32: every value is an integer."""
    torch.manual_seed(3)
    S, H, inner = 272, 640, 384
    x, gate = whole(0, 1, S, H), whole(1, 2, inner, H)
    gate_up, down = torch.cat([gate, whole(-1, 1, inner, H)]), whole(-1, 1, H, inner)
    results = []
    for execute in ("fast", "tiles"):
        buffers = [torch.empty(S, inner, dtype=BF16) for _ in range(4)]
        options = dict(zip(("save_gate_pre", "save_gate_act", "save_up"), buffers[1:]))
        output = mlp_forward_mxfp8_nki(
            x, gate_up, down, buffers[0], lnc2, 2, 1, 1, 1, 1, 1, spill_reload=lnc2, execute=execute, **options
        )
        results.append([output, *buffers])
    assert float(results[0][2].min()) >= 32
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def integers(S: int, H: int, inner: int) -> dict[str, Tensor]:
    """Operands of a backward in integers; gate_pre is so large that silu' is 1 in fp32."""
    return {
        "output_grad": whole(-1, 1, S, H),
        "hidden_states": whole(-1, 1, S, H),
        "gate_up_weights": whole(-1, 1, 2 * inner, H),
        "down_proj_weight": whole(-1, 1, H, inner),
        "gate_pre": torch.full((S, inner), 32.0, dtype=BF16),
        "gate_act": whole(1, 2, S, inner),
        "up": whole(-2, 2, S, inner),
        "intermediate": whole(-3, 3, S, inner),
    }


@pytest.mark.thinned(2)
@pytest.mark.parametrize("lnc2", [True, False])
@pytest.mark.parametrize("missing", [(), ("gate_act", "intermediate"), ("gate_pre", "up", "intermediate")])
def test_exact_sums_are_bit_equal_in_the_backward(lnc2: bool, missing: tuple[str, ...]) -> None:
    torch.manual_seed(5)
    given = integers(256, 640, 384)
    if "up" in missing:  # recomputed: 32 or more, as in the forward
        given["hidden_states"] = whole(0, 1, 256, 640)
        given["gate_up_weights"] = torch.cat([whole(1, 2, 384, 640), whole(-1, 1, 384, 640)])
    for name in missing:
        del given[name]
    fast, tiles = (mlp_backward_mxfp8_nki(**given, run_with_lnc2=lnc2, execute=each) for each in ("fast", "tiles"))
    assert all(torch.equal(one, other) for one, other in zip(fast, tiles, strict=True))
    fast, tiles = (mlp_backward_mxfp8(**given, release="2.30", execute=each) for each in ("fast", "tiles"))
    assert all(torch.equal(one, other) for one, other in zip(fast, tiles, strict=True))


def test_exact_sums_are_bit_equal_in_the_base_and_in_release_2_30() -> None:
    torch.manual_seed(19)
    S, H, inner = 256, 384, 384
    given = integers(S, H, inner)
    grad, x, gate_up, down, pre, act, up, middle = given.values()
    made: dict[str, list[list[Tensor]]] = {"base": [], "2.30": []}
    for execute in ("fast", "tiles"):
        shapes = [(S, 2 * inner), (2 * inner, S), (S, H), (2 * inner, H), (H, inner)]
        both_halves, *outputs = [torch.empty(shape, dtype=BF16) for shape in shapes]
        operands = (grad, pre, act, up, gate_up.t(), down.t(), both_halves, x.t(), grad.t(), middle.t(), *outputs)
        mlp_backward_mxfp8_base_nki(*(TensorDescriptor(each.contiguous()) for each in operands), execute=execute)
        made["base"].append(outputs)
        scratch = [torch.empty(shape, dtype=BF16) for shape in [(S, inner)] * 2 + [(2 * inner, S)] + [(S, inner)] * 4]
        halves = [half.t().contiguous() for half in gate_up.chunk(2)]
        transposes = [each.t().contiguous() for each in (x, grad, middle)]
        grads = mlp_backward_mxfp8_nki_2_30(
            grad, x, *halves, down.t().contiguous(), gate_up, *scratch[:2], *transposes, *scratch[2:],
            pre, None, up, None, phase3_tiles_k=1, phase1_tiles_m=1, execute=execute,
        )  # fmt: skip
        made["2.30"].append([*grads, *scratch[:3], scratch[4], scratch[6]])
    for fast, tiles in made.values():
        assert all(torch.equal(one, other) for one, other in zip(fast, tiles, strict=True))


def test_whole_backward_is_near_the_fast_one() -> None:
    """One bf16 rounding of d_gate may fall to the other side and change a code: 1e-2 of the largest value."""
    torch.manual_seed(11)
    S, H, inner = 128, 384, 640
    given = {"output_grad": rows_of(S, H), "hidden_states": rows_of(S, H)}
    given |= {"gate_up_weights": rows_of(2 * inner, H, scale=0.1), "down_proj_weight": rows_of(H, inner, scale=0.1)}
    for options in ({"release": "2.31"}, {"release": "2.30"}):
        fast, tiles = (mlp_backward_mxfp8(**given, execute=each, **options) for each in ("fast", "tiles"))
        for one, other in zip(fast, tiles, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=1e-2 * float(one.abs().max()))


def test_phase_1_and_recompute_of_one_core() -> None:
    torch.manual_seed(13)
    S, H, inner = 256, 640, 384
    td = {name: TensorDescriptor(tensor) for name, tensor in integers(S, H, inner).items()}
    weight = TensorDescriptor(td["down_proj_weight"].data.t().contiguous())
    options = {"dtype": BF16, "fp8_x4_dtype": torch.float8_e4m3fn}
    fast, tiles = both(
        compute_phase1_down_proj_mm_grad_mxfp8,
        {"d_gate_up_td": (S, 2 * inner), "scratch_td": (2 * inner, S)},
        output_grad_td=td["output_grad"], gate_pre_td=td["gate_pre"], gate_act_td=td["gate_act"], up_td=td["up"],
        down_weight_td=weight, s_base=128, config=config(128, H, inner, TILES_IN_BLOCK_N=2), **options,
    )  # fmt: skip
    recomputed = both(
        recompute_gate_up_projection, {"gate_pre_td": (S, inner), "up_td": (S, inner)}, hidden_td=td["hidden_states"],
        gate_up_td=td["gate_up_weights"], s_base_offset=128, **options,
    )  # fmt: skip
    for one, other in [(fast, tiles), recomputed]:
        for name, values in one.items():
            assert torch.equal(values.isnan(), other[name].isnan()) and bool(values.isnan().any())
            assert torch.equal(values.nan_to_num(), other[name].nan_to_num()), name


@pytest.mark.parametrize(("tiles", "total"), [(1, 2.0**24), (2, 2.0**24 + 2), (3, 2.0**24), (8, 2.0**24)])
def test_tile_counts_set_the_order_of_the_sums(tiles: int, total: float) -> None:
    """K tiles of 2**24, 0, 1 and 1: the ones survive only where a block adds them to each other first."""
    left, right = torch.zeros(256, 2048, dtype=BF16), torch.zeros(128, 2048, dtype=BF16)
    for k, value in ((0, 2.0**12), (1024, 1.0), (1536, 1.0)):
        left[:, k] = right[:, k] = value
    out = torch.empty(256, 128)
    step = (TensorDescriptor(out), TensorDescriptor(right), TensorDescriptor(left), BF16)
    chosen = config(256, 2048, 128, TILES_IN_BLOCK_K=tiles)
    compute_phase3_gate_up_weight_grad_mxfp8(*step, config=chosen, run_with_lnc2=False, execute="tiles")
    assert torch.equal(out, torch.full_like(out, total))
    whole_config = MlpBwdMatmulConfig(phase3_wgrad=config(128, 2048, 128, TILES_IN_BLOCK_K=tiles))
    assert whole_config.phase3_wgrad is not None and whole_config.phase3_wgrad.blocks[1] == -(-4 // tiles)


def test_a_spilled_tile_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S 256, H 640, I 640: K tiles are 512 and 128, so hidden has 2 x 2 tiles, gate and up 2 x 2 each."""
    loads: list[tuple[int, int]] = []
    real = MXOperand.load_and_quantize_tile

    def counting(self: MXOperand, f: slice, k: slice) -> Any:
        loads.append((f.start, k.start))
        return real(self, f, k)

    monkeypatch.setattr(MXOperand, "load_and_quantize_tile", counting)
    x, gate_up = whole(-1, 1, 256, 640), whole(-1, 1, 1280, 640)
    results, counts = [], []
    for spill in (True, False):
        pre, up = torch.empty(256, 640, dtype=BF16), torch.empty(256, 640, dtype=BF16)
        loads.clear()
        recompute_gate_up_projection(
            *map(TensorDescriptor, (x, gate_up, pre, up)), 0, BF16, run_with_lnc2=False, spill_reload=spill,
            gate_config=config(256, 640, 640), up_config=config(256, 640, 640), execute="tiles",
        )  # fmt: skip
        counts.append(len(loads))
        results.append((pre, up))
    # Blocks: 2 of M times 2 of N. Each reads one hidden tile, one of gate and one of up per K tile.
    assert counts == [2 * 2 + 2 * 2 * 2, 2 * 2 * 3 * 2]
    assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.parametrize("execute", ["fast", "tiles"])
def test_output_may_be_the_slice_of_one_core(execute: str) -> None:
    torch.manual_seed(17)
    S, H, inner = 128, 256, 128
    x, gate_up, down = rows_of(S, H), rows_of(2 * inner, H), rows_of(H, inner)
    td = [TensorDescriptor(each) for each in (x, gate_up, down)]
    complete = torch.full((S, H), float("nan"), dtype=BF16)
    for core, base in enumerate((0, S // 2)):
        part = torch.full((S // 2, H), float("nan"), dtype=BF16)
        middle = torch.full((S, inner), float("nan"), dtype=BF16)
        for out in (part, complete):
            compute_fused_gate_up_down_mxfp8(
                *td, TensorDescriptor(middle), TensorDescriptor(out), base, BF16, execute=execute
            )
        rows = slice(base, base + S // 2)
        assert torch.equal(part, complete[rows]) and not middle[rows].isnan().any()
        assert int(middle.isnan().sum()) == S // 2 * inner, core
    assert torch.equal(complete, mlp_forward_mxfp8(x, gate_up, down, execute=execute).output)
    documented = torch.full((S // 2, H), float("nan"), dtype=BF16)
    arguments = (TensorDescriptor(middle), TensorDescriptor(documented), base, BF16)
    release_2_30.compute_fused_gate_up_down_mxfp8(*td, *arguments)
    torch.testing.assert_close(documented, part, rtol=2**-7, atol=2**-7 * float(part.abs().max()))
    with refused(ShapeError, "output_td"):
        compute_fused_gate_up_down_mxfp8(*td, *arguments[:2], 0, BF16, run_with_lnc2=False, execute=execute)


def test_execute_refuses_other_names() -> None:
    x, gate_up, down = whole(0, 1, 8, 128), whole(0, 1, 256, 128), whole(0, 1, 128, 128)
    with refused(ConfigError, "execute", "fast, tiles"):
        mlp_forward_mxfp8(x, gate_up, down, execute="tile")

"""Weight layouts: equal elements, exact inverses, views where views are promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_neuron_moe.errors import DeviceError, DTypeError, ShapeError
from hf_neuron_moe.formats import layouts
from tests.refusals import refused

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_recorded_mixtral_weights(golden_dir: Path) -> None:
    golden = load_file(golden_dir / "hf_mixtral_experts.safetensors")
    assert torch.equal(layouts.gate_up_hf_to_kernel(golden["hf_gate_up_proj"]), golden["blockwise_gate_up"])
    assert torch.equal(layouts.down_hf_to_kernel(golden["hf_down_proj"]), golden["blockwise_down"])
    assert torch.equal(layouts.gate_up_kernel_to_hf(golden["blockwise_gate_up"]), golden["hf_gate_up_proj"])
    assert torch.equal(layouts.down_kernel_to_hf(golden["blockwise_down"]), golden["hf_down_proj"])


@given(sizes=SIZES)
def test_concatenated_experts(sizes: tuple[int, int, int]) -> None:
    E, H, inter = sizes
    hf = numbered(E, 2 * inter, H)
    kernel, stacked = layouts.gate_up_hf_to_kernel(hf), layouts.gate_up_hf_to_stacked(hf)
    assert kernel.shape == (E, H, 2, inter)
    assert torch.equal(kernel[:, :, 0], hf[:, :inter].transpose(1, 2))
    assert torch.equal(kernel[:, :, 1], hf[:, inter:].transpose(1, 2))
    assert torch.equal(stacked[:, 0], hf[:, :inter])
    assert torch.equal(layouts.gate_up_stacked_to_kernel(stacked), kernel)
    assert torch.equal(layouts.gate_up_kernel_to_stacked(kernel), stacked)
    for back in (layouts.gate_up_kernel_to_hf(kernel), layouts.gate_up_stacked_to_hf(stacked)):
        assert torch.equal(back, hf)
        assert shares_storage(back, hf)
    assert shares_storage(kernel, hf)
    assert shares_storage(stacked, hf)
    owned = kernel.contiguous()
    assert torch.equal(layouts.gate_up_kernel_to_hf(owned), hf)
    assert torch.equal(layouts.gate_up_hf_to_kernel(layouts.gate_up_kernel_to_hf(owned)), owned)


@given(sizes=SIZES)
def test_down(sizes: tuple[int, int, int]) -> None:
    E, H, inter = sizes
    hf = numbered(E, H, inter)
    kernel = layouts.down_hf_to_kernel(hf)
    assert torch.equal(kernel, hf.transpose(1, 2))
    assert torch.equal(layouts.down_kernel_to_hf(kernel), hf)
    assert shares_storage(layouts.down_kernel_to_hf(kernel), hf)


@given(sizes=SIZES)
def test_interleaved_experts(sizes: tuple[int, int, int]) -> None:
    E, H, inter = sizes
    weight, bias = numbered(E, H, 2 * inter), numbered(E, 2 * inter)
    kernel, kernel_bias = layouts.gate_up_interleaved_to_kernel(weight), layouts.bias_interleaved_to_kernel(bias)
    assert torch.equal(kernel[:, :, 0], weight[..., 0::2])
    assert torch.equal(kernel[:, :, 1], weight[..., 1::2])
    assert torch.equal(kernel_bias[:, 0], bias[:, 0::2])
    assert torch.equal(kernel_bias[:, 1], bias[:, 1::2])
    assert shares_storage(kernel, weight)
    assert shares_storage(kernel_bias, bias)
    assert torch.equal(layouts.gate_up_kernel_to_interleaved(kernel), weight)
    assert shares_storage(layouts.gate_up_kernel_to_interleaved(kernel), weight)
    assert torch.equal(layouts.gate_up_kernel_to_interleaved(kernel.contiguous()), weight)
    assert torch.equal(layouts.bias_kernel_to_interleaved(kernel_bias), bias)
    assert torch.equal(layouts.bias_kernel_to_interleaved(kernel_bias.contiguous()), bias)


def test_dense_pair() -> None:
    fused = numbered(6, 4)
    gate, up = layouts.split_gate_up(fused)
    assert torch.equal(gate, fused[:3])
    assert torch.equal(up, fused[3:])
    assert shares_storage(gate, fused)
    assert torch.equal(layouts.fuse_gate_up(gate, up), fused)


def test_gradients_flow_through_layouts() -> None:
    hf = torch.randn(2, 6, 4, requires_grad=True)
    weight = torch.randn(2, 4, 2, 3)
    (layouts.gate_up_hf_to_kernel(hf) * weight).sum().backward()
    assert hf.grad is not None
    assert torch.equal(hf.grad, layouts.gate_up_kernel_to_hf(weight))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_partition_the_intermediate_axis(world_size: int) -> None:
    gate_up, down, x = torch.randn(2, 5, 2, 8), torch.randn(2, 8, 5), torch.randn(3, 5)
    parts = [layouts.slice_intermediate(gate_up, 3, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts, 3), gate_up)
    assert all(shares_storage(part, gate_up) for part in parts)
    # The ranks' outputs sum to the whole expert's: a gate and its up unit are on the same rank.
    total = torch.zeros(2, 3, 5)
    for rank, part in enumerate(parts):
        gate, up = (torch.einsum("th,ehi->eti", x, part[:, :, half]) for half in (0, 1))
        down_part = layouts.slice_intermediate(down, 1, rank, world_size)
        total += torch.einsum("eti,eih->eth", torch.nn.functional.silu(gate) * up, down_part)
    gate, up = (torch.einsum("th,ehi->eti", x, gate_up[:, :, half]) for half in (0, 1))
    whole = torch.einsum("eti,eih->eth", torch.nn.functional.silu(gate) * up, down)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)  # fp32 sums in another order


def test_up_offset_and_limits() -> None:
    bias = torch.randn(2, 2, 5).to(torch.bfloat16)
    absorbed = layouts.absorb_up_offset(bias)
    assert absorbed.dtype == torch.float32
    assert torch.equal(absorbed[:, 0], bias[:, 0].float())
    assert torch.equal(absorbed[:, 1], bias[:, 1].float() + 1)
    released = layouts.release_up_offset(absorbed)
    # One fp32 rounding of a sum below 4 in magnitude: at most 2**-23.
    torch.testing.assert_close(released, bias.float(), rtol=0, atol=2**-23)
    assert layouts.absorb_up_limits(-7.0, 7.0) == (-6.0, 8.0)
    assert layouts.release_up_limits(-6.0, 8.0) == (-7.0, 7.0)
    assert layouts.absorb_up_limits(None, None) == (None, None)


def test_absorbed_offset_computes_the_gpt_oss_activation() -> None:
    x, bias = torch.randn(64, 5) * 6, torch.randn(1, 2, 5)
    gate, up = (x + bias[0, 0]).clamp(max=7.0), (x + bias[0, 1]).clamp(-7.0, 7.0)
    model = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    kernel_bias = layouts.absorb_up_offset(bias)
    lower, upper = layouts.absorb_up_limits(-7.0, 7.0)
    shifted = (x + kernel_bias[0, 1]).clamp(lower, upper)
    kernel = shifted * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(kernel, model, rtol=1e-5, atol=1e-5)  # (x + b) + 1 against x + (b + 1) in fp32


def test_refusals() -> None:
    with refused(ShapeError, "gate_up.shape[1]"):
        layouts.gate_up_hf_to_kernel(torch.zeros(2, 5, 4))
    with refused(ShapeError, "gate_up", got="[6, 4]"):
        layouts.gate_up_hf_to_kernel(torch.zeros(6, 4))
    with refused(ShapeError, "gate_up.shape[2]"):
        layouts.gate_up_kernel_to_hf(torch.zeros(2, 4, 3, 3))
    with refused(ShapeError, "up"):
        layouts.fuse_gate_up(torch.zeros(3, 4), torch.zeros(4, 3))
    with refused(ShapeError, "shape[1]"):
        layouts.slice_intermediate(torch.zeros(2, 8, 4), 1, 0, 3)
    with refused(ShapeError, "axis, rank and world_size", got="axis 1, rank 2, world_size 2"):
        layouts.slice_intermediate(torch.zeros(2, 8, 4), 1, 2, 2)
    with refused(ShapeError, "axis, rank and world_size", got="axis 3, rank 0, world_size 2"):
        layouts.slice_intermediate(torch.zeros(2, 8, 4), 3, 0, 2)
    with refused(ShapeError, "axis, rank and world_size", got="axis 1, rank 0, world_size 2.0"):
        layouts.slice_intermediate(torch.zeros(2, 8, 4), 1, 0, 2.0)  # type: ignore[arg-type]
    with refused(DTypeError, "tensor"):
        layouts.slice_intermediate([1, 2], 0, 0, 2)  # type: ignore[arg-type]
    with refused(DTypeError, "up", got="float16"):
        layouts.fuse_gate_up(torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float16))
    with FakeTensorMode():
        gate, up = (torch.zeros(3, 4, device=f"cuda:{index}") for index in range(2))
    with refused(DeviceError, "up", got="cuda:1"):
        layouts.fuse_gate_up(gate, up)
    with refused(DeviceError, "up", got="meta"):
        layouts.fuse_gate_up(torch.zeros(3, 4), torch.zeros(3, 4, device="meta"))

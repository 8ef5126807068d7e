"""A layer of experts made of the Triton kernels gives what the torch backend's tiles give, forward and backward.

The operands are small integers, so that gate, up and the intermediate's gradient are exact in any order of their sums.
Squared ReLU has no exponential, so all values between the products are equal. The last sums are not exact: fp32 sums in
another order lie across a boundary of bf16 in few places.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_neuron_moe.backends.gate import Gate
from hf_neuron_moe.backends.torch import compute
from hf_neuron_moe.backends.torch.ffn_forward import Checkpoints
from hf_neuron_moe.backends.triton.expert_gemm import grouped_product, weight_gradient
from hf_neuron_moe.backends.triton.gate_epilogue import gate_backward, gate_forward
from hf_neuron_moe.backends.triton.mx_both_ways import quantize
from hf_neuron_moe.modules.ops import experts
from tests.triton_kernels.grouped_rows import small_integers

pytestmark = pytest.mark.triton
T, K, E, H, I, BLOCK = 21, 2, 3, 128, 128, 128  # noqa: E741
GATE = Gate("squared_relu", gate_max=20.0)
COLUMNS = {"TILE_R": 64, "TILE_C": 128}


def layer_of_kernels(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dout: Tensor, precision: str
) -> tuple[Tensor, ...]:
    """Return the output and the gradients of `x`, `weights`, `gate_up` and `down`, sums in fp32."""
    mx, pairs = precision == "mxfp8", index.flatten()
    order = pairs.argsort(stable=True)
    token, scale = order // K, weights.flatten()[order]
    ends = torch.bincount(pairs, minlength=E).cumsum(0).int()

    def along_columns(values: Tensor) -> Tensor:
        """Return an operand, of three axes a weight."""
        made = quantize(values.flatten(0, -2), values=True, tiles=COLUMNS)[0].values if mx else values
        assert made is not None
        return made.view(values.shape)

    def along_rows(values: Tensor, token_R: Tensor | None = None) -> Tensor:
        if not mx:
            return values if token_R is None else values[token_R]
        by_rows = quantize(values, (ends, BLOCK), values=True, columns=False, token_R=token_R, tiles=COLUMNS)[1]
        assert by_rows.values is not None
        return by_rows.values

    made = grouped_product(along_columns(x), along_columns(gate_up), ends, token_R=token)
    saved = Checkpoints(*(torch.empty(len(token), I, dtype=torch.bfloat16) for _ in range(2)))
    inter = gate_forward(made[:, :I], made[:, I:], GATE, rounding=precision, scale_R=scale, saved=saved)
    out = grouped_product(along_columns(inter), along_columns(down), ends)
    d_int = grouped_product(along_columns(dout), along_columns(down.transpose(1, 2)), ends, token_R=token)
    both = torch.empty(len(token), 2 * I, dtype=torch.bfloat16)
    inter, d_scale = gate_backward(d_int, saved, GATE, tuple(both.chunk(2, 1)), rounding=precision, scale_R=scale)
    d_x = grouped_product(along_columns(both), along_columns(gate_up.transpose(1, 2)), ends)
    assert d_scale is not None
    d_gate_up, d_down = (torch.empty(part.shape) for part in (gate_up, down))
    weight_gradient(along_rows(both), along_rows(x, token), ends, d_gate_up)
    weight_gradient(along_rows(dout, token), along_rows(inter), ends, d_down)
    by_token = (torch.zeros(T, H).index_add_(0, token, part) for part in (out, d_x))
    return *by_token, torch.empty(T * K).index_copy_(0, order, d_scale).view(T, K), d_gate_up, d_down


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_forward_and_backward_of_a_layer(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "bf16_matmul_is_fast", lambda *_: False)
    generator = torch.Generator().manual_seed(3)
    x, dout = small_integers(T, H), small_integers(T, H, seed=4)
    gate_up, down = small_integers(E, 2 * I, H, seed=5) / 8, small_integers(E, H, I, seed=6) / 8
    index = torch.rand(T, E, generator=generator).topk(K, dim=-1).indices
    weights = torch.rand(T, K, generator=generator)
    inputs = [part.clone().requires_grad_() for part in (x, weights, gate_up, down)]
    options = {"precision": precision, "block_size": BLOCK, "backend": "torch", "activations": "full", "gate": GATE}
    expected = experts(inputs[0], index, *inputs[1:], transposed=False, training=True, **options)
    expected.backward(dout)
    ours = layer_of_kernels(x, index, weights, gate_up, down, dout, precision)
    for made, wanted in zip(ours, (expected.detach(), *(part.grad for part in inputs)), strict=True):
        assert wanted is not None
        rounded = made.to(wanted.dtype).float()
        difference = (rounded - wanted.float()).abs()
        assert bool((difference <= 2.0**-7 * wanted.float().abs() + 1e-5 * wanted.abs().max()).all())
        if wanted.dtype == torch.bfloat16:
            assert float((difference > 0).double().mean()) < 0.01
        else:
            assert bool((difference <= 1e-5 * wanted.abs().max()).all())

"""Weights in the kernels' orientations: exact, copied once per state, dropped when they could be stale."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from functorch.compile import aot_function
from hypothesis import given, strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hf_neuron_moe.backends.neuron.orientation import (
    fuse_gate_up,
    fused_for_kernel,
    kernel_weight,
    pad_axes,
    split_axes,
    stock_gradient,
)
from hf_neuron_moe.backends.prepared import CountedWeights, PreparedWeights

SIZES = st.integers(1, 9)


@given(experts=SIZES, hidden=SIZES, inner=SIZES, more=st.tuples(SIZES, SIZES), transposed=st.booleans())
def test_orientations_and_padding_are_undone_by_the_gradient(
    experts: int, hidden: int, inner: int, more: tuple[int, int], transposed: bool
) -> None:
    shape = (experts, hidden, 2 * inner) if transposed else (experts, 2 * inner, hidden)
    weight = torch.randn(shape).bfloat16()
    own = split_axes(transposed)[0]
    full = {"hidden": hidden + more[0], "inner": inner + more[1]}
    for wanted in ("EH2I", "E2IH", "EI2H"):
        turned = kernel_weight(weight, axes=own, wanted=wanted, **full)
        assert turned.is_contiguous() and turned.dtype == torch.bfloat16
        sizes = {"E": experts, "2": 2, "H": full["hidden"], "I": full["inner"]}
        assert tuple(turned.shape) == tuple(sizes[axis] for axis in wanted)
        # As many values as before, so that all that is new is zero.
        assert turned.float().abs().sum() == pytest.approx(weight.float().abs().sum().item(), rel=1e-4)
        back = stock_gradient(turned, wanted, own, hidden, inner, torch.float32)
        assert back.is_contiguous() and torch.equal(back.view(shape), weight.float())


def test_gate_is_index_zero_of_the_kernels_pair() -> None:
    gate, up = torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)
    stock = torch.cat([gate, up])[None]
    turned = kernel_weight(stock, axes="E2IH", wanted="EH2I", hidden=3, inner=2)
    assert turned[0, :, 0].unique().tolist() == [1.0] and turned[0, :, 1].unique().tolist() == [2.0]


def test_halves_of_one_parameter_are_fused_without_a_copy() -> None:
    both = torch.randn(6, 4)
    assert fuse_gate_up(*both.chunk(2)).data_ptr() == both.data_ptr()
    apart = fuse_gate_up(both[3:], both[:3])
    assert torch.equal(apart, torch.cat([both[3:], both[:3]])) and apart.data_ptr() != both.data_ptr()
    strangers = both[:3], torch.randn(6, 4)[3:]  # as far from each other in storages that are not one
    assert torch.equal(fuse_gate_up(*strangers), torch.cat(strangers))
    turned = both[:3], both[3:].view(4, 3).t()  # follows in memory, in another order
    assert torch.equal(fuse_gate_up(*turned), torch.cat(turned))
    columns = both.t().contiguous().t().chunk(2)
    assert torch.equal(fuse_gate_up(*columns), both)


def test_a_traced_program_reads_no_memory_behind_its_tensors() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def twice(both: Tensor) -> Tensor:
        return fused_for_kernel(*both.chunk(2), 4, 3) * 2

    both = torch.randn(6, 4).bfloat16()
    assert torch.equal(aot_function(twice, keep)(both), both * 2)
    graphs.append(make_fx(twice)(both))
    for graph in graphs:
        assert "as_strided" not in graph.code and "cat" in graph.code
    apart = make_fx(lambda gate, up: fused_for_kernel(gate, up, 4, 3))(*both.chunk(2))
    halves = [half.clone() for half in both.chunk(2)]
    assert torch.equal(apart(*halves), both), "the halves of a later call lie elsewhere"


def test_each_half_is_padded_by_itself() -> None:
    fused = fused_for_kernel(torch.ones(2, 3), torch.full((2, 3), 2.0), hidden=4, inner=5)
    assert fused.shape == (10, 4) and fused[2:5].eq(0).all() and fused[7:].eq(0).all() and fused[:, 3].eq(0).all()
    assert fused[:2, :3].eq(1).all() and fused[5:7, :3].eq(2).all()


def test_nothing_to_pad_is_no_copy() -> None:
    tensor = torch.randn(3, 4)
    assert pad_axes(tensor, (3, 4)) is tensor


class Turn:
    """Counts how often a copy is made."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight.t().contiguous()


def test_a_copy_is_made_once_per_state() -> None:
    weights, turn, weight = PreparedWeights(), Turn(), torch.nn.Parameter(torch.randn(3, 4))
    first = weights.get("turned", turn, weight)
    assert weights.get("turned", turn, weight) is first and turn.calls == 1 and weights.nbytes == 48
    with torch.no_grad():
        weight.add_(1)
    second = weights.get("turned", turn, weight)
    assert torch.equal(second, weight.detach().t()) and turn.calls == 2 and weights.nbytes == 48
    assert not second.requires_grad


def test_views_of_one_storage_and_forms_have_copies_of_their_own() -> None:
    weights, turn, both = PreparedWeights(), Turn(), torch.randn(6, 4)
    one, other = (weights.get("turned", turn, half) for half in both.chunk(2))
    assert torch.equal(torch.cat([one, other], 1), both.t()) and turn.calls == 2
    again = [weights.get("turned", turn, half) for half in both.chunk(2)]  # new objects, the same places
    assert again[0] is one and again[1] is other
    weights.get("turned, padded", turn, both[:3])
    assert turn.calls == 3


def test_an_optimizer_step_drops_copies_even_if_no_version_tells() -> None:
    weights, turn = PreparedWeights(), Turn()
    weight = torch.nn.Parameter(torch.randn(3, 4))
    weights.get("turned", turn, weight)
    weight.data.add_(1)  # what some optimizers and FSDP do: no version counter advances
    weight.grad = torch.zeros_like(weight)
    torch.optim.SGD([weight], lr=0.0).step()
    assert torch.equal(weights.get("turned", turn, weight), weight.detach().t())


def test_what_shares_memory_is_not_kept_and_freed_weights_are_forgotten() -> None:
    weights, turn, weight = PreparedWeights(), Turn(), torch.randn(3, 4)
    assert weights.get("same", lambda own: own.view(4, 3), weight).data_ptr() == weight.data_ptr()
    assert weights.nbytes == 0
    weights.get("turned", turn, weight)
    del weight
    gc.collect()
    assert weights.nbytes == 0
    other = torch.randn(2, 2)
    weights.get("turned", turn, other)
    assert weights.nbytes == other.nbytes
    weights.clear()
    assert weights.nbytes == 0


def test_copies_made_in_inference_mode_serve_training() -> None:
    weights, turn, weight = PreparedWeights(), Turn(), torch.nn.Parameter(torch.randn(3, 4))
    with torch.inference_mode():
        copy = weights.get("turned", turn, weight)
        made_here = torch.randn(2, 2)
        weights.get("turned", turn, made_here)
    assert not copy.is_inference() and weights.get("turned", turn, weight) is copy
    assert weights.nbytes == copy.nbytes, "an inference tensor has no version, so nothing is kept for it"


def test_the_count_without_memory_is_what_is_kept() -> None:
    counted, real, turn = CountedWeights(), PreparedWeights(), Turn()
    for device, weights in (("meta", counted), ("cpu", real)):
        source = torch.zeros(3, 4, device=device)
        for _ in range(2):
            weights.get("turned", turn, source)
            weights.get("same", lambda own: own, source)
        assert weights.nbytes == 48

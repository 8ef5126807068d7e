"""Dense MLPs in bf16 as one expert of the blockwise kernels, through the mock of nkilib. H hidden, I intermediate."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_neuron_moe import patch_model
from hf_neuron_moe.activation_policy import parse_keep
from hf_neuron_moe.backends.base import BackwardCall
from hf_neuron_moe.backends.gate import SWIGLU, Gate
from hf_neuron_moe.backends.spec import BlockShape, BlockSpec, Wants
from hf_neuron_moe.errors import NeuronMoEWarning, ShapeError
from tests.neuron.gate_runs import BF16, CLAMPED, SHIFTED, SQUARED, H, I, T, compared, network, neuron, normal
from tests.refusals import refused
from tests.tiny_models import tiny_model

Start = Callable[..., SimpleNamespace]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("release", [(2, 29), (2, 33)])
@pytest.mark.parametrize(
    ("gate", "biased"),
    [(SWIGLU, ()), (SWIGLU, (True, True, True)), (CLAMPED, (False, True, False)), (SHIFTED, (False, False, True))],
)
def test_dense_blocks_in_bf16_are_one_expert(
    machine: Start, gate: Gate, biased: tuple[bool, ...], release: tuple[int, int]
) -> None:
    machine(release=release, target="trn2")
    torch.manual_seed(4)
    spec, weights = BlockSpec("bf16", gate=gate), network(*biased)
    assert max(compared(spec, None, weights, "minimal", "recompute", "gate_pre")) <= BF16
    x = normal(T, H, dtype=torch.bfloat16)
    y, saved = neuron().mlp_forward(x[:0], weights, spec, parse_keep("minimal"))
    call = BackwardCall(spec, parse_keep("minimal"), Wants())
    grads = neuron().mlp_backward(x[:0], x[:0], weights, saved, call)
    there = [x[:0], *weights[:3], *[bias for bias in weights[3:] if bias is not None]]
    assert y.shape == (0, H) and sum(grad.numel() for grad in grads) == sum(each.numel() for each in there)


def test_a_long_dense_call_in_bf16_runs_on_torch_where_that_is_allowed(machine: Start, monkeypatch: Any) -> None:
    double = machine(target="trn2").double
    monkeypatch.setattr(importlib.import_module("hf_neuron_moe.backends.neuron.limits"), "BF16_TOKENS", 32)
    ids = torch.randint(3, 60, (1, 40))
    model = tiny_model("llama", num_hidden_layers=1).bfloat16()
    patch_model(model, {"backend": "neuron"})
    with refused(ShapeError, "the number of tokens (batch size times length)", got="40"):
        model(input_ids=ids)
    model = tiny_model("llama", num_hidden_layers=1).bfloat16()
    report = patch_model(model, {"backend": "neuron", "fallback": "torch"})
    assert "calls of more than 32 tokens run on torch" in report.patched[0].notes
    label = "computed by the bf16 kernels of experts as one expert with affinity 1"
    assert any(note.startswith(label) for note in report.patched[0].notes) and label in str(report)
    with pytest.warns(NeuronMoEWarning, match="more than 32 tokens"):
        model(input_ids=ids)
    assert not double.launches
    model(input_ids=ids[:, :20])
    assert len(double.launches) == 1


def test_dense_blocks_have_limits_of_their_own(machine: Start) -> None:
    machine()
    shape = BlockShape("mlp", H, I)
    reason = neuron().support(shape, BlockSpec("mxfp8", gate=CLAMPED)).reason
    assert "its gate is silu, clamped, and the dense MXFP8 kernels compute" in reason
    biased = neuron().support(shape._replace(biased=(True, False)), BlockSpec("mxfp8")).reason
    assert "its projections have biases, and the dense MXFP8" in biased
    machine(target="trn2")
    assert "without a gate projection" in neuron().support(shape, BlockSpec("bf16", gate=SQUARED)).reason

"""Inference with few rows computes every gate, bias and layout as training does, without tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_neuron_moe.backends.torch import backend, compute, generation
from hf_neuron_moe.modules import ops
from tests.backends.test_gates import GATES
from tests.backends.test_rounding_gates import LAYOUTS, dense_operands, expert_operands

BOUND = {"fp32": 1e-5, "bf16": 2.0**-7, "mxfp8": 2.0**-5}
"""Sums in another order; in bf16 a product may be rounded before its bias, in mxfp8 a rounding may cross a border."""


@pytest.fixture(autouse=True)
def no_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: request.node.callspec.params["native"])
    generation.generation_copies().clear()


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("computed as training computes it")


def near(few: torch.Tensor, trained: torch.Tensor, precision: str) -> bool:
    return float((few - trained).double().norm() / trained.double().norm()) < BOUND[precision]


@pytest.mark.sampled(3)
@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("native", [False, True], ids=["fp32_products", "bf16_products"])
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("tokens", [1, 6])
@torch.no_grad()
def test_experts(native: bool, precision: str, name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = GATES[name]
    for layout, biased in (("stock", True), ("both", True), ("interleaved", False)):
        operands, _ = expert_operands(gate, tokens, 96, 200, biased)
        transposed, interleaved = LAYOUTS[layout]
        if transposed:
            operands |= {key: operands[key].transpose(1, 2).contiguous() for key in ("gate_up", "down")}
        if precision == "fp32":
            operands = {key: value if key == "index" else value.float() for key, value in operands.items()}
        operands["index"][0, 0] = 4  # of another rank
        given = [operands[key] for key in ("x", "index", "weights", "gate_up", "down")]
        options = {"precision": precision, "block_size": 128, "gate": gate, "interleaved": interleaved and gate.gated}
        biases = (operands.get("gate_up_bias"), operands.get("down_bias"))
        options |= {"backend": "torch", "transposed": transposed, "biases": biases}
        trained = ops.experts(*given, training=True, **options)
        with monkeypatch.context() as patch:
            patch.setattr(backend.TorchBackend, "_forward", refuse)
            assert near(ops.experts(*given, **options), trained, precision), layout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("native", [False, True], ids=["fp32_products", "bf16_products"])
@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("name", [name for name, gate in GATES.items() if gate.gated])
@pytest.mark.parametrize("rows", [1, 6])
@torch.no_grad()
def test_dense(native: bool, precision: str, name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for biased in (False, True):
        given, _ = dense_operands(rows, 96, 200, biased=biased)
        if precision == "fp32":
            given = [tensor.float() for tensor in given]
        biases = (given[4], given[5], given[6]) if biased else (None, None, None)
        options: dict[str, Any] = {"precision": precision, "gate": GATES[name], "backend": "torch", "biases": biases}
        trained = ops.swiglu_mlp(*given[:4], training=True, **options)
        with monkeypatch.context() as patch:
            patch.setattr(backend.TorchBackend, "_forward", refuse)
            assert near(ops.swiglu_mlp(*given[:4], **options), trained, precision), biased

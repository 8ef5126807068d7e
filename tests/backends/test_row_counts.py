"""The numbers of rows that the products of processors with bf16 instructions see, which oneDNN keeps code for.

Legend: T tokens, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from hf_neuron_moe import NeuronMoEConfig, patch_model
from hf_neuron_moe.backends.torch import compute
from hf_neuron_moe.backends.torch.grouped_products import FEW_ROWS, whole_end, whole_rows

HIDDEN, INNER, EXPERTS = 64, 96, 4
PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_cpu_bf16_matmul_is_fast", lambda: True)


def test_whole_rows_are_few_and_not_many_more() -> None:
    for power in range(4, 20):
        octave = range(1 << power, 2 << power, max((1 << power) // 999, 1))
        assert len({whole_rows(rows) for rows in octave}) <= 33
    for rows in (*range(1, 5000), 99_999):
        assert whole_rows(rows) % 8 == 0 and rows <= whole_rows(rows) < max(rows + 8, rows * 17 / 16)


def test_products_end_where_those_of_some_run_do() -> None:
    """Many rows are padded by more than the few of a later run have."""
    assert whole_end([]) == 0
    assert whole_end([(0, 0, 3), (2, 3, 9)]) == 11
    assert whole_end([(0, 0, 2049), (2, 2049, 2050)]) == whole_rows(2049) == 2112


def token_counts_of_products(block: torch.nn.Module, x_TH: torch.Tensor, sizes: set[int]) -> Iterator[int]:
    """Yield the extents that are none of the weights' of every product of a forward and a backward."""
    x_TH.requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watched:
        block(x_TH[None]).add_(1.0).sum().backward()  # in place, as some models add to it
    for event in watched.events() or ():
        if event.name in PRODUCTS:
            left = next(shape for shape in event.input_shapes if len(shape) == 2)
            yield from (extent for extent in left if extent not in sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_products_have_whole_rows(family: str, dtype: torch.dtype) -> None:
    """Values of fp32 are copied for the gradients of the weights, those of bf16 are not: both have whole rows."""
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER}
    sizes |= {"vocab_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    else:
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=2))
    model.to(dtype)  # type: ignore[arg-type]
    patch_model(model, NeuronMoEConfig(precision="bf16"))
    block = model.get_submodule("model.layers.0.mlp")
    weights = {HIDDEN, INNER, 2 * INNER, INNER // 8, INNER - INNER // 8, EXPERTS}
    for tokens in (FEW_ROWS * EXPERTS + 1, FEW_ROWS * EXPERTS + 13):
        found = {*token_counts_of_products(block, torch.randn(tokens, HIDDEN).to(dtype), weights)}
        found -= {tokens} if family == "mixtral" else set()  # the router's, which is stock
        assert found, "no product was seen"
        assert found == {whole_rows(rows) for rows in found}

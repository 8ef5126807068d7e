"""Models with a frozen MX base: the policy of their blocks can be chosen, and what they say they keep is measured."""

from __future__ import annotations

import pytest
import torch

from hf_neuron_moe import set_activations
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.training import measure_saved_bytes
from tests.quantizers.conftest import SIZES, UNEVEN, WORDS, Converted, load
from tests.tiny_models import tokens


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", SIZES, {"precision": "mxfp8", "layout": "fused"}),
        ("qwen2_moe", SIZES, {"precision": "mxfp8", "layout": "fused"}),
        ("llama", UNEVEN, {"precision": "mxfp8", "layout": "kernel"}),
        ("llama_biased", SIZES, {"precision": "mxfp8", "layout": "kernel"}),
        ("mixtral", WORDS, {"precision": "mxfp4", "layout": "kernel"}),
        ("nemotron_h", WORDS, {"precision": "mxfp4", "layout": "kernel"}),
    ],
)
def test_policies_of_a_loaded_model(
    family: str, sizes: dict[str, int], options: dict[str, str], converted: Converted
) -> None:
    model = load(converted(family, sizes, **options)).train()
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedBlock)}
    embeddings, ids, results = model.get_input_embeddings(), tokens(), {}
    for policy in ("full", "minimal", "recompute", "up", "fp8"):
        assert set(set_activations(model, policy)) == set(blocks)
        inputs = embeddings(ids).detach().requires_grad_()
        with measure_saved_bytes(blocks) as saved:
            loss = model(inputs_embeds=inputs, labels=ids).loss
        for name, block in blocks.items():
            assert saved.modules[name].bytes_per_token == block.saved_bytes(ids.numel()) / ids.numel(), (policy, name)
            assert (block.saved_bytes_per_call > 0) is (family == "llama_biased"), "biases are joined by each call"
        (results[policy],) = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(results[policy], results["full"]) for policy in ("minimal", "recompute", "up"))
    assert not torch.equal(results["fp8"], results["full"])

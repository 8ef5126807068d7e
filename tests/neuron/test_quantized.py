"""Networks with frozen MX weights on the Neuron backend: the scales arrive in the layout that the call announces.

Letters: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.errors import BackendUnavailableError, NeuronMoEError
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from hf_neuron_moe.modules.quantized_ops import quantized_network
from tests.refusals import refused
from tests.tiny_models import tiny_model

Start = Callable[..., SimpleNamespace]
DENSE = {"hidden_size": 256, "intermediate_size": 1024}
WIDE = {"hidden_size": 8704, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32}
EXPERTS = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 2}


def stack_of(folder: Path, family: str, sizes: dict[str, int], **options: Any) -> Any:
    """The weights of the first frozen block of a converted tiny model."""
    tiny_model(family, num_hidden_layers=1, **sizes).bfloat16().save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "converted", ConvertOptions(**{"precision": "mxfp8", **options}))
    model = AutoModelForCausalLM.from_pretrained(folder / "converted")
    block = next(module for module in model.modules() if isinstance(module, QuantizedBlock))
    return block.neuron_stack


def forward(stack: Any, x: Tensor, index: Tensor | None, weights: Tensor | None, backend: str) -> Tensor:
    with torch.no_grad():
        return quantized_network(x, index, weights, stack, backend=backend)


@pytest.mark.parametrize("release", [pytest.param((2, 30), marks=pytest.mark.slow), (2, 33)])
@pytest.mark.parametrize("options", [{"layout": "kernel"}, {"layout": "kernel", "scales": "oversized"}])
def test_a_frozen_mlp(options: dict[str, str], release: tuple[int, int], tmp_path: Path, machine: Start) -> None:
    stack = stack_of(tmp_path, "llama", DENSE, **options)
    x = (torch.randn(20, 256) * 0.3).bfloat16()
    expected = forward(stack, x, None, None, "torch")
    double = machine(release=release).double
    found = forward(stack, x, None, None, "neuron")
    assert double.names == ["mlp_forward_mxfp8_nki"]
    call = double.calls[0].arguments
    assert call["gate_up_scales"] is not None and call["down_scales"] is not None
    assert torch.equal(found, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("release", "kernel"),
    [
        ((2, 29), "bwmm_shard_on_block_mx"),  # moe_cte has no arguments for scales there
        pytest.param((2, 30), "moe_cte", marks=pytest.mark.slow),
        ((2, 33), "moe_cte"),
    ],
)
@pytest.mark.parametrize("precision", ["mxfp8", "mxfp4"])
def test_frozen_experts(precision: str, release: tuple[int, int], kernel: str, tmp_path: Path, machine: Start) -> None:
    stack = stack_of(tmp_path, "mixtral", EXPERTS, purpose="inference", precision=precision)
    x = (torch.randn(20, 512) * 0.3).bfloat16()
    weights, index = torch.rand(20, 2).softmax(-1).topk(2, -1)
    expected = forward(stack, x, index, weights, "torch")
    double = machine(release=release).double
    found = forward(stack, x, index, weights, "neuron")
    assert double.names == [kernel]
    # The kernel takes its affinities in bf16 (2^-9) and rounds every expert's share and the sum to bf16.
    assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("release", [pytest.param((2, 29), marks=pytest.mark.slow), (2, 33)])
def test_experts_too_wide_for_the_unified_entry(release: tuple[int, int], tmp_path: Path, machine: Start) -> None:
    """moe_cte lists shard_on_i_mx and has no branch for it: its kernel is called directly."""
    sizes = EXPERTS | WIDE
    stack = stack_of(tmp_path, "mixtral", sizes, purpose="inference", precision="mxfp4")
    x = (torch.randn(20, 8704) * 0.3).bfloat16()
    weights, index = torch.rand(20, 2).softmax(-1).topk(1, -1)
    expected = forward(stack, x, index, weights, "torch")
    double = machine(release=release).double
    found = forward(stack, x, index, weights, "neuron")
    assert double.names == ["blockwise_mm_shard_intermediate_mx"]
    assert double.calls[0].arguments["expert_affinities_scaling_mode"].name == "POST_SCALE"
    # The documented tolerance of MX kernels: 5e-2 of the largest value.
    assert (found - expected).abs().max() <= 5e-2 * expected.abs().max()


def test_wide_experts_of_other_inner_sizes_are_refused(tmp_path: Path, machine: Start) -> None:
    sizes = EXPERTS | WIDE | {"intermediate_size": 512}
    stack = stack_of(tmp_path, "mixtral", sizes, purpose="inference", precision="mxfp4")
    double = machine().double
    index, weights = torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1)
    with refused(
        BackendUnavailableError, "a block with MX weights", "multiples of 1024 of the intermediate size, and it is 512"
    ):
        forward(stack, torch.zeros(4, 8704).bfloat16(), index, weights, "neuron")
    assert not double.launches


def test_products_in_two_formats_are_refused(tmp_path: Path, machine: Start) -> None:
    precision = {"*": "mxfp4", "*.down_proj": "mxfp8"}
    stack = stack_of(tmp_path, "mixtral", EXPERTS, purpose="inference", precision=precision)
    double = machine().double
    index, weights = torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1)
    with refused(
        BackendUnavailableError, "a block with MX weights", "one element format .*, and these are e2m1 and e4m3fn"
    ):
        forward(stack, torch.zeros(4, 512).bfloat16(), index, weights, "neuron")
    assert not double.launches


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_training_through_frozen_weights_is_computed_or_refused(family: str, tmp_path: Path, machine: Start) -> None:
    experts = family == "mixtral"
    stack = stack_of(tmp_path, family, EXPERTS if experts else DENSE)
    x = (torch.randn(20, stack.hidden) * 0.3).bfloat16().requires_grad_()
    weights, index = torch.rand(20, 2).softmax(-1).topk(1, -1)
    routing = (index, weights) if experts else (None, None)
    quantized_network(x, *routing, stack, backend="torch").float().square().mean().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    double = machine().double
    try:
        quantized_network(x, *routing, stack, backend="neuron").float().square().mean().backward()
    except NeuronMoEError as refusal:
        assert "gradient" in str(refusal) and not double.launches
        return
    # e4m3 rounds to 2^-4.
    assert (x.grad - expected).abs().max() <= 2**-4 * expected.abs().max()


def test_frozen_networks_are_refused_on_trn2(tmp_path: Path, machine: Start) -> None:
    stack = stack_of(tmp_path, "llama", DENSE)
    double = machine(target="trn2").double
    with refused(BackendUnavailableError, "a block with MX weights", "[Tt]rn3"):
        forward(stack, torch.zeros(8, 256, dtype=torch.bfloat16), None, None, "neuron")
    assert not double.launches

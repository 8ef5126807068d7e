"""torch.compile, forward and backward: patched blocks are one graph; compiled runs have the losses of eager ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_neuron_moe import patch_model
from tests.tiny_models import tiny_model, tokens

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor compiles C++ on CPUs: there is no g++ here"
)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, NEEDS_COMPILER])]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """No compiled code from other tests, none left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block_and_inputs(family: str, config: dict[str, Any]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A patched block and inputs to it that ask for gradients."""
    model = tiny_model(family)
    patch_model(model, config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 32, generator=generator, requires_grad=True)
    mlp = model.model.layers[0].mlp
    if family != "mixtral":
        return mlp, (x,)
    weights = torch.rand(20, 2, generator=generator, requires_grad=True)
    return mlp.experts, (x, torch.rand(20, 4, generator=generator).topk(2).indices, weights)


def step(call: Any, block: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and every gradient of one forward and backward."""
    for tensor in (*inputs, *block.parameters()):
        tensor.grad = None
    y = call(*inputs)
    y.square().sum().backward()
    wanted = [*(tensor for tensor in inputs if tensor.requires_grad), *block.parameters()]
    grads = [tensor.grad for tensor in wanted]
    assert all(grad is not None for grad in grads)
    return [y.detach(), *grads]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.slow
def test_a_block_is_one_graph_forward_and_backward(family: str, backend: str) -> None:
    options = [("bf16", "minimal", "kernel")]
    if backend == "aot_eager":  # of the others, the compiler behind it sees nothing: the work is in the operators
        options += [("bf16", "minimal", "stock"), ("mxfp8", "fp8", "stock"), ("fp32", "recompute", "stock")]
    for precision, activations, home in options:
        config = {"precision": precision, "activations": activations, "weights": home}
        block, inputs = block_and_inputs(family, config)
        expected = [tensor.clone() for tensor in step(block, block, inputs)]
        torch._dynamo.reset()
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        for actual, wanted in zip(step(compiled, block, inputs), expected, strict=True):
            assert torch.equal(actual, wanted), config


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "mixtral"])
def test_a_training_step_has_no_graph_break(family: str) -> None:
    model = tiny_model(family)
    patch_model(model)
    explained = torch._dynamo.explain(lambda ids: model(ids, labels=ids, use_cache=False).loss)(tokens())
    assert explained.graph_break_count == 0
    assert explained.graph_count == 1
    names = {str(node.target) for node in explained.graphs[0].graph.nodes}
    operator = "moe_fwd" if family == "mixtral" else "mlp_fwd"
    assert any(operator in name for name in names), "the block's operator is in the graph"


def losses(model: nn.Module, folder: Path, backend: str | None) -> list[float]:
    """The losses of a short run of the stock Trainer."""
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(16, 12, seed=11)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=5,
        disable_tqdm=True,
        torch_compile=backend is not None,
        torch_compile_backend=backend,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "aot_eager"), ("mixtral", "aot_eager"), pytest.param("mixtral", "inductor", marks=NEEDS_COMPILER)],
)
def test_a_compiled_run_has_the_losses_of_an_eager_one(family: str, backend: str, tmp_path: Path) -> None:
    found = []
    for way in (None, backend):
        model = tiny_model(family)
        patch_model(model, {"precision": "fp32"})
        torch._dynamo.utils.counters.clear()
        found.append(losses(model, tmp_path / str(way), way))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    eager, compiled = found
    assert compiled[-1] < compiled[0]
    # The compiler orders the sums of norms, softmax and loss differently; the blocks' own results are equal (above).
    assert compiled == pytest.approx(eager, rel=1e-5)

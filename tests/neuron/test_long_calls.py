"""Calls with more tokens than the kernels take: PyTorch computes them where the config allows it, visibly.

Letters: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_neuron_moe import patch_model
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.errors import NeuronMoEWarning, ShapeError
from hf_neuron_moe.modules.backend_choice import LongCalls
from hf_neuron_moe.modules.block import NeuronBlock
from hf_neuron_moe.modules.experts import register_experts_implementation
from hf_neuron_moe.modules.quantized_blocks import QuantizedBlock
from tests.neuron.small_runs import EXPERTS, EXPERTS_MX, Case
from tests.refusals import refused
from tests.tiny_models import tiny_model, tokens

Start = Callable[..., SimpleNamespace]
MOST = 32768
"""The documented limit of ``moe_cte``."""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def patched(case: Case, backend: str, layers: int = 1, **options: Any) -> tuple[Any, Any]:
    model = case.model(layers)
    report = patch_model(model, {**case.options, "backend": backend, "weights": "kernel", **options})
    return model, report


def blocks_of(model: nn.Module) -> list[NeuronBlock]:
    return [module for module in model.modules() if isinstance(module, NeuronBlock)]


def call(block: Any, rows: int, hidden: int = 512, experts: int = 4) -> tuple[Tensor, Tensor]:
    """Output of a block and the input's gradient."""
    generator = torch.Generator().manual_seed(3)
    x_TH = (torch.randn(rows, hidden, generator=generator) * 0.2).bfloat16().requires_grad_()
    weight_TK, index_TK = torch.rand(rows, experts, generator=generator).softmax(-1).topk(2, -1)
    out = block(x_TH, index_TK, weight_TK)
    (gradient,) = torch.autograd.grad(out.float().square().mean(), x_TH)
    return out.detach(), gradient


@pytest.mark.slow
def test_a_long_call_runs_on_torch_where_that_is_allowed(machine: Start) -> None:
    reference, _ = patched(EXPERTS, "torch")
    expected = call(blocks_of(reference)[0], MOST + 1)
    double = machine(target="trn2").double
    model, _ = patched(EXPERTS, "neuron", fallback="torch")
    with pytest.warns(NeuronMoEWarning, match=r"more than 32,768 tokens.*this one has 32,769"):
        found = call(blocks_of(model)[0], MOST + 1)
    assert not double.launches
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    call(blocks_of(model)[0], 64)
    assert len(double.launches) == 2, "others run on the kernels"


def test_without_permission_it_is_refused_as_before(machine: Start) -> None:
    double = machine(target="trn2").double
    model, report = patched(EXPERTS, "neuron")
    with refused(ShapeError, "the number of tokens (batch size times length)", got="32769"):
        call(blocks_of(model)[0], MOST + 1)
    assert not double.launches
    assert [entry.notes for entry in report.patched if "run on torch" in str(entry.notes)] == []


def test_the_report_says_so(machine: Start) -> None:
    machine(target="trn2")
    _, report = patched(EXPERTS, "neuron", layers=2, fallback="torch")
    note = "calls of more than 32,768 tokens run on torch"
    assert len(report.patched) == 2
    for entry in report.patched:
        assert note in entry.notes and entry.backend == "neuron" and entry.fallback == ""
    assert f"Note on {report.patched[0].name} and 1 more: {note}." in str(report)
    assert all(note in entry["notes"] for entry in json.loads(json.dumps(report.to_dict()))["entries"])


@pytest.fixture
def short(machine: Start) -> Callable[..., Any]:
    """A machine whose kernels take 32 tokens, so that long calls are quick."""

    def start(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
        double = machine(**options).double
        monkeypatch.setattr(importlib.import_module("hf_neuron_moe.backends.neuron.limits"), "BF16_TOKENS", 32)
        monkeypatch.setattr(importlib.import_module("hf_neuron_moe.backends.neuron.limits"), "MAX_TOKENS", 32)
        return double

    return start


def shown(run: Callable[[], Any]) -> list[str]:
    """This package's warnings of long calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(entry.message) for entry in caught if entry.category is NeuronMoEWarning]


@pytest.mark.parametrize("case", [EXPERTS, EXPERTS_MX], ids=["bf16", "mxfp8"])
def test_a_model_warns_once(case: Case, short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    short(monkeypatch, target=case.target)
    one, other = (patched(case, "neuron", layers=2, fallback="torch")[0] for _ in range(2))
    twin = copy.deepcopy(other)
    long, brief = tokens(2, 20), tokens(2, 10)
    assert shown(lambda: one(input_ids=brief)) == []
    first = shown(lambda: [one(input_ids=long) for _ in range(3)])
    assert len(first) == 1 and "more than 32 tokens" in first[0] and blocks_of(one)[0].neuron_name in first[0]
    assert len(shown(lambda: other(input_ids=long))) == len(shown(lambda: twin(input_ids=long))) == 1


@pytest.mark.filterwarnings("ignore:.*more than 32 tokens")
@pytest.mark.slow
def test_compiled_models_choose_without_a_graph_break(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    double = short(monkeypatch, target="trn2")
    model, _ = patched(EXPERTS, "neuron", fallback="torch")
    block, width = model.model.layers[0].mlp, model.config.hidden_size
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=False)
    launches = []
    for length in (12, 20, 12, 20):
        x = torch.randn(2, length, width).requires_grad_()
        out = compiled(x)
        assert torch.equal(out, block(x))
        out.square().mean().backward()
        launches.append(len(double.launches))
        double.clear()
    assert counter.frame_count == 2, "one graph per shape"
    assert launches == [3, 0, 3, 0], "compiled and eager forward, and the compiled backward"


def test_registered_experts_choose_per_call(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    double = short(monkeypatch, target="trn2")
    model = EXPERTS.model()
    try:
        register_experts_implementation({**EXPERTS.options, "backend": "neuron", "fallback": "torch"}, "long_torch")
        register_experts_implementation({**EXPERTS.options, "backend": "neuron"}, "long_refused")
        model.set_experts_implementation("long_torch")
        (message,) = shown(lambda: [model(input_ids=tokens(2, 20)) for _ in range(2)])
        assert "at most 32 tokens per call" in message and not double.launches
        model(input_ids=tokens(2, 10))
        assert len(double.launches) == 1
        model.set_experts_implementation("long_refused")
        with refused(ShapeError, "the number of tokens (batch size times length)", got="40"):
            model(input_ids=tokens(2, 20))
    finally:
        for name in ("long_torch", "long_refused"):
            type(ALL_EXPERTS_FUNCTIONS)._global_mapping.pop(name, None)


def test_frozen_experts_choose_per_call(tmp_path: Path, short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 2}
    tiny_model("mixtral", num_hidden_layers=2, **sizes).bfloat16().save_pretrained(tmp_path / "source")
    options = ConvertOptions(precision="mxfp8", purpose="inference")
    convert_checkpoint(tmp_path / "source", tmp_path / "converted", options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    block, second = (module for module in model.modules() if isinstance(module, QuantizedBlock))
    x_TH = (torch.randn(40, 512) * 0.3).bfloat16()
    weight_TK, index_TK = torch.rand(40, 2).softmax(-1).topk(1, -1)

    def forward(rows: int) -> Tensor:
        with torch.no_grad():
            out: Tensor = block(x_TH[:rows], index_TK[:rows], weight_TK[:rows])
        return out

    expected = forward(40)
    double = short(monkeypatch, target="trn3")
    block.neuron_config = replace(block.neuron_config, backend="neuron")
    forward(32)
    assert len(double.launches) == 1
    with refused(ShapeError, "the number of tokens (batch size times length)", got="40"):
        forward(40)
    block.neuron_config = replace(block.neuron_config, fallback="torch")
    (message,) = shown(lambda: [forward(40) for _ in range(2)])
    assert "QuantizedExperts" in message and "at most 32 tokens per call" in message
    assert torch.equal(forward(40), expected) and len(double.launches) == 1
    block, used = second, block
    block.neuron_config = used.neuron_config
    assert shown(lambda: forward(40)) == [], "once per model"
    forward(32)
    assert len(double.launches) == 2


def test_the_longest_call_is_the_kernels() -> None:
    calls = LongCalls(most=8)
    assert not calls.take(8, "mlp")
    with pytest.warns(NeuronMoEWarning, match="more than 8 tokens"):
        assert calls.take(9, "mlp")

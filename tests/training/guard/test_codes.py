"""Blocks whose weights are MX codes: healthy steps are those of float64, and faults are named within their step."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_neuron_moe import NeuronMoECallback, set_activations
from hf_neuron_moe.backends.mx_weights import MXExpertStack
from hf_neuron_moe.backends.torch.backend import TorchBackend
from hf_neuron_moe.backends.torch.tiles import Loader
from hf_neuron_moe.errors import GuardError
from hf_neuron_moe.training.blocks import patched_blocks
from hf_neuron_moe.training.guard import reproduction
from hf_neuron_moe.training.guard.bands import LEARNED, Bands
from hf_neuron_moe.training.guard.findings import Finding, row_errors
from hf_neuron_moe.training.guard.reproduction import Reproduction
from hf_neuron_moe.training.guard.watch import StepLooked, Watch
from tests.quantizers.conftest import SIZES, UNEVEN, WORDS, Converted, converted as converted, load, source as source
from tests.quantizers.test_quantized_adapters import ATTENTION, adapted
from tests.tiny_models import tokens


def looked_at(model: Any, watch: Watch, step: int) -> StepLooked:
    watch.begin(step)
    ids = tokens(4, 40, seed=step)
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    torch.autograd.grad(model(inputs_embeds=inputs, labels=ids).loss, inputs)
    watch.pause()
    assert watch.looked is not None
    return watch.looked


class Replaying(Watch):
    """Replays every product that is compared, but what was saved in FP8 since."""

    fp8 = False

    def _judge(self, block: str, findings: Sequence[Finding], form: str) -> None:
        for found in findings:
            replayed = found.name in ("y", "dx") or (found.name in ("gate", "up") and not self.fp8)
            if replayed and found.evidence is not None:
                seen = found.evidence()
                with tempfile.TemporaryDirectory() as folder:  # as an alarm leaves it
                    Reproduction.of({}, seen).save(Path(folder) / "seen.safetensors", 0)
                    shown = Reproduction.load(Path(folder) / "seen.safetensors")
                assert shown.product is not None
                errors = row_errors(shown.observed_RC.bfloat16(), shown.product.value())
                assert errors.worst <= 2e-2, (found.product, found.name)
        super()._judge(block, findings, form)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["full", "minimal", "recompute", "up", "fp8"])
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", SIZES, {"precision": "mxfp8", "layout": "fused"}),
        ("llama", UNEVEN, {"precision": "mxfp8", "layout": "kernel"}),
        ("qwen2_moe", SIZES, {"precision": "mxfp8", "layout": "fused"}),
        ("llama_biased", UNEVEN, {"precision": "mxfp8", "layout": "kernel", "pad": True}),
        ("gpt_oss", WORDS, {"precision": "mxfp4", "layout": "kernel"}),
        ("mixtral", WORDS, {"precision": "mxfp4", "layout": "kernel"}),
        ("nemotron_h", WORDS, {"precision": "mxfp8", "layout": "kernel", "purpose": "inference"}),
    ],
)
def test_healthy_results_are_those_of_float64(
    family: str, sizes: dict[str, int], options: dict[str, str], policy: str, converted: Converted
) -> None:
    model = load(converted(family, sizes, **options)).train()
    set_activations(model, policy)
    watch = Replaying(model, Bands())
    watch.fp8 = policy == "fp8"
    looked = looked_at(model, watch, 1)
    assert looked.alarms == []
    assert len(looked.blocks) == len(watch.blocks) >= 2
    for products in looked.blocks.values():
        assert {"gate_up", "down", "down.dx", "gate_up.dx"} == products.keys()
        for measured in products.values():
            for figures in measured.values():
                assert figures.get("worst", 0.0) <= 8e-3 and figures["nonfinite"] == 0


ROW, EXPERT = 17, 2
Change = Callable[..., Any]


def _stack(**changes: Callable[[Tensor], Tensor]) -> Change:
    """Give the kernel other codes than the block has."""

    def broken(real: Change, *args: Any) -> Any:
        def other(stack: MXExpertStack) -> MXExpertStack:
            return replace(stack, **{name: change(getattr(stack, name)) for name, change in changes.items()})

        return real(*(other(arg) if isinstance(arg, MXExpertStack) else arg for arg in args))

    return broken


def _unquantized(columns: int) -> Change:
    """Leave the operand of so many columns as it is."""
    quantize = Loader.quantize

    def left(self: Loader, buffer: Tensor, axis: int, scheme: str = "wrapX") -> Tensor:
        return buffer if buffer.shape[1] == columns else quantize(self, buffer, axis, scheme)

    def broken(real: Change, *args: Any) -> Any:
        with patch.object(Loader, "quantize", left):
            return real(*args)

    return broken


def _result(change: Callable[[Tensor], Any]) -> Change:
    def broken(real: Change, *args: Any) -> Any:
        results = real(*args)
        change(results[0])
        return results

    return broken


def _elsewhere(real: Change, x: Tensor, routing: Any, *rest: Any) -> Any:
    index = routing.index_TK.clone()
    index[ROW, 0] = next(expert for expert in range(4) if expert not in index[ROW].tolist())
    return real(x, routing._replace(index_TK=index), *rest)


def _raised(scales: Tensor) -> Tensor:
    return scales + (torch.arange(scales.shape[-1]) == 5).to(scales.dtype)


def _nan(values: Tensor) -> None:
    values[ROW] = torch.nan


def _neighbor(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[EXPERT] = tensor[EXPERT - 1]
    return changed


FORWARD, BACKWARD = "quantized_forward", "quantized_backward"
FAULTS = [
    ("llama", FORWARD, "gate_up", _stack(gate_up_scales=_raised), -1),  # a scale off by one
    ("llama", FORWARD, "down", _stack(down_scales=_raised), -1),
    ("llama", FORWARD, "gate_up", _unquantized(128), -1),  # rounding skipped
    ("llama", FORWARD, "down", _unquantized(256), -1),
    ("llama", FORWARD, "down", _stack(down_codes=lambda codes: codes.roll(1, 0)), -1),  # stale codes
    ("llama", FORWARD, "down", _result(_nan), -1),
    ("llama", BACKWARD, "gate_up.dx", _result(_nan), -1),
    ("llama", BACKWARD, "gate_up.dx", _stack(gate_up_codes=lambda codes: codes.roll(1, 0)), -1),
    ("mixtral", FORWARD, "gate_up", _elsewhere, None),  # a token routed elsewhere
    ("mixtral", FORWARD, "gate_up", _stack(gate_up_codes=_neighbor, gate_up_scales=_neighbor), EXPERT),
    ("mixtral", FORWARD, "down", _stack(down_codes=_neighbor), EXPERT),
    ("mixtral", BACKWARD, "gate_up.dx", _stack(gate_up_codes=_neighbor), EXPERT),
    ("mixtral", BACKWARD, "down.dx", _stack(down_codes=_neighbor), None),
    ("mixtral", BACKWARD, "gate_up.dx", _result(lambda dx: dx[ROW].zero_()), None),
]


@contextmanager
def broken(block: Any, kernel: str, change: Change) -> Iterator[None]:
    """Break a kernel of one block alone."""
    mine, real = block.neuron_stack.down_codes.data_ptr(), getattr(TorchBackend, kernel)

    def of_block(self: TorchBackend, *args: Any) -> Any:
        stack = next(arg for arg in args if isinstance(arg, MXExpertStack))
        call = real.__get__(self)
        return change(call, *args) if stack.down_codes.data_ptr() == mine else call(*args)

    with patch.object(TorchBackend, kernel, of_block):
        yield


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "mixtral"])
def test_faults_are_named_in_their_step(family: str, converted: Converted) -> None:
    model = load(converted(family, precision="mxfp8", layout="fused")).train()
    watch, step = Watch(model, Bands()), 0
    for step in range(1, LEARNED + 1):
        looked = looked_at(model, watch, step)
        assert looked.alarms == []
        watch.bands.learn(looked.blocks)
    name, block = list(patched_blocks(model).items())[1]
    for number, (of, kernel, product, change, expert) in enumerate(FAULTS):
        if of != family:
            continue
        step += 1
        with broken(block, kernel, change):
            alarms = looked_at(model, watch, step).alarms
        assert alarms, number
        assert (alarms[0]["block"], alarms[0]["product"]) == (name, product), number
        assert expert is None or alarms[0]["expert"] == expert, number
    assert looked_at(model, watch, step + 1).alarms == []


def test_an_adapters_training_stops_and_leaves_what_replays_it(
    converted: Converted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = adapted(load(converted("mixtral", WORDS, precision="mxfp4", layout="kernel")), **ATTENTION)
    name, block = list(patched_blocks(model).items())[1]
    stale = broken(block, FORWARD, _stack(down_codes=_neighbor))

    class Breaking(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                stale.__enter__()

    text = tokens(1, 40)[0]
    arguments = TrainingArguments(tmp_path, max_steps=5, report_to=[], use_cpu=True, save_steps=2)
    guard = NeuronMoECallback(guard="stop")
    run = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": text, "labels": text}] * 16)
    guard.watch(run)
    run.add_callback(Breaking())
    with warnings.catch_warnings(), pytest.raises(GuardError) as error:
        run.train()
    stale.__exit__(None, None, None)
    assert f"down in {name}, step 3" in str(error.value)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    file = tmp_path / "neuron_moe" / "guard_step3.safetensors"
    assert file.stat().st_size <= 1_000_000
    assert reproduction.main([str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    errors = [float(line.rpartition(": ")[2]) for line in lines if line.startswith("relative error")]
    assert f"expert {EXPERT}" in lines[0] and errors[0] > 0.01

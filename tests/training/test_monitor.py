"""What the monitor of a training counts, and when, without a Trainer around it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_neuron_moe import patch_model
from hf_neuron_moe.training import metrics
from hf_neuron_moe.training.metrics import ExpertCount, TrainingMonitor
from tests.tiny_models import tiny_model, tokens


@pytest.fixture
def model() -> Any:
    model = tiny_model("mixtral", num_hidden_layers=2)
    patch_model(model)
    return model


@pytest.fixture
def monitor(model: nn.Module) -> TrainingMonitor:
    made = TrainingMonitor(model)
    made.attach()
    return made


def pairs(monitor: TrainingMonitor) -> list[int]:
    """Token-expert pairs that each layer counted."""
    return [int(count.load_E.sum()) for count in monitor.counts.values()]


def test_copies_are_counted_once_per_process_that_a_token_goes_to() -> None:
    count = ExpertCount(4, 128, torch.device("cpu"), processes=2)
    # Experts 0 and 1 are at home in the first process, and from 4 on in none.
    count.add(torch.tensor([[0, 1], [0, 3], [2, 4], [4, 9]]))
    assert count.copies.item() == 1 + 2 + 1 + 0
    assert count.load_E.tolist() == [2, 1, 1, 1]


def test_a_call_within_a_call_does_not_end_the_outer_one(model: Any, monitor: TrainingMonitor) -> None:
    """As several replicas of nn.DataParallel, which run at once."""
    inner: list[object] = []

    def call_once(*_: object) -> None:
        if not inner:
            inner.append(None)
            model(tokens())

    model.model.layers[0].mlp.register_forward_hook(call_once)
    model(tokens())
    assert monitor.tokens.item() == 2 * tokens().numel()
    assert pairs(monitor) == [2 * 2 * tokens().numel()] * 2


def test_a_forward_that_failed_is_over(model: Any, monitor: TrainingMonitor) -> None:
    with pytest.raises(IndexError):
        model(tokens() + 10**6)
    model.eval()(tokens())
    assert pairs(monitor) == [0, 0]


def test_nothing_is_counted_once_it_is_detached(model: Any, monitor: TrainingMonitor) -> None:
    monitor.detach()
    model(tokens())
    assert monitor.tokens.item() == monitor.positions.item() == 0 and pairs(monitor) == [0, 0]


def test_tokens_per_second_are_those_of_steps(
    model: Any, monitor: TrainingMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monitor.restart_clock()
    mask = torch.ones_like(tokens())
    mask[0, :4] = 0
    for seconds in (2.0, 3.0):
        monitor.begin_step(sample=False)
        model(tokens(), attention_mask=mask)
        now[0] += seconds
        monitor.end_step()
        now[0] += 100.0  # an evaluation
        monitor.restart_clock()
    now[0] += 1.0  # until the device has caught up
    assert monitor.take()["tokens_per_second"] == pytest.approx(2 * int(mask.sum()) / 6.0, rel=1e-6)
    now[0] += 1.0
    assert monitor.take()["tokens_per_second"] == 0.0, "the next interval begins with nothing"


def test_decisions_that_replay_kept_are_those_since_the_last_log(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = [10, 3]
    monkeypatch.setattr(metrics, "routing_replay_stats", lambda model: tuple(stats))
    monitor = TrainingMonitor(model)
    stats[:] = 14, 4
    assert monitor.take()["routing_kept"] == 1
    stats[:] = 20, 4
    assert monitor.take()["routing_kept"] == 0, "none of six"
    assert "routing_kept" not in monitor.take(), "nothing was replayed"


def by_name(experts: nn.Module) -> Callable[[Tensor], Tensor]:
    """A router that calls its experts by keyword: the first token goes to expert 0 alone, the others to 1 and 2."""

    def forward(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        index = torch.tensor([[1, 2]] * len(flat))
        index[0] = 0
        weights = torch.full(index.shape, 0.5)
        out: Tensor = experts(hidden_states=flat, top_k_index=index, top_k_weights=weights)
        return out.view_as(hidden)

    return forward


def test_experts_called_by_keyword_are_measured_too(model: Any, monitor: TrainingMonitor) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = by_name(layer.mlp.experts)
    monitor.begin_step(sample=True)
    model(tokens())
    monitor.end_step()
    others = tokens().numel() - 1
    record = monitor.take()
    assert [figures["load"] for figures in record["experts"].values()] == [[2, others, others, 0]] * 2
    assert all(module["input"]["amax"] > 0 for module in record["health"].values())


def test_inputs_are_those_of_a_step(model: Any, monitor: TrainingMonitor) -> None:
    """A forward after a step, as a callback may do, and a step that an error ended, leave nothing to the next one."""
    monitor.begin_step(sample=True)
    model(tokens())
    monitor.end_step()
    model(tokens())
    assert not monitor.inputs
    monitor.begin_step(sample=True)
    model(tokens())
    assert monitor.inputs
    monitor.begin_step(sample=True)
    assert not monitor.inputs

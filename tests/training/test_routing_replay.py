"""Recomputed tokens keep their experts: near-tie routers, recomputations that differ, every kind of checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Trainer, TrainingArguments

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import RoutingReplayError
from hf_neuron_moe.training import (
    ReplayingCheckpoint,
    ReplayStats,
    replay_contexts,
    replay_routing,
    routing_replay_stats,
)
from tests.checkpointing import switch_on
from tests.refusals import refused
from tests.tiny_models import OTHER_GATES, tiny_model, tokens

GROUPED = "glm4_moe"
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", GROUPED)
EXPERTS = 8


def routed_model(family: str) -> nn.Module:
    """A tiny patched model of one routed layer; the group-limited family chooses 2 of 4 groups, then 2 experts."""
    if family == GROUPED:
        config = Glm4MoeConfig(
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=64,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=0,
            pad_token_id=0,
        )
        torch.manual_seed(7)
        model: nn.Module = AutoModelForCausalLM.from_config(config).train()
        model.model.layers[0].mlp.gate.weight.data.normal_(std=0.2)
    else:
        name = "num_local_experts" if family == "mixtral" else "num_experts"
        model = tiny_model(family, num_hidden_layers=1, **{name: EXPERTS})
    patch_model(model, {"precision": "fp32"})
    return model


def gate_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp.gate


def make_near_ties(gate: nn.Module) -> None:
    """Let all experts of even number score alike but for rounding, for every token, and all of odd number."""
    with torch.no_grad():
        noise = torch.randn(gate.weight.shape, generator=torch.Generator().manual_seed(1))
        gate.weight.copy_(gate.weight[:2].repeat(EXPERTS // 2, 1) * (1 + 1e-7 * noise))


@contextmanager
def watched(gate: nn.Module, noise: float = 0.0) -> Iterator[list[Tensor]]:
    """Collect the experts that each run of `gate` chooses; let every run see other rounding of its input."""
    chosen: list[Tensor] = []
    generator = torch.Generator().manual_seed(2)

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not noise:
            return inputs
        return (inputs[0] * (1 + noise * torch.randn(inputs[0].shape, generator=generator)), *inputs[1:])

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        chosen.append(output[2].detach().clone())

    handles = [gate.register_forward_pre_hook(before), gate.register_forward_hook(after)]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def step(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """One forward and backward; return the loss and the gradients."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def changed_tokens(first: Tensor, second: Tensor) -> int:
    return int((first.sort(-1).values != second.sort(-1).values).any(-1).sum())


def without_replay(model: nn.Module) -> None:
    """Give the layers back the plain checkpoint function."""
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = layer._gradient_checkpointing_func.inner


@pytest.mark.sampled(2)
@pytest.mark.thinned(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_of_10000_changes_its_experts(family: str, reentrant: bool) -> None:
    model = routed_model(family)
    gate = gate_of(model)
    make_near_ties(gate)
    switch_on(model, {"use_reentrant": reentrant})
    ids = tokens(200, 50)
    with watched(gate, noise=1e-7) as chosen:
        step(model, ids)
    first, second = chosen
    assert len(first) == 10_000
    assert torch.equal(first, second)
    decisions, changed = routing_replay_stats(model)
    # Two experts per group are compared in each of 4 groups, then the groups, then the experts.
    assert decisions == 10_000 * (6 if family == GROUPED else 1)
    assert changed > 50  # so many would have changed: the recomputation did differ


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", [*OTHER_GATES, "llama4", "longcat_flash", "dbrx"])
def test_routers_of_other_gates_and_calls_are_replayed(family: str, reentrant: bool) -> None:
    model, ids = tiny_model(family), tokens()
    patch_model(model, {"precision": "fp32"}, strict=False)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            switch_on(model, {"use_reentrant": reentrant})
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name
    decisions, changed = routing_replay_stats(model)
    assert decisions >= ids.numel() and changed == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_without_replay_they_do(family: str) -> None:
    model = routed_model(family)
    make_near_ties(gate_of(model))
    switch_on(model, {"use_reentrant": True})
    without_replay(model)
    with watched(gate_of(model), noise=1e-7) as chosen:
        step(model, tokens(200, 50))
    assert changed_tokens(*chosen) > 50


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_stay_stock_meet_no_checkpoint_error(family: str) -> None:
    name = "num_local_experts" if family == "mixtral" else "num_experts"
    model = tiny_model(family, **{name: EXPERTS})
    model.set_experts_implementation("eager")  # saves as many rows per expert as it gets tokens
    gate = model.model.layers[1].mlp.gate
    make_near_ties(gate)
    ids = tokens(200, 50)
    switch_on(model, {"use_reentrant": False})
    with watched(gate, noise=1e-7), pytest.raises(CheckpointError):
        step(model, ids)
    patch_model(model, {"precision": "fp32"}, exclude="model.layers.1.*")
    with watched(gate, noise=1e-7) as chosen:
        step(model, ids)
    assert torch.equal(*chosen)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_run_without_checkpointing(family: str) -> None:
    model = routed_model(family)
    make_near_ties(gate_of(model))
    ids = tokens(8, 50)
    model.enable_input_require_grads()  # as checkpointing does: the same graph
    loss, grads = step(model, ids)
    assert grads[next(name for name in grads if name.endswith("gate.weight"))].any()
    for reentrant in (False, True):
        switch_on(model, {"use_reentrant": reentrant})
        again, recomputed = step(model, ids)
        assert torch.equal(loss, again)
        for name, grad in grads.items():
            assert torch.equal(recomputed[name], grad), (reentrant, name)
    assert routing_replay_stats(model)[1] == 0


def stack(width: int = 16) -> tuple[nn.Module, Tensor]:
    """A router and experts in a few lines, for checkpoints made by hand."""
    torch.manual_seed(0)
    return TinyRouted(width), torch.randn(300, width, requires_grad=True)


class TinyRouted(nn.Module):
    """One expert per token, found by `choose`; the experts save as many rows as they get."""

    def __init__(self, width: int, choose: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.choose = choose or (lambda scores: scores.topk(1, dim=-1))
        self.shift = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        # With the shift, experts change places: the coarsest way in which a recomputation can differ.
        scores = (self.gate(hidden) + self.shift * torch.arange(4.0)).softmax(-1)
        weight, index = self.choose(scores)
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (index.flatten() == number).nonzero().flatten()
            result = result.index_add(0, rows, torch.tanh(expert(hidden[rows])) * weight.flatten()[rows, None])
        return result


def gathered(scores: Tensor) -> tuple[Tensor, Tensor]:
    index = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, index), index


CHOICES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "topk method": lambda scores: scores.topk(1, dim=-1),
    "topk function": lambda scores: torch.topk(scores, k=1, dim=-1, sorted=False),
    "topk by name": lambda scores: (lambda top: (top.values, top.indices))(torch.topk(input=scores, k=1)),
    "max": lambda scores: scores.max(dim=-1),
    "max, dimension kept": lambda scores: torch.max(scores, -1, True),
    "argmax": gathered,
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_spelling_of_a_choice_is_replayed(name: str) -> None:
    block, hidden = stack()
    block.choose = CHOICES[name]
    plain = torch.autograd.grad(block(hidden).square().sum(), [hidden, *block.parameters()])
    out = checkpoint(replay_routing(block), hidden, use_reentrant=False)
    same = torch.autograd.grad(out.square().sum(), [hidden, *block.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(plain, same, strict=True))
    stats = ReplayStats()
    out = checkpoint(replay_routing(block, stats), hidden, use_reentrant=False)
    block.shift = 2.0
    torch.autograd.grad(out.square().sum(), hidden)
    assert stats.decisions == 300
    assert stats.total_changed() > 50
    block.shift = 0.0
    out = checkpoint(block, hidden, use_reentrant=False)
    block.shift = 2.0
    with pytest.raises(CheckpointError):  # what replay is there to prevent
        torch.autograd.grad(out.square().sum(), hidden)


def test_weights_stay_functions_of_the_recomputed_logits() -> None:
    block, hidden = stack()
    kept = block.gate(hidden).softmax(-1).argmax(-1, keepdim=True)
    out = checkpoint(replay_routing(block), hidden, use_reentrant=False)
    block.shift = 2.0
    (grad,) = torch.autograd.grad((out * 3).sum(), block.gate.weight)
    # The same by hand: the first run's experts, the second run's scores.
    block.choose = lambda scores: (scores.gather(-1, kept), kept)
    (expected,) = torch.autograd.grad((block(hidden) * 3).sum(), block.gate.weight)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_records_belong_to_their_calls(reentrant: bool) -> None:
    """Several forwards before a backward, out of order; nested; and with a kept graph, twice."""
    block, hidden = stack()
    other = torch.randn(300, 16, requires_grad=True)
    one = checkpoint(replay_routing(block), hidden, use_reentrant=reentrant)
    two = checkpoint(replay_routing(block), other, use_reentrant=reentrant)
    expected = [torch.autograd.grad(block(each).square().sum(), each)[0] for each in (hidden, other)]
    one.square().sum().backward(retain_graph=True)
    assert torch.equal(hidden.grad, expected[0])
    two.square().sum().backward()
    assert torch.equal(other.grad, expected[1])
    one.square().sum().backward()
    assert torch.equal(hidden.grad, 2 * expected[0])

    def twice(wrap: Callable[..., Any], value: Tensor) -> Tensor:
        inner = checkpoint(wrap(block), value, use_reentrant=reentrant)
        return checkpoint(wrap(block), inner + value, use_reentrant=reentrant)

    stats = ReplayStats()
    found = []
    for wrap in (lambda function: function, lambda function: replay_routing(function, stats)):
        hidden.grad = None
        outer = wrap(functools.partial(twice, wrap))
        checkpoint(outer, hidden, use_reentrant=reentrant).square().sum().backward()
        found.append(hidden.grad)
    assert torch.equal(*found)
    # The outer recomputation and both inner ones; the non-reentrant outer one stops when it has what it needs.
    assert stats.decisions == (1200 if reentrant else 900)
    assert stats.total_changed() == 0


def test_selective_checkpoints_offload_and_contexts() -> None:
    block, hidden = stack()
    (plain,) = torch.autograd.grad(block(hidden).square().sum(), hidden)

    def policy(saved: set[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    aten = torch.ops.aten
    for saved in ({aten.addmm.default, aten.mm.default}, {aten.topk.default, aten.gather.default}):
        contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, saved))
        out = ReplayingCheckpoint()(block, hidden, use_reentrant=False, context_fn=contexts)
        block.shift = 2.0
        (grad,) = torch.autograd.grad(out.square().sum(), hidden)
        block.shift = 0.0
        assert grad.shape == plain.shape
        partial = ReplayingCheckpoint(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))
        assert torch.equal(torch.autograd.grad(partial(block, hidden).square().sum(), hidden)[0], plain)
    with torch.autograd.graph.save_on_cpu():
        out = ReplayingCheckpoint()(block, hidden, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.square().sum(), hidden)[0], plain)
    out = checkpoint(block, hidden, use_reentrant=False, context_fn=replay_contexts)
    assert torch.equal(torch.autograd.grad(out.square().sum(), hidden, retain_graph=True)[0], plain)
    block.shift = 2.0
    torch.autograd.grad(out.square().sum(), hidden)  # a CheckpointError if experts changed


def test_indices_are_kept_in_the_smallest_integers_and_freed_with_the_graph() -> None:
    for size, dtype in ((256, torch.uint8), (257, torch.int16), (40_000, torch.int32)):
        function = replay_routing(lambda scores: scores.topk(2, dim=-1)[0])
        scores = torch.randn(3, size, requires_grad=True)
        function(scores)
        (decision,) = function.decisions
        assert decision.indices.dtype == dtype
        assert torch.equal(decision.indices.long(), scores.topk(2, dim=-1)[1])
        assert torch.equal(function(scores), scores.topk(2, dim=-1)[0])


def test_what_is_no_choice_is_left_alone_and_another_choice_is_refused() -> None:
    rows = torch.tensor([[3, 1], [2, 5]])

    def arithmetic(value: Tensor) -> Tensor:
        return value * value.max() + torch.max(value, value.mean()) + rows.max(dim=1).values[:, None] + rows.argmax()

    function = replay_routing(arithmetic)
    value = torch.randn(2, 2)
    assert torch.equal(function(value), arithmetic(value))
    assert function.decisions == []
    assert torch.equal(function(value), arithmetic(value))
    moody = replay_routing(lambda scores, k: scores.topk(k)[0])
    moody(torch.randn(5, 8), 2)
    with refused(RoutingReplayError, "decision 1 of the recomputation", got="topk of scores of shape (4, 8)"):
        moody(torch.randn(4, 8), 2)


def test_nothing_is_recorded_without_gradients_or_under_compile() -> None:
    block, hidden = stack()
    inner: list[Callable[..., Any]] = []

    def plain(function: Callable[..., Any], *args: Any) -> Any:
        inner.append(function)
        return function(*args)

    with torch.no_grad():
        ReplayingCheckpoint(plain)(block, hidden)
    assert inner == [block]
    wrapped = ReplayingCheckpoint(functools.partial(checkpoint, use_reentrant=False))

    def dense(scores: Tensor) -> Tensor:  # without loops over experts, which break graphs by themselves
        weight, index = scores.softmax(-1).topk(2, dim=-1)
        return torch.zeros_like(scores).scatter(-1, index, weight).square()

    compiled = torch.compile(lambda scores: wrapped(dense, scores), backend="aot_eager", fullgraph=True)
    (plain_grad,) = torch.autograd.grad(dense(hidden).sum(), hidden)
    assert torch.equal(torch.autograd.grad(compiled(hidden).sum(), hidden)[0], plain_grad)
    assert wrapped.stats.decisions == 0


def test_the_trainer_replays(tmp_path: Any) -> None:
    model = routed_model("mixtral")
    make_near_ties(gate_of(model))
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 40)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.0,
    )
    with watched(gate_of(model), noise=1e-7) as chosen:
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert len(chosen) == 8
    assert all(torch.equal(first, second) for first, second in zip(chosen[::2], chosen[1::2], strict=True))
    decisions, changed = routing_replay_stats(model, reset=True)
    assert decisions == 2 * 8 * 40
    assert changed > 10
    assert routing_replay_stats(model) == (0, 0)


def test_experts_that_change_places_are_the_same_decision() -> None:
    stats = ReplayStats()
    stats.add(torch.tensor([[0, 1], [2, 3], [5, 4]], dtype=torch.uint8), torch.tensor([[1, 0], [2, 4], [5, 4]]), -1)
    assert (stats.decisions, stats.total_changed()) == (3, 1)

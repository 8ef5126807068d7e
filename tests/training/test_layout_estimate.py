"""The estimate of one rank against what real ranks hold: transformers' engine on gloo processes, stock models."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_neuron_moe import NeuronMoEConfig
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.training.fit import _layouts, fit_layout
from hf_neuron_moe.training.memory_estimate import TrainingEstimate, estimate_training
from hf_neuron_moe.training.one_rank import Layout, _gathered
from hf_neuron_moe.training.repeated_layers import RepeatedLayers
from tests.shared_runs import collected, made_once, shared_folder
from tests.tiny_models import tiny_config, tiny_model
from tests.training.layout_driver import BATCH, LENGTH, PATCHES

TWO = (
    ("llama", {"tp": 2}),
    ("mixtral", {"tp": 2}),
    ("mixtral", {"ep": 2, "fsdp": 2}),
    ("qwen3_moe", {"ep": 2, "tp": 2}),
    ("llama", {"dp_replicate": 2}),
    ("tied", {"fsdp": 2}),
    ("tied", {"tp": 2}),
    ("llama", {"pp": 2}),
)
FOUR = (
    ("mixtral", {"ep": 4, "fsdp": 4}),
    ("mixtral", {"ep": 2, "fsdp": 4}),
    ("qwen3_moe", {"ep": 4, "tp": 2, "fsdp": 2}),
    ("llama", {"tp": 2, "fsdp": 2}),
    ("mixtral", {"fsdp": 2, "dp_replicate": 2}),
    ("odd", {"fsdp": 4}),
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "odd": ("mixtral", {"vocab_size": 67, "num_local_experts": 7}),  # no axis of these that 4 ranks divide evenly
}


Found = tuple[Path, list[dict[str, Any]]]


def measured(folder: Path, cells: list[tuple[str, dict[str, int]]], ranks: int) -> list[dict[str, Any]]:
    """By rank and cell what a group of processes measured."""
    for name in {family for family, _ in cells}:
        family, changes = MODELS[name]
        tiny_model(family, **changes).save_pretrained(folder / name)
    command = [sys.executable, "-m", "tests.training.layout_driver", str(folder), *map(json.dumps, cells)]
    own = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    group = [
        subprocess.Popen(command, env=own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=240)[1].decode() for process in group]
    finally:
        for process in group:
            process.kill()
    assert [process.returncode for process in group] == [0] * ranks, said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    cells = [cell for cell in TWO if cell in collected(request, "cell")]
    ranks = made_once(tmp_path_factory, "two-estimates", lambda folder: measured(folder, cells, 2))
    return shared_folder(tmp_path_factory, "two-estimates"), ranks


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    cells = [cell for cell in FOUR if cell in collected(request, "cell")]
    ranks = made_once(tmp_path_factory, "four-estimates", lambda folder: measured(folder, cells, 4))
    return shared_folder(tmp_path_factory, "four-estimates"), ranks


def estimated(path: Path, layout: Layout, **options: Any) -> TrainingEstimate:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    return estimate_training(model, PATCHES, batch=BATCH, length=LENGTH, layout=layout, **options)


def check(found: Found, cell: tuple[str, dict[str, int]]) -> None:
    family, sizes = cell
    path, ranks = found[0] / family, found[1]
    for rank in (0, len(ranks) - 1):
        all_cells = ranks[rank]
        real = all_cells[json.dumps(cell)]
        result = estimated(path, Layout(**sizes, rank=rank))
        assert result.parameter_bytes == real["parameters"], rank
        if "pp" in sizes:
            assert result.gradient_bytes == result.optimizer_bytes == result.policies[-1].saved == 0
            continue
        assert result.gradient_bytes == real["gradients"], rank
        assert result.optimizer_bytes == real["states"], rank
        saved = {policy.name: policy.saved for policy in result.policies}
        assert saved == {name: real[name] for name in (*PATCHES, "stock")}, rank


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("cell", TWO, ids=str)
def test_each_of_two_ranks_holds_what_is_estimated(cell: Any, two: Any) -> None:
    check(two, cell)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("cell", FOUR, ids=str)
def test_each_of_four_ranks_holds_what_is_estimated(cell: Any, four: Any) -> None:
    check(four, cell)


def refusal(family: str, **sizes: int) -> str:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16)
    with pytest.raises(ConfigError) as caught:
        estimate_training(model, {"minimal": NeuronMoEConfig()}, batch=1, length=8, layout=Layout(**sizes))
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("mixtral", {"tp": 4}, "tp does not divide 2 key-value heads"),
        ("mixtral", {"tp": 3}, "tp does not divide 4 attention heads"),
        ("mixtral", {"ep": 8, "fsdp": 8}, "ep does not divide 4 experts"),
        ("mixtral", {"ep": 2, "fsdp": 8}, "4 ranks share 2 experts"),
        ("mixtral", {"fsdp": 3}, "3 ranks share 4 experts"),  # two for each of the first two
        ("mixtral", {"ep": 3, "tp": 2}, "`ep_size` must be a multiple of `tp_size`"),
        ("llama", {"ep": 2, "fsdp": 2}, "has no `ep_plan`"),
        ("llama", {"tp": 2, "pp": 2}, "KeyError"),
    ],
)
def test_layouts_that_transformers_does_not_run_are_refused(family: str, sizes: dict[str, int], reason: str) -> None:
    assert reason in refusal(family, **sizes)
    assert not torch.distributed.is_initialized()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "layout"), [("llama", Layout(tp=2)), ("mixtral", Layout(tp=2))])
@pytest.mark.slow
def test_patched_blocks_save_this_ranks_part_of_the_intermediate_size(family: str, layout: Layout) -> None:
    whole, half = (meta_estimate(family, each).policies[0].blocks_bytes_per_token for each in (None, layout))
    config = tiny_config(family)
    hidden, inner = 2 * config.hidden_size, 2 * 2 * config.intermediate_size  # in bf16; gate and up
    pairs = getattr(config, "num_experts_per_tok", 1) * config.num_hidden_layers
    assert whole - half == pairs * inner / 2
    assert half > hidden * config.num_hidden_layers


def meta_estimate(family: str, layout: Layout | None, **options: Any) -> TrainingEstimate:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.bfloat16)
    before = {name: type(module) for name, module in model.named_modules()}
    result = estimate_training(model, {"minimal": NeuronMoEConfig()}, batch=1, length=512, layout=layout, **options)
    if layout is not None:  # alone it may get adapters
        assert {name: type(module) for name, module in model.named_modules()} == before
    return result


@pytest.mark.slow
def test_experts_of_other_ranks_bring_a_row_per_token() -> None:
    """Of 4 experts on 2 ranks a token with 2 needs a rank's in 5 of 6 cases; at worst all tokens need this rank."""
    config, result = tiny_config("mixtral"), meta_estimate("mixtral", Layout(ep=2, fsdp=2))
    assert result.rank is not None
    row, K = 2 * config.hidden_size, config.num_experts_per_tok
    assert result.rank.exchanged_bytes == 4 * 512 * K * row  # transformers' own exchange sends a row per pair
    minimal = result.policies[0]
    assert minimal.worst_total is not None
    per_received = row + K * (2 * 2 * config.intermediate_size + 12)  # gate and up, an id and an affinity per pair
    per_sent = 16 + K  # its token and process, and which of its experts are elsewhere
    even = round(512 * 5 / 6) * 2
    more = (minimal.worst_total - minimal.total) / config.num_hidden_layers
    assert more == (2 * 512 - even) * per_received - (even - 512) * per_sent


@pytest.mark.slow
def test_the_layout_that_fits_is_the_one_that_sends_least() -> None:
    with torch.device("meta"):
        config = tiny_config("mixtral", num_hidden_layers=1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    configs = {name: NeuronMoEConfig(activations=name) for name in ("full", "recompute")}
    options: dict[str, Any] = {"batch": 1, "length": 64}
    two = ({"tp": 2}, {"tp": 2, "ep": 2}, {"fsdp": 2}, {"fsdp": 2, "ep": 2}, {"dp_replicate": 2})
    all_layouts = [Layout(**sizes) for sizes in two]
    known = {layout: estimate_training(model, configs, layout=layout, **options) for layout in all_layouts}
    least = {layout: result.policies[1].total for layout, result in known.items()}
    for memory in (2**30, sorted(least.values())[2], min(least.values())):
        sent = {layout: known[layout].rank.sent_bytes * layout.tp for layout in known if least[layout] <= memory}
        found = fit_layout(model, configs, memory=memory, devices=2, **options)
        assert sent[found.layout] == min(sent.values()), memory
        assert found.estimate == known[found.layout] and found.layouts == len(two)
        fits = [policy for policy in found.estimate.policies if policy.total <= memory]
        assert found.policy == fits[0]
    fixed = [result.parameter_bytes + result.gradient_bytes + result.optimizer_bytes for result in known.values()]
    for memory in (50_000, min(fixed) * 99 // 100):
        with pytest.raises(ConfigError, match=r"optimizer states alone do not fit .5."):
            fit_layout(model, configs, memory=memory, devices=2, **options)
    with pytest.raises(ConfigError, match="no activation policy saves little enough"):
        fit_layout(model, configs, memory=min(least.values()) - 1, devices=2, **options)


@pytest.mark.parametrize(("length", "best"), [(13, Layout(tp=2)), (64, Layout(dp_replicate=2))])
def test_what_is_sent_orders_the_layouts(length: int, best: Layout) -> None:
    """Tensor parallelism sends by token, here less than the weights' gradients for 13 tokens; FSDP sends most."""
    with torch.device("meta"):
        config = tiny_config("llama", num_hidden_layers=1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    configs = {"recompute": NeuronMoEConfig(activations="recompute")}
    found = fit_layout(model, configs, memory=2**40, devices=2, batch=1, length=length)
    assert found.layout == best


def test_adam_holds_four_times_the_parameters() -> None:
    """Parameters, gradients and two states, of which each of two ranks has at least half."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=1), dtype=torch.bfloat16)
    memory = 4 * sum(param.nbytes for param in model.parameters()) // 2 * 99 // 100
    with pytest.raises(ConfigError, match=r"optimizer states alone do not fit \(3\)"):
        fit_layout(model, {"full": NeuronMoEConfig()}, memory=memory, devices=2, batch=1, length=1)


@pytest.mark.parametrize("experts", [False, True])
def test_all_layouts_that_transformers_accepts_are_looked_at(experts: bool) -> None:
    sizes = [1, 2, 4, 8]
    accepted = set()
    for tp, ep, fsdp, dp in itertools.product(sizes, sizes if experts else [1], sizes, sizes):
        with suppress(ConfigError):
            accepted.add(Layout(tp=tp, ep=ep, fsdp=fsdp, dp_replicate=dp))
    found = list(_layouts(8, experts=experts))
    assert len(found) == len(set(found)) and set(found) == {layout for layout in accepted if layout.devices == 8}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "layout", "options"),
    [
        ("llama", {}, None, {"gradient_checkpointing": True}),
        ("gemma3", {}, None, {}),
        ("mixtral", {}, Layout(ep=2, fsdp=2), {"lora_rank": 4}),
        ("mixtral", {}, Layout(tp=2), {"gradient_checkpointing": True}),
        ("qwen3_moe", {"mlp_only_layers": [0, 4]}, Layout(ep=2, tp=2), {}),
        ("gpt_oss", {}, Layout(ep=2, fsdp=2), {}),
    ],
)
def test_two_layers_of_a_kind_speak_for_all(
    family: str, changes: dict[str, Any], layout: Layout | None, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds differ by class, by attention (gpt_oss, gemma3) and by the policy of a block."""
    if "lora_rank" in options:
        pytest.importorskip("peft")
    policy = {"keep": "full", "modules": {"*layers.3*": "recompute"}}
    configs = {"minimal": NeuronMoEConfig(), "mixed": NeuronMoEConfig(precision="mxfp8", activations=policy)}
    with torch.device("meta"):
        config = tiny_config(family, num_hidden_layers=6, **changes)
        dtype = torch.bfloat16 if layout else torch.float32  # in which norms save the layers' inputs
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    calls: list[Any] = []
    first = model.model.layers[0]
    monkeypatch.setattr(type(first), "forward", counted(type(first).forward, calls))
    few = estimate_training(model, configs, batch=2, length=48, layout=layout, **options)
    run = len(calls)
    monkeypatch.setattr(RepeatedLayers, "standing_in", lambda self: nullcontext())
    assert estimate_training(model, configs, batch=2, length=48, layout=layout, **options) == few
    assert run < len(calls) - run


def counted(forward: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return forward(*args, **kwargs)

    return called


@pytest.mark.slow
def test_adapters_are_cut_by_tensor_parallelism_alone() -> None:
    pytest.importorskip("peft")

    def gradients(layout: Layout | None) -> int:
        return meta_estimate("mixtral", layout, lora_rank=4).gradient_bytes

    of_one = gradients(None)
    for layout in (Layout(ep=2, fsdp=2), Layout(fsdp=2, dp_replicate=2)):
        assert gradients(layout) == of_one
    assert gradients(Layout(tp=2, fsdp=2)) == gradients(Layout(tp=2)) < of_one


def test_two_groups_in_a_row_are_gathered_and_frozen_weights_are_sent_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP has the group in use and fetches the next; weights travel in both passes, gradients once."""
    monkeypatch.setattr("torch.distributed.fsdp.FSDPModule", torch.nn.Linear)
    mine = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))  # 4 bytes each
    mine[2].requires_grad_(False)
    full = {"0.weight": 100, "1.weight": 40, "2.weight": 70}
    gathered, sent = _gathered(mine, dict(mine.named_parameters()), full)
    assert (gathered, sent) == (100 + 40, 3 * 96 + 3 * 36 + 2 * 66)

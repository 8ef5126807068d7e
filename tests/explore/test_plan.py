"""Plans against every other assignment, and the forms in which they are written."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
import yaml

from hf_neuron_moe import NeuronMoEConfig
from hf_neuron_moe.convert import ConvertOptions
from hf_neuron_moe.errors import ConfigError
from hf_neuron_moe.explore.advice import advise
from hf_neuron_moe.explore.exploration import standard_error
from hf_neuron_moe.explore.measured_changes import losses_of, rank_correlation
from hf_neuron_moe.explore.measures import BlockMeasures, Measures, Score
from hf_neuron_moe.explore.precision_plan import (
    DEVICES,
    MXFP4_PRODUCTS,
    Cost,
    as_yaml,
    costs_of,
    limit_of,
    make_plan,
    total_of,
)
from hf_neuron_moe.training import NeuronMoEArguments
from tests.tiny_models import tiny_model, tokens


def measured(damages: list[dict[str, float]]) -> Measures:
    blocks = {}
    for place, damage in enumerate(damages):
        scores = {form: Score(second=value) for form, value in damage.items()}
        blocks[f"model.layers.{place}.mlp"] = BlockMeasures("mlp", 1, 64, 96, torch.tensor([10]), scores=scores)
    return Measures(blocks=blocks, rows=1, tokens=1, loss=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_assignment_below_the_limit_is_cheaper(seed: int) -> None:
    """Damages are whole parts of the limit here, which the solution's own rounding leaves as they are."""
    draw = random.Random(seed)
    damages = [{"mxfp8": draw.randint(0, 3000) / 4096, "mxfp4": draw.randint(500, 6000) / 4096} for _ in range(6)]
    measures = measured(damages)
    costs = {
        name: {"bf16": Cost(9.0 + draw.random(), 2), "mxfp8": Cost(4.0 + draw.random(), 1), "mxfp4": Cost(4.0, 0.5)}
        for name in measures.blocks
    }
    plan = make_plan(measures, costs, 1.0, "trn3", 1)
    names = list(measures.blocks)
    best = min(
        sum(costs[name][kind].seconds for name, kind in zip(names, kinds, strict=True))
        for kinds in itertools.product(("bf16", "mxfp8", "mxfp4"), repeat=6)
        if sum(damage.get(kind, 0.0) for damage, kind in zip(damages, kinds, strict=True)) <= 1.0
    )
    assert plan.total.loss_change <= 1.0
    assert plan.total.seconds == pytest.approx(best, abs=1e-4)  # what breaks ties is less


def test_damages_are_rounded_up_and_ties_go_to_bf16() -> None:
    """Both blocks in mxfp8 would be a little above the limit; one alone may take all of it."""
    for damages, kinds in (
        ([0.50001, 0.50001], {"bf16", "mxfp8"}),
        ([1.0, 0.0], {"mxfp8"}),
        ([0.5, 0.5], {"mxfp8"}),
    ):
        measures = measured([{"mxfp8": damage} for damage in damages])
        costs = {name: {"mxfp8": Cost(1.0, 1), "bf16": Cost(2.0, 2)} for name in measures.blocks}
        plan = make_plan(measures, costs, 1.0, "trn3", 1)
        assert {*plan.precisions.values()} == kinds and plan.total.loss_change <= 1.0
    costs = {name: {"mxfp8": Cost(1.0, 1), "bf16": Cost(1.0, 2)} for name in measures.blocks}
    assert {*make_plan(measures, costs, 1.0, "trn3", 1).precisions.values()} == {"bf16"}


@pytest.mark.parametrize(("seconds", "words"), [(1.05, "does not pay here"), (1.2, "range from 0.75 to 1.8 times")])
@pytest.mark.parametrize(("pairs", "few"), [(1000, False), (500, True)])
def test_small_gains_and_few_tokens_are_named(seconds: float, words: str, pairs: int, few: bool) -> None:
    block = BlockMeasures("experts", 4, 128, 128, torch.tensor([pairs] * 4))
    costs = {"mlp": {"bf16": Cost(seconds, 2), "mxfp8": Cost(1.0, 1)}}
    lines = advise(Measures(blocks={"mlp": block}, rows=1, tokens=999, loss=1.0), costs, "trn3", 1000)
    assert words in lines[1] and lines[2].startswith(f"Each expert gets {pairs:,} of a step's 1,000 tokens")
    assert lines[2].endswith("little work.") == few


def test_the_standard_error_is_that_of_a_sample() -> None:
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0) and math.isnan(standard_error([1.0]))


def test_two_pairs_have_no_rank_correlation() -> None:
    assert math.isnan(rank_correlation([1.0, 2.0], [1.0, 2.0]))
    assert rank_correlation([1.0, 2.0, 3.0], [9.0, 5.0, 4.0]) == pytest.approx(-1.0)


def test_losses_are_means_over_the_tokens_that_have_one() -> None:
    model = tiny_model("llama")
    rows = tokens(2, 12)
    with torch.no_grad():
        expected = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    assert losses_of(model, rows) == pytest.approx(expected, rel=1e-5)


def test_blocks_without_a_kernel_are_planned_only_where_the_loss_needs_them() -> None:
    """bf16 is the faster here and has no kernel: without the limit no block takes it, and else the worst one does."""
    measures = measured([{"mxfp8": 0.1}, {"mxfp8": 0.8}, {"mxfp8": 0.3}])
    names = list(measures.blocks)
    costs = {name: {"bf16": Cost(1.0, 2), "mxfp8": Cost(2.0, 1)} for name in names}
    missing = {(name, "bf16") for name in names}

    def planned(limit: float, missing: set[tuple[str, str]]) -> list[str]:
        return [*make_plan(measures, costs, limit, "trn3", 1, missing=missing).precisions.values()]

    assert planned(2.0, set()) == ["bf16", "bf16", "bf16"]
    assert planned(2.0, missing) == ["mxfp8", "mxfp8", "mxfp8"]
    assert planned(0.5, missing) == ["mxfp8", "bf16", "mxfp8"]
    assert planned(2.0, missing | {(name, "mxfp8") for name in names}) == ["bf16", "bf16", "bf16"], "none has one"


def test_a_plan_is_what_patch_model_recipes_and_training_take(tmp_path: Path) -> None:
    measures = measured([{"mxfp8": 0.1}, {"mxfp8": 5.0}, {"mxfp8": 0.1}])
    costs = {name: {"bf16": Cost(2.0, 2), "mxfp8": Cost(1.0, 1)} for name in measures.blocks}
    plan = make_plan(measures, costs, 1.0, "trn3", 1)
    assert plan.recipe == {"*": "mxfp8", "model.layers.1.mlp": "bf16"}
    assert yaml.safe_load(as_yaml(plan, "m")) == plan.recipe
    assert NeuronMoEConfig(precision=plan.recipe).precision == plan.recipe
    (tmp_path / "plan.yaml").write_text(as_yaml(plan, "m"))
    arguments = NeuronMoEArguments(neuron_precision=str(tmp_path / "plan.yaml"))
    assert arguments.neuron_config().precision == plan.recipe
    assert plan.uniform["mxfp8"].loss_change == pytest.approx(5.2) and plan.uniform["bf16"].loss_change == 0


def test_frozen_weights_are_planned_by_their_bytes() -> None:
    measures = measured([{"mxfp8": 0.1, "mxfp4": 0.6}, {"mxfp8": 0.1, "mxfp4": 0.6}])
    costs = {name: {"bf16": Cost(1, 4), "mxfp8": Cost(2, 2), "mxfp4": Cost(3, 1)} for name in measures.blocks}
    plan = make_plan(measures, costs, 1.0, "trn3", 1, frozen=True)
    assert sorted(plan.precisions.values()) == ["mxfp4", "mxfp8"] and plan.total.bytes == 3


@pytest.mark.parametrize("seed", range(10))
def test_single_products_are_chosen_where_they_are_the_fewest_bytes(seed: int) -> None:
    draw = random.Random(seed)
    kinds = ("bf16", "mxfp8", "mxfp4", *MXFP4_PRODUCTS)
    damages = [{kind: draw.randint(1, 2500) / 4096 for kind in kinds[1:]} for _ in range(4)]
    measures = measured(damages)
    for block in measures.blocks.values():
        block.kind, block.experts, block.halves = "experts", 4, draw.choice((1, 2))
    costs = costs_of(measures.blocks, 10, "b200", 4096, kinds)
    plan = make_plan(measures, costs, 1.0, "b200", 4096, frozen=True)
    best = min(
        total_of(measures, costs, dict(zip(costs, chosen, strict=True))).bytes
        for chosen in itertools.product(kinds, repeat=4)
        if sum(damage.get(kind, 0.0) for damage, kind in zip(damages, chosen, strict=True)) <= 1.0
    )
    assert plan.total.bytes == pytest.approx(best) and plan.total.loss_change <= 1.0
    assert set(plan.uniform) == {"bf16", "mxfp8", "mxfp4"}
    asked = ConvertOptions(plan.recipe)  # what convert takes, and each weight has what was chosen
    for block, kind in plan.precisions.items():
        first = "gate_up" if measures.blocks[block].halves == 2 else "up"
        own = [asked.of(f"{block}.{name}_proj").precision for name in (first, "down")]
        form, _, product = kind.partition(" ")
        assert own == [form if product in ("", name) else "mxfp8" for name in ("gate_up", "down")]


def test_costs_of_products_are_those_of_their_weights() -> None:
    measures = measured([{}, {}])
    experts = list(measures.blocks.values())[1]
    experts.kind, experts.experts = "experts", 4
    rows = costs_of(measures.blocks, 10, "b200", 4096, ("bf16", "mxfp8", "mxfp4", *MXFP4_PRODUCTS))
    assert [set(row) for row in rows.values()] == [{"bf16", "mxfp8"}, {"bf16", "mxfp8", "mxfp4", *MXFP4_PRODUCTS}]
    found = {kind: 32 * cost.bytes / (4 * 64 * 96) for kind, cost in rows["model.layers.1.mlp"].items()}
    eight, four = 33, 17  # bytes of 32 values and their scale
    assert found["mxfp4 gate_up"] == pytest.approx(2 * four + eight)
    assert found["mxfp4 down"] == pytest.approx(2 * eight + four)
    experts.halves = 1  # up alone
    rows = costs_of(measures.blocks, 10, "b200", 4096, ("mxfp8", *MXFP4_PRODUCTS))
    found = {kind: 32 * cost.bytes / (4 * 64 * 96) for kind, cost in rows["model.layers.1.mlp"].items()}
    assert found == {"mxfp8": pytest.approx(2 * eight), **dict.fromkeys(MXFP4_PRODUCTS, pytest.approx(four + eight))}


def test_a_first_order_counts_as_far_as_it_is_certain() -> None:
    assert Score(first=3.0, second=1.0, square=9.0).expected == 1.0  # one row: nothing is certain
    assert Score(first=8.0, second=1.0, square=8.0).expected == pytest.approx(8.0 * (1 - 8 / 64) + 1)
    assert Score(first=-8.0, second=1.0, square=8.0).expected == 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_has_costs_of_what_it_computes(device: str) -> None:
    measures = measured([{"mxfp8": 0.1}])
    ((row,),) = [costs_of(measures.blocks, 10, device, 4096, ("bf16", "mxfp8")).values()]
    assert set(row) == ({"bf16"} if device == "trn2" else {"bf16", "mxfp8"})
    assert all(cost.seconds > 0 and cost.bytes > 0 for cost in row.values())


@pytest.mark.parametrize(("text", "expected"), [("0.25%", 0.005), ("0.01", 0.01), (" 1 %", 0.02)])
def test_a_limit_is_a_share_or_nats(text: str, expected: float) -> None:
    assert limit_of(text, 2.0) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["1e-13", "1e-300%", "", "0", "-1%", "nan", "inf", "a lot"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="budget must be"):
        limit_of(text, 2.0)

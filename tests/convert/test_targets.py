"""Ten families times the options: every tensor written is the one that the formats' functions make of the source."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_neuron_moe.convert import (
    LAYOUTS,
    PRECISIONS,
    PURPOSES,
    SCALE_LAYOUTS,
    SCALE_RULES,
    ConvertOptions,
    convert_checkpoint,
    export_checkpoint,
)
from hf_neuron_moe.errors import ConfigError, ConversionError
from tests.convert.remembered import remembered_models
from tests.convert.target_oracle import ImpossibleError, expected, modules_of
from tests.tiny_models import FAMILIES, MOE, tiny_model

SIZES = {
    # Multiples of what MX and two ranks need, and of nothing more; one layer keeps 512 affordable.
    "small": {"hidden_size": 96, "intermediate_size": 320, "moe_intermediate_size": 64, "shared": 128},
    "wide": {"hidden_size": 512, "intermediate_size": 576, "moe_intermediate_size": 1024, "shared": 128},
    # No multiple of 32: bf16 or padding only.
    "odd": {"hidden_size": 72, "intermediate_size": 150, "moe_intermediate_size": 50, "shared": 36},
}


def all_options() -> list[dict[str, object]]:
    """Every combination of options that is not refused on sight, with each scale rule once per precision."""
    axes = {
        "precision": PRECISIONS,
        "layout": LAYOUTS,
        "swizzle": (None, True),
        "scales": (None, *SCALE_LAYOUTS),
        "scale_rule": (None, *SCALE_RULES),
        "purpose": PURPOSES,
        "tp_degree": (1, 2),
        "pad": (False, True),
    }
    found = []
    for values in itertools.product(*axes.values()):
        wish = dict(zip(axes, values, strict=True))
        try:
            ConvertOptions(**wish)
        except ConfigError:
            continue
        found.append(wish)
    return found


OPTIONS = all_options()

UNGATED = "nemotron_h"
Case = tuple[str, str, dict[str, object]]


def is_refused(family: str, size: str, wish: dict[str, object]) -> bool:
    """Whether the oracle will find the case impossible, as far as names tell: it only steers the choice of cases."""
    moe, words = family in (*MOE, UNGATED), wish["purpose"] == "inference" and wish["layout"] == "kernel"
    match wish["precision"]:
        case "bf16":
            return bool(wish["swizzle"]) and (moe or (size == "odd" and not wish["pad"]))
        case "mxfp4":
            return not moe or wish["scales"] == "oversized" or (size != "wide" and not wish["pad"])
    if moe and words and (wish["scales"] == "oversized" or (size != "wide" and not wish["pad"])):
        return True
    return (size == "odd" and not wish["pad"]) or (words and wish["scales"] == "compact")


def pairwise(cases: list[Case], count: int) -> list[Case]:
    """Cases that meet every pair of values of two axes, chosen greedily among random ones; `count` at most."""

    def pairs(case: Case) -> set[object]:
        family, size, wish = case
        return set(itertools.combinations([("family", family), ("size", size), *wish.items()], 2))

    draw = random.Random(4)
    missing = set().union(*(pairs(case) for case in cases))
    chosen = []
    while missing and len(chosen) < count:
        best = max(draw.sample(cases, 200), key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


CASES = [(family, size, wish) for family in FAMILIES for size in SIZES for wish in OPTIONS]
FAST = [
    *pairwise([case for case in CASES if not is_refused(*case)], 40),
    *pairwise([case for case in CASES if is_refused(*case)], 8),
    *pairwise([(UNGATED, size, wish) for size in SIZES for wish in OPTIONS if not is_refused(UNGATED, size, wish)], 12),
]


@pytest.fixture(scope="module", autouse=True)
def _remembered():
    """What no option changes is worked out once per checkpoint."""
    with remembered_models():
        yield


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Return a function that gives a family's checkpoint of a size, made once, and its stock weights."""
    made: dict[tuple[str, str], tuple[Path, dict[str, torch.Tensor]]] = {}

    def source(family: str, size: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if (family, size) not in made:
            sizes = dict(SIZES[size])
            shared = sizes.pop("shared")
            if family == "qwen2_moe":
                sizes["shared_expert_intermediate_size"] = shared
            if family in ("mixtral", "olmoe"):
                sizes["intermediate_size"] = sizes["moe_intermediate_size"]
            if family == UNGATED:
                sizes["layers_block_type"] = ["moe"]
            elif not family.endswith("_moe"):
                sizes.pop("moe_intermediate_size")
            if family in MOE and size == "wide":
                sizes["num_local_experts" if family == "mixtral" else "num_experts"] = 2
            model = tiny_model(family, num_hidden_layers=1, **sizes).to(torch.bfloat16)
            folder = tmp_path_factory.mktemp("sources") / f"{family}-{size}"
            model.save_pretrained(folder)
            made[family, size] = folder, {name: tensor.detach() for name, tensor in model.state_dict().items()}
        return made[family, size]

    return source


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    actual, wanted = actual.contiguous(), wanted.contiguous()
    return (
        actual.dtype == wanted.dtype
        and actual.shape == wanted.shape
        and torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8))
    )


def check(source: Path, state: dict[str, torch.Tensor], options: ConvertOptions, folder: Path) -> None:
    """Convert, compare every tensor, export, compare every tensor."""
    dense_only = not any("experts" in name for name in state)
    try:
        if options.precision == "mxfp4" and dense_only:
            raise ImpossibleError
        modules = list(modules_of(state))
        results = [expected(weights, options) for weights in modules]
    except ImpossibleError:
        with pytest.raises(ConversionError):
            convert_checkpoint(source, folder / "dst", options)
        assert not (folder / "dst").exists()
        return
    original = load(source)
    manifest = convert_checkpoint(source, folder / "dst", options)
    wanted = {name: tensor for result in results for name, tensor in result.tensors.items()}
    copied = {tensor.name for tensor in manifest.tensors if tensor.layout == "source"}
    wanted |= {name: original[name] for name in copied}
    converted = load(folder / "dst")
    assert converted.keys() == wanted.keys()
    wrong = [name for name, tensor in wanted.items() if not same(converted[name], tensor)]
    assert not wrong
    report = export_checkpoint(folder / "dst", folder / "back", allow_inexact=True)
    assert bool(report.inexact) == options.quantized
    back = load(folder / "back")
    assert back.keys() == original.keys()
    changed = {name for name, tensor in original.items() if not same(back[name], tensor)}
    assert changed <= set(report.inexact)
    check_values_back(source, folder / "back", modules, results)


def check_values_back(source: Path, back: Path, modules: list, results: list) -> None:
    """The exported checkpoint, loaded by stock transformers, holds the values that the converted one stands for."""
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(back, dtype="auto").state_dict()
    for weights, result, again in zip(modules, results, modules_of(state), strict=True):
        assert again.prefix == weights.prefix
        for part in ("gate", "up", "down"):
            assert same(getattr(again, part), result.back[part]), (weights.prefix, part)


def label(case: Case) -> str:
    family, size, wish = case
    return "-".join([family, size, *(f"{value}" for value in wish.values())])


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize(("family", "size", "wish"), FAST, ids=map(label, FAST))
def test_every_tensor_is_what_the_formats_make_of_the_source(family, size, wish, sources, tmp_path):
    source, state = sources(family, size)
    check(source, state, ConvertOptions(**wish), tmp_path)


def share_of(family: str) -> list[dict[str, object]]:
    """A third of the options: the families of a kind (dense, experts) meet all of them between them.

    Rules other than the defaults are met by the pairs above; here they would only multiply.
    """
    kin = [name for name in FAMILIES if (name in MOE) == (family in MOE)]
    return [wish for wish in OPTIONS if wish["scale_rule"] is None][kin.index(family) % 3 :: 3]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.thinned(3, 3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_what_the_formats_make_of_the_source_in_all_options(family, size, sources, tmp_path):
    source, state = sources(family, size)
    for number, wish in enumerate(share_of(family)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(source, state, ConvertOptions(**wish), folder)


@pytest.mark.parametrize("experts", [False, True])
def test_each_kind_of_family_meets_all_options(experts: bool) -> None:
    met = [wish for family in FAMILIES if (family in MOE) == experts for wish in share_of(family)]
    assert all(wish in met for wish in OPTIONS if wish["scale_rule"] is None)


def test_the_sample_meets_every_value_of_every_option() -> None:
    met = {pair for _, _, wish in FAST for pair in wish.items()}
    assert met == {pair for wish in OPTIONS for pair in wish.items()}
    assert {family for family, _, _ in FAST} == {*FAMILIES, UNGATED} and len(FAMILIES) >= 8

"""Outliers are found, named, and folded away; what cannot be folded leaves the weights as they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_neuron_moe.errors import UnsupportedModelError
from hf_neuron_moe.explore.explain import FOLD, KEEP_BF16, Outlier, Reason, reason_of
from hf_neuron_moe.explore.fold import fold, save_folded
from hf_neuron_moe.explore.measure import Pass
from hf_neuron_moe.explore.measures import Measures
from hf_neuron_moe.explore.run import Options, explore
from tests.explore.models import TEXT, checkpoint, loaded, plant_in_down, plant_in_input, planted
from tests.tiny_models import tiny_model

CASES = [("llama", plant_in_down), ("llama", plant_in_input), ("mixtral", plant_in_input)]


def reasons(model: Any, row_L: torch.Tensor) -> dict[str, Reason]:
    measures = Measures()
    Pass(model, ("mxfp8",), measures).run(row_L)
    return {name: reason_of(name, block, "mxfp8") for name, block in measures.blocks.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("power", [12, 20])
@pytest.mark.parametrize(("family", "plant"), CASES)
def test_a_planted_channel_is_named_and_folded_away(family: str, plant: Any, power: int, tmp_path: Path) -> None:
    model = loaded(planted(tmp_path / "model", family, plant, layer=1, channel=37, power=power))
    row_L = torch.randint(3, 200, (64,))
    found = reasons(model, row_L)
    (name,) = [name for name, reason in found.items() if reason.remedy_kind == FOLD]
    assert "layers.1" in name and "channel 37 is " in found[name].text
    assert found[name].text.startswith(("down_proj input", "gate_proj and up_proj input")) == (power == 20)
    (outlier,) = found[name].outliers
    assert outlier.channel == 37 and "of layer 1" in found[name].text
    before = model(input_ids=row_L[None]).logits
    (done,) = fold(model, name, [outlier], row_L)
    assert done.power == -round(math.log2(outlier.ratio))
    assert torch.equal(model(input_ids=row_L[None]).logits, before)
    assert all(reason.remedy_kind != FOLD for reason in reasons(model, row_L).values())


@pytest.mark.parametrize("kind", ["weights", "activations"])
def test_an_operand_of_zeros_is_named(kind: str, tmp_path: Path) -> None:
    """It has no SQNR: nothing is lost, and there is no signal either."""
    model = loaded(checkpoint(tmp_path / "model"))
    layer = model.model.layers[1]
    with torch.no_grad():
        parts = [layer.mlp.gate_proj, layer.mlp.up_proj] if kind == "weights" else [layer.post_attention_layernorm]
        for part in parts:
            part.weight.zero_()
    reason = reasons(model, torch.randint(3, 200, (64,)))["model.layers.1.mlp"]
    assert reason.text.endswith(f"of layer 1: its {kind} are all zeros.") and "nan" not in reason.text, reason


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_experts_without_a_gate_have_words_and_remedies_of_their_own(product: str, tmp_path: Path) -> None:
    """A channel of up's input folds into the norm; one of down's does not, because up is squared before it."""
    model: Any = tiny_model("nemotron_h")
    norm, mixer = model.model.layers[0].norm, model.model.layers[0].mixer
    with torch.no_grad():
        if product == "gate_up":
            norm.weight[5] *= 2.0**20
            for weight in (mixer.gate.weight, mixer.experts.up_proj, mixer.shared_experts.up_proj.weight):
                weight[..., 5] *= 2.0**-20
        else:
            mixer.experts.up_proj[:, 5] *= 2.0**10
            mixer.experts.down_proj[:, :, 5] *= 2.0**-20
    model.save_pretrained(tmp_path)
    model, row_L = loaded(tmp_path), torch.randint(3, 60, (64,))
    reason = reasons(model, row_L)["model.layers.0.mixer.experts"]
    assert reason.text.startswith(f"{'up' if product == 'gate_up' else 'down'}_proj input of layer 0, expert")
    assert reason.outlier is not None and (reason.outlier.product, reason.outlier.channel) == (product, 5)
    assert reason.remedy_kind == (FOLD if product == "gate_up" else KEEP_BF16)
    before = model(input_ids=row_L[None]).logits
    if product == "down":
        with pytest.raises(UnsupportedModelError, match="a block whose gate multiplies up"):
            fold(model, "model.layers.0.mixer.experts", reason.outliers, row_L)
    else:
        fold(model, "model.layers.0.mixer.experts", reason.outliers, row_L)
        assert model.model.layers[0].norm.weight[5] < 2
    assert torch.equal(model(input_ids=row_L[None]).logits, before)


def test_a_model_without_outliers_has_nothing_to_fold(tmp_path: Path) -> None:
    model = loaded(checkpoint(tmp_path / "model"))
    assert all(reason.outlier is None for reason in reasons(model, torch.randint(3, 200, (64,))).values())


@pytest.mark.parametrize("product", ["down", "gate_up"])
def test_weights_are_as_they_were_where_folding_fails(
    product: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(checkpoint(tmp_path / "model"))
    before = {name: param.clone() for name, param in model.named_parameters()}
    outlier = Outlier(product, 3, 0, 2.0**10, 2.0)
    if product == "down":  # 2**-10 of the smallest number is zero
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3, 0] = before["model.layers.0.mlp.up_proj.weight"][3, 0] = 1e-45
        match = "with weights that can be scaled"
    else:  # a norm that adds one to its weight is not linear in it
        norm = model.model.layers[0].post_attention_layernorm
        monkeypatch.setattr(norm, "forward", lambda x: x * (1 + norm.weight))
        match = "equal to the original within a rounding"
    with pytest.raises(UnsupportedModelError, match=match):
        fold(model, "model.layers.0.mlp", [outlier], torch.randint(3, 200, (16,)))
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


@pytest.mark.slow
def test_the_folded_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = planted(tmp_path / "model", "llama", plant_in_down, layer=1, channel=37, power=20)
    options = Options(tokens=512, length=64, verify=2, fold=tmp_path / "folded")
    result = explore(folder, TEXT, options)
    first = result.ranking["mxfp8"][0]
    assert first.block == "model.layers.1.mlp" and "channel 37" in first.reason.text
    assert result.plan.precisions["model.layers.1.mlp"] == "bf16" or result.plan.recipe["*"] == "bf16"
    assert abs(result.folded["bf16"] - result.measured["bf16"]) <= 2**-8 * result.measured["bf16"]
    assert abs(result.folded["mxfp8"] - result.folded["bf16"]) < abs(result.measured["mxfp8"] - result.measured["bf16"])
    ids = torch.arange(3, 67)[None]
    stock, folded = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "folded"))
    torch.testing.assert_close(folded(ids).logits, stock(ids).logits, rtol=2**-8, atol=2**-8)


def test_a_folded_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    class Saved:
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def save_pretrained(self, folder: Path) -> None:
            if self.fails:
                raise OSError("no space")
            folder.mkdir(exist_ok=True)
            (folder / self.name).touch()

    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "of_a_killed_run").touch()
    with pytest.raises(OSError, match="no space"):
        save_folded(Saved("model"), Saved("tokenizer", fails=True), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    save_folded(Saved("model"), Saved("tokenizer"), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model", "tokenizer"]

"""--recipe and --keep-bf16: what the commands make of them, and what they refuse before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_neuron_moe.convert.manifest import read_manifest

MAP = {"*": "mxfp8", "model.layers.0.*": "bf16"}


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama checkpoint of two layers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = tmp_path_factory.mktemp("model") / "llama"
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).bfloat16().save_pretrained(folder)
    return folder


RECIPES = {
    "json": json.dumps(MAP, indent="\t"),
    "yaml": "# the first layer stays\n'*': mxfp8\nmodel.layers.0.*: bf16\n",
    "text": '{"*": mxfp8, "model.layers.0.*": "bf16",}',
}


@pytest.mark.parametrize("form", RECIPES)
def test_recipes_and_kept_globs_are_one_map(run: Any, two_layers: Path, tmp_path: Path, form: str) -> None:
    recipe = tmp_path / f"recipe.{form}"
    recipe.write_text(RECIPES[form])
    by_recipe, by_glob = tmp_path / "recipe", tmp_path / "glob"
    assert run("convert", two_layers, by_recipe, "--recipe", recipe).code == 0
    assert run("convert", two_layers, by_glob, "--precision", "mxfp8", "--keep-bf16", "model.layers.0.*").code == 0
    names = {path.name for path in by_recipe.iterdir()}
    assert names == {path.name for path in by_glob.iterdir()}
    assert all((by_recipe / name).read_bytes() == (by_glob / name).read_bytes() for name in names)
    assert read_manifest(by_recipe).options.precision == MAP


def test_both_together_in_parts_and_in_a_dry_run(run: Any, two_layers: Path, tmp_path: Path) -> None:
    recipe, made = tmp_path / "recipe.json", tmp_path / "made"
    recipe.write_text('{"*": "mxfp8", "*.0.mlp": "bf16"}')
    options = (
        "--recipe",
        recipe,
        "--keep-bf16",
        "model.layers.0.*",
        "--keep-bf16",
        "*.0.mlp",
        "--max-shard-size",
        "90KB",
    )
    dry = run("convert", two_layers, made, *options, "--dry-run", "--json")
    assert dry.code == 0 and not made.exists()
    for part in ("1/2", "2/2"):
        assert run("convert", two_layers, made, *options, "--part", part).code == 0
    assert run("finalize", two_layers, made).code == 0
    assert read_manifest(made).options.precision == {"*": "mxfp8", "*.0.mlp": "bf16", "model.layers.0.*": "bf16"}
    assert json.loads(dry.out)["files"] == {path.name: path.stat().st_size for path in made.iterdir()}
    assert run("convert", two_layers, made, *options, "--resume").code == 0
    assert run("verify", made, "--source", two_layers).code == 0
    assert "precision mxfp8, *.0.mlp: bf16" in run("inspect", made).out
    again = run("convert", made, tmp_path / "again")
    assert again.code != 0 and "(precision mxfp8, *.0.mlp: bf16, model.layers.0.*: bf16, layout kernel)" in again.err


@pytest.mark.slow
def test_plan_and_estimate_take_a_recipe(run: Any, two_layers: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(MAP))
    planned = json.loads(run("plan", two_layers, "--recipe", recipe, "--json").out)
    assert [entry["precision"] for entry in planned["entries"]] == ["bf16", "mxfp8"]
    words = ("estimate", two_layers, "--tokens", 256, "--activations", "full", "--device", "trn3")
    saved = {}
    for kind, more in {"mixed": ("--recipe", recipe), "bf16": (), "mxfp8": ("--precision", "mxfp8")}.items():
        found = json.loads(run(*words, *more, "--json").out)
        saved[kind] = found["policies"][0]["saved_blocks"]
        if kind == "mixed":
            assert found["precision"] == found["roofline"]["precision"] == MAP
            assert {block["names"][0]: block["precision"] for block in found["roofline"]["blocks"]} == {
                "model.layers.0.mlp": "bf16",
                "model.layers.1.mlp": "mxfp8",
            }
    assert saved["bf16"] < saved["mxfp8"] and 2 * saved["mixed"] == saved["bf16"] + saved["mxfp8"]
    shown = run(*words, "--recipe", recipe).out
    assert "blocks in mxfp8, model.layers.0.*: bf16" in shown and "1 x mlp (128, 128) in bf16" in shown
    recipe.write_text('{"*": "bf16", "*.4.*": "mxfp8"}')
    for command in (words, ("plan", two_layers)):
        refused = run(*command, "--recipe", recipe)
        assert refused.code == 2 and refused.err.startswith(f"{command[0]}: --recipe must be globs that match")
    for content, says in {
        '{"a": "bf16"}': "--recipe must be a mapping",
        '{"*": "x"}': "--recipe['*'] must be one",
    }.items():
        recipe.write_text(content)
        assert run("plan", two_layers, f"--recipe={recipe}").err.startswith(f"plan: {says}")
    both = run("plan", two_layers, "--recipe", recipe, "--precision", "bf16")
    assert (both.code, both.err.split(",")[0]) == (2, "plan: --precision must be left out with --recipe")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("words", "recipe", "says"),
    [
        (["--keep-bf16", "*.0.*"], None, "--keep-bf16 must be left out of a conversion to bf16, got *.0.*"),
        (["--keep-bf16", "a"], {"*": "bf16"}, "--keep-bf16 must be left out of a conversion to bf16"),
        (["--keep-bf16", "*.9.*", "--precision", "mxfp8"], None, "--keep-bf16 must be globs that match"),
        (["--keep-bf16=*.0.*", "--keep-bf16=*.9.*"], {"*": "mxfp8"}, "--keep-bf16 must be globs that match"),
        (["--keep-bf16=*.0.*"], {"*": "mxfp8", "*.9.*": "bf16"}, "--recipe must be globs that match"),
        (["--keep-bf16", "*.0.*"], {"*": "bf16", "*.0.*": "mxfp8"}, "gives 'mxfp8'. Remove one."),
        (["--keep-bf16", "*"], {"*": "mxfp8", "*.0.*": "bf16"}, "--keep-bf16 must be globs that leave a block in MX"),
        (["--keep-bf16", "*"], {"*": "bf16", "*.0.*": "mxfp8"}, "globs that leave a block in MX, got '*'"),
        (["--keep-bf16", "*", "--precision", "mxfp8"], None, "leave a block in MX, got '*', which matches all of them"),
        (["--keep-bf16", "*.0.*"], {"*": "bf16", "*.mlp": "mxfp8"}, "'*.0.*' (bf16) and '*.mlp' (mxfp8), which match"),
        (["--precision", "mxfp8"], {"*": "mxfp8"}, "--precision must be left out with --recipe, got mxfp8"),
        ([], {"*.0.*": "mxfp8"}, "--recipe must be a mapping such as"),
        ([], {"*": "mxfp9"}, "Did you mean 'mxfp8'?"),
        ([], "*: mxfp8", "while scanning an alias"),
        ([], '{"*": "mxfp8", "*": "bf16"}', "'*' appears twice"),
        ([], "'*': [mxfp8]", "a sequence within the mapping"),
        ([], "mxfp8", "no mapping"),
        ([], "", "no mapping"),
        ([], "'*': mxfp8" + " " * 1_000_000, "1,000,010 bytes"),
        (["--recipe", "nowhere.yaml"], None, "--recipe must be a YAML or JSON file such as"),
        (["--recipe", "nowhere.yaml"], None, "directory: 'nowhere.yaml'). Correct the path."),
    ],
)
def test_refused(run: Any, two_layers: Path, tmp_path: Path, words: list[str], recipe: Any, says: str) -> None:
    if recipe is not None:
        file = tmp_path / "recipe.yaml"
        file.write_text(recipe if isinstance(recipe, str) else json.dumps(recipe))
        words = [*words, "--recipe", str(file)]
    result = run("convert", two_layers, tmp_path / "made", *words)
    assert result.code == 2 and result.err.startswith("convert: ") and says in result.err
    assert not (tmp_path / "made").exists() and not list(tmp_path.glob("made*"))

"""``parity``: stock and recipes on the same batches, its files, its table, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, MixtralConfig

from hf_neuron_moe.cli.parity import _verdict
from hf_neuron_moe.recipes import study as recipe_study
from hf_neuron_moe.recipes.variant_runs import Setting, batches, fitting_steps
from tests.byte_tokenizer import BYTES, save_byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, LENGTH = 4, 2, 16
SIZES = ["--steps", STEPS, "--batch", BATCH, "--length", LENGTH, "--learning-rate", 2e-3]
NEEDED = Setting(STEPS, BATCH, LENGTH, 2e-3).tokens
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
}
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral with a tokenizer, whose loss has the routers' balance in it."""
    torch.manual_seed(5)
    config = MixtralConfig(vocab_size=BYTES, output_router_logits=True, router_aux_loss_coef=0.5, **TINY)
    folder = tmp_path_factory.mktemp("models") / "tiny-mixtral"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines that differ, a few times as many as a run needs."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The square of {number} is {number**2}.\n" for number in range(100)), encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe: the first layer stays bf16."""
    path = tmp_path / "first-bf16.yaml"
    path.write_text('"*": mxfp8\n"model.layers.0.*": bf16\n', encoding="utf-8")
    return path


@pytest.fixture
def parity(run: Run, mixtral: Path, text: Path, tmp_path: Path) -> Run:
    """Return a function that runs the command on the tiny model, with two seeds, unless it gets other ones."""

    def call(*options: object, model: Path = mixtral, source: Path = text) -> Any:
        return run("parity", model, source, *SIZES, "--seeds", 2, "-o", tmp_path / "out", *options)

    return call


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of the runs by their names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))}


def test_every_variant_sees_the_same_batches_and_only_its_numbers_differ(
    parity: Run, run: Run, mixtral: Path, text: Path, recipe: Path, tmp_path: Path
) -> None:
    done = parity("--recipe", "fp32", "--recipe", recipe, "--json")
    assert done.code == 0, done.err
    facts, found = json.loads(done.out), results(tmp_path / "out")
    assert facts["ok"] is True and found.keys() == {f"{v}.{s}" for v in ("stock", "fp32", "first-bf16") for s in (0, 1)}

    # Stock's first step and its first evaluation, by hand and without the routers' part of the loss.
    ids = torch.tensor(AutoTokenizer.from_pretrained(mixtral)(text.read_text())["input_ids"][:NEEDED])
    rows = ids.view(-1, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(mixtral).eval()

    def loss(ids_BL: torch.Tensor) -> float:
        logits = model(ids_BL).logits[:, :-1]
        return cross_entropy(logits.reshape(-1, BYTES), ids_BL[:, 1:].reshape(-1)).item()

    for seed in (0, 1):
        first = next(batches(rows[: STEPS * BATCH], BATCH, seed))
        assert found[f"stock.{seed}"]["losses"][0] == pytest.approx(loss(first), rel=1e-6)  # fp32 sums
        assert found[f"stock.{seed}"]["eval_before"] == pytest.approx(loss(rows[STEPS * BATCH :]), rel=1e-6)
        # The same mathematics in sums of another order; AdamW's first steps enlarge the difference.
        assert found[f"fp32.{seed}"]["losses"] == pytest.approx(found[f"stock.{seed}"]["losses"], rel=1e-5)
        assert found[f"first-bf16.{seed}"]["losses"] != pytest.approx(found[f"stock.{seed}"]["losses"], rel=1e-5)
        assert found[f"stock.{seed}"]["eval_loss"] < found[f"stock.{seed}"]["eval_before"]
    assert found["stock.0"]["losses"] != found["stock.1"]["losses"]

    summary = facts["summary"]["tiny-mixtral"]["variants"]
    for name in ("stock", "fp32", "first-bf16"):
        expected = sum(found[f"{name}.{seed}"]["eval_loss"] for seed in (0, 1)) / 2
        assert summary[name]["eval_loss"] == pytest.approx(expected)
        assert summary[name]["step_seconds"] > 0 and summary[name]["saved_bytes_per_token"] > 0
    assert "difference_percent" not in summary["stock"] and summary["stock"]["time_ratio"] == 1
    assert summary["first-bf16"]["band_percent"] > 0 and len(summary["first-bf16"]["eval"]["by_seed_percent"]) == 2
    saved = facts["saved_bytes_per_token"]["tiny-mixtral"]
    assert saved["first-bf16"] < saved["fp32"] < saved["stock"]
    drawn = run("report", tmp_path / "out", "--json")
    assert json.loads(drawn.out)["studies"] == 1
    assert "first-bf16" in (tmp_path / "out" / "report.html").read_text()
    # The runs' own files are there too: health, expert load, one page for all.
    assert json.loads(run("report", tmp_path / "out" / "runs", "--json").out)["runs"] == 4


def test_the_seed_alone_decides_the_order() -> None:
    rows = torch.arange(12).view(6, 2)
    one, same, other = (torch.cat(list(islice(batches(rows, 2, seed), 3))) for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert sorted(other.flatten().tolist()) == list(range(12)), "each row once"


@pytest.mark.parametrize(
    ("gap", "band", "verdict"),
    [
        (0.0004, 0.0, "no difference"),
        (0.2, 0.3, "within chance"),
        (0.2, 0.1, "worse"),
        (-0.2, 0.1, "better"),
        (0.2, None, "nothing about chance"),
    ],
)
def test_a_difference_that_is_shown_as_none_is_none(gap: float, band: float | None, verdict: str) -> None:
    assert _verdict("mxfp8", {"difference_percent": gap, "band_percent": band}).endswith(verdict)


def test_the_steps_that_fit_are_the_most() -> None:
    for count in range(1, 60):
        fits = [steps for steps in range(count + 1) if Setting(steps, 1, 1, 0.0).tokens <= count]
        assert fitting_steps(count) == max(fits), count


def test_ended_runs_are_not_repeated_and_more_seeds_join(
    parity: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, int]] = []
    original = recipe_study.RecipeStudy.do

    def noted(self: Any, variant: str, seed: int, stepped: Callable[[], None]) -> None:
        begun.append((variant, seed))
        original(self, variant, seed, stepped)

    monkeypatch.setattr(recipe_study.RecipeStudy, "do", noted)
    shown = parity("--recipe", "bf16", "--seeds", 1)
    assert shown.code == 0 and begun == [("stock", 0), ("bf16", 0)], shown
    assert "One seed has no confidence band" in shown.out and "±" not in shown.out
    first = results(tmp_path / "out")
    begun.clear()
    shown = parity("--recipe", "bf16")
    assert shown.code == 0 and begun == [("stock", 1), ("bf16", 1)], shown
    assert "95 % confidence over 2 seeds, 12.7 standard errors" in shown.out
    assert {name: of for name, of in results(tmp_path / "out").items() if name in first} == first
    begun.clear()
    again = parity("--recipe", "bf16")
    assert (again.code, again.out, begun) == (0, shown.out, [])
    (tmp_path / "out" / "runs" / "bf16.0.json").unlink()
    assert parity("--recipe", "bf16").code == 0 and begun == [("bf16", 0)]
    assert results(tmp_path / "out")["bf16.0"]["losses"] == first["bf16.0"]["losses"], "bit for bit"


def test_other_recipes_and_seeds_of_the_folder_stay_in_the_summary(parity: Run, tmp_path: Path) -> None:
    def variants(*options: object) -> dict[str, dict[str, Any]]:
        done = parity(*options, "--json")
        assert done.code == 0, done
        assert json.loads((tmp_path / "out" / "parity.json").read_text())["summary"] == json.loads(done.out)["summary"]
        return dict(json.loads(done.out)["summary"]["tiny-mixtral"]["variants"])

    first = variants("--recipe", "bf16")
    written = (tmp_path / "out" / "parity.json").rename(tmp_path / "written.json")
    (tmp_path / "out" / "parity.json").symlink_to(written)
    assert variants("--recipe", "bf16", "--seeds", 1) == first
    both = variants("--recipe", "fp32", "--seeds", 1)
    assert {name: both[name] for name in first} == first and both["fp32"]["seeds"] == 1
    assert "over 2 seeds (fp32 1)" in parity("--recipe", "fp32", "--seeds", 1).out
    assert variants("--recipe", "fp32", "--recipe", "bf16") == variants("--recipe", "bf16", "--recipe", "fp32")
    assert (tmp_path / "out" / "parity.json").is_symlink() and "fp32" in written.read_text()
    # Of another setting, or of a seed that stock has not:
    path = tmp_path / "out" / "runs" / "bf16.0.json"
    content = json.loads(path.read_text())
    content["settings"]["length"] = 8
    path.write_text(json.dumps(content))
    (tmp_path / "out" / "runs" / "stock.1.json").unlink()
    assert set(variants("--recipe", "fp32", "--seeds", 1)) == {"stock", "fp32"}


def test_results_of_another_study_are_refused_and_stay(
    parity: Run, text: Path, recipe: Path, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--recipe", recipe, "--seeds", 1)
    assert parity(*options).code == 0
    before = results(tmp_path / "out")
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("square", "double"), encoding="utf-8")
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in mixtral.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    for call, named in (
        (lambda: parity(*options, source=other), "text"),
        (lambda: parity(*options, "--learning-rate", 1e-3), "learning_rate"),
        (lambda: parity(*options, "--steps", STEPS - 1), "steps"),
        (lambda: parity(*options, model=changed), "model"),
    ):
        refused = call()
        assert refused.code == 4 and f"another {named}. Name another folder with -o" in refused.err, refused
    with monkeypatch.context() as patch:
        patch.setattr(recipe_study, "__version__", "0.0.0")
        refused = parity(*options)
    assert refused.code == 4 and "another version. Name another folder with -o" in refused.err, refused
    (tmp_path / "out" / "parity.json").unlink()  # as in a study that was stopped
    refused = parity(*options, source=other)
    assert refused.code == 4 and "stock.0.json" in refused.err and "another text" in refused.err, refused
    recipe.write_text('"*": mxfp8\n"model.layers.1.*": bf16\n', encoding="utf-8")
    refused = parity(*options)
    assert refused.code == 4 and "first-bf16.0.json" in refused.err and "another recipe" in refused.err, refused
    (tmp_path / "out" / "runs" / "stock.0.json").write_text("[1]")
    assert parity("--recipe", "bf16").code == 4
    del before["stock.0"]
    (tmp_path / "out" / "runs" / "stock.0.json").unlink()
    assert results(tmp_path / "out") == before
    (tmp_path / "out" / "parity.json").write_text('{"models": {}}')  # of benchmarks/parity.py, say
    assert parity("--recipe", "bf16").code == 4
    (tmp_path / "out" / "parity.json").unlink()
    os.mkfifo(tmp_path / "out" / "parity.json")
    refused = parity("--recipe", "bf16")
    assert refused.code == 4 and "got a device, a pipe or a socket" in refused.err, refused
    assert results(tmp_path / "out") == before, "nothing was trained"


def test_a_short_text_names_what_is_needed_and_the_steps_that_fit(parity: Run, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(text.read_bytes()[: NEEDED - 1])
    refused = parity("--recipe", "bf16", source=short)
    assert refused.code == 2 and f"at least {NEEDED:,} tokens long, got {NEEDED - 1:,} in {short}" in refused.err
    assert "or --steps 3." in refused.err, refused.err
    assert parity("--recipe", "bf16", "--steps", 3, "--seeds", 1, source=short).code == 0
    short.write_bytes(text.read_bytes()[:LENGTH])
    assert "a smaller --batch or --length" in parity("--recipe", "bf16", source=short).err


@pytest.mark.slow
def test_mistakes_are_found_before_a_step(parity: Run, mixtral: Path, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text('"*": mxfp8\n"model.layers.7.*": bf16\n', encoding="utf-8")
    bare, dense = tmp_path / "bare", tmp_path / "gpt2"
    AutoModelForCausalLM.from_pretrained(mixtral).save_pretrained(bare)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=BYTES, **sizes)).save_pretrained(dense)
    save_byte_tokenizer(dense)
    small = tmp_path / "small"
    AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=64, **TINY)).save_pretrained(small)
    save_byte_tokenizer(small)
    for call, code, said in (
        (lambda: parity("--recipe", recipe), 2, "recipe first-bf16: patch_model: precision must be globs that match"),
        (lambda: parity("--recipe", "mxpf8"), 2, "Did you mean 'mxfp8'?"),
        (
            lambda: parity("--recipe", "bf16", "--recipe", "bf16"),
            2,
            "like another one. Name it once.",
        ),
        (lambda: parity("--recipe", "bf16", "-o", recipe / "x"), 4, f"got {recipe} is no folder"),
        (lambda: parity("--recipe", tmp_path / "none.yaml"), 2, "none.yaml (FileNotFoundError"),
        (lambda: parity("--recipe", "bf16", "--length", 65), 2, "--length must be at most 64"),
        (lambda: parity("--recipe", "bf16", "--learning-rate", "nan"), 2, "nan is no finite number"),
        (lambda: parity("--recipe", "bf16", "--activations", "fp9"), 2, "activations must be one of full"),
        (lambda: parity("--recipe", "bf16", model=bare), 2, "a folder with a tokenizer"),
        (lambda: parity("--recipe", "bf16", model=small), 2, "a tokenizer of the model's 64 tokens"),
        (lambda: parity("--recipe", "bf16", model=dense), 1, "at least one MLP or experts block"),
        (lambda: parity("--recipe", "bf16", model=tmp_path / "missing"), 3, "no such folder"),
        (lambda: parity("--recipe", "bf16", source=tmp_path / "missing.txt"), 2, "a file that can be read"),
    ):
        refused = call()
        assert refused.code == code and said in refused.err and refused.out == "", refused
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_is_named(parity: Run, mixtral: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(mixtral)
    for value, words in (
        (float("nan"), "model.norm.weight must be finite"),
        (3e38, "the loss of stock.0, evaluation, must be finite, got nan. No step was taken yet: the model"),
    ):
        with torch.no_grad():
            model.model.norm.weight.fill_(value)
        model.save_pretrained(broken)
        save_byte_tokenizer(broken)
        refused = parity("--recipe", "bf16", model=broken)
        assert refused.code == 1 and words in refused.err, refused
        assert "--learning-rate" not in refused.err
    assert not (tmp_path / "out").exists()


def _until(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not ready():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow  # processes that import transformers
def test_a_stopped_comparison_keeps_what_ended_and_continues(
    mixtral: Path, text: Path, tmp_path: Path, parity: Run
) -> None:
    options = [*map(str, SIZES), "--steps", "24", "--seeds", "2", "--recipe", "bf16"]
    long = tmp_path / "long.txt"
    long.write_text(text.read_text() * 3, encoding="utf-8")
    command = [sys.executable, "-m", "hf_neuron_moe.cli.main", "parity", str(mixtral), str(long), *options]
    command += ["-o", str(tmp_path / "stopped")]
    runs = tmp_path / "stopped" / "runs"
    ended: dict[str, int] = {}
    for number, (how, code) in enumerate([(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)], start=1):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            _until(lambda expected=number: len(list(runs.glob("*.json"))) >= expected, process)
            process.send_signal(how)
            out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (code, ""), err
        if how is not signal.SIGKILL:
            assert f"{len(list(runs.glob('*.json')))} of 4 runs ended; the same command continues" in err
        for path in runs.glob("*.json"):
            assert ended.setdefault(path.name, path.stat().st_mtime_ns) == path.stat().st_mtime_ns, "not repeated"
    assert len(ended) == 3 and not (tmp_path / "stopped" / "parity.json").exists()
    assert parity(*options[8:], "-o", tmp_path / "stopped", source=long).code == 0
    assert parity(*options[8:], "-o", tmp_path / "whole", source=long).code == 0
    losses = {name: of["losses"] for name, of in results(tmp_path / "whole").items()}
    assert {name: of["losses"] for name, of in results(tmp_path / "stopped").items()} == losses

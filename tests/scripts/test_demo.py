from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from demo import check_model
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from tests.byte_tokenizer import save_byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = tmp_path / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.mark.slow  # three runs of two models and a child process that imports transformers once per model
def test_demo_runs_end_to_end_on_a_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--steps", "2", "--moe-layers", "2", "--eval-windows", "1", "--perplexity-windows", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "demo.py"), "--model", str(tiny_model), "--out", str(out), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,  # several minutes on a busy machine; this only ends a run that hangs
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert str((out / "report.md").resolve()) in done.stdout
    record = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [part["title"] for part in record["parts"]] == ["Dense", "Mixture of experts"]
    # An untrained model of 256 tokens knows nothing: its perplexity is that of a uniform guess, within the spread that
    # random weights of standard deviation 0.02 cause.
    assert record["perplexity"] == pytest.approx(256, rel=0.05)
    for part, layers in zip(record["parts"], (3, 2), strict=True):
        stock, *patched = part["runs"]
        assert [run["name"] for run in part["runs"]] == ["stock fp32", "patched bf16", "patched mxfp8"]
        for run in patched:
            assert (run["patched"], run["skipped"], run["refused"]) == (layers, 0, 0)
            assert run["saved_bytes_per_token"] < stock["saved_bytes_per_token"]
            assert run["logit_difference"]["fp32"] < record["logit_tolerance"]
            # Same data and seed: the losses differ only by what the block's precision does to a nearly uniform output.
            assert run["step_losses"] == pytest.approx(stock["step_losses"], abs=0.02)
    # The stock dense block keeps gate, silu(gate), up, their product and its input in fp32 (see test_saved_tensors).
    assert record["parts"][0]["runs"][0]["saved_bytes_per_token"] == 3 * (4 * 96 + 64) * 4
    report = (out / "report.md").read_text(encoding="utf-8")
    assert "| patched mxfp8 |" in report and record["machine"]["processor"] in report
    for text in (report, " ".join(done.stdout.split())):
        assert "Train loss is noisy" in text and "nearly tie to another expert" in text
    # Headings are not wrapped where nobody's terminal is: a line of the log is a whole one.
    assert "\nNeuron's kernels would pad: to H, I = 128, 128 (+166.7 % multiply-adds)\n" in done.stdout
    assert not (out / "checkpoints").exists()


def refusal_of(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What the demo says to ``--model``; it must not have begun with anything."""
    from demo import main

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", model])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not (tmp_path / "demo_output").exists()
    return str(stopped.value)


def test_a_model_that_is_no_llama_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MixtralConfig().save_pretrained(tmp_path / "other")
    said = refusal_of("other", monkeypatch, tmp_path)
    assert said == "--model other: the demo takes a Llama checkpoint (model type llama), and this is mixtral."


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nope", "neither a folder nor a model"),
        ("not a name", "neither a folder nor"),
        ("empty", "without a config.json"),
    ],
)
def test_a_model_that_is_not_there_is_refused_in_a_sentence(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    said = refusal_of(name, monkeypatch, tmp_path)
    assert said.startswith(f"--model {name}: ") and what in said and said.count("\n") == 0


def test_an_option_is_not_taken_for_a_longer_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo import parse_arguments

    monkeypatch.setattr(sys, "argv", ["demo.py", "--step", "3"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "unrecognized arguments: --step 3" in capsys.readouterr().err


def test_reading_the_gguf_file_is_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import demo

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    monkeypatch.setattr(demo.get_smollm2, "is_complete", lambda: False)
    said: list[str] = []
    monkeypatch.setattr(demo.Console, "print", lambda self, text: said.append(text))

    def obtain() -> Path:
        assert "reading its GGUF file" in said[-1]
        raise InterruptedError

    monkeypatch.setattr(demo.get_smollm2, "obtain", obtain)
    with pytest.raises(InterruptedError):
        demo.main()


def test_stock_logits_refuses_a_process_with_the_package(tiny_model: Path, tmp_path: Path) -> None:
    from stock_logits import main

    import hf_neuron_moe  # noqa: F401 - this process is not a stock one

    ids_file = tmp_path / "ids.pt"
    torch.save(torch.zeros(1, 4, dtype=torch.int64), ids_file)
    with pytest.raises(RuntimeError, match="must not import hf_neuron_moe"):
        main(str(ids_file), str(tmp_path), str(tiny_model))


def test_windows_are_spread_over_all_years() -> None:
    from demo_text import spread

    windows_NL = torch.arange(10)[:, None]
    assert spread(windows_NL, 5).flatten().tolist() == [0, 2, 4, 6, 8]
    assert spread(windows_NL, 3).flatten().tolist() == [0, 3, 6]
    assert spread(windows_NL, 99).flatten().tolist() == list(range(10))


def test_mean_loss_is_the_mean_over_all_predicted_tokens(tiny_model: Path) -> None:
    from demo_text import mean_loss
    from rich.console import Console

    model = LlamaForCausalLM.from_pretrained(tiny_model).train()
    windows_NL = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.eval()(windows_NL).logits[:, :-1].flatten(0, 1)
    model.train()
    expected = torch.nn.functional.cross_entropy(logits, windows_NL[:, 1:].flatten()).item()
    # fp32 sums of 45 terms in another order.
    assert mean_loss(model, windows_NL, Console(quiet=True), "windows") == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_a_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    LlamaConfig(max_position_embeddings=512).save_pretrained(tmp_path)
    check_model(str(tmp_path), 512)
    with pytest.raises(SystemExit, match="the demo uses sequences of 600 tokens, the model has 512 positions"):
        check_model(str(tmp_path), 600)


@pytest.mark.slow
def test_ctrl_c_ends_the_demo_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    words = ["--model", str(tiny_model), "--out", str(tmp_path / "out"), "--steps", "10000"]
    child = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "scripts" / "demo.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(">> upcycling"):
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in err and err.splitlines()[-1] == "interrupted; the next run starts anew"

"""The commands ``estimate`` and ``report``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from packaging.version import Version
from transformers import __version__

from hf_neuron_moe.activation_policy import PRESETS
from hf_neuron_moe.cli.estimate import batch_of, gibibytes
from hf_neuron_moe.config import MOST_TOKENS


def test_estimate_tells_a_table_or_one_object(model_dir, run):
    text = run("estimate", model_dir, "--tokens", 64, "--gradient-checkpointing")
    assert text.code == 0, text.err
    assert "1 x 64 = 64 tokens per step, gradient checkpointing" in text.out
    for row in (*PRESETS, "stock", "adamw states", "gradients"):
        assert row in text.out
    options = ["--batch", 2, "--length", 32, "--activations", "minimal", "--activations", "1KiB/token"]
    result = run("estimate", model_dir, *options, "--json", "--dtype", "fp32", "--optimizer", "sgd")
    assert (result.code, result.err) == (0, "")
    shown = json.loads(result.out)
    assert (shown["ok"], shown["dtype"], shown["tokens"], shown["optimizer_bytes"]) == (
        True,
        "float32",
        64,
        0,
    )
    assert [policy["name"] for policy in shown["policies"]] == ["minimal", "1KiB/token", "stock"]
    fixed = shown["parameter_bytes"] + shown["gradient_bytes"]
    assert [policy["total"] - policy["saved"] for policy in shown["policies"]] == [fixed] * 3


def test_estimate_shows_the_other_policies_where_one_is_refused(model_dir, run):
    options = [part for text in ("1B/token", "full", "2B/token", "minimal") for part in ("--activations", text)]
    result = run("estimate", model_dir, "--tokens", 32, "--json", *options)
    assert (result.code, result.err) == (0, "")
    shown = json.loads(result.out)
    assert [policy["name"] for policy in shown["policies"]] == ["full", "minimal", "stock"]
    assert list(shown["refused"]) == ["1B/token", "2B/token"]
    assert "a budget of at least 128 bytes per token" in shown["refused"]["1B/token"]
    table = run("estimate", model_dir, "--tokens", 32, *options)
    assert table.code == 0 and "1B/token: refused" in " ".join(table.out.split())
    both = ["--activations", "1B/token", "--activations", "2B/token"]
    assert run("estimate", model_dir, "--tokens", 32, *both).code == 2


def test_estimate_takes_a_policy_as_a_json_object(model_dir, run):
    """One exception that is the whole model is the same as its preset; the name is what was asked for."""
    exception = '{"keep":"minimal","modules":{"model.layers.0.*":"recompute"}}'
    budget = '{"bytes_per_token": 1024}'
    options = [part for text in (exception, "recompute", budget, "1KiB/token") for part in ("--activations", text)]
    result = run("estimate", model_dir, "--tokens", 32, "--json", *options)
    assert (result.code, result.err) == (0, "")
    policies = json.loads(result.out)["policies"]
    assert [policy.pop("name") for policy in policies] == [exception, "recompute", budget, "1KiB/token", "stock"]
    assert policies[0] == policies[1] != policies[2] == policies[3]
    table = run("estimate", model_dir, "--tokens", 32, *options)
    assert table.code == 0 and "MiB" in table.out


def test_estimate_says_where_the_head_is_the_peak(model_dir, run, tmp_path):
    config = json.loads((model_dir / "config.json").read_text()) | {"vocab_size": 8192}
    bare = tmp_path / "wide.json"
    bare.write_text(json.dumps(config))
    note = "the peak is the head's"
    assert note in run("estimate", bare, "--tokens", 32, "--gradient-checkpointing").out
    assert note not in run("estimate", model_dir, "--tokens", 32, "--gradient-checkpointing").out
    assert note not in run("estimate", bare, "--tokens", 32).out


def test_estimate_reads_a_bare_configuration(model_dir, run, tmp_path):
    bare = tmp_path / "llama.json"
    shutil.copyfile(model_dir / "config.json", bare)
    from_file = run("estimate", bare, "--tokens", 32, "--activations", "full", "--json")
    from_folder = run("estimate", model_dir, "--tokens", 32, "--activations", "full", "--json")
    first, second = json.loads(from_file.out), json.loads(from_folder.out)
    assert first.pop("model") != second.pop("model")
    assert first == second


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--tokens", "8", "--activations", "minimall"], 2, "Did you mean 'minimal'?"),
        (
            ["--tokens", "8", "--activations", "{keep: up}"],
            2,
            "--activations must be a name, a budget or a JSON object",
        ),
        (["--tokens", "8", "--activations", '{"keep": "minimall"}'], 2, "Did you mean 'minimal'?"),
        (["--tokens", "8", "--activations", '{"modules": {"*.9.*": "full"}}'], 2, "'*.9.*'"),
        (["--tokens", "8", "--optimizer", "adamv"], 2, "Did you mean 'adamw'?"),
        (["--tokens", "9", "--length", "2"], 2, "not a multiple of 2"),
        (["--batch", "9"], 2, "give --tokens, or --length"),
        (["--tokens", "8", "--activations", "1B/token"], 2, "a budget of at least 128 bytes per token"),
        (["--tokens", "8", "--fit", "24GiB"], 2, "--fit needs --devices"),
        (["--tokens", "8", "--devices", "2"], 2, "--devices needs --fit"),
        (["--tokens", "8", "--fit", "24GiB", "--devices", "2", "--dp-replicate", "2"], 2, "leave out --dp-replicate"),
        (["--tokens", "8", "--fit", "24GiB", "--devices", "2", "--device", "trn2"], 2, "leave out the layout"),
        (["--tokens", "8", "--tp", "2", "--device", "trn2"], 2, "leave out the layout"),
    ],
)
def test_estimate_refuses_in_words(options, code, message, model_dir, run):
    result = run("estimate", model_dir, *options)
    assert result.code == code
    assert message in result.err + result.out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("named", [None, "eager"])
def test_estimate_counts_the_attention_that_training_uses(named, model_dir, run, tmp_path):
    """SDPA keeps no scores of length x length, whatever config.json asks for."""
    config = json.loads((model_dir / "config.json").read_text())
    bare = tmp_path / "config.json"
    bare.write_text(json.dumps(config | {"attn_implementation": named, "max_position_embeddings": 8192}))
    short, long = (
        json.loads(run("estimate", bare, "--batch", batch, "--length", 8192 // batch, "--json").out)["policies"][0]
        for batch in (8, 1)
    )
    assert long["saved"] < 1.1 * short["saved"]


def test_estimate_says_that_sequences_are_longer_than_the_context(model_dir, run):
    shown = "longer than the 2048 positions"
    assert shown in run("estimate", model_dir, "--length", 4096).out
    assert shown not in run("estimate", model_dir, "--length", 2048).out


@pytest.mark.skipif(Version(__version__) < Version("5.23"), reason="its layouts lack sizes")
def test_bytes_sent_are_per_token_of_the_ranks_that_share_a_batch(model_dir, run):
    """Both ranks send for the same tokens."""
    options = ["estimate", model_dir, "--tokens", 64, "--tp", 2, "--activations", "minimal"]
    sent = json.loads(run(*options, "--json").out)["rank"]["sent_bytes"]
    assert f"The ranks send {2 * sent / 64 / 1024:,.1f} KiB per token and step." in run(*options).out


def test_batch_and_length_follow_from_what_is_given():
    assert batch_of(8192, None, None, 4096) == (2, 4096)
    assert batch_of(8192, 8, None, 4096) == (8, 1024)
    assert batch_of(8192, None, 512, None) == (16, 512)
    assert batch_of(None, None, 512, None) == (1, 512)
    assert batch_of(64, 2, 32, None) == (2, 32)
    assert batch_of(None, 1, MOST_TOKENS, None) == (1, MOST_TOKENS)
    for tokens, batch, length in ((64, 3, 32), (4099, None, None), (None, None, None)):
        with pytest.raises(typer.BadParameter):
            batch_of(tokens, batch, length, 128)
    assert (gibibytes(3 * 1024**3 // 2), gibibytes(1024**2)) == ("1.50 GiB", "1.0 MiB")
    assert batch_of(2 * 1_073_741_789, None, None, 2**31 - 1) == (1, 2 * 1_073_741_789)
    with pytest.raises(typer.BadParameter):  # of a prime: in no time, though there is no divisor to find
        batch_of(2**31 - 1, None, None, 2**31 - 2)


@pytest.mark.parametrize(
    "options",
    [
        ("estimate", "--tokens", 10**30),
        ("estimate", "--batch", 10**30),
        ("estimate", "--length", 10**30),
        ("estimate", "--batch", 2**20, "--length", 2**20),
        ("estimate", "--tokens", 64, "--lora-rank", 10**30),
        ("verify-device", "--tokens", 10**30),
        ("verify", "--seed", 10**30),
        ("convert", "--workers", 10**30, "dst"),
        ("convert", "--part", "1/" + "9" * 5000, "dst"),
        ("convert", "--max-shard-size", "9" * 400 + "GB", "dst"),
    ],
)
def test_numbers_have_an_upper_bound(options, model_dir, run):
    command, *rest = options
    shown = run(command, model_dir, *rest)
    assert (shown.code, shown.out) == (2, ""), shown.err
    assert "frame #" not in shown.err and "internal error" not in shown.err


def test_report_writes_one_file_and_refuses_other_folders(run, tmp_path: Path):
    folder = tmp_path / "out" / "neuron_moe"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"patch": {"entries": []}, "config": {"precision": "bf16"}, "model": "m"}')
    result = run("report", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    page = tmp_path / "out" / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    other = tmp_path / "page.html"
    shown = json.loads(run("report", tmp_path / "out", "-o", other, "--json").out)
    assert shown == {"ok": True, "report": str(other), "runs": 1, "studies": 0, "bytes": other.stat().st_size}
    wrong = run("report", folder.parent.parent / "nothing")
    assert (wrong.code, wrong.err.count("\n")) == (1, 1)
    assert "neuron_moe/run.json" in wrong.err and "no such directory" in wrong.err
    unwritable = run("report", tmp_path / "out", "-o", tmp_path / "no" / "page.html", "--json")
    shown = json.loads(unwritable.out)
    assert unwritable.code == 4 and shown["kind"] == "destination" and ".partial" not in shown["message"]


def test_report_has_three_forms_and_opens_what_it_wrote(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "out" / "neuron_moe"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"patch": {"entries": []}, "config": {"precision": "bf16"}, "model": "m"}')
    assert run("report", tmp_path / "out", "--format", "md").code == 0
    assert (tmp_path / "out" / "report.md").read_text(encoding="utf-8").startswith("# Training report: out\n")
    assert run("report", tmp_path / "out", "-o", tmp_path / "facts.json").code == 0  # by the suffix
    assert json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))["title"] == "Training report: out"
    assert run("report", tmp_path / "out", "-o", tmp_path / "facts.json", "--format", "html").code == 0
    assert (tmp_path / "facts.json").read_text(encoding="utf-8").startswith("<!doctype html>")
    printed = run("report", tmp_path / "out", "--format", "md", "-o", "-")
    assert printed.out == (tmp_path / "out" / "report.md").read_text() + "\n" and not Path("-").exists()
    assert "leave out --json" in run("report", tmp_path / "out", "-o", "-", "--open").err
    wrong = run("report", tmp_path / "out", "--format", "pdf")
    assert wrong.code == 2 and "html, md, json" in wrong.err
    for found, said in ((True, ""), (False, "no web browser found")):
        opened: list[str] = []
        monkeypatch.setattr(
            "webbrowser.open", lambda address, found=found, opened=opened: opened.append(address) or found
        )
        shown = run("report", tmp_path / "out", "--open")
        assert shown.code == 0 and said in shown.out
        assert opened == [(tmp_path / "out" / "report.html").as_uri()]
        assert json.loads(run("report", tmp_path / "out", "--open", "--json").out)["opened"] is found


def test_the_least_time_counts_the_forwards_of_checkpointing(model_dir, run):
    options = ["estimate", model_dir, "--tokens", 64, "--device", "h100", "--activations", "minimal"]
    again = "every forward twice (gradient checkpointing)"
    assert again in run(*options, "--gradient-checkpointing").out and again not in run(*options).out


def test_estimate_refuses_a_conversion(model_dir, run, tmp_path):
    assert run("convert", model_dir, tmp_path / "dst").code == 0
    result = run("estimate", tmp_path / "dst", "--tokens", 8)
    assert result.code == 1 and "must be an original checkpoint, got a conversion" in result.err

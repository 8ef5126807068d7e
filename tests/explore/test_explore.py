"""The command ``explore`` from end to end: what it prints, refuses, and goes on with."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_neuron_moe import patch_model
from hf_neuron_moe.cli.main import main
from hf_neuron_moe.cli.shared_options import in_package
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.device.kernel_support import block_groups
from hf_neuron_moe.errors import NeuronMoEError, NeuronMoEWarning
from hf_neuron_moe.explore import run as running
from hf_neuron_moe.explore.advice import missing_kernels, without_kernels
from hf_neuron_moe.explore.explore_page import short_blocks, write_explore_page
from hf_neuron_moe.explore.inputs import token_rows
from hf_neuron_moe.explore.measured_changes import losses_of
from hf_neuron_moe.explore.precision_plan import MXFP4_PRODUCTS, as_yaml, costs_of, total_of
from hf_neuron_moe.explore.run import Options, explore
from hf_neuron_moe.explore.state import identity_of, load_state
from hf_neuron_moe.precision_map import read_recipe
from tests.convert.test_every_family import SEED_OSS
from tests.explore.models import TEXT, checkpoint
from tests.report.pages import Page
from tests.tiny_models import tiny_model

SMALL = Options(tokens=256, length=64, verify=2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("explored") / "llama")


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["hf-neuron-moe", "explore", *map(str, arguments)])
    capsys.readouterr()
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0), "".join(capsys.readouterr())
    return 0, capsys.readouterr().out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_one_json_object_with_ranking_and_plan(family, tmp_path, monkeypatch, capsys):
    folder = checkpoint(tmp_path / family, family)
    monkeypatch.chdir(tmp_path)
    formats = ("--formats", "bf16,mxfp8,mxfp4,fp8-saved") if family == "llama" else ()
    Path("plan.yaml").symlink_to("written.yaml")
    options = ["--tokens", 256, "--length", 64, "--verify", 2, "--plan", "plan.yaml", *formats]
    code, out = printed(capsys, monkeypatch, folder, TEXT, *options, "--json")
    assert code == 0, out
    found = json.loads(out)
    names = [row["block"] for row in found["ranking"]]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sorted(names) == sorted(entry.name for entry in patch_model(model, {"precision": found["plan"]}).patched)
    predicted = [row["predicted"] for row in found["ranking"]]
    assert predicted == sorted(predicted, reverse=True)
    assert sum(row["measured"] is not None for row in found["ranking"]) == 2
    assert all(row["reason"] and row["remedy"] for row in found["ranking"])
    assert Path("plan.yaml").is_symlink() and yaml.safe_load(Path("written.yaml").read_text()) == found["plan"]
    assert found["cost"].keys() == {"seconds", "peak_memory_bytes"}  # what is counted are no bytes
    assert (found["convert_plan"] is not None) == bool(formats) == Path("plan-convert.yaml").exists()
    details = found["convert_plan_details"]
    assert (details is not None) == bool(formats)
    assert details is None or details["bytes"] <= found["uniform"]["bf16"]["bytes"]
    assert set(found["uniform"]) >= {"bf16", "mxfp8"} and found["uniform"]["bf16"]["loss_change"] == 0
    for block in found["blocks"].values():
        assert block["operands"]["gate_up activations"]["sqnr_db"] > 20
        assert sum(block["tokens_by_expert"]) == 256 * (2 if family == "mixtral" else 1)
        assert (len(block["operands"]["down weights"].get("sqnr_db_by_expert", [])) > 1) == (family == "mixtral")
        assert ("down weights in mxfp4" in block["operands"]) == bool(formats)
    assert not list(Path().glob(".explore*"))


def test_text_for_people_who_have_nothing_to_fold(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ("--tokens", 256, "--length", 64, "--verify", 0)
    packaged = "package:demo/sotu/eval.jsonl"
    code, out = printed(capsys, monkeypatch, model_dir, packaged, *sizes, "--fold", "folded")
    assert f"tokens of {packaged}\n" in out
    assert code == 1 and "folded was not written: no block has an outlier channel" in out, out
    assert list(tmp_path.iterdir()) == []
    for words in (
        "Change of the loss by mxfp8",
        "uniform mxfp8",
        "Plan for trn3",
        "(times are estimates)",
        "dB SQNR",
        "precision by block: {",
    ):
        assert words in out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("trn2", "trn2 has no MXFP8 products"),
        ("h100", "this device multiplies MXFP8 values as bf16"),
        ("b200", "at best"),
    ],
)
def test_devices_are_advised_by_what_they_compute(device, words, model_dir):
    options = Options(tokens=256, length=64, verify=0, device=device)
    result = explore(model_dir, TEXT, options)
    assert any(words in line for line in result.advice)
    assert device == "b200" or set(result.plan.precisions.values()) == {"bf16"}


def test_blocks_that_no_kernel_trains_as_planned_are_counted(model_dir):
    groups = block_groups(AutoModelForCausalLM.from_pretrained(model_dir))
    mixed = {"model.layers.0.mlp": "bf16", "model.layers.1.mlp": "mxfp8"}
    for device, precision, reason in (("trn3", "bf16", "for Trn2 only"), ("trn2", "mxfp8", "run on Trn3 only")):
        (words,) = without_kernels(missing_kernels(groups, device), mixed, device)
        assert words.startswith(f"No documented kernel trains 1 block of the plan in {precision} on {device}: ")
        assert reason in words
    (words,) = without_kernels(missing_kernels(groups, "trn3"), dict.fromkeys(mixed, "mxfp8"), "trn3")
    assert words.startswith("No documented kernel trains 2 blocks in bf16 on trn3: ")
    assert missing_kernels(groups, "h100") == {}
    result = explore(model_dir, TEXT, Options(tokens=256, length=64, verify=0, budget="1e-9%"))
    assert any("No documented kernel trains" in line for line in result.advice)


def test_experts_tokens_are_counted_with_a_row_s_last(tmp_path):
    """Every expert of a Mixtral of 4 gets half of a step's tokens on average."""
    result = explore(checkpoint(tmp_path / "mixtral", "mixtral"), TEXT, Options(tokens=256, length=64, verify=0))
    assert any(line.startswith("Each expert gets 4,096 of a step's 8,192 tokens") for line in result.advice)
    assert "Its blocks of 512 rows are 100 % full." in result.advice


def test_the_plan_is_a_recipe_of_the_other_commands(model_dir, tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text('"*": mxfp8\nmodel.layers.1.mlp: bf16\n')
    monkeypatch.setattr(
        sys, "argv", ["hf-neuron-moe", "estimate", str(model_dir), "--tokens", "64", "--recipe", str(plan)]
    )
    main()
    assert "blocks in mxfp8, model.layers.1.mlp: bf16" in capsys.readouterr().out
    arguments = ["convert", str(model_dir), str(tmp_path / "converted"), "--recipe", str(plan), "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["hf-neuron-moe", *arguments])
    main()
    assert "4 weights to convert" in capsys.readouterr().out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--tokens", 10**6], "text must be at least 999,936 tokens long", 2),
        (["--length", 4097, "--tokens", 32776], "length must be at most 4096, the positions of this model", 2),
        (["--tokens", 64, "--length", 64], "at least 256 (4 rows)", 2),
        (["--formats", "mxfp9"], "formats must be one of bf16, mxfp8", 2),
        (["--device", "tpu"], "device must be one of trn2, trn3, h100, b200", 2),
        (["--budget", "much"], "--budget must be", 2),
        (["--formats", "mxfp4"], "--formats must be a list with mxfp8, which is planned, got 'mxfp4'", 2),
        (["--plan", "."], "got a folder", 4),
        (["-o", "."], "got a folder", 4),
        (["--plan", "same", "-o", "same"], "got the name of another file to write", 4),
        (["--fold", "same", "-o", "same"], "got the name of another file to write", 4),
        (["--plan", "page.html", "-o", "link.html"], "got the name of another file to write", 4),
        (["--formats", "mxfp8,mxfp4", "--plan", "p", "-o", "p-convert"], "got the name of another file to write", 4),
        (["--plan", "short.jsonl"], "got the text", 4),
        (["--plan", "model/config.json"], "got a file of the model", 4),
        (["--plan", ".explore-llama.partial"], "got the file of an interrupted run", 4),
        (["-o", "page.pdf"], "page.pdf is no .html", 2),
        (["--plan", "pipe"], "got a device, a pipe or a socket", 4),
        (["-o", "pipe"], "got a device, a pipe or a socket", 4),
        (["--plan", "nowhere/plan.yaml"], "no folder", 4),
        (["--fold", "."], "fold must be a folder that does not exist", 4),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    model_dir, tmp_path, monkeypatch, capsys, arguments, words, code
):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "short.jsonl"
    text.write_text("".join(TEXT.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / "link.html").symlink_to("page.html")
    (tmp_path / "model").symlink_to(model_dir)
    os.mkfifo(tmp_path / "pipe")
    before, content = set(tmp_path.iterdir()), text.read_bytes()
    monkeypatch.setattr(running.Pass, "run", lambda *arguments: pytest.fail("a row was measured"))
    found, out = printed(capsys, monkeypatch, model_dir, text, *arguments)
    assert (found, words in out) == (code, True), out
    assert set(tmp_path.iterdir()) == before and text.read_bytes() == content
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "pipe").is_fifo()


def test_a_folder_in_the_place_of_the_state_is_refused_before_a_row(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(f".explore-{model_dir.name}.partial").mkdir()
    monkeypatch.setattr(running.Pass, "run", lambda *arguments: pytest.fail("a row was measured"))
    code, out = printed(capsys, monkeypatch, model_dir, TEXT, "--tokens", 256, "--length", 64)
    assert code == 4 and f".explore-{model_dir.name}.partial must be a file that can be written" in out, out


def test_a_short_text_names_options_that_it_does_for(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "short.txt"
    text.write_text("x" * 201)
    code, out = printed(capsys, monkeypatch, model_dir, text)
    assert code == 2 and "at least 16,384 tokens long, got 201" in out, out
    assert "or --tokens 200 --length 50." in out
    assert Options(tokens=200, length=50).fits(201) == "--tokens 200"
    text.write_text("x" * 7)
    assert "Give a longer text: about four" in printed(capsys, monkeypatch, model_dir, text)[1]


def test_models_that_do_not_do(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=300, **sizes)).save_pretrained("gpt2")
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained("bare")
    for folder, code, words in (
        ("absent", 3, "no such folder"),
        ("bare", 2, "a folder with a tokenizer"),
        ("gpt2", 1, "at least one MLP or experts block"),
    ):
        found, out = printed(capsys, monkeypatch, folder, TEXT)
        assert (found, words in out) == (code, True), out


def test_a_loss_that_is_not_finite_is_named_by_block(model_dir, tmp_path):
    """Finite weights whose products are not."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    shutil.copytree(model_dir, tmp_path / "model")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(NeuronMoEError, match=r"row 1 of the text must be finite, .*from the input of model\.layers\.1"):
        explore(tmp_path / "model", TEXT, SMALL)


def test_a_model_that_is_not_finite_is_refused_by_tensor(model_dir, tmp_path):
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    shutil.copytree(model_dir, tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(NeuronMoEError, match=r"model\.layers\.1\.mlp\.up_proj\.weight must be finite"):
        explore(tmp_path / "model", TEXT, SMALL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", "", "got 0 in"),
        ("bad.jsonl", '{"txt": "a"}\n', "line 1 of"),
        ("bad.jsonl", "[1]\n", "line 1 of"),
        ("bad.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', "tokenizer without a chat template"),
        ("bad.jsonl", '{"text": null, "messages": [{"content": "a"}, {"role": "user"}]}', "got message 2 in line 1 of"),
        ("bad.jsonl", '{"messages": ["a"]}', "got message 1 in line 1 of"),
        ("absent.txt", None, "a file that can be read"),
        ("binary.txt", b"\xff\xfe\xff", "UTF-8, got"),
        ("late.txt", b"\n" * (1 << 20) + b"caf\xe9 ", "with the byte 0xe9, which is none there"),
    ],
)
def test_texts_that_do_not_do(name, content, words, tmp_path, model_dir):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(NeuronMoEError, match="text must be") as error:
        explore(model_dir, tmp_path / name, replace(SMALL, tokens=1 << 21) if name == "late.txt" else SMALL)
    assert words in str(error.value) and str(error.value).startswith("explore: text must be ")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.0.mlp", "model.layers.11.mlp"], ["layers.0", "layers.11"]),
        (["model.layers.0.mlp.experts", "model.layers.0.mlp.shared"], ["mlp.experts", "mlp.shared"]),
        (["model.layers.0.mlp"], ["model.layers.0.mlp"]),
        (["a.0.mlp", "b.0.mlp"], ["a", "b"]),
        (["layers.0.mlp", "layers.1.mlp.experts"], ["layers.0.mlp", "layers.1.mlp.experts"]),
    ],
)
def test_blocks_have_short_names_in_pictures(names, expected):
    assert short_blocks(names) == expected


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:convert. .*left in source form")
@pytest.mark.parametrize("family", ["mixtral", "nemotron_h"])
def test_a_plan_names_single_products_that_convert_stores(family, tmp_path):
    folder, products = checkpoint(tmp_path / "mixtral", "mixtral"), {"gate_up": "gate_up_proj", "down": "down_proj"}
    if family == "nemotron_h":
        tiny_model(family, vocab_size=300).bfloat16().save_pretrained(folder)
        products["gate_up"] = "up_proj"
    options = replace(SMALL, formats=("mxfp8", "mxfp4"), device="b200")
    result = explore(folder, TEXT, options)
    assert result.convert_plan is not None and set(result.uniform) == {"bf16", "mxfp8", "mxfp4"}
    blocks = result.measures.blocks
    costs = costs_of(blocks, result.measures.tokens, "b200", 8192, ("bf16", "mxfp8", "mxfp4", *MXFP4_PRODUCTS))
    first, second = blocks
    total = total_of(result.measures, costs, {first: "mxfp4", second: "mxfp4 gate_up"})
    limit = f"{total.loss_change * (1 + 1e-3):.9g}"
    found = running._judged(folder, TEXT, replace(options, budget=limit), result.measures).convert_plan
    assert found.total.bytes <= total.bytes and set(found.precisions.values()) & set(MXFP4_PRODUCTS)
    (tmp_path / "plan.yaml").write_text(as_yaml(found, "m"))
    recipe = read_recipe(tmp_path / "plan.yaml")
    assert any(name.endswith("_proj") for name in recipe)
    manifest = convert_checkpoint(folder, tmp_path / "dst", ConvertOptions(recipe, pad=True))
    for block, kind in found.precisions.items():
        form, _, product = kind.partition(" ")
        for name, stored in products.items():
            own = form if product in ("", name) else "mxfp8"
            layouts = {tensor.layout for tensor in manifest.tensors if tensor.weight == f"{block}.{stored}"}
            assert layouts == {f"{own}_moe_words", f"{own}_moe_scales"}
    on_trn3 = running._judged(folder, TEXT, replace(options, budget=limit, device="trn3"), result.measures).convert_plan
    assert not any(name.endswith("_proj") for name in on_trn3.recipe)  # whose kernels take one format


def test_a_conversion_s_plan_leaves_what_it_cannot_store_in_bf16(tmp_path):
    config = AutoConfig.for_model("seed_oss", **SEED_OSS | {"vocab_size": 300})  # with dropout behind its MLPs
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(checkpoint(tmp_path / "dropout"))
    result = explore(tmp_path / "dropout", TEXT, replace(SMALL, formats=("mxfp8", "mxfp4"), budget="100%"))
    assert result.plan.recipe == {"*": "mxfp8"} and {"bf16", "mxfp8"} <= set(result.uniform)
    assert result.convert_plan is not None and result.convert_plan.recipe == {"*": "bf16"}
    convert_checkpoint(tmp_path / "dropout", tmp_path / "dst", ConvertOptions(result.convert_plan.recipe, pad=True))


def test_an_expert_without_tokens_is_not_the_reason(tmp_path):
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path / "model", "mixtral"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # whose ties are always the same two experts
    model.save_pretrained(tmp_path / "model")
    result = explore(tmp_path / "model", TEXT, SMALL)
    assert all((block.tokens_E == 0).sum() == 2 for block in result.measures.blocks.values())
    for row in result.ranking["mxfp8"]:
        assert "worst is expert" in row.reason.text and "saw 0 tokens" not in row.reason.text


def test_the_page_says_what_the_result_holds(model_dir, tmp_path):
    result = explore(model_dir, TEXT, Options(tokens=256, length=64, verify=2, formats=("mxfp8", "mxfp4", "fp8-saved")))
    write_explore_page(result, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for row in result.ranking["mxfp8"]:
        assert row.reason.text.replace("'", "&#39;") in page and row.block in page
    for words in ("Plan", "Blocks in mxfp8", "Blocks in mxfp4", "Operands", "How this was measured", "text/csv"):
        assert words in page
    read = Page(page)
    maps = [drawing for alt, drawing in read.drawings().items() if alt.startswith("A heat map of blocks and operands")]
    assert [drawing["data"][0]["y"] for drawing in maps] == [["layers.0", "layers.1"]] * 3, "in the model's order"
    shown = " ".join(" ".join(read.words).split())
    assert re.search(r" gate_up activations [\d.]+ \d+ 0 \d+ model", shown)
    assert re.search(r" gate_up weights [\d.]+ \d+ 0 model", shown), "weights have no token"
    operands = [each for block in result.measures.blocks.values() for each in block.operands.items()]
    largest = [operand.figures()["token"] for name, operand in operands if name.endswith(("activations", "gradients"))]
    assert max(largest) >= 64, "the text's tokens are counted through its rows"
    change = 100 * (result.measured["mxfp8"] - result.loss) / result.loss
    assert (
        f" uniform mxfp8 {100 * result.uniform['mxfp8'].loss_change / result.loss:.6g} {round(change, 6):g} " in shown
    )


def test_rows_of_plain_text_are_those_of_json_lines(tmp_path):
    class Bytes:
        def __call__(self, text, verbose):
            return {"input_ids": list(text.encode())}

    (tmp_path / "a.txt").write_text("abcdefgh\nij")
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefgh\\n"}\n\n{"text": "ij"}\n')
    rows = [token_rows(tmp_path / name, Bytes(), 9, 3, skip=1).tolist() for name in ("a.txt", "a.jsonl")]
    assert rows[0] == rows[1] == [list(b"bcd"), list(b"efg"), list(b"h\ni")]
    assert in_package(Path("package:demo/sotu/eval.jsonl")).read_bytes() == TEXT.read_bytes()
    assert in_package(Path("text.txt")) == Path("text.txt")


def test_marks_half_characters_and_long_lines_are_texts(tmp_path):
    parts: list[str] = []

    def tokenizer(text: str, verbose: bool) -> dict[str, list[int]]:
        parts.append(text)
        return {"input_ids": list(text.encode())}

    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\\ud800 b\\ud83d\\ude00"}')
    assert bytes(token_rows(tmp_path / "mark.txt", tokenizer, 3, 3)[0].tolist()) == b"abc"
    assert bytes(token_rows(tmp_path / "mark.jsonl", tokenizer, 10, 10)[0].tolist()).decode() == "a\ufffd b\U0001f600"
    line = "word " * 300_000
    (tmp_path / "line.txt").write_text(line + "\n" + line)
    parts.clear()
    rows_NL = token_rows(tmp_path / "line.txt", tokenizer, 10, 10)
    assert bytes(rows_NL[0].tolist()) == b"word word " and len(parts) == 1 and len(parts[0]) <= 1 << 20
    token_rows(tmp_path / "line.txt", tokenizer, 2 * len(line) + 1, 2 * len(line) + 1)
    assert "".join(parts[1:]) == line + "\n" + line and all(part[-1] in "d\n " for part in parts)


def test_chats_are_cut_by_the_tokenizers_template(tmp_path):
    class Chats:
        chat_template = "of three words"

        def apply_chat_template(self, chat, return_dict):
            return {"input_ids": [len(message["content"]) for message in chat]}

    (tmp_path / "a.jsonl").write_text('{"messages": [{"content": "a"}, {"content": "bb"}]}\n' * 2)
    assert token_rows(tmp_path / "a.jsonl", Chats(), 4, 2).tolist() == [[1, 2], [1, 2]]
    (tmp_path / "b.jsonl").write_text('{"text": null, "messages": [{"content": "a"}, {"content": "bb"}]}\n')
    assert token_rows(tmp_path / "b.jsonl", Chats(), 2, 2).tolist() == [[1, 2]]


def test_memory_does_not_grow_with_the_text(model_dir):
    held = []

    def look(done: int, total: int) -> None:
        gc.collect()
        storages = {each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor}
        held.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    explore(model_dir, TEXT, Options(tokens=512, length=64, verify=0), progress=look)
    after_rows = held[1:9]
    assert max(after_rows) == after_rows[0]


def test_a_text_too_short_for_the_limit_is_told(model_dir):
    """Of a change that differs from row to row, no few rows tell a hundred-thousandth of the loss."""
    result = explore(model_dir, TEXT, Options(tokens=256, length=64, verify=0, budget="0.00001%"))
    (words,) = [line for line in result.advice if "is short for the limit" in line]
    assert int(words.split("About ")[1].split()[0].replace(",", "")) > 256


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(model_dir, tmp_path, monkeypatch):
    state = tmp_path / "state"
    whole = explore(model_dir, TEXT, SMALL).to_dict()

    again = whole
    for place in (2 * running.ROW_WORK, 4 * running.ROW_WORK + 2 * 4):  # two of four rows, two of four switched sets

        def stop(done: int, total: int, place: int = place) -> None:
            if done == place:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            explore(model_dir, TEXT, SMALL, state, stop)
        assert state.exists()
    switched: list[int] = []
    monkeypatch.setattr(running, "losses_of", lambda *arguments: switched.append(1) or losses_of(*arguments))
    again = explore(model_dir, TEXT, SMALL, state, lambda done, total: None)
    assert len(switched) == 2
    assert again.to_dict() == whole


def test_the_state_of_another_run_is_not_taken(model_dir, tmp_path):
    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        explore(model_dir, TEXT, SMALL, state, _stop_at_once)
    seen: list[int] = []
    with pytest.warns(NeuronMoEWarning, match="another model, text, or other options"):
        explore(model_dir, TEXT, Options(256, 32, verify=0), state, lambda done, total: seen.append(done))
    assert seen[0] == 0


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "tokenizer.model", "text.txt"])
def test_a_changed_file_is_another_run(changed, model_dir, tmp_path):
    """Files that begin with a dot are not the model's: the state itself may be one."""
    shutil.copytree(model_dir, tmp_path / "model")
    text, own = tmp_path / "text.txt", tmp_path / "model" / "tokenizer.model"
    text.write_text("a")
    own.write_text("a")
    found = [identity_of(tmp_path / "model", text, ())]
    (tmp_path / "model" / ".explore-model.partial").write_text("a")
    found.append(identity_of(tmp_path / "model", text, ()))
    with ((text.parent if changed == text.name else own.parent) / changed).open("a") as file:
        file.write(" ")
    found.append(identity_of(tmp_path / "model", text, ()))
    assert found[0] == found[1] != found[2]


def test_nothing_measured_is_lost_where_a_file_cannot_be_written(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    sizes = ("--tokens", 256, "--length", 64, "--verify", 0, "-o", "page.html")
    with monkeypatch.context() as broken:
        broken.setattr("hf_neuron_moe.explore.explore_page.write_explore_page", full)
        assert printed(capsys, monkeypatch, model_dir, TEXT, *sizes)[0] == 5
    monkeypatch.setattr(running.Pass, "run", lambda *arguments: pytest.fail("a row was measured again"))
    Path("plan.yaml.partial").mkdir()
    code, out = printed(capsys, monkeypatch, model_dir, TEXT, *sizes, "--plan", "plan.yaml")
    assert code == 5 and "plan.yaml must be a file that can be written, got Is a directory" in out, out
    Path("plan.yaml.partial").rmdir()
    assert printed(capsys, monkeypatch, model_dir, TEXT, *sizes)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("content", [b"", b"x" * 100, None])
def test_a_file_that_no_run_left_is_not_taken(content, tmp_path):
    path = tmp_path / "state"
    torch.save([1], path) if content is None else path.write_bytes(content)
    with pytest.raises(NeuronMoEError, match="what an interrupted run left, got something else"):
        load_state(path, "identity")


def _stop_at_once(done: int, total: int) -> None:
    if done:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_killed_process_is_resumed(model_dir, tmp_path):
    command = [sys.executable, "-m", "hf_neuron_moe.cli.main", "explore", str(model_dir), str(TEXT), "--json"]
    command += ["--tokens", "768", "--length", "64", "--verify", "0"]
    environment = os.environ | {"PYTHONPATH": str(Path(running.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    state = tmp_path / f".explore-{model_dir.name}.partial"
    deadline = time.monotonic() + 600
    while not state.exists() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL and state.exists()
    done = torch.load(state, weights_only=True)["measures"]["rows"]
    assert 0 < done < 12
    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(second.stdout)
    assert found.pop("cost")["peak_memory_bytes"] > 0 and [found.pop(key) for key in ("ok", "exit_code")] == [True, 0]
    expected = explore(model_dir, TEXT, Options(768, 64, verify=0)).to_dict()
    assert found["ranking"] == expected["ranking"] and found["blocks"] == expected["blocks"]

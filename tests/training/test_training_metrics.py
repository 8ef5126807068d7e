"""What is logged, against counts and computations by hand."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import TrainerState

from hf_neuron_moe import NeuronMoETrainer, patch_model
from hf_neuron_moe.finetune.card import _results
from hf_neuron_moe.formats import fake_quantize_mx
from hf_neuron_moe.training import measure_saved_bytes
from hf_neuron_moe.training.blocks import patched_blocks, sampled_weights
from hf_neuron_moe.training.figures import health_record, logs_of, peak_memory
from hf_neuron_moe.training.metrics import ExpertCount, TrainingMonitor, _token_counts
from hf_neuron_moe.training.run_files import EVALUATIONS_FILE, RunFiles, training_record
from tests.checkpointing import NAME
from tests.tiny_models import tiny_model, tokens
from tests.training.runs import Rows, arguments, metrics, train_logs, trainer

STEP_KEYS = {
    "neuron/tokens_per_second",
    "neuron/saved_bytes_per_token",
    "neuron/padding_overhead",
    "neuron/load_entropy",
    "neuron/load_max_over_mean",
    "neuron/dead_experts",
}
HEALTH_KEYS = {
    "neuron/sqnr_weights_db",
    "neuron/sqnr_inputs_db",
    "neuron/flushed",
    "neuron/saturated",
    "neuron/amax",
}
Indices = dict[str, list[Tensor]]


def keep_indices(model: nn.Module, kept: Indices) -> None:
    """Note every call of the experts in training forwards: those outside of backward, whoever checkpoints."""

    def note(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and torch._C._current_graph_task_id() == -1:  # not within a backward
            kept[name].append(args[1].clone())

    for name, module in model.named_modules():
        if name.endswith("experts"):
            kept[name] = []
            module.register_forward_pre_hook(functools.partial(note, name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
def test_load_is_counted_over_all_tokens_and_only_once(checkpointing: bool | None, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    patch_model(model, {"block_size": 128})
    kept: Indices = {}
    keep_indices(model, kept)
    options: dict[str, Any] = {
        "logging_steps": 2,
        "gradient_accumulation_steps": 2,
        "neuron_block_size": 128,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    if checkpointing is not None:
        options[NAME] = True
        options[f"{NAME}_kwargs"] = {"use_reentrant": checkpointing}
    run = NeuronMoETrainer(model=model, args=arguments(tmp_path, **options), train_dataset=Rows(), eval_dataset=Rows(4))
    run.train()
    lines, logs = metrics(tmp_path), train_logs(run)
    assert [line["step"] for line in lines] == [2, 4]
    for part, (line, log) in enumerate(zip(lines, logs, strict=True)):
        padded = rows = 0
        for name, calls in kept.items():
            assert len(calls) == 8
            window = calls[4 * part : 4 * part + 4]
            load = sum(torch.bincount(call.flatten(), minlength=4) for call in window).tolist()
            figures = line["experts"][name]
            assert figures["load"] == load
            assert figures["dead"] == load.count(0)
            assert figures["max_over_mean"] == max(load) / (sum(load) / 4)
            shares = torch.tensor(load, dtype=torch.float64) / sum(load)
            entropy = -(shares * shares.log()).nan_to_num().sum().item() / math.log(4)
            assert figures["entropy"] == pytest.approx(entropy, rel=1e-12)
            rows += sum(load)
            padded += 128 * sum(math.ceil(n / 128) for call in window for n in torch.bincount(call.flatten()).tolist())
        # H = 32 and I = 48 are padded to 128 each.
        assert line["padding_overhead"] == pytest.approx(padded * 128 * 128 / (rows * 32 * 48) - 1, rel=1e-12)
        for key in ("entropy", "max_over_mean", "dead"):
            name = "neuron/dead_experts" if key == "dead" else f"neuron/load_{key}"
            assert log[name] == pytest.approx(sum(m[key] for m in line["experts"].values()) / 2, rel=1e-12)
        assert log["neuron/padding_overhead"] == line["padding_overhead"]
    assert ("neuron/routing_kept" in logs[0]) == (checkpointing is not None)


def test_experts_that_get_no_ids_are_not_counted(tmp_path: Path) -> None:
    """Those of Llama 4 get an equal part of the rows each."""
    run = trainer(tiny_model("llama4", num_hidden_layers=1), tmp_path, max_steps=1)
    run.train()
    (line,) = metrics(tmp_path)
    assert line["experts"] == {} and line["saved_bytes_per_token"] > 0


def test_dead_experts_sentinels_and_many_blocks() -> None:
    count = ExpertCount(5, 128, torch.device("cpu"))
    index = torch.tensor([[0, 1]] * 130 + [[1, 7]] * 3, dtype=torch.int32)  # 7 is on another rank
    count.add(index)
    count.add(index[:1])
    assert count.load_E.tolist() == [131, 134, 0, 0, 0]
    assert count.padded_rows.item() == 256 + 256 + 128 + 128


def test_every_key_is_logged_and_written(tmp_path: Path) -> None:
    run = trainer(tiny_model("mixtral"), tmp_path, neuron_health_steps=3)
    run.train()
    logs, lines = train_logs(run), metrics(tmp_path)
    assert [{key for key in log if key.startswith("neuron/")} for log in logs] == [
        STEP_KEYS | HEALTH_KEYS,
        STEP_KEYS,
        STEP_KEYS | HEALTH_KEYS,
        STEP_KEYS,
    ]
    for log, line in zip(logs, lines, strict=True):
        assert {key: line[key] for key in ("step", "epoch", "loss", "learning_rate", "grad_norm")} == {
            key: log[key] for key in ("step", "epoch", "loss", "learning_rate", "grad_norm")
        }
        assert line["tokens_per_second"] == log["neuron/tokens_per_second"] > 0
        assert 2**24 < line["peak_memory_bytes"] <= 1.0001 * peak_memory(torch.device("cpu"))  # torch alone takes more
        assert line["saved_bytes_per_token"] == log["neuron/saved_bytes_per_token"]
    written = json.loads((tmp_path / "neuron_moe" / "run.json").read_text())
    assert written.keys() == {"patch", "config", "training", "environment", "model"}
    count = sum(param.numel() for param in run.model.parameters())
    assert written["training"] == {
        "learning_rate": run.args.learning_rate,
        "batch_size_per_process": run.args.per_device_train_batch_size,
        "accumulation_steps": run.args.gradient_accumulation_steps,
        "processes": 1,
        "max_steps": run.state.max_steps,
        "seed": run.args.seed,
        "resumed_from_step": 0,
        "parameters": count,
        "trainable_parameters": count,
        "adapter": None,
        "lora_rank": None,
        "optim": run.args.optim.value,
        "loss_type": None,
        "rows": len(run.train_dataset),
    }
    assert written["model"] == "MixtralForCausalLM"
    assert {entry["name"] for entry in written["patch"]["entries"]} == lines[0]["experts"].keys()
    assert torch.__version__.startswith(written["environment"]["packages"]["torch"])  # the build may be left out
    assert written["environment"]["processes"] == 1


def test_of_adapters_what_is_trained_is_recorded(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    record = training_record(arguments(tmp_path), TrainerState(global_step=2), model)
    assert record["parameters"] == sum(sizes.values())
    assert record["trainable_parameters"] == sum(size for name, size in sizes.items() if "lora_" in name) > 0
    assert (record["adapter"], record["lora_rank"], record["resumed_from_step"]) == ("lora", 4, 2)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe"])
def test_saved_bytes_are_those_that_are_measured(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    run = trainer(model, tmp_path, max_steps=1)
    run.train()
    with measure_saved_bytes(dict(patched_blocks(model))) as measured:
        model(tokens())
    assert train_logs(run)[0]["neuron/saved_bytes_per_token"] == pytest.approx(measured.bytes_per_token, rel=1e-12)


def test_tokens_are_counted_of_every_form_of_input() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    packed = torch.tensor([[1, 1, 2], [1, 0, 0]])  # numbers of texts in a row
    assert _token_counts((ids,), {}) == (6, 6) and _token_counts((), {"pixel_values": ids}) == (0, 0)
    assert _token_counts((), {"input_ids": ids, "attention_mask": packed}) == (4, 6)
    assert _token_counts((), {"inputs_embeds": torch.zeros(2, 3, 8), "attention_mask": packed}) == (4, 6)
    square = torch.zeros(2, 1, 3, 3)  # a mask that adds, of which nothing says what is padding
    assert _token_counts((ids,), {"attention_mask": square}) == (6, 6)


def test_memory_that_nothing_tells_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_neuron_moe.training.metrics.peak_memory", lambda device: 0.0)
    model = tiny_model("llama")
    patch_model(model)
    assert TrainingMonitor(model).take()["peak_memory_bytes"] is None


def test_tokens_are_those_of_the_attention_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[TrainingMonitor] = []
    reset = TrainingMonitor._reset

    def note(monitor: TrainingMonitor) -> None:
        taken.append((monitor.tokens.item(), monitor.positions.item()))
        reset(monitor)

    monkeypatch.setattr(TrainingMonitor, "_reset", note)
    run = trainer(tiny_model("llama"), tmp_path, rows=Rows(8, padding=5), max_steps=2, logging_steps=2)
    seen: list[int] = []
    run.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"].sum().item()), with_kwargs=True
    )
    run.train()
    assert taken == [(sum(seen), 4 * 12)]
    assert sum(seen) < 4 * 12


def sqnr_db(rows: Tensor) -> float:
    """Signal-to-noise ratio of MXFP8 along the last axis, padded to 128, in fp64."""
    restored = fake_quantize_mx(F.pad(rows.bfloat16(), (0, -rows.shape[1] % 128)))[:, : rows.shape[1]].double()
    return 10 * math.log10(rows.double().square().sum() / (rows.double() - restored).square().sum())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", ["stock", "kernel"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_health_is_that_of_the_weights_and_the_first_input(family: str, home: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    patch_model(model, {"weights": home})
    inputs: dict[str, list[Tensor]] = {name: [] for name in patched_blocks(model)}
    for name, block in patched_blocks(model).items():
        block.register_forward_pre_hook(lambda module, args, name=name: inputs[name].append(args[0].detach().clone()))
    run = trainer(
        model, tmp_path, max_steps=3, neuron_weights=home, neuron_health_steps=3, gradient_accumulation_steps=2
    )
    run.train()
    *_, last = metrics(tmp_path)
    assert last["health"].keys() == inputs.keys()
    tensors = []
    for name, block in patched_blocks(model).items():
        found = last["health"][name]
        rows = inputs[name][-2].flatten(0, -2)  # of the last step's first micro-batch; all 24 rows are in the sample
        rows_by_tensor = {**sampled_weights(block, 64), "input": rows}
        figures = {**found["weights"], "input": found["input"]}
        assert figures.keys() == {"gate", "up", "down", "input"}
        for tensor, values in rows_by_tensor.items():
            tensors.append(figures[tensor])
            assert figures[tensor]["amax"] == values.abs().max().item()
            assert figures[tensor]["sqnr_db"] == pytest.approx(sqnr_db(values), abs=1e-3)  # fp32 sums
            assert figures[tensor]["saturated"] == 0
    log = train_logs(run)[-1]
    weights = [m[t]["sqnr_db"] for m in (v["weights"] for v in last["health"].values()) for t in m]
    assert log["neuron/sqnr_weights_db"] == pytest.approx(sum(weights) / len(weights), rel=1e-12)
    assert log["neuron/amax"] == max(tensor["amax"] for tensor in tensors)
    assert log["neuron/flushed"] == pytest.approx(sum(t["flushed"] for t in tensors) / len(tensors), rel=1e-12)


@pytest.mark.slow
def test_a_compiled_model_is_measured_too(tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = {"neuron_health_steps": 2}
    eager = trainer(tiny_model("mixtral"), tmp_path / "eager", **options)
    eager.train()
    compiled = trainer(
        tiny_model("mixtral"), tmp_path / "compiled", torch_compile=True, torch_compile_backend="aot_eager", **options
    )
    compiled.train()
    for mine, theirs in zip(metrics(tmp_path / "compiled"), metrics(tmp_path / "eager"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)  # decompositions round differently
        assert sum(m["load"][0] for m in mine["experts"].values()) > 0
        assert {n: sum(m["load"]) for n, m in mine["experts"].items()} == {
            n: sum(m["load"]) for n, m in theirs["experts"].items()
        }
        assert ("health" in mine) == ("health" in theirs)
    assert train_logs(compiled)[0]["neuron/sqnr_weights_db"] > 25
    assert "neuron/sqnr_inputs_db" not in train_logs(compiled)[0]


def test_a_model_with_frozen_blocks_is_measured(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint

    tiny_model("mixtral", hidden_size=128, intermediate_size=128).save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "converted", ConvertOptions(precision="mxfp8"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    model.lm_head.weight.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    run = trainer(wrapped, tmp_path / "run", max_steps=2)
    run.train()
    line = metrics(tmp_path / "run")[0]
    assert [sum(figures["load"]) for figures in line["experts"].values()] == [48, 48]
    for module in line["health"].values():
        assert module["weights"] == {}
        assert module["input"]["sqnr_db"] > 25
    written = json.loads((tmp_path / "run" / "neuron_moe" / "run.json").read_text())
    assert [entry["weights"] for entry in written["patch"]["entries"]] == ["frozen", "frozen"]
    assert [entry["experts"] for entry in written["patch"]["entries"]] == [4, 4]
    assert [entry["gate"] for entry in written["patch"]["entries"]] == ["silu", "silu"]


def test_ranks_are_combined_and_nothing_that_is_not_finite_is_lost() -> None:
    nan, inf = math.nan, math.inf
    figures = torch.full((2, 4, 4), nan)  # ranks, gate up down input, measures
    figures[0, 0], figures[1, 0] = torch.tensor([1.0, 0.5, 0.0, 30.0]), torch.tensor([3.0, 0.0, 0.0, 20.0])
    figures[1, 1] = torch.tensor([inf, 0.0, 0.5, nan])  # the other rank holds no row of it
    figures[:, 2] = torch.tensor([nan, 0.0, 0.0, nan])
    module = health_record(["mlp"], figures)["mlp"]
    assert module["weights"]["gate"] == {"amax": 3.0, "flushed": 0.25, "saturated": 0.0, "sqnr_db": 25.0}
    assert module["weights"]["up"]["amax"] == inf
    assert math.isnan(module["weights"]["down"]["amax"])
    assert "input" not in module
    record = {"tokens_per_second": 1.0, "saved_bytes_per_token": 2.0, "padding_overhead": 0.0, "experts": {}}
    logs = logs_of({**record, "health": {"mlp": module}})
    assert math.isnan(logs["neuron/amax"])
    assert logs["neuron/sqnr_weights_db"] == 25.0
    assert "neuron/sqnr_inputs_db" not in logs


_RANK = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import torch.distributed as dist
from tests.tiny_models import tiny_model
from tests.training.runs import trainer
trainer(tiny_model("mixtral"), Path({folder!r}), per_device_train_batch_size={batch}, max_steps=3,
        neuron_health_steps=2, neuron_precision="fp32").train()
if dist.is_initialized():
    dist.destroy_process_group()  # or a thread of gloo may abort the process at its end
"""


@pytest.mark.slow
def test_two_processes_log_what_both_did(tmp_path: Path, repo_root: Path) -> None:
    written = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        script = tmp_path / f"run{ranks}.py"
        script.write_text(_RANK.format(root=str(repo_root), folder=str(folder), batch=4 // ranks))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launch, str(script)], check=True, env=environment, timeout=900)
        written[ranks] = metrics(folder)
    assert len(written[2]) == 3  # one process writes
    for one, two in zip(written[1], written[2], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert ("health" in two) == ("health" in one)
    # The same tokens went through the first step, whoever had them.
    assert [m["load"] for m in written[2][0]["experts"].values()] == [
        m["load"] for m in written[1][0]["experts"].values()
    ]
    for name, module in written[1][0]["health"].items():
        for tensor, figures in module["weights"].items():
            for measure, value in figures.items():
                # DDP adds the gradients of two halves, which rounds otherwise than one sum.
                assert written[2][0]["health"][name]["weights"][tensor][measure] == pytest.approx(value, rel=1e-3)


def test_a_resumed_run_drops_evaluations_after_its_checkpoint(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.begin({}, 0)
    for step in (2, 4, 6):
        files.append({"step": step, "eval_loss": float("nan")}, EVALUATIONS_FILE)
    with (tmp_path / "neuron_moe" / EVALUATIONS_FILE).open("a") as file:
        file.write('{"step": 3}')  # cut off: only its end is missing
    files.begin({}, 4)
    lines = (tmp_path / "neuron_moe" / EVALUATIONS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"step": step, "eval_loss": None} for step in (2, 4)]
    files.begin({}, 0)
    assert (tmp_path / "neuron_moe" / EVALUATIONS_FILE).read_text(encoding="utf-8") == ""


def test_an_evaluation_after_the_run_is_of_the_model_that_was_loaded(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    options = arguments(tmp_path, **best, eval_steps=2, save_steps=2, learning_rate=0.0, max_steps=4)
    run = NeuronMoETrainer(tiny_model("llama"), options, train_dataset=Rows(), eval_dataset=Rows(4))
    run.train()
    run.evaluate()
    lines = (tmp_path / "neuron_moe" / EVALUATIONS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 2]
    card = _results(run)
    assert card["evaluation loss"].endswith(" at step 2") and card["saved model"] == "that of step 2, the best one"


def test_an_evaluation_after_the_run_is_of_the_last_step_where_no_other_was_loaded(tmp_path: Path) -> None:
    noted = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 2}
    noted |= {"save_strategy": "steps", "save_steps": 2}
    options = arguments(tmp_path, **noted, learning_rate=0.0, max_steps=4)
    run = NeuronMoETrainer(tiny_model("llama"), options, train_dataset=Rows(), eval_dataset=Rows(4))
    run.train()
    assert run.state.best_global_step == 2
    run.evaluate()
    lines = (tmp_path / "neuron_moe" / EVALUATIONS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 4]


def test_a_run_continued_otherwise_remembers_what_it_was(tmp_path: Path) -> None:
    files, found = RunFiles(tmp_path), []
    for step, value in ((0, 1), (4, (2,)), (6, (2,)), (8, 3), (0, 3), (2, 3)):
        files.begin({"config": {"a": value}}, step)
        found.append(json.loads((tmp_path / "neuron_moe" / "run.json").read_text()).get("before", []))
    first, second = {"config": {"a": 1}, "until": 4}, {"config": {"a": [2]}, "until": 8}
    assert found == [[], [first], [first], [first, second], [], []]


@pytest.mark.parametrize(("training", "grad", "counted"), [(True, True, 18), (True, False, 0), (False, True, 0)])
def test_only_training_forwards_are_counted(training: bool, grad: bool, counted: int) -> None:
    model = tiny_model("mixtral")
    patch_model(model)
    monitor = TrainingMonitor(model)
    monitor.attach()
    with torch.set_grad_enabled(grad):
        model.train(training)(tokens())
    assert int(monitor.tokens) == counted
    assert {int(count.load_E.sum()) for count in monitor.counts.values()} == {2 * counted}
    monitor.detach()

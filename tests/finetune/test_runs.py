"""From options to a checkpoint: full, LoRA, a frozen MXFP8 base, preferences, an interruption, the command."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_neuron_moe.cli.train import _program
from hf_neuron_moe.convert import ConvertOptions, convert_checkpoint
from hf_neuron_moe.errors import ConfigError, NonFiniteWeightsError
from hf_neuron_moe.finetune import finetune, read_options, train_run as run_module
from hf_neuron_moe.finetune.train_run import TrainingInterrupted, checkpoint_to_resume
from hf_neuron_moe.finetune.trainers import StopAfterStep
from hf_neuron_moe.training import mark_complete
from tests.finetune.data_files import ROWS, losses, words, write
from tests.refusals import refused
from tests.tiny_models import tokens


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens()).logits


def test_a_run_says_that_it_writes_over_one_that_ended(models: dict[str, Path], tmp_path: Path) -> None:
    given = words(models["llama"], write(tmp_path, ROWS["text"]), tmp_path / "out", max_steps=1, save_strategy="steps")
    said = []
    for more in ([], [], ["--resume_from_checkpoint", "true"]):
        told: list[str] = []
        finetune(read_options([*given, "--save_steps", "1", *more]), told.append)
        said.append(any("holds a run that ended, and this one writes over it" in line for line in told))
        stays = [line for line in told if line.startswith("its checkpoints stay, checkpoint-1 the last")]
        assert len(stays) == said[-1]
    assert said == [False, True, False]


@pytest.mark.parametrize(("steps", "given", "logged"), [(3, {}, [1, 2, 3]), (3, {"logging_steps": 2}, [2])])
def test_a_short_run_logs_every_step_unless_told_otherwise(
    steps: int, given: dict[str, int], logged: list[int], models: dict[str, Path], tmp_path: Path
) -> None:
    found = words(models["llama"], write(tmp_path, ROWS["text"]), tmp_path / "out", max_steps=steps)
    place = found.index("--logging_steps")
    found[place : place + 2] = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    finetune(read_options(found))
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == logged


def test_full_fine_tuning_of_chats_ends_in_a_stock_checkpoint_with_a_card(
    models: dict[str, Path], tmp_path: Path
) -> None:
    file, out = write(tmp_path, ROWS["messages"]), tmp_path / "out"
    keys = {"neuron_precision": "mxfp8", "neuron_weights": "kernel", "eval_share": 0.25, "max_steps": 6}
    told: list[str] = []
    options = read_options(words(models["mixtral"], file, out, **keys, assistant_only_loss=True, packing=True))
    metrics = finetune(options, told.append)
    learned = losses(out)
    assert len(learned) == 6 and learned[-1] < learned[0] - 0.3
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert (
        "2 patched" in told[0] and "1 row of messages, 1 to evaluate on" in told[1] and told[2] == "one process on cpu"
    )
    assert "in the data" in told[1] and told[-1].endswith(f"hf-neuron-moe report {out} --open")
    before, after = (load_file(folder / "model.safetensors") for folder in (models["mixtral"], out))
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in before.items()}
    assert all(not torch.equal(after[key], before[key]) for key in after if "mlp" in key or "block_sparse" in key)
    assert torch.isfinite(logits(AutoModelForCausalLM.from_pretrained(out))).all()
    assert AutoTokenizer.from_pretrained(out).chat_template
    card = ModelCard.load(out / "README.md")
    assert card.data.tags == ["hf-neuron-moe", "trl", "sft"] and card.data.base_model is None
    for line in (
        "| precision | `mxfp8` |",
        "| patched blocks | 2 experts in mxfp8, computed by torch |",
        f"| loss | {learned[-1]:.4f} at step 6 ({learned[0]:.4f} at step 1) |",
        f"| evaluation loss | {metrics['eval_loss']:.4f} at step 6 |",
        "| saved bytes per token | ",
    ):
        assert line in card.content
    assert "inf" not in card.content


def test_lora_on_attention_and_experts_is_saved_and_merged(models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    keys: dict[str, Any] = {"lora_rank": 4, "lora_merge": True, "lora_targets": ["q_proj", "v_proj"]}
    keys["lora_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    finetune(read_options(words(models["mixtral"], write(tmp_path, ROWS["completion"]), out, max_steps=6, **keys)))
    assert losses(out)[-1] < losses(out)[0]
    adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models["mixtral"]), out)
    expected, plain = logits(adapter), logits(AutoModelForCausalLM.from_pretrained(models["mixtral"]))
    actual = logits(AutoModelForCausalLM.from_pretrained(out / "merged"))
    scale = expected.abs().max()
    assert (expected - plain).abs().max() > 1e-2 * scale, "the adapters did nothing"
    assert (actual - expected).abs().max() <= 1e-6 * scale
    assert "| LoRA | rank 4, alpha 16 on q_proj, v_proj, mlp.experts.gate_up_proj, " in (out / "README.md").read_text()


def test_lora_on_dense_layers_and_what_peft_does_not_find(models: dict[str, Path], tmp_path: Path) -> None:
    given = words(models["llama"], write(tmp_path, ROWS["text"]), tmp_path / "out", lora_rank=4)
    finetune(read_options([*given, "--lora_targets", "gate_proj", "up_proj", "down_proj", "--gradient_checkpointing"]))
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert names and all("mlp" in name for name in names)
    with refused(ConfigError, "lora_parameters", where="command line", got="'mlp.gate_up'"):
        finetune(read_options([*given, "--lora_parameters", "mlp.gate_up"]))


def test_what_only_training_refuses_names_its_line(models: dict[str, Path], tmp_path: Path) -> None:
    given = words(models["llama"], write(tmp_path, ROWS["text"]), tmp_path / "out", eval_share=0.25)
    best = ["--load_best_model_at_end", "--metric_for_best_model", "foo", "--eval_strategy", "steps"]
    for more, argument in (
        ([*best, "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1"], "metric_for_best_model"),
        (["--dataloader_drop_last", "--per_device_train_batch_size", "100"], "dataloader_drop_last"),
    ):
        with refused(ConfigError, argument, where="command line"):
            finetune(read_options([*given, *more]))
    with refused(NonFiniteWeightsError, "the model's weights", where="save_model"):
        finetune(read_options([*given, "--learning_rate", "1e30"]))


def test_lora_on_a_frozen_mxfp8_base(models: dict[str, Path], tmp_path: Path) -> None:
    model, out, told = tmp_path / "model", tmp_path / "out", []
    convert_checkpoint(models["llama"], model, ConvertOptions("mxfp8"))
    kept = {path.name: path.read_bytes() for path in model.iterdir()}
    keys = {"lora_rank": 4, "max_steps": 6, "gradient_checkpointing": True, "neuron_precision": "mxfp8"}
    finetune(read_options(words(model, write(tmp_path, ROWS["messages"]), out, **keys)), told.append)
    assert told[0] == "nothing patched: the base is frozen MX, backend torch"
    assert losses(out)[-1] < losses(out)[0]
    saved = load_file(out / "adapter_model.safetensors")
    assert saved and all("lora_" in key for key in saved)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keys", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_preferences_begin_at_the_reference_and_are_learned(
    keys: dict[str, Any], models: dict[str, Path], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    file, out = write(tmp_path, ROWS["preference"]), tmp_path / "out"
    given = words(models["llama"], file, out, method="dpo", eval_share=0.25, max_steps=6, **keys)
    metrics = finetune(read_options([*given, "--neuron_precision", "mxfp8"]))
    learned = losses(out)
    assert not [str(one.message) for one in recwarn if "checkpointing" in str(one.message)]
    # At first the model is its own reference, with the same rounding: the loss is that of a coin.
    assert learned[0] == pytest.approx(math.log(2), rel=1e-6)
    assert learned[-1] < 0.95 * learned[0] and metrics["eval_rewards/margins"] > 0
    assert "method `dpo`" in (out / "README.md").read_text()


@pytest.mark.parametrize("packing", [True, False])
def test_answers_that_are_all_cut_away_are_refused(models: dict[str, Path], tmp_path: Path, packing: bool) -> None:
    keys = {"assistant_only_loss": True, "packing": packing, "max_length": 4, "max_steps": 1}
    given = words(models["llama"], write(tmp_path, ROWS["messages"]), tmp_path / "out", **keys)
    with refused(ConfigError, "max_length", got="4, with which no row has a token to learn"):
        finetune(read_options(given))


class _PressCtrlC(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C is pressed in the second step."""
    made = run_module.make_trainer

    def make(*given: Any) -> Any:
        trainer = made(*given)
        trainer.add_callback(_PressCtrlC(2))
        return trainer

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(run_module, "make_trainer", make)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_after_the_step_and_resuming_equals_an_uninterrupted_run(
    models: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, ROWS["messages"])
    finetune(read_options(words(models["mixtral"], file, tmp_path / "whole")))
    out = tmp_path / "out"
    given = words(models["mixtral"], file, out)
    with refused(ConfigError, "resume_from_checkpoint", got="'none'"):
        finetune(read_options([*given, "--resume_from_checkpoint", "none"]))
    request.getfixturevalue("pressed")
    with pytest.raises(TrainingInterrupted, match=f"stopped after step 2, with a checkpoint in {out}"):
        finetune(read_options(given))
    assert "stopping after this step" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    finetune(read_options([*given, "--resume_from_checkpoint", "true"]))
    assert losses(out) == losses(tmp_path / "whole")
    one, two = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "whole"))
    assert all(torch.equal(one[key], two[key]) for key in two)


def test_a_second_ctrl_c_stops_at_once() -> None:
    stop = StopAfterStep()
    stop._ask(2, None)
    stop._ask(2, None)  # a launcher repeats what the terminal sent
    assert stop.asked_at is not None
    stop.asked_at -= 10
    with pytest.raises(KeyboardInterrupt):
        stop._ask(2, None)


def test_auto_resumes_from_complete_checkpoints_only(models: dict[str, Path], tmp_path: Path) -> None:
    def wish(value: str) -> str | bool | None:
        given = words(models["llama"], tmp_path / "none", tmp_path, resume_from_checkpoint=value)
        return checkpoint_to_resume(read_options(given))

    assert wish("auto") is None and wish("true") is True and wish("some/path") == "some/path"
    half = tmp_path / "checkpoint-2"
    half.mkdir()
    for name in ("trainer_state.json", "neuron_moe_saving.json"):
        (half / name).write_text("{}")
    assert wish("auto") is None
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text("{}")
    mark_complete(tmp_path / "checkpoint-4")
    assert wish("auto") is True
    (tmp_path / "checkpoint-4").rename(tmp_path / "replaced-checkpoint-4")
    assert wish("auto") is True


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("error:The following:RuntimeWarning")
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "w2"]])
@pytest.mark.slow
def test_adapters_that_peft_moves_onto_experts_are_resumed(
    models: dict[str, Path], tmp_path: Path, targets: list[str]
) -> None:
    keys: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "lora_rank": 2}
    given = functools.partial(words, models["mixtral"], write(tmp_path, ROWS["text"]), tmp_path / "out", **keys)
    finetune(read_options(given(max_steps=1, lora_targets=targets)))
    assert "down_proj" in json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_parameters"]
    keys |= {"max_steps": 2, "resume_from_checkpoint": "auto"}
    with refused(
        ConfigError, "resume_from_checkpoint", got=f"{tmp_path / 'out'}/checkpoint-1: lora_parameters ['down_proj"
    ):
        finetune(read_options(given(**{**keys, "lora_targets": ["q_proj"]})))
    finetune(read_options(given(**{**keys, "lora_targets": targets})))
    assert len(losses(tmp_path / "out")) == 2
    written, told = (tmp_path / "out" / "train_results.json").read_text(), list[str]()
    assert "train_loss" not in finetune(read_options(given(**{**keys, "lora_targets": targets})), told.append)
    assert "nothing was left to train: the checkpoint is of step 2, the last one" in told
    assert (tmp_path / "out" / "train_results.json").read_text() == written and '"train_loss"' in written


@pytest.mark.slow
def test_a_run_that_ended_within_an_epoch_trains_nothing_more(models: dict[str, Path], tmp_path: Path) -> None:
    out, told = tmp_path / "out", list[str]()
    keys: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "per_device_train_batch_size": 1}
    given = functools.partial(words, models["llama"], write(tmp_path, 4 * ROWS["text"]), out, **keys)
    finetune(read_options(given()))
    written = {name: (out / name).read_bytes() for name in ("model.safetensors", "train_results.json")}
    assert "train_loss" not in finetune(read_options(given(resume_from_checkpoint="auto")), told.append)
    assert "nothing was left to train: the checkpoint is of step 1, the last one" in told
    assert {name: (out / name).read_bytes() for name in written} == written
    state = json.loads((out / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"] < 1, (out / "checkpoint-2").exists()) == (1, True, False)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_resumed(models: dict[str, Path], tmp_path: Path) -> None:
    file, full, lora = write(tmp_path, ROWS["text"]), tmp_path / "full", tmp_path / "lora"
    keys: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    finetune(read_options(words(models["llama"], file, full, **keys)))
    finetune(read_options(words(models["llama"], file, lora, **keys, lora_rank=2)))
    keys |= {"max_steps": 2, "resume_from_checkpoint": "auto"}
    for out, model, more, got in (
        (full, "mixtral", {}, "model_type llama and mixtral here"),  # torch ends the process in the optimizer
        (full, "llama", {"lora_rank": 2}, "lora_rank 0 and 2 here"),
        (lora, "llama", {"lora_rank": 4}, "lora_rank 2 and 4 here"),
        (lora, "llama", {"lora_rank": 2, "lora_targets": ["q_proj"]}, "lora_targets ['k_proj', "),
        (lora, "llama", {"lora_rank": 2, "lora_targets": ["all-linear"]}, "loaded state dict contains"),
        (full, "llama", {"optim": "sgd"}, "optim AdamW and SGD here"),
    ):
        prefix = "" if got.startswith("loaded") else f"{out}/checkpoint-1: "
        record = (out / "neuron_moe" / "run.json").read_bytes()
        with refused(ConfigError, "resume_from_checkpoint", got=prefix + got):
            finetune(read_options(words(models[model], file, out, **keys, **more)))
        assert (out / "neuron_moe" / "run.json").read_bytes() == record or got.startswith("loaded")
    told: list[str] = []
    bf16 = {**keys, "neuron_precision": "bf16", "optim": "adamw_torch"}  # of the same class as the fused one
    finetune(read_options(words(models["llama"], file, full, **bf16)), told.append)
    assert "this run was computed in fp32, and continues in bf16" in told
    copied = Path(shutil.copytree(models["llama"], tmp_path / "copied"))
    finetune(read_options(words(copied, file, lora, **keys, lora_rank=2)), told.append)
    assert [line for line in told if "begun from" in line] == [
        f"this run was begun from {models['llama']}, and continues from {copied}"
    ]


def test_the_upload_gets_the_card(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    options = read_options(words(models["llama"], write(tmp_path, ROWS["text"]), tmp_path / "out", max_steps=1))
    made = run_module.make_trainer

    def make(*given: Any) -> Any:
        trainer = made(*given)
        options.training.push_to_hub = True  # the checks would ask the hub
        trainer.init_hf_repo = lambda **_: setattr(trainer, "hub_model_id", "me/out")
        return trainer

    def upload(**given: Any) -> None:
        assert given["repo_id"] == "me/out"
        pushed.append(sorted(path.name for path in Path(given["folder_path"]).iterdir()))

    monkeypatch.setattr("transformers.trainer.hf_api", lambda: SimpleNamespace(upload_folder=upload))

    monkeypatch.setattr(run_module, "make_trainer", make)
    finetune(options)
    assert len(pushed) == 1 and {"README.md", "model.safetensors", "tokenizer.json"} <= set(pushed[0])


@pytest.mark.slow
def test_ctrl_c_of_the_command_prints_the_command_that_resumes(models: dict[str, Path], tmp_path: Path) -> None:
    file, out = tmp_path / "my run.yaml", tmp_path / "out"
    keys = {
        "model": str(models["llama"]),
        "train_files": str(write(tmp_path, ROWS["messages"])),
        "output_dir": str(out),
    }
    keys |= {"logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 1}
    file.write_text(yaml.safe_dump(keys | {"max_steps": 100_000}), encoding="utf-8")
    child = subprocess.Popen(
        [sys.executable, "-u", "-m", "hf_neuron_moe", "train", str(file), "--seed", "1"],
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    for line in child.stdout:
        if "loss" in line:
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130 and "Traceback" not in err
    stopping, stopped, resume, last = err.splitlines()[-4:]
    assert stopping.startswith("stopping after this step") and stopped.startswith("stopped after step ")
    assert last == "interrupted"
    command = shlex.split(resume.removeprefix("resume: "))
    assert command == ["hf-neuron-moe", "train", str(file), "--seed", "1", "--resume"]
    (checkpoint,) = out.glob("checkpoint-*")
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] >= 1


@pytest.mark.parametrize(
    ("processes", "environment", "program"),
    [
        (1, {}, "hf-neuron-moe"),
        (2, {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, "torchrun --nproc-per-node 2 -m hf_neuron_moe"),
        (4, {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, "(with the same launcher) -m hf_neuron_moe"),
        (
            2,
            {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"},
            "(with the same launcher) -m hf_neuron_moe",
        ),
    ],
)
def test_the_command_that_resumes_begins_as_the_run_did(
    processes: int, environment: dict[str, str], program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _program(processes) == program


def test_the_example_script_trains(
    models: dict[str, Path], tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(repo_root / "scripts")
    import finetune as example

    example.main(str(models["mixtral"]), str(write(tmp_path, ROWS["text"])), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()

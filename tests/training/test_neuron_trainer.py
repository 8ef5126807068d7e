"""NeuronMoETrainer patches in time, and trains exactly as patch_model and the stock Trainer do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_neuron_moe import (
    NeuronMoEArguments,
    NeuronMoECallback,
    NeuronMoETrainer,
    NeuronMoETrainerMixin,
    patch_model,
)
from hf_neuron_moe.errors import ConfigError, NeuronMoEWarning, UnsupportedModelError
from hf_neuron_moe.patching.apply import report_of
from hf_neuron_moe.training.prepare import is_patched
from tests.checkpointing import NAME
from tests.refusals import refused
from tests.tiny_models import SOME_SLOW_LAYOUTS, assert_same_snapshot, snapshot, tiny_model
from tests.training.runs import SETTINGS, Rows, arguments, losses, metrics, train_logs, trainer


def stock_losses(model: nn.Module | Callable[[], nn.Module], folder: Path, **options: Any) -> list[float]:
    """Losses of transformers' own Trainer over a model, or over what a function makes."""
    made = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    options = {**SETTINGS, **options}
    run = Trainer(args=TrainingArguments(output_dir=str(folder), **options), train_dataset=Rows(), **made)
    run.train()
    return losses(run)


def same_weights(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llama", "bf16"),
        ("mixtral", "mxfp8"),
        pytest.param("llama", "mxfp8", marks=pytest.mark.slow),
        pytest.param("mixtral", "bf16", marks=pytest.mark.slow),
    ],
)
def test_losses_equal_patch_model_and_the_stock_trainer(family: str, home: str, precision: str, tmp_path: Path) -> None:
    by_hand = tiny_model(family)
    patch_model(by_hand, {"precision": precision, "weights": home})
    expected = stock_losses(by_hand, tmp_path / "stock")
    model = tiny_model(family)
    run = trainer(model, tmp_path / "own", neuron_precision=precision, neuron_weights=home)
    run.train()
    assert losses(run) == expected
    assert len(set(expected)) == 4
    same_weights(model, by_hand)


def test_accumulation_with_checkpointing_equals_stock(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1, NAME: True}
    by_hand = tiny_model("mixtral")
    patch_model(by_hand)
    expected = stock_losses(by_hand, tmp_path / "stock", **options)
    run = trainer(tiny_model("mixtral"), tmp_path / "own", **options)
    run.train()
    assert losses(run) == expected
    assert [sum(sum(m["load"]) for m in line["experts"].values()) for line in metrics(tmp_path / "own")] == [
        3 * 12 * 2 * 2  # micro-batches, tokens, experts per token, layers: recomputation is not counted
    ] * 4


def test_a_model_made_by_model_init_is_patched_each_time(tmp_path: Path) -> None:
    run = trainer(None, tmp_path / "init", model_init=lambda: tiny_model("mixtral"), neuron_weights="kernel")
    first = run.model
    assert is_patched(first)
    run.train()
    assert run.model is not first

    def by_hand() -> nn.Module:
        model = tiny_model("mixtral")
        patch_model(model, {"weights": "kernel"})
        return model

    assert losses(run) == stock_losses(by_hand, tmp_path / "stock")


def test_the_same_configuration_may_be_there_already_and_another_may_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "mxfp8"})
    before = snapshot(model)
    with refused(UnsupportedModelError, "model", "precision='bf16' instead of 'mxfp8'"):
        trainer(model, tmp_path)
    assert_same_snapshot(snapshot(model), before)
    run = trainer(model, tmp_path, neuron_precision="mxfp8")
    run.train()
    assert len(losses(run)) == 4


def test_globs_and_strict_reach_patch_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    trainer(model, tmp_path, neuron_exclude=["*.0.mlp"])
    assert not is_patched(model.model.layers[0])
    assert is_patched(model.model.layers[1])
    with refused(ConfigError, "include", got="'*.mpl'"):
        trainer(tiny_model("llama"), tmp_path, neuron_include=["*.mpl"])


def test_without_patching_it_is_the_stock_trainer(tmp_path: Path) -> None:
    run = trainer(tiny_model("mixtral"), tmp_path / "own", neuron_patch=False)
    run.train()
    assert losses(run) == stock_losses(tiny_model("mixtral"), tmp_path / "stock")
    assert not any(key.startswith("neuron/") for entry in run.state.log_history for key in entry)
    assert not (tmp_path / "own" / "neuron_moe").exists()


def test_an_optimizer_that_is_there_already_keeps_its_parameters(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    before = snapshot(model)
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with refused(UnsupportedModelError, "model", got="an unpatched model and an optimizer"):
        trainer(model, tmp_path, optimizers=optimizers, neuron_weights="kernel")
    assert_same_snapshot(snapshot(model), before)
    run = trainer(model, tmp_path, optimizers=optimizers, neuron_weights="stock")
    run.train()
    assert len(set(losses(run))) == 4


@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
def test_a_model_in_a_peft_wrapper_is_patched_inside(home: str, tmp_path: Path) -> None:
    def wrapped() -> nn.Module:
        model = tiny_model("mixtral")
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    by_hand = wrapped()
    patch_model(by_hand, {"weights": home})
    expected = stock_losses(by_hand, tmp_path / "stock")
    run = trainer(wrapped(), tmp_path / "own", neuron_weights=home)
    run.train()
    assert losses(run) == expected
    assert len(metrics(tmp_path / "own")[0]["experts"]) == 2


def test_adapters_on_fused_experts_train_as_without_the_metrics(tmp_path: Path) -> None:
    def wrapped() -> nn.Module:
        model = tiny_model("mixtral")
        patch_model(model, {"precision": "fp32"})
        torch.manual_seed(1)
        target = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=target))

    expected = stock_losses(wrapped(), tmp_path / "stock")
    # A glance at the weights within a forward would put a detached copy into peft's cache, and nothing would be learnt.
    run = trainer(wrapped(), tmp_path / "own", neuron_precision="fp32", neuron_health_steps=1)
    run.train()
    assert losses(run) == expected
    assert set(metrics(tmp_path / "own")[0]["health"]["model.layers.0.mlp.experts"]["weights"]) == {
        "gate",
        "up",
        "down",
    }


def test_adapters_on_a_dense_mlp_are_measured(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "fp32"})
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["gate_proj", "down_proj"]))
    base = {name: param.clone() for name, param in model.named_parameters() if "base_layer" in name}
    run = trainer(wrapped, tmp_path, neuron_precision="fp32")
    run.train()
    assert len(set(losses(run))) == 4
    (health,) = [line["health"] for line in metrics(tmp_path) if "health" in line]
    assert health["model.layers.0.mlp"]["weights"]["gate"]["amax"] == max(
        value.abs().max().item() for name, value in base.items() if "layers.0.mlp.gate_proj" in name
    )


@pytest.mark.parametrize("home", SOME_SLOW_LAYOUTS)
def test_a_resumed_run_equals_the_uninterrupted_one(home: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "neuron_weights": home, "neuron_health_steps": 3}
    whole = trainer(tiny_model("mixtral"), tmp_path, **options)
    whole.train()
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ["health" in line for line in lines] == [True, False, True, False]
    other = tmp_path / "neuron_moe" / "metrics.jsonl"
    other.write_text(other.read_text() + '{"step": 5, "cut off')
    model = tiny_model("mixtral")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)  # whatever is not restored would show
    resumed = trainer(model, tmp_path, **options)
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()  # as if the run had been killed while saving
    with pytest.warns(NeuronMoEWarning, match="checkpoint-4"):
        resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    again = metrics(tmp_path)  # lines of steps after the checkpoint were written anew
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    for line, first in zip(again, lines, strict=True):
        for key in ("loss", "learning_rate", "epoch", "experts", "padding_overhead"):
            assert line[key] == first[key]
        assert line.get("health") == first.get("health")


class TestCallback:
    """NeuronMoECallback with a Trainer that knows nothing of this package."""

    def run(self, model: nn.Module, folder: Path, callback: NeuronMoECallback, *, passed: bool = False) -> Trainer:
        options = TrainingArguments(output_dir=str(folder), **SETTINGS)
        callbacks = [callback] if passed else []
        run = Trainer(model=model, args=options, train_dataset=Rows(), callbacks=callbacks)
        if not passed:
            callback.watch(run)
        return run

    def test_it_measures_what_the_trainer_of_the_package_does(self, tmp_path: Path) -> None:
        other = trainer(tiny_model("mixtral"), tmp_path / "other")
        other.train()
        for passed in (False, True):
            model = tiny_model("mixtral")
            patch_model(model)
            run = self.run(model, tmp_path / "own", NeuronMoECallback(), passed=passed)
            run.train()
            for mine, theirs in zip(train_logs(run), train_logs(other), strict=True):
                assert list(mine) == list(theirs) or set(mine) == set(theirs)
                assert {k: v for k, v in mine.items() if "per_second" not in k} == {
                    k: v for k, v in theirs.items() if "per_second" not in k
                }

    def test_an_unpatched_model_is_refused_with_what_to_do(self, tmp_path: Path) -> None:
        run = self.run(tiny_model("llama"), tmp_path, NeuronMoECallback())
        with refused(UnsupportedModelError, "model", "Call patch_model"):
            run.train()

    def test_it_patches_while_no_parameter_is_lost(self, tmp_path: Path) -> None:
        expected = trainer(tiny_model("llama"), tmp_path / "expected", neuron_weights="kernel")
        expected.train()
        config = {"weights": "kernel"}
        early = self.run(tiny_model("llama"), tmp_path / "early", NeuronMoECallback(config), passed=True)
        early.train()  # patched when the Trainer was made
        assert losses(early) == losses(expected)
        model = tiny_model("llama")
        late = self.run(model, tmp_path / "late", NeuronMoECallback(config))
        with refused(UnsupportedModelError, "model", got="an unpatched model and an optimizer"):
            late.train()
        assert not is_patched(model)
        stock = self.run(model, tmp_path / "stock", NeuronMoECallback({"weights": "stock"}))
        stock.train()
        assert len(set(losses(stock))) == 4

    def test_its_own_options_are_checked(self) -> None:
        with refused(ConfigError, "health_steps"):
            NeuronMoECallback(health_steps=-2)


def test_hooks_are_gone_after_training_and_after_an_exception(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    run = trainer(model, tmp_path)
    before = snapshot(model)
    hooks = {key: value for key, value in before.items() if key.startswith("hooks ")}
    run.train()
    assert {key: value for key, value in snapshot(model).items() if key.startswith("hooks ")} == hooks
    run.train_dataset = [{"input_ids": torch.tensor([10**6]), "labels": torch.tensor([1])}] * 8
    with pytest.raises(IndexError):
        run.train()
    assert {key: value for key, value in snapshot(model).items() if key.startswith("hooks ")} == hooks


def test_hooks_of_a_callback_are_gone_after_a_training_that_follows_one_that_failed(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    patch_model(model)
    hooks = {key: value for key, value in snapshot(model).items() if key.startswith("hooks ")}
    options = TrainingArguments(output_dir=str(tmp_path), **{**SETTINGS, "max_steps": 1})
    run = Trainer(model=model, args=options, train_dataset=[{"input_ids": torch.tensor([10**6]), "labels": 1}] * 2)
    NeuronMoECallback().watch(run)
    with pytest.raises(IndexError):
        run.train()
    run.train_dataset = Rows()
    run.train()
    assert {key: value for key, value in snapshot(model).items() if key.startswith("hooks ")} == hooks


def test_what_dpo_rewards_is_in_the_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model)
    callback, state, control = NeuronMoECallback(), TrainerState(), TrainerControl()
    state.log_history.append({})
    callback.on_train_begin(arguments(tmp_path), state, control, model=model)
    logs = {"loss": 1.0, "rewards/margins": 0.5, "rewards/accuracies": 0.75}
    callback.on_log(arguments(tmp_path), state, control, logs=logs)
    callback.on_train_end(arguments(tmp_path), state, control)
    (line,) = metrics(tmp_path)
    assert (line["reward_margin"], line["reward_accuracy"]) == (0.5, 0.75)


def test_evaluations_leave_the_figures_to_the_next_training_log(tmp_path: Path) -> None:
    runs = []
    for strategy in ("no", "steps"):
        given = arguments(tmp_path / strategy, max_steps=2, logging_steps=2, eval_strategy=strategy, eval_steps=1)
        run = NeuronMoETrainer(model=tiny_model("llama"), args=given, train_dataset=Rows(), eval_dataset=Rows())
        run.train()
        runs.append(run)
    plain, evaluated = (train_logs(run)[0] for run in runs)
    assert evaluated.keys() == plain.keys() and any(key.startswith("neuron") for key in plain)
    others = [entry for entry in runs[1].state.log_history if "eval_loss" in entry]
    assert len(others) == 2 and not any(key.startswith("neuron") for entry in others for key in entry)


def test_trainer_classes_with_constructors_of_their_own(tmp_path: Path) -> None:
    class Passing(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Building(Trainer):
        """Makes its model itself, as TRL's trainers do when they get a name."""

        def __init__(
            self, model: str, reference: Any = None, args: TrainingArguments | None = None, **named: Any
        ) -> None:
            super().__init__(model=tiny_model(model), args=args, **named)

    class NeuronPassing(NeuronMoETrainerMixin, Passing):
        pass

    class NeuronBuilding(NeuronMoETrainerMixin, Building):
        pass

    expected = trainer(tiny_model("llama"), tmp_path, neuron_precision="mxfp8")
    expected.train()
    options = arguments(tmp_path, neuron_precision="mxfp8")
    runs = (
        NeuronPassing(tiny_model("llama"), options, train_dataset=Rows()),
        NeuronBuilding("llama", None, options, train_dataset=Rows()),
    )
    for run in runs:
        run.train()
        assert losses(run) == losses(expected)


class WithReference(Trainer):
    """Makes a reference where none is given, as TRL's trainers do."""

    def __init__(self, model: nn.Module, ref_model: nn.Module | None = None, **options: Any) -> None:
        self.ref_model = tiny_model("llama") if ref_model is None else ref_model
        super().__init__(model=model, **options)


@pytest.mark.parametrize("globs", [{"include": ["*.1.*"]}, {"exclude": ["*.1.*"]}, {}])
def test_a_reference_is_patched_where_the_model_is(globs: dict[str, list[str]], tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "mxfp8"}, **globs)  # type: ignore[arg-type]
    kind = type("Own", (NeuronMoETrainerMixin, WithReference), {})
    run = kind(model=model, args=TrainingArguments(str(tmp_path), **SETTINGS), train_dataset=Rows())
    mine, reference = report_of(model), report_of(run.ref_model)
    assert mine is not None and reference is not None
    assert [entry.status for entry in mine.entries] == [entry.status for entry in reference.entries]


def test_a_reference_is_patched_in_the_part_that_the_model_is(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model.model, {"precision": "mxfp8"}, exclude=["layers.0.*"])
    kind = type("Own", (NeuronMoETrainerMixin, WithReference), {})
    run = kind(model=model, args=TrainingArguments(str(tmp_path), **SETTINGS), train_dataset=Rows())
    mine, reference = report_of(model.model), report_of(run.ref_model.model)
    assert mine is not None and reference is not None and mine.config == reference.config
    assert [entry.name for entry in reference.patched] == [entry.name for entry in mine.patched] == ["layers.1.mlp"]


@pytest.mark.parametrize("given", [True, False])
def test_a_reference_that_was_given_stays_as_it_is(given: bool, tmp_path: Path) -> None:
    kind = type("Own", (NeuronMoETrainerMixin, WithReference), {})
    options = {"args": arguments(tmp_path), "train_dataset": Rows()}
    run = kind(model=tiny_model("llama"), ref_model=tiny_model("llama") if given else None, **options)
    assert is_patched(run.model) and is_patched(run.ref_model) is not given
    run.ref_model = tiny_model("llama")
    assert not is_patched(run.ref_model), "only the constructor's is a twin of the model"


def test_a_reference_that_a_trainer_patches_itself_stays_as_it_is(tmp_path: Path) -> None:
    class WithPatchedReference(Trainer):
        def __init__(self, model: nn.Module, **options: Any) -> None:
            reference = tiny_model("llama")
            patch_model(reference, {"precision": "fp32"})
            self.ref_model = reference
            super().__init__(model=model, **options)

    kind = type("Own", (NeuronMoETrainerMixin, WithPatchedReference), {})
    run = kind(model=tiny_model("llama"), args=arguments(tmp_path, neuron_precision="mxfp8"), train_dataset=Rows())
    mine, reference = report_of(run.model), report_of(run.ref_model)
    assert mine is not None and mine.config.precision == "mxfp8"
    assert reference is not None and reference.config.precision == "fp32"


def test_arguments_without_our_fields_leave_a_patched_model_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model, {"precision": "mxfp8"})
    run = NeuronMoETrainer(
        model=model, args=TrainingArguments(output_dir=str(tmp_path), **SETTINGS), train_dataset=Rows()
    )
    run.train()
    expected = trainer(tiny_model("llama"), tmp_path, neuron_precision="mxfp8")
    expected.train()
    assert losses(run) == losses(expected)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator takes part by itself")
def test_processes_that_would_train_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun without use_cpu on CPUs: accelerate sees one process in each, and no gradient is averaged."""
    run = trainer(tiny_model("llama"), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(run.args, "use_cpu", False)
    with refused(ConfigError, "use_cpu", "true for 2 processes on CPUs", got="False, with which each"):
        NeuronMoETrainer(model=run.model, args=run.args, train_dataset=Rows())
    run.args = SimpleNamespace(device=torch.device("mps"), use_cpu=False)  # no processor
    run._refuse_lone_processes()


def test_tokens_count_once_under_tensor_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes have the same rows, and transformers adds up what all of them see."""
    run = trainer(tiny_model("llama"), tmp_path, include_num_input_tokens_seen="all")
    monkeypatch.setattr(run, "get_tp_size", lambda: 2)
    monkeypatch.setattr(run.accelerator, "gather", lambda count: torch.stack([count, count]))
    for _ in range(2):
        run._track_num_input_tokens({"input_ids": torch.zeros(3, 5)})
    assert run.state.num_input_tokens_seen == 30


def word_tokenizer() -> Any:
    """Return one with a token per word w3 to w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 64)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("given", ["name", "model", "patched model", "model to stay stock"])
def test_a_reference_that_trl_loads_rounds_like_the_model(given: str, tmp_path: Path) -> None:
    """GRPO, RLOO, KTO and DPO load it by the model's name: without the patch they start with a divergence."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    arguments_of = dataclass(type("Arguments", (NeuronMoEArguments, trl.GRPOConfig), {}))
    trainer_of = type("NeuronGRPOTrainer", (NeuronMoETrainerMixin, trl.GRPOTrainer), {})
    home = str(tmp_path / "model")
    tiny_model("mixtral").save_pretrained(home)
    model: Any = home if given == "name" else MixtralForCausalLM.from_pretrained(home)
    options: dict[str, Any] = {"neuron_precision": "mxfp8", "neuron_exclude": ["*.0.*"], "neuron_weights": "kernel"}
    if given == "patched model":
        patch_model(model, {"precision": "mxfp8", "weights": "kernel"}, exclude=["*.0.*"])
        options, arguments_of = {}, trl.GRPOConfig
    elif given == "model to stay stock":
        options = {"neuron_patch": False}
    run = trainer_of(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=arguments_of(str(tmp_path / "run"), beta=0.1, use_cpu=True, bf16=False, report_to="none", **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w3 w4", "w5 w6"]}),
        processing_class=word_tokenizer(),
    )
    mine, reference = report_of(run.model), report_of(run.ref_model)
    if given == "model to stay stock":
        assert mine is None and reference is None
        return
    assert mine is not None and reference is not None and mine.config == reference.config
    assert [entry.status for entry in mine.entries] == [entry.status for entry in reference.entries]
    with torch.no_grad():
        one, other = (each(torch.arange(3, 19)[None]).logits for each in (run.model.eval(), run.ref_model.eval()))
    assert torch.equal(one, other)


def test_trl_sft_trainer(tmp_path: Path) -> None:
    """With an adapter configuration, which SFTTrainer applies itself, after the model was patched."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizer = word_tokenizer()
    text = datasets.Dataset.from_list(
        [{"text": " ".join(f"w{(7 * n + k) % 61 + 3}" for k in range(12))} for n in range(16)]
    )

    @dataclass
    class Arguments(NeuronMoEArguments, trl.SFTConfig):
        pass

    class NeuronSFTTrainer(NeuronMoETrainerMixin, trl.SFTTrainer):
        pass

    options = {**SETTINGS, "max_length": 16, "bf16": False}
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    by_hand = tiny_model("mixtral")
    patch_model(by_hand, {"precision": "mxfp8", "weights": "kernel"})
    stock = trl.SFTTrainer(
        model=by_hand,
        args=trl.SFTConfig(output_dir=str(tmp_path / "stock"), **options),
        train_dataset=text,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    stock.train()
    run = NeuronSFTTrainer(
        model=tiny_model("mixtral"),
        args=Arguments(output_dir=str(tmp_path / "own"), neuron_precision="mxfp8", neuron_weights="kernel", **options),
        train_dataset=text,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    run.train()
    assert losses(run) == losses(stock)
    first = train_logs(run)[0]
    assert first["neuron/sqnr_weights_db"] > 25
    assert "mean_token_accuracy" in first  # SFTTrainer's own logs are there too
    written = json.loads((tmp_path / "own" / "neuron_moe" / "run.json").read_text())
    assert written["config"]["precision"] == "mxfp8"


def test_health_is_measured_in_a_number_of_steps_or_never() -> None:
    assert NeuronMoECallback(health_steps=0).health_steps == 0
    for wrong in (-1, True, 1.5):
        with refused(ConfigError, "health_steps", got=repr(wrong)):
            NeuronMoECallback(health_steps=wrong)  # type: ignore[arg-type]


def test_reporters_see_the_figures_of_a_callback_that_watches(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append({key for key in logs if key.startswith("neuron/")})

    model = tiny_model("llama")
    patch_model(model)
    options = TrainingArguments(output_dir=str(tmp_path), **{**SETTINGS, "max_steps": 1})
    run = Trainer(model=model, args=options, train_dataset=Rows(), callbacks=[Reporter()])
    callback = NeuronMoECallback(health_steps=0)
    assert callback.watch(run) is callback.watch(run) is callback
    run.train()
    assert "neuron/tokens_per_second" in seen[0] and len(metrics(tmp_path)) == 1
    assert run.callback_handler.callbacks.count(callback) == 1
    assert "neuron/sqnr_weights_db" not in seen[0], "0 steps: never, whatever the default is"


def test_a_callback_moves_no_weights_of_an_optimizer_that_is_there(tmp_path: Path) -> None:
    model = tiny_model("llama")
    made = torch.optim.SGD(model.parameters(), lr=0.1), None
    options = TrainingArguments(output_dir=str(tmp_path), **SETTINGS)
    with refused(UnsupportedModelError, "model", got="an unpatched model and an optimizer"):
        Trainer(model=model, args=options, optimizers=made, callbacks=[NeuronMoECallback({"weights": "kernel"})])


def test_other_processes_write_no_files(tmp_path: Path) -> None:
    model = tiny_model("llama")
    patch_model(model)
    for zero in (False, True):
        callback = NeuronMoECallback()
        state = TrainerState(is_world_process_zero=zero)
        callback.on_train_begin(arguments(tmp_path), state, TrainerControl(), model=model)
        callback.on_train_end(arguments(tmp_path), state, TrainerControl())
        assert (tmp_path / "neuron_moe" / "run.json").exists() is zero


def test_callbacks_that_mix_weights_of_two_layouts(tmp_path: Path) -> None:
    """gpt-oss has the same shapes in both layouts: TRL would mix columns of gate with others of up."""
    callbacks = pytest.importorskip("trl.trainer.callbacks", reason="trl is not installed")

    def prepared(callback: Any, home: str) -> None:
        options = {"neuron_precision": "fp32", "neuron_weights": home, "callbacks": [callback]}
        trainer(tiny_model("gpt_oss"), tmp_path, **options)

    reference = tiny_model("gpt_oss")
    for callback in (callbacks.SyncRefModelCallback(reference, None), callbacks.BEMACallback()):
        with refused(ConfigError, "neuron_weights", f"{type(callback).__name__}, which writes"):
            prepared(callback, "kernel")
        prepared(callback, "stock")
    patch_model(reference, {"precision": "fp32", "weights": "kernel"})
    prepared(callbacks.SyncRefModelCallback(reference, None), "kernel")

"""finetune.py's options: every file of configs/, overrides, and what is refused with which hint."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import finetune_unknown
import pytest
from finetune_model import patch, with_adapters
from finetune_options import Options, known_options, parse, read_yaml
from make_tiny_model import tiny_config
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import ModelConfig, ScriptArguments, SFTConfig

from hf_neuron_moe import patch_model
from hf_neuron_moe.errors import ConfigError, UnsupportedModelError, nearest
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
FAMILY = {
    "llama-3-8b": "llama",
    "qwen3-30b-a3b": "qwen3_moe",
    "mixtral-8x7b": "mixtral",
    "gpt-oss-20b": "gpt_oss",
    "smollm2-135m": "llama",
    "smollm2-gpt-oss": "gpt_oss",
    "smollm2-mixtral": "mixtral",
    "tiny-llama": "llama",
    "tiny-mixtral": "mixtral",
}
"""Model family of each configuration file; its tiny twin stands in for it here."""


def options_of(name: str, *overrides: str) -> Options:
    return parse([str(ROOT / "configs" / f"{name}.yaml"), "--use_cpu", *overrides])


def test_every_file_has_a_family() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(FAMILY)


@pytest.mark.parametrize("name", FAMILY)
def test_a_configuration_parses_and_its_family_is_patched_as_it_says(name: str) -> None:
    options = options_of(name)
    written = read_yaml(ROOT / "configs" / f"{name}.yaml")
    for part in (options.model, options.data, options.lora):
        assert all(getattr(part, key) == value for key, value in written.items() if hasattr(part, key))
    assert options.training.learning_rate == written["learning_rate"]
    assert {str(path) for path in options.data.train_files} == {"data/sotu/train.jsonl"}
    model = AutoModelForCausalLM.from_config(tiny_config(FAMILY[name]))
    report = patch(model, options.training, options.lora)
    assert report is not None
    assert len(report.patched) == 2 and not report.refused and not report.skipped
    assert report.config.precision == options.training.neuron_precision
    trained = [key for key, param in with_adapters(model, options.lora).named_parameters() if param.requires_grad]
    assert trained
    assert all("lora_" in key for key in trained) == bool(options.lora.lora_rank)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults() -> None:
    options = options_of("tiny-mixtral", "--max_steps", "3", "--neuron-precision", "mxfp8", "--lora_targets", "q_proj")
    assert options.training.max_steps == 3
    assert options.training.neuron_precision == "mxfp8"
    assert options.training.per_device_train_batch_size == 4
    assert options.training.weight_decay == 0.0
    assert options.lora.lora_targets == ["q_proj"]
    again = options_of("tiny-mixtral", "--learning_rate=1e-4")
    assert again.training.learning_rate == 1e-4


def test_values_are_of_their_fields_types(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    # YAML 1.1 reads 1e-4 as text; a single name stands for a list of one.
    text = "model: m\ntrain_files: a.jsonl\nlearning_rate: 1e-4\nweight_decay: 0\nuse_cpu: true\nreport_to: none\n"
    file.write_text(text + "gradient_checkpointing_kwargs: {use_reentrant: false}\n", encoding="utf-8")
    options = parse([str(file)])
    assert options.training.learning_rate == 1e-4
    assert isinstance(options.training.weight_decay, float)
    assert options.data.train_files == ["a.jsonl"]
    assert options.training.gradient_checkpointing_kwargs == {"use_reentrant": False}


@pytest.mark.parametrize(
    ("text", "argument", "says"),
    [
        ("max_stepz: 3", "key", "Did you mean 'max_steps'"),
        ("neuron_precison: mxfp8", "key", "Did you mean 'neuron_precision'"),
        ("lora_target: [q_proj]", "key", "Did you mean 'lora_targets'"),
        ("packing: true", "key", r"'packing'\. packing is an option of TRL\. Remove it: text is always packed here"),
        ("max_length: 64", "key", r"'max_length'\. TRL's max_length is block_length here\.$"),
        ("max_seq_length: 64", "key", r"'max_seq_length'\. TRL's max_seq_length is block_length here\.$"),
        ("dataset_text_field: body", "key", r"TRL's dataset_text_field is text_column here\.$"),
        ("lora_r: 8", "key", r"TRL's lora_r is lora_rank here\.$"),
        ("r: 8", "key", r"peft's r is lora_rank here\.$"),
        ("target_modules: [q_proj]", "key", r"peft's target_modules is lora_targets here\.$"),
        ("pad_token: x", "key", r"pad_token is an option of TRL's SFTTrainer\. Remove it"),
        ("colour: red", "key", r"'colour'\. Remove or rename it\.$"),
        ("deepspeed: ds.json", "deepspeed", r"got 'ds\.json'\. Install it"),
        ("learning_rate: -1.0", "learning_rate", r"got -1\.0"),
        ("learning_rate: .nan", "learning_rate", "got nan"),
        ("max_steps: ten", "max_steps", "got 'ten'"),
        ("max_steps: 1.5", "max_steps", "got 1.5"),
        ("use_cpu: maybe", "use_cpu", "got 'maybe'"),
        ("lora_merge: 3", "lora_merge", "got 3"),
        ("- a\n- b", "content", "got a list"),
        ("a: [1", "content", "got while parsing a flow sequence"),
        ("neuron_precision: mxfp9", "precision", "mxfp9.*Did you mean 'mxfp8'"),
        ("neuron_activations: minimul", "activations", "minimul"),
        ("dtype: float23", "dtype", "Did you mean 'float32'"),
        ("train_files: [a.txt]\ndataset: b", "the text", "got both"),
        ("lora_rank: -1", "lora_rank", "got -1"),
        ("lora_merge: true", "lora_merge", "got no lora_rank"),
        ("lora_rank: 2\nlora_dropout: 0.1\nlora_parameters: [x]", "lora_dropout", ""),
        ("eval_share: 1.0", "eval_share", ""),
        ("block_length: 1", "block_length", ""),
        ("eval_strategy: sometimes", "training options", "sometimes"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, argument: str, says: str) -> None:
    file = tmp_path / "a.yaml"
    needed = "" if text.startswith(("-", "a:")) else "model: m\nreport_to: none\n"
    needed += "" if "train_files" in text or not needed else "train_files: [a.txt]\n"
    file.write_text(needed + text + "\n", encoding="utf-8")
    with refused(ConfigError, argument, says):
        parse([str(file)])


def test_what_the_command_line_may_not_say(tmp_path: Path) -> None:
    for option in ("--max_step", "--max-step"):  # no abbreviations: they are misspellings
        with refused(ConfigError, "option", "Did you mean 'max_steps'"):
            options_of("tiny-llama", option, "3")
    with refused(ConfigError, "option", "an option of TRL's SFT", got="--assistant_only_loss"):
        options_of("tiny-llama", "--assistant_only_loss", "true")
    with refused(ConfigError, "option", "peft's target_modules is lora_targets", got="--target_modules"):
        options_of("tiny-llama", "--target_modules", "q_proj")
    with refused(ConfigError, "file"):
        parse([str(tmp_path / "none.yaml")])
    with refused(ConfigError, "model", got="nothing"):
        parse(["--train_files", "a.txt"])
    with refused(ConfigError, "the text", got="neither"):
        parse(["--model", "m"])


def test_names_of_trl_are_its_own_and_not_ours() -> None:
    theirs = {f.name for kind in (SFTConfig, ModelConfig, ScriptArguments) for f in dataclasses.fields(kind)}
    known = known_options()
    named = {*finetune_unknown._NAMES, *finetune_unknown._OTHERS}
    assert named <= theirs and not named & set(known)
    others = finetune_unknown._OLD_NAMES | finetune_unknown._PEFT_NAMES
    assert set(finetune_unknown._PEFT_NAMES) <= {f.name for f in dataclasses.fields(LoraConfig)}
    assert not set(others) & (set(known) | named)
    assert {*finetune_unknown._NAMES.values(), *others.values()} <= set(known)


def test_only_a_name_that_is_really_near_is_suggested() -> None:
    known = known_options()
    for name in ("packing", "assistant_only_loss", "batch_size", "grad_accum"):
        assert nearest(name, known) == ""
    assert nearest("learning_rte", known) == " Did you mean 'learning_rate'?"


def test_checkpointing_is_asked_for_without_a_warning_by_either_name() -> None:
    """transformers 5.23 renames it; the files have the name that all supported releases know."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        options = options_of("mixtral-8x7b", "--gradient_checkpointing_kwargs", '{"use_reentrant": false}')
        assert options.training.gradient_checkpointing
        assert options.training.gradient_checkpointing_kwargs == {"use_reentrant": False}
        with_adapters(AutoModelForCausalLM.from_config(tiny_config("mixtral")), options.lora)
        assert not options_of("mixtral-8x7b", "--gradient_checkpointing", "false").training.gradient_checkpointing
        if "activation_checkpointing" in known_options():
            off = options_of("mixtral-8x7b", "--activation_checkpointing", "false")
            assert not off.training.gradient_checkpointing, "the command line wins, by either name"


def test_adapters_that_could_not_be_saved_are_refused_before_training() -> None:
    options = options_of("tiny-llama", "--lora_rank", "2", "--lora_parameters", "mlp.down_proj", "--lora_dropout", "0")
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    patch_model(model, {"weights": "kernel"})
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        with_adapters(model, options.lora)


def test_help_shows_examples_own_options_and_all_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            parse([flag])
        assert stop.value.code == 0
    short, whole = capsys.readouterr().out.split("usage:")[1:]
    for text in ("configs/smollm2-135m.yaml --max_steps 10", "--lora_rank", "--neuron_precision", "--learning_rate"):
        assert text in short and text in whole
    assert "--no_neuron_patch" not in short + whole and "--neuron_patch" in short
    assert "--adam_beta1" in whole and "--adam_beta1" not in short
